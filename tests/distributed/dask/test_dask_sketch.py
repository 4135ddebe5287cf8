"""Sketches on Dask: the same bits as one fit, for any chunking; and what cannot be merged."""

import numpy as np
import pytest
from sklearn.base import clone

from lshkit.kde import LSHKernelDensity

pytest.importorskip("dask.array")
from cases.dask_arrays import blocks  # noqa: E402

from lshkit.distributed import DaskKernelDensity  # noqa: E402

RNG = np.random.default_rng(0)
X, WEIGHTS = RNG.normal(size=(5000, 8)), RNG.uniform(0.01, 3, size=5000)
WEIGHTS[:600] = 0  # whole blocks of them
ANGULAR = {"kernel": "angular", "algorithm": "bucket_sum", "n_bits": 6, "random_state": 3}
LAPLACIAN = {**ANGULAR, "kernel": "laplacian", "bandwidth": 4.0, "n_bits": 10}
FORGETTING = "sliding_window", "sliding_window_error", "half_life"
CHUNKS = (5000,), (500,) * 10, (1, 0, 4999), (1203, 97, 2000, 0, 1700), (131,) * 38 + (22,)


def bits(density):
    sketch = density._kde_sketch
    return sketch.table.table.tobytes(), sketch.table.count, sketch.total


@pytest.mark.parametrize("parameters", [ANGULAR, LAPLACIAN], ids=["angular", "laplacian"])
@pytest.mark.parametrize("chunks", CHUNKS, ids=[str(len(x)) for x in CHUNKS])
def test_any_chunking_gives_the_bits_of_one_fit(parameters, chunks, client):
    local = LSHKernelDensity(**parameters).fit(X, sample_weight=WEIGHTS)
    density = DaskKernelDensity(**parameters, client=client)
    density.fit(blocks(X, chunks), sample_weight=blocks(WEIGHTS, 1234))
    assert bits(density.to_local()) == bits(local)
    assert density.n_samples_seen_ == 5000 and density.n_shards_ == 0
    queries = blocks(X[:100], 30)
    mean, std = density.kernel_mean(queries, return_std=True)
    assert mean.chunks == queries.chunks[:1]
    wanted = local.kernel_mean(X[:100], return_std=True)
    np.testing.assert_array_equal(client.gather(client.compute([mean, std])), wanted)


def test_partial_fit_adds_blocks(client):
    local = LSHKernelDensity(**ANGULAR).fit(X)
    density = DaskKernelDensity(**ANGULAR, client=client).fit(blocks(X[:3000], 700))
    before = bits(density.to_local())
    assert density.partial_fit(blocks(X[3000:], 450)) is density
    assert bits(density.to_local()) == bits(local) != before
    nothing = blocks(0 * WEIGHTS, 999)
    density.partial_fit(blocks(X, 999), sample_weight=nothing)  # beside others they may be 0
    np.testing.assert_array_equal(density.to_local().kernel_mean(X[:50]), local.kernel_mean(X[:50]))
    with pytest.raises(ValueError, match="algorithm must be 'bucket_sum'"):
        density.set_params(algorithm="auto").partial_fit(blocks(X, 700))


def test_float32_and_local_parameters(client):
    rows = X.astype(np.float32)
    density = DaskKernelDensity(**ANGULAR, client=client).fit(blocks(rows, 999))
    local = density.to_local()
    assert local.get_params() == LSHKernelDensity(**ANGULAR).get_params()
    mean = density.kernel_mean(blocks(rows, 999))
    assert mean.dtype == np.float32
    np.testing.assert_array_equal(client.compute(mean).result(), local.kernel_mean(rows))
    density.set_params(normalize=False)
    assert density.score(blocks(rows, 999)) == pytest.approx(
        local.set_params(normalize=False).score(rows)
    )
    assert density.to_local().get_params() == local.get_params()


