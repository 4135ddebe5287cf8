"""A small causal model of bytes with short convolutions, and what may mix its values."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.encoder import Batch, Block
from benchmarks.measurement import FAST_BFLOAT16
from lshkit import torch_ops
from lshkit.attention import Estimator, Sampled, Soft, yoso_attention

DIM, LAYERS, HEADS, HIDDEN = 128, 2, 4, 256
CONV_WIDTH = 4
DENSE_UP_TO = 1024  # positions up to which a GPU counts hard codes' collisions pair by pair


# --- Mixers: mixer(q, k, v, x), heads (B, H, n, head_dim), x the layer's input (B, n, dim) --------


class Values(nn.Module):
    """No attention: every position has its own value alone."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return v


class Softmax(nn.Module):
    """Causal softmax attention on bfloat16 inputs, with distances by ALiBi, rotary or without."""

    def __init__(
        self,
        alibi: bool = False,
        unit_norm: bool = False,
        heads: int = HEADS,
        rotary: bool = False,
    ) -> None:
        super().__init__()
        self.alibi, self.rotary = alibi, rotary
        self.log_temperature = nn.Parameter(torch.full((heads, 1, 1), 2.5)) if unit_norm else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        scale = q.shape[-1] ** -0.5
        if self.log_temperature is not None:
            q, k, scale = (
                F.normalize(q, dim=-1) * self.log_temperature.exp(),
                F.normalize(k, dim=-1),
                1,
            )
        if self.rotary:
            q, k = rotated(q), rotated(k)
        if self.alibi:
            q, k = with_distance(q * scale, k)
            scale, v = 1, F.pad(v, (0, q.shape[-1] - v.shape[-1]))
        dtype = torch.bfloat16 if q.is_cuda or FAST_BFLOAT16 else torch.float32
        q, k, rounded = (y.to(dtype) for y in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, rounded, is_causal=True, scale=scale)
        return out[..., : DIM // HEADS].to(v.dtype)


def alibi_slopes(device: torch.device | None = None) -> Tensor:
    """(HEADS, 1, 1): 2^-2 to 2^-8 (Press et al. 2022)."""
    return 2.0 ** -(8 / HEADS * torch.arange(1, HEADS + 1, device=device))[:, None, None]


def with_distance(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Two more features that add slope j to the score of key j: ALiBi but for a constant a row.

    FlashAttention, which takes no bias, can do that. j is cut in two, so that bfloat16 holds it
    exactly; zeros fill the features up to a multiple of 8.
    """
    batch, _, length, features = k.shape
    position = torch.arange(length, device=k.device)[:, None]
    of_key = torch.cat((position // 256, position % 256), -1).to(k.dtype)
    slopes = alibi_slopes(q.device)
    of_query = torch.cat((256 * slopes, slopes), -1)
    zeros = (0, -(features + 2) % 8)
    of_key = F.pad(of_key, zeros).expand(batch, HEADS, -1, -1)
    of_query = F.pad(of_query, zeros).expand(batch, -1, length, -1)
    return torch.cat((q, of_query), -1), torch.cat((k, of_key), -1)


def rotated(x: Tensor) -> Tensor:
    """Pairs of features turned by angles of the position, 10,000^(-2 i / d) (Su et al. 2021)."""
    length, features = x.shape[-2:]
    rates = 1e4 ** (-torch.arange(0, features, 2, device=x.device) / features)
    angles = torch.arange(length, device=x.device)[:, None] * rates
    (one, other), cos, sin = x.chunk(2, -1), angles.cos(), angles.sin()
    return torch.cat((one * cos - other * sin, one * sin + other * cos), -1)


class Yoso(nn.Module):
    """The library's estimators; new hash functions in each step of a training.

    learn: None, or what is learned per head, "sharpness" or "scale".
    """

    def __init__(
        self,
        estimator: Estimator,
        learn: str | None = None,
        heads: int = HEADS,
        normalize: str | None = None,
    ) -> None:
        super().__init__()
        self.estimator, self.learn, self.seeds = estimator, learn, Seeds()
        self.normalize = normalize
        if learn is not None:
            at_first = torch.full((heads,), getattr(estimator, learn))
            self.register_parameter(f"log_{learn}", nn.Parameter(at_first.log()))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        options = {"estimator": self.estimator, "normalize": self.normalize, "is_causal": True}
        if self.learn is not None:
            options["parameters"] = {self.learn: getattr(self, f"log_{self.learn}").exp()}
        sums = isinstance(self.estimator, Sampled) and self.normalize is None
        if q.is_cuda and sums and q.shape[2] <= DENSE_UP_TO:
            return collisions(q, k, self.estimator, self.seeds()).tril() @ v
        return yoso_attention(q, k, v, seed=self.seeds(), **options)


def collisions(q: Tensor, k: Tensor, estimator: Sampled, seed: Tensor) -> Tensor:
    """The shares of the hashes in which pairs collide, with YOSO's gradient, the lower bound.

    The weights of `yoso_attention` as a matrix. A GPU has them sooner than sums in tables, as long
    as texts are short.
    """
    sizes = estimator.n_bits, estimator.n_hashes, torch_ops.FAMILY[estimator.hasher]
    planes = torch_ops.hash_parameters(seed, HEADS, q.shape[-1], *sizes)
    sizes = sizes[2], *sizes[:2]
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    with torch.no_grad():
        of_q, of_k = (torch_ops.hash(x, planes, *sizes).to(torch.int32) for x in (q, k))
        pairs = zip(of_q.unbind(-1), of_k.unbind(-1), strict=True)
        count = sum((a[..., :, None] == b[..., None, :]).int() for a, b in pairs)
        share = count / estimator.n_hashes
    cosine = q @ k.mT
    return share * (1 + estimator.n_bits / 2 * (cosine - cosine.detach()))


class Seeds(nn.Module):
    """A new seed on the device at each step of a training, always 0 otherwise.

    Seeds count up from a random number; each has hash functions independent of the others'. They
    are not drawn from torch's generator, whose state CUDA graphs on several streams would share.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.randint(1, 2**62, (1,)))

    def forward(self) -> Tensor:
        if not self.training:
            return torch.zeros_like(self.last)
        self.last.add_(1)
        return self.last.clone()


class WithOwnValue(nn.Module):
    """A position's own value, times a number per head, added: `YosoAttention(conv_window=1)`."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer, self.share = mixer, nn.Parameter(torch.ones(HEADS, 1, 1))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return self.mixer(q, k, v, x) + self.share * v


def hard(n_bits: int, n_hashes: int = 32) -> Sampled:
    return Sampled(n_bits=n_bits, n_hashes=n_hashes, expectation="never")


METHODS = {
    "softmax, ALiBi": lambda: Softmax(alibi=True),
    "softmax of unit vectors": lambda: Softmax(unit_norm=True),
    "values alone": Values,
    "softmax, ALiBi, own value": lambda: WithOwnValue(Softmax(alibi=True)),
    "YOSO, 12 bits, own value": lambda: WithOwnValue(Yoso(hard(12))),
    "soft codes, 12 bits, own value": lambda: WithOwnValue(Yoso(Soft(n_bits=12))),
}

# --- Model ----------------------------------------------------------------------------------------


class Attention(nn.Module):
    """look_up: at the start queries look for what followed the bytes that they are made of.

    Keys then start as the queries of the position before, with convolutions of one more position.
    """

    def __init__(self, mixer: nn.Module, look_up: bool = False) -> None:
        super().__init__()
        width = CONV_WIDTH + look_up
        self.project, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.conv = nn.Conv1d(3 * DIM, 3 * DIM, width, groups=3 * DIM, padding=width - 1)
        self.mixer = mixer
        if look_up:
            self.start_with_look_ups()

    @torch.no_grad()
    def start_with_look_ups(self) -> None:
        for x in (*self.project.parameters(), *self.conv.parameters()):
            query, key, _ = x.chunk(3)
            key.copy_(query)
        query, key, _ = self.conv.weight.chunk(3)
        query[..., 0] = 0
        key.copy_(query.roll(-1, -1))

    def forward(self, x: Tensor, *_: None) -> Tensor:
        y = self.project(x)
        # Contiguous, else scaled_dot_product_attention takes ten times as long on a CPU.
        y = self.conv(y.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2).contiguous()
        q, k, v = (z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in y.chunk(3, -1))
        return self.out(self.mixer(q, k, v, x).transpose(1, 2).flatten(2))


class ByteModel(nn.Module):
    """Logits of the next byte at every position; all methods start from the same weights.

    make_mixer: of METHODS or CANDIDATES.
    """

    def __init__(
        self, make_mixer: Callable[[], nn.Module], frequencies: Tensor, look_up: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, DIM)
        self.blocks = nn.ModuleList()
        for _ in range(LAYERS):
            with torch.random.fork_rng(devices=[]):
                mixer = make_mixer()
            self.blocks.append(Block(Attention(mixer, look_up), DIM, HIDDEN))
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
