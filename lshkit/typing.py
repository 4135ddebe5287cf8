"""Types that several signatures share. Importing this module does not import torch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, BinaryIO, TypeAlias, TypeVar, Union

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    import torch

# Of functions that return what they are given: NumPy arrays, or torch tensors.
ArrayOrTensor = TypeVar("ArrayOrTensor", np.ndarray, "torch.Tensor")

# What scikit-learn's estimators take for an array, and tensors.
Rows: TypeAlias = Union[ArrayLike, "torch.Tensor"]

FloatArray: TypeAlias = NDArray[np.floating]  # float32 or float64

Seed: TypeAlias = int | np.random.Generator | None
RandomState: TypeAlias = int | np.random.RandomState | None

File: TypeAlias = str | os.PathLike[str] | BinaryIO
