"""Beyond one machine: densities and samplers on Dask.

Names load on first use: Dask is imported only for what needs it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lshkit.distributed.density import DaskKernelDensity as DaskKernelDensity
    from lshkit.distributed.sampler import DaskLSHSampler as DaskLSHSampler

_NAMES = {
    "DaskKernelDensity": "density",
    "DaskLSHSampler": "sampler",
}


def __dir__() -> list[str]:
    return sorted(_NAMES)


if not TYPE_CHECKING:  # else every name would be an attribute

    def __getattr__(name: str) -> Any:
        if name in _NAMES:
            return getattr(importlib.import_module(f"lshkit.distributed.{_NAMES[name]}"), name)
        raise AttributeError(f"module 'lshkit.distributed' has no attribute {name!r}")
