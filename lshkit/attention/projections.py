"""Planes of soft codes that are given, and may be learnt, in the place of drawn ones."""

import torch
from torch import Tensor


def check_learnable(name: str, estimator: str, hasher: str) -> None:
    """Planes are learnt through the weights of soft codes alone."""
    if estimator != "soft" or hasher != "hyperplane":
        raise ValueError(
            f'{name} needs estimator="soft" and hasher="hyperplane", got estimator={estimator!r} '
            f"and hasher={hasher!r}"
        )


def plane_rows(
    projections: Tensor,
    heads: int,
    n_features: int,
    n_bits: int,
    n_hashes: int,
    device: torch.device,
) -> Tensor:
    """Planes as the operators take them, float32 (H_k, n_hashes * n_bits, n_features)."""
    if not isinstance(projections, Tensor):
        raise TypeError(f"projections must be a torch tensor, got {type(projections).__name__}")
    if not projections.is_floating_point():
        raise TypeError(f"projections must be a tensor of floats, got dtype {projections.dtype}")
    flat = heads, n_hashes * n_bits, n_features
    wanted = heads, n_hashes, n_bits, n_features
    if projections.shape not in (flat, wanted):
        raise ValueError(
            f"projections must have shape (heads of keys, n_hashes, n_bits, features) = {wanted} "
            f"or {flat}, got {tuple(projections.shape)}"
        )
    if projections.device != device:
        raise ValueError(
            f"projections must be on query's device {device}, got a tensor on {projections.device}"
        )
    return projections.to(torch.float32).reshape(flat)
