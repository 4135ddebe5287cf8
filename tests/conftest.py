import functools
import importlib.util
import os
import sys

import devices
import numpy as np
import pytest
from cases.commands import run
from threadpoolctl import threadpool_limits


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


@pytest.fixture(scope="session", autouse=True)
def one_thread_of_blas():
    with threadpool_limits(1, user_api="blas"):
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """One thread of torch, whatever the test before has set, for small problems, whose threads only
    wait for each other: on a busy machine some hundred times as long as they compute."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


def pytest_generate_tests(metafunc):
    devices.parametrize(metafunc)


def _kernels():
    from lshkit import _C

    if not _C.with_cuda:
        return None
    return "emulated" if _C.cuda_architectures().startswith("emulated") else "GPU"


def pytest_collection_modifyitems(config, items):
    out = devices.left_out(items, _kernels())
    if out:
        config.hook.pytest_deselected(items=out)
        ids = set(map(id, out))
        items[:] = [item for item in items if id(item) not in ids]


@pytest.fixture
def cuda_device(monkeypatch):
    """Where CUDA kernels run: a GPU, or the CPU in a build with the emulated ones."""
    torch = pytest.importorskip("torch")
    from lshkit import _C

    if not _C.with_cuda:
        pytest.skip("needs a build with CUDA kernels, or with -DLSHKIT_CUDA=EMULATED")
    if _kernels() == "emulated":
        monkeypatch.setenv("LSHKIT_EMULATE_CUDA", "1")
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return torch.device("cuda")


@pytest.fixture
def device(request):
    """Where a test of the suites in devices.py has its tensors: "cpu", and again "cuda"."""
    if getattr(request, "param", "cpu") == "cpu":
        yield "cpu"
        return
    where = request.getfixturevalue("cuda_device")
    if where.type == "cpu":  # in emulation
        yield where
        return
    with devices.on_cuda(where) as request.node.on_cuda:
        yield where


@pytest.fixture(autouse=True)
def on_its_device(request):
    """For the tests that devices.py gives a device without their asking."""
    if "device" in getattr(getattr(request.node, "callspec", None), "params", ()):
        request.getfixturevalue("device")


@pytest.fixture
def refusal(tmp_path):
    """refusal(command, *options): the last line of a script or module that does not take them."""

    def last_line(command, *options):
        done = run(command, *options, folder=tmp_path)
        assert done.returncode == 2
        return done.stderr.splitlines()[-1]

    return last_line


@pytest.fixture
def text(tmp_path):
    """A folder of Python files, small enough to be read at once."""
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(11):  # files 0 and 10 are held out
        (folder / f"{i:02}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 20)
    return folder


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A refusal that devices.py lists is a skip, and its message the reason."""
    try:
        result = yield
    except Exception as error:
        message = devices.limit(item, error)
        if message is None:
            devices.note(error)
            raise
        pytest.skip(message)
    if hasattr(item, "on_cuda") and not item.on_cuda.calls:
        pytest.skip("passes, without a call of the core with a tensor on the GPU")
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    result = yield
    devices.stop_if_broken()
    return result


def pytest_runtest_logreport(report):
    """Failures at once to a file, for a run that may be stopped before its summary."""
    path = os.environ.get("LSHKIT_TEST_FAILURES")
    if path and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message if crash else str(report.longrepr)[-300:]
        with open(path, "a") as file:
            file.write(f"FAILED {report.nodeid}: {' '.join(message.split())[:300]}\n")
