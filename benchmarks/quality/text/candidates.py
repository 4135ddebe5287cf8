"""What might become the next estimator: mixers built from dense blocks and the library's sums.

Weights of all pairs are exact: the candidates without noise, in quadratic time. What had no use and
is in no table of docs/text.md is gone; its runs are in the results.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.quality.text.model import (
    DIM,
    HEADS,
    Seeds,
    Softmax,
    WithOwnValue,
    Yoso,
    alibi_slopes,
    collisions,
    hard,
)
from lshkit.attention import Colliding, Sampled, Soft, lsh_attention

LARGEST_COSINE = 0.9999  # the derivative is infinite at 1


def kernel(q: Tensor, k: Tensor, n_bits: float | Tensor = 12) -> Tensor:
    """Collision probabilities (1 - angle / pi)^n_bits of all pairs."""
    bounded = cosines(q, k).clamp(-LARGEST_COSINE, LARGEST_COSINE)
    return torch.exp(n_bits * torch.log(0.5 + torch.asin(bounded) / math.pi))


def cosines(q: Tensor, k: Tensor) -> Tensor:
    return F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT


class Decay(nn.Module):
    """(B, H, n): c_i, the sum of the gates' logarithms up to i.

    They are -softplus of a projection of the layer's input, at the start ALiBi's slopes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.expm1(alibi_slopes().flatten()).log())  # softplus^-1
        self.project = nn.Linear(DIM, HEADS, bias=False)
        nn.init.zeros_(self.project.weight)

    def forward(self, x: Tensor) -> Tensor:
        return -F.softplus(self.slope + self.project(x)).mT.cumsum(-1)


class Exact(nn.Module):
    """Exact weights of all pairs.

    kind: "kernel", the collision probability; "exponential", exp(temperature (cosine - 1));
    "softmax", with a decay by token. n_bits: of the kernel; None: a learned number per head.
    """

    def __init__(self, kind: str = "kernel", n_bits: int | None = 12) -> None:
        super().__init__()
        self.kind, self.bits = kind, n_bits
        if n_bits is None:
            self.log_bits = nn.Parameter(torch.full((HEADS, 1, 1), 12.0).log())
        self.decay = Decay() if kind == "softmax" else None
        self.log_temperature = nn.Parameter(torch.full((HEADS, 1, 1), 2.5))

    @property
    def n_bits(self) -> float | Tensor:
        return self.log_bits.exp() if self.bits is None else self.bits

    def forward(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        if self.decay is not None:
            c = self.decay(x)[..., None]
            scores = q @ k.mT * q.shape[-1] ** -0.5 + (c - c.mT)
            return scores.masked_fill(later, -math.inf).softmax(-1) @ v
        if self.kind == "kernel":
            weights = kernel(q, k, self.n_bits)
        else:
            weights = torch.exp(self.log_temperature.exp() * (cosines(q, k) - 1))
        return weights.masked_fill(later, 0) @ v


class OverCollisions(nn.Module):
    """Softmax over the pairs that collide in some hash, divided by their probability to do so.

    Scores are cosines times a learned temperature per head: `lsh_attention` on a CPU, else dense.
    """

    def __init__(self, estimator: Sampled) -> None:
        super().__init__()
        self.estimator = estimator
        self.log_temperature = nn.Parameter(torch.full((HEADS, 1, 1), 2.5))
        self.seeds = Seeds()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        q, k = F.normalize(q, dim=-1) * self.log_temperature.exp(), F.normalize(k, dim=-1)
        seed = self.seeds()
        if q.is_cuda:
            return self.dense(q, k, v, seed)
        sizes = {"n_bits": self.estimator.n_bits, "n_hashes": self.estimator.n_hashes}
        pairs = {"weighting": "horvitz_thompson", "window": 1, "n_sinks": 0, "center": False}
        return lsh_attention(q, k, v, is_causal=True, scale=1, seed=seed, **sizes, **pairs)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, seed: Tensor) -> Tensor:
        hidden = collisions(q.detach(), k.detach(), self.estimator, seed) == 0
        others = ~torch.eye(q.shape[-2], dtype=torch.bool, device=q.device)
        hidden = (hidden & others) | torch.ones_like(hidden[0, 0]).triu(1)
        scores = q @ k.mT - torch.where(others, self.log_included(q, k), 0)
        return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v

    @torch.no_grad()
    def log_included(self, q: Tensor, k: Tensor) -> Tensor:
        """The logarithm of the probability of a collision in some hash."""
        p = (0.5 + torch.asin(cosines(q, k).clamp(-1, 1)) / math.pi) ** self.estimator.n_bits
        return torch.log(-torch.expm1(self.estimator.n_hashes * torch.log1p(-p)))


