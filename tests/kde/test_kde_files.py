"""Files of LSHKernelDensity with other contents: a ValueError, in little memory."""

import io
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
from cases.archives import attempt, changed, put_anything
from hypothesis import given, settings
from hypothesis import strategies as st

from lshkit.kde import LSHKernelDensity, LSHOutlierDetector

rng = np.random.default_rng(0)
ROWS, WEIGHTS = rng.normal(size=(300, 4)), rng.uniform(0.1, 1, 300)
QUERIES = ROWS[:3] + 0.1
OPTIONS = {
    "brute": dict(algorithm="brute", bandwidth=[0.5, 1.0, 2.0, 0.7]),
    "random": dict(algorithm="random", random_state=3),
    "near_far": dict(algorithm="near_far", random_state=3),
    "hbe": dict(algorithm="hbe", random_state=3, rtol=1.0),
    "angular": dict(kernel="angular", n_bits=3, n_hashes=5, algorithm="bucket_sum", random_state=1),
    "laplacian": dict(
        kernel="laplacian",
        n_bits=3,
        n_hashes=5,
        algorithm="bucket_sum",
        random_state=1,
        sliding_window=90,
    ),
}
OPTIONS["half_life"] = OPTIONS["angular"] | dict(half_life=50.0)
OPTIONS["blocked"] = OPTIONS["angular"] | dict(
    n_bits=1, sliding_window=900, sliding_window_error=0.3
)


def saved(name):
    file = io.BytesIO()
    times = 4 if name == "blocked" else 1
    rows, weights = np.tile(ROWS, (times, 1)), np.tile(WEIGHTS, times)
    LSHKernelDensity(**OPTIONS[name]).fit(rows, sample_weight=weights).save(file)
    file.seek(0)
    return file


@pytest.fixture(scope="module")
def files():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of errors beyond rtol
        return {name: saved(name).getvalue() for name in OPTIONS}


def edit(path, value):
    """For `changed`: the value of a header's entry, or of an array; None takes it out."""

    def apply(header, arrays):
        *parents, key = path
        of = arrays if key in arrays else header
        for parent in parents:
            of = of[parent]
        of[key] = value
        if value is None:
            del of[key]

    return apply


METHODS = "picked", "methods"
FORGETTING = "sketch", "forgetting"


