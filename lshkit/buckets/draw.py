"""Hash tables of codes, and the draw verb: members of a query's bucket with exact probabilities."""

from typing import Any, TypeAlias

import numpy as np

from lshkit import _C, checks
from lshkit.buckets.codes import MAX_ROWS, like, threads_of, wide_codes
from lshkit.typing import ArrayOrTensor, Seed

# Of lshkit::HashTables, in the order in which the core takes them.
Tables: TypeAlias = tuple[np.ndarray | None, ...]


class HashTables:
    """The rows of a data set by bucket, one table per hash, for draws and unions.

    Depends only on codes: equal codes are one bucket. Memory O(n n_hashes).

    Parameters
    ----------
    codes : integer array or tensor `(n, n_hashes)`, n_hashes 1 to 65535
        Codes >= 0 of any width. An unsigned type is kept.
    weights : array or tensor of real numbers `(n,)`, optional
        Finite and >= 0: members of a bucket are drawn in proportion to them. None: uniformly.

    Attributes
    ----------
    n_rows, n_hashes : int
    nbytes : int
        Memory of the tables.

    Raises
    ------
    TypeError, ValueError
        Codes or weights of the wrong type or shape, negative codes, weights negative or not finite
        (named by the row).
    """

    def __init__(self, codes: ArrayOrTensor, *, weights: ArrayOrTensor | None = None) -> None:
        checks.torch_of(codes=codes, weights=weights)
        wide, torch = wide_codes("codes", codes)
        self.n_rows: int = wide.shape[0]
        self.n_hashes: int = wide.shape[1]
        self._dtype = wide.dtype
        checked = None if weights is None else as_weights(weights, self.n_rows).copy()
        self._tables = _build(wide, checked, threads_of(torch))

    @property
    def nbytes(self) -> int:
        """Memory of the tables."""
        return sum(x.nbytes for x in self._tables if x is not None)

    @property
    def weighted(self) -> bool:
        """Whether draws are in proportion to weights."""
        return self._tables[5] is not None

    def draw(
        self, query_codes: ArrayOrTensor, n_samples: int | None = None, *, seed: Seed = None
    ) -> tuple[ArrayOrTensor, ArrayOrTensor, ArrayOrTensor]:
        """Members of the queries' buckets, drawn with replacement, and the draws' probabilities.

        Parameters
        ----------
        query_codes : integer array or tensor `(n_q, n_hashes)`
        n_samples : int >= 1, optional
            Sample t of a query comes from table (offset + t) mod n_hashes, with an offset drawn
            uniformly for each query: every table is equally likely. None: one sample from each
            table in order.
        seed : None, int from 0 to 2**128 - 1 or numpy.random.Generator
            The same integer always gives the same draws, at any number of threads.

        Returns
        -------
        indices : int64 array or tensor `(n_q, n_samples)`
            Rows; -1 where the bucket is empty, or its weights are all 0.
        probabilities : float64 `(n_q, n_samples)`
            Of the draw, given the table: 1 / bucket size, or the row's weight over the bucket's. 0
            where nothing could be drawn. Such a draw counts as a zero of the estimate; leaving it
            out would bias it.
        tables : int32 `(n_q, n_samples)`
            The table of each draw.

        Raises
        ------
        TypeError, ValueError
            query_codes are no integers of shape `(n_q, n_hashes)`; n_samples or seed out of range.
        """
        codes, torch = self._queries(query_codes)
        rotate = n_samples is not None
        most = checks.MOST_BYTES // (8 * max(len(codes), 1))
        n_samples = checks.integer("n_samples", n_samples, 1, most) if rotate else self.n_hashes
        shape = len(codes), n_samples
        draws = np.empty(shape, np.int64), np.empty(shape), np.empty(shape, np.int32)
        _C.draw(self._tables, codes, rotate, as_seed(seed), *draws, threads_of(torch))
        return like(torch, *draws)

    def union(
        self, query_codes: ArrayOrTensor, *, max_bucket_size: int | None = None
    ) -> tuple[ArrayOrTensor, ArrayOrTensor, ArrayOrTensor]:
        """Every row that shares a bucket with the query, once, and in how many tables it collides.

        Parameters
        ----------
        query_codes : integer array or tensor `(n_q, n_hashes)`
        max_bucket_size : int >= 0, optional
            Skips larger buckets, as if the rows did not collide with the query there.

        Returns
        -------
        indptr, indices, counts : `(n_q + 1,)` int64, `(nnz,)` int32, `(nnz,)` int32
            In CSR form: query i collides with the rows `indices[indptr[i]:indptr[i + 1]]`,
            ascending, in `counts[...]` of the tables. The same as `lshkit.buckets.collisions`, from
            stored tables. A row whose collision probability is p is included with probability 1 -
            (1 - p)^n_hashes.

        Raises
        ------
        TypeError, ValueError
            query_codes are no integers of shape `(n_q, n_hashes)`; max_bucket_size out of range.
        """
        codes, torch = self._queries(query_codes)
        most = MAX_ROWS
        if max_bucket_size is not None:
            most = checks.integer("max_bucket_size", max_bucket_size, 0)
        indptr = np.empty(len(codes) + 1, np.int64)
        sizes = min(most, MAX_ROWS), indptr
        found = _C.bucket_union(self._tables, codes, *sizes, threads_of(torch))
        indices, counts = (np.empty(found.size(), np.int32) for _ in range(2))
        found.copy(indices, counts, threads_of(torch))
        return like(torch, indptr, indices, counts)

    def bucket_sizes(self, query_codes: ArrayOrTensor) -> ArrayOrTensor:
        """Numbers of rows in the queries' buckets: int64 `(n_q, n_hashes)`.

        query_codes as in `union`, with its errors.
        """
        codes, torch = self._queries(query_codes)
        sizes = np.empty(codes.shape, np.int64)
        _C.bucket_sizes(self._tables, codes, sizes, threads_of(torch))
        return like(torch, sizes)[0]

    def bucket_weights(self, query_codes: ArrayOrTensor) -> ArrayOrTensor:
        """Sums of the weights in the queries' buckets: float64 `(n_q, n_hashes)`.

        The sizes where there are no weights. query_codes as in `union`, with its errors.
        """
        codes, torch = self._queries(query_codes)
        sums = np.empty(codes.shape, np.float64 if self.weighted else np.int64)
        _C.bucket_sizes(self._tables, codes, sums, threads_of(torch))
        sums = sums.astype(np.float64, copy=False)
        return like(torch, sums)[0]

    def _queries(self, query_codes: Any) -> tuple[np.ndarray, Any]:
        codes, torch = wide_codes("query_codes", query_codes)
        if codes.shape[1] != self.n_hashes:
            wanted = f"(n_q, {self.n_hashes})"
            raise ValueError(f"query_codes must have shape {wanted}, got {codes.shape}")
        if codes.dtype != self._dtype:
            high = int(codes.max(initial=0))
            if high > np.iinfo(self._dtype).max:
                raise ValueError(
                    f"query_codes must be {self._dtype} numbers like the codes of the tables, "
                    f"got {high}"
                )
            codes = codes.astype(self._dtype)
        return codes, torch

    def __repr__(self) -> str:
        weighted = ", weighted" if self.weighted else ""
        return f"HashTables(n_rows={self.n_rows}, n_hashes={self.n_hashes}{weighted})"


