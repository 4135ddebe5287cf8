"""Locality-sensitive hashing as a kernel: hash families, bucket sums and linear-cost attention.

Submodules load on first use, so that ``import lshkit`` imports neither them nor torch:

- `lshkit.hashing`: hash families, and `lshkit.buckets`: sums over their buckets (NumPy and torch)
- `lshkit.attention`: YOSO attention (torch)
- `lshkit.kde`: kernel density estimation, a scikit-learn estimator
- `lshkit.sampling`: estimates of sums over a data set from the rows that meet a query
- `lshkit.reference`: every operation in a few lines of plain NumPy
- `lshkit.torch_ops`: the operators ``torch.ops.lshkit.*``
"""

import importlib

from . import _compiled

__version__ = "0.1.0"
__path__ = _compiled.folders(__path__, __version__)

from ._versions import show_versions  # noqa: E402

_SUBMODULES = ("attention", "buckets", "hashing", "kde", "reference", "sampling", "torch_ops")
__all__ = ["show_versions"]


def __getattr__(name):
    if name in _SUBMODULES:
        return importlib.import_module(f"lshkit.{name}")
    raise AttributeError(f"module 'lshkit' has no attribute {name!r}")


def __dir__():
    return sorted([*__all__, "__version__", *_SUBMODULES])
