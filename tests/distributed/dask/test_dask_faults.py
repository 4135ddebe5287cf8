"""A worker that is killed loses nothing: what it held is computed again, with the same bits."""

import os
import signal

import numpy as np
import pytest

from lshkit.kde import LSHKernelDensity

da = pytest.importorskip("dask.array")
from cases.dask_arrays import compute  # noqa: E402

from lshkit.distributed import DaskKernelDensity, DaskLSHSampler  # noqa: E402
from lshkit.hashing import FastHadamard  # noqa: E402

N, D, CHUNK = 24_000, 8, 2000
NO_ROWS = np.empty((0, D))  # Dask calls no function to see what it returns
SKETCH = {"kernel": "angular", "algorithm": "bucket_sum", "n_bits": 6, "random_state": 0}


def rows_of(block_info):
    """A block of rows, as a function of its place."""
    begin, end = block_info[None]["array-location"][0]
    return np.random.default_rng(begin).normal(size=(end - begin, D))


def dying(block, marker):
    """The block; kills the worker of the first that finds no marker."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return block
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def X():
    return da.map_blocks(rows_of, chunks=((CHUNK,) * (N // CHUNK), (D,)), meta=NO_ROWS)


@pytest.fixture(scope="module")
def processes():
    import dask
    from distributed import Client, LocalCluster

    # A cluster gives a lost worker up if none is there again after 15 s: a busy machine takes more.
    timeout = dask.config.set({"distributed.deploy.lost-worker-timeout": "120s"})
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
    with timeout, LocalCluster(processes=True, **options) as cluster:
        with Client(cluster, set_as_default=False) as client:
            yield client


def kill_one(client):
    client.wait_for_workers(2, timeout=120)
    os.kill(client.submit(os.getpid, pure=False).result(), signal.SIGKILL)


def test_a_worker_lost_in_fit_and_in_score_samples(X, processes, client, tmp_path):
    local = LSHKernelDensity(**SKETCH).fit(X.compute(scheduler="sync"))
    deadly = X.map_blocks(dying, str(tmp_path / "fit"), meta=NO_ROWS)
    sketch = DaskKernelDensity(**SKETCH, client=processes).fit(deadly)
    assert (tmp_path / "fit").exists()
    mine, wanted = (x._kde_sketch.table.table for x in (sketch.to_local(), local))
    np.testing.assert_array_equal(mine, wanted)

    processes.wait_for_workers(2, timeout=120)
    queries = X[:6000]
    deadly = queries.map_blocks(dying, str(tmp_path / "score"), meta=NO_ROWS)
    mean = compute(processes, sketch.kernel_mean(deadly))[0]
    assert (tmp_path / "score").exists()
    np.testing.assert_array_equal(mean, local.kernel_mean(queries.compute(scheduler="sync")))

    # Rows that stay on workers: the other cluster, of threads, has lost none.
    steady = DaskKernelDensity(random_state=0, client=client).fit(X)
    wanted = compute(client, *steady.score_samples(queries, return_std=True))
    deadly = X.map_blocks(dying, str(tmp_path / "rows"), meta=NO_ROWS)
    density = DaskKernelDensity(random_state=0, client=processes).fit(deadly)
    kill_one(processes)
    got = compute(processes, *density.score_samples(queries, return_std=True))
    np.testing.assert_array_equal(got, wanted)
    assert density.report_ == steady.report_


def test_a_sampler_loses_a_worker(X, processes):
    sampler = DaskLSHSampler(FastHadamard(D, 4, 4, seed=0), client=processes).fit(X)
    query = np.ones((3, D))
    wanted = sampler.sample(query, 50, seed=0)
    kill_one(processes)
    np.testing.assert_array_equal(sampler.sample(query, 50, seed=0), wanted)
