"""Arguments of `YosoAttention` and of its calls: checks and conversions."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lshkit import checks
from lshkit.attention.across_ranks import CU_SEQLENS_OF_RANKS, AcrossRanks, check_values
from lshkit.attention.arguments import DTYPES, autocast_device, check_dense
from lshkit.attention.estimators import Estimator
from lshkit.torch_ops.assertions import has_values, require

if TYPE_CHECKING:
    from lshkit.attention.module_decoding import State
    from lshkit.attention.modules import YosoAttention

# TransformerEncoderLayer makes -inf of a True in a padding mask; others take -1e4, -1e9 or the
# least number of the dtype for it.
IGNORED_FROM = -1e4


def checked_heads(embed_dim: int, num_heads: int, head_dim: int | None) -> tuple[int, int, int]:
    """embed_dim, num_heads and head_dim, which is embed_dim / num_heads if None."""
    embed_dim = checks.integer("embed_dim", embed_dim, 1)
    num_heads = checks.integer("num_heads", num_heads, 1)
    if head_dim is not None:
        return embed_dim, num_heads, checks.integer("head_dim", head_dim, 1)
    if embed_dim % num_heads:
        raise ValueError(f"embed_dim must be a multiple of num_heads={num_heads}: {embed_dim}")
    return embed_dim, num_heads, embed_dim // num_heads


def check_options(dropout: float, batch_first: bool, bias: bool, dtype: torch.dtype | None) -> None:
    """Of `MultiheadAttention`'s options those that are no sizes."""
    if isinstance(dropout, bool) or not isinstance(dropout, numbers.Real):
        raise TypeError(f"dropout must be a number from 0 to below 1, got {dropout!r}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be from 0 to below 1, got {dropout}")
    if not checks.boolean("batch_first", batch_first):
        raise ValueError("batch_first must be True: inputs are (batch, length, embed_dim)")
    checks.boolean("bias", bias)
    if dtype not in (None, *DTYPES):
        known = ", ".join(map(str, DTYPES))
        raise TypeError(f"dtype must be one of {known} or None, got {dtype!r}")


def checked_learn(learn: Sequence[str], estimator: Estimator) -> tuple[str, ...]:
    """The names of what is learnt, which the estimator must have."""
    names = estimator.parameter_names
    if not isinstance(learn, (list, tuple)) or not all(isinstance(name, str) for name in learn):
        raise TypeError(f"learn must be a list or tuple of names, got {learn!r}")
    for name in learn:
        if name not in names:
            known = ", ".join(map(repr, names)) or "nothing"
            raise ValueError(f"learn may hold {known} with {estimator!r}, got {name!r}")
    if "lift_scale" in learn and isinstance(estimator.lift_scale, str):
        raise ValueError("lift_scale must be a number to learn it, got 'auto'")
    return tuple(learn)


def checked_call(
    module: YosoAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    need_weights: bool,
    attn_mask: Tensor | None,
    is_causal: bool,
    state: State | None,
    cu_seqlens: Tensor | None,
    context_parallel: AcrossRanks | None,
) -> tuple[bool, Tensor | None]:
    """is_causal, and yoso_attention's mask, of the arguments of this module's `forward`.

    Raises for what is refused before anything is computed: over ranks all that can be refused.
    """
    if need_weights:
        raise ValueError("need_weights must be False: attention weights are never formed")
    is_causal = checks.boolean("is_causal", is_causal)
    check_inputs(module, query, key, value, attn_mask, is_causal)
    mask = takes_part(key_padding_mask, key)
    packed = cu_seqlens is not None
    if context_parallel is not None:
        if cu_seqlens is not None:
            raise ValueError(CU_SEQLENS_OF_RANKS)
        if state is not None:
            raise ValueError("context_parallel must be None with a state, which one rank holds")
        packed = context_parallel.cu_seqlens is not None
        whole = module.in_proj_weight
        weights = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
        inputs = zip(("query", "key", "value"), (query, key, value), weights, strict=True)
        for name, x, weight in inputs:
            own = weight if whole is None else whole
            assert own is not None
            _check_beside_weights(name, x, own)
        if mask is not None and mask.device != key.device:
            raise ValueError(
                f"key_padding_mask must be on key's device {key.device}, got {mask.device}"
            )
    if packed and (module.conv is not None or state is not None):
        other = "a state" if module.conv is None else f"conv_window={module.conv_window}"
        raise ValueError(f"cu_seqlens must be None with {other}: sequences would mix")
    if cu_seqlens is not None and query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"key must have query's length {query.shape[-2]} with cu_seqlens, got {key.shape[-2]}"
        )
    return is_causal, mask


