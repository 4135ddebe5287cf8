"""Builds the C++ core's own tests and runs them through ctest.

The core itself is taken from pip's build folder where that is not older than the sources, which
saves most of the compilation. LSHKIT_CPP_TESTS names a folder where the tests are built already.
"""

import os
import pathlib
import shutil
import subprocess
import sysconfig

import pytest
from cases.commands import ROOT

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


def compiled_core():
    """pip's build folder with the present sources compiled, or None."""
    sources = [ROOT / "CMakeLists.txt", *ROOT.glob("cpp/src/**/*"), *ROOT.glob("cpp/include/**/*")]
    newest = max(path.stat().st_mtime for path in sources)
    folders = [path.parent for path in ROOT.glob("build/*-linux_*/liblshkit_core.a")]
    folders = [x for x in folders if (x / "liblshkit_core.a").stat().st_mtime > newest]
    return folders[0] if folders else None


def built():
    """The folder of the tests' programs, compiled from the present sources."""
    core = compiled_core()
    build = ROOT / "build" / ("cpp-tests" if core else "cpp-tests-and-core")
    ninja = shutil.which("ninja", path=PATH)
    # Named at every run: the cache may remember the ninja of an environment that is gone.
    options = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
    if core:
        options += ["-S", ROOT / "cpp" / "tests", f"-DLSHKIT_BUILT={core}"]
    else:
        options += ["-S", ROOT, "-DLSHKIT_PYTHON=OFF", "-DLSHKIT_TESTS=ON"]
    run(CMAKE, "-B", build, *options)
    run(CMAKE, "--build", build, "--parallel", os.cpu_count() or 1)
    return build


@pytest.mark.skipif(CMAKE is None, reason="needs cmake")
def test_cpp():
    build = os.environ.get("LSHKIT_CPP_TESTS") or built()
    ctest = pathlib.Path(CMAKE).with_name("ctest")
    options = "--output-on-failure", "--no-tests=error", "--parallel", os.cpu_count() or 1
    output = run(ctest, "--test-dir", build, *options)
    assert "100% tests passed" in output
