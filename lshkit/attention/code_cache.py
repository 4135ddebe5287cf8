"""A cache of keys, values and sign codes of keys: softmax attention that reads few of the keys."""

import copy
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from lshkit import _C, checks
from lshkit.attention import saved_cache
from lshkit.attention.arguments import CPU, seed_tensor
from lshkit.attention.coded_keys import EXACT_UP_TO, CodedKeys
from lshkit.attention.steps import check_step, checked_integers, checked_mask, checked_sizes
from lshkit.torch_ops.tensors import rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class StepReport(NamedTuple):
    """What `CodeCache.attend` says of its result, tensors `(B, H, n)`.

    Attributes:
        error: float32, the stated error of the output, at confidence 1 - delta, in the unit of
            epsilon. 2: nothing is known.
        keys: int32, how many keys were read, with their values.
        log_sum: float32, log of the estimated denominator sum_j exp(scale q . k_j).
    """

    error: Tensor
    keys: Tensor
    log_sum: Tensor


class CodeCache:
    """Keys and values of one layer, with sign codes by which a query finds the keys worth reading.

    Each step of a decoder then estimates softmax attention from a few per cent of the keys. For
    models trained with softmax, without training.

    A key is hashed once, when it is appended: `n_bits` signs of projections of the centred key, and
    its norm and its value's size in a byte each. A query keeps its projections and estimates all
    scores from the signs. The first `n_sinks` keys and the last `window` are read exactly; any
    other key with a known probability that grows with its estimated score and its value's size and
    is never zero, and its term is divided by that probability. So numerator and denominator are
    unbiased for those of softmax attention (Horvitz and Thompson 1952). A first sample tells how
    large the second one must be for an error of at most epsilon with probability 1 - delta.

    The error is |out - softmax attention|, relative to sqrt(sum_j w_j |v_j|^2), the root mean
    square norm of the values under the attention weights w_j.

    Args:
        batch_size: number of sequences, B.
        num_heads: number of query heads, H.
        head_dim: features of queries and keys, D.
        value_dim: features of values, D_v; head_dim if None.
        num_key_heads: number of key and value heads, H_k, a divisor of H: query head h reads key
            head h // (H / H_k). H if None.
        n_bits: signs kept of a key, a multiple of 64 from 64 to 256: n_bits / 8 + 2 bytes a key.
            Fewer are read faster, but point less precisely to the keys that matter.
        epsilon: wanted error, in (0, 1).
        delta: probability with which a step may exceed it, in (0, 0.2]. A larger one would state
            an error of about one standard error or less, which the norm of an error that spreads
            over many directions nearly always exceeds. Below about 0.01 the share of steps that
            exceed it does not fall with delta: a key that matters and was missed is not in it.
        min_share: share of the keys that are drawn at least, beside sinks and window, in (0, 1]: in
            two samples of half of it each. Keys in both are read once, so that 0.01 reads about
            0.01, but 0.2 about 0.18 and 1 about 0.65.
        max_share: largest share of the keys that are read, about, from min_share to 1. Where it
            ends a step early, the stated error is above epsilon. Beside it all keys are read whose
            norms are far beyond those of the first, and those whose values are 2,800 times as far
            from their mean as most: up to 1 in 256 of the first, for either, and any that come
            before the length has doubled.
        window: number of last positions that are read exactly, the query's own among them.
        n_sinks: number of first positions that are read exactly.
        scale: of the scores; None: 1 / sqrt(D).
        seed: of the projections and of the samples: an int >= 0 or an int64 tensor of one element.
            None draws it from torch's generator; see the attribute `seed`.
        dtype: of queries, keys, values and outputs: float32, bfloat16 or float16. Sums are float32:
            values beyond 1e30 may overflow them.

    Up to 1,024 positions, all keys are read. A result depends on the sequence, its length and the
    seed, on nothing else: not on padding, on other sequences of the batch, or on the number of
    threads. A key with a NaN or infinity is ignored, and its value with it, except by `prefill` and
    `attend_exactly`, which give NaN as softmax attention does. Tensors of another shape or dtype
    raise ValueError or TypeError and leave the cache as it was. There is no autograd through a
    cache: RuntimeError where grad mode is on and an input requires grad. CPU tensors only. One
    cache must not be used by two threads at once.
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
    dtype: torch.dtype
    _kept: CodedKeys

    def __init__(
        self,
        batch_size: int,
        num_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        num_key_heads: int | None = None,
        n_bits: int = 256,
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
        sizes = batch_size, num_heads, head_dim, value_dim, num_key_heads
        sizes = checked_sizes(*sizes, most_features=4096)
        self.batch_size, self.num_heads, self.head_dim, self.value_dim, self.num_key_heads = sizes
        self.n_bits = checks.integer("n_bits", n_bits, 64, 256)
        if self.n_bits % 64:
            raise ValueError(f"n_bits must be a multiple of 64, got {n_bits}")
        self.epsilon = checks.positive("epsilon", epsilon)
        if self.epsilon >= 1:
            raise ValueError(f"epsilon must be in (0, 1), got {self.epsilon!r}")
        self.delta = checks.positive("delta", delta)
        if self.delta > 0.2:
            raise ValueError(f"delta must be in (0, 0.2], got {delta!r}")
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
        self.seed = seed
        self._kept = CodedKeys(
            *(self.batch_size, self.num_key_heads, self.head_dim, self.value_dim, self.n_bits),
            *(dtype, self.seed),
        )

    @property
    def seed(self) -> int:
        """Of the samples to come, and of the projections the one that the cache was made with."""
        return self._seed

    @seed.setter
    def seed(self, seed: int | Tensor | None) -> None:
        self._seed = checks.integer("seed", int(seed_tensor(seed)), 0)

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
        self._kept.append(key, value)
        self._kept.set_starts(starts)

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
        self._check_query(query)
        return_report = checks.boolean("return_report", return_report)
        ends = self._kept.ends(self.positions - query.shape[2])
        sizes = [end - begin for begin, end in itertools.pairwise(ends)]
        parts = map(self._attend, query.split(sizes, 2), ends[1:])
        out, *report = (x[0] if len(x) == 1 else torch.cat(x, 2) for x in zip(*parts, strict=True))
        return (out, StepReport(*report)) if return_report else out

    def step(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
    ) -> Tensor:
        """`append`, then `attend`: the next token of a generation, or a few of them.

        query `(B, H, n, D)`, key `(B, H_k, n, D)` and value `(B, H_k, n, D_v)`; returns
        `(B, H, n, D_v)`.
        """
        self._append_with(query, key, value, attn_mask)
        return self.attend(query)

    def prefill(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
    ) -> Tensor:
        """`append`, then exact causal softmax attention, for a prompt or long pieces of it.

        Shapes are those of `step`.
        """
        self._append_with(query, key, value, attn_mask)
        return self.attend_exactly(query)

    def _append_with(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None
    ) -> None:
        self._check(query=query, key=key, value=value)
        if query.shape[2] != key.shape[2]:
            raise ValueError(f"key must have query's length {query.shape[2]}, got {key.shape[2]}")
        self.append(key, value, attn_mask)

    def attend_exactly(self, query: Tensor) -> Tensor:
        """As `attend`, reading all keys (`scaled_dot_product_attention`)."""
        self._check_query(query)
        return self._attend_exactly(query, [query.shape[2]] * self.batch_size)

    def _attend_exactly(self, query: Tensor, ends: Sequence[int]) -> Tensor:
        """The same for the first queries, up to an end, of each sequence; zeros for the others."""
        n, positions = query.shape[2], self.positions
        out = query.new_zeros((*query.shape[:-1], self.value_dim))
        for b, (start, stop) in enumerate(zip(self._kept.starts, ends, strict=True)):
            first = max(start - (positions - n), 0)  # queries before are padding's
            key, value = (x[b : b + 1, :, start:] for x in (self.key, self.value))
            whole = first == 0 and n == positions  # else a mask in pieces, for its memory
            size = max(n, 1) if whole else 1024
            for begin in range(first, stop, size):
                end = min(begin + size, stop)
                last = positions - n + end - start  # keys that the last of them sees
                causal = begin == 0 and end == last
                mask = None
                if not causal:
                    seen = torch.arange(last, device=CPU)
                    mask = seen[last - (end - begin) :, None] >= seen
                out[b : b + 1, :, begin:end] = F.scaled_dot_product_attention(
                    *(query[b : b + 1, :, begin:end], key[:, :, :last], value[:, :, :last]),
                    *(mask, 0.0, causal),
                    scale=self.scale,
                    enable_gqa=self.num_heads != self.num_key_heads,
                )
        return out

    # --- Contents ---------------------------------------------------------------------------------

    @property
    def positions(self) -> int:
        """Positions in the cache, padding included."""
        return self._kept.positions

    @property
    def length(self) -> Tensor:
        """Positions of each sequence, padding left out; int64 `(B,)`."""
        return self.positions - torch.tensor(self._kept.starts, dtype=torch.int64, device="cpu")

    @property
    def key(self) -> Tensor:
        """`(B, H_k, positions, D)`, a view."""
        return self._kept.key

    @property
    def value(self) -> Tensor:
        """`(B, H_k, positions, D_v)`, a view."""
        return self._kept.value

    @property
    def nbytes(self) -> int:
        """Memory of all tensors, room for positions to come included."""
        return self._kept.nbytes

    def reset(self) -> "CodeCache":
        """Removes everything that was appended; returns self."""
        self._kept.reset()
        return self

    def clone(self) -> "CodeCache":
        """A cache with the same contents that shares no memory that is written to."""
        other = copy.copy(self)
        other._kept = self._kept.selected(range(self.batch_size))
        return other

    def reorder(self, indices: Any) -> "CodeCache":
        """Replaces sequence i by sequence indices[i], for beam search; returns self.

        indices: integers `(n,)`. Their number becomes the batch size: one prompt can become many.
        TypeError or ValueError: anything else, none, or one that is not from 0 to B - 1.
        """
        chosen = checked_integers("indices", indices, self.batch_size - 1)
        self._kept = self._kept.selected(chosen)
        self.batch_size = len(chosen)
        return self

    def crop(self, positions: int) -> "CodeCache":
        """Removes all but the first `positions` positions; returns self."""
        self._kept.crop(checks.integer("positions", positions, 0, self.positions))
        return self

    def set_starts(self, starts: Any) -> None:
        """The first position of each sequence: those before are padding. Integers `(B,)`."""
        first = checked_integers("starts", starts, self.positions)
        if len(first) != self.batch_size:
            raise ValueError(f"starts must be {self.batch_size} integers, got {len(first)}")
        self._kept.set_starts(first)

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

    def _attend(self, query: Tensor, end: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of queries up to position `end`: the output and what a `StepReport` holds."""
        self._kept.hash(end)
        shape = query.shape[:-1]
        out = query.new_empty((*shape, self.value_dim), dtype=torch.float32)
        error, log_sum = (query.new_empty(shape, dtype=torch.float32) for _ in range(2))
        keys = query.new_empty(shape, dtype=torch.int32)
        z = normal_quantile(self.delta)
        _C.code_step(
            *(rows(query, torch.float32), *self._kept.coded(end)),
            *(self.scale, self.n_sinks, self.window, self.epsilon, z, self.min_share),
            *(self.max_share, EXACT_UP_TO, self.seed, out, log_sum, error, keys),
            torch.get_num_threads(),
        )
        return out.to(self.dtype), error, keys, log_sum

    def _check(self, **tensors: Tensor) -> None:
        check_step("cache", self, self._check_device, **tensors)

    def _check_query(self, query: Tensor) -> None:
        self._check(query=query)
        if query.shape[2] > self.positions:
            raise ValueError(
                f"query must have at most the {self.positions} positions of the cache, got "
                f"{query.shape[2]}"
            )

    def _check_device(self, name: str, x: Tensor) -> None:
        if x.device != CPU:
            raise NotImplementedError(f"{name} must be on the cpu, got {x.device}")

    def _padded(self, mask: Tensor | None, n: int) -> list[int]:
        """The starts of the sequences with n positions more, of which a mask may be given."""
        mask = checked_mask(mask, self.batch_size, n)
        if mask is None:
            return self._kept.starts
        padding = n - mask.sum(1)  # of left padding
        row = torch.arange(n, device=mask.device)
        if not torch.equal(mask, row >= padding[:, None]):
            raise ValueError(
                "attn_mask must be of left padding: False only before the first True of a sequence"
            )
        starts = []
        for start, more in zip(self._kept.starts, padding.tolist(), strict=True):
            if more and start < self.positions:
                raise ValueError(
                    "attn_mask must be of left padding: False for a position behind one that takes "
                    "part"
                )
            starts.append(start + more)
        return starts

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
