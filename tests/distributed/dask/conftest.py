"""A Dask cluster in this process, for all tests of a pytest worker."""

import pytest


@pytest.fixture(scope="session")
def client():
    """Of two workers with one thread each. Not the default one: tests must pass it on."""
    # Without the package, "distributed" alone would be found: as a folder of tests.
    pytest.importorskip("distributed.client")
    from distributed import Client, LocalCluster

    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
    with LocalCluster(processes=False, **options) as cluster:
        with Client(cluster, set_as_default=False) as client:
            yield client
