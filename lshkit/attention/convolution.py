"""Depthwise convolutions over positions: a kernel per feature, or YOSO-C's one per head.

The latter is computed as products with banded matrices.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lshkit.attention.across_ranks import AcrossRanks
from lshkit.attention.arguments import autocast_device, packed_starts
from lshkit.torch_ops.assertions import may_be_read

# Positions whose outputs one product gives. It reads BLOCK + width - 1 of them: few more than the
# outputs need, and as many as a matrix product wants.
BLOCK = 32


def convolve_features(x: Tensor, weight: Tensor, position: Tensor | None = None) -> Tensor:
    """One kernel a feature over a position and those before: out[i] = sum_t weight[t] x[i + t].

    Args:
        x: `(B, H, width - 1 + N, D)`, the N positions behind the width - 1 before them.
        weight: `(H, D, width)`, converted to x's dtype.
        position: `(N,)`, how many positions of its own sequence stand before each: more are not
            read. None: all that are there.

    Returns:
        `(B, H, N, D)` in x's dtype.
    """
    before = weight.shape[-1] - 1
    n = x.shape[2] - before
    weight = weight.to(x.dtype)[:, None]
    out = x[:, :, before:] * weight[..., before]
    for back in range(1, before + 1):
        part = x[:, :, before - back :][:, :, :n]
        if position is not None:
            part = part.masked_fill(position[:, None] < back, 0)
        out = torch.addcmul(out, part, weight[..., before - back])
    return out


def convolve_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor | None,
    context_parallel: AcrossRanks | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Short convolutions of queries, keys and values, within each of the packed sequences.

    weight: `(heads of all three, D, width)`, the queries' first. Shapes and dtypes stay.
    """
    before = weight.shape[-1] - 1
    if context_parallel is None:
        starts, _ = packed_starts(cu_seqlens, None, query, key)
    else:
        starts = context_parallel.cu_seqlens
        starts = None if starts is None else torch.tensor(starts, device=query.device)

    def convolve(rows: Tensor, weight: Tensor, first: int, n: int) -> Tensor:
        if starts is None:
            return convolve_features(rows, weight)
        position = torch.arange(first, first + n, device=starts.device)
        position = position - starts[torch.searchsorted(starts, position, right=True) - 1]
        return convolve_features(rows, weight, position)

    def of_chunks(x: Tensor, weight: Tensor, ranks: AcrossRanks) -> Tensor:
        return torch.cat(
            [
                convolve(rows, weight, first, stop - start) if start < stop else rows
                for rows, start, stop, first in ranks.neighbours(x, before, 0)
            ],
            2,
        )

    of_query, of_key, of_value = weight.chunk(3)
    if context_parallel is not None:
        query = of_chunks(query, of_query, context_parallel)
        of_rest = torch.cat((of_key, of_value))  # by one message
        key, value = of_chunks(torch.cat((key, value), 1), of_rest, context_parallel).chunk(2, 1)
        return query, key, value
    query, key, value = (
        convolve(F.pad(x, (0, 0, before, 0)), weight, 0, x.shape[2])
        for x, weight in ((query, of_query), (key, of_key), (value, of_value))
    )
    return query, key, value


def convolve_positions(value: Tensor, weight: Tensor, before: int) -> Tensor:
    """One kernel a head along the positions: out[i] = sum_t weight[t] value[i + t - before].

    Equals `F.conv2d` with groups = heads, in a half to a third of its time on a CPU; for the
    gradient it saves only the values, which attention saves anyway.

    Args:
        value: `(B, H, N, D)`, N > 0; zeros stand before and after it.
        weight: `(H, width)`, converted to value's dtype.
        before: number of positions before i that its window has, 0 to width - 1.

    Returns:
        `(B, H, N, D)` in value's dtype; NaN in a row of a head that reads a row that is not finite.
    """
    weight = weight.to(value.dtype)
    with torch.autocast(autocast_device(value), enabled=False):
        if torch.compiler.is_exporting():  # a graph of blocks would be limited to some lengths
            value = F.pad(value, (0, 0, before, weight.shape[-1] - 1 - before))
            return F.conv2d(value, weight[:, None, :, None], groups=weight.shape[0])
        return _Convolution.apply(value, weight, before)


class _Convolution(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, weight: Tensor, before: int) -> Tensor:
        return _banded_product(value, weight, before)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        value, weight, ctx.before = inputs
        ctx.save_for_backward(value, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        value, weight = ctx.saved_tensors
        width = weight.shape[-1]
        grad_value = grad_weight = None
        with torch.autocast(autocast_device(value), enabled=False):
            if ctx.needs_input_grad[0]:
                grad_value = _banded_product(grad_out, weight.flip(-1), width - 1 - ctx.before)
            if ctx.needs_input_grad[1]:
                blocks = F.pad(grad_out, (0, 0, 0, -grad_out.shape[2] % BLOCK))
                blocks = blocks.unflatten(2, (-1, BLOCK))
                products = torch.einsum(
                    "bhnid,bhndl->hil", blocks, _windows(value, width, ctx.before)
                )
                # Element (i, i + t) of a block's products belongs to weight t.
                products = F.pad(products.flatten(1), (0, BLOCK)).unflatten(1, (BLOCK, -1))
                grad_weight = products[..., :width].sum(1)
        return grad_value, grad_weight, None


def _windows(value: Tensor, width: int, before: int) -> Tensor:
    """(B, H, blocks, D, BLOCK + width - 1): the positions that each block of outputs reads."""
    after = width - 1 - before + -value.shape[2] % BLOCK
    return F.pad(value, (0, 0, before, after)).unfold(2, BLOCK + width - 1, BLOCK)


def _banded_product(value: Tensor, weight: Tensor, before: int) -> Tensor:
    heads, width = weight.shape
    # Row i has the weights from column i on: repeated at one more than the length of a row.
    band = F.pad(weight[:, None], (0, BLOCK)).expand(-1, BLOCK, -1).reshape(heads, -1)
    band = band[:, : BLOCK * (BLOCK + width - 1)].unflatten(1, (BLOCK, -1))
    n, finite = value.shape[2], None
    if not _known_to_be_finite(value):  # zeros of the band would spread a NaN to its block
        finite = value.isfinite()
        value, finite = torch.where(finite, value, 0), finite.all(-1)
    out = band[:, None] @ _windows(value, width, before).transpose(-1, -2)
    out = out.flatten(2, 3)[:, :, :n]
    if finite is None:
        return out
    bad = F.pad((~finite).to(value.dtype), (before, width - 1 - before))
    seen = F.max_pool1d(bad, width, 1)  # (B, H, n): 1 where the kernel reads such a row
    return out.masked_fill(seen[..., None] > 0, math.nan)


def _known_to_be_finite(x: Tensor) -> bool:
    """Where looking costs neither a graph nor a wait for a GPU."""
    if not may_be_read(x) or torch._C._are_functorch_transforms_active():
        return False
    return math.isfinite(x.sum(dtype=torch.float32).item())
