"""The benchmarks of densities and of sampling measure all, and print what they measured."""

import json

import pytest
from cases.commands import run

for package in ("torch", "PIL", "threadpoolctl"):
    pytest.importorskip(package)

KDE, SAMPLING = "benchmarks.density.kde", "benchmarks.density.sampling"
REGRESSION, TWO_SAMPLE = "benchmarks.density.regression", "benchmarks.density.two_sample"
OURS = {"brute", "random", "near_far", "hbe", "auto"}


def test_kde_benchmark_writes_all_results(tmp_path):
    path = tmp_path / "new" / "kde.json"
    done = run(KDE, "--quick", "--sections", "mixture_16", "goals", "stream", "--json", path)
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
    tables = run(KDE, "--tables", "--json", path)
    assert tables.returncode == 0, tables.stderr
    assert tables.stdout.strip() in done.stdout


def test_kde_benchmark_refuses_bad_options_by_name(refusal):
    assert "--rows" in refusal(KDE, "--rows", 10)


def test_sampling_benchmark_writes_its_sections(tmp_path):
    path = tmp_path / "new" / "sampling.json"
    options = ("--quick", "--rows", 2000, "--json", path)
    first = run(SAMPLING, *options, "--sections", "variance")
    assert first.returncode == 0, first.stderr
    others = ("tables", "draws", "normaliser")
    done = run(SAMPLING, *options, "--sections", *others)
    assert done.returncode == 0, done.stderr
    results = json.loads(path.read_text())
    assert results.keys() == {"variance", *others}
    for scale in results["variance"]["scales"].values():
        assert scale["hbe over horvitz_thompson"] > 5
        for method in scale["methods"].values():
            assert method["relative variance"] > 0 and abs(method["relative bias"]) < 0.1
    for data in results["normaliser"]["data"].values():
        assert data["faster"] > 0 and data["mean relative error"] < 0.1
    printed = run(SAMPLING, "--tables", "--json", path)
    assert printed.returncode == 0
    assert set(done.stdout.splitlines()) < set(printed.stdout.splitlines())


def test_regression_benchmark_writes_all_results(tmp_path):
    path = tmp_path / "new" / "regression.json"
    done = run(REGRESSION, "--quick", "--json", path)
    assert done.returncode == 0, done.stderr
    results = json.loads(path.read_text())
    for data in ("friedman", "digits", "clusters", "waves"):
        methods = results["times"][data]["methods"]
        assert {"lshkit, auto", "NumPy", "scikit-learn, neighbors"} <= methods.keys()
        assert methods["NumPy"]["error"] < 1e-4  # the exact ones agree
        assert methods["lshkit, brute"]["r2"] > 0.1
    for found in results["coverage"]["results"]:
        assert 0 <= found["beyond_3"] <= 1 and found["observed"] > 0
    tables = run(REGRESSION, "--tables", "--json", path)
    assert tables.returncode == 0 and tables.stdout.strip() in done.stdout


def test_two_sample_benchmark_writes_all_results(tmp_path):
    path = tmp_path / "new" / "two_sample.json"
    done = run(TWO_SAMPLE, "--quick", "--json", path)
    assert done.returncode == 0, done.stderr
    results = json.loads(path.read_text())
    for seconds in results["times"]["seconds"].values():
        assert seconds.keys() == {"bucket_sum", "exact", "NumPy"}
    assert len(results["power"]["found"]) == 9
    tables = run(TWO_SAMPLE, "--tables", "--json", path)
    assert tables.returncode == 0 and tables.stdout.strip() in done.stdout
