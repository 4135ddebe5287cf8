"""What `YosoState.state_dict` holds, and whether it fits a state that is to load it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lshkit.attention.arguments import CPU
from lshkit.attention.state_dicts import as_json, checked_tensor, entries, header

if TYPE_CHECKING:
    from lshkit.attention.decoding import YosoState

VERSION = 4
MOST_POSITIONS = 2**62  # so that more can be added
TABLE_DTYPES = (torch.float32, torch.float16)
# Attributes that two states must share for one to load the other, beside the estimator's fields.
CONFIG = (
    *("batch_size", "num_heads", "num_key_heads", "head_dim", "value_dim"),
    *("normalize", "conv_window", "short_conv", "dtype", "table_dtype", "seed"),
)


def save(state: YosoState) -> dict[str, Tensor]:
    """Plain tensors: "version", "config" (JSON as bytes) and copies of all that was added."""
    return {
        **header(VERSION, _config(state)),
        "positions": torch.tensor(state._positions, device="cpu"),
        **{name: x.clone() for name, x in state._given.items()},
        **{name: x.clone() for name, x in state._tensors().items()},
    }


def load(state: YosoState, saved: dict[str, Tensor]) -> None:
    """Into the state, which stays as it was, bit for bit, where an error says what does not fit."""
    tensors, given = state._tensors(), state._given
    wanted = {"positions", *given, *tensors}
    saved = entries(saved, VERSION, "state", _config(state), wanted)
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
    if not 0 <= positions <= MOST_POSITIONS:
        raise ValueError(f"positions must be from 0 to {MOST_POSITIONS}, got {positions}")
    if (new["masked"] > positions).any():  # below 0 where a captured graph was replayed
        most = int(new["masked"].max())
        raise ValueError(f"masked must be at most positions={positions}, got {most}")
    if (new["masked"] < positions - MOST_POSITIONS).any():
        raise ValueError(f"masked must be at least {positions - MOST_POSITIONS}")
    if "counts" in new and not ((new["counts"] >= 0) & new["counts"].isfinite()).all():
        raise ValueError("counts must be finite and >= 0")
    # On its way before anything is changed: another device may have no memory, and what shares
    # memory with this state would change in the middle.
    own = {x.untyped_storage().data_ptr() for x in tensors.values()}
    for name, x in new.items():
        new[name] = x.to(state.device, copy=x.untyped_storage().data_ptr() in own)
    state._interrupted = True
    with torch.inference_mode():  # in which any tensor can be written to
        for name, x in tensors.items():
            x.copy_(new[name])
    state._positions, state._interrupted = positions, False


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
    config = {name: getattr(state, name) for name in CONFIG}
    for name in ("dtype", "table_dtype"):
        config[name] = str(config[name])
    return as_json(config | state.estimator.to_dict())