def test_random_state_none_is_drawn_once(client):
    parameters = ANGULAR | {"random_state": None}
    density = DaskKernelDensity(**parameters, client=client).fit(blocks(X, 999))
    seed = density.to_local().random_state
    assert isinstance(seed, int)
    again = LSHKernelDensity(**parameters).set_params(random_state=seed).fit(X)
    assert bits(again) == bits(density.to_local())
    assert density.fit(blocks(X, 999)).to_local().random_state != seed
    state = np.random.RandomState(7)
    density.set_params(random_state=state).fit(blocks(X, 999))
    assert density.to_local().random_state == np.random.RandomState(7).randint(2**31 - 1)


@pytest.mark.parametrize("rule", ["scott", "silverman"])
def test_rules_for_the_bandwidth(rule, client):
    parameters = LAPLACIAN | {"bandwidth": rule}
    weighted = {"sample_weight": WEIGHTS}
    local = LSHKernelDensity(**parameters).fit(X, **weighted)
    density = DaskKernelDensity(**parameters, client=client)
    density.fit(blocks(X, 999), sample_weight=blocks(WEIGHTS, 999))
    assert bits(density.to_local()) == bits(local)
    assert density.to_local().bandwidth == rule
    np.testing.assert_array_equal(density.bandwidth_, local.bandwidth_)


def test_a_rule_for_more_rows_than_it_looks_at(client, monkeypatch):
    from lshkit.distributed.dask import widths

    local = LSHKernelDensity(bandwidth="scott").fit(X[:4000], sample_weight=WEIGHTS[:4000])
    monkeypatch.setattr(widths, "N_ROWS", 2000)
    found = [
        DaskKernelDensity(**LAPLACIAN, client=client)
        .set_params(bandwidth="scott")
        .fit(blocks(X[:4000], n), sample_weight=blocks(WEIGHTS[:4000], n))
        .bandwidth_
        for n in (300, 1111)
    ]
    np.testing.assert_array_equal(*found)
    np.testing.assert_allclose(found[0], local.bandwidth_, rtol=0.1)  # of 2000 rows: 1 / sqrt(2n)


def test_dataframes(client):
    pd, dd = pytest.importorskip("pandas"), pytest.importorskip("dask.dataframe")
    frame = pd.DataFrame(X, columns=list("abcdefgh"))
    series = pd.Series(WEIGHTS)
    parts = dd.from_pandas(frame, npartitions=7)
    density = DaskKernelDensity(**ANGULAR, client=client)
    density.fit(parts, sample_weight=dd.from_pandas(series, npartitions=7))
    local = LSHKernelDensity(**ANGULAR).fit(frame, sample_weight=WEIGHTS)
    assert bits(density.to_local()) == bits(local)
    assert list(density.feature_names_in_) == list(density.to_local().feature_names_in_)
    mean = density.kernel_mean(parts)
    assert np.isnan(mean.shape[0])  # Dask does not know it
    np.testing.assert_array_equal(client.compute(mean).result(), local.kernel_mean(frame))
    with pytest.raises(ValueError, match="feature names"):
        client.compute(density.kernel_mean(parts.rename(columns={"a": "z"}))).result()
    with pytest.raises(ValueError, match="7 partitions of X, got 3"):
        density.fit(parts, sample_weight=dd.from_pandas(series, npartitions=3))
    with pytest.raises(TypeError, match="sample_weight must be a Dask series"):
        density.fit(parts, sample_weight=series)
    for call in (density.fit(parts).kernel_mean, density.fit):
        with pytest.raises(TypeError, match="X must be a Dask array or dataframe, got Series"):
            call(parts["a"])
    dates = frame.assign(b=pd.Timestamp("2020-01-01"))
    for given, column in ((dates, "'b' of dtype datetime64"), (frame.astype(str), "'a' of dtype")):
        with pytest.raises(TypeError, match=f"X must hold real numbers, got column {column}"):
            density.fit(dd.from_pandas(given, npartitions=7))


