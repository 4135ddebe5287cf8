"""A build that misses something says what, and how to get it. (Threads: test_cpp.py.)"""

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
