"""What might become the next estimator: mixers built from dense blocks and the library's sums.

Pairs of positions are near, in the same chunk of the sequence, or far. All weights are exact: the
candidates without noise, in quadratic time.

Far pairs are summed on a tree of halves: the queries of a node's right half with the keys of its
left one. A decay of the pair (i, j) is exp(c_i - c_j) with c never increasing, and splits at the
middle into two factors of at most 1, for values and for sums, so nothing overflows.
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


def kernel(
    q: Tensor, k: Tensor, log_factors: tuple[Tensor, Tensor, Tensor], n_bits: float | Tensor = 12
) -> Tensor:
    """Collision probabilities (1 - angle / pi)^n_bits of all pairs, times three decays."""
    bounded = cosines(q, k).clamp(-LARGEST_COSINE, LARGEST_COSINE)
    a, b, c = log_factors
    return torch.exp(n_bits * torch.log(0.5 + torch.asin(bounded) / math.pi) + a + b + c)


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


class NearAndFar(nn.Module):
    """Exact weights within chunks, and the kernel's sum beyond them.

    near: "kernel", the collision probability; "exponential", exp(temperature (cosine - 1));
    "softmax", with all pairs near. n_bits: of the kernel; None: a learned number per head.
    """

    def __init__(
        self,
        near: str = "kernel",
        chunk: int | None = None,
        decay: bool = False,
        n_bits: int | None = 12,
    ) -> None:
        super().__init__()
        self.bits = n_bits
        if n_bits is None:
            self.log_bits = nn.Parameter(torch.full((HEADS, 1, 1), 12.0).log())
        self.near, self.chunk = near, chunk
        self.decay = Decay() if decay else None
        self.log_temperature = nn.Parameter(torch.full((HEADS, 1, 1), 2.5))
        self.far_share = nn.Parameter(torch.ones(HEADS, 1, 1))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        n = v.shape[-2]
        c = None if self.decay is None else self.decay(x)[..., None]
        chunk = n if self.chunk is None else min(self.chunk, n)
        out = whole(self.of_near(*(nodes(y, chunk) for y in (q, k, v, c))), n)
        if chunk < n:
            half, far = n // 2, torch.zeros_like(out)
            while half >= chunk:
                of_right = self.of_level(half, *(nodes(y, 2 * half) for y in (q, k, v, c)))
                far, half = far + whole(F.pad(of_right, (0, 0, half, 0)), n), half // 2
            out = out + self.far_share * far
        return out

    @property
    def n_bits(self) -> float | Tensor:
        return self.log_bits.exp() if self.bits is None else self.bits

    def of_near(self, q: Tensor, k: Tensor, v: Tensor, c: Tensor | None) -> Tensor:
        log_factors = self.log_factors(c, q)
        if self.near == "kernel":
            return kernel(q, k, log_factors, self.n_bits) @ v
        if self.near == "softmax":
            scores = q @ k.mT * q.shape[-1] ** -0.5
            return (scores + sum(log_factors)).softmax(-1) @ v
        scores = self.log_temperature.exp() * (cosines(q, k) - 1)
        return (scores + sum(log_factors)).exp() @ v

    @staticmethod
    def log_factors(c: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What is added to scores of square blocks: decays, and -inf for later keys."""
        c = x.new_zeros((1, 1, 1, 1)) if c is None else c
        hidden = x.new_full((x.shape[-2],) * 2, -math.inf).triu(1)
        return c, -c.mT, hidden

    def of_level(self, half: int, q: Tensor, k: Tensor, v: Tensor, c: Tensor | None) -> Tensor:
        """The sums of the right halves' queries over the left halves' keys."""
        q, k, v = q[:, :, half:], k[:, :, :half], v[:, :, :half]
        if c is not None:
            left, right = c.split(half, 2)
            v = v * (left[:, :, -1:] - left).exp()
        zero = q.new_zeros((1, 1, 1, 1))
        out = kernel(q, k, (zero, zero, zero), self.n_bits) @ v
        return out if c is None else out * (right - left[:, :, -1:]).exp()


