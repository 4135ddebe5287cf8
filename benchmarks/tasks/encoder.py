"""A small transformer encoder whose heads' values any method mixes, all else the same.

For a seed all methods start from the same weights, but for those that only one of them has.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import baselines
import torch
from byte_encoder import look_nearby
from torch import Tensor, nn
from torch.nn import functional as F

from lshkit.attention import yoso_attention
from tasks.batch import Batch

NEAR = 16  # convolution and window see so many tokens to either side
N_HASHES = 32


# --- What mixes the values: mix(q, k, v, mask, layer), all (B, heads, n, head_dim) ----------------


def softmax(q, k, v, mask, layer):
    return F.scaled_dot_product_attention(q, k, v, None if mask is None else mask[:, None, None])


def window(q, k, v, mask, layer):
    """Softmax over |i - j| <= NEAR."""
    position = torch.arange(q.shape[-2])
    near = ((position[:, None] - position).abs() <= NEAR)[None, None]
    if mask is not None:  # a row of padding sees itself, as a row of nothing is no softmax
        near = near & (mask[:, None, None] | torch.eye(len(position), dtype=torch.bool))
    return F.scaled_dot_product_attention(q, k, v, near)


def convolution(q, k, v, mask, layer):
    return layer.convolution(v, mask)


def nothing(q, k, v, mask, layer):
    return v


def yoso(q, k, v, mask, layer, n_hashes=N_HASHES, **options):
    """Fresh hash functions in each training step, fixed ones in the evaluation."""
    seed = None if layer.training else layer.eval_seed
    options["n_hashes"] = n_hashes
    if not layer.training:
        options |= layer.eval_options
    return yoso_attention(q, k, v, mask, seed=seed, **options)


def yoso_c(q, k, v, mask, layer, **options):
    return yoso(q, k, v, mask, layer, **options) + layer.convolution(v, mask)


def baseline(q, k, v, mask, layer):
    return layer.baseline.mix(q, k, v, mask)


class Method(NamedTuple):
    mix: Callable
    convolves: bool = False  # needs the kernels of a convolution
    samples: bool = False  # its result depends on hash functions
    baseline: dict | None = None  # arguments of baselines.build
    any_length: bool = True  # also above the length of the training


EXPECTED = {"n_bits": 8, "estimator": "expected", "gradient": "exact"}
LOWER_BOUND = {"n_bits": 8, "estimator": "sampled", "gradient": "lower_bound"}
COLLIDED = {"n_bits": 8, "estimator": "sampled", "gradient": "collided"}
UNBIASED = {"n_bits": 8, "estimator": "sampled", "gradient": "unbiased"}
SOFT = {"n_bits": 12, "estimator": "soft", "n_probes": 4, "sharpness": 2.0}
OPTIONS = {
    "YOSO-E": EXPECTED,
    "YOSO-32": LOWER_BOUND,
    "*YOSO-32": COLLIDED,
    "YOSO-32, unbiased": UNBIASED,
    "YOSO-C-32": LOWER_BOUND,
    "soft codes-32": SOFT,
}
CONTROLS = {
    "convolution only": Method(convolution, convolves=True),
    "window only": Method(window),
    "no attention": Method(nothing),
}
BASELINES = {
    "Linformer": Method(baseline, baseline=dict(name="Linformer", rank=64), any_length=False),
    "Performer": Method(baseline, baseline=dict(name="Performer", n_features=128)),
}
METHODS = {
    "softmax": Method(softmax),
    **{
        name: Method(
            functools.partial(yoso_c if "-C-" in name else yoso, **options),
            convolves="-C-" in name,
            samples=options is not EXPECTED,
        )
        for name, options in OPTIONS.items()
    },
    **BASELINES,
    **CONTROLS,
}


# --- Model --------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, length: int, method: Method, eval_seed: int) -> None:
        super().__init__()
        self.heads, self.mix, self.eval_seed = heads, method.mix, eval_seed
        self.keys_are_previous = False
        self.eval_options: dict = {}
        self.project, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        with torch.random.fork_rng():
            if method.baseline is not None:  # its own projections are not used
                self.baseline = baselines.build(
                    dim=dim, heads=heads, length=length, **method.baseline
                )
                del self.baseline.project, self.baseline.out
            if method.convolves:
                self.kernels = nn.Conv2d(
                    heads, heads, (2 * NEAR + 1, 1), padding=(NEAR, 0), groups=heads, bias=False
                )

    def convolution(self, v: Tensor, mask: Tensor | None) -> Tensor:
        return self.kernels(v if mask is None else v * mask[:, None, :, None])

    @torch.no_grad()
    def look_for_the_same(self) -> None:
        """Keys get the queries' projection: a query looks for keys that are made of what it is.

        Twice the usual weights, so that softmax starts about as sharp as 8 bits do, which do not
        depend on the length of a query: scores near 8 of a key that fits, else around 0.
        """
        query, key, _ = self.project.weight.chunk(3)
        key.copy_(query.mul_(2))

    def forward(self, x: Tensor, positions: Tensor | None, mask: Tensor | None) -> Tensor:
        weight, bias = self.project.weight.chunk(3), self.project.bias.chunk(3)
        of_query = of_key = x
        if positions is not None:
            of_query = of_key = x + positions
        if self.keys_are_previous:
            of_key = F.pad(x[:, :-1], (0, 0, 1, 0))
        q, k, v = map(F.linear, (of_query, of_key, x), weight, bias)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        return self.out(self.mix(q, k, v, mask, self).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, length: int, method: Method, eval_seed: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, length, method, eval_seed)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, positions: Tensor | None, mask: Tensor | None) -> Tensor:
        x = x + self.attention(self.norm1(x), positions, mask)
        return x + self.mlp(self.norm2(x))


class Encoder(nn.Module):
    """Transformer blocks between a task's tokens and its answers.

    It starts at what a short run would spend its time on, the same for all methods. A task with
    positions: queries and keys see learned ones, which start as sinusoids and with heads that look
    nearby. A task of look-ups, `keys_are_previous`: the key of a token is made of the token before
    it, and queries start with looking for what they are themselves.
    """

    def __init__(self, task, method: Method, dim: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(task.n_tokens, dim)
        self.positions = None
        self.blocks = nn.ModuleList(
            Block(dim, heads, task.length, method, i) for i in range(layers)
        )
        self.norm, self.output = nn.LayerNorm(dim), nn.Linear(dim, task.n_answers)
        with torch.no_grad():
            self.output.weight.mul_(0.3)
            if hasattr(task, "frequencies"):
                self.output.bias.copy_(task.frequencies().log())
            if task.has_positions:
                speed = 30.0 ** -torch.linspace(0, 1, dim // 2)  # wavelengths from 6 to 200 tokens
                angle = torch.arange(task.length)[:, None] * speed
                self.positions = nn.Parameter(4 * torch.cat((angle.sin(), angle.cos()), -1))
                for block in self.blocks:
                    look_nearby(block.attention.project.weight, heads, speed)
        if task.keys_are_previous:
            for block in self.blocks:
                block.attention.keys_are_previous = True
                block.attention.look_for_the_same()

    def forward(self, batch: Batch) -> Tensor:
        """(answers, n_answers): logits of every question."""
        tokens, mask = batch.tokens, batch.mask
        x = self.embedding(tokens)
        positions = None if self.positions is None else self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, positions, mask)
        x = self.norm(x)
        if batch.asked is not None:
            return self.output(x[batch.asked])
        if mask is None:
            return self.output(x.mean(1))
        return self.output((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
