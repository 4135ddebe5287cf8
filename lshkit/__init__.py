"""Locality-sensitive hashing as a kernel: hash families, bucket sums and linear-cost attention.

Submodules, and the names that are imported from here, load on first use, so that ``import lshkit``
imports neither torch nor scikit-learn:

- `lshkit.hashing`: hash families, and `lshkit.buckets`: sums over their buckets (NumPy and torch)
- `lshkit.attention`: YOSO and softmax attention by hashing, decoding, transformers (torch)
- `lshkit.kde`: kernel densities, outliers, regression, two-sample tests, as in scikit-learn
- `lshkit.sampling`: estimates of sums over a data set from the rows that collide with a query
- `lshkit.distributed`: attention over ranks (torch), densities and samplers on Dask
- `lshkit.reference`: every operation in a few lines of plain NumPy
- `lshkit.torch_ops`: the operators ``torch.ops.lshkit.*``

Without torch, ``dir(lshkit)`` and ``from lshkit import *`` leave out what needs it.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from . import _compiled

if TYPE_CHECKING:  # the names that __getattr__ finds
    # One import a module, of names that are exported again: isort would part them.
    # isort: off
    from . import (
        attention as attention,
        buckets as buckets,
        distributed as distributed,
        hashing as hashing,
        kde as kde,
        reference as reference,
        sampling as sampling,
        torch_ops as torch_ops,
    )
    from ._versions import show_versions as show_versions
    from .attention import (
        Colliding as Colliding,
        Expected as Expected,
        Sampled as Sampled,
        Soft as Soft,
        YosoAttention as YosoAttention,
        YosoState as YosoState,
        bert_lsh_attention as bert_lsh_attention,
        lsh_attention as lsh_attention,
        suggest as suggest,
        yoso_attention as yoso_attention,
    )
    from .buckets import (
        BucketTable as BucketTable,
        HashTables as HashTables,
        bucket_sum as bucket_sum,
        collisions as collisions,
        fold as fold,
    )
    from .hashing import (
        EuclideanLSH as EuclideanLSH,
        FastHadamard as FastHadamard,
        Hyperplane as Hyperplane,
        RandomBinning as RandomBinning,
    )
    from .kde import (
        LSHKernelDensity as LSHKernelDensity,
        LSHKernelRegressor as LSHKernelRegressor,
        LSHOutlierDetector as LSHOutlierDetector,
        likelihood_curve as likelihood_curve,
        two_sample_test as two_sample_test,
    )
    from .sampling import (
        LSHSampler as LSHSampler,
        PartitionSampler as PartitionSampler,
        SampledSoftmaxLoss as SampledSoftmaxLoss,
    )
    # isort: on

__version__ = "0.1.0"
__path__ = _compiled.folders(__path__, __version__)

_SUBMODULES = (
    *("attention", "buckets", "distributed", "hashing", "kde", "reference", "sampling"),
    "torch_ops",
)
_NAMES = {
    "show_versions": "_versions",
    **dict.fromkeys(("EuclideanLSH", "FastHadamard", "Hyperplane", "RandomBinning"), "hashing"),
    **dict.fromkeys(("BucketTable", "HashTables", "bucket_sum", "collisions", "fold"), "buckets"),
    **dict.fromkeys(
        ("Colliding", "Expected", "Sampled", "Soft", "YosoAttention", "YosoState"),
        "attention",
    ),
    **dict.fromkeys(
        ("bert_lsh_attention", "lsh_attention", "suggest", "yoso_attention"),
        "attention",
    ),
    **dict.fromkeys(
        ("LSHKernelDensity", "LSHKernelRegressor", "LSHOutlierDetector"),
        "kde",
    ),
    **dict.fromkeys(("likelihood_curve", "two_sample_test"), "kde"),
    **dict.fromkeys(("LSHSampler", "PartitionSampler", "SampledSoftmaxLoss"), "sampling"),
}
_OF_TORCH = "attention", "torch_ops", "SampledSoftmaxLoss"  # and what is imported from them


def __dir__() -> list[str]:
    return sorted(["__version__", *filter(_is_there, (*_NAMES, *_SUBMODULES))])


def _is_there(name: str) -> bool:
    needs_torch = name in _OF_TORCH or _NAMES.get(name) in _OF_TORCH
    return not needs_torch or importlib.util.find_spec("torch") is not None


if not TYPE_CHECKING:  # else every name would be an attribute

    def __getattr__(name: str) -> Any:
        if name == "__all__":  # not looked for on import
            return [name for name in _NAMES if _is_there(name)]
        if name in _SUBMODULES:
            return importlib.import_module(f"lshkit.{name}")
        if name in _NAMES:
            return getattr(importlib.import_module(f"lshkit.{_NAMES[name]}"), name)
        raise AttributeError(f"module 'lshkit' has no attribute {name!r}")
