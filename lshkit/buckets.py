"""The verbs on codes, for numpy arrays and torch tensors alike. They know nothing of hashing."""

import math

import numpy as np

from lshkit import _C, checks, hashing
from lshkit.hash_tables import HashTables, draw

__all__ = ["BucketTable", "HashTables", "bucket_sum", "collisions", "draw"]

MAX_BUCKETS = 2**16


def bucket_sum(
    query_codes,
    key_codes,
    values,
    n_buckets,
    *,
    causal=False,
    key_mask=None,
    query_weights=None,
    key_weights=None,
):
    """Mean over the hashes of the sum of the values whose key shares the query's bucket.

    When the codes come from one hash family, an unbiased estimate of sum_j p(q, k_j) v_j with p
    the collision probability (YOSO, ICML 2021, section 3.2). No pair is visited: the cost is
    linear in n_q + n_k. Leading dimensions are broadcast; all arrays or all tensors.

    Parameters
    ----------
    query_codes : integer array or tensor `(..., n_q, n_hashes)`
    key_codes : integer array or tensor `(..., n_k, n_hashes)`
        Codes from 0 to n_buckets - 1. uint8 (n_buckets <= 256) and uint16 are used as they are.
    values : array or tensor `(..., n_k, d_v)`
        float32 and float64 are summed in their own type, shorter floats in float32 and rounded
        to their type at the end, everything else in float64. Differentiable in torch.
    n_buckets : int, 1 to 65536
    causal : bool
        Query i sees the keys j <= i only.
    key_mask : boolean array or tensor `(..., n_k)`, optional
        False (or 0) takes a key out, whatever its value holds.
    query_weights, key_weights : arrays or tensors like their codes, optional
        With either, a row belongs to several buckets of a hash: codes and weights of that side are
        `(..., n, n_hashes, n_probes)`, and a pair counts with the sum over its shared buckets of
        query weight times key weight. The numbers of probes of the two sides may differ; a side
        without weights keeps its one code a hash. Differentiable in torch, once.

    Returns
    -------
    sums : array or tensor `(..., n_q, d_v)`
        0 for a query that collides with no key. A NaN in a value reaches the queries whose sum
        contains it and no other.

    Raises
    ------
    TypeError, ValueError
        Arguments of the wrong type or shape, codes of n_buckets or more, arrays and tensors mixed.
    """
    if query_weights is not None or key_weights is not None:
        from lshkit import weighted_buckets

        sides = (query_codes, query_weights), (key_codes, key_weights)
        return weighted_buckets.bucket_sum(*sides, values, n_buckets, causal, key_mask)
    torch = checks.torch_of(
        query_codes=query_codes, key_codes=key_codes, values=values, key_mask=key_mask
    )
    n_buckets = checks.integer("n_buckets", n_buckets, 1, MAX_BUCKETS)
    causal = checks.boolean("causal", causal)
    cuda = True
    query_codes = as_codes("query_codes", query_codes, n_buckets, torch, cuda=cuda)
    key_codes = as_codes("key_codes", key_codes, n_buckets, torch, cuda=cuda)
    values = checks.array("values", values, torch, cuda=cuda)
    if key_mask is not None:
        key_mask = checks.array(
            "key_mask", key_mask, torch, kinds="biu", wanted="booleans", cuda=cuda
        )
    leading = _check_shapes(query_codes, key_codes, values, key_mask)

    query_codes = _heads(query_codes, leading, torch)
    key_codes = _heads(key_codes, leading, torch)
    values = _heads(values, leading, torch)
    if key_mask is not None:
        key_mask = _heads((key_mask != 0)[..., None], leading, torch)[:, 0, :, 0]
    order = 1 if causal else 0
    if torch is None:
        sums = _numpy_bucket_sum(query_codes, key_codes, values, n_buckets, order, key_mask)
    else:
        from lshkit import torch_ops

        values = values if values.is_floating_point() else values.double()
        sums = torch_ops.bucket_sum(query_codes, key_codes, values, n_buckets, order, key_mask)
    return sums.reshape(leading + tuple(sums.shape[-2:]))


