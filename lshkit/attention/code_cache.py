"""A cache of keys, values and sign codes of keys: softmax attention that reads few of the keys."""

import math
import statistics
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from lshkit import _C, checks
from lshkit.attention import saved_cache
from lshkit.attention.arguments import CPU, check_dense, seed_tensor
from lshkit.torch_ops.library import rows

BLOCK = 64  # keys of a block of codes
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EXACT_BELOW = 1024  # up to this length every key is read


class StepReport(NamedTuple):
    """What `CodeCache.attend` says of its result, each `(B, H, n)`."""

    error: Tensor  # float32: the stated error, at confidence 1 - delta
    keys: Tensor  # int32: keys that were read
    log_sum: Tensor  # float32: log of the estimated denominator sum_j exp(scale q . k_j)


class CodeCache:
    """Keys and values of one layer, with sign codes by which a query finds the keys worth reading.

    Each step of a decoder then estimates softmax attention from a few per cent of the keys. For
    models trained with softmax, without training.

    A key is hashed once, when it is appended: `n_bits` signs of projections of the centred key, and
    its norm in a byte. A query keeps its projections and estimates all scores from the signs. The
    first `n_sinks` keys and the last `window` are read exactly; any other key with a known
    probability that grows with its estimated score and is never zero, and its term is divided by
    that probability. So numerator and denominator are unbiased for those of softmax attention
    (Horvitz and Thompson 1952). A first sample tells how large the second one must be for an error
    of at most epsilon with probability 1 - delta.

    The error is |out - softmax attention|, relative to sqrt(sum_j w_j |v_j|^2), the root mean
    square norm of the values under the attention weights w_j.

    Args:
        batch_size: number of sequences, B.
        num_heads: number of query heads, H.
        head_dim: features of queries and keys, D.
        value_dim: features of values, D_v; head_dim if None.
        num_key_heads: number of key and value heads, H_k, a divisor of H: query head h reads key
            head h // (H / H_k). H if None.
        n_bits: signs kept of a key, a multiple of 64 from 64 to 256.
        epsilon: wanted error, in (0, 1).
        delta: probability with which a step may exceed it, in (0, 1).
        min_share: least share of the keys that are read beside sinks and window, in (0, 1].
        max_share: largest share of the keys that are read, about, from min_share to 1. Where it
            ends a step early, the stated error is above epsilon.
        window: number of last positions that are read exactly, the query's own among them.
        n_sinks: number of first positions that are read exactly.
        scale: of the scores; None: 1 / sqrt(D).
        seed: of the projections and of the samples: an int >= 0 or an int64 tensor of one element.
            None draws it from torch's generator; see the attribute `seed`.
        dtype: of queries, keys, values and outputs: float32, bfloat16 or float16. Sums are float32.

    Up to 1,024 positions, all keys are read. A result depends on the sequence, its length and the
    seed, on nothing else: not on padding, on other sequences of the batch, or on the number of
    threads. A key with a NaN or infinity is ignored, and its value with it, except by `prefill` and
    `attend_exactly`, which give NaN as softmax attention does. There is no autograd through a
    cache: RuntimeError where grad mode is on and an input requires grad. CPU tensors only.
    """

    batch_size: int
    num_heads: int
    num_key_heads: int
    head_dim: int
    value_dim: int
    n_bits: int
    epsilon: float
    delta: float
    min_share: float
    max_share: float
    window: int
    n_sinks: int
    scale: float
    seed: int
    dtype: torch.dtype
    _key: Tensor
    _value: Tensor
    _codes: Tensor
    _positions: int
    _starts: list[int]

    def __init__(
        self,
        batch_size: int,
        num_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        num_key_heads: int | None = None,
        n_bits: int = 128,
        epsilon: float = 0.1,
        delta: float = 0.05,
        min_share: float = 0.01,
        max_share: float = 0.05,
        window: int = 64,
        n_sinks: int = 4,
        scale: float | None = None,
        seed: int | Tensor | None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.batch_size = checks.integer("batch_size", batch_size, 1)
        self.num_heads = checks.integer("num_heads", num_heads, 1)
        self.head_dim = checks.integer("head_dim", head_dim, 1, 4096)
        self.value_dim = (
            self.head_dim if value_dim is None else checks.integer("value_dim", value_dim, 1)
        )
        self.num_key_heads = (
            self.num_heads
            if num_key_heads is None
            else checks.integer("num_key_heads", num_key_heads, 1)
        )
        if self.num_heads % self.num_key_heads:
            raise ValueError(
                f"num_key_heads must divide num_heads={num_heads}, got {num_key_heads}"
            )
        self.n_bits = checks.integer("n_bits", n_bits, 64, 256)
        if self.n_bits % 64:
            raise ValueError(f"n_bits must be a multiple of 64, got {n_bits}")
        self.epsilon = _between("epsilon", epsilon)
        self.delta = _between("delta", delta)
        self.min_share = checks.positive("min_share", min_share)
        self.max_share = checks.positive("max_share", max_share)
        if not self.min_share <= self.max_share <= 1:
            raise ValueError(
                f"max_share must be from min_share={min_share} to 1, got {max_share!r}"
            )
        self.window = checks.integer("window", window, 1, 2**31 - 1)
        self.n_sinks = checks.integer("n_sinks", n_sinks, 0, 2**31 - 1)
        self.scale = (
            1 / math.sqrt(self.head_dim) if scale is None else checks.positive("scale", scale)
        )
        if dtype not in DTYPES:
            raise TypeError(f"dtype must be float32, bfloat16 or float16, got {dtype!r}")
        self.dtype = dtype
        self.seed = int(seed_tensor(seed))
        self._planes = _orthogonal_planes(self.seed, self.num_key_heads, head_dim, n_bits)
        self.reset()

    # --- Attention ------------------------------------------------------------------------------

    def append(self, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> None:
        """Appends keys `(B, H_k, n, D)` and values `(B, H_k, n, D_v)`.

        attn_mask: boolean `(B, n)` or `(B, 1, 1, n)`, True for a position that takes part. A
        sequence may only start with False (left padding): others raise ValueError, because
        positions would no longer be those of the window.
        """
        self._check(key=key, value=value)
        n = key.shape[2]
        if n == 0:
            return
        starts = self._padded(attn_mask, n)
        self._reserve(self._positions + n)
        end = self._positions + n
        self._key[:, :, self._positions : end] = key
        self._value[:, :, self._positions : end] = value
        self._positions = end
        if starts != self._starts:
            self.set_starts(starts)

    @overload
    def attend(self, query: Tensor, return_report: Literal[False] = ...) -> Tensor: ...

    @overload
    def attend(self, query: Tensor, return_report: Literal[True]) -> tuple[Tensor, StepReport]: ...

    def attend(
        self, query: Tensor, return_report: bool = False
    ) -> Tensor | tuple[Tensor, StepReport]:
        """Attention `(B, H, n, D_v)` of queries `(B, H, n, D)`, those of the last n positions.

        Query i sees the keys up to its own position, `positions - n + i`. With return_report also
        a `StepReport`. A query in the padding gives zeros, one with a NaN or infinity a NaN row.
        """
        self._check(query=query)
        if query.shape[2] > self._positions:
            raise ValueError(
                f"query must have at most the {self._positions} positions of the cache, got "
                f"{query.shape[2]}"
            )
        return_report = checks.boolean("return_report", return_report)
        self._hash()
        out, report = self._attend(query)
        return (out, report) if return_report else out

    def step(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
    ) -> Tensor:
        """`append`, then `attend`: the next token of a generation, or a few of them."""
        self._check(query=query, key=key, value=value)
        if query.shape[2] != key.shape[2]:
            raise ValueError(f"key must have query's length {query.shape[2]}, got {key.shape[2]}")
        self.append(key, value, attn_mask)
        return self.attend(query)

    def prefill(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
    ) -> Tensor:
        """`append`, then exact causal softmax attention, for a prompt or long pieces of it."""
        self._check(query=query, key=key, value=value)
        if query.shape[2] != key.shape[2]:
            raise ValueError(f"key must have query's length {query.shape[2]}, got {key.shape[2]}")
        self.append(key, value, attn_mask)
        return self.attend_exactly(query)

    def attend_exactly(self, query: Tensor) -> Tensor:
        """As `attend`, reading all keys (`scaled_dot_product_attention`)."""
        self._check(query=query)
        n, out = query.shape[2], query.new_zeros((*query.shape[:-1], self.value_dim))
        grouped = self.num_heads != self.num_key_heads
        for b, start in enumerate(self._starts):
            first = max(start - (self._positions - n), 0)  # queries before are padding's
            key, value = (
                x[b : b + 1, :, start : self._positions] for x in (self._key, self._value)
            )
            for begin in range(first, n, size := 1024 if first or n != self._positions else n or 1):
                end = min(begin + size, n)
                last = self._positions - n + end - start  # keys that the last of them sees
                causal = begin == 0 and end == last
                mask = None
                if not causal:
                    own = torch.arange(last - (end - begin), last)[:, None]
                    mask = own >= torch.arange(last)
                out[b : b + 1, :, begin:end] = F.scaled_dot_product_attention(
                    *(query[b : b + 1, :, begin:end], key[:, :, :last], value[:, :, :last]),
                    *(mask, 0.0, causal),
                    scale=self.scale,
                    enable_gqa=grouped,
                )
        return out

    # --- The cache as a thing -------------------------------------------------------------------

    @property
    def positions(self) -> int:
        """Positions in the cache, padding included."""
        return self._positions

    @property
    def length(self) -> Tensor:
        """Positions of each sequence, padding left out; int64 `(B,)`."""
        return self._positions - torch.tensor(self._starts, dtype=torch.int64, device="cpu")

    @property
    def key(self) -> Tensor:
        """`(B, H_k, positions, D)`, a view."""
        return self._key[:, :, : self._positions]

    @property
    def value(self) -> Tensor:
        """`(B, H_k, positions, D_v)`, a view."""
        return self._value[:, :, : self._positions]

    @property
    def nbytes(self) -> int:
        """Memory of all tensors, room for positions to come included."""
        tensors = (self._key, self._value, self._codes, self._centre, self._norm, self._planes)
        return sum(x.nbytes for x in tensors)

    def reset(self) -> "CodeCache":
        """Removes everything that was appended; returns self."""
        batch, heads = self.batch_size, self.num_key_heads
        self._positions = 0
        self._starts = [0] * batch
        with torch.inference_mode(False):
            self._key = torch.empty((batch, heads, 0, self.head_dim), dtype=self.dtype)
            self._value = torch.empty((batch, heads, 0, self.value_dim), dtype=self.dtype)
            shape = batch, heads, 0, (self.n_bits // 8 + 1) * BLOCK
            self._codes = torch.empty(shape, dtype=torch.uint8)
            self._centre = torch.zeros((batch, heads, self.head_dim))
            self._norm = torch.zeros((batch, heads))
        self._hashed = [0] * batch  # keys of each sequence that have their codes, ...
        self._centred = [0] * batch  # ... by the mean of this many first ones
        return self

    def clone(self) -> "CodeCache":
        """A cache with the same contents that shares no memory that is written to."""
        return self._like(range(self.batch_size))

    def reorder(self, indices: Any) -> "CodeCache":
        """Replaces sequence i by sequence indices[i], for beam search; returns self.

        indices: integers `(n,)`. Their number becomes the batch size: one prompt can become many.
        """
        chosen = torch.as_tensor(indices, device="cpu")
        if chosen.dtype is torch.bool or chosen.is_floating_point() or chosen.dim() != 1:
            raise TypeError(
                f"indices must be integers (n,), got {chosen.dtype} {tuple(chosen.shape)}"
            )
        if not len(chosen):
            raise ValueError("indices must name a sequence, got none")
        low, high = int(chosen.min()), int(chosen.max())
        if low < 0 or high >= self.batch_size:
            raise ValueError(
                f"indices must be from 0 to {self.batch_size - 1}, got {low if low < 0 else high}"
            )
        self.__dict__ = self._like(chosen.tolist()).__dict__
        return self

    def crop(self, positions: int) -> "CodeCache":
        """Removes all but the first `positions` positions; returns self."""
        positions = checks.integer("positions", positions, 0, self._positions)
        self._positions = positions
        self._starts = [min(start, positions) for start in self._starts]
        for b, start in enumerate(self._starts):
            length = positions - start
            if self._centred[b] > length:
                self._hashed[b] = self._centred[b] = 0
            self._hashed[b] = min(self._hashed[b], length)
        return self

    def set_starts(self, starts: Any) -> None:
        """The first position of each sequence: those before are padding. Integers `(B,)`."""
        starts = [checks.integer("starts", s, 0, self._positions) for s in starts]
        if len(starts) != self.batch_size:
            raise ValueError(f"starts must be {self.batch_size} integers, got {len(starts)}")
        for b, start in enumerate(starts):
            if start != self._starts[b]:
                self._hashed[b] = self._centred[b] = 0
        self._starts = starts

    def state_dict(self) -> dict[str, Tensor]:
        """Plain tensors: "version", "config", the projections and copies of all that was added."""
        return saved_cache.save(self)

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Loads the contents of a cache that was made with the same arguments.

        TypeError or ValueError, which leave this cache unchanged, name the argument that differs,
        or the entry that is missing, unknown or of another type or shape.
        """
        saved_cache.load(self, state_dict)

    # --- Within ---------------------------------------------------------------------------------

    def _attend(self, query: Tensor) -> tuple[Tensor, StepReport]:
        shape = query.shape[:-1]
        out = torch.empty((*shape, self.value_dim), dtype=torch.float32)
        report = StepReport(
            torch.empty(shape, dtype=torch.float32),
            torch.empty(shape, dtype=torch.int32),
            torch.empty(shape, dtype=torch.float32),
        )
        z = normal_quantile(self.delta)
        _C.code_step(
            *(rows(query, torch.float32), self.key, self.value, *self._coded),
            *(self.scale, self.n_sinks, self.window, self.epsilon, z, self.min_share),
            *(self.max_share, EXACT_BELOW, self.seed, out, report.log_sum),
            *(report.error, report.keys, torch.get_num_threads()),
        )
        return out.to(self.dtype), report

    @property
    def _coded(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What the core knows of the codes."""
        starts = torch.tensor(self._starts, dtype=torch.int64, device="cpu")
        return self._codes, self._planes, self._centre, self._norm, starts

    def _check(self, **tensors: Tensor) -> None:
        sizes = {
            "query": (self.num_heads, self.head_dim),
            "key": (self.num_key_heads, self.head_dim),
            "value": (self.num_key_heads, self.value_dim),
        }
        grad = torch.is_grad_enabled()
        for name, x in tensors.items():
            heads, size = sizes[name]
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a torch tensor, got {type(x).__name__}")
            check_dense(name, x)
            shape = x.shape
            if len(shape) != 4 or (shape[0], shape[1], shape[3]) != (self.batch_size, heads, size):
                wanted = f"({self.batch_size}, {heads}, n, {size})"
                raise ValueError(f"{name} must be {wanted}, got shape {tuple(shape)}")
            if x.dtype is not self.dtype:
                raise TypeError(f"{name} must have the cache's dtype {self.dtype}, got {x.dtype}")
            if x.device != CPU:
                raise NotImplementedError(f"{name} must be on the cpu, got {x.device}")
            if grad and x.requires_grad:
                raise RuntimeError(
                    f"{name} requires grad, and there is no autograd through a cache: call it "
                    f"under torch.no_grad() or torch.inference_mode()"
                )
        if "value" in tensors and (n := tensors["key"].shape[2]) != tensors["value"].shape[2]:
            raise ValueError(f"value must have key's length {n}, got {tensors['value'].shape[2]}")

    def _padded(self, mask: Tensor | None, n: int) -> list[int]:
        """The starts of the sequences with n positions more, of which a mask may be given."""
        if mask is None:
            return self._starts
        if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
            got = f"dtype {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(f"attn_mask must be a boolean tensor, True to take part, got {got}")
        if tuple(mask.shape) not in ((self.batch_size, n), (self.batch_size, 1, 1, n)):
            raise ValueError(
                f"attn_mask must be ({self.batch_size}, {n}) or ({self.batch_size}, 1, 1, {n}), "
                f"got shape {tuple(mask.shape)}"
            )
        mask = mask.reshape(self.batch_size, n)
        padding = n - mask.sum(1)  # of left padding
        row = torch.arange(n, device=mask.device)
        if not torch.equal(mask, row >= padding[:, None]):
            raise ValueError(
                "attn_mask must be of left padding: False only before the first True of a sequence"
            )
        starts = []
        for start, more in zip(self._starts, padding.tolist(), strict=True):
            if more and start < self._positions:
                raise ValueError(
                    "attn_mask must be of left padding: False for a position behind one that takes "
                    "part"
                )
            starts.append(start + more)
        return starts

    def _reserve(self, positions: int) -> None:
        """Room for as many, and for half as many again where there was too little."""
        if positions <= self._key.shape[2]:
            return
        room = -(-max(positions, self._positions * 3 // 2) // BLOCK) * BLOCK
        for name in ("_key", "_value"):
            old = getattr(self, name)
            with torch.inference_mode(False):
                new = torch.empty((*old.shape[:2], room, old.shape[3]), dtype=self.dtype)
            _C.use_large_pages(new)  # a step touches rows all over it
            new[:, :, : self._positions] = old[:, :, : self._positions]
            setattr(self, name, new)
        old = self._codes
        with torch.inference_mode(False):
            codes = torch.empty((*old.shape[:2], room // BLOCK, old.shape[3]), dtype=old.dtype)
        _C.use_large_pages(codes)
        codes[:, :, : old.shape[2]] = old
        codes[:, :, old.shape[2] :] = 0
        self._codes = codes

    def _hash(self) -> None:
        """Codes of the keys that have none, once a sequence is long enough for them to be used.

        Keys are centred by the mean of the first 2^k of them, the largest power of two up to the
        length; all are hashed again where it grows. So codes do not depend on how keys came.
        """
        for b, start in enumerate(self._starts):
            length = self._positions - start
            if length <= EXACT_BELOW:
                continue
            centred = 1 << (length.bit_length() - 1)
            if centred != self._centred[b]:
                for h in range(self.num_key_heads):  # in turn: copies of all would be large
                    first = self._key[b, h, start : start + centred].double()
                    first = first[first.isfinite().all(-1)]
                    centre = first.sum(0) / max(len(first), 1)
                    self._centre[b, h] = centre
                    squares = (first - centre).square().sum(-1)
                    self._norm[b, h] = (squares.sum() / max(len(first), 1)).sqrt()
                self._centred[b], self._hashed[b] = centred, 0
            if self._hashed[b] < length:
                _C.code_keys(
                    *(self.key, *self._coded, b, self._hashed[b], length, torch.get_num_threads())
                )
                self._hashed[b] = length

    def _like(self, indices: Any) -> "CodeCache":
        """Another cache, whose sequence i is a copy of sequence indices[i] of this one."""
        chosen = list(indices)
        other = object.__new__(CodeCache)
        other.__dict__.update(self.__dict__)
        other.batch_size = len(chosen)
        at = torch.tensor(chosen, dtype=torch.int64, device="cpu")
        with torch.inference_mode(False), torch.no_grad():
            for name in ("_key", "_value", "_codes", "_centre", "_norm"):
                setattr(other, name, getattr(self, name).index_select(0, at))
        for name in ("_starts", "_hashed", "_centred"):
            values = getattr(self, name)
            setattr(other, name, [values[i] for i in chosen])
        return other

    def __repr__(self) -> str:
        names = ["n_bits", "epsilon", "delta", "min_share", "max_share", "window", "n_sinks"]
        options = ", ".join(f"{name}={getattr(self, name)!r}" for name in (*names, "seed"))
        return (
            f"CodeCache({self.batch_size}, {self.num_heads}, {self.head_dim}, {self.value_dim}, "
            f"num_key_heads={self.num_key_heads}, {options}, dtype={self.dtype}; "
            f"length={self.length.tolist()}, {self.nbytes / 2**20:.1f} MB)"
        )


def normal_quantile(delta: float) -> float:
    """z with a standard normal within -z and z with probability 1 - delta."""
    return -statistics.NormalDist().inv_cdf(delta / 2)


def _between(name: str, value: Any) -> float:
    value = checks.positive(name, value)
    if value >= 1:
        raise ValueError(f"{name} must be in (0, 1), got {value!r}")
    return value


def _orthogonal_planes(seed: int, heads: int, d: int, n_bits: int) -> Tensor:
    """`(heads, d, n_bits)`: d unit vectors after d others, each d of them orthogonal."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for _ in range(-(-n_bits // d)):
        gaussian = torch.randn((heads, d, d), generator=generator, dtype=torch.float64)
        q, r = torch.linalg.qr(gaussian)
        parts.append(q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None])
    return torch.cat(parts, -1)[..., :n_bits].float().contiguous()
