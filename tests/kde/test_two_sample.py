"""two_sample_test: its statistic, its level, its power, and what it refuses."""

import math
import tracemalloc

import numpy as np
import pytest
from cases.kde import clustered
from scipy.spatial.distance import pdist

from lshkit.kde import two_sample, two_sample_test
from lshkit.kde.geometry import Geometry
from lshkit.kde.sketch import Sketch
from lshkit.reference import log_kernel

CASES = [
    ("laplacian", "brute"),
    ("gaussian", "brute"),
    ("angular", "brute"),
    ("laplacian", "bucket_sum"),
    ("angular", "bucket_sum"),
]


def plain(kernel, n):
    """The U-statistic of a kernel matrix whose first n rows are X's."""
    m = len(kernel) - n
    off = kernel - np.diag(np.diag(kernel))
    within = off[:n, :n].sum() / (n * (n - 1)) + off[n:, n:].sum() / (m * (m - 1))
    return within - 2 * kernel[:n, n:].mean()


def samples(n=60, m=45, d=5, shift=0.5, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d)), rng.normal(shift, size=(m, d))


@pytest.mark.parametrize("kernel", ["laplacian", "gaussian", "angular"])
@pytest.mark.parametrize("bandwidth", ["median", 2.0, [1.0, 2.0, 0.5, 4.0, 1.0]])
def test_exact_statistic_is_the_formula(kernel, bandwidth, monkeypatch):
    monkeypatch.setattr(two_sample, "BLOCK", 32)  # several blocks
    X, Y = samples()
    if kernel == "angular" and bandwidth != "median":
        bandwidth = 1.0
    got = two_sample_test(X, Y, kernel=kernel, bandwidth=bandwidth, random_state=0)
    assert got.algorithm == "brute" and got.standard_error == 0 and got.kernel == kernel
    rows = np.r_[X, Y]
    matrix = np.exp(log_kernel(kernel, rows, rows, got.bandwidth, got.n_bits))
    assert got.statistic == pytest.approx(plain(matrix, len(X)), abs=1e-12)
    other = two_sample_test(Y, X, kernel=kernel, bandwidth=bandwidth)
    assert other.statistic == pytest.approx(got.statistic, abs=1e-12)
    count = (got.null_distribution >= got.statistic).sum()
    assert got.null_distribution.shape == (999,) and got.pvalue == (1 + count) / 1000


def test_median_bandwidth():
    X, Y = samples()
    rows = np.r_[X, Y]
    for kernel, metric in (("laplacian", "cityblock"), ("gaussian", "euclidean")):
        width = two_sample_test(X, Y, kernel=kernel, n_permutations=1).bandwidth
        assert width == pytest.approx(np.median(pdist(rows, metric)))
    angle = np.median(np.arccos(1 - pdist(rows, "cosine")))
    n_bits = two_sample_test(X, Y, kernel="angular", n_permutations=1).n_bits
    values = (1 - angle / np.pi) ** np.arange(1, 17)
    assert n_bits == 1 + np.argmin(abs(values - np.exp(-1)))


def test_the_width_is_nearest_also_between_one_bit_and_two():
    angle = (1 - 0.5034) * np.pi  # 0.5034 is farther from 1/e than its square
    rows = np.array([[1.0, 0.0], [np.cos(angle), np.sin(angle)]])
    result = two_sample_test(rows, rows, kernel="angular", n_permutations=1)
    assert result.n_bits == 2


