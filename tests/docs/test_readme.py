"""The README's code runs as it stands, from top to bottom."""

import importlib.util
import pathlib
import re
import subprocess
import sys

README = pathlib.Path(__file__).resolve().parents[2] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
TORCH_BLOCKS = [block for block in BLOCKS if "torch" in block or "attention" in block]
TRANSFORMERS_BLOCKS = [block for block in BLOCKS if "transformers" in block]


def test_code_runs(tmp_path):
    blocks = BLOCKS
    if importlib.util.find_spec("torch") is None:
        blocks = [block for block in BLOCKS if block not in TORCH_BLOCKS]
    if importlib.util.find_spec("transformers") is None:
        blocks = [block for block in blocks if block not in TRANSFORMERS_BLOCKS]
    assert len(blocks) >= 1
    assert len(TRANSFORMERS_BLOCKS) == 1
    assert len(TORCH_BLOCKS) >= 3
    subprocess.run([sys.executable, "-c", "\n".join(blocks)], check=True, cwd=tmp_path, timeout=240)
