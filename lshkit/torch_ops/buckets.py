"""The sum verb on codes."""

from typing import Any

import torch
from torch import Tensor

from lshkit import _C
from lshkit.torch_ops import library
from lshkit.torch_ops.tensors import check_codes, float_dtype, mask_rows, new_output, rows

_TRANSPOSED_ORDER = (0, 2, 1)  # of lshkit::Order: all keys, causal, reversed

library.define(
    "bucket_sum(Tensor query_codes, Tensor key_codes, Tensor values, SymInt n_buckets, int order, "
    "Tensor? key_mask) -> Tensor"
)


def _bucket_sum(
    query_codes: Tensor,
    key_codes: Tensor,
    values: Tensor,
    n_buckets: int,
    order: int,
    key_mask: Tensor | None,
) -> Tensor:
    dtype = float_dtype(values)
    out = new_output(query_codes, values, dtype)
    if out.numel() == 0 or key_codes.numel() == 0:
        return out.zero_().to(values.dtype)
    check_codes("query_codes", query_codes, n_buckets)
    check_codes("key_codes", key_codes, n_buckets)
    _C.bucket_sum(
        *(query_codes.contiguous(), key_codes.contiguous(), rows(values, dtype), n_buckets),
        *(order, mask_rows(key_mask), 1.0 / query_codes.shape[-1], out),
        torch.get_num_threads(),
    )
    return out.to(values.dtype)


library.register_kernel("bucket_sum", _bucket_sum)


@library.fake("bucket_sum")
def _(
    query_codes: Tensor,
    key_codes: Tensor,
    values: Tensor,
    n_buckets: int,
    order: int,
    key_mask: Tensor | None,
) -> Tensor:
    return new_output(query_codes, values, values.dtype)


def _setup_bucket_sum(ctx: Any, inputs: Any, output: Any) -> None:
    query_codes, key_codes, _, n_buckets, order, key_mask = inputs
    ctx.save_for_backward(query_codes, key_codes, key_mask)
    ctx.n_buckets, ctx.order = n_buckets, order


def _bucket_sum_backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    # Linear in the values with the collisions as its matrix, so the gradient is the same sum with
    # queries and keys exchanged; it can be differentiated again.
    query_codes, key_codes, key_mask = ctx.saved_tensors
    order = _TRANSPOSED_ORDER[ctx.order]
    grad = bucket_sum(key_codes, query_codes, grad_out, ctx.n_buckets, order, None)
    if key_mask is not None:
        grad = grad.masked_fill(~key_mask[:, None, :, None], 0)
    return None, None, grad, None, None, None


bucket_sum = library.differentiable("bucket_sum", _setup_bucket_sum, _bucket_sum_backward)
library.register_vmap("bucket_sum", (0, 1, 2, 5))
