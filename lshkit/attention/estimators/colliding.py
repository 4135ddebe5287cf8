"""Softmax of unit queries and keys, estimated from the pairs whose codes collide."""

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lshkit import checks, torch_ops
from lshkit.attention.arguments import check_cpu, seed_tensor
from lshkit.attention.call import Call, exporting
from lshkit.attention.estimators.hashed import BucketSums, Hashed
from lshkit.attention.parameters import one_or_each_head
from lshkit.attention.unit_norm import unit_rows
from lshkit.torch_ops.assertions import require

ALL_KEYS = 2**31 - 1  # a window, or a length, that no sequence is longer than


@dataclass(frozen=True, kw_only=True, repr=False)
class Colliding(Hashed):
    """Softmax of cosines, estimated from the pairs that share a code in some hash.

    A pair's weight is exp(scale cosine) over its probability to collide in some of the n_hashes,
    1 - (1 - p)^n_hashes with p = (1 - acos(cosine) / pi)^n_bits, so that the sums of numerator and
    denominator are unbiased for those of softmax (Horvitz and Thompson 1952). The gradient is that
    of the estimate with its probabilities held constant. (Probabilities are those of "hyperplane"
    and nearly those of "hadamard": docs/lsh_attention.md.) Two rows of zeros, whose cosine
    is 0, share all codes: they count with probability 1. Memory is linear in the lengths, time
    quadratic with a small factor: of independent rows of 64 features 13 % of the pairs collide with
    8 bits and 32 hashes, 1 % with 12. With bits that grow with the length (max_length) it grew as
    n^1.4 to n^1.5 on text. `lsh_attention` does the same for scores without unit norms. Packed
    sequences are computed one after another, each in half a millisecond at least. CPU only;
    computed in float32, under autocast too.

    Args:
        n_bits: bits of a code, 1 to 16. More find fewer pairs. None: by max_length, or 8.
        max_length: instead of n_bits, the number of keys in the longest sequence: 8 bits up to 1024
            and one more each time it doubles, so that the unrelated keys that a query meets stay as
            many. Longer sequences take more time, not more noise.
        n_hashes: number of codes, 1 to 65535. More find more pairs and reduce the noise.
        hasher: "hadamard" (fast rotations) or "hyperplane" (independent normals).
        scale: of the cosines, > 0: the inverse of softmax's temperature. A tensor, of one number or
            one for each key head, goes into `parameters`.
        window: pairs of positions less than this apart are always used, >= 0: 1 is a position and
            itself; 0, no pair, is for queries whose positions are not those of the keys. A query
            that has no key in it may find none at all, and then gives zeros.
        exact_up_to: sequences of at most so many keys use all of their pairs, >= 0: softmax itself.
            A model that is trained on short sequences first has learned there what to look for
            among the keys that it will not see all of. Packed sequences count with their mean
            length; `torch.export` samples at all lengths.
        unit_norm, lift_scale: see `Estimator`. With "lift" scores are scale q . k / lift_scale.

    parameters: "scale", `()` or `(H_k,)`, and "lift_scale" of unit_norm="lift".

    Weights are divided by their sum, so normalize="sum" and None are the same. For the window
    query i has the position i + causal_offset, which is i where there is neither a causal mask nor
    an offset.
    """

    scale: float = 12.0
    window: int = 1
    exact_up_to: int = 256

    name: ClassVar[str] = "colliding"
    least_bits: ClassVar[int] = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(
            scale=self._positive("scale"),
            window=checks.integer("window", self.window, 0, ALL_KEYS),
            exact_up_to=checks.integer("exact_up_to", self.exact_up_to, 0, ALL_KEYS),
        )

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The tensors that `parameters` may hold."""
        return ("lift_scale", "scale") if self.unit_norm == "lift" else ("scale",)

    def at_lengths(self, n_queries: int, n_keys: int) -> "Colliding":
        if n_keys <= self.exact_up_to:
            return self.exact()
        return dataclasses.replace(self, exact_up_to=0)

    def exact(self) -> "Colliding":
        """Itself with all pairs, whatever the length: what it estimates."""
        return dataclasses.replace(self, exact_up_to=ALL_KEYS)

    def for_decoding(self) -> BucketSums:
        raise ValueError(
            f"estimator must be Sampled or Soft for a state, got {self!r}, whose keys cannot be "
            "summed in tables: decode with new_cache of YosoAttention"
        )

    def _attend(self, call: Call) -> Tensor:
        query, key, mask = call.query, call.key, call.key_mask
        check_cpu("Colliding", query, "Sampled, Expected and Soft run")
        if query.is_meta:
            return query.new_empty((*query.shape[:-1], call.value.shape[-1]))
        if call.query_starts is not None:
            return self.at_lengths(*call.lengths)._attend_each(call)
        n_q, n_k, offset, window = *call.lengths, call.offset, self.window
        if not exporting() and n_k <= self.exact_up_to:
            # An offset beyond the keys shows as many of them, and leaves them in the window.
            offset, window = (min(max(offset, -n_q), n_k) if call.is_causal else 0), ALL_KEYS
        if mask is not None:  # whatever they hold, NaN included, it reaches no gradient
            key = key.masked_fill(~mask[:, None, :, None], 0)
        dtype, device = query.dtype, query.device.type
        if dtype is not torch.float64 and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            out, *_ = torch_ops.lsh_attention(
                *(units(query) * self.scale_of(call), units(key), call.value.float(), mask),
                *(*self.functions_of(call), False, 1.0, torch_ops.WEIGHTING["horvitz_thompson"]),
                *(call.is_causal, offset, window, 0),
            )
        if call.normalize == "l2":
            out = unit_rows(out)
        return out.to(dtype)

    def scale_of(self, call: Call) -> float | Tensor:
        """A number, or `(H, 1, D)`: one for each head of queries."""
        scale = call.parameters.get("scale")
        if scale is None:
            return self.scale
        heads = call.key.shape[1]
        scale = one_or_each_head("scale", scale, heads, call.query.device).float()
        check_scale("parameters['scale']", scale)
        groups = call.query.shape[1] // max(heads, 1)
        scale = scale.expand(heads).repeat_interleave(groups)[:, None, None]
        # A sum of its own for each feature in the gradient: torch's threads share out a single one.
        return scale.expand(-1, -1, call.query.shape[-1])

    def _attend_each(self, call: Call) -> Tensor:
        """Packed sequences, one by one, all with the same hash functions."""
        query_starts, key_starts, mask = call.query_starts, call.key_starts, call.key_mask
        assert query_starts is not None and key_starts is not None
        call = call._replace(
            seed=seed_tensor(call.seed, call.query.device), query_starts=None, key_starts=None
        )
        of_queries, of_keys = query_starts.diff().tolist(), key_starts.diff().tolist()
        parts = zip(  # split, whose gradients are put together once: each slice's is of full size
            call.query.split(of_queries, 2),
            call.key.split(of_keys, 2),
            call.value.split(of_keys, 2),
            itertools.repeat(None) if mask is None else mask.split(of_keys, 1),
            strict=False,
        )
        out = [
            self._attend(call._replace(query=query, key=key, value=value, key_mask=mask))
            for query, key, value, mask in parts
        ]
        return torch.cat(out, 2)


def check_scale(name: str, scale: Tensor) -> None:
    message = f"{name} must be finite and > 0 in float32"
    require((scale > 0) & (scale < math.inf), message, lambda: f", got {scale.tolist()}")


def units(x: Tensor) -> Tensor:
    """Unit rows in float32, whose norms float32 need not hold.

    Rows of subnormal numbers are zeros: the derivative of the others is finite.
    """
    x = x if x.dtype is torch.float64 else x.float()
    x = x if x.stride(-1) == 1 else x.contiguous()  # else bits depend on strides
    if x.shape[-1]:
        largest = x.detach().abs().amax(-1, keepdim=True)
        x = torch.where(largest < torch.finfo(x.dtype).tiny, 0, x)
    return unit_rows(x).float()
