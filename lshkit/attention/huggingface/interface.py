"""Attention functions as transformers calls them, `(B, H, N, D)` in and `(B, N, H, D)` out."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.utils import logging

from lshkit.attention import bert_lsh_attention, lsh_attention, yoso_attention
from lshkit.attention.huggingface.band import softmax_band, yoso_band
from lshkit.attention.huggingface.masks import Mask, align, mask_function, read_mask
from lshkit.attention.huggingface.options import KINDS, of_model

logger = logging.get_logger(__name__)

# What some models hand over beside the mask, and why it can't be left out.
REFUSED = {
    "softcap": "it bounds scores (attn_logit_softcapping=None in the config turns it off)",
    "s_aux": "learned sinks are scores of no key",
    "sinks": "learned sinks are scores of no key",
    "indices": "the model selects keys by itself",
    "block_indices": "the model selects keys by itself",
    "cache": "a paged cache is read by pages",
}
NO_SCORES = (
    "can't take position_bias: a bias is added to the scores of all pairs, and it forms none "
    "(lshkit_lsh does; models with rotary positions or position embeddings need no bias)"
)


def check_handed_over(name: str, given: dict[str, Any]) -> None:
    """Refuses what would change the result; warns of wanted weights."""
    for word, reason in REFUSED.items():
        if given.get(word) is not None:
            raise NotImplementedError(f"{name} can't take {word}: {reason}")
    if given.get("output_attentions"):
        logger.warning_once(f"{name} has no attention weights to return: they are never formed")


def register(given: dict[str, Any]) -> None:
    """Registers the functions and their masks; given: options by kind, "yoso", "lsh", ..."""
    complete = {kind: KINDS[kind].complete(options, kind) for kind, options in given.items()}
    for kind, options in complete.items():
        KINDS[kind].check(options)
    for kind, options in complete.items():
        name = f"lshkit_{kind}"
        AttentionInterface.register(name, _attention(name, kind, options))
        AttentionMaskInterface.register(name, mask_function(name, takes_pairs=kind == "lsh"))


def _attention(
    name: str, kind: str, registered: dict[str, Any]
) -> Callable[..., tuple[Tensor, None]]:
    attend, takes_pairs, own = _ATTEND[kind], kind == "lsh", KINDS[kind]

    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        position_bias: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        check_handed_over(name, kwargs)
        if position_bias is not None and not takes_pairs:
            raise NotImplementedError(f"{name} {NO_SCORES}")
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        options = of_model(kind, registered, module)
        if query.shape[0] != key.shape[0]:  # learned queries, one set for the batch
            query = query.expand(key.shape[0], -1, -1, -1)
        mask = read_mask(name, attention_mask, query, key, bool(is_causal), takes_pairs)
        key, value = key[:, :, : mask.n_keys], value[:, :, : mask.n_keys]
        if position_bias is not None:
            if mask.starts is not None:
                raise NotImplementedError(f"{name} can't take position_bias of packed sequences")
            mask = mask._replace(bias=position_bias[..., : mask.n_keys])
        if mask.is_step and not mask.is_dense and own.depends_on_positions(options):
            key, value, mask = align(key, value, mask)
        if not mask.is_causal and _is_cross(module, query, key):
            own.without_positions(options)
        batch = len(query)
        if mask.starts is not None:  # the batch, read row by row, is one long sequence
            query, key, value = _in_a_row(query), _in_a_row(key), _in_a_row(value)
        options["enable_gqa"] = key.shape[1] != query.shape[1]
        out = attend(query, key, value, mask, scaling, options).transpose(1, 2)
        out = F.dropout(out, dropout, dropout > 0)
        return out.reshape(batch, -1, *out.shape[2:]).contiguous(), None  # some models view it

    return attention


def _is_cross(module: torch.nn.Module, query: Tensor, key: Tensor) -> bool:
    """Of a layer without causal order: positions of its queries and keys have nothing in common,
    and with a cache the row of a query is not its position either."""
    in_decoder = getattr(module, "is_decoder", False) or "Cross" in type(module).__name__
    return in_decoder or query.shape[2] != key.shape[2]


def _in_a_row(x: Tensor) -> Tensor:
    """(B, H, N, D) as (1, H, B * N, D)."""
    return x.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None]


def _yoso(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    scaling: float | None,
    options: dict[str, Any],
) -> Tensor:
    """Cosines have no scale: scaling does not apply."""
    if mask.rows is not None:
        return yoso_band(query, key, value, mask.rows, options)
    options = options | {"is_causal": mask.is_causal}
    if mask.starts is not None:
        options |= {"is_causal": True, "cu_seqlens": mask.starts}
        return yoso_attention(query, key, value, **options)
    past = max(key.shape[2] - query.shape[2], 0)
    return yoso_attention(query, key, value, mask.keys, causal_offset=past, **options)


def _lsh(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    scaling: float | None,
    options: dict[str, Any],
) -> Tensor:
    if mask.rows is not None and mask.bias is None:  # exact, for less than an estimate costs
        return softmax_band(query, key, value, mask.rows, scaling)
    one = query.shape[2] == 1 and not KINDS["lsh"].depends_on_positions(options)
    if one or mask.is_dense:  # a mask of pairs is as large as all scores
        return softmax_attention(query, key, value, mask, scaling)
    options = {**options, "scale": scaling}
    options.pop("exact_steps")
    return _collided(query, key, value, mask, options)


def softmax_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, scaling: float | None
) -> Tensor:
    """Softmax attention itself, of all pairs that the mask leaves."""
    own: dict[str, Any] = {"scale": scaling, "enable_gqa": key.shape[1] != query.shape[1]}
    bias, visible = mask.of_pairs(query)
    if bias is not None:
        bias = bias.to(query.dtype)
    if visible is None:
        return F.scaled_dot_product_attention(query, key, value, bias, **own)
    seen = visible.any((1, 2))[:, None, :, None]
    key, value = (torch.where(seen, x, 0) for x in (key, value))  # what others hold may be NaN
    alone = ~visible.any(-1, keepdim=True)  # these get zeros, gradients too
    visible = visible | alone
    scores = visible if bias is None else bias.masked_fill(~visible, -math.inf)
    return F.scaled_dot_product_attention(query, key, value, scores, **own).masked_fill(alone, 0)


def _bert_lsh(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    scaling: float | None,
    options: dict[str, Any],
) -> Tensor:
    if mask.rows is not None:
        raise NotImplementedError("lshkit_bert_lsh can't take a sliding window (lshkit_lsh does)")
    if not (mask.is_causal or mask.starts is not None):
        return bert_lsh_attention(query, key, value, mask.keys, scale=scaling, **options)
    # Without the quirks of its paper it is lsh_attention without weights, which takes these masks.
    options = {**options, "scale": scaling}
    options.pop("table_size")
    if options.pop("faithful"):
        raise NotImplementedError(
            "lshkit_bert_lsh with faithful=True supports only padding masks: scores are copied "
            "across the diagonal"
        )
    options |= {"weighting": "none", "hasher": "hyperplane"}
    options |= {"window": None, "n_sinks": 0, "center": False}
    return _collided(query, key, value, mask, options)


def _collided(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, options: dict[str, Any]
) -> Tensor:
    if mask.starts is not None:
        return _by_sequence(query, key, value, mask.starts, options)
    return lsh_attention(query, key, value, mask.keys, is_causal=mask.is_causal, **options)


@torch.compiler.disable  # a graph can't know the lengths
def _by_sequence(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, options: dict[str, Any]
) -> Tensor:
    """Each packed sequence by itself."""
    lengths = starts.diff().tolist()
    parts = zip(*(x.split(lengths, 2) for x in (query, key, value)), strict=True)
    outs = [lsh_attention(q, k, v, is_causal=True, **options) for q, k, v in parts]
    return torch.cat(outs, 2)


_ATTEND = {"yoso": _yoso, "lsh": _lsh, "bert_lsh": _bert_lsh}
