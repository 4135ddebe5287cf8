"""What `CodeCache.state_dict` holds, and whether it fits a cache that is to load it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lshkit.attention.state_dicts import as_json, checked_tensor, entries, header

if TYPE_CHECKING:
    from lshkit.attention.code_cache import CodeCache

VERSION = 1
# Attributes that two caches must share for one to load the other.
CONFIG = (
    *("batch_size", "num_heads", "num_key_heads", "head_dim", "value_dim", "n_bits", "epsilon"),
    *("delta", "min_share", "max_share", "window", "n_sinks", "scale", "dtype", "seed"),
)


def save(cache: CodeCache) -> dict[str, Tensor]:
    """Codes are not in it: they follow from the keys and the projections."""
    return {
        **header(VERSION, _config(cache)),
        "starts": torch.tensor(cache._kept.starts, dtype=torch.int64, device="cpu"),
        "planes": cache._kept.planes.clone(),
        "key": cache.key.clone(),
        "value": cache.value.clone(),
    }


def load(cache: CodeCache, saved: dict[str, Tensor]) -> None:
    """Into the cache, which stays as it was where an error says what does not fit."""
    wanted = {"starts", "planes", "key", "value"}
    saved = entries(saved, VERSION, "cache", _config(cache), wanted)
    planes = checked_tensor("planes", saved["planes"], torch.float32, cache._kept.planes.shape)
    if not planes.isfinite().all():
        raise ValueError("planes must be finite")
    starts = checked_tensor("starts", saved["starts"], torch.int64, (cache.batch_size,))
    if getattr(saved["key"], "ndim", 4) != 4:
        raise ValueError(f"key must have 4 dimensions, got {tuple(saved['key'].shape)}")
    positions = saved["key"].shape[2] if isinstance(saved["key"], torch.Tensor) else 0
    shape = cache.batch_size, cache.num_key_heads, positions
    key = checked_tensor("key", saved["key"], cache.dtype, (*shape, cache.head_dim))
    value = checked_tensor("value", saved["value"], cache.dtype, (*shape, cache.value_dim))
    if bool((starts < 0).any() or (starts > positions).any()):
        raise ValueError(f"starts must be from 0 to {positions}, got {starts.tolist()}")
    key, value, starts, planes = (
        x.to("cpu", copy=True).contiguous() for x in (key, value, starts, planes)
    )
    cache.reset()
    with torch.no_grad():
        cache.append(key, value)
    cache._kept.planes = planes
    cache.set_starts(starts.tolist())


def _config(cache: CodeCache) -> dict[str, Any]:
    config = {name: getattr(cache, name) for name in CONFIG}
    config["dtype"] = str(config["dtype"])
    return as_json(config)
