"""The README's code runs as it stands."""

import pathlib
import re
import subprocess
import sys

import pytest

README = pathlib.Path(__file__).resolve().parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_there_is_code():
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_code_runs(block, tmp_path):
    if "torch" in block:
        pytest.importorskip("torch")
    subprocess.run([sys.executable, "-c", block], check=True, cwd=tmp_path, timeout=120)
