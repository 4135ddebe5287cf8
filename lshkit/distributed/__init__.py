"""Beyond one process: attention over ranks (torch.distributed), densities and samplers on Dask.

Names load on first use, so that importing this package imports neither torch nor dask. Those whose
packages are not installed are not listed, and say how to install them.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the names that __getattr__ finds
    from .dask.density import DaskKernelDensity as DaskKernelDensity
    from .dask.sampler import DaskLSHSampler as DaskLSHSampler
    from .ranks.context_parallel import ContextParallel as ContextParallel
    from .ranks.costs import exchange_costs as exchange_costs

_MODULES = {
    "ContextParallel": "ranks.context_parallel",
    "DaskKernelDensity": "dask.density",
    "DaskLSHSampler": "dask.sampler",
    "exchange_costs": "ranks.costs",  # without torch
}
_NEEDS = {
    "ContextParallel": ("torch",),
    "DaskKernelDensity": ("dask", "distributed"),
    "DaskLSHSampler": ("dask", "distributed"),
}


def __dir__() -> list[str]:
    return sorted(name for name in _MODULES if _is_there(name))


def _is_there(name: str) -> bool:
    return all(importlib.util.find_spec(x) is not None for x in _NEEDS.get(name, ()))


if not TYPE_CHECKING:  # else every name would be an attribute

    def __getattr__(name: str) -> Any:
        if name == "__all__":
            return __dir__()
        if name in _MODULES:
            return getattr(importlib.import_module(f"lshkit.distributed.{_MODULES[name]}"), name)
        raise AttributeError(f"module 'lshkit.distributed' has no attribute {name!r}")
