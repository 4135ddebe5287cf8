"""A forked child of a process that has run in parallel must not wait for threads it has not got."""

import os
import signal

import numpy as np
import pytest
from cases.hashing import HYPERPLANE, N_BITS, N_HASHES, hash_rows, rows_and_planes

from lshkit import _C

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture(scope="module")
def arrays():
    return rows_and_planes(2000)


def test_forked_child_gives_the_same_codes(arrays):
    wanted = hash_rows(*arrays, threads=2)
    threads = 1 if _C.thread_backend() == "openmp" else _C.max_threads()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(30)  # a child that hangs is killed
            equal = np.array_equal(hash_rows(*arrays, threads=2), wanted)
            status = 0 if equal and _C.max_threads() == threads else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert np.array_equal(hash_rows(*arrays, threads=2), wanted)  # the parent keeps its threads


def test_data_loader_worker(arrays):
    torch = pytest.importorskip("torch")
    x, planes = map(torch.from_numpy, arrays)

    class Codes(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, i):
            codes = torch.empty((1, *x.shape[1:3], N_HASHES), dtype=torch.uint8)
            _C.hash(x[i : i + 1], planes, HYPERPLANE, N_BITS, N_HASHES, codes, 2)
            return codes[0]

    wanted = hash_rows(*arrays, threads=2)
    loader = torch.utils.data.DataLoader(
        Codes(), batch_size=2, num_workers=1, timeout=30, multiprocessing_context="fork"
    )
    (batch,) = loader
    assert np.array_equal(batch.numpy(), wanted)