def _numpy_bucket_sum(query_codes, key_codes, values, n_buckets, order, key_mask):
    given, dtype = values.dtype, sum_dtype(values)
    shape = query_codes.shape[:-1] + values.shape[-1:]
    if 0 in shape or 0 in values.shape:
        return np.zeros(shape, given if given == np.float16 else dtype)
    sums = np.empty(shape, dtype)
    # A broadcast or transposed array may reach this point as a view that is not contiguous.
    values = np.ascontiguousarray(values, dtype)
    query_codes, key_codes = np.ascontiguousarray(query_codes), np.ascontiguousarray(key_codes)
    key_mask = None if key_mask is None else np.ascontiguousarray(key_mask)
    scale = 1 / query_codes.shape[-1]
    _C.bucket_sum(query_codes, key_codes, values, n_buckets, order, key_mask, scale, sums, 0)
    return sums.astype(given) if given == np.float16 else sums


def sum_dtype(values):
    """What an array's sums are computed in."""
    given = values.dtype
    return np.float32 if given.kind == "f" and given.itemsize <= 4 else np.float64


def as_codes(name, codes, n_buckets, torch=None, *, cuda=False):
    """Integer codes as contiguous uint8 (n_buckets <= 256) or uint16, each below n_buckets.

    The operators of torch_ops check the range themselves, so tensors of the right type pass.
    """
    codes = checks.array(name, codes, torch, kinds="iu", wanted="integer codes", cuda=cuda)
    if codes.ndim < 2 or codes.shape[-1] == 0:
        shape = tuple(codes.shape)
        raise ValueError(f"{name} must have shape (..., n, n_hashes), n_hashes >= 1, got {shape}")
    wanted = "uint8" if n_buckets <= 256 else "uint16"
    right = codes.dtype == getattr(torch or np, wanted)
    trusted = right and (torch is not None or n_buckets in (256, MAX_BUCKETS))
    if not trusted and 0 not in codes.shape:
        # Not every type of tensor has a minimum.
        numbers = codes if torch is None else codes.to(torch.int64)
        if torch is not None and codes.is_cuda:  # to look would be to wait for the GPU
            from lshkit.torch_ops.assertions import require

            inside = (numbers >= 0) & (numbers < n_buckets)
            require(inside, f"{name} must be from 0 to n_buckets - 1 = {n_buckets - 1}")
            return codes.to(getattr(torch, wanted))
        low, high = int(numbers.min()), int(numbers.max())
        if low < 0 or high >= n_buckets:
            bad = low if low < 0 else high
            raise ValueError(f"{name} must be from 0 to n_buckets - 1 = {n_buckets - 1}, got {bad}")
    if torch is None:
        return np.ascontiguousarray(codes, wanted)
    return codes.to(getattr(torch, wanted))


def _check_shapes(query_codes, key_codes, values, key_mask):
    """The leading dimensions that all arguments broadcast to."""
    shapes = {
        "query_codes": tuple(query_codes.shape),
        "key_codes": tuple(key_codes.shape),
        "values": tuple(values.shape),
    }
    if values.ndim < 2:
        raise ValueError(f"values must have shape (..., n_k, d_v), got {shapes['values']}")
    leading = {name: shape[:-2] for name, shape in shapes.items()}
    if key_mask is not None:
        shapes["key_mask"] = tuple(key_mask.shape)
        leading["key_mask"] = shapes["key_mask"][:-1]
    n_hashes, n_keys = shapes["query_codes"][-1], shapes["key_codes"][-2]
    if shapes["key_codes"][-1] != n_hashes:
        raise ValueError(
            f"key_codes must have the {n_hashes} hashes of query_codes in its last dimension, "
            f"got shape {shapes['key_codes']}"
        )
    if shapes["values"][-2] != n_keys:
        raise ValueError(
            f"values must have a row for each of the {n_keys} keys, got shape {shapes['values']}"
        )
    if key_mask is not None and shapes["key_mask"][-1:] != (n_keys,):
        raise ValueError(
            f"key_mask must have shape (..., {n_keys}), got shape {shapes['key_mask']}"
        )
    try:
        return np.broadcast_shapes(*leading.values())
    except ValueError:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"the leading dimensions do not match: {listed}") from None