class NearHeads(nn.Module):
    """Half of the heads attend to what is near, with ALiBi's distances, the others anywhere.

    Near: exact softmax within a chunk of window positions and the one before it, in linear time;
    slopes 2^(-8/3) and 2^(-16/3) of two heads. far: makes a mixer of so many heads.
    """

    def __init__(self, far: Callable[[int], nn.Module], window: int = 256) -> None:
        super().__init__()
        self.window, self.n_near = window, HEADS // 2
        slopes = [2.0 ** -(8 / (self.n_near + 1) * k) for k in range(1, self.n_near + 1)]
        self.register_buffer("slopes", torch.tensor(slopes)[:, None, None])
        self.far = far(HEADS - self.n_near)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        sizes = self.n_near, HEADS - self.n_near
        near, far = zip(*(y.split(sizes, 1) for y in (q, k, v)), strict=True)
        return torch.cat((self.of_near(*near), self.far(*far, x)), 1)

    def of_near(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n, size = q.shape[-2], min(self.window, q.shape[-2])
        # (B, chunks, H, size, d), then keys and values of a chunk and of the one before it.
        q, k, v = (
            F.pad(y, (0, 0, 0, -n % size)).unflatten(2, (-1, size)).transpose(1, 2)
            for y in (q, k, v)
        )
        batch, chunks = q.shape[:2]
        if chunks > 1:
            k, v = (torch.cat((F.pad(y, (0,) * 6 + (1, 0))[:, :-1], y), -2) for y in (k, v))
        keys = torch.arange(k.shape[-2], device=k.device)
        distance = keys[-size:, None] - keys
        bias = (-self.slopes * distance).masked_fill(distance < 0, -math.inf)
        bias = bias.expand(batch, chunks, -1, -1, -1).clone()
        if chunks > 1:
            bias[:, 0, :, :, :size] = -math.inf
        out = F.scaled_dot_product_attention(
            *(y.flatten(0, 1) for y in (q, k, v)), attn_mask=bias.flatten(0, 1)
        )
        return out.unflatten(0, (batch, chunks)).transpose(1, 2).flatten(2, 3)[:, :, :n]


class Divided(nn.Module):
    """A mixer's sums divided by those of the weights and a learned number per head, a null key."""

    def __init__(self, mixer: nn.Module, null: float) -> None:
        super().__init__()
        self.mixer = mixer
        self.log_null = nn.Parameter(torch.full((HEADS, 1, 1), math.log(null)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        n_values = v.shape[-1]
        # Two columns of ones: soft codes on a GPU take an even number sooner.
        sums = self.mixer(q, k, F.pad(v, (0, 2), value=1.0), x)
        return sums[..., :n_values] / (sums[..., n_values : n_values + 1] + self.log_null.exp())


def candidate(mixer: type = Exact, null: float | None = None, **options) -> nn.Module:
    made = mixer(**options)
    return WithOwnValue(made if null is None else Divided(made, null))


def far_colliding(n_bits: int) -> Callable[[int], nn.Module]:
    estimator = Colliding(n_bits=n_bits, scale=math.exp(2.5))
    return lambda heads: Yoso(estimator, "scale", heads)


def far_yoso(n_bits: int) -> Callable[[int], nn.Module]:
    return lambda heads: Yoso(hard(n_bits), heads=heads, normalize="sum")


def far_softmax(heads: int) -> nn.Module:
    return Softmax(unit_norm=True, heads=heads)


NULL = 0.1
SUMS = {"mixer": Yoso}  # the library's, of all pairs
WEIGHTED = {"mixer": OverCollisions}
OPTIONS = {
    # All pairs, exact.
    "softmax, decay by token": {"kind": "softmax"},
    "kernel": {},
    "kernel of learned bits, null key": {"n_bits": None, "null": NULL},
    "exponential, null key": {"kind": "exponential", "null": NULL},
    # The library's estimators of all pairs, divided.
    "soft codes, 12 bits, null key": SUMS | {"estimator": Soft(n_bits=12), "null": NULL},
    **{
        f"YOSO, {n_bits} bits, null key": SUMS | {"estimator": hard(n_bits), "null": NULL}
        for n_bits in (8, 12)
    },
    # Softmax over the pairs that collide.
    "softmax of colliding unit vectors, 8 bits, Horvitz-Thompson": WEIGHTED
    | {"estimator": hard(8)},
    "softmax of colliding unit vectors, 12 bits, Horvitz-Thompson": WEIGHTED
    | {"estimator": hard(12)},
    # The library's estimator of that softmax, which takes all pairs of up to 256 positions.
    **{
        f"softmax of colliding unit vectors, {n_bits} bits, Horvitz-Thompson, beyond 256": SUMS
        | {"estimator": Colliding(n_bits=n_bits, scale=math.exp(2.5)), "learn": "scale"}
        for n_bits in (8, 10, 12)
    },
    # Half of the heads near, the others anywhere.
    "near and colliding, 10 bits": {"mixer": NearHeads, "far": far_colliding(10)},
    "near and softmax of unit vectors": {"mixer": NearHeads, "far": far_softmax},
    **{
        f"near (64) and {name}": {"mixer": NearHeads, "window": 64, "far": far}
        for name, far in (
            ("colliding, 10 bits", far_colliding(10)),
            ("YOSO, 12 bits", far_yoso(12)),
            ("YOSO, 16 bits", far_yoso(16)),
            ("softmax of unit vectors", far_softmax),
        )
    },
    "softmax, rotary, own value": {"mixer": Softmax, "rotary": True},
    "softmax of unit vectors, own value": {"mixer": Softmax, "unit_norm": True},
}
CANDIDATES = {name: functools.partial(candidate, **options) for name, options in OPTIONS.items()}
