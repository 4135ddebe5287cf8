"""Files of LSHSampler: what was saved comes back, and nothing else is loaded."""

import io
import pickle
import re
import zipfile

import numpy as np
import pytest
from cases.sampling import FAMILIES, assert_same, clustered

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


def changed(path, target, **changes):
    with np.load(path) as archive:
        arrays = dict(archive) | changes
    np.savez(target, **{name: x for name, x in arrays.items() if x is not None})


def test_files_that_are_not_whole(tmp_path):
    X, _ = clustered(40, 6, 1.0)
    path, bad = tmp_path / "sampler.npz", tmp_path / "bad.npz"
    LSHSampler(FAMILIES["hadamard"](0)).fit(X).save(path)
    whole = path.read_bytes()
    for size in [0, 1, 100, *range(500, len(whole), len(whole) // 9), len(whole) - 1]:
        bad.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="bad.npz is no"):
            LSHSampler.load(bad)
    entry = whole.index(b"PK\1\2")  # of the archive's directory
    for at in (entry + 8, entry + 10):  # encrypted, compressed: so says one flipped bit
        bad.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ValueError, match="bad.npz is no whole"):
            LSHSampler.load(bad)
    at = whole.index(X[7].tobytes())
    bad.write_bytes(whole[:at] + b"\0\0" + whole[at + 2 :])
    with pytest.raises(ValueError, match="bad.npz is no whole"):
        LSHSampler.load(bad)
    with pytest.raises(FileNotFoundError):
        LSHSampler.load(tmp_path / "missing.npz")
    with pytest.raises(TypeError, match="not int"):
        LSHSampler.load(3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": np.array(2)}, "has version 2, this lshkit reads up to 1"),
        ({"version": np.array(0)}, "is damaged: version must be 1 or more, got 0"),
        ({"version": None}, "has no version"),
        ({"kind": np.array("something")}, "is no file of an LSHSampler"),
        ({"rows": None}, "is damaged: 'rows'"),
        ({"rows": np.zeros((3, 6))}, "is damaged: rows must be"),
        ({"rows": np.full((40, 6), np.nan)}, "is damaged: rows must be finite"),
        ({"codes": np.zeros((40, 4), np.uint16)}, "is damaged: codes must be uint8 (40, 4)"),
        ({"indices": np.zeros(40, np.int64)}, "is damaged: indices must increase"),
        ({"next": np.array(39)}, "is damaged: indices must increase"),
        ({"weights": -np.ones(40)}, "is damaged: weights must be finite and >= 0"),
        ({"hasher/family": np.array("Unknown")}, "is damaged: family must be one of"),
        ({"hasher/n_bits": None}, "is damaged:"),
    ],
)
def test_files_with_other_contents(tmp_path, changes, message):
    X, _ = clustered(40, 6, 1.0)
    path, bad = tmp_path / "sampler.npz", tmp_path / "bad.npz"
    LSHSampler(FAMILIES["hadamard"](0)).fit(X).save(path)
    changed(path, bad, **changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        LSHSampler.load(bad)


def test_archives_of_other_things(tmp_path):
    X, _ = clustered(40, 6, 1.0)
    path = tmp_path / "sampler.npz"
    LSHSampler(FAMILIES["hadamard"](0)).fit(X).save(path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("codes", b"text")  # for an array of this name
    with pytest.raises(ValueError, match="is no file of an LSHSampler"):
        LSHSampler.load(path)


class Spy:
    def __reduce__(self):
        return (print, ("pickle was run",))


def test_files_with_pickles_run_nothing(tmp_path, capsys):
    bad = tmp_path / "bad.npz"
    array = io.BytesIO()
    np.save(array, np.array([Spy()], object), allow_pickle=True)
    with zipfile.ZipFile(bad, "w") as archive:
        archive.writestr("kind.npy", array.getvalue())
    for contents in (None, pickle.dumps(Spy()), array.getvalue()):
        if contents is not None:
            bad.write_bytes(contents)
        with pytest.raises(ValueError, match="bad.npz is no"):
            LSHSampler.load(bad)
    np.save(bad.with_suffix(".npy"), np.ones(3))
    with pytest.raises(ValueError, match="is no file of an LSHSampler"):
        LSHSampler.load(bad.with_suffix(".npy"))
    assert capsys.readouterr().out == ""
