"""The examples of kernel densities run from the command line and leave a table and a picture."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
EXAMPLES = {
    "kde_vs_sklearn": ("scikit-learn, rtol 0.1", "lshkit, auto"),
    "streaming_density": ("rows streamed", "bit for bit | True"),
    "novelty_detection": ("novel digit", "| 1 |"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_ends_in_a_table_and_a_picture(name, tmp_path):
    for package in ("matplotlib", "tqdm", "PIL"):
        pytest.importorskip(package)
    picture = tmp_path / "out.png"
    script = ROOT / "python_examples" / f"{name}.py"
    done = subprocess.run(
        [sys.executable, str(script), "--quick", "--out", str(picture)],
        cwd=tmp_path,
        env=os.environ | {"OMP_WAIT_POLICY": "passive"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    for words in EXAMPLES[name]:
        assert words in done.stdout
    assert "100%" in done.stderr  # its progress bar
    assert picture.read_bytes().startswith(PNG_SIGNATURE)
