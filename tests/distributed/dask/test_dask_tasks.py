"""Arrays that come out of a message unaligned, as Dask's do, are aligned for the core."""

import pickle
from typing import NamedTuple

import numpy as np
import pytest

from lshkit.hashing import FastHadamard
from lshkit.kde import LSHKernelDensity
from lshkit.sampling import LSHSampler

pytest.importorskip("distributed.client")
from lshkit.distributed.dask.tasks import Aligned, aligned  # noqa: E402


def unaligned(x):
    """x as it is unpickled from buffers that begin at odd places of one message."""
    buffers = []
    data = pickle.dumps(x, protocol=5, buffer_callback=buffers.append)
    message, places = bytearray(1), []
    for buffer in buffers:
        message += b"\0" * (1 - len(message) % 2)
        places.append((len(message), buffer.raw().nbytes))
        message += buffer.raw()
    view = memoryview(bytes(message))
    return pickle.loads(data, buffers=[view[a : a + size] for a, size in places])


class Pair(NamedTuple):
    x: np.ndarray
    y: int


def test_containers():
    X = np.arange(12.0).reshape(4, 3)
    moved = unaligned({"a": [X, 1], "b": (X, "x"), "c": Pair(X, 2)})
    assert not moved["a"][0].flags.aligned
    found = aligned(moved, {})
    for x in (found["a"][0], found["b"][0], found["c"].x):
        assert x.flags.aligned and x is found["a"][0]  # one copy of one array
        np.testing.assert_array_equal(x, X)
    assert found["c"].y == 2 and found["b"][1] == "x"
    assert aligned(found, {}) is found


def test_estimators_and_samplers():
    X = np.random.default_rng(0).normal(size=(3000, 5))
    sketch = LSHKernelDensity("angular", algorithm="bucket_sum", random_state=0).fit(X)
    sampler = LSHSampler(FastHadamard(5, 4, 4, seed=0)).fit(X)
    sampler.tables  # noqa: B018
    moved = unaligned(sketch)
    assert not moved._kde_sketch.table.table.flags.aligned
    ask = Aligned(LSHKernelDensity.kernel_mean)
    np.testing.assert_array_equal(ask(moved, unaligned(X)), sketch.kernel_mean(X))
    assert moved._kde_sketch.table.table.flags.aligned
    moved = unaligned(sampler)
    with pytest.raises(ValueError, match="not aligned"):
        moved.sample(X[:3], seed=0)
    for mine, wanted in zip(
        Aligned(LSHSampler.sample)(moved, X[:3]), sampler.sample(X[:3]), strict=True
    ):
        assert mine.shape == wanted.shape
    for mine, wanted in zip(Aligned(LSHSampler.union)(moved, X), sampler.union(X), strict=True):
        np.testing.assert_array_equal(mine, wanted)


@pytest.mark.parametrize("n, tasks", [(1, 1), (8, 1), (9, 3), (1000, 144)])
def test_a_tree_has_the_tasks_that_the_page_counts(n, tasks):
    """Of n parts; none has more than 8 inputs, and they are added in order."""
    from lshkit.distributed.dask.blocks import FAN_IN, tree
    from lshkit.distributed.dask.tasks import task

    part = task(lambda i: [i])

    def add(parts):
        assert len(parts) <= FAN_IN
        return sum(parts, [])

    whole = tree([part(i) for i in range(n)], add)
    added = [key for key in dict(whole.__dask_graph__()) if str(key).startswith("add-")]
    assert len(added) == tasks
    if n <= 9:
        assert whole.compute(scheduler="sync") == list(range(n))
