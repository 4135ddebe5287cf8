"""What the state_dicts of `YosoState` and `CodeCache` have in common: tensors, and a header."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lshkit.attention.arguments import check_dense


def header(version: int, config: dict[str, Any]) -> dict[str, Tensor]:
    """The entries "version" and "config", the JSON of the arguments as bytes."""
    return {
        "version": torch.tensor(version, device="cpu"),
        "config": as_bytes(config),
    }


def as_bytes(config: dict[str, Any]) -> Tensor:
    """The JSON of arguments."""
    return torch.tensor(list(json.dumps(config).encode()), dtype=torch.uint8, device="cpu")


def as_json(config: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives it back."""
    return json.loads(json.dumps(config))


def entries(
    saved: Any, version: int, kind: str, config: dict[str, Any], names: set[str]
) -> dict[str, Tensor]:
    """The entries of a state_dict, whose tensors beside the header are not checked yet.

    TypeError or ValueError unless it has this version, this config and these names. kind: of
    object, for the messages.
    """
    if not isinstance(saved, Mapping):
        raise TypeError(f"state_dict must be a dict, got {type(saved).__name__}")
    saved = dict(saved)
    found = int(checked_tensor("version", saved.get("version"), torch.int64, ()))
    if found != version:
        raise ValueError(f"state_dict must have version {version}, got {found}")
    theirs = decoded_config(saved.get("config"))
    check_config(theirs, config, kind)
    wanted = {"version", "config", *names}
    if saved.keys() != wanted or config.keys() != theirs.keys():
        wrong = sorted(map(str, wanted ^ saved.keys())) or ["config"]
        raise ValueError(f"state_dict must have {sorted(wanted)}, differs in {wrong}")
    return saved


def check_config(theirs: dict[str, Any], own: dict[str, Any], kind: str) -> None:
    """ValueError where an argument that both have differs. kind: of object, for the message."""
    for name in own:
        if name in theirs and own[name] != theirs[name]:
            raise ValueError(
                f"state_dict is of a {kind} with {name}={theirs[name]!r}, this one has "
                f"{own[name]!r}"
            )


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


def decoded_config(config: Any, name: str = "config") -> dict[str, Any]:
    if not isinstance(config, Tensor):
        raise TypeError(f"{name} must be a torch tensor, got {type(config).__name__}")
    config = checked_tensor(name, config, torch.uint8, (config.numel(),))
    try:
        decoded = json.loads(bytes(config.tolist()))
    except (ValueError, RecursionError):  # of the text, its encoding or its depth
        decoded = None
    if not isinstance(decoded, dict):
        raise ValueError(f"{name} must hold the JSON of a dict")
    return decoded
