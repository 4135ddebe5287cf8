"""What a bug report needs to know about an installation."""

import importlib.metadata
import os
import platform
import sys


def _version(distribution):
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _torch():
    # Threads are torch's to tell, and asking must not import it.
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_num_threads"):
        return _version("torch")
    return f"{torch.__version__} ({torch.get_num_threads()} threads)"


def _instruction_set(core):
    forced = os.environ.get("LSHKIT_ISA")
    asked = f"; LSHKIT_ISA={forced}" if forced else ""
    return f"{core.instruction_set()} (compiled: {core.instruction_sets}{asked})"


def show_versions():
    """Print the versions, instruction set and threads that lshkit runs with.

    torch is not imported for it: its thread count appears when it already is.
    """
    from . import _C, __version__

    rows = {
        "lshkit": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "compiler": _C.compiler(),
        "instruction set": _instruction_set(_C),
        "OpenMP": "yes" if _C.has_openmp() else "no",
        "threads": _C.max_threads(),
        "CUDA kernels": _C.cuda_architectures() if _C.with_cuda else "no",
        "numpy": _version("numpy"),
        "scikit-learn": _version("scikit-learn"),
        "torch": _torch(),
    }
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")