def _build(codes: np.ndarray, weights: np.ndarray | None, threads: int) -> Tables:
    """The arrays of lshkit::HashTables, in the order in which the core takes them."""
    n, m = codes.shape
    order = np.empty((m, n), np.int32)
    n_buckets = np.empty(m, np.int64)
    sums = None if weights is None else np.empty((m, n))
    n_codes = _range_of(codes)
    if n_codes <= 2 * n + 1024:
        bins = np.empty((m, n_codes + 1), np.int32)
        tables = order, bins, None, None, None, weights, sums
        _C.build_hash_tables(codes, tables, n_buckets, threads)
        return tables
    bins = np.empty((m, 2 ** max(1, (n - 1).bit_length()) + 1), np.int32)
    # There is room for a bucket for each row. Pages that no table needs are never touched.
    bucket_codes = np.empty(m * (n + 1), codes.dtype)
    bucket_starts = np.empty(m * (n + 1), np.int32)
    first = np.arange(m) * (n + 1)
    tables = order, bins, bucket_codes, bucket_starts, first, weights, sums
    _C.build_hash_tables(codes, tables, n_buckets, threads)
    if n_buckets.sum() < 0.9 * m * n:
        used = [slice(a, a + size + 1) for a, size in zip(first, n_buckets, strict=True)]
        bucket_codes, bucket_starts = (
            np.concatenate([x[u] for u in used]) for x in (bucket_codes, bucket_starts)
        )
        first = np.concatenate([[0], np.cumsum(n_buckets + 1)[:-1]])
    return order, bins, bucket_codes, bucket_starts, first, weights, sums


def _range_of(codes: np.ndarray) -> int:
    """A number that all codes are below; no more than twice the smallest where that matters."""
    n, most = len(codes), np.iinfo(codes.dtype).max + 1
    return most if most <= 2 * n + 1024 else int(codes.max(initial=0)) + 1


def draw(
    query_codes: ArrayOrTensor,
    key_codes: ArrayOrTensor,
    n_samples: int | None = None,
    *,
    weights: ArrayOrTensor | None = None,
    seed: Seed = None,
) -> tuple[ArrayOrTensor, ArrayOrTensor, ArrayOrTensor]:
    """Members of the queries' buckets, drawn with replacement: `HashTables.draw` in one call.

    key_codes are integers `(n_k, n_hashes)`, weights numbers >= 0 `(n_k,)` in proportion to which
    members of a bucket are drawn, None: all alike. The other arguments, what is returned and errors
    are those of `HashTables` and its `draw`.
    """
    checks.torch_of(query_codes=query_codes, key_codes=key_codes, weights=weights)
    wide_codes("key_codes", key_codes)  # by the name that it has here
    tables = HashTables(key_codes, weights=weights)
    return tables.draw(query_codes, n_samples, seed=seed)


def as_seed(seed: Seed) -> int:
    """A 64-bit integer from a seed: itself, or drawn where it is none or has more bits."""
    seed = checks.seed(seed)
    if isinstance(seed, int) and seed < 2**64:
        return seed
    return int(np.random.default_rng(seed).integers(2**64, dtype=np.uint64))


def as_weights(weights: Any, n_rows: int) -> np.ndarray:
    """Finite float64 weights >= 0, one for each row."""
    torch = checks.torch_of(weights=weights)
    weights = checks.to_numpy(checks.array("weights", weights, torch), torch)
    if weights.shape != (n_rows,):
        raise ValueError(f"weights must have shape {(n_rows,)}, got {weights.shape}")
    weights = np.ascontiguousarray(weights, np.float64)
    bad = np.flatnonzero(~((weights >= 0) & (weights < np.inf)))
    if len(bad):
        value = weights[bad[0]]
        raise ValueError(f"weights must be finite and >= 0, got {value} in row {bad[0]}")
    with np.errstate(over="ignore"):
        total = weights.sum()
    if not np.isfinite(total):
        raise ValueError("weights must have a finite sum, got infinity")
    return weights
