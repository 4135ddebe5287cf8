"""Hash tables of codes, and the draw verb: members of a query's bucket with exact probabilities."""

import numpy as np

from lshkit import checks

MAX_HASHES = 2**16 - 1
MAX_ROWS = 2**31 - 1


class HashTables:
    """The rows of a data set by their buckets, one table for each hash: kept for draws and unions.

    Knows codes only: equal codes are one bucket. Memory O(n m).

    Parameters
    ----------
    codes : integer array or tensor `(n, n_hashes)`, n_hashes 1 to 65535
        Codes >= 0 of any width. An unsigned type is kept as it is.
    weights : array or tensor of real numbers `(n,)`, optional
        Finite and >= 0: a member of a bucket is drawn in proportion to them. Without, uniformly.

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

    def __init__(self, codes, *, weights=None):
        codes, _ = _as_codes("codes", codes)
        self.n_rows, self.n_hashes = codes.shape
        self._dtype = codes.dtype
        self._codes = codes
        self._weights = None if weights is None else as_weights(weights, self.n_rows)
        self._order = np.argsort(codes, axis=0, kind="stable").T.astype(np.int32)
        self._sorted = np.take_along_axis(codes.T, self._order, 1)

    @property
    def nbytes(self):
        return self._order.nbytes + self._sorted.nbytes

    def draw(self, query_codes, n_samples=None, *, seed=None):
        """Members of the queries' buckets, drawn with replacement, and the draws' probabilities.

        Parameters
        ----------
        query_codes : integer array or tensor `(n_q, n_hashes)`
        n_samples : int >= 1, optional
            Sample t of a query comes from table (offset + t) mod n_hashes, with an offset drawn
            uniformly for each query: every table is as likely as every other. Without it, one
            sample from each table in order.
        seed : None, int >= 0 or numpy.random.Generator
            The same integer always gives the same draws, at any number of threads.

        Returns
        -------
        indices : int64 array or tensor `(n_q, n_samples)`
            Rows; -1 where the bucket is empty, or its weights are all 0.
        probabilities : float64 `(n_q, n_samples)`
            With which the row was drawn, given the table: 1 / bucket size, or the row's weight over
            the bucket's. 0 where nothing could be drawn. Such a draw counts as a zero of the
            estimate; leaving it out would bias it.
        tables : int32 `(n_q, n_samples)`
        """
        from lshkit import reference

        query_codes, torch = self._queries(query_codes)
        if n_samples is not None:
            n_samples = checks.integer("n_samples", n_samples, 1)
        seed = as_seed(seed)
        m, n_q = self.n_hashes, len(query_codes)
        samples = m if n_samples is None else n_samples
        words = reference.random_words(seed, np.arange(n_q), samples + 1)
        offset = reference.below(words[:, 0], m) if n_samples is not None else np.zeros(n_q, int)
        tables = ((offset[:, None] + np.arange(samples)) % m).astype(np.int32)
        lo, hi = self._ranges(query_codes)
        lo, hi = np.take_along_axis(lo, tables, 1), np.take_along_axis(hi, tables, 1)
        indices = np.full(tables.shape, -1, np.int64)
        probabilities = np.zeros(tables.shape)
        if self._weights is None:
            some = hi > lo
            at = lo[some] + reference.below(words[:, 1:][some], (hi - lo)[some])
            indices[some] = self._order[tables[some], at]
            probabilities[some] = 1 / (hi - lo)[some]
        else:
            for i, t in np.ndindex(indices.shape):
                members = self._order[tables[i, t], lo[i, t] : hi[i, t]]
                sums = np.cumsum(self._weights[members])
                if len(sums) and sums[-1] > 0:
                    point = float(words[i, t + 1] >> np.uint64(11)) * 2.0**-53 * sums[-1]
                    j = members[np.searchsorted(sums, point, side="right")]
                    indices[i, t], probabilities[i, t] = j, self._weights[j] / sums[-1]
        return _like(torch, indices, probabilities, tables)

    def union(self, query_codes):
        """Every row that shares a bucket with the query, once, and in how many tables it does.

        Returns `(indptr, indices, counts)` in CSR form, `(n_q + 1,)` int64, `(nnz,)` int32 and
        `(nnz,)` int32, ascending in each query.
        """
        query_codes, torch = self._queries(query_codes)
        lo, hi = self._ranges(query_codes)
        indptr, indices, counts = [0], [np.empty(0, np.int32)], [np.empty(0, np.int64)]
        for i in range(len(query_codes)):
            ranges = [self._order[h, lo[i, h] : hi[i, h]] for h in range(self.n_hashes)]
            rows, times = np.unique(np.concatenate(ranges), return_counts=True)
            indptr.append(indptr[-1] + len(rows))
            indices.append(rows)
            counts.append(times)
        csr = np.array(indptr), np.concatenate(indices), np.concatenate(counts).astype(np.int32)
        return _like(torch, *csr)

    def bucket_sizes(self, query_codes):
        """Numbers of rows in the queries' buckets: int64 `(n_q, n_hashes)`."""
        query_codes, torch = self._queries(query_codes)
        lo, hi = self._ranges(query_codes)
        return _like(torch, (hi - lo).astype(np.int64))[0]

    def bucket_weights(self, query_codes):
        """Sums of the weights in the queries' buckets: float64 `(n_q, n_hashes)`."""
        query_codes, torch = self._queries(query_codes)
        weights = np.ones(self.n_rows) if self._weights is None else self._weights
        lo, hi = self._ranges(query_codes)
        sums = np.zeros(query_codes.shape)
        for h in range(self.n_hashes):
            total = np.concatenate([[0], np.cumsum(weights[self._order[h]])])
            sums[:, h] = total[hi[:, h]] - total[lo[:, h]]
        return _like(torch, sums)[0]

    def _ranges(self, query_codes):
        pairs = [
            [np.searchsorted(s, q, side=side) for side in ("left", "right")]
            for s, q in zip(self._sorted, query_codes.T, strict=True)
        ]
        lo, hi = np.array(pairs).transpose(1, 2, 0)
        return lo, hi

    def _queries(self, query_codes):
        codes, torch = _as_codes("query_codes", query_codes)
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

    def __repr__(self):
        weighted = "" if self._weights is None else ", weighted"
        return f"HashTables(n_rows={self.n_rows}, n_hashes={self.n_hashes}{weighted})"


