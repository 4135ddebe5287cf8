"""What `CodeCache.state_dict` holds, and whether it fits a cache that is to load it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lshkit.attention.saved_state import checked_tensor, decoded_config

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
    config = json.dumps(_config(cache)).encode()
    return {
        "version": torch.tensor(VERSION, device="cpu"),
        "config": torch.tensor(list(config), dtype=torch.uint8, device="cpu"),
        "starts": torch.tensor(cache._kept.starts, dtype=torch.int64, device="cpu"),
        "planes": cache._kept.planes.clone(),
        "key": cache.key.clone(),
        "value": cache.value.clone(),
    }


def load(cache: CodeCache, saved: dict[str, Tensor]) -> None:
    """Into the cache, which stays as it was where an error says what does not fit."""
    if not isinstance(saved, Mapping):
        raise TypeError(f"state_dict must be a dict, got {type(saved).__name__}")
    saved = dict(saved)
    version = int(checked_tensor("version", saved.get("version"), torch.int64, ()))
    if version != VERSION:
        raise ValueError(f"state_dict must have version {VERSION}, got {version}")
    mine, theirs = _config(cache), decoded_config(saved.get("config"))
    for name in mine:
        if name in theirs and mine[name] != theirs[name]:
            raise ValueError(
                f"state_dict is of a cache with {name}={theirs[name]!r}, this one has "
                f"{mine[name]!r}"
            )
    wanted = {"version", "config", "starts", "planes", "key", "value"}
    if saved.keys() != wanted or mine.keys() != theirs.keys():
        wrong = sorted(map(str, wanted ^ saved.keys())) or ["config"]
        raise ValueError(f"state_dict must have {sorted(wanted)}, differs in {wrong}")
    planes = checked_tensor("planes", saved["planes"], torch.float32, cache._kept.planes.shape)
    if not planes.isfinite().all():
        raise ValueError("planes must be finite")
    starts = checked_tensor("starts", saved["starts"], torch.int64, (cache.batch_size,))
    positions = saved["key"].shape[2] if getattr(saved["key"], "ndim", 0) == 4 else 0
    shape = cache.batch_size, cache.num_key_heads, positions
    key = checked_tensor("key", saved["key"], cache.dtype, (*shape, cache.head_dim))
    value = checked_tensor("value", saved["value"], cache.dtype, (*shape, cache.value_dim))
    if bool((starts < 0).any() or (starts > positions).any()):
        raise ValueError(f"starts must be from 0 to {positions}, got {starts.tolist()}")
    key, value, starts, planes = (x.to("cpu", copy=True) for x in (key, value, starts, planes))
    cache.reset()
    with torch.no_grad():
        cache.append(key, value)
    cache._kept.planes = planes
    cache.set_starts(starts.tolist())


def _config(cache: CodeCache) -> dict[str, Any]:
    """As JSON gives it back."""
    config = {name: getattr(cache, name) for name in CONFIG}
    config["dtype"] = str(config["dtype"])
    return json.loads(json.dumps(config))
