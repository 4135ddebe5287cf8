"""LSHSampler: the rows of a data set that collide with a query, with exact probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lshkit import checks
from lshkit.archive import InBytes
from lshkit.buckets.draw import HashTables, as_seed, as_weights
from lshkit.hashing.family import HashFamily
from lshkit.sampling import estimates, persistence
from lshkit.sampling.rows import as_numpy, check_rows
from lshkit.typing import ArrayOrTensor, File, Rows, Seed

if TYPE_CHECKING:
    from typing_extensions import Self


class Estimate(NamedTuple):
    """An estimate of a sum over all rows, of the kind of the query.

    Attributes
    ----------
    value, standard_error : float64 arrays or tensors `(n_q,)` or `(n_q, k)`
        The estimate, and the standard error that its draws tell of.
    """

    value: Any
    standard_error: Any


METHODS = {
    "horvitz_thompson": estimates.horvitz_thompson,
    "hbe": estimates.hashing_based,
    "full_bucket": estimates.full_bucket,
}


class LSHSampler(InBytes):
    """Rows of a data set, drawn from a query's hash buckets with known probabilities.

    They give an unbiased estimate of a sum over all rows from the few that collide with the query
    (Spring and Shrivastava 2017; Charikar and Siminelakis 2017). Each of the hasher's n_hashes
    functions gives one table; the tables are independent, and their spread is the standard error.
    (Those of `FastHadamard` share rotations: with one bit or clustered rows, and as many tables as
    features, errors may be 0.7 times the stated ones.) The rows are kept (a copy), with their codes
    and the tables: per row n_features floats, and n_hashes codes and 4-byte indices.

    Parameters
    ----------
    hasher : a hash family of `lshkit.hashing`
    seed : None, int from 0 to 2**128 - 1 or numpy.random.Generator
        For the draws of calls without a seed.

    Attributes
    ----------
    n_rows : int
        Number of rows.
    indices_ : int64 array `(n_rows,)`
        Their indices: a row keeps the number that it got when it was added, counted from 0.

    Notes
    -----
    Rows are given as arrays or tensors `(n, n_features)`; results are of the query's kind. A query
    is `(n_q, n_features)`, or `(n_features,)` for results without the first dimension. Rows and
    queries that are not finite, for angular families rows of zeros, and for the others rows too far
    from the origin for `hash`, raise a ValueError that names the first of them. Tables are built
    when they are first needed after a change, in time O(n_rows n_hashes). Any number of threads may
    query a sampler at once, provided that none changes it and `tables` was read before.
    """

    hasher: HashFamily

    def __init__(self, hasher: HashFamily, *, seed: Seed = None) -> None:
        if not isinstance(hasher, HashFamily):
            got = type(hasher).__name__
            raise TypeError(f"hasher must be a family of lshkit.hashing, got {got}")
        self.hasher = hasher
        self._random = np.random.default_rng(checks.seed(seed))
        # Arrays: rows, codes, indices and, or None, weights.
        self._parts: list[dict[str, Any]] = []
        self._next: int | None = None  # the index that the next row gets; None before fit
        self._total_weight = 0.0  # of all parts, 0 without weights
        self._tables: HashTables | None = None  # of all parts; None after a change
        self._norms: np.ndarray | None = None

    # ---------------------------------------------------------------- data

    def fit(self, X: Rows, weights: Rows | None = None) -> Self:
        """Sets the data set to X `(n, n_features)`, n >= 1, replacing any earlier one.

        weights: `(n,)`, finite and >= 0, optional. Draws within a bucket are then proportional to
        them, and rows of weight 0 are never drawn: f must be 0 there for `sample` and "hbe" to be
        unbiased. Unions ignore weights. Returns self.
        """
        part = self._part(X, weights)
        self._parts, self._next, self._tables, self._total_weight = [], 0, None, 0.0
        return self._append(part)

    def partial_fit(self, X: Rows, weights: Rows | None = None) -> Self:
        """Adds rows, with weights if the sampler has weights. Returns self.

        X and weights as in `fit`; ValueError for weights where it has none, or the reverse.
        """
        part = self._part(X, weights, self._parts[0]["rows"].dtype if self._parts else None)
        if self._next is None:
            self._next = 0
        elif (part["weights"] is None) == self._weighted:
            wanted = "given" if self._weighted else "None"
            raise ValueError(f"weights must be {wanted}, as in fit")
        return self._append(part)

    def remove(self, indices: Rows) -> Self:
        """Removes rows, as if they had never been added. The others keep their indices.

        indices: distinct integers, each of a row in the sampler; TypeError or ValueError for
        others. Returns self.
        """
        data = self._data()
        torch = checks.torch_of(indices=indices)
        if torch is None and np.size(indices) == 0:  # a list without numbers has no type
            return self
        indices = checks.array("indices", indices, torch, kinds="iu", wanted="integers")
        indices = np.asarray(indices).reshape(-1)
        gone = np.isin(data["indices"], indices)
        if gone.sum() != len(indices):
            missing = np.setdiff1d(indices, data["indices"])
            if len(missing):
                raise ValueError(f"indices must be of rows in the sampler, got {missing[0]}")
            raise ValueError("indices must be distinct")
        self._parts = [{k: None if x is None else x[~gone] for k, x in data.items()}]
        self._tables, self._total_weight = None, _sum_of(self._parts[0]["weights"])
        return self

    def merge(self, other: LSHSampler) -> Self:
        """Adds the rows of another sampler with equal hash functions. Returns self.

        They get the next indices, in their order in the other sampler.
        """
        if not isinstance(other, LSHSampler):
            raise TypeError(f"other must be an LSHSampler, got {type(other).__name__}")
        mine, theirs = self._data(), other._data()
        if other.hasher != self.hasher:
            raise ValueError(
                "other must have the same hash functions: give both samplers one hasher, or "
                f"hashers with one seed; got {other.hasher!r} and {self.hasher!r}"
            )
        if (mine["weights"] is None) != (theirs["weights"] is None):
            raise ValueError("other must have weights if and only if this sampler has")
        rows = self._as("the rows of other", theirs["rows"], mine["rows"].dtype)
        return self._append(dict(theirs, rows=rows))

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return sum(len(part["indices"]) for part in self._parts)

    @property
    def indices_(self) -> NDArray[np.int64]:
        """The rows' indices, int64 `(n_rows,)`, which never change."""
        return self._data()["indices"]

    @property
    def tables(self) -> HashTables:
        """`lshkit.buckets.HashTables` of the current rows, in order of their indices."""
        data = self._data()
        if self._tables is None:
            self._norms = self.hasher.row_norms(data["rows"])
            self._tables = HashTables(data["codes"], weights=data["weights"])
        return self._tables

    @property
    def nbytes(self) -> int:
        """Memory of the rows, codes and tables."""
        shared = self.tables._tables[5]  # the weights
        arrays = [x for x in self._data().values() if x is not None and x is not shared]
        return sum(x.nbytes for x in arrays) + self.tables.nbytes

    # ---------------------------------------------------------------- queries

    def sample(
        self, query: ArrayOrTensor, n_samples: int | None = None, *, seed: Seed = None
    ) -> tuple[ArrayOrTensor, ArrayOrTensor]:
        """Rows drawn from the query's buckets, with replacement, and the draws' probabilities.

        The tables are used in turn, starting from a random one; each draw takes one row of the
        query's bucket there, uniformly or in proportion to the weights. Its probability is p(q,
        x_j) / size of the bucket, or p(q, x_j) w_j / weight of the bucket, with p the collision
        probability: for any f, the mean of f(x_j) / probability over the draws has the expectation
        sum_j f(x_j) over all rows (hashing-based estimator, Charikar and Siminelakis 2017, section
        3). Draws from different tables are independent; the expectation is over the hash functions
        too.

        Parameters
        ----------
        query : array or tensor `(n_q, n_features)` or `(n_features,)`
        n_samples : int >= 1, optional
            By default n_hashes, one from each table in order.
        seed : None, int from 0 to 2**128 - 1 or numpy.random.Generator
            The same integer always gives the same draws, at any number of threads.

        Returns
        -------
        indices : int64 `(n_q, n_samples)`
            -1 where the bucket was empty. Such a draw counts as a zero of the mean; leaving it out
            would bias it.
        probabilities : float64 `(n_q, n_samples)`
            0 where the bucket was empty.

        Raises
        ------
        TypeError, ValueError
            query has another shape, a NaN, an infinity or (angular families) a row of zeros;
            n_samples or seed out of range.
        """
        queries, single, torch = self._query(query)
        indices, probabilities = self._draw(queries, n_samples, seed)
        found = indices >= 0
        indices[found] = self.indices_[indices[found]]
        return _results(torch, single, indices, probabilities)

    def union(self, query: ArrayOrTensor) -> tuple[ArrayOrTensor, ArrayOrTensor, ArrayOrTensor]:
        """Every row that shares a bucket with the query, once, with its inclusion probability.

        A row whose collision probability is p is in the union with probability 1 - (1 - p)^m, over
        the m = n_hashes tables; with `FastHadamard`, whose functions are not independent, about 1 %
        more often where it rarely collides.

        Returns
        -------
        indptr, indices, probabilities : `(n_q + 1,)` int64, `(nnz,)` int64, `(nnz,)` float64
            In CSR form: the rows of query i are `indices[indptr[i]:indptr[i + 1]]`, ascending.

        Raises
        ------
        TypeError, ValueError
            query as in `sample`.
        """
        queries, _, torch = self._query(query)
        indptr, rows, _ = self.tables.union(self.hasher.hash(queries))
        p = self._pair_probability(queries, indptr, rows)
        inclusion = estimates.inclusion_probability(p, self.hasher.n_hashes)
        return _results(torch, False, indptr, self.indices_[rows], inclusion)

    def estimate(
        self,
        query: ArrayOrTensor,
        f: Callable[[Any, Any], Any] | Rows,
        method: str = "horvitz_thompson",
        *,
        seed: Seed = None,
    ) -> Estimate:
        """Estimates of sum_j f(q, x_j) over all rows, with standard errors. Unbiased, but sums over
        unions (Horvitz-Thompson) with `FastHadamard`, which may be 1 % too large (see `union`).

        Parameters
        ----------
        query : array or tensor `(n_q, n_features)` or `(n_features,)`
        f : callable or array
            `f(i, j)` with integer arrays (tensors where the query is one) `(nnz,)`: values, of
            shape `(nnz,)` or `(nnz, k)`, of the queries i and the rows of index j. Or an array
            `(n,)` or `(n, k)` of the rows' values, by index.
        method : {"horvitz_thompson", "hbe", "full_bucket"}
            "horvitz_thompson": the union of the query's buckets, f / (1 - (1 - p)^m) each. The
            least noise. Standard error: the jackknife over the tables, whose square is on average
            at least the variance for independent tables (Efron and Stein 1981), and larger where
            rows collide often.
            "full_bucket": mean over the tables of the sum of f / p over the query's bucket.
            "hbe": mean over the tables of one draw each, f / probability: m evaluations of f. For
            both, the standard error is that of a mean of m independent estimates.
        seed : None, int from 0 to 2**128 - 1 or numpy.random.Generator
            For "hbe".

        Returns
        -------
        value, standard_error : float64 `(n_q,)` or `(n_q, k)`
            The standard error of a single table is NaN. Where no table of several has a bucket
            both are 0.
            It does not account for terms outside the tables: if large terms collide with small
            probability, a query that missed them has a small value and a small standard error.

        Raises
        ------
        TypeError, ValueError
            query as in `sample`; another method; f of another shape, or not numbers.
        """
        if not isinstance(method, str) or method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
        queries, single, torch = self._query(query)
        assert self._next is not None
        values = estimates.Values(f, self._next, torch)
        value, error = METHODS[method](self, queries, values, as_seed(self._seed(seed)))
        if values.one:
            value, error = value[:, 0], error[:, 0]
        return Estimate(*_results(torch, single, value, error))

    # ---------------------------------------------------------------- persistence

    def save(self, file: File) -> None:
        """Writes rows, codes, weights and hash functions to an .npz file, without pickle.

        file: a path, to which .npz is appended if it has another ending, or a binary file object.
        An existing file is replaced only once the new one is complete.
        """
        data = self._data()
        assert self._next is not None
        persistence.save(file, self.hasher, data, self._next)

    @classmethod
    def load(cls, file: File, *, seed: Seed = None) -> Self:
        """Reads a sampler written by `save`, with the same draws for the same seeds.

        ValueError for a file that is truncated, damaged, of another kind, or of a newer version of
        lshkit: its header is compared with its size before anything else is read.
        """
        hasher, data, following = persistence.load(file)
        sampler = cls(hasher, seed=seed)
        sampler._parts, sampler._next = [data], following
        sampler._total_weight = _sum_of(data["weights"])
        return sampler

    def __repr__(self) -> str:
        weighted = ", weighted" if self._weighted else ""
        return f"LSHSampler({self.hasher!r}, n_rows={self.n_rows}{weighted})"

    # ----------------------------------------------------------------

    @property
    def _weighted(self) -> bool:
        return bool(self._parts) and self._parts[0]["weights"] is not None

    def _part(self, X: Rows, weights: Rows | None, dtype: np.dtype | None = None) -> dict[str, Any]:
        rows, _ = as_numpy("X", X)
        n_features = self.hasher.n_features
        if rows.ndim != 2 or rows.shape[1] != n_features:
            wanted = f"(n, {n_features}), as the hasher has n_features={n_features}"
            raise ValueError(f"X must have shape {wanted}, got {rows.shape}")
        if len(rows) == 0:
            raise ValueError(f"X must have at least one row, got shape {rows.shape}")
        check_rows("X", rows, direction=self.hasher.directional)
        rows = self._as("X", rows, rows.dtype if dtype is None else dtype)
        self.hasher._check_range("X", rows)
        weights = None if weights is None else as_weights(weights, len(rows)).copy()
        codes = self.hasher.hash(rows, check_finite=False)
        return {"rows": np.array(rows), "codes": codes, "weights": weights}

    def _append(self, part: dict[str, Any]) -> Self:
        n = len(part["codes"])
        assert self._next is not None
        total = self._total_weight + _sum_of(part["weights"])
        if not np.isfinite(total):
            raise ValueError("weights must have a finite sum with those before, got infinity")
        self._total_weight = total
        indices = np.arange(self._next, self._next + n)
        self._parts.append(dict(part, indices=indices))
        self._next += n
        self._tables = None
        return self

    def _data(self) -> dict[str, Any]:
        """All parts as one."""
        if self._next is None:
            from sklearn.exceptions import NotFittedError

            raise NotFittedError("this LSHSampler has no data yet: call fit first")
        if len(self._parts) > 1:
            self._parts = [
                {
                    key: None if x is None else np.concatenate([part[key] for part in self._parts])
                    for key, x in self._parts[0].items()
                }
            ]
        return self._parts[0]

    def _query(self, query: Any) -> tuple[np.ndarray, bool, Any]:
        rows = self._data()["rows"]
        query, torch = as_numpy("query", query)
        single = query.ndim == 1
        query = query[None] if single else query
        if query.ndim != 2 or query.shape[1] != rows.shape[1]:
            wanted = f"(n_q, {rows.shape[1]}) or ({rows.shape[1]},)"
            raise ValueError(f"query must have shape {wanted}, got {query.shape[single:]}")
        check_rows("query", query, direction=self.hasher.directional)
        query = self._as("query", query, rows.dtype)
        self.hasher._check_range("query", query)
        return query, single, torch

    def _as(self, name: str, x: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """x in the type of the rows and at sizes that can be hashed."""
        x = self.hasher.within_float32(x)
        if x.dtype == dtype:
            return x
        with np.errstate(over="ignore"):
            x = x.astype(dtype)
        check_rows(f"{name} in {dtype}, the type of the rows,", x)
        return x

    def _seed(self, seed: Seed) -> int | np.random.Generator:
        return self._random if seed is None else seed

    def _draw(
        self, query: np.ndarray, n_samples: int | None, seed: Seed
    ) -> tuple[np.ndarray, np.ndarray]:
        """`sample`, but for the indices: positions in the tables' rows."""
        codes = self.hasher.hash(query)
        indices, chance, _ = self.tables.draw(codes, n_samples, seed=self._seed(seed))
        found = indices >= 0
        indptr = np.concatenate([[0], np.cumsum(found.sum(1))])
        chance[found] *= self._pair_probability(query, indptr, indices[found])
        return indices, chance

    def _pair_probability(
        self, query: np.ndarray, indptr: np.ndarray, rows: np.ndarray
    ) -> np.ndarray:
        pairs = query, self._data()["rows"], indptr, rows
        return self.hasher.pair_probability(*pairs, y_norms=self._norms)


def _sum_of(weights: np.ndarray | None) -> float:
    return 0.0 if weights is None else float(weights.sum())


def _results(torch: Any, single: bool, *arrays: np.ndarray) -> tuple[Any, ...]:
    arrays = tuple(x[0] for x in arrays) if single else arrays
    return arrays if torch is None else tuple(torch.from_numpy(np.asarray(x)) for x in arrays)
