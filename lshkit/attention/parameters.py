"""Tensors that an estimator computes with and that may carry a gradient: checks and conversions.

They are handed to `yoso_attention` and `YosoState` as `parameters`, a dict by name:

- "planes": the normals of the hyperplanes, in the place of those that the seed draws.
- "sharpness": of the weights of soft codes, in the place of the estimator's number.
- "scale": of cosines in a softmax, likewise.
- "lift_scale": of unit_norm="lift", likewise.
"""

from typing import Any

import torch
from torch import Tensor

from lshkit import checks
from lshkit.torch_ops.assertions import require


def check_parameters(parameters: Any, estimator: Any) -> None:
    """A dict of tensors that the estimator knows."""
    if not isinstance(parameters, dict):
        raise TypeError(
            f"parameters must be a dict of tensors by name, got {type(parameters).__name__}"
        )
    known = estimator.parameter_names
    for name, tensor in parameters.items():
        if name not in known:
            names = ", ".join(map(repr, known)) or "nothing"
            raise ValueError(f"parameters may hold {names} with {estimator!r}, got {name!r}")
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"parameters[{name!r}] must be a torch tensor, got {type(tensor).__name__}"
            )
        if not tensor.is_floating_point():
            raise TypeError(f"parameters[{name!r}] must hold floats, got dtype {tensor.dtype}")


def check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(
            f"parameters[{name!r}] must be on query's device {device}, got a tensor on "
            f"{tensor.device}"
        )


def plane_rows(
    planes: Tensor,
    heads: int,
    n_features: int,
    n_bits: int,
    n_hashes: int,
    device: torch.device,
) -> Tensor:
    """Planes as the operators take them, float32 (H_k, n_hashes * n_bits, n_features)."""
    flat = heads, n_hashes * n_bits, n_features
    wanted = heads, n_hashes, n_bits, n_features
    if planes.shape not in (flat, wanted):
        raise ValueError(
            f"parameters['planes'] must have shape (heads of keys, n_hashes, n_bits, features) = "
            f"{wanted} or {flat}, got {tuple(planes.shape)}"
        )
    check_device("planes", planes, device)
    planes = planes.to(torch.float32).reshape(flat)
    require(planes.isfinite(), "parameters['planes'] must be finite, in float32 too")
    return planes


def one_or_each_head(name: str, tensor: Tensor, heads: int, device: torch.device) -> Tensor:
    """(1,) or (heads,). Values are the operator's to check."""
    if tensor.shape not in ((), (1,), (heads,)):
        raise ValueError(
            f"parameters[{name!r}] must have shape () or (heads of keys,) = ({heads},), "
            f"got {tuple(tensor.shape)}"
        )
    check_device(name, tensor, device)
    return tensor.reshape(1) if tensor.dim() == 0 else tensor


def sharpness_values(sharpness: float | Tensor, heads: int) -> Tensor:
    """Sharpness on the CPU as float32 (1,) or (heads,), a copy."""
    given = sharpness
    if not isinstance(sharpness, Tensor):
        sharpness = checks.positive("sharpness", sharpness)
        sharpness = torch.tensor(sharpness, dtype=torch.float32, device="cpu")
    sharpness = sharpness.detach().to("cpu", torch.float32, copy=True).reshape(-1)
    if len(sharpness) not in (1, heads) or not (sharpness > 0).all() or sharpness.isinf().any():
        raise ValueError(f"sharpness must be > 0, one number or {heads} of them, got {given}")
    return sharpness
