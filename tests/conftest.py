import functools
import importlib.util
import pathlib
import sys

import numpy as np
import pytest

# `python -m pytest` puts the source tree first on sys.path. Its lshkit/ has no compiled module
# (unless someone built one in place), so it must not shadow the installed package.
_ROOT = pathlib.Path(__file__).resolve().parents[1]
if not list((_ROOT / "lshkit").glob("_C*.so")):
    sys.path[:] = [p for p in sys.path if pathlib.Path(p or ".").resolve() != _ROOT]


def _poison(array):
    if array.dtype.kind in "fc":
        array.fill(np.nan)
    elif array.dtype.kind in "iu":
        pattern = np.frombuffer(b"\xab" * array.itemsize, array.dtype)
        np.copyto(array, pattern[0])
    return array


def _poisoned(allocate):
    @functools.wraps(allocate)
    def empty(*args, **kwargs):
        return _poison(allocate(*args, **kwargs))

    return empty


@pytest.fixture(scope="session", autouse=True)
def poisoned_memory():
    """Fill what np.empty, torch.empty and their kin return, so that an unwritten element shows.

    Floats become NaN, integers 0xABAB... (NumPy) or their largest value (torch).
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "empty", _poisoned(np.empty))
        patch.setattr(np, "empty_like", _poisoned(np.empty_like))
        if importlib.util.find_spec("torch") is None:
            yield
            return
        import torch

        before = torch.are_deterministic_algorithms_enabled()
        patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield
        torch.use_deterministic_algorithms(before)


@pytest.fixture
def cuda_device(monkeypatch):
    """Where CUDA kernels run: a GPU, or the CPU in a build with the emulated ones."""
    torch = pytest.importorskip("torch")
    from lshkit import _C

    if not _C.with_cuda:
        pytest.skip("needs a build with CUDA kernels, or with -DLSHKIT_CUDA=EMULATED")
    if _C.cuda_architectures().startswith("emulated"):
        monkeypatch.setenv("LSHKIT_EMULATE_CUDA", "1")
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return torch.device("cuda")
