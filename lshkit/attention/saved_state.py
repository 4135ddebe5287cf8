"""What `YosoState.state_dict` holds, and whether it fits a state that is to load it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lshkit.attention.arguments import CPU, check_dense

if TYPE_CHECKING:
    from lshkit.attention.decoding import YosoState

VERSION = 2
TABLE_DTYPES = (torch.float32, torch.float16)
# Attributes that two states must share for one to load the other, beside the estimator's fields.
CONFIG = (
    *("batch_size", "num_heads", "num_key_heads", "head_dim", "value_dim"),
    *("normalize", "conv_window", "dtype", "table_dtype", "seed"),
)


def save(state: YosoState) -> dict[str, Tensor]:
    """Plain tensors: "version", "config" (JSON as bytes) and copies of all that was added."""
    config = json.dumps(_config(state)).encode()
    return {
        "version": torch.tensor(VERSION, device="cpu"),
        "config": torch.tensor(list(config), dtype=torch.uint8, device="cpu"),
        "positions": torch.tensor(state._positions, device="cpu"),
        **{name: x.clone() for name, x in state._given.items()},
        **{name: x.clone() for name, x in state._tensors().items()},
    }


def load(state: YosoState, saved: dict[str, Tensor]) -> None:
    """Into the state, which stays as it was, bit for bit, where an error says what does not fit."""
    if not isinstance(saved, Mapping):
        raise TypeError(f"state_dict must be a dict, got {type(saved).__name__}")
    saved = dict(saved)
    version = int(checked_tensor("version", saved.get("version"), torch.int64, ()))
    if version != VERSION:
        raise ValueError(f"state_dict must have version {VERSION}, got {version}")
    mine, theirs = _config(state), decoded_config(saved.get("config"))
    for name in mine:
        if name in theirs and mine[name] != theirs[name]:
            raise ValueError(
                f"state_dict is of a state with {name}={theirs[name]!r}, this one has "
                f"{mine[name]!r}"
            )
    tensors, given = state._tensors(), state._given
    wanted = {"version", "config", "positions", *given, *tensors}
    if saved.keys() != wanted or mine.keys() != theirs.keys():
        wrong = sorted(map(str, wanted ^ saved.keys())) or ["config"]
        raise ValueError(f"state_dict must have {sorted(wanted)}, differs in {wrong}")
    if "sharpness" in given:
        _check_sharpness(state, saved["sharpness"])
    if "planes" in given:
        planes = checked_tensor(
            "planes", saved["planes"], given["planes"].dtype, given["planes"].shape
        )
        if not torch.equal(given["planes"], planes.to(CPU)):
            raise ValueError("state_dict is of a state with other planes than this one's")
    new = {name: checked_tensor(name, saved[name], x.dtype, x.shape) for name, x in tensors.items()}
    positions = int(checked_tensor("positions", saved["positions"], torch.int64, ()))
    if positions < 0:
        raise ValueError(f"positions must be >= 0, got {positions}")
    if (new["masked"] > positions).any():  # below 0 where a captured graph was replayed
        most = int(new["masked"].max())
        raise ValueError(f"masked must be at most positions={positions}, got {most}")
    if "counts" in new and not ((new["counts"] >= 0) & new["counts"].isfinite()).all():
        raise ValueError("counts must be finite and >= 0")
    # On its way before anything is changed: another device may have no memory, and what shares
    # memory with this state would change in the middle.
    own = {x.untyped_storage().data_ptr() for x in tensors.values()}
    for name, x in new.items():
        new[name] = x.to(state.device, copy=x.untyped_storage().data_ptr() in own)
    with torch.inference_mode():  # in which any tensor can be written to
        for name, x in tensors.items():
            x.copy_(new[name])
    state._positions = positions


def checked_tensor(name: str, x: Any, dtype: torch.dtype, *shapes: tuple[int, ...]) -> Tensor:
    """x without its graph; TypeError or ValueError unless it is a tensor like this, with contents.

    In an order in which nothing is asked of a tensor that its kind cannot answer.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch tensor, got {type(x).__name__}")
    check_dense(name, x)
    if x.dtype != dtype or x.shape not in shapes:
        wanted = " or ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(f"{name} must be {dtype} {wanted}, got {x.dtype} {tuple(x.shape)}")
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} must be on the cpu or cuda, got a tensor on {x.device}")
    return x.detach()


def _check_sharpness(state: YosoState, sharpness: Tensor) -> None:
    heads = state.num_key_heads
    mine = state._given["sharpness"].expand(heads)
    sharpness = checked_tensor("sharpness", sharpness, torch.float32, (1,), (heads,)).to(CPU)
    if not torch.equal(mine, sharpness.expand(heads)):
        raise ValueError(
            f"state_dict is of a state with sharpness={sharpness.tolist()}, "
            f"this one has {mine.tolist()}"
        )


def _config(state: YosoState) -> dict[str, Any]:
    """As JSON gives it back."""
    config = {name: getattr(state, name) for name in CONFIG}
    for name in ("dtype", "table_dtype"):
        config[name] = str(config[name])
    return json.loads(json.dumps(config | state.estimator.to_dict()))


def decoded_config(config: Any) -> dict[str, Any]:
    if not isinstance(config, Tensor):
        raise TypeError(f"config must be a torch tensor, got {type(config).__name__}")
    config = checked_tensor("config", config, torch.uint8, (config.numel(),))
    try:
        decoded = json.loads(bytes(config.tolist()))
    except (ValueError, RecursionError):  # of the text, its encoding or its depth
        decoded = None
    if not isinstance(decoded, dict):
        raise ValueError("config must hold the JSON of a dict")
    return decoded
