"""What `YosoState.state_dict` holds, and whether it fits a state that is to load it."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lshkit import torch_ops
from lshkit.attention.arguments import CPU, DTYPES, check_dense

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
    """Into the state, which stays as it was, bit for bit, where an error says what does not fit."""
    if not isinstance(saved, Mapping):
        raise TypeError(f"state_dict must be a dict, got {type(saved).__name__}")
    saved = dict(saved)
    version = int(_checked("version", saved.get("version"), torch.int64, ()))
    if version != VERSION:
        raise ValueError(f"state_dict must have version {VERSION}, got {version}")
    config = _checked("config", saved.get("config"), torch.int64, (len(CONFIG),)).tolist()
    for name, mine, other in zip(CONFIG, _config(state).tolist(), config, strict=True):
        if mine != other:
            raise ValueError(
                f"state_dict is of a state with {name}={_decoded(name, other)}, "
                f"this one has {_decoded(name, mine)}"
            )
    tensors, given = state._tensors(), state._given()
    wanted = {"version", "config", "positions", *given, *tensors}
    if saved.keys() != wanted:
        wrong = sorted(map(str, wanted ^ saved.keys()))
        raise ValueError(f"state_dict must have {sorted(wanted)}, differs in {wrong}")
    if "sharpness" in given:
        _check_sharpness(state, saved["sharpness"])
    if "projections" in given:
        mine = given["projections"]
        planes = _checked("projections", saved["projections"], mine.dtype, mine.shape)
        if not torch.equal(mine, planes.to(CPU)):
            raise ValueError("state_dict is of a state with other projections than this one's")
    new = {name: _checked(name, saved[name], x.dtype, x.shape) for name, x in tensors.items()}
    positions = int(_checked("positions", saved["positions"], torch.int64, ()))
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


def _checked(name, x, dtype, *shapes) -> Tensor:
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


def _check_sharpness(state, sharpness):
    heads = state.num_key_heads
    sharpness = _checked("sharpness", sharpness, torch.float32, (1,), (heads,)).to(CPU)
    if not torch.equal(state._sharpness.expand(heads), sharpness.expand(heads)):
        raise ValueError(
            f"state_dict is of a state with sharpness={sharpness.tolist()}, "
            f"this one has {state._sharpness.tolist()}"
        )


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
