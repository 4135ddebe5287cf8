"""A small causal model of bytes with short convolutions, and what may mix its values."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.encoder import Batch, Block
from lshkit.attention import Estimator, Sampled, Soft, yoso_attention

DIM, LAYERS, HEADS, HIDDEN = 128, 2, 4, 256
CONV_WIDTH = 4


# --- Mixers: mixer(q, k, v, x), heads (B, H, n, head_dim), x the layer's input (B, n, dim) --------


class Values(nn.Module):
    """No attention: every position has its own value alone."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return v


class Softmax(nn.Module):
    """Causal softmax attention on bfloat16 inputs, with positions of one kind or none."""

    def __init__(self, positions: str | None = None, unit_norm: bool = False) -> None:
        super().__init__()
        self.positions = positions
        self.log_temperature = nn.Parameter(torch.full((HEADS, 1, 1), 2.5)) if unit_norm else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        scale = q.shape[-1] ** -0.5
        if self.log_temperature is not None:
            q, k, scale = (
                F.normalize(q, dim=-1) * self.log_temperature.exp(),
                F.normalize(k, dim=-1),
                1,
            )
        if self.positions == "rotary":
            q, k = rotated(q), rotated(k)
        elif self.positions == "ALiBi":
            q, k = with_distance(q * scale, k)
            scale, v = 1, F.pad(v, (0, q.shape[-1] - v.shape[-1]))
        q, k, v16 = (y.bfloat16() for y in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v16, is_causal=True, scale=scale)
        return out[..., : DIM // HEADS].to(v.dtype)


def rotated(x: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021), base 10,000."""
    length, half = x.shape[-2], x.shape[-1] // 2
    angle = torch.arange(length)[:, None] * 10000.0 ** -(torch.arange(half) / half)
    sin, cos = angle.sin(), angle.cos()
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def with_distance(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Two more features that add slope j to the score of key j: ALiBi but for a constant a row.

    Slopes 2^-2 to 2^-8 (Press et al. 2022). j is cut in two, so that bfloat16 holds it exactly.
    """
    slopes = 2.0 ** -(8 / HEADS * torch.arange(1, HEADS + 1))[:, None, None]
    high, low = (
        torch.arange(q.shape[-2])[:, None] // 256,
        torch.arange(q.shape[-2])[:, None] % 256,
    )
    of_query = (slopes * torch.tensor([256.0, 1.0])).expand(len(q), -1, q.shape[-2], -1)
    of_key = torch.cat((high, low), -1).to(k.dtype).expand(len(k), HEADS, -1, -1)
    return torch.cat((q, of_query), -1), torch.cat((k, of_key), -1)


class Yoso(nn.Module):
    """The library's attention: fresh hash functions in each training step, one set otherwise."""

    def __init__(self, estimator: Estimator, normalize: str | None = "l2") -> None:
        super().__init__()
        self.estimator, self.normalize = estimator, normalize

    def forward(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        seed = None if self.training else 0
        options = {"estimator": self.estimator, "normalize": self.normalize, "seed": seed}
        return yoso_attention(q, k, v, is_causal=True, **options)


class WithOwnValue(nn.Module):
    """A position's own value, times a number per head, added: `YosoAttention(conv_window=1)`."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer, self.share = mixer, nn.Parameter(torch.ones(HEADS, 1, 1))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return self.mixer(q, k, v, x) + self.share * v


YOSO, SOFT = Sampled(n_bits=12, expectation="never"), Soft(n_bits=12)
METHODS = {
    "softmax, ALiBi": lambda: Softmax("ALiBi"),
    "softmax, rotary": lambda: Softmax("rotary"),
    "softmax of unit vectors": lambda: Softmax(unit_norm=True),
    "values alone": Values,
    "YOSO, 12 bits": lambda: Yoso(YOSO),
    "soft codes, 12 bits": lambda: Yoso(SOFT),
    "softmax, ALiBi, own value": lambda: WithOwnValue(Softmax("ALiBi")),
    "YOSO, 12 bits, own value": lambda: WithOwnValue(Yoso(YOSO, normalize=None)),
    "soft codes, 12 bits, own value": lambda: WithOwnValue(Yoso(SOFT, normalize=None)),
}

# --- Model ----------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.conv = nn.Conv1d(3 * DIM, 3 * DIM, CONV_WIDTH, groups=3 * DIM, padding=CONV_WIDTH - 1)
        self.mixer = mixer

    def forward(self, x: Tensor, *_: None) -> Tensor:
        y = self.project(x)
        y = self.conv(y.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        q, k, v = (z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in y.chunk(3, -1))
        return self.out(self.mixer(q, k, v, x).transpose(1, 2).flatten(2))


class ByteModel(nn.Module):
    """Logits of the next byte at every position; all methods start from the same weights."""

    def __init__(self, method: str, frequencies: Tensor) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, DIM)
        self.blocks = nn.ModuleList()
        for _ in range(LAYERS):
            with torch.random.fork_rng():
                mixer = METHODS[method]()
            self.blocks.append(Block(Attention(mixer), DIM, HIDDEN))
        self.norm, self.output = nn.LayerNorm(DIM), nn.Linear(DIM, 256)
        with torch.no_grad():
            self.output.weight.mul_(0.3)
            self.output.bias.copy_(frequencies.log())

    def forward(self, batch: Batch, offset: int = 0) -> Tensor:
        """(B n, 256)"""
        x = self.embedding(batch.tokens)
        for block in self.blocks:
            x = block(x, None, None)
        return self.output(self.norm(x)).flatten(0, 1)
