"""Rows that stay on their workers, in the blocks in which they came."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from sklearn.base import BaseEstimator

from lshkit.distributed.dask._dask import Client, Delayed
from lshkit.distributed.dask.blocks import RowBlocks, check_length, results_of
from lshkit.distributed.dask.tasks import constant, task
from lshkit.kde import LSHKernelDensity
from lshkit.kde.arguments import as_rows, as_weights
from lshkit.kde.calibration import N_HELD_OUT


class Rows:
    """The rows of a block, checked: those of the pilot last.

    n: how many there must be. places: where the pilot's rows were. weights: float64 or None.
    """

    def __init__(
        self, template: BaseEstimator, X: Any, weights: Any, n: int, places: np.ndarray, kernel: str
    ) -> None:
        check_length(X, n)
        if len(X) == 0:
            X = np.empty((0, template.n_features_in_))
        else:
            X = as_rows(template, X, False, kernel)
        weights = as_weights(None if weights is None else np.asarray(weights), len(X), True)
        self.places = places
        others = np.delete(np.arange(len(X)), places)
        order = np.concatenate([others, places]).astype(np.intp)
        self.n_others, self.X = len(others), np.ascontiguousarray(X[order])
        self.weights = None if weights is None else weights[order]

    @property
    def of_pilot(self) -> np.ndarray:
        return self.X[self.n_others :]

    def largest_weight(self) -> float:
        if self.weights is None:
            return 1.0 if len(self.X) else 0.0
        return float(self.weights.max(initial=0))

    def weight(self, exponent: int) -> float:
        """Of all rows, divided by 2 to the power of exponent."""
        weights = np.ones(len(self.X)) if self.weights is None else self.weights
        return float(np.ldexp(weights, -exponent).sum())

    def in_order(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Rows and weights as they were given."""
        order = np.empty(len(self.X), np.intp)
        order[self.places] = np.arange(self.n_others, len(self.X))
        order[np.delete(np.arange(len(self.X)), self.places)] = np.arange(self.n_others)
        return self.X[order], None if self.weights is None else self.weights[order]


class KeptRows(NamedTuple):
    """`Rows` on the workers, with what the client knows of them."""

    blocks: list[Delayed]
    lengths: list[int]
    largest_weight: float
    client: Client  # whose workers they are on

    @property
    def n_rows(self) -> int:
        return sum(self.lengths)

    def joined(self, other: KeptRows) -> KeptRows:
        largest = max(self.largest_weight, other.largest_weight)
        blocks, lengths = self.blocks + other.blocks, self.lengths + other.lengths
        return KeptRows(blocks, lengths, largest, other.client)

    def pilot_rows(self, client: Client) -> np.ndarray:
        """At most about N_HELD_OUT of the pilot's rows, as many of each block as it has of all."""
        share = N_HELD_OUT / self.n_rows
        pairs = zip(self.blocks, self.lengths, strict=True)
        heads = [x.of_pilot[: int(np.ceil(share * n))] for x, n in pairs]
        return np.concatenate(results_of(client, heads))

    def gathered(self, client: Client) -> tuple[np.ndarray, np.ndarray | None]:
        """All rows and their weights, as they were given."""
        blocks = results_of(client, [x.in_order() for x in self.blocks])
        X = np.concatenate([x for x, _ in blocks if len(x)])
        if all(w is None for _, w in blocks):
            return X, None
        filled = [np.ones(len(x)) if w is None else w for x, w in blocks]
        return X, np.concatenate(filled)


def kept_rows(
    client: Client,
    blocks: RowBlocks,
    lengths: list[int],
    template: LSHKernelDensity,
    seed: int,
    share: float,
) -> KeptRows:
    """The rows of blocks, checked against a template, on the workers.

    share: of N_HELD_OUT rows, which are drawn for the pilot by their place among all.
    """
    n = sum(lengths)
    if n == 0:
        raise ValueError("X must have at least one row, got none")
    rng = np.random.default_rng([seed, 8])
    picked = rng.choice(n, min(int(share * N_HELD_OUT), n // 8), replace=False)
    common, make = constant(template), task(Rows)
    ends, made = np.cumsum(lengths), []
    for i, (begin, end) in enumerate(zip(ends - lengths, ends, strict=True)):
        places = picked[(picked >= begin) & (picked < end)] - begin
        block = blocks.rows[i], blocks.weights[i], lengths[i]
        made.append(make(common, *block, places, template.kernel))
    made = list(client.persist(made))
    largest = results_of(client, [x.largest_weight() for x in made])  # raises what rows raised
    return KeptRows(made, lengths, max(largest), client)


def template_of(
    parameters: dict[str, Any], n_features: int, names: np.ndarray | None
) -> LSHKernelDensity:
    """An estimator that is not fitted but for what `as_rows` compares rows with."""
    template = LSHKernelDensity(**parameters)
    template.n_features_in_ = n_features
    if names is not None:
        template.feature_names_in_ = names
    return template