@pytest.mark.parametrize("kernel", ["laplacian", "angular"])
def test_bucket_statistic_is_the_formula_of_equal_codes(kernel):
    X, Y = samples()
    rows, n = np.r_[X, Y], len(X)
    geometry = Geometry(kernel, 3, rows.mean(axis=0), np.full(5, 3.0))
    sketch = Sketch(geometry, 3, 4, seed=1)
    labels = two_sample._labels(len(rows), n, 5, np.random.default_rng(0))
    sums = two_sample._bucket_sums(sketch, rows, labels)
    got, mean_kernel = two_sample._statistics(*sums, n, len(rows) - n)
    codes = sketch.codes(geometry.scale(rows) if kernel == "angular" else rows)
    equal = (codes[:, None] == codes).astype(float)  # of each hash
    for label, statistics in zip(labels.T, got, strict=True):
        order = np.argsort(~label, kind="stable")
        wanted = [plain(equal[order][:, order, h], n) for h in range(4)]
        assert np.allclose(statistics, wanted, rtol=0, atol=1e-12)
    off = equal.mean(axis=2) - np.eye(len(rows))
    assert mean_kernel == pytest.approx(off.sum() / (len(rows) * (len(rows) - 1)))


def test_permuted_statistics_are_those_of_permuted_rows():
    X, Y = samples()
    rows, n = np.r_[X, Y], len(X)
    geometry = Geometry("gaussian", 1, np.zeros(5), np.ones(5))
    labels = two_sample._labels(len(rows), n, 6, np.random.default_rng(0))
    assert (labels.sum(axis=0) == n).all() and labels[:n, 0].all()
    got, _ = two_sample._statistics(*two_sample._exact_sums(geometry, rows, labels, 1), n, 45)
    matrix = np.exp(log_kernel("gaussian", rows, rows))
    for label, statistic in zip(labels.T, got[:, 0], strict=True):
        order = np.argsort(~label, kind="stable")
        assert statistic == pytest.approx(plain(matrix[order][:, order], n), abs=1e-12)


@pytest.mark.parametrize("kernel", ["laplacian", "angular"])
@pytest.mark.parametrize("data", ["normal", "clusters", "copies", "heavy"])
def test_buckets_are_unbiased_with_the_stated_error(kernel, data):
    rng = np.random.default_rng(0)
    X, Y = samples(200, 150)
    if data == "clusters":
        X, Y = clustered(200, 5, 8, n_queries=150)
    elif data == "copies":
        X, Y = X[rng.integers(5, size=200)], X[rng.integers(7, size=150)]
    elif data == "heavy":
        X, Y = rng.standard_t(1.5, size=(200, 5)), rng.standard_t(3, size=(150, 5))
    n_bits = 2 if kernel == "laplacian" else None  # a quarter of all pairs would collide by chance
    options = dict(kernel=kernel, n_permutations=1, n_hashes=16, n_bits=n_bits)
    exact = two_sample_test(X, Y, **options).statistic
    runs = [
        two_sample_test(X, Y, algorithm="bucket_sum", random_state=seed, **options)
        for seed in range(150)
    ]
    got, stated = np.array([(run.statistic, run.standard_error) for run in runs]).T
    assert abs(got.mean() - exact) < 4 * got.std(ddof=1) / np.sqrt(len(runs))
    # Of 150 runs the observed variance is right within a third; hashes that share a rotation vary
    # less together on clusters, and more on rows in all directions.
    ratio = (stated**2).mean() / got.var(ddof=1)
    low, high = (0.67, 1.5) if kernel == "laplacian" else (0.4, 4)
    assert low < ratio < high


@pytest.mark.parametrize(("kernel", "algorithm"), CASES)
def test_false_alarms_are_as_frequent_as_the_level_says(kernel, algorithm):
    """And the statistic is 0 on average where there is no difference."""
    runs, level = 200, 0.1
    found = []
    for seed in range(runs):
        X, Y = samples(12, 17, 3, shift=0.0, seed=seed)
        X, Y = X + 2, Y + 2
        options = dict(algorithm=algorithm, n_permutations=19, n_hashes=8, random_state=seed)
        found.append(two_sample_test(X, Y, kernel=kernel, **options))
    alarms = np.mean([result.pvalue <= level for result in found])
    # Ties of few buckets make a test that is a little more careful than its level.
    assert abs(alarms - level) < 4 * math.sqrt(level * (1 - level) / runs)
    statistics = np.array([result.statistic for result in found])
    assert abs(statistics.mean()) < 4 * statistics.std(ddof=1) / math.sqrt(runs)


