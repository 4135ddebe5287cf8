"""Attention functions as transformers calls them, `(B, H, N, D)` in and `(B, N, H, D)` out."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.utils import logging

from lshkit.attention import bert_lsh_attention, lsh_attention, yoso_attention
from lshkit.attention.functional import EXPECTED_KEYS_PER_HASH
from lshkit.attention.huggingface import options as options_
from lshkit.attention.huggingface.band import softmax_band, yoso_band
from lshkit.attention.huggingface.dense import dense_lsh_attention
from lshkit.attention.huggingface.masks import Mask, align, mask_function, read_mask
from lshkit.attention.huggingface.normalization import unit_rows

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
    "lshkit_yoso can't take position_bias: a bias is added to scores, and it forms none "
    "(lshkit_lsh does; models with rotary positions or position embeddings need no bias)"
)


def register(given: dict[str, dict | None]) -> None:
    """Registers the functions and their masks; given: options by kind, "yoso", "lsh", ..."""
    complete = {kind: options_.checked(kind, options, kind) for kind, options in given.items()}
    for kind, options in complete.items():
        name = f"lshkit_{kind}"
        AttentionInterface.register(name, _attention(name, kind, options))
        AttentionMaskInterface.register(name, mask_function(name, takes_pairs=kind != "yoso"))


def _attention(name: str, kind: str, registered: dict):
    attend, takes_pairs = _ATTEND[kind], kind != "yoso"

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
        **kwargs,
    ) -> tuple[Tensor, None]:
        for word, reason in REFUSED.items():
            if kwargs.get(word) is not None:
                raise NotImplementedError(f"{name} can't take {word}: {reason}")
        if position_bias is not None and not takes_pairs:
            raise NotImplementedError(NO_SCORES)
        if kwargs.get("output_attentions"):
            logger.warning_once(f"{name} has no attention weights to return: they are never formed")
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        options = options_.of_model(kind, registered, module)
        if query.shape[0] != key.shape[0]:  # learned queries, one set for the batch
            query = query.expand(key.shape[0], -1, -1, -1)
        mask = read_mask(name, attention_mask, query, key, bool(is_causal), takes_pairs)
        key, value = key[:, :, : mask.n_keys], value[:, :, : mask.n_keys]
        if position_bias is not None:
            if mask.starts is not None:
                raise NotImplementedError(f"{name} can't take position_bias of packed sequences")
            mask = mask._replace(bias=position_bias[..., : mask.n_keys])
        if mask.is_step and _goes_by_positions(kind, options, mask):
            key, value, mask = align(key, value, mask)
        if kind != "bert_lsh" and not mask.is_causal and _is_cross(module, query, key):
            options["window"] = None
        batch = len(query)
        if mask.starts is not None:  # the batch, read row by row, is one long sequence
            query, key, value = _in_a_row(query), _in_a_row(key), _in_a_row(value)
        options["enable_gqa"] = key.shape[1] != query.shape[1]
        out = attend(query, key, value, mask, scaling, options).transpose(1, 2)
        out = F.dropout(out, dropout, dropout > 0)
        return out.reshape(batch, -1, *out.shape[2:]), None

    return attention


def _goes_by_positions(kind: str, options: dict, mask: Mask) -> bool:
    """What a single query gets depends on the places of the keys, not on their values alone."""
    if kind == "lsh":
        return not _has_exact_steps(options)
    return kind == "yoso" and bool(options.get("window"))


def _has_exact_steps(options: dict) -> bool:
    """ "none" is not an estimate of softmax attention, which could take its place."""
    return options["exact_steps"] and options["weighting"] != "none"


def _is_cross(module, query: Tensor, key: Tensor) -> bool:
    """Of a layer without causal order: positions of its queries and keys have nothing in common,
    and with a cache the row of a query is not its position either."""
    in_decoder = getattr(module, "is_decoder", False) or "Cross" in type(module).__name__
    return in_decoder or query.shape[2] != key.shape[2]


def _in_a_row(x: Tensor) -> Tensor:
    """(B, H, N, D) as (1, H, B * N, D)."""
    return x.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None]


def _yoso(query, key, value, mask: Mask, scaling, options) -> Tensor:
    """Cosines have no scale: scaling does not apply."""
    if mask.rows is not None:
        return yoso_band(query, key, value, mask.rows, options)
    if mask.starts is not None:
        return yoso_attention(query, key, value, None, True, cu_seqlens=mask.starts, **options)
    n_q, n_keys = query.shape[2], key.shape[2]
    if options.get("estimator", "auto") == "auto" and _expected_is_faster(n_q, n_keys, options):
        options = {**options, "estimator": "expected", "gradient_rank": None, "precision": "full"}
    past = n_keys - n_q
    if not mask.is_causal or past <= 0:
        return yoso_attention(query, key, value, mask.keys, mask.is_causal, **options)
    if options.get("estimator", "auto") == "expected":
        return _expected_after(past, query, key, value, mask.keys, options)
    if n_q == 1 and not options.get("window"):  # a near window goes by positions
        return yoso_attention(query, key, value, mask.keys, **options)
    query = F.pad(query, (0, 0, past, 0))  # rows for the positions past: linear in these as well
    return yoso_attention(query, key, value, mask.keys, True, **options)[:, :, past:]


def _expected_is_faster(n_queries: int, n_keys: int, options: dict) -> bool:
    """As in yoso_attention where both numbers are the same: products of all pairs of rows against
    hashing of the rows."""
    hashed = options.get("n_hashes", 32) * (n_queries + n_keys)
    return 2 * n_queries * n_keys <= EXPECTED_KEYS_PER_HASH * hashed


def _expected_after(past: int, query, key, value, keys, options) -> Tensor:
    """The expectation for queries at the last keys, with `past` keys before the first of them: the
    sum over these, and the causal one over the rest."""
    dtype, normalize = query.dtype, options.get("normalize", "l2")
    if normalize == "sum":
        value = F.pad(value, (0, 1), value=1.0)  # the sum of the weights beside those of the values
    if dtype in (torch.float16, torch.bfloat16):  # one rounding, at the end
        query, key, value = query.float(), key.float(), value.float()
    options = {**options, "normalize": None}
    before, after = (None, None) if keys is None else (keys[:, :past], keys[:, past:])
    out = yoso_attention(query, key[:, :, :past], value[:, :, :past], before, **options)
    out = out + yoso_attention(query, key[:, :, past:], value[:, :, past:], after, True, **options)
    if normalize == "l2":
        out = unit_rows(out)
    elif normalize == "sum":
        out = out[..., :-1] / torch.where(out[..., -1:] > 0, out[..., -1:], 1)
    return out.to(dtype)


def _lsh(query, key, value, mask: Mask, scaling, options) -> Tensor:
    if mask.rows is not None and mask.bias is None:  # exact, for less than an estimate costs
        return softmax_band(query, key, value, mask.rows, scaling)
    if query.shape[2] == 1 and _has_exact_steps(options):
        return _exact_step(query, key, value, mask, scaling)
    options = {**options, "scale": scaling}
    options.pop("exact_steps")
    return _collided(query, key, value, mask, options)


def _exact_step(query, key, value, mask: Mask, scaling) -> Tensor:
    """Softmax attention of a single query, which sees all keys but for the mask."""
    keys, _, bias, pairs = mask.of_pairs(1)
    visible = None if keys is None else keys[:, None, None]
    if pairs is not None:
        visible = pairs if visible is None else visible & pairs
    if visible is not None:  # what the others hold may be NaN
        seen = visible.any((1, 2))[:, None, :, None]
        key, value = (torch.where(seen, x, 0) for x in (key, value))
    scores = visible
    if bias is not None:
        scores = bias.to(query.dtype)
        scores = scores if visible is None else scores.masked_fill(~visible, -math.inf)
    own = {"scale": scaling, "enable_gqa": key.shape[1] != query.shape[1]}
    out = F.scaled_dot_product_attention(query, key, value, scores, **own)
    return out if visible is None else out.masked_fill(~visible.any(-1, keepdim=True), 0)


def _bert_lsh(query, key, value, mask: Mask, scaling, options) -> Tensor:
    if not (mask.is_causal or mask.is_dense or mask.starts is not None):
        return bert_lsh_attention(query, key, value, mask.keys, scale=scaling, **options)
    # Without the quirks of its paper it is lsh_attention without weights, which takes these masks.
    options = {**options, "scale": scaling}
    options.pop("table_size")
    if options.pop("faithful"):
        raise NotImplementedError(
            "lshkit_bert_lsh with faithful=True takes padding masks only: scores are copied across "
            "the diagonal"
        )
    options |= {"weighting": "none", "hasher": "hyperplane"}
    options |= {"window": None, "n_sinks": 0, "center": False}
    return _collided(query, key, value, mask, options)


def _collided(query, key, value, mask: Mask, options) -> Tensor:
    if mask.is_dense:
        return dense_lsh_attention(query, key, value, *mask.of_pairs(query.shape[2]), **options)
    if mask.starts is not None:
        return _by_sequence(query, key, value, mask.starts, options)
    return lsh_attention(query, key, value, mask.keys, mask.is_causal, **options)


@torch.compiler.disable  # a graph can't know the lengths
def _by_sequence(query, key, value, starts, options) -> Tensor:
    """Each packed sequence by itself."""
    lengths = starts.diff().tolist()
    parts = zip(*(x.split(lengths, 2) for x in (query, key, value)), strict=True)
    return torch.cat([lsh_attention(*part, None, True, **options) for part in parts], 2)


_ATTEND = {"yoso": _yoso, "lsh": _lsh, "bert_lsh": _bert_lsh}
