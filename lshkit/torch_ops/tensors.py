"""Tensors as the core takes and returns them: dtypes, layouts, new results.

A call of torch that has nothing to do still takes 10 to 30 us where it finds the caches cold, as
behind the core: so there is a look before each.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Three: TypeAlias = tuple[Tensor, Tensor, Tensor]


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype is dtype else x.to(dtype)


def rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in the dtype, its last dimension contiguous; a strided view passes without a copy."""
    x = in_dtype(x, dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


def rows_of(dtype: torch.dtype, query: Tensor, key: Tensor, value: Tensor) -> Three:
    return rows(query, dtype), rows(key, dtype), rows(value, dtype)


def mask_rows(key_mask: Tensor | None) -> Tensor | None:
    return key_mask if key_mask is None or key_mask.stride(-1) == 1 else key_mask.contiguous()


def code_dtype(n_bits: int) -> torch.dtype:
    if n_bits <= 16:
        return torch.uint8 if n_bits <= 8 else torch.uint16
    return torch.uint32 if n_bits <= 32 else torch.uint64


def core_dtype(x: Tensor) -> torch.dtype:
    """What the core reads and writes: 16-bit floats as they are."""
    return torch.float32 if x.dtype is torch.float64 else x.dtype


def float_dtype(x: Tensor) -> torch.dtype:
    """What sums are computed in where the core has both."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def new_codes(x: Tensor, n_bits: int, n_hashes: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], n_hashes), dtype=code_dtype(n_bits))


def new_output(query: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]), dtype=dtype)


# An operator of several gradients has an output_mask, as torch's own do: which of them are wanted.
# Each of the others is an empty tensor of two dimensions, of which vmap can map the first.


def new_gradients(
    dtype: torch.dtype, query: Tensor, key: Tensor, value: Tensor, output_mask: Sequence[bool]
) -> Three:
    of_query, of_key, of_value, *_ = output_mask
    return (
        new_gradient(query, dtype, wanted=of_query),
        new_gradient(key, dtype, wanted=of_key),
        new_gradient(value, dtype, wanted=of_value),
    )


def new_gradient(x: Tensor, dtype: torch.dtype, *, wanted: bool = True) -> Tensor:
    if not wanted:
        return x.new_empty((x.shape[0], 0), dtype=dtype)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def wanted_only(gradients: Sequence[Tensor], output_mask: Sequence[bool]) -> Any:
    """As many, None in the place of the others: for the core and for autograd."""
    if all(output_mask):
        return gradients
    both = zip(gradients, output_mask, strict=True)
    return [gradient if wanted else None for gradient, wanted in both]


def check_codes(name: str, codes: Tensor, n_buckets: int) -> None:
    """The core trusts codes as table rows, so a code out of range would leave the table.

    The CUDA kernels pass by such a code instead: to look would be to wait for the GPU.
    """
    if codes.is_cuda:
        return
    if n_buckets < (256 if codes.dtype is torch.uint8 else 65536):
        largest = int(codes.numpy().max(initial=0))
        if largest >= n_buckets:
            raise ValueError(f"{name} has code {largest}, wanted codes below n_buckets={n_buckets}")