def draw(query_codes, key_codes, n_samples=None, *, weights=None, seed=None):
    """`HashTables(key_codes, weights=weights).draw(query_codes, n_samples, seed=seed)`."""
    checks.torch_of(query_codes=query_codes, key_codes=key_codes, weights=weights)
    tables = HashTables(key_codes, weights=weights)
    return tables.draw(query_codes, n_samples, seed=seed)


def as_seed(seed):
    """A 64-bit integer from None, an int >= 0 or a numpy Generator."""
    if seed is None or isinstance(seed, np.random.Generator):
        return int(np.random.default_rng(seed).integers(2**64, dtype=np.uint64))
    return checks.integer("seed", seed, 0, 2**64 - 1)


def as_weights(weights, n_rows):
    """Finite float64 weights >= 0, one for each row."""
    torch = checks.torch_of(weights=weights)
    weights = checks.array("weights", weights, torch)
    if tuple(weights.shape) != (n_rows,):
        raise ValueError(f"weights must have shape {(n_rows,)}, got {tuple(weights.shape)}")
    if torch is not None:
        weights = weights.detach().to(torch.float64).numpy()
    weights = np.ascontiguousarray(weights, np.float64)
    bad = np.flatnonzero(~((weights >= 0) & (weights < np.inf)))
    if len(bad):
        value = weights[bad[0]]
        raise ValueError(f"weights must be finite and >= 0, got {value} in row {bad[0]}")
    if not np.isfinite(weights.sum()):
        raise ValueError("weights must have a finite sum, got infinity")
    return weights


def _as_codes(name, codes):
    """Unsigned codes as a contiguous numpy array (n, n_hashes), and torch if they were a tensor."""
    torch = checks.torch_of(**{name: codes})
    codes = checks.array(name, codes, torch, kinds="iu", wanted="integer codes")
    codes = codes if torch is None else codes.detach().numpy()
    if codes.ndim != 2 or not 1 <= codes.shape[1] <= MAX_HASHES or len(codes) > MAX_ROWS:
        wanted = f"(n, n_hashes), n_hashes 1 to {MAX_HASHES}"
        raise ValueError(f"{name} must have shape {wanted}, got {codes.shape}")
    if codes.dtype.kind == "i":
        low = int(codes.min(initial=0))
        if low < 0:
            raise ValueError(f"{name} must be >= 0, got {low}")
        codes = codes.astype(f"u{codes.dtype.itemsize}")
    return np.ascontiguousarray(codes, codes.dtype.newbyteorder("=")), torch


def _like(torch, *arrays):
    return arrays if torch is None else tuple(torch.from_numpy(x) for x in arrays)
