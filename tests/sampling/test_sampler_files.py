"""Files of LSHSampler: what was saved comes back, and nothing else is loaded."""

import io
import pickle
import zipfile

import numpy as np
import pytest
from cases.archives import attempt, changed, put_anything
from cases.sampling import FAMILIES, assert_same, clustered
from hypothesis import given, settings
from hypothesis import strategies as st

from lshkit.hashing import FastHadamard
from lshkit.sampling import LSHSampler


@pytest.fixture(params=FAMILIES)
def fitted(request):
    X, queries = clustered(40, 6, 1.0)
    weights = None if request.param == "L1" else np.random.default_rng(1).random(40)
    sampler = LSHSampler(FAMILIES[request.param](0)).fit(X, weights)
    return sampler.remove([3, 5]), queries


def test_files(fitted, tmp_path):
    sampler, queries = fitted
    path = tmp_path / "sampler.npz"
    sampler.save(path)
    loaded = LSHSampler.load(path)
    assert loaded.hasher == sampler.hasher
    assert_same(loaded, sampler, queries)
    X, _ = clustered(40, 6, 1.0, seed=9)
    weights = None if not sampler._weighted else np.ones(40)
    assert_same(loaded.partial_fit(X, weights), sampler.partial_fit(X, weights), queries)


def saved(**options):
    X, _ = clustered(40, 6, 1.0)
    file = io.BytesIO()
    LSHSampler(FAMILIES["hadamard"](0)).fit(X, **options).save(file)
    file.seek(0)
    return file


def edit(part, **changes):
    """For `changed`: of the header, its hasher or the arrays; a None takes an entry out."""

    def apply(header, arrays):
        of = {"header": header, "hasher": header["hasher"], "arrays": arrays}[part]
        of.update(changes)
        for name in [name for name, x in of.items() if x is None]:
            del of[name]

    return apply


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("header", {"version": 2}, "it has version 2, this lshkit reads up to 1"),
        ("header", {"version": None}, "version must be an integer >= 1, got None"),
        ("header", {"kind": "LSHKernelDensity"}, "it holds a LSHKernelDensity"),
        ("header", {"n_rows": None}, "'n_rows' is missing"),
        ("header", {"n_rows": -1}, "n_rows must be an integer >= 0"),
        ("header", {"n_rows": 41}, "rows must be float32 or float64 (41, 6), got float64 (40, 6)"),
        ("header", {"weighted": True}, "there is no array 'weights'"),
        ("header", {"next": 39}, "indices must increase"),
        ("header", {"next": 2**63}, "next must be an integer from 0 to"),
        ("header", {"next": 2**63 - 1}, "next must be an integer from 0 to"),
        ("header", {"hasher": 3}, "is no whole file"),
        ("header", {"hasher": []}, "hasher must be a dict"),
        ("header", {"arrays": []}, "arrays must be a dict, got []"),
        ("header", {"arrays": {"rows": "x"}}, "rows must be [type, shape], got 'x'"),
        ("header", {"arrays": {"rows": ["<f8", 3]}}, "rows must be [type, shape]"),
        ("hasher", {"family": "Unknown"}, "family must be one of"),
        ("hasher", {"family": "Hyperplane"}, "parameters must be"),
        ("hasher", {"family": "RandomBinning"}, "array 'hasher."),
        ("hasher", {"n_bits": None}, "must have 'n_bits'"),
        ("hasher", {"n_bits": 2**40}, "n_bits must be an integer from 1 to"),
        ("hasher", {"n_hashes": 2**40}, "codes must be"),
        ("arrays", {"rows": None}, "there is no array 'rows'"),
        ("arrays", {"other": np.zeros(3)}, "there is an unknown array 'other'"),
        ("arrays", {"hasher.scales": np.zeros(3)}, "there is an unknown array 'hasher.scales'"),
        ("arrays", {"rows": np.zeros((3, 6))}, "rows must be float32 or float64 (40, 6)"),
        ("arrays", {"rows": np.full((40, 6), np.nan)}, "rows must be finite"),
        ("arrays", {"rows": np.zeros((40, 6))}, "rows must have no row of zeros"),
        ("arrays", {"codes": np.zeros((40, 4), np.uint16)}, "codes must be uint8 below 32"),
        ("arrays", {"codes": np.full((40, 4), 32, np.uint8)}, "codes must be uint8 below 32"),
        ("arrays", {"indices": np.zeros(40, np.int64)}, "indices must increase"),
        ("arrays", {"weights": np.ones(40)}, "there is an unknown array 'weights'"),
    ],
)
def test_files_with_other_contents(part, changes, message):
    bad = changed(saved(), edit(part, **changes))
    error = attempt(LSHSampler.load, bad, 2**18)
    assert isinstance(error, ValueError) and message in str(error), error


def test_files_with_bad_weights():
    bad = changed(saved(weights=np.ones(40)), edit("arrays", weights=-np.ones(40)))
    with pytest.raises(ValueError, match="weights must be finite and >= 0"):
        LSHSampler.load(bad)
    huge = changed(saved(weights=np.ones(40)), edit("arrays", weights=np.full(40, 1e308)))
    with pytest.raises(ValueError, match="weights must have a finite sum"):
        LSHSampler.load(huge)


def test_weights_whose_sum_no_file_could_hold():
    rows, weights = np.random.default_rng(0).normal(size=(10, 6)), np.full(10, 1e307)
    sampler = LSHSampler(FastHadamard(6, 5, 4, seed=0)).fit(rows, weights)
    with pytest.raises(ValueError, match="weights must have a finite sum with those before"):
        sampler.partial_fit(rows, weights)
    assert sampler.n_rows == 10


def test_bytes_do_not_tell_how_rows_came():
    rows, weights = np.random.default_rng(0).normal(size=(40, 6)), np.arange(1.0, 41)
    hasher = FastHadamard(6, 5, 4, seed=0)
    whole = LSHSampler(hasher).fit(rows, weights).to_bytes()
    parts = LSHSampler(hasher).fit(rows[:7], weights[:7]).partial_fit(rows[7:], weights[7:])
    assert parts.to_bytes() == whole == LSHSampler.from_bytes(whole).to_bytes()


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_headers_of_any_contents(data):
    """Whole otherwise: a sampler that can be asked, or a ValueError; nothing large is allocated."""
    bad = changed(saved(), lambda header, arrays: put_anything(data, header))
    sampler = attempt(LSHSampler.load, bad, 2**20)
    if not isinstance(sampler, ValueError):
        sampler.sample(np.ones((2, 6)), seed=0)


class Spy:
    def __reduce__(self):
        return (print, ("pickle was run",))


def test_files_with_pickles_run_nothing(capsys):
    array = io.BytesIO()
    np.save(array, np.array([Spy()], object), allow_pickle=True)
    archived = io.BytesIO()
    with zipfile.ZipFile(archived, "w") as archive:
        archive.writestr("header.json", saved().getvalue()[61:])
        archive.writestr("rows.npy", array.getvalue())
    for contents in (archived.getvalue(), pickle.dumps(Spy()), array.getvalue()):
        with pytest.raises(ValueError, match="is no whole file of LSHSampler"):
            LSHSampler.load(io.BytesIO(contents))
    assert capsys.readouterr().out == ""
