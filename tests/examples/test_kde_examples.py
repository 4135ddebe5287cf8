"""The examples of kernel densities run from the command line and leave a table and a picture."""

import re

import pytest
from cases.commands import PNG_SIGNATURE, ROOT, run

EXAMPLES = {
    "kde_vs_sklearn": ("| scikit-learn |", "| lshkit, auto |"),
    "streaming_density": ("| half-life 2,773 | 67 |", "bit for bit | True"),
    "outlier_detection": ("| novel |", "| 1 |"),
    "bandwidth_selection": ("| by Scott |", "| 32 |"),
    "kernel_regression": ("| beyond 3 |", "| sketch |"),
    "density_on_dask": ("| a worker killed | after", "none killed | True |"),
    "two_sample_test": ("share of 9s", "| bucket sums, 500 rows |"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_ends_in_a_table_and_a_picture(name, tmp_path):
    for package in ("matplotlib", "tabulate", "tqdm", "PIL"):
        pytest.importorskip(package)
    if "dask" in name:
        pytest.importorskip("distributed.client")
    picture = tmp_path / "out.png"
    script = ROOT / "python_examples" / f"{name}.py"
    done = run(script, "--quick", "--out", picture, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = re.sub(" +", " ", done.stdout)
    for words in EXAMPLES[name]:
        assert words in printed
    lines = [x for x in done.stdout.splitlines() if not x.startswith("picture: ")]  # a path
    assert max(map(len, lines)) <= 80
    assert "100%" in done.stderr  # its progress bar
    assert picture.read_bytes().startswith(PNG_SIGNATURE)