@pytest.mark.parametrize(("kernel", "algorithm"), CASES)
def test_a_shift_is_found(kernel, algorithm):
    found = 0
    for seed in range(10):
        X, Y = samples(100, 80, 4, shift=0.8, seed=seed)
        options = dict(kernel=kernel, algorithm=algorithm, n_permutations=99, random_state=seed)
        found += two_sample_test(X, Y, **options).pvalue <= 0.05
    assert found == 10


@pytest.mark.parametrize(("kernel", "algorithm"), CASES)
def test_ties_count_as_the_null(kernel, algorithm):
    one = np.ones((6, 2))
    result = two_sample_test(one, one, kernel=kernel, algorithm=algorithm, n_permutations=20)
    assert result.statistic == pytest.approx(0, abs=1e-12) and result.pvalue == 1
    # Two points: a permutation's statistic depends on how many of one it has, and often is equal.
    points = np.array([[1.0, 0.0], [0.0, 1.0]])
    X, Y = points[[0, 1, 0, 1, 0]], points[[1, 0, 1, 0, 1]]
    options = dict(kernel=kernel, algorithm=algorithm, n_permutations=200, random_state=0)
    result = two_sample_test(X, Y, **options)
    close = np.abs(result.null_distribution - result.statistic) < 1e-9
    assert 50 < close.sum() < 200
    assert (result.null_distribution[close] == result.statistic).all()
    assert result.pvalue == (1 + (result.null_distribution >= result.statistic).sum()) / 201


def test_copies_of_rows_raise_no_alarm():
    """Of rows that are drawn with repetition from few points."""
    alarms = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        points = rng.normal(size=(4, 3))
        X, Y = points[rng.integers(4, size=20)], points[rng.integers(4, size=30)]
        alarms += two_sample_test(X, Y, n_permutations=19, random_state=seed).pvalue <= 0.05
    assert alarms <= 200 * 0.05 + 4 * math.sqrt(200 * 0.05 * 0.95)


@pytest.mark.parametrize(("kernel", "algorithm"), CASES)
def test_same_seed_same_bits_at_any_number_of_threads(kernel, algorithm, monkeypatch):
    monkeypatch.setattr(two_sample, "BLOCK", 64)
    X, Y = samples(150, 150, 6)
    options = dict(kernel=kernel, algorithm=algorithm, n_permutations=70, random_state=3)
    one, two = (two_sample_test(X, Y, n_jobs=n, **options) for n in (1, 2))
    assert one == two and np.array_equal(one.null_distribution, two.null_distribution)
    other = two_sample_test(X, Y, **options | dict(random_state=4))
    assert not np.array_equal(one.null_distribution, other.null_distribution)


