"""The benchmarks of densities and of sampling measure all, and print what they measured."""

import json

import pytest
from cases.commands import run

for package in ("torch", "PIL", "threadpoolctl"):
    pytest.importorskip(package)

KDE, SAMPLING = "benchmarks.density.kde", "benchmarks.density.sampling"
OUTLIERS = "benchmarks.density.outliers"
STREAMS = "benchmarks.density.streams"
ERRORS = "benchmarks.density.errors"
BANDWIDTHS = "benchmarks.density.bandwidths"
REGRESSION, TWO_SAMPLE = "benchmarks.density.regression", "benchmarks.density.two_sample"
OURS = {"brute", "random", "near_far", "hbe", "auto"}

# 8 bits and 32 hashes of up to 64 features: tables, and the signs of 3 + 8 rotations.
SKETCH_BYTES = 32 * 256 * 8 + (3 + 8) * 64 * 4


def measured(path, module, *options):
    """What a benchmark leaves in the file; --tables prints its tables again."""
    done = run(module, "--quick", *options, "--json", path)
    assert done.returncode == 0, done.stderr
    tables = run(module, "--tables", "--json", path)
    assert tables.returncode == 0, tables.stderr
    assert tables.stdout.strip() in done.stdout
    return json.loads(path.read_text())


def test_kde_benchmark_writes_all_results(tmp_path):
    sections = "mixture_16", "goals", "small_calls", "compact_kernels", "stream"
    results = measured(tmp_path / "new" / "kde.json", KDE, "--sections", *sections)
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
    assert results["goals"].keys() == {"brute, 0.001", "auto, 0.001", "auto, 0.0001"}
    assert results["goals"]["brute, 0.001"]["largest_difference"] < 1e-5
    assert len(results["small_calls"]["seconds"]) == 5

    stream = results["stream"]
    assert stream["rows"] == 200_000
    assert stream["sketch_bytes"] == stream["sketch_bytes_after_a_tenth"] == SKETCH_BYTES


def test_kde_benchmark_refuses_bad_options_by_name(refusal):
    assert "--rows" in refusal(KDE, "--rows", 10)


def test_bandwidths_benchmark_writes_all_results(tmp_path):
    results = measured(tmp_path / "new" / "bandwidths.json", BANDWIDTHS)
    assert results.keys() == {"speed", "accuracy", "rules"}
    assert all("cpu" in section["machine"] for section in results.values())
    best = results["speed"]["best"]
    assert best.keys() == results["speed"]["seconds"].keys() and len(best) == 5
    assert len(set(best.values())) == 1  # of a coarse grid
    for found in results["accuracy"]["data"].values():
        for sample in found["held out"].values():
            assert 0 <= sample["root mean square"] < 0.3 and sample["stated"] > 0
    likelihood = results["rules"]["data"]["mixture of 512"]["rules"]
    assert (
        likelihood["likelihood, gaussian"]["log_likelihood"]
        > (likelihood["scott, gaussian"]["log_likelihood"])
    )


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
        assert data["mean relative error"] < 0.1
    printed = run(SAMPLING, "--tables", "--json", path)
    assert printed.returncode == 0
    assert set(done.stdout.splitlines()) < set(printed.stdout.splitlines())


def test_outlier_benchmark_writes_its_sections(tmp_path):
    results = measured(tmp_path / "new" / "outliers.json", OUTLIERS, "--sections", "exact", "times")
    assert {"scikit-learn", "pyod", "pysad"} == results["exact"]["packages"].keys()
    for found in results["exact"]["results"].values():
        assert found["auto"] == pytest.approx(found["brute"], abs=0.05)
    times = results["times"]["results"]
    assert {"lshkit", "IsolationForest", "LOF"} <= times["seconds"].keys()
    assert times["over sklearn"].keys() == {"exact", "rtol=0.1"}


def test_streams_benchmark_writes_its_sections(tmp_path):
    results = measured(tmp_path / "new" / "streams.json", STREAMS)
    sketches = results["speed"]["sketches"]
    assert all(x["rows_per_second"] > 0 for x in sketches.values())
    assert sketches["all rows"]["bytes"] == sketches["half_life"]["bytes"] == SKETCH_BYTES
    for windows in results["windows"]["streams"].values():
        histograms = windows.pop("exponential histograms, error 0.05")
        assert histograms["mean"] < 0.05  # each count is within that
        for name in ("blocks, error 0.1", "blocks, error 0.05"):
            assert windows[name]["bytes"] <= windows["exact"]["bytes"]
            found = windows[name]["root mean square"]
            assert found <= windows[name]["stated, root mean square"]


def test_regression_benchmark_writes_all_results(tmp_path):
    results = measured(tmp_path / "new" / "regression.json", REGRESSION)
    for data in ("friedman", "digits", "clusters", "waves"):
        methods = results["times"][data]["methods"]
        assert {"lshkit, auto", "NumPy", "scikit-learn, neighbors"} <= methods.keys()
        assert methods["NumPy"]["error"] < 1e-4  # the exact ones agree
        assert methods["lshkit, brute"]["r2"] > 0.1
    for found in results["coverage"]["results"]:
        assert 0 <= found["beyond_3"] <= 1 and found["observed"] > 0


def test_two_sample_benchmark_writes_all_results(tmp_path):
    results = measured(tmp_path / "new" / "two_sample.json", TWO_SAMPLE)
    for seconds in results["times"]["seconds"].values():
        assert seconds.keys() == {"bucket_sum", "brute", "NumPy"}
    assert len(results["power"]["found"]) == 9


def test_errors_benchmark_writes_all_results(tmp_path):
    results = measured(
        tmp_path / "new" / "errors.json", ERRORS, "--data", "repeated", "mixture of 128"
    )
    assert {x["data"] for x in results["cases"]} == {"repeated", "mixture of 128"}
    for found in results["cases"]:
        for seed in found["seeds"]:
            assert 0 <= seed["beyond_three_stated"] <= 0.05 and seed["mean_error"] < 0.2
            assert 0 <= seed["confidence"]["beyond_rtol"] <= 0.05


def test_dask_benchmark_compares_equal_sketches(tmp_path):
    pytest.importorskip("distributed.client")
    path = tmp_path / "dask.json"
    done = run("benchmarks.density.dask_sketches", "--quick", "--json", path)
    assert done.returncode == 0, done.stderr
    results = json.loads(path.read_text())["sketches"]
    assert results["rows"] == 160_000
    kinds = [(found["sketch"], found["block"]) for found in results["sketches"]]
    assert kinds == [("angular, 8 bits", 10_000), ("laplacian, 12 bits", 10_000)]
    for found in results["sketches"]:
        assert found["equal_bits"]
        speeds = found["rows_per_second"]
        assert speeds.keys() == {"threads", "n_jobs=2", "Dask"}
        local = max(speeds["threads"], speeds["n_jobs=2"])
        assert found["over_threads"] == pytest.approx(speeds["Dask"] / local)
    assert "2 Dask workers" in done.stdout
