"""Builds the C++ core and runs its own tests through ctest.

LSHKIT_CPP_TESTS names a folder where they are built already (from these sources, with
-DLSHKIT_TESTS=ON): checking everything in a fresh environment need not compile the core twice.
"""

import os
import pathlib
import shutil
import subprocess
import sysconfig

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# cmake and ninja may come from PyPI, beside this Python, without being on PATH.
PATH = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
CMAKE = shutil.which("cmake", path=PATH)


def run(*command):
    done = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, "PATH": PATH},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{command[0]} failed:\n{done.stdout[-8000:]}"
    return done.stdout


def built():
    """The folder of the tests' programs, compiled from the present sources."""
    build = ROOT / "build" / "cpp-tests"
    ninja = shutil.which("ninja", path=PATH)
    # Named at every run: the cache may remember the ninja of an environment that is gone.
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
    options = ["-DLSHKIT_PYTHON=OFF", "-DLSHKIT_TESTS=ON"]
    run(CMAKE, "-S", ROOT, "-B", build, *generator, *options)
    run(CMAKE, "--build", build, "--parallel", os.cpu_count() or 1)
    return build


@pytest.mark.skipif(CMAKE is None, reason="needs cmake")
def test_cpp():
    build = os.environ.get("LSHKIT_CPP_TESTS") or built()
    ctest = pathlib.Path(CMAKE).with_name("ctest")
    output = run(ctest, "--test-dir", build, "--output-on-failure", "--no-tests=error")
    assert "100% tests passed" in output