def _heads(x, leading, torch):
    """x broadcast to the leading dimensions and reshaped to (batch, 1, rows, columns)."""
    shape = leading + tuple(x.shape[-2:])
    x = np.broadcast_to(x, shape) if torch is None else x.expand(shape)
    return x.reshape((math.prod(leading), 1) + shape[-2:])


def collisions(query_codes, key_codes, *, causal=False, key_mask=None):
    """Every pair of a query and a key that share a code in some hash, with the number of hashes.

    All arrays or all tensors. One set of codes at a time: ValueError for leading dimensions.

    Parameters
    ----------
    query_codes : integer array or tensor `(n_q, n_hashes)`, n_hashes 1 to 65535
    key_codes : integer array or tensor `(n_k, n_hashes)`
        Codes from 0 to 65535. uint8 and uint16, the same for both, are used as they are.
    causal : bool
        Query i sees the keys j <= i only.
    key_mask : boolean array or tensor `(n_k,)`, optional
        False (or 0) takes a key out.

    Returns
    -------
    indptr, indices, counts : arrays or tensors `(n_q + 1,)` int64, `(nnz,)` int32, `(nnz,)` int32
        The pairs in CSR form: query i collides with the keys
        `indices[indptr[i]:indptr[i + 1]]`, ascending, in `counts[...]` of the hashes.
        `scipy.sparse.csr_array((counts, indices, indptr), (n_q, n_k))` is the matrix of counts.

    Notes
    -----
    The time is that of comparing all codes, n_q n_k n_hashes bytes (twice that for uint16) through
    the vector unit, or, where it costs less, that of going through the buckets: the sum of the
    counts, and a few lookups for each query and hash. Each is done twice, once for the size of the
    result. The memory is the result's and, for the buckets, up to 20 bytes a key and hash.

    CUDA tensors, in a build with CUDA kernels, are compared pair by pair, and their results are on
    the same device; the call waits for the GPU once, for the number of pairs.

    Examples
    --------
    >>> indptr, indices, counts = collisions([[3, 5], [3, 3]], [[3, 5], [1, 5]])
    >>> indptr.tolist(), indices.tolist(), counts.tolist()
    ([0, 2, 3], [0, 1, 0], [2, 1, 1])
    """
    torch = checks.torch_of(query_codes=query_codes, key_codes=key_codes, key_mask=key_mask)
    causal = checks.boolean("causal", causal)
    names = ("query_codes", "key_codes")
    codes = [
        checks.array(name, x, torch, kinds="iu", wanted="integer codes", cuda=_C.with_cuda)
        for name, x in zip(names, (query_codes, key_codes), strict=True)
    ]
    for name, x in zip(names, codes, strict=True):
        if x.ndim != 2 or not 1 <= x.shape[1] <= hashing.MAX_HASHES:
            wanted = f"(n, n_hashes), n_hashes 1 to {hashing.MAX_HASHES}"
            raise ValueError(f"{name} must have shape {wanted}, got {tuple(x.shape)}")
    if codes[0].shape[1] != codes[1].shape[1]:
        raise ValueError(
            f"key_codes must have the {codes[0].shape[1]} hashes of query_codes, "
            f"got shape {tuple(codes[1].shape)}"
        )
    if key_mask is not None:
        wanted = {"kinds": "biu", "wanted": "booleans", "cuda": _C.with_cuda}
        key_mask = checks.array("key_mask", key_mask, torch, **wanted) != 0
        if tuple(key_mask.shape) != (codes[1].shape[0],):
            wanted = (codes[1].shape[0],)
            raise ValueError(f"key_mask must have shape {wanted}, got {tuple(key_mask.shape)}")
    small = all(x.dtype == (torch or np).uint8 for x in codes)
    codes = [
        as_codes(name, x, 256 if small else MAX_BUCKETS, torch, cuda=True)
        for name, x in zip(names, codes, strict=True)
    ]
    if torch is not None and codes[0].is_cuda:
        return _cuda_collisions(codes, key_mask, causal, torch)
    codes = [np.ascontiguousarray(x) for x in codes]  # of a tensor: a view of its memory
    key_mask = None if key_mask is None else np.ascontiguousarray(key_mask)
    threads = 0 if torch is None else torch.get_num_threads()
    indptr = np.empty(len(codes[0]) + 1, np.int64)
    _C.collision_indptr(*codes, key_mask, causal, indptr, threads)
    indices, counts = np.empty(indptr[-1], np.int32), np.empty(indptr[-1], np.int32)
    _C.collisions(*codes, key_mask, causal, indptr, indices, counts, threads)
    csr = indptr, indices, counts
    return csr if torch is None else tuple(torch.from_numpy(x) for x in csr)


