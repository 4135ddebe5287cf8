"""Beyond one process: attention over ranks (torch.distributed), densities and samplers on Dask.

Names load on first use, so that importing this package imports neither torch nor dask.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the names that __getattr__ finds
    from .context_parallel import ContextParallel as ContextParallel
    from .costs import exchange_costs as exchange_costs
    from .density import DaskKernelDensity as DaskKernelDensity
    from .sampler import DaskLSHSampler as DaskLSHSampler

_MODULES = {
    "ContextParallel": "context_parallel",
    "DaskKernelDensity": "density",
    "DaskLSHSampler": "sampler",
    "exchange_costs": "costs",
}


def __dir__() -> list[str]:
    return sorted(_MODULES)


if not TYPE_CHECKING:  # else every name would be an attribute

    def __getattr__(name: str) -> Any:
        if name == "__all__":
            return list(_MODULES)
        if name in _MODULES:
            return getattr(importlib.import_module(f"lshkit.distributed.{_MODULES[name]}"), name)
        raise AttributeError(f"module 'lshkit.distributed' has no attribute {name!r}")
