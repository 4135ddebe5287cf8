"""Attention masks of transformers' models without a matrix of n^2 elements.

The mask interface asks for the mask of a pattern (causal, bidirectional, ...) and of padding. What
is made here goes through the model to the attention function in one of these forms:

    bool (B, 1, 1, n_keys)    True for a key that every query sees, no causal order; or that the
                              only query sees
    int32 (B, 1, 1, n_keys)   causal, the last query at the last key: ~ of how many of the last
                              queries see a key
    int64 (B, 1, 2, n_keys)   a sliding window: ~ of how many of the last queries are at a key or
                              behind it, and of how many of these no longer see it
    int32 (1, S + 1, 1, 1)    causal within packed sequences: ~ of where they start among the rows
                              of the batch, counted through it
    bool (B, 1, n_q, n_keys)  any pattern, for the attention functions that take pairs
    uint8 (B, 1, 1, n_keys)   the same of a single query

Numbers are negative (~ x = -1 - x), so that an integer mask of a user's 0 and 1 is none of these.
They count from the last query back, as a model may go on with its last queries alone and keep as
many rows of its mask (Gemma 4, in layers that share keys). A mask may be shorter than the keys:
those beyond are the free places of a static cache.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import MODEL_MAPPING, masking_utils

from lshkit.attention.module_arguments import IGNORED_FROM
from lshkit.torch_ops.assertions import may_be_read, require

CHANGED = "the model changes its causal mask in a way that {} can't follow"


class Mask(NamedTuple):
    """A mask as the attention functions of lshkit take it."""

    n_keys: int  # keys beyond are left out
    keys: Tensor | None = None  # bool (B, n_keys), True for a key that takes part
    is_causal: bool = False  # the last query stands at the last key
    starts: Tensor | None = None  # of packed sequences
    is_step: bool = False  # the query, a single one, stands at the last key that takes part
    rows: Tensor | None = None  # of a sliding window, int32 (B, 2, n_keys)
    pairs: Tensor | None = None  # bool or additive floats, (B, 1 or H, n_q, n_keys)
    bias: Tensor | None = None  # added to scores, (B or 1, H, n_q, n_keys)

    @property
    def is_dense(self) -> bool:
        """It speaks of pairs, for all but the functions of a band."""
        return not (self.rows is None and self.pairs is None and self.bias is None)

    def of_pairs(self, query: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """What is added to scores, and True for each pair that takes part; None for all pairs."""
        n_queries, device = query.shape[2], query.device
        bias, pairs = self.bias, self.pairs
        if self.rows is not None:
            row = torch.arange(n_queries, device=device)[:, None]
            pairs = (self.rows[:, :1, None] <= row) & (row < self.rows[:, 1:, None])
        elif pairs is None and self.is_causal and n_queries > 1:
            position = torch.arange(self.n_keys - n_queries, self.n_keys, device=device)
            column = torch.arange(self.n_keys, device=device)
            pairs = (column <= position[:, None])[None, None]
        elif pairs is not None and pairs.dtype is not torch.bool:
            floats, pairs = pairs, pairs > torch.finfo(pairs.dtype).min / 2
            floats = torch.where(pairs, floats, 0.0)
            bias = floats if bias is None else bias + floats
        if self.keys is not None:
            keys = self.keys[:, None, None]
            pairs = keys if pairs is None else keys & pairs
        return bias, pairs


def mask_function(name: str, takes_pairs: bool) -> Callable[..., Tensor]:
    """What `AttentionMaskInterface` registers under `name`."""

    def mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int | Tensor = 0,
        kv_offset: int | Tensor = 0,
        mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
        attention_mask: Tensor | None = None,
        local_size: int | None = None,
        use_vmap: bool = False,
        allow_is_causal_skip: bool | None = None,
        allow_is_bidirectional_skip: bool | None = None,
        device: torch.device | str = "cpu",
        config: Any = None,
        **_: Any,
    ) -> Tensor:
        if config is not None and not torch.compiler.is_compiling():
            _check_interface(name, type(config))
        keys = _padding(attention_mask, kv_offset, kv_length)
        if keys is not None and keys.shape[0] not in (1, batch_size):
            got = tuple(attention_mask.shape)  # type: ignore[union-attr]
            raise ValueError(f"attention_mask must be of {batch_size} sequences, got shape {got}")
        sizes = batch_size, q_length, kv_length, q_offset, kv_offset
        # A window or chunk that all tokens so far are in: a full cache has local_size keys. The
        # flags say that nothing else is in the pattern.
        wide = local_size is not None and kv_length < local_size and not use_vmap
        skips = allow_is_causal_skip, allow_is_bidirectional_skip
        kind = kind_of(mask_function, q_length, wide, *skips, takes_pairs)
        if kind in ("pattern", "changed pattern"):
            found = _pattern(mask_function, *sizes, keys, device, kind == "changed pattern")
            if isinstance(found, Tensor):
                return found
            kind = found
        if kind == "bidirectional":
            return _key_mask(keys, batch_size, kv_length, device)
        if kind == "causal":
            if q_length > 1 and isinstance(q_offset, Tensor) and torch.compiler.is_compiling():
                return _untraced_causal(keys, *sizes, device)
            return _causal(keys, *sizes, device)
        if kind != "whole" and not takes_pairs:
            raise NotImplementedError(
                f"{name} can't apply {kind}: it forms no matrix of pairs that such a mask could "
                f"change. It takes padding, causal masks and packed sequences (lshkit_lsh takes "
                f"all)"
            )
        pairs: Any = masking_utils.sdpa_mask(
            *sizes,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        if kind == "whole" or allow_is_bidirectional_skip is not None:
            return pairs
        pairs = _up_to_the_last_query(pairs, q_length, q_offset, kv_offset)
        return pairs if q_length > 1 else pairs.to(torch.uint8)

    return mask


def _check_interface(name: str, config: type) -> None:
    """Refuses models that have masks made and attend by themselves: they would misread them."""
    model: Any = MODEL_MAPPING.get(config, None)
    if isinstance(model, tuple) or model is None or model.is_backend_compatible():
        return
    if not model._can_set_attn_implementation() or _adds_masks_itself(model):
        raise NotImplementedError(
            f"{model.__name__} can't have attn_implementation={name!r}: it, or a part of it, does "
            f"not use transformers' attention interface"
        )


@functools.cache
def _adds_masks_itself(model: Any) -> bool:
    """Whether its text attends by itself, beside parts that use the interface (GIT)."""
    name = f"{model.__name__.removesuffix('Model')}SelfAttention"
    own = getattr(sys.modules[model.__module__], name, None)
    if own is None:
        return False
    try:
        code = inspect.getsource(own)
    except (OSError, TypeError):
        return False
    return "+ attention_mask" in code and "get_interface" not in code


def kind_of(
    function: Callable[..., Any],
    q_length: int,
    wide: bool,
    allow_is_causal_skip: bool | None,
    allow_is_bidirectional_skip: bool | None,
    takes_pairs: bool,
) -> str:
    """What is made of a mask function of transformers.

    "causal" or "bidirectional": that order and the padding. "whole": all pairs, for a model that
    goes on to change its mask. "pattern", or "changed pattern" for such a model: see `_pattern`.

    wide: all tokens so far are in its window or chunk.
    """
    bidirectional = function is masking_utils.bidirectional_mask_function
    causal = function is masking_utils.causal_mask_function
    # A model that goes on to change its mask wants all of it. (Masks of one row are such, and a
    # mask of keys is good for all rows where pairs are of no use.)
    is_causal = allow_is_bidirectional_skip is None
    skip = allow_is_causal_skip if is_causal else allow_is_bidirectional_skip
    changed = skip is False and q_length > 1 and (is_causal or takes_pairs)
    if changed and (causal or bidirectional):
        return "whole"
    if bidirectional or (wide and allow_is_bidirectional_skip):
        return "bidirectional"
    if causal or (wide and allow_is_causal_skip):
        return "causal"
    return "changed pattern" if changed else "pattern"


def read_mask(
    name: str, mask: Tensor | None, query: Tensor, key: Tensor, is_causal: bool, takes_pairs: bool
) -> Mask:
    """The mask that a model hands to its attention function, of the forms above or its own."""
    n_q, n_keys = query.shape[-2], key.shape[-2]
    if mask is None:  # the model wants the causal order, or nothing
        return Mask(n_keys, is_causal=is_causal)
    if not isinstance(mask, Tensor):
        raise TypeError(f"attention_mask must be a tensor for {name}, got {type(mask).__name__}")
    if mask.dim() == 2:  # of a model whose masks do not go through the interface
        if mask.is_floating_point():  # 1 for a token, or 0 added to its scores?
            raise TypeError(
                f"attention_mask (batch, keys) must be boolean or of integers for {name}, got "
                f"{mask.dtype}"
            )
        return Mask(mask.shape[1], _keys(mask != 0, query), is_causal)
    if mask.dim() != 4 or mask.shape[-1] > n_keys:
        raise ValueError(
            f"attention_mask must be (batch, keys) or (batch, 1, 1, keys) with up to {n_keys} keys "
            f"for {name}, got {tuple(mask.shape)}"
        )
    if mask.dtype is torch.int32 and mask.shape[1] > 1:
        starts = _counts(name, mask.transpose(1, 3), 1)[0, 0]
        _require_unchanged(name, starts[-1] == query.shape[0] * n_q)
        return Mask(n_keys, is_causal=True, starts=starts)
    if mask.dtype in (torch.int32, torch.int64) and n_q > mask.shape[-1]:
        raise NotImplementedError(CHANGED.format(name))
    if mask.dtype is torch.int64:
        rows = _window_rows(_counts(name, mask, 2 if n_q > 1 else mask.shape[2]), n_q)
        return Mask(mask.shape[-1], rows=rows.expand(query.shape[0], -1, -1))
    if mask.dtype is torch.int32:
        seen_by = _counts(name, mask, 1)[:, 0]
        return Mask(mask.shape[-1], _keys(_in_order(name, seen_by), query), True)
    if mask.dtype is torch.uint8 and mask.shape[2] == n_q == 1 and takes_pairs:
        return Mask(mask.shape[-1], is_causal=is_causal, pairs=mask != 0)
    if mask.shape[1] == mask.shape[2] == 1:
        if mask.dtype is torch.bool:
            keys = _keys(mask[:, 0, 0], query)
            return Mask(mask.shape[-1], keys, is_step=is_causal and n_q == 1)
    if mask.is_floating_point() and mask.shape[1] == mask.shape[2] == 1:
        of_scores = takes_pairs and n_q == 1 and may_be_read(mask) and not _is_padding(mask).all()
        if not of_scores:
            return Mask(mask.shape[-1], _keys(_from_floats(mask[:, 0, 0]), query))
    if not takes_pairs:
        raise NotImplementedError(
            f"{name} can't apply a mask of shape {tuple(mask.shape)} and dtype {mask.dtype}: it "
            f"forms no matrix of pairs that such a mask could change (lshkit_lsh does). Give the "
            f"padding mask (batch, keys), 1 for a token, 0 for padding; causal order comes with "
            f"the model"
        )
    if mask.dtype is not torch.bool and not mask.is_floating_point():
        raise TypeError(f"attention_mask must be boolean or of floats, got {mask.dtype}")
    return Mask(mask.shape[-1], is_causal=is_causal, pairs=mask)


def _counts(name: str, mask: Tensor, n_rows: int) -> Tensor:
    """The numbers in a mask of integers as it was made here, `(B, n_rows, n_keys)`."""
    ours = mask.shape[1] == 1 and mask.shape[2] in (1, 2)
    if not ours or not (mask.numel() == 0 or not may_be_read(mask) or (mask < 0).any()):
        raise TypeError(f"attention_mask must be boolean or of floats for {name}, got {mask.dtype}")
    _require_unchanged(name, (mask < 0) & (mask.shape[2] == n_rows))
    return ~mask[:, 0]


def _require_unchanged(name: str, known: Tensor) -> None:
    require(known, CHANGED.format(name), error=NotImplementedError)


def _in_order(name: str, seen_by: Tensor) -> Tensor:
    """The keys that take part, of a causal mask as it was made here."""
    keys = seen_by > 0
    last = torch.arange(seen_by.shape[-1], 0, -1, device=seen_by.device)
    _require_unchanged(name, ~keys | (seen_by == last))
    return keys


def _window_rows(counts: Tensor, n_q: int) -> Tensor:
    """The first of n_q query rows that sees a key and the one behind the last, (B, 2, n_keys).

    Of a single query the last row of the mask, which it may have alone, says all.
    """
    stop = (n_q - counts[:, -1]).clamp(0)
    first = torch.zeros_like(stop) if n_q == 1 else (n_q - counts[:, 0]).clamp(0)
    return torch.stack((torch.minimum(first, stop), stop), 1).to(torch.int32)


def _is_padding(mask: Tensor) -> Tensor:
    """Of floats that are added to scores: 0 for a key that takes part, else very low."""
    return (mask == 0) | (mask <= IGNORED_FROM)


def _from_floats(mask: Tensor) -> Tensor:
    """The keys that take part, of a padding mask that is added to scores."""
    require(
        _is_padding(mask),
        f"attention_mask of floats must be 0 or at most {IGNORED_FROM:g} for each key",
        lambda: f", got values from {mask.min()} to {mask.max()}",
    )
    return mask == 0


def _keys(keys: Tensor, query: Tensor) -> Tensor:
    return keys.expand(query.shape[0], -1)


def _padding(mask: Tensor | None, kv_offset: int | Tensor, kv_length: int) -> Tensor | None:
    """The padding mask of the keys at hand, bool (B, kv_length)."""
    if mask is None:
        return None
    padded: Any = masking_utils.prepare_padding_mask(mask, kv_length, kv_offset)
    if isinstance(kv_offset, Tensor):
        kv_offset = int(kv_offset)
    return padded[:, kv_offset : kv_offset + kv_length].to(torch.bool)


def _key_mask(
    keys: Tensor | None, batch_size: int, n_keys: int, device: torch.device | str
) -> Tensor:
    if keys is None:
        keys = torch.ones(batch_size, n_keys, dtype=torch.bool, device=device)
    return keys[:, None, None, :]


def _causal(
    keys: Tensor | None,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int | Tensor,
    device: torch.device | str,
) -> Tensor:
    if q_length == 1:
        seen = torch.arange(kv_length, device=device) + kv_offset <= q_offset
        seen = seen.expand(batch_size, -1)
        return _key_mask(seen if keys is None else seen & keys, batch_size, kv_length, device)
    n_keys = int(q_offset - kv_offset) + q_length
    if not q_length <= n_keys <= kv_length:
        raise NotImplementedError(
            f"a causal mask needs the keys of all {q_length} queries, which begin at position "
            f"{q_offset}: got {kv_length} keys from position {kv_offset}"
        )
    seen_by = torch.arange(n_keys, 0, -1, dtype=torch.int32, device=device).expand(batch_size, -1)
    if keys is not None:
        seen_by = torch.where(keys[:, :n_keys], seen_by, 0)
    return ~seen_by[:, None, None, :]


# The prompt with a static cache: its offset is a tensor, whose value a graph can't know.
_untraced_causal = torch.compiler.disable(_causal)


@torch.compiler.disable
def _pattern(
    function: Callable[..., Any],
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int | Tensor,
    keys: Tensor | None,
    device: torch.device | str,
    whole_window: bool,
) -> str | Tensor:
    """Of a pattern made of several: its mask, the name of a simple pattern that it equals at these
    sizes, or words for what it is."""
    q_offset, kv_offset = int(q_offset), int(kv_offset)
    parts = _parts(function)
    names = [name for name, _ in parts]
    if whole_window and any("sliding_window" in name for name in names):
        return "a sliding window that the model goes on to change"
    if names == ["sliding_window_overlay", "causal_mask_function"]:
        window = parts[0][1]["sliding_window"]
        if q_offset + q_length <= window:
            return "causal"
        n_keys = min(kv_length, q_offset + q_length - kv_offset)
        keys = None if keys is None else keys[:, :n_keys]
        return _band(keys, batch_size, q_length, n_keys, q_offset - kv_offset, window, 0, device)
    if names == ["sliding_window_bidirectional_overlay", "bidirectional_mask_function"]:
        window = parts[0][1]["sliding_window"]
        ahead = kv_offset + kv_length - 1 - q_offset
        if max(q_offset + q_length - 1 - kv_offset, ahead) <= window:
            return "bidirectional"
        reach = window + 1, window
        return _band(keys, batch_size, q_length, kv_length, q_offset - kv_offset, *reach, device)
    # transformers 5.24 has the two in the other order than the releases before it.
    if set(names) == {"packed_sequence_mask_function", "remap_positions_for_packed_sequence"}:
        starts = _packed_starts(dict(parts))
        if starts is None or keys is not None or q_length != kv_length:
            return "this mask of packed sequences"
        return "causal" if len(starts) == batch_size + 1 else ~starts[None, :, None, None]
    return f"a mask of query-key pairs ({', '.join(names)})"


def _band(
    keys: Tensor | None,
    batch_size: int,
    q_length: int,
    n_keys: int,
    first_query: int,
    back: int,
    ahead: int,
    device: torch.device | str,
) -> Tensor:
    """A query sees the keys less than `back` positions before it and up to `ahead` behind it."""
    behind = first_query + q_length - torch.arange(n_keys, device=device)  # queries from the key on
    behind = behind.expand(batch_size, -1)
    seen_by = (behind + ahead).clamp(0, q_length)
    if keys is not None:
        seen_by = torch.where(keys, seen_by, 0)
    # A key that nobody sees: neither does the last query, which may be the only one that is left.
    left = torch.where(seen_by > 0, (behind - back).clamp(0, q_length), q_length)
    return ~torch.stack((seen_by, left), 1)[:, None]


def _packed_starts(parts: Mapping[str, Mapping[str, Any]]) -> Tensor | None:
    """Where packed sequences start; None where they are not causal, or longer than a window."""
    starts = _starts(parts["packed_sequence_mask_function"]["packed_sequence_mask"])
    inside = _parts(parts["remap_positions_for_packed_sequence"]["mask_function"])
    names = [name for name, _ in inside]
    if names == ["causal_mask_function"]:
        return starts
    if names == ["sliding_window_overlay", "causal_mask_function"]:
        return starts if starts.diff().max() <= inside[0][1]["sliding_window"] else None
    return None


@torch.compiler.disable  # with a static cache the offset is a tensor
def _up_to_the_last_query(
    pairs: Tensor, q_length: int, q_offset: int | Tensor, kv_offset: int | Tensor
) -> Tensor:
    """Without the free places of a static cache: the last query stands at the last key."""
    return pairs[..., : int(q_offset) + q_length - int(kv_offset)]


def _parts(function: Callable[..., Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The mask functions of transformers whose intersection a function is: the name of what made
    each, and the values that it holds. A function of another origin has the name it has."""
    name = function.__qualname__.split(".<locals>")[0]
    if function.__module__ != masking_utils.__name__:
        return [(f"{function.__module__}.{name}", {})]
    held = inspect.getclosurevars(function).nonlocals
    if name == "and_masks":
        return [part for each in held["mask_functions"] for part in _parts(each)]
    return [(name, held)]


def _starts(sequences: Tensor) -> Tensor:
    """Where sequences start in a batch `(B, n)` of their numbers, read row by row."""
    new = torch.ones_like(sequences, dtype=torch.bool)
    new[:, 1:] = sequences[:, 1:] != sequences[:, :-1]
    starts = new.flatten().nonzero().squeeze(1)
    end = starts.new_tensor([sequences.numel()])
    return torch.cat((starts, end)).to(torch.int32)


def align(key: Tensor, value: Tensor, mask: Mask) -> tuple[Tensor, Tensor, Mask]:
    """Moves the free places of a static cache to the front, so that the query's key is the last."""
    n_keys = mask.n_keys
    assert mask.keys is not None
    free = mask.keys.any(0).flip(0).byte().argmax()
    order = (torch.arange(n_keys, device=key.device) - free) % n_keys
    keys = mask.keys.index_select(1, order)
    mask = mask._replace(keys=keys, is_causal=True, is_step=False)
    return key.index_select(2, order), value.index_select(2, order), mask
