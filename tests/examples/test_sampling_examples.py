"""The sampling examples run from the command line and leave what they promise."""

import pytest
from cases.commands import PNG_SIGNATURE, ROOT, needs_example_packages, rows_of, run

EXAMPLE = ROOT / "python_examples" / "partition_function.py"
GOOD = 0.01  # the mean error of which the fastest setting is named
NEAR_FAR = "near + 256 far", "near + 1024 far"


def test_partition_function_ends_in_a_table_and_a_picture(tmp_path):
    needs_example_packages()
    picture = tmp_path / "partition.png"
    done = run(EXAMPLE, "--quick", "--out", picture, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    by_data = {}
    for data in ("classes in clusters", "classes in all directions"):
        rows = rows_of(done.stdout.split(f"\n{data}\n")[1].split(f"of at most {GOOD}")[0])
        assert rows[0] == ["method", "setting", "us a query", "mean error", "stated"]
        for method, _, microseconds, error, _ in rows[2:]:
            assert float(microseconds) > 0
            by_data.setdefault(data, {}).setdefault(method, []).append(float(error or 0))
    methods = {"exact", "uniform", "HBE", "Horvitz-Thompson"} | set(NEAR_FAR)
    for errors in by_data.values():
        assert errors.keys() == methods
        assert min(errors[NEAR_FAR[1]]) < 0.1
    for data in by_data:
        assert f"{data}: 100%" in done.stderr  # its progress bar
    assert picture.read_bytes().startswith(PNG_SIGNATURE)


SOFTMAX = ROOT / "python_examples" / "extreme_softmax.py"


def test_extreme_softmax_ends_in_a_table_and_a_picture(tmp_path, text):
    needs_example_packages()
    pytest.importorskip("torch")
    picture = tmp_path / "softmax.png"
    options = ("--quick", "--threads", 1, "--text", text, "--out", picture)
    done = run(SOFTMAX, *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = rows_of(done.stdout)
    assert rows[0][:3] == ["method", "a step, ms", "speed"]
    by_method = {name: [float(cell) for cell in cells] for name, *cells in rows[2:]}
    assert by_method.keys() == {"full softmax", "near + uniform", "uniform only"}
    for name, numbers in by_method.items():
        assert min(numbers) > 0
        assert f"{name:<14}: 100%" in done.stderr  # its progress bar
    assert by_method["full softmax"][1] == 1
    assert picture.read_bytes().startswith(PNG_SIGNATURE)
