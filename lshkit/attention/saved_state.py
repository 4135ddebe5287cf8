"""What `YosoState.state_dict` holds, and whether it fits a state that is to load it."""

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from lshkit.attention.arguments import CPU

VERSION = 2
TABLE_DTYPES = (torch.float32, torch.float16)
# Attributes that two states must share for one to load the other, beside the estimator's fields.
CONFIG = (
    *("batch_size", "num_heads", "num_key_heads", "head_dim", "value_dim"),
    *("normalize", "conv_window", "dtype", "table_dtype", "seed"),
)


def save(state) -> dict[str, Tensor]:
    """Plain tensors: "version", "config" (JSON as bytes) and copies of all that was added."""
    config = json.dumps(_config(state)).encode()
    return {
        "version": torch.tensor(VERSION, device="cpu"),
        "config": torch.tensor(list(config), dtype=torch.uint8, device="cpu"),
        "positions": torch.tensor(state._positions, device="cpu"),
        **{name: x.clone() for name, x in state._given.items()},
        **{name: x.clone() for name, x in state._tensors().items()},
    }


def load(state, saved: dict[str, Tensor]) -> None:
    """Into the state, which stays as it was where a ValueError says what does not fit."""
    if not isinstance(saved, Mapping):
        raise TypeError(f"state_dict must be a dict, got {type(saved).__name__}")
    version = int(saved.get("version", -1))
    if version != VERSION:
        raise ValueError(f"state_dict must have version {VERSION}, got {version}")
    wanted = {"version", "config", "positions", *state._given, *state._tensors()}
    mine, theirs = _config(state), _decoded(saved.get("config"))
    for name in mine:
        if name in theirs and mine[name] != theirs[name]:
            raise ValueError(
                f"state_dict is of a state with {name}={theirs[name]!r}, "
                f"this one has {mine[name]!r}"
            )
    if set(saved) != wanted or mine != theirs:
        wrong = sorted(wanted ^ set(saved)) or ["config"]
        raise ValueError(f"state_dict must have {sorted(wanted)}, differs in {wrong}")
    for name, x in state._given.items():
        if not torch.equal(x, saved[name].to(CPU)):
            raise ValueError(f"state_dict is of a state with other {name} than this one's")
    for name, x in state._tensors().items():
        if saved[name].shape != x.shape or saved[name].dtype != x.dtype:
            raise ValueError(
                f"{name} must be {x.dtype} {tuple(x.shape)}, got {saved[name].dtype} "
                f"{tuple(saved[name].shape)}"
            )
    positions = int(saved["positions"])
    for name, x in state._tensors().items():
        x.copy_(saved[name])
    state._positions = positions


def _config(state) -> dict:
    """As JSON gives it back."""
    config = {name: getattr(state, name) for name in CONFIG}
    for name in ("dtype", "table_dtype"):
        config[name] = str(config[name])
    return json.loads(json.dumps(config | state.estimator.to_dict()))


def _decoded(config) -> dict:
    try:
        decoded = json.loads(bytes(config.tolist()).decode())
        return decoded if isinstance(decoded, dict) else {}
    except (AttributeError, TypeError, ValueError):
        return {}
