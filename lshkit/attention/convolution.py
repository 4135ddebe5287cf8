"""Depthwise convolutions over positions: a kernel per feature, or YOSO-C's one per head."""

import torch
from torch import Tensor
from torch.nn import functional as F

from lshkit import checks
from lshkit.attention.across_ranks import AcrossRanks
from lshkit.attention.arguments import autocast_device, packed_starts


def checked_convolutions(
    conv_window: int | None, short_conv: int | None
) -> tuple[int | None, int | None]:
    """The widths of both convolutions, None where there is none."""
    if conv_window is not None:
        conv_window = checks.integer("conv_window", conv_window, 1)
        if conv_window % 2 == 0:
            raise ValueError(f"conv_window must be odd, got {conv_window}")
    if short_conv is not None:
        short_conv = checks.integer("short_conv", short_conv, 1)
    return conv_window, short_conv


def convolve_features(x: Tensor, weight: Tensor, position: Tensor | None = None) -> Tensor:
    """One kernel a feature over a position and those before: out[i] = sum_t weight[t] x[i + t].

    Args:
        x: `(B, H, width - 1 + N, D)`, the N positions behind the width - 1 before them. Of fewer
            rows than these N is 0.
        weight: `(H, D, width)`, converted to x's dtype.
        position: `(N,)`, how many positions of its own sequence stand before each: more are not
            read. None: all that are there.

    Returns:
        `(B, H, N, D)` in x's dtype.
    """
    before = weight.shape[-1] - 1
    n = max(x.shape[2] - before, 0)
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
                convolve(rows, weight, first, stop - start)
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

    Args:
        value: `(B, H, N, D)`, N > 0; zeros stand before and after it.
        weight: `(H, width)`, converted to the dtype of the sums: value's, or float32 of 16-bit
            values on a CPU.
        before: number of positions before i that its window has, 0 to width - 1.

    Returns:
        `(B, H, N, D)` in value's dtype.
    """
    dtype, (heads, width) = value.dtype, weight.shape
    with torch.autocast(autocast_device(value), enabled=False):
        if dtype in (torch.bfloat16, torch.float16) and not value.is_cuda:
            value = value.float()  # wide windows take a CPU three times as long in 16 bits
        value = F.pad(value, (0, 0, before, width - 1 - before))
        kernels = weight.to(value.dtype)[:, None, :, None]
        return F.conv2d(value, kernels, groups=heads).to(dtype)