def _cuda_collisions(codes, key_mask, causal, torch):
    tensors = *(x.contiguous() for x in codes), None if key_mask is None else key_mask.contiguous()
    like = {"device": codes[0].device}
    indptr = torch.empty(len(codes[0]) + 1, dtype=torch.int64, **like)
    _C.collision_indptr(*tensors, causal, indptr)
    pairs = int(indptr[-1])
    indices, counts = (torch.empty(pairs, dtype=torch.int32, **like) for _ in range(2))
    _C.collisions(*tensors, causal, indptr, indices, counts)
    return indptr, indices, counts


class BucketTable:
    """Sums of values by bucket, kept: a stream's sketch that is added to, removed from and merged.

    Its size does not depend on the number of rows. `query` after `add` gives what `bucket_sum`
    gives for the same rows.

    Parameters
    ----------
    n_hashes : int >= 1
    n_buckets : int, 1 to 65536
    n_values : int >= 1
        Length of a value.
    dtype : float32 or float64
        Of the sums. Removing what was added leaves rounding of this type, not exact zeros.
    device : torch device or str, optional
        A CUDA device, in a build with its kernels: the table lives there, and takes and gives
        tensors there. No method waits for the GPU: codes of the table's own type, uint8 or uint16,
        are not looked at, and one that is out of range is in no bucket.

    Attributes
    ----------
    table : array or CUDA tensor `(n_hashes, n_buckets, n_values)`
        The sums, not divided by n_hashes.
    count : int
        Rows added minus rows removed.

    Notes
    -----
    Methods take numpy arrays or torch CPU tensors, or those of the table's CUDA device; `query`
    returns what it was given. Gradients do not pass through a table.

    A table must not be changed (`add`, `remove`, `merge`) by several Python threads at once, nor
    read while it is changed: updates would be lost. Any number of threads may `query` at once.
    """

    def __init__(self, n_hashes, n_buckets, n_values, *, dtype=np.float32, device=None):
        self.n_hashes = checks.integer("n_hashes", n_hashes, 1)
        self.n_buckets = checks.integer("n_buckets", n_buckets, 1, MAX_BUCKETS)
        self.n_values = checks.integer("n_values", n_values, 1)
        try:
            known = None if dtype is None else np.dtype(dtype)  # numpy takes None for float64
        except (TypeError, ValueError):
            known = None
        if known not in (np.float32, np.float64):
            raise TypeError(f"dtype must be float32 or float64, got {dtype!r}")
        shape = self.n_hashes, self.n_buckets, self.n_values
        if device is None or str(device) == "cpu":
            self.table = np.zeros(shape, known)
        else:
            self.table = _cuda_zeros(shape, known, device)
        self.count = 0

    @property
    def dtype(self):
        """That of the sums, float32 or float64."""
        return np.dtype(str(self.table.dtype).removeprefix("torch."))

    @property
    def device(self):
        """Where the table is: "cpu", or a torch device."""
        return "cpu" if isinstance(self.table, np.ndarray) else self.table.device

    def add(self, codes, values):
        """Adds values `(..., n, n_values)` to the buckets `(..., n, n_hashes)`; returns self."""
        return self._add(codes, values, 1)

    def remove(self, codes, values):
        """Undoes `add` of the same rows; ValueError when more rows would go than there are."""
        return self._add(codes, values, -1)

    def _add(self, codes, values, sign):
        codes, shape, torch = self._codes(codes)
        values = self._here("values", values)[0]
        wanted = shape[:-1] + (self.n_values,)
        if tuple(values.shape) != wanted:
            raise ValueError(f"values must have shape {wanted}, got {tuple(values.shape)}")
        rows = len(codes)
        if self.count + sign * rows < 0:
            raise ValueError(f"codes has {rows} rows to remove, the table holds {self.count}")
        if self.device == "cpu":
            values = np.ascontiguousarray(values, self.dtype)
        else:
            values = values.detach().to(self.table.dtype).contiguous()
        values = values.reshape(-1, self.n_values)
        if rows:
            _C.bucket_table_add(self.table, codes, values, sign, 0)
        self.count += sign * rows
        return self

    def query(self, codes):
        """Mean over the hashes of the sums in the buckets: `(..., n, n_values)`, like codes."""
        codes, shape, torch = self._codes(codes)
        on_cpu = self.device == "cpu"
        out_shape = len(codes), self.n_values
        out = np.empty(out_shape, self.dtype) if on_cpu else self.table.new_empty(out_shape)
        if len(codes):
            _C.bucket_table_query(self.table, codes, 1 / self.n_hashes, out, 0)
        out = out.reshape(shape[:-1] + (self.n_values,))
        return torch.from_numpy(out) if torch is not None and on_cpu else out

    def _codes(self, codes):
        """Codes as (rows, n_hashes) where the table is, their shape as given, and torch if tensors.

        On the CPU they become a numpy array.
        """
        codes, torch = self._here("codes", codes)
        codes = as_codes(
            "codes", codes, self.n_buckets, None if self.device == "cpu" else torch, cuda=True
        )
        shape = tuple(codes.shape)
        if shape[-1] != self.n_hashes:
            wanted = f"(..., n, {self.n_hashes})"
            raise ValueError(f"codes must have shape {wanted}, got {shape}")
        codes = codes.reshape(-1, self.n_hashes)
        return (codes if self.device == "cpu" else codes.contiguous()), shape, torch

    def _here(self, name, x):
        """Real numbers as an array, or as a tensor where the table is CUDA's; torch if a tensor."""
        torch = checks.torch_of(x=x)
        if self.device == "cpu":
            return _as_numpy(name, x), torch
        if torch is None:
            raise TypeError(f"{name} must be a tensor on {self.device}, got a {type(x).__name__}")
        if x.device != self.device:
            raise ValueError(f"{name} must be on {self.device}, got a tensor on {x.device}")
        return checks.array(name, x, torch, cuda=True), torch

    def merge(self, other):
        """Adds other's rows to this table, in place; returns self."""
        if not isinstance(other, BucketTable):
            raise TypeError(f"other must be a BucketTable, got {type(other).__name__}")
        same = other.dtype == self.dtype and other.device == self.device
        if not same or other.table.shape != self.table.shape:
            raise ValueError(f"other must be like {self!r}, got {other!r}")
        self.table += other.table
        self.count += other.count
        return self

    def copy(self):
        """A table with the same contents that shares no memory with this one."""
        sizes = self.n_hashes, self.n_buckets, self.n_values
        return BucketTable(*sizes, dtype=self.dtype, device=self.device).merge(self)

    def __repr__(self):
        sizes = f"{self.n_hashes}, {self.n_buckets}, {self.n_values}"
        place = "" if self.device == "cpu" else f", device={str(self.device)!r}"
        return f"BucketTable({sizes}, dtype={self.dtype.name}{place}, count={self.count})"


def _cuda_zeros(shape, dtype, device):
    import torch

    device = torch.device(device)
    if device.type != "cuda" or not _C.with_cuda:
        raise NotImplementedError(
            f"device must be the cpu, or cuda in a build with its kernels, got {device}"
        )
    return torch.zeros(shape, dtype=getattr(torch, dtype.name), device=device)


def _as_numpy(name, x):
    """A numpy array of an array or tensor of real numbers."""
    torch = checks.torch_of(x=x)
    x = checks.array(name, x, torch)
    if torch is None:
        return x
    return (x.float() if x.dtype == torch.bfloat16 else x).detach().numpy()