class OverCollisions(nn.Module):
    """Softmax over the pairs that collide in some hash or share a chunk, with their exact scores.

    Scores are cosines times a learned temperature per head. weighting: see `lsh_attention`, which
    this is on a CPU without a decay and with chunks of 1, else dense.
    """

    def __init__(
        self,
        estimator: Sampled,
        chunk: int = 1,
        decay: bool = False,
        weighting: str = "none",
    ) -> None:
        super().__init__()
        self.estimator, self.chunk, self.weighting = estimator, chunk, weighting
        self.decay = Decay() if decay else None
        self.log_temperature = nn.Parameter(torch.full((HEADS, 1, 1), 2.5))
        self.seeds = Seeds()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        q, k = F.normalize(q, dim=-1) * self.log_temperature.exp(), F.normalize(k, dim=-1)
        seed = self.seeds()
        if q.is_cuda or self.chunk > 1 or self.decay is not None:
            return self.dense(q, k, v, x, seed)
        sizes = {"n_bits": self.estimator.n_bits, "n_hashes": self.estimator.n_hashes}
        pairs = {"weighting": self.weighting, "window": 1, "n_sinks": 0, "center": False}
        return lsh_attention(q, k, v, is_causal=True, scale=1, seed=seed, **sizes, **pairs)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, seed: Tensor) -> Tensor:
        hidden = collisions(q.detach(), k.detach(), self.estimator, seed) == 0
        chunk = torch.arange(q.shape[-2], device=q.device) // self.chunk
        sampled = chunk[:, None] != chunk
        hidden = (hidden & sampled) | torch.ones_like(hidden[0, 0]).triu(1)
        scores = q @ k.mT
        if self.weighting == "horvitz_thompson":
            scores = scores - torch.where(sampled, self.log_included(q, k), 0)
        if self.decay is not None:
            c = self.decay(x)[..., None]
            scores = scores + c - c.mT
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


def nodes(x: Tensor | None, size: int) -> Tensor | None:
    """(B n / size, H, size, columns): the pieces of sequences (B, H, n, columns)."""
    return None if x is None else x.unflatten(2, (-1, size)).transpose(1, 2).flatten(0, 1)


def whole(x: Tensor, length: int) -> Tensor:
    """The sequences of such pieces."""
    return x.unflatten(0, (-1, length // x.shape[2])).transpose(1, 2).flatten(2, 3)


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


def candidate(mixer: type = NearAndFar, null: float | None = None, **options) -> nn.Module:
    made = mixer(**options)
    return WithOwnValue(made if null is None else Divided(made, null))


def far_colliding(n_bits: int) -> Callable[[int], nn.Module]:
    estimator = Colliding(n_bits=n_bits, scale=math.exp(2.5))
    return lambda heads: Yoso(estimator, "scale", heads)


def far_yoso(n_bits: int) -> Callable[[int], nn.Module]:
    return lambda heads: Yoso(hard(n_bits), heads=heads, normalize="sum")


def far_softmax(heads: int) -> nn.Module:
    return Softmax(unit_norm=True, heads=heads)


CHUNK = 128
NULL = 0.1
EXPONENTIAL = {"near": "exponential"}
SUMS = {"mixer": Yoso}  # the library's, of all pairs
COLLIDING = {"mixer": OverCollisions, "estimator": hard(12)}
WEIGHTED = {"mixer": OverCollisions, "weighting": "horvitz_thompson"}
OPTIONS = {
    # All pairs, exact.
    "softmax, decay by token": {"near": "softmax", "decay": True},
    "kernel": {},
    "kernel, decay by token": {"decay": True},
    "kernel, null key": {"null": NULL},
    "kernel of 32 bits": {"n_bits": 32},
    "kernel of 32 bits, null key": {"n_bits": 32, "null": NULL},
    "kernel of learned bits": {"n_bits": None},
    "kernel of learned bits, null key": {"n_bits": None, "null": NULL},
    "exponential": EXPONENTIAL,
    "exponential, null key": EXPONENTIAL | {"null": NULL},
    # Near pairs exact, the far ones' sum by the kernel or estimated.
    "exponential near, kernel far, null key": EXPONENTIAL | {"chunk": CHUNK, "null": NULL},
    # The library's estimators of all pairs, divided.
    "soft codes, 12 bits, null key": SUMS | {"estimator": Soft(n_bits=12), "null": NULL},
    **{
        f"YOSO, {n_bits} bits, null key": SUMS | {"estimator": hard(n_bits), "null": NULL}
        for n_bits in (8, 12)
    },
    # Softmax over the pairs that collide.
    "softmax of colliding unit vectors": COLLIDING,
    "softmax of colliding unit vectors, 8 bits": COLLIDING | {"estimator": hard(8)},
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
    "softmax of unit vectors, ALiBi, own value": {
        "mixer": Softmax,
        "unit_norm": True,
        "alibi": True,
    },
    "softmax of near and colliding unit vectors, decay": COLLIDING
    | {"chunk": CHUNK, "decay": True},
}
CANDIDATES = {name: functools.partial(candidate, **options) for name, options in OPTIONS.items()}