def test_merge(client):
    local = LSHKernelDensity(**ANGULAR).fit(X)
    density = DaskKernelDensity(**ANGULAR, client=client).fit(blocks(X[:2000], 300))
    elsewhere = LSHKernelDensity(**ANGULAR).fit(X[2000:]).to_bytes()
    queries = blocks(X[:10], 10)
    density.kernel_mean(queries)  # the sketch is on the workers
    density.merge(LSHKernelDensity.from_bytes(elsewhere))
    assert bits(density.to_local()) == bits(local) and density.n_samples_seen_ == 5000
    mean = client.compute(density.kernel_mean(queries)).result()
    np.testing.assert_array_equal(mean, local.kernel_mean(X[:10]))
    other = DaskKernelDensity(**ANGULAR, client=client).set_params(random_state=4)
    with pytest.raises(ValueError, match="different hash functions cannot be merged"):
        density.merge(other.fit(blocks(X, 2000)))
    assert bits(density.to_local()) == bits(local)
    with pytest.raises(ValueError, match="sketches can only be merged with sketches"):
        density.merge(LSHKernelDensity().fit(X[:10]))
    with pytest.raises(TypeError, match="other must be a DaskKernelDensity"):
        density.merge(X)


@pytest.mark.parametrize(
    "parameters, message",
    [
        ({"kernel": "laplacian", "bandwidth": "likelihood"}, "'likelihood' sees all rows at once"),
        ({"kernel": "laplacian", "bandwidth": "neighbors"}, "'neighbors' sees all rows at once"),
        ({"bandwidth": "1"}, "one for each feature, 'scott' or 'silverman', got '1'"),
        ({"bandwidth": 2.0}, "bandwidth must be 1.0 for the angular kernel"),
        ({"kernel": "gaussian"}, "kernel must be one of"),
        ({"random_state": "x"}, "random_state must be None, an int .*, got 'x'"),
        ({"random_state": -1}, "random_state must be None, an int .*, got -1"),
        ({"atol": 10**400, "algorithm": "auto"}, "atol must be .*, got an integer of 1329 bits"),
    ],
)
def test_parameters_that_cannot_be(parameters, message, client):
    density = DaskKernelDensity(**ANGULAR | parameters, client=client)
    with pytest.raises(ValueError, match=message):
        density.fit(blocks(X, 999))


def test_sketches_that_forget_have_no_parameters():
    for name in FORGETTING:
        with pytest.raises(TypeError, match=name):
            DaskKernelDensity(**ANGULAR, **{name: 0.1})
        with pytest.raises(ValueError, match=f"Invalid parameter '{name}'"):
            DaskKernelDensity(**ANGULAR).set_params(**{name: 0.1})


@pytest.mark.parametrize(
    "parameters",
    [{}, {"algorithm": "auto"}, {"algorithm": "brute", "kernel": "gaussian", "bandwidth": "scott"}],
    ids=["sketch", "auto", "rule"],
)
def test_blocks_that_are_shorter_than_chunks_say(parameters, client):
    density = DaskKernelDensity(**ANGULAR | parameters, client=client)
    short = blocks(X, 999).map_blocks(lambda x: x[:600], meta=X[:0])
    for weights in (None, blocks(WEIGHTS + 1, 999)):
        with pytest.raises(ValueError, match="X must have .*: 999 in this block, got 600"):
            density.fit(short, sample_weight=weights)


