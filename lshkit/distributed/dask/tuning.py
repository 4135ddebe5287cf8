"""Shards that keep an accuracy of their sum, as `lshkit.kde.pilot` does for rows in one place."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np

from lshkit import checks
from lshkit.distributed.dask import shards, tolerance
from lshkit.distributed.dask._dask import Client, Delayed
from lshkit.distributed.dask.blocks import results_of
from lshkit.distributed.dask.kept_rows import KeptRows
from lshkit.distributed.dask.tasks import constant, task
from lshkit.kde.method import Accuracy

N_TRIES = 3  # to tune the shards, each for half the error of the last


class Asked(NamedTuple):
    """negligible: log of the kernel mean below which errors relative to it are enough."""

    algorithm: str
    accuracy: Accuracy
    negligible: float


class Shards(NamedTuple):
    """Shards on the workers, and what the client knows of them.

    least_error: relative, which all estimates state at least; None where they are exact. nbytes:
    beside the rows.
    """

    shards: list[Delayed]
    log_weight: float
    nbytes: int
    least_error: float | None
    report: dict[str, Any]


def shards_of(
    client: Client,
    kept: KeptRows,
    of_kernel: tuple[str, int, np.ndarray],
    asked: Asked | None,
    seed: int,
    n_jobs: int | None,
) -> Shards:
    """Shards that keep what is asked of their sum. asked: None for exact ones.

    of_kernel: its name, n_bits and the bandwidths.
    """
    largest = kept.largest_weight
    exponent = 0 if largest == 1 else int(np.frexp(largest)[1])
    kernel = shards.Kernel(*of_kernel, exponent, n_jobs)
    report: dict[str, Any] = {"n_samples": kept.n_rows}
    queries = None if asked is None else kept.pilot_rows(client)
    if asked is None or queries is None or len(queries) == 0:
        made = exact_shards(client, kept.blocks, kernel)
    else:
        made, found = tuned_shards(client, kept.blocks, kernel, queries, asked, seed)
        report |= found
    facts = results_of(client, [x.facts() for x in made])
    report["shards"] = [{"algorithm": x.algorithm, "reason": x.reason} for x in facts]
    return Shards(
        made,
        float(np.log(sum(x.weight for x in facts))),
        sum(x.nbytes for x in facts),
        None if all(x.exact for x in facts) else report["least_error"],
        report,
    )


def exact_shards(client: Client, rows: list[Delayed], kernel: shards.Kernel) -> list[Delayed]:
    make = task(shards.exact_shard)
    return list(client.persist([make(x, kernel) for x in rows]))


def tuned_shards(
    client: Client,
    rows: list[Delayed],
    kernel: shards.Kernel,
    queries: np.ndarray,
    asked: Asked,
    seed: int,
) -> tuple[list[Delayed], dict[str, Any]]:
    """Shards on the workers, and a report. queries: the pilot's rows, as given."""
    given, common = constant(queries), constant(kernel)
    sums_of = task(shards.exact_sums)
    sums = list(client.persist([sums_of(x, common, given) for x in rows]))
    of_shards = results_of(client, sums)
    exact = shards.combined(of_shards)
    accuracy, negligible = asked.accuracy, asked.negligible
    if negligible > -np.inf:
        negligible += np.log(sum(results_of(client, [x.weight(kernel.exponent) for x in rows])))
    least = tolerance.least_total(exact, negligible)
    k = tolerance.shrinkage(of_shards, exact, least)
    rtol = tolerance.of_shard(accuracy, k)
    make, answer = task(shards.tuned_shard), task(shards.held_out_answer)
    seeds = np.random.default_rng([seed, 9]).integers(2**31 - 1, size=len(rows))
    for _ in range(N_TRIES):
        aim = shards.Aim(asked.algorithm, accuracy._replace(rtol=rtol), least)
        parts = zip(rows, seeds.tolist(), sums, strict=True)
        made = [make(x, common, shard_seed, aim, given, of) for x, shard_seed, of in parts]
        made = list(client.persist(made))
        got = shards.combined(results_of(client, [answer(x, given) for x in made]))
        trial = tolerance.Trial(exact, got, negligible)
        report = {"shrinkage": k, "rtol": rtol, "error": trial.mean}
        report["least_error"] = trial.least_error()
        if trial.keeps(accuracy):
            return made, report
        rtol /= 2
    if asked.algorithm == "auto":
        made = exact_shards(client, rows, kernel)
        return made, report | dict.fromkeys(("rtol", "error", "least_error"), 0.0)
    warnings.warn(
        f"algorithm={asked.algorithm!r} has a mean relative error of {trial.mean:.2g} on the "
        f"pilot's queries, and does not keep rtol={accuracy.rtol:g}: 'auto' would choose another",
        stacklevel=checks.outside(),
    )
    return made, report
