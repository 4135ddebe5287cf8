"""Estimators of sum_j f(q, x_j) from hash tables, each with its standard error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from lshkit.sampling.rows import as_numpy

if TYPE_CHECKING:
    from lshkit.sampling.lsh_sampler import LSHSampler

# Values and their standard errors.
Results: TypeAlias = Sequence[np.ndarray]

_PAIRS = 2**20  # of queries and rows at a time


class Values:
    """f of `LSHSampler.estimate` as a function of index arrays to float64 `(nnz, k)`.

    one: whether f gave `(nnz,)`, so that k = 1 stands for no dimension.
    """

    def __init__(self, f: Any, n_indices: int, torch: Any) -> None:
        self.f, self.torch, self.one = f, torch, True
        if not callable(f):
            table, _ = as_numpy("f", f)
            wanted = f"({n_indices},) or ({n_indices}, k), a value for each index"
            self._check("f", table, n_indices, wanted)
            self.f = lambda i, j: table[j]
            self.torch = None

    def __call__(self, i: Any, j: Any) -> np.ndarray:
        if self.torch is not None:
            i, j = self.torch.from_numpy(i), self.torch.from_numpy(j)
        values, _ = as_numpy("f(i, j)", self.f(i, j))
        self._check("f(i, j)", values, len(i), f"({len(i)},) or ({len(i)}, k), as i and j")
        self.one = values.ndim == 1
        return values.reshape(len(i), *values.shape[1:] or (1,)).astype(np.float64, copy=False)

    @staticmethod
    def _check(name: str, values: np.ndarray, n: int, wanted: str) -> None:
        if values.ndim not in (1, 2) or len(values) != n or 0 in values.shape[1:]:
            raise ValueError(f"{name} must have shape {wanted}, got {values.shape}")


def inclusion_probability(p: np.ndarray, n_hashes: int) -> np.ndarray:
    """1 - (1 - p)^n_hashes: that a row of collision probability p is in the union of the tables."""
    with np.errstate(divide="ignore"):
        return -np.expm1(n_hashes * np.log1p(-p))


def horvitz_thompson(sampler: LSHSampler, query: np.ndarray, values: Values, seed: int) -> Results:
    """Horvitz and Thompson 1952, over the union of the query's buckets.

    The standard error is the jackknife's over the tables. Without table h the estimate is that of
    m - 1 tables less the rows that no other table has.
    """
    m = sampler.hasher.n_hashes

    def of_block(block: _Block) -> Results:
        value = block.sum_by_query(block.f / inclusion_probability(block.p, m)[:, None])
        if m == 1:
            return value, np.full_like(value, np.nan)
        rest = block.f / inclusion_probability(block.p, m - 1)[:, None]
        lost = block.sum_of_once(rest)
        return value, (m - 1) / np.sqrt(m) * _deviation(lost)

    return _by_blocks(sampler, query, values, of_block)


def full_bucket(sampler: LSHSampler, query: np.ndarray, values: Values, seed: int) -> Results:
    """Mean over the tables of the sum of f / p over the bucket."""

    def of_block(block: _Block) -> Results:
        return mean_and_error(block.sum_by_table(block.f / block.p[:, None]))

    return _by_blocks(sampler, query, values, of_block)


def hashing_based(sampler: LSHSampler, query: np.ndarray, values: Values, seed: int) -> Results:
    """HBE (Charikar and Siminelakis 2017): mean over the tables of f / probability of one draw."""
    rows, probabilities = sampler._draw(query, None, seed)
    found = rows >= 0
    of_query = np.nonzero(found)[0]
    f = values(of_query, sampler.indices_[rows[found]])
    estimates = np.zeros((*rows.shape, f.shape[1]))
    estimates[found] = f / probabilities[found][:, None]
    return mean_and_error(estimates)


def mean_and_error(estimates: np.ndarray) -> Results:
    """Of independent estimates `(n_q, m, k)`: their mean and its standard error, `(n_q, k)`."""
    m = estimates.shape[1]
    value = estimates.mean(1)
    if m == 1:
        return value, np.full_like(value, np.nan)
    return value, _deviation(estimates) / np.sqrt(m)


def _deviation(x: np.ndarray) -> np.ndarray:
    """Of `(n_q, m, k)` over m, with squares within float64 whatever the size of x: `(n_q, k)`."""
    _, exponent = np.frexp(np.abs(x).max(1))
    return np.ldexp(np.ldexp(x, -exponent[:, None]).std(1, ddof=1), exponent)


class _Block:
    """The union of some queries' buckets: pairs, their collision probabilities and values."""

    def __init__(
        self, sampler: LSHSampler, query: np.ndarray, codes: np.ndarray, first: int, values: Values
    ) -> None:
        data = sampler._data()
        indptr, self.rows, self.counts = sampler.tables.union(codes)
        self.n_queries, self.codes, self.row_codes = len(query), codes, data["codes"]
        self.of_query = np.repeat(np.arange(len(query)), np.diff(indptr))
        self.p = sampler._pair_probability(query, indptr, self.rows)
        self.f = values(self.of_query + first, data["indices"][self.rows])

    def sum_by_query(self, x: np.ndarray) -> np.ndarray:
        return _sums(self.of_query, x, self.n_queries)

    def sum_by_table(self, x: np.ndarray) -> np.ndarray:
        """x of the pairs, summed over those of a query that collide in each table: (n_q, m, k)."""
        return self._by_table(x, np.arange(len(x)), np.nonzero)

    def sum_of_once(self, x: np.ndarray) -> np.ndarray:
        """The same of the pairs that collide in one table only."""

        def of_rows(meet: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return np.arange(len(meet)), meet.argmax(1)

        return self._by_table(x, np.flatnonzero(self.counts == 1), of_rows)

    def _by_table(
        self, x: np.ndarray, pairs: np.ndarray, find: Callable[[np.ndarray], tuple[np.ndarray, ...]]
    ) -> np.ndarray:
        m = self.codes.shape[1]
        sums = np.zeros((self.n_queries * m, x.shape[1]))
        step = max(1, 2**18 // m)  # what is compared stays in cache
        for first in range(0, len(pairs), step):
            some = pairs[first : first + step]
            meet = self.codes[self.of_query[some]] == self.row_codes[self.rows[some]]
            pair, tables = find(meet)
            begin, end = self.of_query[some[0]] * m, (self.of_query[some[-1]] + 1) * m
            at = self.of_query[some[pair]] * m + tables - begin
            sums[begin:end] += _sums(at, x[some[pair]], end - begin)
        return sums.reshape(self.n_queries, m, x.shape[1])


def _by_blocks(
    sampler: LSHSampler, query: np.ndarray, values: Values, of_block: Callable[[_Block], Results]
) -> Results:
    """of_block for runs of queries with bounded unions: value and error of all queries."""
    codes = sampler.hasher.hash(query)
    size = np.cumsum(sampler.tables.bucket_sizes(codes).sum(1))
    results: list[Results] = []
    first = 0
    while first < len(query) or not results:
        before = size[first - 1] if first else 0
        end = max(first + 1, int(np.searchsorted(size, before + _PAIRS, side="right")))
        block = _Block(sampler, query[first:end], codes[first:end], first, values)
        results.append(of_block(block))
        first = end
    return [np.concatenate(x) for x in zip(*results, strict=True)]


def _sums(groups: np.ndarray, x: np.ndarray, n_groups: int) -> np.ndarray:
    """Rows of x summed by group."""
    columns = [np.bincount(groups, weights=column, minlength=n_groups) for column in x.T]
    return np.stack(columns, 1).astype(np.float64, copy=False)  # bincount of nothing has integers
