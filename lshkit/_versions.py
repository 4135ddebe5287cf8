"""What a bug report needs to know about an installation."""

import importlib.metadata
import os
import pathlib
import platform
import sys
from types import ModuleType

BACKENDS = {"openmp": "OpenMP", "std": "std::thread"}


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _torch() -> str:
    # Threads are torch's to tell, and asking must not import it.
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_num_threads"):
        return _version("torch")
    return f"{torch.__version__} ({torch.get_num_threads()} threads)"


def _instruction_set(core: ModuleType) -> str:
    forced = os.environ.get("LSHKIT_ISA")
    asked = f"; LSHKIT_ISA={forced}" if forced else ""
    compiled = ", ".join(core.instruction_sets.split())
    return f"{core.instruction_set()} (compiled: {compiled}{asked})"


def _caches(core: ModuleType) -> str:
    l2, l3 = (size // 1024 for size in core.cache_sizes())
    forced = os.environ.get("LSHKIT_CACHE_SIZES")
    return f"L2 {l2} KB, L3 {l3} KB" + (f" (LSHKIT_CACHE_SIZES={forced})" if forced else "")


def show_versions() -> None:
    """Print the versions, instruction set and threads that lshkit runs with.

    torch is not imported for it: its thread count appears when it already is.
    """
    from . import _C, __version__

    rows = {
        "lshkit": f"{__version__} ({pathlib.Path(_C.__file__).parent})",
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "compiler": _C.compiler(),
        "instruction set": _instruction_set(_C),
        "caches": _caches(_C),
        "threads": f"{_C.max_threads()} ({BACKENDS[_C.thread_backend()]})",
        "CUDA kernels": _C.cuda_architectures() if _C.with_cuda else "not compiled",
        **{name: _version(name) for name in ("numpy", "scikit-learn")},
        "torch": _torch(),
        "transformers": _version("transformers"),
        "dask": _version("dask"),
    }
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")