@pytest.mark.parametrize(
    ("name", "path", "value", "message"),
    [
        ("brute", ["version"], 2, "it has version 2, this lshkit reads up to 1"),
        ("brute", ["kind"], "LSHSampler", "it holds a LSHSampler"),
        ("brute", ["seed"], True, "seed must be an integer"),
        ("brute", ["seed"], None, "'seed' is missing"),
        ("brute", ["n_samples_seen"], 299, "X must be float32 or float64 (299, 4)"),
        ("brute", ["n_features"], 3, "(300, 3), got float64 (300, 4)"),
        ("brute", ["n_features"], 2**50, "(300, 1125899906842624), got float64 (300, 4)"),
        ("brute", ["X"], np.full((300, 4), np.nan), "finite numbers"),
        ("brute", ["weights"], -WEIGHTS, "sample_weight must be >= 0"),
        ("brute", ["weights"], WEIGHTS[:5], "weights must be float64 (300,), got float64 (5,)"),
        ("brute", ["weights"], None, "there is no array 'weights'"),
        ("brute", ["bandwidth"], -np.ones(4), "bandwidth must be finite and > 0"),
        ("brute", ["fitted", "kernel"], "none", "kernel must be one of"),
        ("brute", ["fitted", "kernel"], ["angular"], "is no whole file"),
        ("brute", ["parameters", "kernel"], "none", "kernel must be one of"),
        ("brute", ["parameters", "other"], 3, "'other'"),
        ("brute", ["parameters"], 3, "is no whole file"),
        ("brute", ["picked", "algorithm"], "kd_tree", "kd_tree"),
        ("random", METHODS, {}, "'random' is missing"),
        ("random", [*METHODS, "random", "n_samples"], -1, "n_samples must be an integer"),
        ("random", [*METHODS, "random", "limit"], "x", "limit must be a finite number"),
        *(
            (name, [*METHODS, name, "error_floor"], "9", "error_floor must be None or a finite")
            for name in ("random", "near_far", "hbe")
        ),
        ("random", [*METHODS, "random", "least"], "9", "least must be None or a finite number"),
        ("random", ["picked", "asked"], "other", "algorithm must be 'auto' or"),
        ("random", ["picked", "rtol"], "0.1", "rtol must be a finite number >= 0, got '0.1'"),
        ("random", ["picked", "negligible"], "0", "negligible must be a finite number >= 0"),
        ("random", ["picked", "confidence"], "0.9", "confidence must be None or in (0, 1)"),
        ("near_far", [*METHODS, "near_far", "n_probes"], 4096, "n_probes must be an integer from"),
        ("near_far", [*METHODS, "near_far", "n_samples"], 0, "n_samples must be an integer >= 1"),
        ("hbe", [*METHODS, "hbe", "n_hashes"], 10**9, "n_hashes must be an integer from"),
        ("hbe", [*METHODS, "hbe", "n_projections"], 64, "n_projections must be an integer from"),
        ("angular", ["table"], np.zeros((5, 4, 1)), "table must be float64 (5, 8, 1)"),
        ("angular", ["fitted", "n_bits"], 16, "table must be float64 (5, 65536, 1)"),
        ("angular", ["fitted", "n_bits"], 40, "n_bits must be an integer from 1 to 16"),
        ("angular", ["fitted", "kernel"], "laplacian", "has no hash family FastHadamard"),
        ("angular", ["sketch", "hasher", "n_hashes"], 65535, "table must be float64 (65535, 8, 1)"),
        ("angular", ["sketch", "hasher", "n_bits"], 4, "parameters must be"),
        ("angular", ["sketch", "total"], "a", "is no whole file"),
        ("angular", ["sketch", "total"], -1.0, "total >= 0"),
        ("angular", ["sketch", "total"], 1e6, "add up to total=1e+06"),
        ("angular", ["sketch", "total"], 0.0, "add up to total=0"),
        ("angular", ["table"], np.full((5, 8, 1), 1.0), "it is off by"),
        ("laplacian", ["table"], np.full((5, 8, 1), -1.0), "table must add up to total="),
        ("laplacian", ["n_samples_seen"], -5, "n_samples_seen must be an integer from 0"),
        ("laplacian", ["table"], np.full((5, 8, 1), np.nan), "table and total must be finite"),
        ("laplacian", ["forgetting.codes"], np.full((90, 5), 8, np.uint8), "must be below 8"),
        (
            "laplacian",
            ["forgetting.weights"],
            np.full(90, np.nan),
            "forgetting.weights must be finite",
        ),
        ("laplacian", ["n_samples_seen"], 89, "n_samples_seen must be the window's 90 rows"),
        ("laplacian", [*FORGETTING, "size"], 10**9, "forgetting.codes must be uint8 (1000000"),
        ("laplacian", [*FORGETTING, "at"], 90, "the sliding window's place must be an integer"),
        ("laplacian", [*FORGETTING, "name"], "none", "forgetting must be one of sliding_window"),
        ("laplacian", ["sketch", "forgetting"], None, "'forgetting' is missing"),
        ("laplacian", [*FORGETTING, "name"], "half_life", "there is an unknown array 'forgetting."),
        ("blocked", ["forgetting.blocks"], np.full((3, 5, 2, 1), -1.0), ">= 0"),
        ("blocked", ["forgetting.blocks"], np.full((3, 5, 2, 1), np.inf), "must be finite"),
        ("blocked", ["forgetting.blocks"], np.full((3, 5, 2, 1), 1e9), "not exceed the table"),
        (
            "blocked",
            ["forgetting.blocks"],
            np.arange(30.0).reshape(3, 5, 2, 1),
            "the same for each",
        ),
        ("blocked", [*FORGETTING, "n_blocks"], 10**9, "n_blocks must be an integer from 0 to 3"),
        ("blocked", [*FORGETTING, "n_blocks"], 2, "float64 (2, 5, 2, 1), got float64 (3"),
        ("blocked", [*FORGETTING, "size"], 2**62, "n_samples_seen must be the window's 930 rows"),
        ("blocked", [*FORGETTING, "rows"], 0, "a block's rows must be an integer from 1"),
        ("blocked", [*FORGETTING, "filled"], 300, "the last block's rows must be an integer from"),
        ("blocked", ["n_samples_seen"], 901, "n_samples_seen must be the window's 900 rows"),
        ("half_life", [*FORGETTING, "half_life"], 0.5, "half_life must be at least 1"),
        ("half_life", [*FORGETTING, "half_life"], float("nan"), "half_life must be a finite"),
        ("half_life", [*FORGETTING, "place"], 301, "the place in half_life must be an integer"),
        ("half_life", ["table"], np.full((5, 8, 1), np.inf), "table and total must be finite"),
        ("laplacian", ["sketch", "hasher", "n_features"], 2**40, "scales must be"),
    ],
)
def test_other_contents(files, name, path, value, message):
    bad = changed(io.BytesIO(files[name]), edit(path, value))
    error = attempt(LSHKernelDensity.load, bad, 2**19)
    assert isinstance(error, ValueError) and message in str(error), error


def test_sketches_in_place_of_rows_are_no_larger_than_any_that_is_picked(files):
    def to_sketch(header, arrays):
        header["fitted"] |= {"kernel": "laplacian", "n_bits": 16}
        header["picked"] = {"algorithm": "bucket_sum", "methods": {"bucket_sum": {"n_hashes": 300}}}

    bad = changed(io.BytesIO(files["brute"]), to_sketch)
    error = attempt(LSHKernelDensity.load, bad, 2**19)
    assert "n_hashes must be an integer from 1 to 128, got 300" in str(error)


