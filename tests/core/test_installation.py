"""In a checkout that is not compiled, `import lshkit` takes the modules of an installed copy."""

import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

from lshkit import _C, __version__

PACKAGE = pathlib.Path(_C.__file__).parent
LIBRARIES = pathlib.Path(np.__file__).parents[1]
SNIPPET = """
import lshkit
print(lshkit.hashing.FastHadamard(8, 4, 2, seed=0).hash([[1.0] * 8]).shape)
print(lshkit.hashing.__file__)
lshkit.show_versions()
"""


@pytest.fixture
def checkout(tmp_path):
    """A folder with the package's sources alone."""
    sources = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "checkout" / "lshkit", ignore=sources)
    return tmp_path / "checkout"


@pytest.fixture
def installed(tmp_path):
    """A folder with the compiled package, for sys.path."""
    sources = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "installed" / "lshkit", ignore=sources)
    return tmp_path / "installed"


def run(*command, folder, path=()):
    """Without the environment's own lshkit: -S leaves out its .pth files, and path comes first."""
    return subprocess.run(
        [sys.executable, "-S", *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
    )


def test_a_checkout_takes_the_installed_package(checkout, installed):
    done = run("-c", SNIPPET, folder=checkout, path=[installed, LIBRARIES])
    assert done.returncode == 0, done.stderr
    shape, module, *versions = done.stdout.splitlines()
    assert shape == "(1, 2)"
    assert pathlib.Path(module) == installed / "lshkit" / "hashing" / "__init__.py"
    assert any(str(installed / "lshkit") in line for line in versions)
    (checkout / "snippet.py").write_text(SNIPPET)
    assert run("-m", "snippet", folder=checkout, path=[installed, LIBRARIES]).stdout == done.stdout


def test_a_compiled_checkout_is_taken_itself(checkout, installed):
    shutil.copy(_C.__file__, checkout / "lshkit")
    done = run("-c", SNIPPET, folder=checkout, path=[installed, LIBRARIES])
    assert done.returncode == 0, done.stderr
    assert str(checkout / "lshkit" / "hashing") in done.stdout
    assert str(installed) not in done.stdout


@pytest.mark.parametrize("other", ["none", "another version"])
def test_without_an_installed_package_of_this_version_it_says_what_to_do(
    checkout, installed, other
):
    path = []
    if other == "another version":
        file = installed / "lshkit" / "__init__.py"
        file.write_text(file.read_text().replace(f'"{__version__}"', '"0.0.1"'))
        path = [installed]
    done = run("-c", "import lshkit", folder=checkout, path=path)
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert message.startswith(f"ImportError: lshkit {__version__} is not compiled for")
    assert f"pip install . (or an editable install: see CONTRIBUTING.md) in {checkout}" in message
