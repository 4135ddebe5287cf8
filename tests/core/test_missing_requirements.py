"""A build that misses something says what, and how to get it."""

import os
import shutil
import subprocess
import sys

import pytest
from core.test_cpp import CMAKE, PATH, ROOT

pytestmark = pytest.mark.skipif(CMAKE is None, reason="needs cmake")


def configure(folder, *options, **environment):
    done = subprocess.run(
        [CMAKE, "-S", ROOT, "-B", folder, f"-DPython_EXECUTABLE={sys.executable}", *options],
        env={**os.environ, "PATH": PATH, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, " ".join(done.stdout.split())


def test_compiler(tmp_path):
    status, output = configure(tmp_path, CXX="no-such-compiler")
    assert status
    assert "no working C++ compiler was found (CXX='no-such-compiler')" in output
    assert "apt install g++" in output


def test_python_headers(tmp_path):
    (tmp_path / "headers").mkdir()
    folder = f"-DPython_INCLUDE_DIR={tmp_path / 'headers'}"
    status, output = configure(tmp_path / "build", folder)
    assert status
    assert f"Python.h of {sys.executable} was not found" in output
    assert "apt install python3-dev" in output


def test_pybind11(tmp_path):
    status, output = configure(tmp_path, "-DCMAKE_DISABLE_FIND_PACKAGE_pybind11=ON")
    if "Python.h" in output:
        pytest.skip("this Python has no headers")
    assert status
    assert "pybind11 was not found: pip install pybind11" in output


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """A folder for builds whose compiler is the same, and is looked for once."""
    return tmp_path_factory.mktemp("build")


@pytest.mark.parametrize(
    "missing, backend, message",
    [
        ("OpenMP", None, "threads by std"),
        ("OpenMP", "openmp", "has no OpenMP. Install it"),
        ("Threads", "std", "finds no threads"),
        (None, "tbb", "LSHKIT_THREAD_BACKEND must be openmp or std, was tbb"),
    ],
)
def test_threads(build, missing, backend, message):
    forgotten = "LSHKIT_THREAD_BACKEND", "CMAKE_DISABLE_FIND_PACKAGE_*", "OpenMP*", "*THREADS*"
    options = ["-DLSHKIT_PYTHON=OFF", *(f"-U{name}" for name in forgotten)]
    if missing:
        options.append(f"-DCMAKE_DISABLE_FIND_PACKAGE_{missing}=ON")
    if backend:
        options.append(f"-DLSHKIT_THREAD_BACKEND={backend}")
    status, output = configure(build, *options)
    assert (status == 0) == (backend is None)
    assert message in output


@pytest.mark.skipif(shutil.which("c++", path=PATH) is None, reason="needs a C++ compiler")
def test_libgomp_of_a_wheel(tmp_path):
    pybind11 = pytest.importorskip("pybind11").get_cmake_dir()
    options = ["-DLSHKIT_BUNDLE_LIBGOMP=ON", "-DLSHKIT_THREAD_BACKEND=std"]
    options.append(f"-Dpybind11_DIR={pybind11}")
    status, output = configure(tmp_path, *options)
    if "Python.h" in output:
        pytest.skip("this Python has no headers")
    assert status
    assert "LSHKIT_BUNDLE_LIBGOMP=ON needs GCC and LSHKIT_THREAD_BACKEND=openmp" in output