def test_feature_names_come_back():
    density = LSHKernelDensity(algorithm="brute").fit(ROWS)
    density.feature_names_in_ = np.array(["a", "", "größe", "d\n"], object)
    file = io.BytesIO()
    density.save(file)
    file.seek(0)
    loaded = LSHKernelDensity.load(file)
    assert loaded.feature_names_in_.tolist() == ["a", "", "größe", "d\n"]
    file.seek(0)
    bad = changed(file, edit(["feature_names"], np.frombuffer(b"a\0b", np.uint8)))
    with pytest.raises(ValueError, match="feature_names must have 4 names"):
        LSHKernelDensity.load(bad)
    density.feature_names_in_[0] = "a\0"
    with pytest.raises(ValueError, match="with a NUL character"):
        density.save(io.BytesIO())


def test_sketches_do_not_depend_on_random_numbers_to_come_again(files):
    """Hash functions are in the file: numpy may draw other numbers for a seed one day."""
    density = LSHKernelDensity.load(io.BytesIO(files["laplacian"]))

    def other_seed(header, arrays):
        header["sketch"]["hasher"]["seed"] = "77"

    loaded = LSHKernelDensity.load(changed(io.BytesIO(files["laplacian"]), other_seed))
    assert np.array_equal(loaded.kernel_mean(QUERIES), density.kernel_mean(QUERIES))


@pytest.mark.parametrize("name", OPTIONS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_headers_of_any_contents(files, name, data):
    """Whole otherwise: a density that can be asked, or a ValueError; nothing large is allocated."""
    bad = changed(io.BytesIO(files[name]), lambda header, arrays: put_anything(data, header))
    density = attempt(LSHKernelDensity.load, bad, 2**22)
    if not isinstance(density, ValueError):
        assert density.n_features_in_ == 4


@pytest.mark.parametrize("name", ["near_far", "laplacian", "blocked"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_flipped_bits_and_cut_ends(files, name, data):
    whole = files[name]
    broken = bytearray(whole)
    at = data.draw(st.integers(0, len(whole) - 1))
    broken[at] ^= 1 << data.draw(st.integers(0, 7))
    if data.draw(st.booleans()):
        broken = whole[:at]
    got = attempt(LSHKernelDensity.load, io.BytesIO(bytes(broken)), 4 * len(whole) + 2**18)
    # A date, an attribute or a flag of a member may be another.
    assert isinstance(got, ValueError) or got.to_bytes() == whole


def test_a_small_file_fills_no_memory(files, tmp_path):
    """In a process that may have 1 GB more than it has: not even memory that numpy does not see."""
    bombs = {
        "angular": edit(["sketch", "hasher", "n_hashes"], 65535),
        "hbe": edit([*METHODS, "hbe"], {"n_hashes": 4096, "n_projections": 65536, "width": 1.0}),
        "brute": edit(["n_features"], 2**40),
    }
    for name, bomb in bombs.items():
        (tmp_path / f"{name}.npz").write_bytes(changed(io.BytesIO(files[name]), bomb).getvalue())
    script = """
import os, resource, sys
from lshkit.kde import LSHKernelDensity
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + 2**30
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for path in sys.argv[1:]:
    try:
        LSHKernelDensity.load(path)
    except ValueError as error:
        print("refused:", error)
"""
    command = [sys.executable, "-c", script, *map(str, sorted(tmp_path.iterdir()))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.count("refused:") == len(bombs), done.stdout + done.stderr
    assert max(os.path.getsize(x) for x in tmp_path.iterdir()) < 20_000


@pytest.mark.parametrize(
    "change",
    [
        *({"rtol": 0}, {"half_life": 100.0}, {"n_bits": 99}, {"atol": -1}, {"kernel": "cosine"}),
        *({"bandwidth": -1.0}, {"bandwidth": "foo"}, {"bandwidth": [1, 2]}, {"random_state": -1}),
    ],
)
def test_what_fit_would_refuse_is_not_saved(change, tmp_path):
    X = np.random.default_rng(0).standard_normal((300, 4))
    density = LSHKernelDensity("gaussian", 0.7, algorithm="random", random_state=0).fit(X)
    density.set_params(**change)
    with pytest.raises(ValueError, match=next(iter(change))):
        density.save(tmp_path / "x.npz")
    with pytest.raises(ValueError, match=next(iter(change))):
        density.to_bytes()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change", [{"contamination": 7}, {"n_jobs": 0}, {"random_state": -1}, {"density": 3}]
)
def test_a_detector_that_could_not_be_fitted_is_not_saved(change):
    X = np.random.default_rng(0).standard_normal((100, 3))
    detector = LSHOutlierDetector(random_state=0).fit(X).set_params(**change)
    with pytest.raises((TypeError, ValueError), match=f"^{next(iter(change))} must be"):
        detector.to_bytes()
