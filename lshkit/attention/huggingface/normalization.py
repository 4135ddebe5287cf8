"""Normalisation of output rows where it can't be left to the attention function."""

import torch
from torch import Tensor


def unit_rows(x: Tensor) -> Tensor:
    """Rows divided by their length. A row of zeros stays, and its gradient is zero."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.where(length > 0, x / torch.where(length > 0, length, 1), 0)
