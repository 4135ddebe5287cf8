"""Estimators and samplers in memory: the archive that `save` writes, and nothing else is read."""

import io
import pickle

import numpy as np
import pytest

from lshkit.hashing import FastHadamard
from lshkit.kde import LSHKernelDensity, LSHOutlierDetector
from lshkit.sampling import LSHSampler

X = np.random.default_rng(0).normal(size=(300, 4))
OBJECTS = {
    "sketch": LSHKernelDensity("angular", algorithm="bucket_sum", n_bits=3, random_state=0).fit(X),
    "rows": LSHKernelDensity(random_state=0).fit(X),
    "detector": LSHOutlierDetector(random_state=0).fit(X),
    "sampler": LSHSampler(FastHadamard(4, 3, 5, seed=0), seed=0).fit(X),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_what_went_in_comes_out(name):
    given = OBJECTS[name]
    data = given.to_bytes()
    file = io.BytesIO()
    given.save(file)
    assert data == file.getvalue()
    for wrapped in (data, bytearray(data), memoryview(data)):
        assert type(given).from_bytes(wrapped).to_bytes() == data


@pytest.mark.parametrize("name", OBJECTS)
def test_anything_else_is_refused(name):
    given, data = OBJECTS[name], OBJECTS[name].to_bytes()
    for other in (
        data[:-1],
        b"",
        pickle.dumps(given),
        data.replace(b"kind", b"kinb"),
    ):
        with pytest.raises(ValueError, match=f"^data is no whole file of {type(given).__name__}"):
            type(given).from_bytes(other)
    with pytest.raises(TypeError, match="data must be bytes, got str"):
        type(given).from_bytes("sketch.npz")
    others = {type(x) for x in OBJECTS.values()} - {type(given)}
    for kind in others:
        with pytest.raises(ValueError, match="it holds a"):
            kind.from_bytes(data)


def test_sketches_of_other_processes_merge():
    sketch, seed = OBJECTS["sketch"], {"random_state": 0}
    parts = [
        LSHKernelDensity("angular", algorithm="bucket_sum", n_bits=3, **seed).fit(x).to_bytes()
        for x in (X[:100], X[100:])
    ]
    first, second = map(LSHKernelDensity.from_bytes, parts)
    assert first.merge(second).to_bytes() == sketch.to_bytes()