def peak(call):
    """Bytes that a call holds at most."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_exact_sums_need_no_memory_for_each_block(monkeypatch):
    monkeypatch.setattr(two_sample, "BLOCK", 64)
    rng = np.random.default_rng(0)
    X, Y = rng.normal(size=(2, 3000, 2))
    options = dict(algorithm="brute", bandwidth=1.0, n_permutations=1)
    used = peak(lambda: two_sample_test(X, Y, **options))
    assert used < 20 * 8 * 6000  # rows, scaled rows, labels, sums; those of 94 blocks are more


@pytest.mark.parametrize("kernel", ["laplacian", "angular"])
def test_wide_tables_are_summed_in_little_memory(kernel):
    X, Y = samples(100, 100)
    options = dict(kernel=kernel, algorithm="bucket_sum", n_bits=16, n_permutations=99)
    used = peak(lambda: two_sample_test(X, Y, **options))
    assert used < 250e6  # tables of all hashes and 64 permutations are 1.07 GB


@pytest.mark.parametrize("max_count", [2**24, 100])  # rows, up to which counts are float32
def test_parts_of_hashes_are_the_whole(max_count, monkeypatch):
    X, Y = samples()
    options = dict(algorithm="bucket_sum", n_bits=5, n_permutations=99, random_state=0)
    whole = two_sample_test(X, Y, **options)
    monkeypatch.setattr(two_sample, "TABLE_SIZE", 3 * 2**5 * two_sample.COLUMNS)
    monkeypatch.setattr(two_sample, "MAX_COUNT", max_count)
    tables = []

    class Spy(two_sample.BucketTable):
        def add(self, codes, values):
            tables.append(self.table)
            return super().add(codes, values)

    monkeypatch.setattr(two_sample, "BucketTable", Spy)
    parts = two_sample_test(X, Y, **options)
    assert parts == whole and np.array_equal(parts.null_distribution, whole.null_distribution)
    assert max(table.size for table in tables) == two_sample.TABLE_SIZE
    assert {table.dtype for table in tables} == {np.dtype("f4" if max_count > 105 else "f8")}


def test_auto_is_exact_for_few_rows_and_without_collisions(monkeypatch):
    monkeypatch.setattr(two_sample, "MAX_EXACT", 100)
    X, Y = samples()
    assert two_sample_test(X, Y, n_permutations=1).algorithm == "bucket_sum"
    assert two_sample_test(X[:50], Y, n_permutations=1).algorithm == "brute"
    assert two_sample_test(X, Y, kernel="gaussian", n_permutations=1).algorithm == "brute"
    one = two_sample_test(X, Y, n_permutations=1, n_hashes=1, algorithm="bucket_sum")
    assert one.standard_error == np.inf


@pytest.mark.parametrize("far", [1e17, 1e20, 1e150, 1e300])
@pytest.mark.parametrize(("kernel", "method"), CASES)
def test_a_far_row_does_not_hide_the_others(kernel, method, far):
    X, Y = samples(100, 100, 3, shift=2.0)
    X[0] = far
    result = two_sample_test(X, Y, kernel=kernel, algorithm=method, random_state=0)
    assert result.pvalue == 0.001 and result.statistic > 0.01
    if kernel != "angular":
        assert result.bandwidth < 10


@pytest.mark.parametrize(
    ("kernel", "method"),
    [("gaussian", "brute"), ("laplacian", "brute"), ("laplacian", "bucket_sum")],
)
def test_many_far_rows_do_not_hide_the_others(kernel, method):
    X, Y = samples(60, 60, 2, shift=1.5)
    X, Y = (np.r_[x, np.full((100, 2), 1e20)] for x in (X, Y))
    options = {"kernel": kernel, "algorithm": method, "bandwidth": 1.0, "random_state": 0}
    result = two_sample_test(X, Y, **options)
    near = two_sample_test(np.where(X < 1e19, X, 50), np.where(Y < 1e19, Y, 50), **options)
    assert result.statistic > 0.01 and result.pvalue < 0.05
    assert result.statistic == pytest.approx(near.statistic, rel=1e-6 if method == "brute" else 0.3)


@pytest.mark.parametrize("kernel", ["gaussian", "laplacian"])
def test_rows_that_only_less_their_centre_can_be_scaled(kernel):
    rng = np.random.default_rng(0)
    X, Y = (1e300 * (1 + 3e-15 * rng.normal(size=(60, 2))) for _ in range(2))
    result = two_sample_test(X, Y, kernel=kernel, bandwidth=1e-10, algorithm="brute")
    assert np.isfinite(result.statistic) and result.pvalue > 0.01


def test_where_half_of_the_rows_are_far_the_median_is():
    X, Y = samples(40, 40, 3, shift=0.0)
    for far in (1e20, 1e200):
        for kernel in ("laplacian", "gaussian"):
            result = two_sample_test(X, far * Y, kernel=kernel, random_state=0)
            assert result.pvalue == 0.001
            assert 0.1 * far < result.bandwidth < 10 * far


@pytest.mark.parametrize("scale", [1e-200, 1e-30, 1e30, 1e200])
@pytest.mark.parametrize(("kernel", "algorithm"), CASES)
def test_units_do_not_matter(kernel, algorithm, scale):
    X, Y = samples(30, 30, 3)
    options = dict(kernel=kernel, algorithm=algorithm, n_permutations=99, random_state=0)
    results = [two_sample_test(s * X, s * Y, **options) for s in (1.0, scale)]
    assert results[0].pvalue == results[1].pvalue
    assert results[0].statistic == pytest.approx(results[1].statistic, abs=1e-9)


def test_tensors_and_lists_are_rows():
    torch = pytest.importorskip("torch")
    X, Y = samples()
    options = dict(n_permutations=20, random_state=0)
    wanted = two_sample_test(X, Y, **options)
    assert two_sample_test(torch.tensor(X), torch.tensor(Y), **options) == wanted
    assert two_sample_test(X.tolist(), Y.tolist(), **options) == wanted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(kernel="cosine"), "kernel"),
        (dict(kernel=None), "kernel"),
        (dict(kernel="gaussian", algorithm="bucket_sum"), "kernel"),
        (dict(algorithm="linear"), "algorithm"),
        (dict(bandwidth="scott"), "median"),
        (dict(bandwidth=0.0), "bandwidth"),
        (dict(bandwidth=[1.0, 2.0]), "bandwidth"),
        (dict(bandwidth=2.0, kernel="angular"), "n_bits"),
        (dict(n_permutations=0), "n_permutations"),
        (dict(n_hashes=0), "n_hashes"),
        (dict(n_bits=0), "n_bits"),
        (dict(n_bits=17), "n_bits"),
        (dict(n_bits=3, kernel="gaussian"), "n_bits must be None with kernel='gaussian', got 3"),
        (dict(n_jobs=0), "n_jobs"),
        (dict(random_state="x"), "random_state must be .*'x'"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        two_sample_test(*samples(), **options)


def test_frames_are_compared_by_columns():
    pd = pytest.importorskip("pandas")
    X, Y = samples()
    frames = [pd.DataFrame(x, columns=list("abcde")) for x in (X, Y)]
    options = dict(n_permutations=20, random_state=0)
    wanted = two_sample_test(X, Y, **options)
    assert two_sample_test(*frames, **options) == wanted == two_sample_test(frames[0], Y, **options)
    message = "same columns in the same order, got 'b' and 'c' as column 1"
    with pytest.raises(ValueError, match=message):
        two_sample_test(frames[0], frames[1][list("acbde")], **options)


def test_bad_rows():
    X, Y = samples()
    for rows in (X[:1], X[:0], X[0], X[None], 3.0, None, X * np.nan, X + np.inf):
        for name, pair in (("X", (rows, Y)), ("Y", (Y, rows))):
            with pytest.raises(ValueError, match=rf"\b{name} (must|contains)"):
                two_sample_test(*pair)
    with pytest.raises(ValueError, match="Y"):
        two_sample_test(X, Y * np.nan)
    with pytest.raises(ValueError, match="X must have at least 2 rows, got 1"):
        two_sample_test(X[:1], Y)
    with pytest.raises(ValueError, match="Y must have at least 2 rows, got 0"):
        two_sample_test(X, Y[:0])
    with pytest.raises(ValueError, match="features, got 5 and 3"):
        two_sample_test(X, Y[:, :3])
    with pytest.raises(ValueError, match="Y has a row of zeros"):
        two_sample_test(X, 0 * Y, kernel="angular")
    with pytest.raises(ValueError, match="1e308 bandwidths"):
        two_sample_test(1e300 * X, Y, bandwidth=1e-10)
    with pytest.raises(TypeError, match="n_permutations"):
        two_sample_test(X, Y, n_permutations=9.5)