def _check_beside_weights(name: str, x: Tensor, weight: Tensor) -> None:
    """Raises for what no product with the weights can be made of, or none with values."""
    check_values(name, x)
    if x.device != weight.device:
        raise ValueError(f"{name} must be on the module's device {weight.device}, got {x.device}")
    if x.dtype is not weight.dtype and not torch.is_autocast_enabled(autocast_device(x)):
        raise TypeError(f"{name} must have the module's dtype {weight.dtype}, got {x.dtype}")


def check_inputs(
    module: YosoAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
) -> None:
    """Raises for what is no input of this module's `forward`."""
    wanted = (("query", query, module.embed_dim), ("key", key, module.kdim))
    for name, x, size in (*wanted, ("value", value, module.vdim)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch tensor, got {type(x).__name__}")
        check_dense(name, x)
        if x.dim() not in (2, 3) or x.shape[-1] != size:
            raise ValueError(
                f"{name} must be (batch, length, {size}) or (length, {size}), "
                f"got shape {tuple(x.shape)}"
            )
        if x.shape[:-2] != query.shape[:-2]:
            raise ValueError(
                f"{name} must have query's batch {tuple(query.shape[:-2])}, "
                f"got shape {tuple(x.shape)}"
            )
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(f"value must have key's length {key.shape[-2]}, got {value.shape[-2]}")
    if attn_mask is not None and not is_causal:
        raise ValueError(
            "attn_mask must be None: no pair of a query and a key is visited, so none can be "
            "masked (is_causal=True gives causal attention, key_padding_mask hides keys)"
        )
    if attn_mask is not None:
        check_causal_mask(attn_mask, (query.shape[-2], key.shape[-2]))
    if module.conv is not None and query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"key must have query's length {query.shape[-2]} for the convolution over "
            f"positions (conv_window={module.conv_window}), got {key.shape[-2]}"
        )


def check_causal_mask(mask: Tensor, sizes: tuple[int, int]) -> None:
    """Raises for another than the causal mask: the diagonal up to which queries see keys, the one
    above, the first and the last column are read. Of tensors without values, and in a compiled
    graph, only the shape is checked."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"attn_mask must be a tensor, got {type(mask).__name__}")
    shape = tuple(mask.shape)
    if shape[-2:] != sizes:
        raise ValueError(f"attn_mask must be the causal mask {sizes} or None, got shape {shape}")
    if mask.numel() == 0 or not has_values(mask):
        return
    n_q, n_k = sizes
    rows = torch.arange(n_q, device=mask.device)
    last = rows + n_k - n_q  # the last key that a query sees
    first = torch.zeros_like(rows)
    columns = torch.stack((first, last, last + 1, first + n_k - 1)).clamp(0, n_k - 1)
    found = mask[..., rows, columns]
    closed = found if found.dtype is torch.bool else found <= IGNORED_FROM
    require(
        torch.where(columns > last, closed, found == 0),
        "attn_mask must be the causal mask with is_causal=True: 0 or False where query i sees a "
        "key, j <= i + N_k - N_q, and -inf or True elsewhere",
    )


def takes_part(key_padding_mask: Tensor | None, key: Tensor) -> Tensor | None:
    """MultiheadAttention's mask of ignored keys as yoso_attention's mask of attended ones."""
    if key_padding_mask is None:
        return None
    name = "key_padding_mask"
    if not isinstance(key_padding_mask, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(key_padding_mask).__name__}")
    if key_padding_mask.shape != key.shape[:-1]:
        raise ValueError(
            f"{name} must have shape {tuple(key.shape[:-1])}, got {tuple(key_padding_mask.shape)}"
        )
    if key_padding_mask.dtype is torch.bool:
        return ~key_padding_mask
    if not key_padding_mask.is_floating_point():
        raise TypeError(f"{name} must be boolean, got dtype {key_padding_mask.dtype}")
    ignored = key_padding_mask <= IGNORED_FROM
    known = ignored | (key_padding_mask == 0)
    message = f"{name} of dtype {key_padding_mask.dtype} must hold only 0 and -1e4 or less (-inf)"
    require(known, message, lambda: f", got {key_padding_mask[~known][0].item()}")
    return ~ignored
