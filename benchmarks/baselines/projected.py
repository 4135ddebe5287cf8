"""Layers of four projections around a way to mix the heads' values: softmax, controls, YOSO."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lshkit.attention import YosoAttention


class Heads(nn.Module):
    """Queries, keys and values of the heads, what `mix` makes of them, and the way back."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        parts = self.project(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.mix(*parts, mask).transpose(1, 2).flatten(2))


def without_masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """(B, heads, n, head_dim) with zeros for tokens that take no part."""
    return x if mask is None else x.masked_fill(~mask[:, None, :, None], 0)


def softmax(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """By torch's own kernel: no matrix of weights is kept."""
    allowed = None if mask is None else mask[:, None, None, :]
    return F.scaled_dot_product_attention(query, key, value, allowed)


def explicit_softmax(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Written out, as the papers measure it: the matrix of weights is kept for the gradient."""
    scores = query * query.shape[-1] ** -0.5 @ key.transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None, :], -torch.inf)
    return scores.softmax(-1) @ value


def bfloat16_softmax(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Torch's kernel on bfloat16, which is faster than on float32 where the CPU multiplies it."""
    return softmax(*(x.bfloat16() for x in (query, key, value)), mask).to(query.dtype)


SOFTMAX = {"fused": softmax, "explicit": explicit_softmax, "bfloat16": bfloat16_softmax}


class Softmax(Heads):
    def __init__(self, dim: int, heads: int, length: int, how: str = "fused") -> None:
        super().__init__(dim, heads)
        self.mix = SOFTMAX[how]


class UnitSoftmax(Heads):
    """Softmax over cosines times a learned temperature per head, which starts at e^2.5 = 12."""

    def __init__(self, dim: int, heads: int, length: int) -> None:
        super().__init__(dim, heads)
        self.log_temperature = nn.Parameter(torch.full((heads, 1, 1), 2.5))

    def mix(self, query, key, value, mask):
        query, key = (F.normalize(x, dim=-1) for x in (query, key))
        scale = query.shape[-1] ** 0.5 * self.log_temperature.exp()
        return softmax(query * scale, key, value, mask)


class Window(Heads):
    """Exact softmax over |i - j| <= reach, in blocks. (A token that takes no part sees itself.)"""

    def __init__(self, dim: int, heads: int, length: int, reach: int = 16) -> None:
        super().__init__(dim, heads)
        self.reach = reach

    def mix(self, query, key, value, mask):
        batch, heads, length, dim = query.shape
        reach, device = self.reach, query.device
        missing = -length % reach
        query = F.pad(query, (0, 0, 0, missing)).unflatten(2, (-1, reach))
        key, value = (
            F.pad(x, (0, 0, reach, reach + missing)).unfold(2, 3 * reach, reach).transpose(-1, -2)
            for x in (key, value)
        )
        column = torch.arange(3 * reach, device=device) - reach
        offset = column - torch.arange(reach, device=device)[:, None]
        position = torch.arange(0, length + missing, reach, device=device)[:, None] + column
        inside = (position >= 0) & (position < length)
        if mask is not None:
            inside = inside & F.pad(mask, (reach, reach + missing)).unfold(1, 3 * reach, reach)
            inside = inside[:, None]
        allowed = (inside[..., None, :] & (offset.abs() <= reach)) | (offset == 0)
        # Blocks stand where torch expects heads: (batch * heads, blocks, reach, dim).
        if mask is not None:
            allowed = allowed.expand(-1, heads, -1, -1, -1).flatten(0, 1)
        blocks = (x.flatten(0, 1) for x in (query, key, value))
        out = F.scaled_dot_product_attention(*blocks, allowed)
        return out.reshape(batch, heads, -1, dim)[:, :, :length]


class Convolution(Heads):
    """No attention but the depthwise convolution of YOSO-C over the values: a kernel a head."""

    def __init__(self, dim: int, heads: int, length: int, conv_window: int = 33) -> None:
        kernels = nn.Conv2d(  # drawn first: the same with and without the projections
            heads, heads, (conv_window, 1), padding=(conv_window // 2, 0), groups=heads, bias=False
        )
        super().__init__(dim, heads)
        self.kernels = kernels

    def mix(self, query, key, value, mask):
        return self.kernels(without_masked(value, mask))


class Values(Heads):
    """No mixing at all."""

    def __init__(self, dim: int, heads: int, length: int) -> None:
        super().__init__(dim, heads)

    def mix(self, query, key, value, mask):
        return value


class Yoso(nn.Module):
    """lshkit's own layer; options as those of `YosoAttention`."""

    def __init__(self, dim: int, heads: int, length: int, **options) -> None:
        super().__init__()
        self.attention = YosoAttention(dim, heads, **options)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attention(x, x, x, key_padding_mask=None if mask is None else ~mask)[0]
