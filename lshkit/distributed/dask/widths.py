"""Rules for the bandwidth of rows that are spread over blocks."""

from __future__ import annotations

import numpy as np

from lshkit.distributed.dask._dask import Client
from lshkit.distributed.dask.blocks import RowBlocks, check_length, results_of
from lshkit.distributed.dask.tasks import task
from lshkit.kde import bandwidth as bandwidths
from lshkit.kde.arguments import as_rows, as_weights, of_unit_size
from lshkit.kde.deviations import effective_rows
from lshkit.kde.estimator import LSHKernelDensity

N_ROWS = 2**16  # of which a rule takes standard deviations
SUPPORTED = "scott", "silverman"


def widths_of(
    rule: str, blocks: RowBlocks, lengths: list[int], seed: int, client: Client
) -> np.ndarray:
    """A rule's bandwidths, float64 `(n_features,)`.

    The standard deviations of at most N_ROWS rows, chosen by their place among all rows: the same
    for any chunking, and those of all rows where there are no more. The factor is that of all rows.
    """
    if rule not in SUPPORTED:
        raise ValueError(
            f"bandwidth={rule!r} sees all rows at once and is not supported on Dask: fit an "
            "LSHKernelDensity with it on as many rows as fit into memory, and pass its bandwidth_ "
            "here ('scott' and 'silverman' are supported)"
        )
    n = sum(lengths)
    places = np.arange(n)
    if n > N_ROWS:
        rng = np.random.default_rng([seed, 7])
        places = np.sort(rng.choice(n, N_ROWS, replace=False, shuffle=False))
    ends = np.cumsum(lengths)
    take, tasks = task(_take), []
    for rows, weights, begin, end in zip(
        blocks.rows, blocks.weights, ends - lengths, ends, strict=True
    ):
        some = places[(places >= begin) & (places < end)] - begin
        if len(some) or weights is not None:
            tasks.append(take(rows, weights, int(end - begin), some))
    found = results_of(client, tasks)
    X = as_rows(LSHKernelDensity(), np.concatenate([x for x, *_ in found]), True, "gaussian")
    if blocks.weights[0] is None:
        return bandwidths.of_deviations(rule, X, None) * _factor(n, len(X), X.shape[1])
    given = as_weights(np.concatenate([w for _, w, *_ in found]), len(X))
    widths = bandwidths.of_deviations(rule, X, of_unit_size(given))
    if n > N_ROWS:
        total, squares = (sum(x[i] for x in found) for i in (2, 3))
        widths *= _factor(total**2 / squares, effective_rows(X, given), X.shape[1])
    return widths


def _factor(effective: float, of_sample: float, n_features: int) -> float:
    """What the rule's factor becomes for all rows, from that of a sample."""
    return float((effective / of_sample) ** (-1 / (n_features + 4)))


def _take(
    rows: object, weights: object, n: int, places: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None, float, float]:
    """Some of a block's n rows and their weights; the sum of all weights and of their squares."""
    check_length(rows, n)
    some = np.asarray(rows)[places]
    if weights is None:
        return some, None, 0.0, 0.0
    values = np.asarray(weights, np.float64)
    return some, values[places], float(values.sum()), float((values**2).sum())
