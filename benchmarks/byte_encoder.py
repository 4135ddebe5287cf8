"""A small encoder of bytes whose heads' values any method mixes, and the text that it learns.

For a seed all methods start from the same weights, but for those that only one of them has.
"""

import argparse
import functools
import pathlib

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lshkit.attention import yoso_attention

MASK = 256  # the token that stands for a hidden byte
MASKED_PART = 0.15
NEAR = 16  # the controls see this many bytes to either side
N_HASHES = 32
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


# --- What mixes the values ------------------------------------------------------------------------


def softmax(q, k, v, layer):
    return F.scaled_dot_product_attention(q, k, v)


def window(q, k, v, layer):
    """Exact softmax over |i - j| <= NEAR, in blocks of 2 NEAR queries with 4 NEAR keys."""
    batch, heads, length, dim = q.shape
    block = 2 * NEAR
    k, v = (  # (batch * heads, blocks, keys, dim)
        F.pad(x, (0, 0, NEAR, NEAR)).unfold(2, 2 * block, block).transpose(-1, -2).flatten(0, 1)
        for x in (k, v)
    )
    q = q.reshape(batch * heads, -1, block, dim)
    key = torch.arange(2 * block) - NEAR
    near = (torch.arange(block)[:, None] - key).abs() <= NEAR
    position = torch.arange(0, length, block)[:, None, None] + key
    mask = near & (position >= 0) & (position < length)
    return F.scaled_dot_product_attention(q, k, v, mask).view(batch, heads, length, dim)


def convolution(q, k, v, layer):
    return layer.convolution(v)


def nothing(q, k, v, layer):
    return v


def yoso(q, k, v, layer, n_hashes=N_HASHES, **options):
    """Fresh hash functions in each training step, fixed ones in the evaluation."""
    n_hashes *= 1 if layer.training else layer.hashes_factor
    seed = None if layer.training else layer.eval_seed
    return yoso_attention(q, k, v, n_hashes=n_hashes, seed=seed, **options)


YOSO = {
    "YOSO-E": dict(n_bits=8, estimator="expected", gradient="exact"),
    "lower_bound": dict(n_bits=8, estimator="sampled", gradient="lower_bound"),
    "collided": dict(n_bits=8, estimator="sampled", gradient="collided"),
    "unbiased": dict(n_bits=8, estimator="sampled", gradient="unbiased"),
    "soft, 4 probes": dict(n_bits=12, estimator="soft", n_probes=4, sharpness=2.0),
    "soft, 2 probes": dict(n_bits=12, estimator="soft", n_probes=2, sharpness=2.0),
    # As in RACE Attention: few buckets, and every token belongs to all of them.
    "soft, all of 16": dict(n_bits=4, estimator="soft", n_probes=16, sharpness=2.0),
}
CONTROLS = {"convolution only": convolution, "window only": window, "no attention": nothing}
MIX = {
    "softmax": softmax,
    **{name: functools.partial(yoso, **options) for name, options in YOSO.items()},
    **CONTROLS,
}


# --- Text ---------------------------------------------------------------------------------------


def read_text(folder: pathlib.Path) -> tuple[Tensor, Tensor]:
    """All .py files below folder as two byte strings: for training, and every tenth held out."""
    files = sorted(
        path
        for path in folder.rglob("*.py")
        if not SKIPPED_FOLDERS.intersection(path.relative_to(folder).parts)
    )
    held_out = [path.read_bytes() for path in files[::10]]
    training = [path.read_bytes() for i, path in enumerate(files) if i % 10]
    return tuple(
        torch.frombuffer(bytearray(b"".join(part) or b"\n"), dtype=torch.uint8)
        for part in (training, held_out)
    )


def masked_batch(text: Tensor, args: argparse.Namespace, generator: torch.Generator):
    """Tokens with some bytes hidden, where they are hidden, and which bytes they were."""
    starts = torch.randint(len(text) - args.length + 1, (args.batch_size,), generator=generator)
    tokens = torch.stack([text[start : start + args.length] for start in starts]).long()
    hidden = torch.rand(tokens.shape, generator=generator) < MASKED_PART
    hidden[:, 0] = True  # never a batch without a target
    return tokens.masked_fill(hidden, MASK), hidden, tokens[hidden]


# --- Model --------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Heads around a way to mix their values. All methods have the same weights at the start."""

    def __init__(self, dim: int, heads: int, method: str, eval_seed: int) -> None:
        super().__init__()
        self.heads, self.mix = heads, MIX[method]
        self.eval_seed, self.hashes_factor = eval_seed, 1
        self.project, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        if method == "convolution only":
            with torch.random.fork_rng():
                self.kernels = nn.Conv2d(
                    heads, heads, (2 * NEAR + 1, 1), padding=(NEAR, 0), groups=heads, bias=False
                )

    def convolution(self, v: Tensor) -> Tensor:
        return self.kernels(v)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        dim = x.shape[-1]
        weight, bias = self.project.weight, self.project.bias
        q, k = F.linear(x + positions, weight[: 2 * dim], bias[: 2 * dim]).chunk(2, -1)
        v = F.linear(x, weight[2 * dim :], bias[2 * dim :])
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        return self.out(self.mix(q, k, v, self).transpose(1, 2).flatten(2))


@torch.no_grad()
def look_nearby(weight: Tensor, heads: int, speed: Tensor) -> None:
    """Keys get the queries' projection, turned by as many positions as a head looks aside.

    weight: (3 dim, dim), of the projection to queries, keys and values.
    """
    query, key, _ = weight.unflatten(0, (3, heads, -1))
    for head, (q, k) in enumerate(zip(query, key, strict=True)):
        angle = (head // 2 + 1) * (-1) ** head * speed  # a token back, ahead, two back, ...
        sin, cos = q.chunk(2, -1)
        turned = (sin * angle.cos() - cos * angle.sin(), cos * angle.cos() + sin * angle.sin())
        k.copy_(torch.cat(turned, -1))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, method: str, eval_seed: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, method, eval_seed)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), positions)
        return x + self.mlp(self.norm2(x))


class Encoder(nn.Module):
    """A transformer encoder over bytes; queries and keys see learned positions, values do not.

    It starts at what a short run would spend its time on: how often each byte occurs, positions
    that are sinusoids, and heads that look nearby. All of it is trained on.
    """

    def __init__(self, args: argparse.Namespace, method: str, frequencies: Tensor) -> None:
        super().__init__()
        dim = args.embed_dim
        self.embedding = nn.Embedding(257, dim)
        speed = 30.0 ** -torch.linspace(0, 1, dim // 2)  # wavelengths from 6 to 200 bytes
        angle = torch.arange(args.length)[:, None] * speed
        self.positions = nn.Parameter(4 * torch.cat((angle.sin(), angle.cos()), -1))
        self.blocks = nn.ModuleList(Block(dim, args.heads, method, i) for i in range(args.layers))
        self.norm, self.output = nn.LayerNorm(dim), nn.Linear(dim, 256)
        for block in self.blocks:
            look_nearby(block.attention.project.weight, heads=args.heads, speed=speed)
        with torch.no_grad():
            self.output.weight.mul_(0.3)
            self.output.bias.copy_(frequencies.log())

    def forward(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.positions)
        return self.output(self.norm(x[hidden]))
