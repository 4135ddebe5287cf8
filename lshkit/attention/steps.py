"""Arguments of what decodes step by step: `YosoState`, `CodeCache` and `SoftmaxCache`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lshkit import checks
from lshkit.attention.arguments import check_dense


def checked_sizes(
    batch_size: int,
    num_heads: int,
    head_dim: int,
    value_dim: int | None,
    num_key_heads: int | None,
    *,
    most_features: int | None = None,
) -> tuple[int, int, int, int, int]:
    """The sizes in this order; value_dim is head_dim if None, num_key_heads num_heads."""
    batch_size = checks.integer("batch_size", batch_size, 1)
    num_heads = checks.integer("num_heads", num_heads, 1)
    head_dim = checks.integer("head_dim", head_dim, 1, most_features)
    value_dim = head_dim if value_dim is None else checks.integer("value_dim", value_dim, 1)
    if num_key_heads is None:
        num_key_heads = num_heads
    num_key_heads = checks.integer("num_key_heads", num_key_heads, 1)
    if num_heads % num_key_heads:
        raise ValueError(f"num_key_heads must divide num_heads={num_heads}, got {num_key_heads}")
    return batch_size, num_heads, head_dim, value_dim, num_key_heads


def check_step(
    kind: str, of: Any, check_device: Callable[[str, Tensor], None], **tensors: Tensor
) -> None:
    """query, key and value of the next positions, as a state or a cache takes them.

    of: it, with its sizes and dtype. kind: "state" or "cache", for the messages.
    """
    sizes = {
        "query": (of.num_heads, of.head_dim),
        "key": (of.num_key_heads, of.head_dim),
        "value": (of.num_key_heads, of.value_dim),
    }
    grad = torch.is_grad_enabled()
    for name, x in tensors.items():
        heads, size = sizes[name]
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch tensor, got {type(x).__name__}")
        check_dense(name, x)
        shape = x.shape
        if len(shape) != 4 or (shape[0], shape[1], shape[3]) != (of.batch_size, heads, size):
            wanted = f"({of.batch_size}, {heads}, n, {size})"
            raise ValueError(f"{name} must be {wanted}, got shape {tuple(shape)}")
        if x.dtype is not of.dtype:
            raise TypeError(f"{name} must have the {kind}'s dtype {of.dtype}, got {x.dtype}")
        check_device(name, x)
        if grad and x.requires_grad:
            raise RuntimeError(
                f"{name} requires grad, and there is no autograd through a {kind}: call it "
                f"under torch.no_grad() or torch.inference_mode()"
            )
    if "value" in tensors and (n := tensors["key"].shape[2]) != tensors["value"].shape[2]:
        raise ValueError(f"value must have key's length {n}, got {tensors['value'].shape[2]}")


def checked_mask(mask: Tensor | None, batch_size: int, n: int) -> Tensor | None:
    """The padding mask of the next n positions as (batch, n)."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
        got = f"dtype {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"attn_mask must be a boolean tensor, True to take part, got {got}")
    if tuple(mask.shape) not in ((batch_size, n), (batch_size, 1, 1, n)):
        raise ValueError(
            f"attn_mask must be ({batch_size}, {n}) or ({batch_size}, 1, 1, {n}), got shape "
            f"{tuple(mask.shape)}"
        )
    return mask.reshape(batch_size, n)


def checked_integers(name: str, given: Any, most: int) -> list[int]:
    """One or more, from 0 to `most`, of any integer dtype."""
    wanted = f"{name} must be integers (n,), n >= 1"
    try:
        integers = torch.as_tensor(given, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{wanted}, got {type(given).__name__}") from None
    if integers.dim() != 1 or not len(integers):
        raise ValueError(f"{wanted}, got shape {tuple(integers.shape)}")
    if integers.dtype is torch.bool or integers.is_floating_point() or integers.is_complex():
        raise TypeError(f"{wanted}, got dtype {integers.dtype}")
    listed: list[int] = integers.tolist()
    for i in listed:
        if not 0 <= i <= most:
            raise ValueError(f"{name} must be from 0 to {most}, got {i}")
    return listed
