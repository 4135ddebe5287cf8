"""The benchmark of kernel densities measures every method and goal, and prints what it measured."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

for package in ("torch", "PIL", "threadpoolctl"):
    pytest.importorskip(package)

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "kde.py"
OURS = {"brute", "random", "near_far", "hbe", "auto"}


def run(*options):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, options)],
        env=os.environ | {"OMP_WAIT_POLICY": "passive"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_benchmark_writes_all_results(tmp_path):
    path = tmp_path / "new" / "kde.json"
    done = run("--quick", "--sections", "mixture_16", "goals", "stream", "--json", path)
    assert done.returncode == 0, done.stderr
    results = json.loads(path.read_text())
    assert {"cpu", "instruction_set", "lshkit"} <= results["machine"].keys()
    assert results["packages"].keys() == {"scikit-learn", "KDEpy", "torch-kde", "KeOps", "FAISS"}
    for task in results["mixture_16"]:
        methods = task["methods"]
        assert {f"lshkit, {name}" for name in OURS} <= methods.keys()
        assert {"scikit-learn, kd_tree", "NumPy, permuted sample"} <= methods.keys()
        for name in ("lshkit, brute", "NumPy, all rows"):  # the exact ones agree
            assert methods[name]["test_error"] < 1e-3
        for found in methods.values():
            if found["reached"]:
                assert found["validation_error"] < 0.1 and found["microseconds"] > 0
            assert found["build_seconds"] > 0 and found["bytes"] >= 0
    assert results["goals"].keys() == {"brute, 0.001", "auto, 0.001", "auto, 0.0001"}
    assert results["goals"]["brute, 0.001"]["largest_difference"] < 1e-5

    stream = results["stream"]
    assert stream["rows"] == 200_000
    assert stream["sketch_bytes"] == stream["sketch_bytes_after_a_tenth"] == 32 * 256 * 8
    tables = run("--tables", "--json", path)
    assert tables.returncode == 0, tables.stderr
    assert tables.stdout.strip() in done.stdout


def test_benchmark_refuses_bad_options_by_name(refusal):
    assert "--rows" in refusal(SCRIPT, "--rows", 10)
