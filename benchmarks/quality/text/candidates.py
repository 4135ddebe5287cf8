"""What might become the next estimator: mixers built from dense blocks and the library's sums.

Pairs of positions are near, in the same chunk of the sequence, or far. Near pairs have their weight
computed exactly; far ones do too, or their sum is an estimator's, with the noise that it has. With
a chunk as long as the text everything is exact: the candidate without noise, in quadratic time.

Far pairs are summed on a tree of halves: the queries of a node's right half with the keys of its
left one. A decay of the pair (i, j) is exp(c_i - c_j) with c never increasing, and splits at the
middle into two factors of at most 1, for values and for sums, so nothing overflows.
"""

import functools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.quality.text import fused
from benchmarks.quality.text.model import (
    DIM,
    HEADS,
    Seeds,
    WithOwnValue,
    Yoso,
    alibi_slopes,
    collisions,
    hard,
)
from lshkit.attention import Estimator, Sampled, Soft, lsh_attention, yoso_attention


def kernel(
    q: Tensor, k: Tensor, log_factors: tuple[Tensor, Tensor, Tensor], n_bits: float | Tensor = 12
) -> Tensor:
    """Collision probabilities (1 - angle / pi)^n_bits of all pairs, times three decays."""
    cosine = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
    in_one_pass = q.is_cuda and fused.works() and not isinstance(n_bits, Tensor)
    make = fused.Kernel.apply if in_one_pass else fused.kernel
    return make(cosine, *log_factors, n_bits)


class Decay(nn.Module):
    """(B, H, n): c_i, the sum of the gates' logarithms up to i.

    kind "head": a number per head, at the start ALiBi's slopes. "token": -softplus of a projection
    of the layer's input, which starts at the same.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.expm1(alibi_slopes().flatten()).log())  # softplus^-1
        self.project = nn.Linear(DIM, HEADS, bias=False) if kind == "token" else None
        if self.project is not None:
            nn.init.zeros_(self.project.weight)

    def forward(self, x: Tensor) -> Tensor:
        slope = self.slope.expand(*x.shape[:2], HEADS)
        if self.project is not None:
            slope = slope + self.project(x)
        return -F.softplus(slope).mT.cumsum(-1)


class NearAndFar(nn.Module):
    """Exact weights within chunks, and the kernel's sum beyond them.

    near: "kernel", the collision probability; "softmax", an attention of its own to which the sum
    of the far values is added; "exponential", exp(temperature (cosine - 1)), in one sum with the
    far ones. far: "exact" (the kernel), an estimator of it, or None. delta: a key writes the
    difference to what is there (all pairs exact only). n_bits: of exact weights; None: a learned
    number per head.
    """

    def __init__(
        self,
        near: str = "kernel",
        far: Estimator | str | None = "exact",
        chunk: int | None = None,
        decay: str | None = None,
        delta: bool = False,
        n_bits: int | None = 12,
    ) -> None:
        super().__init__()
        self.bits = n_bits
        if n_bits is None:
            self.log_bits = nn.Parameter(torch.full((HEADS, 1, 1), 12.0).log())
        self.near, self.far, self.chunk = near, far, chunk
        self.decay = Decay(decay) if decay else None
        self.log_temperature = nn.Parameter(torch.full((HEADS, 1, 1), 2.5))
        self.far_share = nn.Parameter(torch.ones(HEADS, 1, 1))
        self.written = nn.Linear(DIM, HEADS) if delta else None
        self.seeds = Seeds()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        n = v.shape[-2]
        c = None if self.decay is None else self.decay(x)[..., None]
        chunk = n if self.chunk is None else min(self.chunk, n)
        out = whole(self.of_near(*(nodes(y, chunk) for y in (q, k, v, c)), x), n)
        if self.far is not None and chunk < n:
            half, far, seed = n // 2, torch.zeros_like(out), self.seeds()
            while half >= chunk:
                of_right = self.of_level(half, *(nodes(y, 2 * half) for y in (q, k, v, c)), seed)
                far, half = far + whole(F.pad(of_right, (0, 0, half, 0)), n), half // 2
            out = out + self.far_share * far
        return out

    @property
    def n_bits(self) -> float | Tensor:
        return self.log_bits.exp() if self.bits is None else self.bits

    def of_near(self, q: Tensor, k: Tensor, v: Tensor, c: Tensor | None, x: Tensor) -> Tensor:
        log_factors = self.log_factors(c, q, 1)
        if self.near == "kernel":
            if self.written is not None:
                v = self.differences(k, v, c, x)
            return kernel(q, k, log_factors, self.n_bits) @ v
        if self.near == "softmax":
            scores = q @ k.mT * q.shape[-1] ** -0.5
            return (scores + sum(log_factors)).softmax(-1) @ v
        cosine = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
        scores = self.log_temperature.exp() * (cosine - 1)
        return (scores + sum(log_factors)).exp() @ v

    @staticmethod
    def log_factors(
        c: Tensor | None, x: Tensor, first_hidden: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What is added to scores of square blocks: decays, and -inf from a diagonal on."""
        c = x.new_zeros((1, 1, 1, 1)) if c is None else c
        hidden = x.new_full((x.shape[-2],) * 2, -math.inf).triu(first_hidden)
        return c, -c.mT, hidden

    def differences(self, k: Tensor, v: Tensor, c: Tensor | None, x: Tensor) -> Tensor:
        """U = (I + diag(b) K)^-1 diag(b) V, K the strictly causal kernel of keys, decayed."""
        share = torch.sigmoid(self.written(x)).mT[..., None]
        system = share * kernel(k, k, self.log_factors(c, k, 0), self.n_bits)
        # The diagonal of ones is not read.
        return torch.linalg.solve_triangular(system, share * v, upper=False, unitriangular=True)

    def of_level(
        self, half: int, q: Tensor, k: Tensor, v: Tensor, c: Tensor | None, seed: Tensor
    ) -> Tensor:
        """The sums of the right halves' queries over the left halves' keys."""
        q, k, v = q[:, :, half:], k[:, :, :half], v[:, :, :half]
        if c is not None:
            left, right = c.split(half, 2)
            v = v * (left[:, :, -1:] - left).exp()
        if self.far == "exact":
            zero = q.new_zeros((1, 1, 1, 1))
            out = kernel(q, k, (zero, zero, zero), self.n_bits) @ v
        elif isinstance(self.far, Sampled):
            out = collisions(q, k, self.far, seed) @ v
        else:
            out = yoso_attention(q, k, v, estimator=self.far, normalize=None, seed=seed)
        return out if c is None else out * (right - left[:, :, -1:]).exp()


