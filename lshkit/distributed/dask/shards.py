"""Shards: blocks of rows that stay on their workers, and what each adds to a kernel sum.

A shard answers with `Sums` whose `squares` are variances: the contributions of all shards, which
are independent, are added up in log space.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from sklearn.base import BaseEstimator

from lshkit.distributed.dask.kept_rows import Rows
from lshkit.kde.arguments import as_queries, core_threads
from lshkit.kde.brute import BruteForce
from lshkit.kde.method import Accuracy, Method
from lshkit.kde.pilot import Pilot, pick
from lshkit.kde.sums import LOWEST, Sums
from lshkit.kde.training import Training, training_of

LEAST_QUERIES = 64  # that a shard is tuned for


class Kernel(NamedTuple):
    """What all shards have in common."""

    name: str
    n_bits: int
    widths: np.ndarray
    exponent: int  # weights are divided by 2 to the power of it
    n_jobs: int | None

    def training(self, rows: Rows, part: slice, seed: int = 0) -> Training | None:
        """The `Training` of some rows; None where none of them counts."""
        X, weights = rows.X[part], rows.weights
        if weights is None and self.exponent:
            weights = np.ones(len(rows.X))  # beside blocks with weights
        if weights is not None:
            weights = np.ldexp(weights[part], -self.exponent)
        if len(X) == 0 or (weights is not None and not weights.any()):
            return None
        return training_of(self.name, self.n_bits, self.widths, X, weights, seed)


class Aim(NamedTuple):
    """What a shard's method is chosen for."""

    algorithm: str
    accuracy: Accuracy  # of its own rows
    least: float  # log of the sum below which an error relative to it is enough


class Facts(NamedTuple):
    """What the client knows of a shard. weight: of all its rows; nbytes: beside the rows."""

    algorithm: str
    reason: str
    weight: float
    nbytes: int
    exact: bool


class Shard:
    """Rows, the method that estimates sums over them, and the pilot's rows, summed exactly."""

    def __init__(
        self, rows: Rows, kernel: Kernel, method: Method | None, reason: str = "exact"
    ) -> None:
        self.rows, self.kernel, self.method, self.reason = rows, kernel, method, reason
        rest = kernel.training(rows, slice(rows.n_others, None))
        self.of_pilot = None if rest is None else BruteForce(rest)

    @property
    def methods(self) -> list[Method]:
        return [x for x in (self.method, self.of_pilot) if x is not None]

    def answer(self, X: np.ndarray, batch_size: int) -> Sums:
        """Sums over all rows, and their variances, for queries as given."""
        with core_threads(self.kernel.n_jobs) as threads:
            firsts = range(0, len(X), batch_size)
            parts = [self._answer(X[i : i + batch_size], threads) for i in firsts]
        return Sums.joined(parts) if parts else Sums.zeros(0)

    def _answer(self, X: np.ndarray, threads: int) -> Sums:
        zeros = Sums.zeros(len(X))
        return combined([zeros, *(answer_of(x, X, threads) for x in self.methods)])

    def facts(self) -> Facts:
        methods = self.methods
        return Facts(
            methods[0].name if methods else BruteForce.name,
            self.reason,
            sum(x.training.total for x in methods),
            sum(x.nbytes for x in methods),
            all(x.exact for x in methods),
        )


def answer_of(method: Method, X: np.ndarray, threads: int) -> Sums:
    """A method's sums over its rows and their variances, for queries as given."""
    got = method.estimate(X, threads)
    weight = method.training.total
    with np.errstate(over="ignore"):
        return Sums(got.shift, got.mean * weight, (got.stated * weight) ** 2)


def combined(parts: list[Sums]) -> Sums:
    """The sum of answers of different rows, and of their variances."""
    shift = np.maximum(np.max([x.shift for x in parts], axis=0), LOWEST)
    total, variance = np.zeros(len(shift)), np.zeros(len(shift))
    for part in parts:
        factor = np.exp(part.shift - shift)
        total += part.total * factor
        square = factor**2
        there = square > 0  # an unknown error of nothing is none
        variance[there] += part.squares[there] * square[there]
    return Sums(shift, total, variance)


# ---- What tuning does with a shard ----


def exact_sums(rows: Rows, kernel: Kernel, queries: np.ndarray) -> Sums:
    """Exact sums over the rows that are not the pilot's, for queries as given."""
    training = kernel.training(rows, slice(rows.n_others))
    if training is None:
        return Sums.zeros(len(queries))
    with core_threads(kernel.n_jobs) as threads:
        scaled = training.geometry.scale(queries)
        return training.sums(scaled, threads, in_blocks=False, given=queries)


def exact_shard(rows: Rows, kernel: Kernel) -> Shard:
    training = kernel.training(rows, slice(rows.n_others))
    return Shard(rows, kernel, None if training is None else BruteForce(training))


def tuned_shard(
    rows: Rows, kernel: Kernel, seed: int, aim: Aim, queries: np.ndarray, sums: Sums
) -> Shard:
    """A shard with the method that the pilot chooses for the queries to which its rows matter.

    sums: exact ones of the queries, over its rows that are not the pilot's.
    """
    training = kernel.training(rows, slice(rows.n_others), seed)
    if training is None:
        return Shard(rows, kernel, None)
    logs = sums.log()
    matters = logs >= aim.least
    if matters.sum() < LEAST_QUERIES:
        matters = np.zeros(len(logs), bool)
        matters[np.argsort(-logs, kind="stable")[:LEAST_QUERIES]] = True
    # In the unit of `Accuracy`, a kernel mean.
    negligible = float(np.exp(min(aim.least - np.log(training.total), 690)))
    accuracy = aim.accuracy._replace(negligible=negligible)
    with core_threads(kernel.n_jobs) as threads:
        some = np.ascontiguousarray(queries[matters])
        pilot = Pilot(training, accuracy, threads, some)
        method, report, _ = pick(pilot, aim.algorithm)
    return Shard(rows, kernel, method, report["reason"])


def held_out_answer(shard: Shard, queries: np.ndarray) -> Sums:
    """As `exact_sums`, by the shard's method."""
    if shard.method is None:
        return Sums.zeros(len(queries))
    with core_threads(shard.kernel.n_jobs) as threads:
        return answer_of(shard.method, queries, threads)


def checked_queries(template: BaseEstimator, X: Any, kernel: str) -> np.ndarray:
    """Queries as arrays; none where a block has no rows."""
    if len(X) == 0:
        dtype = np.float32 if getattr(X, "dtype", None) == np.float32 else np.float64
        return np.empty((0, template.n_features_in_), dtype)
    return as_queries(template, X, kernel)
