"""Batches for stochastic gradients, drawn from the buckets of a query that follows the model."""

import math

import numpy as np

from lshkit import checks
from lshkit.buckets.draw import HashTables, as_weights
from lshkit.hashing.family import HashFamily

WEIGHTINGS = ("mixture", "collision")


class LSHBatchSampler:
    """LSH-sampled SGD: rows near a query are drawn more often, and their weights undo the bias.

    After Spring and Shrivastava (2017) and Chen, Xu and Shrivastava (2019, "LGD"). A row's gradient
    is large where some vector of the row is near some vector of the model: for logistic regression
    with labels y = +-1 these are y x and -theta; for least squares (x, y) and (theta, -1), or the
    opposite of the latter. `(weights * losses).mean()` over a batch is an unbiased estimate of the
    mean loss over all rows, and so is its gradient.

    Parameters
    ----------
    hasher : hash family of `lshkit.hashing`
    rows : array or tensor `(n, n_features)`
        What is hashed; finite. Kept, not copied, for weighting="collision".
    query : callable without arguments
        Returns the query `(n_features,)`, or several `(k, n_features)` of which each gets the same
        share of the draws, as an array or tensor. Called for every batch.
    batch_size : int >= 1
    row_weights : None, "norms" or array `(n,)` of numbers >= 0
        A row of a bucket is drawn uniformly, in proportion to its length, or to these. Rows of
        weight 0 are never drawn: right where their gradient is 0.
    weighting : "mixture" or "collision"
        What the importance weights are made of, see below.
    uniform_share : float, above 0, at most 1
        Of the draws of "mixture" that are from all rows, not from buckets. The second moment of a
        draw is at most 1 / uniform_share times that of drawing from all rows alone.
    n_batches : int >= 1, optional
        Of one pass over the sampler; without, ceil(n / batch_size).
    seed : None, int >= 0 or numpy.random.Generator
        Of the draws. The same integer gives the same batches.

    Notes
    -----
    A draw picks a table (every one as likely as any other) and a member of the query's bucket.

    "mixture": uniform_share of the draws, and those that meet an empty bucket, are from all rows
    instead (in proportion to row_weights). The weight is 1 / (n P_i), P_i the exact probability of
    drawing row i from these tables: for share a, of which e of the tables are empty,
    `P_i = (a + (1 - a) e) / n + (1 - a) mean_t [i in bucket t] / |bucket t|`. Unbiased for these
    very hash functions, and no weight is above 1 / uniform_share (uniform draws).

    "collision": the estimator of the papers. The weight is `|bucket| / (n p_i)`, or W / (n w_i p_i)
    with row_weights, p_i the collision probability. Unbiased over the choice of the hash functions,
    not for given ones: use `update` for fresh ones now and then. A draw from an empty bucket counts
    as zero, since skipping it would inflate the rest by 1 / (1 - P(empty)): the batch holds a row
    picked at random for it, with weight 0. Rows of zeros are refused where the family is angular.

    As a DataLoader's `batch_sampler` it yields lists of (index, weight), which `WeightedDataset`
    takes: `DataLoader(WeightedDataset(dataset), batch_sampler=sampler)`. The query is asked for
    when a batch is drawn: at the step itself with num_workers=0, else prefetch_factor * num_workers
    batches ahead, which costs variance and no bias. `draw()` gives a batch as arrays.
    """

    def __init__(
        self,
        hasher,
        rows,
        query,
        batch_size,
        *,
        row_weights=None,
        weighting="mixture",
        uniform_share=0.5,
        n_batches=None,
        seed=None,
    ):
        if not callable(query):
            raise TypeError(f"query must be callable, got {type(query).__name__}")
        self.query = query
        self.batch_size = checks.integer("batch_size", batch_size, 1)
        if weighting not in WEIGHTINGS:
            wanted = " or ".join(map(repr, WEIGHTINGS))
            raise ValueError(f"weighting must be {wanted}, got {weighting!r}")
        self.weighting = weighting
        self.uniform_share = checks.positive("uniform_share", uniform_share)
        if self.uniform_share > 1:
            raise ValueError(f"uniform_share must be at most 1, got {uniform_share}")
        if n_batches is not None:
            n_batches = checks.integer("n_batches", n_batches, 1)
        self.n_batches = n_batches
        if not (seed is None or isinstance(seed, np.random.Generator)):
            seed = checks.integer("seed", seed, 0)
        self._rng = np.random.default_rng(seed)
        self.update(rows, hasher=hasher, row_weights=row_weights)

    def update(self, rows=None, *, hasher=None, row_weights=None):
        """Builds the tables anew, of other rows, hash functions or weights; returns self.

        What is None stays as it is ("norms": taken from the new rows).
        """
        hasher = self.hasher if hasher is None else hasher
        if not isinstance(hasher, HashFamily):
            got = type(hasher).__name__
            raise TypeError(f"hasher must be a hash family of lshkit.hashing, got {got}")
        torch = self._torch if rows is None else checks.torch_of(rows=rows)
        rows = self._rows if rows is None else _finite("rows", rows, hasher.n_features)
        if rows.shape[1] != hasher.n_features:  # rows that were there before
            wanted = f"n_features={rows.shape[1]}, as the rows have"
            raise ValueError(f"hasher must have {wanted}, got {hasher.n_features}")
        if len(rows) == 0:
            raise ValueError(f"rows must have at least one row, got shape {rows.shape}")
        if row_weights is None:
            row_weights = getattr(self, "row_weights", None)
        weights = self._weights_of(row_weights, rows)
        if self.weighting == "collision" and hasher.directional:
            zero = np.flatnonzero(~rows.any(-1))
            if len(zero):
                raise ValueError(f"rows must not be zeros, which have no angle, got row {zero[0]}")
        self.hasher, self.row_weights, self._torch, self._rows = hasher, row_weights, torch, rows
        self._weights = weights
        self._cumulative = None if weights is None else np.cumsum(weights)
        self._codes = hasher.hash(hasher.within_float32(rows))
        self._tables = HashTables(self._codes, weights=weights)
        return self

    @staticmethod
    def _weights_of(row_weights, rows):
        if row_weights is None:
            return None
        if isinstance(row_weights, str):
            if row_weights != "norms":
                raise ValueError(
                    f"row_weights must be None, 'norms' or an array, got {row_weights!r}"
                )
            row_weights = np.sqrt(np.einsum("nd,nd->n", rows, rows, dtype=np.float64))
        weights = as_weights(row_weights, len(rows), "row_weights")
        if not weights.any():
            raise ValueError("row_weights must not be all zero")
        return np.ldexp(weights, -np.frexp(weights.max())[1])  # so that no 1 / weight overflows

    @property
    def n_rows(self):
        """Rows that are drawn from."""
        return len(self._rows)

    def __len__(self):
        if self.n_batches is not None:
            return self.n_batches
        return math.ceil(self.n_rows / self.batch_size)

    def __iter__(self):
        """Batches as lists of (index, weight), a Python int and float."""
        for _ in range(len(self)):
            indices, weights = self._draw()
            yield list(zip(indices.tolist(), weights.tolist(), strict=True))

    def draw(self):
        """One batch: `(batch_size,)` indices (int64) and importance weights (float64).

        Tensors if the rows are.
        """
        batch = self._draw()
        return batch if self._torch is None else tuple(map(self._torch.from_numpy, batch))

    def _draw(self):
        queries = self.query()
        queries = _finite("query()", queries, self.hasher.n_features)
        codes = self.hasher.hash(self.hasher.within_float32(queries))
        k, size = len(queries), self.batch_size
        drawn = self._tables.draw(codes, -(-size // k), seed=self._rng)
        # The queries by turns, from a random one on: each has the same share of every batch's mean.
        of_query = (np.arange(size) + self._rng.integers(k)) % k
        indices, probabilities, _ = (x[of_query, np.arange(size) // k] for x in drawn)
        if self.weighting == "collision":
            return self._collision_weights(queries, of_query, indices, probabilities)
        return self._mixture(codes, indices)

    def _collision_weights(self, queries, of_query, indices, probabilities):
        empty = indices < 0
        indices = np.where(empty, self._rng.integers(self.n_rows, size=len(indices)), indices)
        near = self._collision_probability(queries[of_query], self._rows[indices])
        with np.errstate(divide="ignore"):
            weights = 1 / (self.n_rows * near * probabilities)
        return indices, np.where(empty, 0.0, weights)

    def _collision_probability(self, x, y):
        if self.hasher.directional and not (x.any(-1) & y.any(-1)).all():
            raise ValueError("query() must not be zeros, which have no angle: use 'mixture'")
        return self.hasher.collision_probability(x, y)

    def _mixture(self, codes, indices):
        size, n = len(indices), self.n_rows
        # The expected number is what the weights need; its whole part need not be random.
        n_uniform = math.floor(self.uniform_share * size + self._rng.random())
        anywhere = indices < 0
        anywhere[self._rng.permutation(size)[:n_uniform]] = True
        indices = np.where(anywhere, self._draw_anywhere(size), indices)
        bucket_weights = self._tables.bucket_weights(codes)  # (k, m)
        empty = bucket_weights == 0
        share = self.uniform_share + (1 - self.uniform_share) * empty.mean()
        inverse = np.divide(1, bucket_weights, out=np.zeros(empty.shape), where=~empty)
        collides = self._codes[indices][:, None] == codes  # (size, k, m)
        near = np.einsum("skm,km->s", collides, inverse) / empty.size
        total = n if self._weights is None else self._cumulative[-1]
        probability = share / total + (1 - self.uniform_share) * near
        if self._weights is not None:
            probability = probability * self._weights[indices]
        return indices, 1 / (n * probability)

    def _draw_anywhere(self, size):
        if self._weights is None:
            return self._rng.integers(self.n_rows, size=size)
        at = self._rng.random(size) * self._cumulative[-1]
        return np.searchsorted(self._cumulative, at, side="right")


class WeightedDataset:
    """A map-style data set for the pairs that `LSHBatchSampler` yields: item and weight.

    `dataset[index, weight]` is `(*item, weight)` where the item is a tuple, else `(item, weight)`.
    """

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, pair):
        try:
            index, weight = pair
        except TypeError:
            wanted = "an (index, weight) of LSHBatchSampler is wanted"
            raise TypeError(f"{wanted}, got {pair!r}") from None
        item = self.dataset[index]
        return (*item, weight) if isinstance(item, (tuple, list)) else (item, weight)


def _finite(name, x, n_features):
    """x as a numpy array (n, n_features), one row given as a vector; float32 stays float32."""
    torch = checks.torch_of(**{name: x})
    x = checks.array(name, x, torch)
    if torch is not None:
        short = x.dtype in (torch.float16, torch.bfloat16, torch.float32)
        x = x.detach().to(torch.float32 if short else torch.float64).numpy()
    if name != "rows" and x.ndim == 1:
        x = x[None]
    if x.ndim != 2 or x.shape[1] != n_features or (name != "rows" and len(x) == 0):
        wanted = f"(n, {n_features})" if name == "rows" else f"({n_features},) or (k, {n_features})"
        raise ValueError(f"{name} must have shape {wanted}, got {x.shape}")
    bad = np.flatnonzero(~np.isfinite(x).all(-1))
    if len(bad):
        raise ValueError(f"{name} must be finite, got NaN or infinity in row {bad[0]}")
    return x
