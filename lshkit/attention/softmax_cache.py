"""Step-by-step decoding of a module whose attention is a softmax: its keys and values are kept."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lshkit.attention.code_cache import CodeCache
from lshkit.attention.estimators import Colliding
from lshkit.attention.estimators.colliding import check_scale, units
from lshkit.attention.state_dicts import as_bytes, check_config, checked_tensor, decoded_config
from lshkit.attention.steps import check_step
from lshkit.attention.unit_norm import unit_rows


class SoftmaxCache:
    """Decodes a causal `YosoAttention` with `Colliding`: a `CodeCache` of its unit keys.

    Made by `YosoAttention.new_cache`, on the CPU. A call with one position reads the keys that the
    cache selects: all of up to 1,024, then a sample as large as its epsilon asks for and its
    max_share allows (see `CodeCache`). A call with several reads all keys, in quadratic time: that
    is softmax itself, where the module's forward without a state samples sequences longer than
    `exact_up_to`. (Of a sequence with a key or value that is not finite, positions from it on are
    read one by one.) Keys and values are float32, and memory grows with the positions. Ignored keys
    can only be left padding. An error leaves the cache as it was.
    """

    def __init__(
        self,
        batch_size: int,
        *,
        num_heads: int,
        head_dim: int,
        estimator: Colliding,
        normalize: str | None,
        conv_window: int | None,
        short_conv: int | None,
        seed: int,
        dtype: torch.dtype,
        of_cache: dict[str, Any],
    ) -> None:
        if estimator.unit_norm == "lift":
            raise ValueError(
                "unit_norm must be 'l2' to decode step by step, got 'lift': its bound is unknown "
                "before the last key"
            )
        self.batch_size, self.num_heads, self.head_dim = batch_size, num_heads, head_dim
        self.num_key_heads, self.value_dim = num_heads, head_dim
        self.estimator, self.normalize = estimator, normalize
        self.conv_window, self.short_conv, self.dtype = conv_window, short_conv, dtype
        self.cache = CodeCache(batch_size, num_heads, head_dim, scale=1.0, seed=seed, **of_cache)
        self._finite = True  # all keys and values so far
        self._tail = self._inputs = None
        if conv_window is not None:
            self._tail = self._zeros(num_heads, conv_window - 1)
        if short_conv is not None:
            self._inputs = self._zeros(3 * num_heads, short_conv - 1)

    def prefill(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        scale: float | Tensor,
    ) -> Tensor:
        """Attention `(B, H, n, D_v)` of the next n positions; scale of cosines: `(H, 1, 1)`."""
        self._check(query=query, key=key, value=value)
        if attn_mask is not None:  # whatever they hold
            hidden = ~attn_mask[:, None, :, None]
            key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
        rows = units(query) * scale, units(key), value.float()
        n = query.shape[2]
        finite = self._finite and all(bool(x.isfinite().all()) for x in rows[1:])
        if n == 1:
            out = self.cache.step(*rows, attn_mask)
        elif n == 0 or finite:
            out = self.cache.prefill(*rows, attn_mask)
        else:  # products of all keys would give a NaN to every row
            self.cache.append(*rows[1:], attn_mask)
            known = self._finite_positions(n)
            out = self.cache._attend_exactly(rows[0], known.tolist())
            if (first := int(known.min())) < n:
                later = torch.arange(first, n) >= known[:, None]
                read = self.cache.attend(rows[0][:, :, first:])
                out[:, :, first:] = torch.where(later[:, None, :, None], read, out[:, :, first:])
        self._finite = finite
        return (unit_rows(out) if self.normalize == "l2" else out).to(self.dtype)

    def _finite_positions(self, n: int) -> Tensor:
        """How many of the last n positions of each sequence come before what is not finite."""
        finite = [x.isfinite().all(-1).all(1) for x in (self.cache.key, self.cache.value)]
        first = (finite[0] & finite[1]).long().cumprod(1).sum(1)
        return (first - (self.cache.positions - n)).clamp(0, n)

    def check(self, mask: Tensor | None, n: int, scale: float | Tensor) -> None:
        """The mask of the next n positions, True takes part, and a scale."""
        if isinstance(scale, Tensor):
            check_scale("scale", scale.flatten())
        try:
            self.cache._padded(mask, n)
        except ValueError as error:
            raise ValueError(
                "key_padding_mask must be of left padding with a cache: True only before the first "
                "False of a sequence, and for none behind it"
            ) from error

    @property
    def length(self) -> Tensor:
        """Positions of each sequence, padding left out; int64 `(B,)`."""
        return self.cache.length

    @property
    def nbytes(self) -> int:
        """Memory of all tensors."""
        return self.cache.nbytes + sum(x.nbytes for x in self._tensors().values())

    def reset(self) -> "SoftmaxCache":
        """Removes everything that was added; returns self."""
        self.cache.reset()
        self._finite = True
        for x in self._tensors().values():
            x.zero_()
        return self

    def clone(self) -> "SoftmaxCache":
        """A cache with the same contents that shares no memory that is written to."""
        other = copy.copy(self)
        other.cache = self.cache.clone()
        other._select(torch.arange(self.batch_size, device="cpu"))
        return other

    def reorder(self, indices: Any) -> "SoftmaxCache":
        """Replaces sequence i by sequence indices[i], for beam search; returns self.

        indices: integers `(n,)`. Their number becomes the batch size: one prompt can become many.
        """
        self.cache.reorder(indices)
        self.batch_size = self.cache.batch_size
        self._select(torch.as_tensor(indices, device="cpu").long())
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """Plain tensors: the cache's, "module" (the JSON of options) and the convolutions' rows."""
        tensors = {name: x.clone() for name, x in self._tensors().items()}
        return self.cache.state_dict() | {"module": as_bytes(self._options())} | tensors

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Loads the contents of a cache of a module with the same options and seed.

        TypeError or ValueError, which leave this cache unchanged, name the entry that is missing,
        unknown or of another type or shape.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must be a dict, got {type(state_dict).__name__}")
        theirs, options = decoded_config(state_dict.get("module"), "module"), self._options()
        check_config(theirs, options, "cache")
        if theirs.keys() != options.keys():
            raise ValueError(f"module must hold {sorted(options)}, holds {sorted(theirs)}")
        own = self._tensors()
        copies = {
            name: checked_tensor(
                f"state_dict[{name!r}]", state_dict.get(name), x.dtype, tuple(x.shape)
            ).to("cpu", copy=True)
            for name, x in own.items()
        }
        others = {name: x for name, x in state_dict.items() if name not in {"module", *own}}
        self.cache.load_state_dict(others)
        self._finite = bool(self.cache.key.isfinite().all() and self.cache.value.isfinite().all())
        for name, x in own.items():
            x.copy_(copies[name])

    def _options(self) -> dict[str, Any]:
        names = "normalize", "conv_window", "short_conv"
        return {"estimator": self.estimator.to_dict()} | {x: getattr(self, x) for x in names}

    def _select(self, sequences: Tensor) -> None:
        """Copies of the convolutions' inputs, which may be changed outside of inference mode."""
        with torch.inference_mode(False):
            for name, x in self._tensors().items():
                copied = torch.empty((len(sequences), *x.shape[1:]), dtype=x.dtype, device="cpu")
                setattr(self, f"_{name}", copied.copy_(x[sequences]))

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {"tail": self._tail, "inputs": self._inputs}
        return {name: x for name, x in tensors.items() if x is not None}

    def _zeros(self, heads: int, positions: int) -> Tensor:
        with torch.inference_mode(False):  # a tensor made in that mode could not be changed outside
            shape = self.batch_size, heads, positions, self.head_dim
            return torch.zeros(shape, dtype=self.dtype, device="cpu")

    def _check(self, **tensors: Tensor) -> None:
        check_step("cache", self, _check_device, **tensors)

    def __repr__(self) -> str:
        return (
            f"SoftmaxCache({self.batch_size}, {self.estimator!r}, normalize={self.normalize!r}; "
            f"{self.cache!r})"
        )


def _check_device(name: str, x: Tensor) -> None:
    if x.device.type != "cpu":
        raise NotImplementedError(f"{name} must be on the cpu, where the cache is, got {x.device}")
