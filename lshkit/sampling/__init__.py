"""Samples from buckets, with the exact probabilities that make estimates of them unbiased."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from lshkit.sampling.lsh_sampler import Estimate, LSHSampler
from lshkit.sampling.partition import LogPartition, PartitionSampler, log_partition

if TYPE_CHECKING:
    from lshkit.sampling.softmax import SampledSoftmaxLoss as SampledSoftmaxLoss

_OF_TORCH = {"SampledSoftmaxLoss": "softmax"}  # loaded on first use, as they import torch

__all__ = [
    "Estimate",
    "LSHSampler",
    "LogPartition",
    "PartitionSampler",
    "log_partition",
]
if importlib.util.find_spec("torch") is not None:
    __all__ += [*_OF_TORCH]


def __getattr__(name: str) -> Any:
    if name in _OF_TORCH:
        from lshkit import _torch  # noqa: F401

        return getattr(importlib.import_module(f"lshkit.sampling.{_OF_TORCH[name]}"), name)
    raise AttributeError(f"module 'lshkit.sampling' has no attribute {name!r}")