@pytest.mark.parametrize("algorithm", ["bucket_sum", "auto"])
def test_rows_that_cannot_be(algorithm, client):
    density = DaskKernelDensity(**ANGULAR, client=client).set_params(algorithm=algorithm)
    rows = blocks(X, 999)
    weights = blocks(WEIGHTS, 999)
    bad = X.copy()
    bad[4321, 2] = np.nan
    zero = X.copy()
    zero[4321] = 0
    unknown = rows[rows[:, 0] > 0]
    for error, given, weight, message in [
        (TypeError, X, None, "X must be a Dask array or dataframe, got ndarray"),
        (TypeError, rows.astype(str), None, "X must hold real numbers"),
        (TypeError, rows, WEIGHTS, "sample_weight must be a Dask array like X"),
        (ValueError, rows[:, 0], None, r"X must have shape \(n_rows, n_features\)"),
        (ValueError, rows.rechunk((999, 4)), None, r"X must be chunked by rows alone.*\(4, 4\)"),
        (ValueError, unknown, None, r"unknown chunk sizes.*X.compute_chunk_sizes\(\)"),
        (ValueError, rows, weights[1:], r"sample_weight must have shape \(5000,\)"),
        (ValueError, rows, weights[rows[:, 0] > 0], "sample_weight must have shape"),
        (TypeError, rows, 1j * weights, "sample_weight must hold real numbers, got dtype complex"),
        (ValueError, rows, 0 * weights, "sample_weight must not be all zero"),
        (ValueError, rows, -weights, "sample_weight must be >= 0"),
        (ValueError, rows[:0], None, "X must have at least one row"),
        (ValueError, blocks(bad, 999), None, "NaN"),
        (ValueError, blocks(zero, 999), None, "a row of zeros, which has no angle"),
    ]:
        with pytest.raises(error, match=message):
            density.fit(given, sample_weight=weight)
        assert not hasattr(density, "n_samples_seen_")
    density.fit(rows)
    with pytest.raises(ValueError, match="X has 7 features, but .* is expecting 8"):
        density.partial_fit(rows[:, :7])
    with pytest.raises(ValueError, match="sample_weight must not be all zero"):
        density.fit(rows[:, :7], sample_weight=0 * weights)
    assert density.n_samples_seen_ == 5000
    with pytest.raises(ValueError, match="X has 7 features"):
        density.kernel_mean(rows[:, :7])
    with pytest.raises(TypeError, match="X must be a Dask array"):
        density.kernel_mean(X)
    with pytest.raises(ValueError, match="angular kernel has no normaliser"):
        density.score_samples(rows)


@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_weights_that_would_swallow_a_row_of_weight_1(chunk, client):
    density = DaskKernelDensity(**ANGULAR, client=client)
    weights = blocks(np.array([1.0, 2.0**53 - 3, 1, 1]), chunk)
    with pytest.raises(ValueError, match=r"must stay below 2\^53, would be 9007199254740992"):
        density.fit(blocks(X[:4], chunk), sample_weight=weights)


def test_no_client_no_workers(client):
    from distributed import Client, LocalCluster

    rows = blocks(X, 999)
    with pytest.raises(ValueError, match="client must be given"):
        DaskKernelDensity(**ANGULAR).fit(rows)
    with pytest.raises(TypeError, match="client must be a dask.distributed.Client, got str"):
        DaskKernelDensity(**ANGULAR, client="scheduler:8786").fit(rows)
    options = {"processes": False, "dashboard_address": ":0"}
    with LocalCluster(n_workers=0, **options) as cluster:
        with Client(cluster, set_as_default=False) as lonely:
            with pytest.raises(ValueError, match="client must have workers"):
                DaskKernelDensity(**ANGULAR, client=lonely).fit(rows)
            cluster.scale(1)
            lonely.wait_for_workers(1)
            density = DaskKernelDensity(algorithm="brute", client=lonely).fit(rows)
    with pytest.raises(ValueError, match="client must be connected to a scheduler, it is closed"):
        DaskKernelDensity(**ANGULAR, client=lonely).fit(rows)
    with pytest.raises(ValueError, match="client must be connected to a scheduler, it is closed"):
        density.client = client  # which has none of the rows
        density.kernel_mean(rows)


def test_contract_of_scikit_learn(client):
    import pickle

    from sklearn.exceptions import NotFittedError

    density = DaskKernelDensity(**ANGULAR, client=client)
    local = LSHKernelDensity(**ANGULAR)
    assert LSHKernelDensity(**density.get_params()).get_params() == local.get_params()
    of_local = local.get_params().keys() - density.get_params().keys()
    assert of_local == set(FORGETTING) and density.get_params().keys() <= local.get_params().keys()
    copied = clone(density)
    assert copied.client is client and copied.get_params() == density.get_params()
    assert repr(copied).startswith("DaskKernelDensity(algorithm='bucket_sum'")
    assert pickle.loads(pickle.dumps(density)).get_params() == density.get_params()
    for query in (density.score_samples, density.kernel_mean):
        with pytest.raises(NotFittedError):
            query(blocks(X, 999))
    with pytest.raises(NotFittedError):
        density.to_local()
    density.fit(blocks(X, 999))
    with pytest.raises(TypeError, match=r"pickle to_local\(\), or call to_local\(\).save"):
        pickle.dumps(density)
