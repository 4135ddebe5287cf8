"""What `YosoState.state_dict` holds, and whether it fits a state that is to load it."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lshkit import torch_ops
from lshkit.attention.arguments import CPU, DTYPES, sharpness_values

VERSION = 1
ESTIMATORS = ("sampled", "soft")
UNIT_NORMS = ("l2",)  # the lift's bound is not known before the last key
TABLE_DTYPES = (torch.float32, torch.float16)
# What two states must share for one to load the other, in the order of "config".
CONFIG = (
    "batch_size",
    "num_heads",
    "num_key_heads",
    "head_dim",
    "value_dim",
    "n_bits",
    "n_hashes",
    "hasher",
    "estimator",
    "n_probes",
    "normalize",
    "unit_norm",
    "conv_window",
    "dtype",
    "table_dtype",
    "seed",
)
# Words and dtypes as the integers of "config".
_CODES = {
    "hasher": tuple(torch_ops.FAMILY),
    "estimator": ESTIMATORS,
    "normalize": tuple(torch_ops.NORMALIZE),
    "unit_norm": UNIT_NORMS,
    "dtype": DTYPES,
    "table_dtype": TABLE_DTYPES,
}


def save(state) -> dict[str, Tensor]:
    """Plain tensors: "version", "config" and copies of all that was added."""
    return {
        "version": torch.tensor(VERSION, device="cpu"),
        "config": _config(state),
        "positions": torch.tensor(state._positions, device="cpu"),
        **{name: x.clone() for name, x in state._given().items()},
        **{name: x.clone() for name, x in state._tensors().items()},
    }


def load(state, saved: dict[str, Tensor]) -> None:
    """Into the state, which stays as it was where a ValueError says what does not fit."""
    if not isinstance(saved, Mapping):
        raise TypeError(f"state_dict must be a dict, got {type(saved).__name__}")
    mine = {"version", "config", "positions", *state._given(), *state._tensors()}
    version = int(saved.get("version", -1))
    if version != VERSION:
        raise ValueError(f"state_dict must have version {VERSION}, got {version}")
    config = saved.get("config")
    if config is not None and len(config) == len(CONFIG):
        for name, mine_, other in zip(CONFIG, _config(state), config, strict=True):
            if mine_ != other:
                raise ValueError(
                    f"state_dict is of a state with {name}={_decoded(name, int(other))}, "
                    f"this one has {_decoded(name, int(mine_))}"
                )
    if config is None or len(config) != len(CONFIG) or set(saved) != mine:
        wrong = sorted(mine ^ set(saved)) or ["config"]
        raise ValueError(f"state_dict must have {sorted(mine)}, differs in {wrong}")
    if state._sharpness is not None and not torch.equal(
        state._sharpness.expand(state.num_key_heads),
        sharpness_values(saved["sharpness"], state.num_key_heads).expand(state.num_key_heads),
    ):
        raise ValueError(
            f"state_dict is of a state with sharpness={saved['sharpness'].tolist()}, "
            f"this one has {state._sharpness.tolist()}"
        )
    if state._projections is not None and not torch.equal(
        state._projections, saved["projections"].to(CPU)
    ):
        raise ValueError("state_dict is of a state with other projections than this one's")
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


def _config(state) -> Tensor:
    numbers = [_encoded(name, getattr(state, name)) for name in CONFIG]
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _encoded(name, value) -> int:
    if name in _CODES:
        return _CODES[name].index(value)
    if name == "n_probes":
        return value[0] << 32 | value[1]
    return -1 if value is None else value


def _decoded(name, number):
    if name == "n_probes":
        return number >> 32, number & (2**32 - 1)
    if name not in _CODES:
        return repr(None if number == -1 else number)
    known = 0 <= number < len(_CODES[name])
    return repr(_CODES[name][number]) if known else f"unknown number {number}"
