"""`DaskLSHSampler`: draws from hash buckets that are spread over the workers of a Dask cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.special import logsumexp

from lshkit import checks
from lshkit.buckets.draw import as_seed
from lshkit.distributed.dask._dask import Client, Delayed, is_dask_collection
from lshkit.distributed.dask.blocks import (
    check_length,
    client_of,
    lengths_of,
    results_of,
    row_blocks,
    tree,
)
from lshkit.distributed.dask.tasks import constant, task
from lshkit.hashing.family import HashFamily
from lshkit.sampling import LogPartition, LSHSampler, PartitionSampler, log_partition
from lshkit.sampling.rows import as_numpy
from lshkit.typing import FloatArray, Rows, Seed

if TYPE_CHECKING:
    from typing_extensions import Self


class DaskLSHSampler:
    """Rows on the workers of a Dask cluster, drawn from a query's buckets with known probabilities.

    Each block is a shard: an `LSHSampler` with the same hash functions, which stays on its worker.
    A bucket of the whole data set is the union of the shards' buckets. A draw takes a shard in
    proportion to the size (the weight) of its bucket and a row of that bucket, so that rows and
    their probabilities are distributed as those of one `LSHSampler` of all rows.

    Parameters
    ----------
    hasher : a hash family of `lshkit.hashing`
    seed : None, int from 0 to 2**128 - 1 or numpy.random.Generator
        For the draws of calls without a seed.
    client : distributed.Client, optional
        By default the one made last.

    Attributes
    ----------
    n_rows, n_shards : int

    Notes
    -----
    Rows are Dask arrays `(n, n_features)` or dataframes, chunked by rows; a row's index is its
    place among all. Queries are arrays `(n_q, n_features)` or `(n_features,)`, sent to all shards,
    and results are NumPy arrays, computed at once. What a lost worker held is computed again. The
    same integer seed gives the same draws from the same blocks.
    """

    hasher: HashFamily

    def __init__(
        self, hasher: HashFamily, *, seed: Seed = None, client: Client | None = None
    ) -> None:
        local = LSHSampler(hasher, seed=seed)  # which checks both
        self.hasher, self._random, self.client = local.hasher, local._random, client
        self._shards: list[Delayed] = []  # `LSHSampler`
        self._ends: list[int] = []  # the index after that of the last row of each
        self._weighted = False
        self._classes: list[Delayed] | None = None

    # ---- data ----

    def fit(self, X: Any, weights: Any = None) -> Self:
        """Sets the data set to the rows of X, a Dask array or dataframe. Returns self.

        weights: a Dask array `(n,)`, for a dataframe a series; finite and >= 0, as of `LSHSampler`.
        Errors name a row by its place in its block.
        """
        shards, ends = self._made(X, weights, 0)
        self._shards, self._ends, self._weighted = shards, ends, weights is not None
        self._classes = None
        return self

    def partial_fit(self, X: Any, weights: Any = None) -> Self:
        """Adds blocks of rows, with weights if the sampler has weights. Returns self."""
        if self._shards and (weights is not None) != self._weighted:
            wanted = "given" if self._weighted else "None"
            raise ValueError(f"weights must be {wanted}, as in fit")
        shards, ends = self._made(X, weights, self.n_rows)
        self._shards, self._ends = self._shards + shards, self._ends + ends
        self._weighted, self._classes = weights is not None, None
        return self

    def _made(self, X: Any, weights: Any, begin: int) -> tuple[list[Delayed], list[int]]:
        """Shards of blocks whose rows have the indices from `begin` on."""
        client = client_of(self.client)
        blocks = row_blocks(X, weights, "weights")
        if blocks.n_features != self.hasher.n_features:
            wanted = f"(n, {self.hasher.n_features}), as the hasher has"
            raise ValueError(f"X must have shape {wanted}, got {blocks.n_features} features")
        ends, shards = begin + np.cumsum(lengths_of(blocks, client)), []
        begins = np.concatenate([[begin], ends[:-1]])
        make, hasher = task(_shard), constant(self.hasher)
        kept = np.flatnonzero(ends > begins)  # blocks with rows
        if len(kept) == 0:
            raise ValueError("X must have at least one row, got none")
        for i in kept:
            places = int(begins[i]), int(ends[i])
            shards.append(make(hasher, blocks.rows[i], blocks.weights[i], *places))
        shards = list(client.persist(shards))
        results_of(client, [x.n_rows for x in shards])  # raises what rows raised
        return shards, ends[kept].tolist()

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return self._ends[-1] if self._ends else 0

    @property
    def n_shards(self) -> int:
        """Number of blocks of rows."""
        return len(self._shards)

    def rows(self, indices: Rows) -> FloatArray:
        """The rows of these indices `(n,)`, an array `(n, n_features)`.

        float64 where any of them is.
        """
        client = self._fitted()
        if isinstance(indices, (list, tuple)) and not indices:
            indices = np.empty(0, np.int64)  # NumPy makes floats of none
        indices = checks.array("indices", indices, kinds="iu", wanted="integers")
        if indices.ndim != 1:
            raise ValueError(f"indices must have shape (n,), got {indices.shape}")
        if len(indices) and not (0 <= indices.min() and indices.max() < self.n_rows):
            bad = indices[(indices < 0) | (indices >= self.n_rows)][0]
            raise ValueError(f"indices must be from 0 to {self.n_rows - 1}, got {bad}")
        indices = indices.astype(np.int64)
        of_shard = np.searchsorted(self._ends, indices, side="right")
        shards = np.unique(of_shard) if len(indices) else np.zeros(1, np.intp)
        take = task(_take)
        asked = [take(self._shards[i], indices[of_shard == i]) for i in shards]
        found = results_of(client, asked)
        dtype = np.result_type(*(x.dtype for x in found))
        out = np.empty((len(indices), self.hasher.n_features), dtype)
        for i, rows in zip(shards, found, strict=True):
            out[of_shard == i] = rows
        return out

    # ---- queries ----

    def sample(
        self, query: Rows, n_samples: int | None = None, *, seed: Seed = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows drawn from the query's buckets, with replacement, and the draws' probabilities.

        As `LSHSampler.sample`, for the buckets of all rows: indices int64 and probabilities float64
        `(n_q, n_samples)`; -1 and 0 where the bucket was empty in every shard.
        """
        client = self._fitted()
        queries, single = self._query(query)
        if n_samples is not None:
            n_samples = checks.integer("n_samples", n_samples, 1)
        key = as_seed(self._random if seed is None else seed)
        draw, given = task(_draw), constant(queries)
        parts = [draw(x, given, n_samples, key, i) for i, x in enumerate(self._shards)]
        drawn: Draws = results_of(client, [tree(parts, _chosen)])[0]
        probabilities = np.zeros(drawn.indices.shape)
        found = drawn.indices >= 0
        probabilities[found] = drawn.factors[found] / drawn.weights[found]
        return (drawn.indices[0], probabilities[0]) if single else (drawn.indices, probabilities)

    def union(self, query: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Every row that shares a bucket with the query, once, with its inclusion probability.

        As `LSHSampler.union`: indptr, indices, probabilities in CSR form, indices ascending.
        """
        client = self._fitted()
        queries, _ = self._query(query)
        find, given = task(LSHSampler.union), constant(queries)
        found = results_of(client, [find(x, given) for x in self._shards])
        counts = [np.diff(indptr) for indptr, _, _ in found]
        of_query = np.concatenate([np.repeat(np.arange(len(queries)), n) for n in counts])
        order = np.argsort(of_query, kind="stable")  # shards are in the order of their indices
        indptr = np.concatenate([[0], np.cumsum(np.sum(counts, axis=0))])
        indices, probabilities = (np.concatenate([x[i] for x in found])[order] for i in (1, 2))
        return indptr, indices, probabilities

    def log_partition(
        self, query: Rows, *, n_samples: int = 8192, seed: Seed = None
    ) -> LogPartition:
        """log sum_j exp(query . x_j) over all rows, and its standard error.

        As `lshkit.sampling.log_partition` of the rows as classes: each shard sums its near rows and
        a sample of the others, `n_samples` in all (at least 2 of each), and the shards' sums and
        variances are added in log space. The tables over the shards, with the default options of
        `PartitionSampler`, are made in the first call and kept.
        """
        client = self._fitted()
        queries, single = self._query(query)
        n_samples = checks.integer("n_samples", n_samples, 1)
        if self._classes is None:
            rng = np.random.default_rng(0)  # of tables, which change no expectation
            seeds = rng.integers(2**31, size=self.n_shards)
            make = task(_Classes)
            made = [make(x, int(s)) for x, s in zip(self._shards, seeds, strict=True)]
            self._classes = list(client.persist(made))
        key = as_seed(self._random if seed is None else seed)
        sizes = np.diff(self._ends, prepend=0)
        shares = np.maximum(2, np.ceil(n_samples * (sizes / self.n_rows))).astype(int)
        given, sums = constant(queries), task(_log_partition)
        parts = [
            sums(x, given, int(share), [key, i])
            for i, (x, share) in enumerate(zip(self._classes, shares, strict=True))
        ]
        found = results_of(client, parts)
        values, errors = (np.stack(x) for x in zip(*found, strict=True))
        value = logsumexp(values, axis=0)
        error = np.sqrt((np.exp(2 * (values - value)) * errors**2).sum(axis=0))
        return LogPartition(value[0], error[0]) if single else LogPartition(value, error)

    # ---- elsewhere ----

    def to_local(self) -> LSHSampler:
        """An `LSHSampler` of all rows in this process; `to_bytes` of it is without pickle."""
        parts = results_of(self._fitted(), [task(LSHSampler._data)(x) for x in self._shards])
        local = LSHSampler(self.hasher, seed=self._random)
        local._parts, local._next = parts, self.n_rows
        return local

    def __repr__(self) -> str:
        weighted = ", weighted" if self._weighted else ""
        sizes = f"n_rows={self.n_rows}, n_shards={self.n_shards}"
        return f"DaskLSHSampler({self.hasher!r}, {sizes}{weighted})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a DaskLSHSampler belongs to its client: save to_local()")

    def _fitted(self) -> Client:
        if not self._shards:
            from sklearn.exceptions import NotFittedError

            raise NotFittedError("this DaskLSHSampler has no data yet: call fit first")
        return client_of(self.client)

    def _query(self, query: Rows) -> tuple[np.ndarray, bool]:
        if is_dask_collection(query):
            raise TypeError("query must be an array, got a Dask collection: compute it first")
        queries, _ = as_numpy("query", query)
        single = queries.ndim == 1
        queries = queries[None] if single else queries
        if queries.ndim != 2 or queries.shape[1] != self.hasher.n_features:
            wanted = f"(n_q, {self.hasher.n_features}) or ({self.hasher.n_features},)"
            raise ValueError(f"query must have shape {wanted}, got {np.shape(query)}")
        return queries, single


class Draws(NamedTuple):
    """Of shards: a row for each draw, and what chooses among shards.

    factors: collision probability times weight of the row. weights: of the query's bucket in all
    these shards. keys: log of the weight of the bucket in the row's shard + Gumbel noise, of which
    the largest is that of a shard with a probability in proportion to its weight.
    """

    indices: np.ndarray
    factors: np.ndarray
    weights: np.ndarray
    keys: np.ndarray


def _shard(hasher: HashFamily, rows: Any, weights: Any, begin: int, end: int) -> LSHSampler:
    check_length(rows, end - begin)
    sampler = LSHSampler(hasher)
    sampler._next = begin
    weights = None if weights is None else np.asarray(weights)
    sampler._append(sampler._part(np.asarray(rows), weights))
    sampler.tables  # noqa: B018  # made here, and not by several queries at once
    return sampler


def _take(sampler: LSHSampler, indices: np.ndarray) -> np.ndarray:
    data = sampler._data()
    return data["rows"][indices - data["indices"][0]]


def _draw(
    sampler: LSHSampler, query: np.ndarray, n_samples: int | None, seed: int, shard: int
) -> Draws:
    queries, _, _ = sampler._query(query)
    codes = sampler.hasher.hash(queries)
    # With one seed all shards turn to the same table for a draw.
    rows, chance, tables = sampler.tables.draw(codes, n_samples, seed=seed)
    weights = sampler.tables.bucket_weights(codes)[np.arange(len(codes))[:, None], tables]
    found = rows >= 0
    indices, factors = np.full(rows.shape, -1), np.zeros(rows.shape)
    indices[found] = sampler.indices_[rows[found]]
    indptr = np.concatenate([[0], np.cumsum(found.sum(1))])
    p = sampler._pair_probability(queries, indptr, rows[found])
    factors[found] = chance[found] * weights[found] * p
    noise = np.random.default_rng([seed, shard, 1]).gumbel(size=rows.shape)
    keys = np.full(rows.shape, -np.inf)
    keys[found] = np.log(weights[found]) + noise[found]
    return Draws(indices, factors, weights, keys)


def _chosen(parts: list[Draws]) -> Draws:
    """One draw for each of those of several shards."""
    best = np.argmax([x.keys for x in parts], axis=0)[None]
    indices, factors, keys = (
        np.take_along_axis(np.stack([getattr(x, name) for x in parts]), best, 0)[0]
        for name in ("indices", "factors", "keys")
    )
    return Draws(indices, factors, np.sum([x.weights for x in parts], axis=0), keys)


class _Classes:
    """The rows of a shard as classes of a softmax."""

    def __init__(self, sampler: LSHSampler, seed: int) -> None:
        self.rows = np.asarray(sampler._data()["rows"], np.float32)
        self.tables = PartitionSampler(self.rows, seed=seed)


def _log_partition(
    classes: _Classes, query: np.ndarray, n_samples: int, seed: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    options: dict[str, Any] = {"sampler": classes.tables, "n_samples": n_samples, "seed": random}
    found = log_partition(query, classes.rows, **options)
    return found.value, found.standard_error