class OverCollisions(nn.Module):
    """Softmax over the pairs that collide in some hash or share a chunk, with their exact scores.

    unit: scores are cosines times a learned temperature per head. weighting: see `lsh_attention`,
    which this is on a CPU without a decay and with chunks of 1, else dense.
    """

    def __init__(
        self,
        estimator: Sampled,
        chunk: int = 1,
        decay: str | None = None,
        unit: bool = True,
        weighting: str = "none",
    ) -> None:
        super().__init__()
        self.estimator, self.chunk, self.unit = estimator, chunk, unit
        self.weighting = weighting
        self.decay = Decay(decay) if decay else None
        self.log_temperature = nn.Parameter(torch.full((HEADS, 1, 1), 2.5))
        self.seeds = Seeds()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        if self.unit:
            q, k = F.normalize(q, dim=-1) * self.log_temperature.exp(), F.normalize(k, dim=-1)
        else:
            q = q * q.shape[-1] ** -0.5
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
        cosine = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
        p = (0.5 + torch.asin(cosine.clamp(-1, 1)) / math.pi) ** self.estimator.n_bits
        return torch.log(-torch.expm1(self.estimator.n_hashes * torch.log1p(-p)))


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


class Gated(nn.Module):
    """A mixer's output times the sigmoid of a projection of the layer's input, by feature."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer, self.gate = mixer, nn.Linear(DIM, DIM)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(x)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return gate * self.mixer(q, k, v, x)


def candidate(
    gated: bool = False, mixer: type = NearAndFar, null: float | None = None, **options
) -> nn.Module:
    made = mixer(**options)
    made = WithOwnValue(made if null is None else Divided(made, null))
    return Gated(made) if gated else made


HARD, SOFT, CHUNK = hard(12), Soft(n_bits=12), 128
NULL, SMALL = 0.1, 1e-3
SUMS = {"mixer": Yoso, "normalize": None}  # the library's, of all pairs
OPTIONS = {
    # All exact.
    "kernel": {},
    "kernel, decay by head": {"decay": "head"},
    "kernel, decay by token": {"decay": "token"},
    "kernel, null key": {"null": NULL},
    "kernel, delta writes": {"delta": True},
    "kernel, output gate": {"gated": True},
    "kernel, decay by token, null key": {"decay": "token", "null": NULL},
    "kernel, decay by token, delta writes": {"decay": "token", "delta": True},
    "kernel, decay by token, output gate": {"decay": "token", "gated": True},
    "kernel of 8 bits, decay by token": {"decay": "token", "n_bits": 8},
    "kernel of 16 bits, decay by token": {"decay": "token", "n_bits": 16},
    "softmax near, kernel far": {"near": "softmax", "chunk": CHUNK},
    "softmax near, kernel far, decay": {"near": "softmax", "chunk": CHUNK, "decay": "token"},
    "exponential near, kernel far, null key": {
        "near": "exponential",
        "chunk": CHUNK,
        "null": NULL,
    },
    # Which part of softmax of unit vectors finds what is far.
    "kernel of 16 bits, null key": {"n_bits": 16, "null": NULL},
    "kernel of 24 bits, null key": {"n_bits": 24, "null": NULL},
    "kernel of 32 bits, null key": {"n_bits": 32, "null": NULL},
    "kernel of 32 bits": {"n_bits": 32},
    "kernel of learned bits, null key": {"n_bits": None, "null": NULL},
    "kernel of learned bits": {"n_bits": None},
    "exponential": {"near": "exponential"},
    "exponential, null key": {"near": "exponential", "null": NULL},
    "exponential, decay by token, null key": {
        "near": "exponential",
        "null": NULL,
        "decay": "token",
    },
    "kernel of learned bits, small null key": {"n_bits": None, "null": SMALL},
    "kernel, small null key": {"null": SMALL},
    "exponential near, kernel of learned bits far, null key": {
        "near": "exponential",
        "chunk": CHUNK,
        "null": NULL,
        "n_bits": None,
    },
    # The library's estimators of all pairs or the far ones, divided.
    "exponential near, soft codes far, null key": {
        "near": "exponential",
        "far": SOFT,
        "chunk": CHUNK,
        "null": NULL,
    },
    "soft codes, 12 bits, null key": SUMS | {"estimator": SOFT, "null": NULL},
    **{
        f"soft codes, {n_bits} bits, learned sharpness, {name}": SUMS
        | {"estimator": Soft(n_bits=n_bits), "learned_sharpness": True, "null": null}
        for n_bits, name, null in (
            (12, "null key", NULL),
            (8, "null key", NULL),
            (16, "null key", NULL),
            (12, "small null key", SMALL),
        )
    },
    **{
        f"YOSO, {n_bits} bits, null key": SUMS | {"estimator": hard(n_bits), "null": NULL}
        for n_bits in (8, 12, 16)
    },
    # Exact weights of the pairs that collide.
    "softmax of colliding unit vectors": {"mixer": OverCollisions, "estimator": HARD},
    "softmax of colliding unit vectors, 8 hashes": {
        "mixer": OverCollisions,
        "estimator": hard(12, 8),
    },
    "softmax of colliding unit vectors, 8 bits": {
        "mixer": OverCollisions,
        "estimator": hard(8),
    },
    **{
        f"softmax of colliding unit vectors, {n_bits} bits, Horvitz-Thompson": {
            "mixer": OverCollisions,
            "estimator": hard(n_bits),
            "weighting": "horvitz_thompson",
        }
        for n_bits in (8, 12)
    },
    "softmax of near and colliding unit vectors": {
        "mixer": OverCollisions,
        "estimator": HARD,
        "chunk": CHUNK,
    },
    "softmax of near and colliding unit vectors, decay": {
        "mixer": OverCollisions,
        "estimator": HARD,
        "chunk": CHUNK,
        "decay": "token",
    },
    "softmax of near and colliding, decay": {
        "mixer": OverCollisions,
        "estimator": HARD,
        "chunk": CHUNK,
        "decay": "token",
        "unit": False,
    },
    # Softmax with the same parts, and near pairs alone.
    "softmax, decay by head": {"near": "softmax", "decay": "head"},
    "softmax, decay by token": {"near": "softmax", "decay": "token"},
    "softmax, decay by token, output gate": {"near": "softmax", "decay": "token", "gated": True},
    "softmax near, nothing far": {"near": "softmax", "far": None, "chunk": CHUNK},
    "softmax near, nothing far, decay": {
        "near": "softmax",
        "far": None,
        "chunk": CHUNK,
        "decay": "token",
    },
    # The far pairs' sum estimated from 32 hashes.
    "kernel near, YOSO far": {"far": HARD, "chunk": CHUNK},
    "kernel near, YOSO far, decay": {"far": HARD, "chunk": CHUNK, "decay": "token"},
    "kernel near, soft codes far": {"far": SOFT, "chunk": CHUNK},
    "kernel near, soft codes far, decay": {"far": SOFT, "chunk": CHUNK, "decay": "token"},
    "softmax near, YOSO far": {"near": "softmax", "far": HARD, "chunk": CHUNK},
    "softmax near, YOSO far, decay": {
        "near": "softmax",
        "far": HARD,
        "chunk": CHUNK,
        "decay": "token",
    },
    "softmax near, soft codes far": {"near": "softmax", "far": SOFT, "chunk": CHUNK},
    "softmax near, soft codes far, decay": {
        "near": "softmax",
        "far": SOFT,
        "chunk": CHUNK,
        "decay": "token",
    },
}
CANDIDATES = {name: functools.partial(candidate, **options) for name, options in OPTIONS.items()}
