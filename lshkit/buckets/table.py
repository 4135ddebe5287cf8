"""Tables of bucket sums, kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from lshkit import _C, checks
from lshkit.buckets.codes import as_codes, as_n_buckets
from lshkit.typing import ArrayOrTensor

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self


class BucketTable:
    """Sums of values by bucket: a sketch of a stream that supports adding, removing and merging.

    Its size does not depend on the number of rows. `query` after `add` returns the same as
    `bucket_sum` of the same rows, to the rounding of `dtype`.

    Parameters
    ----------
    n_hashes : int >= 1
    n_buckets : int, 1 to 65536
    n_values : int >= 1
        Columns of a value.
    dtype : float32 or float64
        Of the sums, whatever the values are (`bucket_sum` sums float64 values in float64). Removing
        what was added leaves rounding of this type, not exact zeros. In float32 a sum of ones stops
        at 2^24.
    device : torch device or str, optional
        A CUDA device, in a build with CUDA kernels: the table, its arguments and results are there.
        No method synchronises with the GPU: codes of the table's own type, uint8 or uint16, are not
        validated, and a code that is out of range is in no bucket.

    Attributes
    ----------
    table : array or CUDA tensor `(n_hashes, n_buckets, n_values)`
        The sums, not divided by n_hashes.
    count : int
        Rows added minus rows removed.

    Notes
    -----
    Methods accept numpy arrays or torch CPU tensors, or tensors on the table's CUDA device; `query`
    returns the same kind. A table is not differentiable.

    A table must not be changed (`add`, `remove`, `merge`) by several Python threads at once, nor
    read while it is changed. Any number of threads may `query` at once.
    """

    n_hashes: int
    n_buckets: int
    n_values: int
    count: int

    def __init__(
        self,
        n_hashes: int,
        n_buckets: int,
        n_values: int,
        *,
        dtype: DTypeLike = np.float32,
        device: torch.device | str | None = None,
    ) -> None:
        self.n_hashes = checks.integer("n_hashes", n_hashes, 1)
        self.n_buckets = as_n_buckets(n_buckets)
        self.n_values = checks.integer("n_values", n_values, 1)
        try:
            known = None if dtype is None else np.dtype(dtype)  # numpy takes None for float64
        except (TypeError, ValueError):
            known = None
        if known not in (np.float32, np.float64):
            raise TypeError(f"dtype must be float32 or float64, got {dtype!r}")
        shape = self.n_hashes, self.n_buckets, self.n_values
        self.table: Any  # an array or a CUDA tensor
        if device is None or str(device) == "cpu":
            self.table = np.zeros(shape, known)
        else:
            self.table = _cuda_zeros(shape, known, device)
        self.count = 0

    @property
    def dtype(self) -> np.dtype:
        """Of the sums, float32 or float64."""
        return np.dtype(str(self.table.dtype).removeprefix("torch."))

    @property
    def device(self) -> str | torch.device:
        """Where the table is: "cpu", or a torch device."""
        return "cpu" if isinstance(self.table, np.ndarray) else self.table.device

    def add(self, codes: ArrayOrTensor, values: ArrayOrTensor) -> Self:
        """Adds values `(..., n, n_values)` to the buckets `(..., n, n_hashes)`; returns self.

        codes: integers from 0 to n_buckets - 1; values: real numbers, added in the table's dtype.
        TypeError or ValueError, before anything is added, for others and for other shapes.
        """
        return self._add(codes, values, 1)

    def remove(self, codes: ArrayOrTensor, values: ArrayOrTensor) -> Self:
        """Reverts `add` of the same rows; errors as there, and for more rows than it holds."""
        return self._add(codes, values, -1)

    def _add(self, codes: Any, values: Any, sign: int) -> Self:
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

    def query(self, codes: ArrayOrTensor) -> ArrayOrTensor:
        """Mean over the hashes of the sums in the buckets: `(..., n, n_values)`, like codes.

        In the table's dtype. codes as in `add`: `(..., n, n_hashes)`, with its errors.
        """
        rows, shape, torch = self._codes(codes)
        on_cpu = self.device == "cpu"
        out_shape = len(rows), self.n_values
        out: Any = np.empty(out_shape, self.dtype) if on_cpu else self.table.new_empty(out_shape)
        if len(rows):
            _C.bucket_table_query(self.table, rows, 1 / self.n_hashes, out, 0)
        out = out.reshape(shape[:-1] + (self.n_values,))
        return torch.from_numpy(out) if torch is not None and on_cpu else out

    def _codes(self, codes: Any) -> tuple[Any, tuple[int, ...], Any]:
        """Codes as (rows, n_hashes) where the table is, their shape as given, and torch if tensors.

        On the CPU they become a numpy array.
        """
        codes, torch = self._here("codes", codes)
        there = None if self.device == "cpu" else torch
        codes = as_codes("codes", codes, self.n_buckets, there)
        shape = tuple(codes.shape)
        if shape[-1] != self.n_hashes:
            wanted = f"(..., n, {self.n_hashes})"
            raise ValueError(f"codes must have shape {wanted}, got {shape}")
        codes = codes.reshape(-1, self.n_hashes)
        return (codes if self.device == "cpu" else codes.contiguous()), shape, torch

    def _here(self, name: str, x: Any) -> tuple[Any, Any]:
        """Real numbers as an array, or as a tensor where the table is CUDA's; torch if a tensor."""
        torch = checks.torch_of(x=x)
        if self.device == "cpu":
            return checks.to_numpy(checks.array(name, x, torch), torch), torch
        if torch is None:
            raise TypeError(f"{name} must be a tensor on {self.device}, got a {type(x).__name__}")
        if x.device != self.device:
            raise ValueError(f"{name} must be on {self.device}, got a tensor on {x.device}")
        return checks.array(name, x, torch, cuda=True), torch

    def merge(self, other: BucketTable) -> Self:
        """Adds other's rows to this table, in place; returns self."""
        if not isinstance(other, BucketTable):
            raise TypeError(f"other must be a BucketTable, got {type(other).__name__}")
        same = other.dtype == self.dtype and other.device == self.device
        if not same or other.table.shape != self.table.shape:
            raise ValueError(f"other must be like {self!r}, got {other!r}")
        self.table += other.table
        self.count += other.count
        return self

    def copy(self) -> BucketTable:
        """A table with the same contents that shares no memory with this one."""
        sizes = self.n_hashes, self.n_buckets, self.n_values
        return BucketTable(*sizes, dtype=self.dtype, device=self.device).merge(self)

    def __repr__(self) -> str:
        sizes = f"{self.n_hashes}, {self.n_buckets}, {self.n_values}"
        place = "" if self.device == "cpu" else f", device={str(self.device)!r}"
        return f"BucketTable({sizes}, dtype={self.dtype.name}{place}, count={self.count})"


def _cuda_zeros(
    shape: tuple[int, ...], dtype: np.dtype, device: torch.device | str
) -> torch.Tensor:
    import torch

    device = torch.device(device)
    if device.type != "cuda" or not _C.with_cuda:
        raise NotImplementedError(
            f"device must be the cpu, or cuda in a build with its kernels, got {device}"
        )
    return torch.zeros(shape, dtype=getattr(torch, dtype.name), device=device)
