"""algorithm="bucket_sum": a sketch that keeps no rows, streams, forgets and merges."""

import io
import os
import platform
import subprocess
import sys

import numpy as np
import pytest
from cases.archives import changed
from cases.kde import SKETCHES, clustered, exact, log_mean, sketch
from sklearn.exceptions import NotFittedError

from lshkit.kde import LSHKernelDensity


@pytest.fixture
def data():
    rows, queries = clustered(700, 5, 20, n_queries=6)
    return rows, queries, np.random.default_rng(7).integers(1, 9, 700) / 4


@pytest.mark.parametrize("kernel", SKETCHES)
def test_unbiased_with_the_stated_error(kernel, data):
    """In few buckets: without its correction, a fold of 32 would be off by 1/32."""
    rows, queries, weights = data
    wanted = exact(kernel, queries, rows, weights)
    runs = 80
    means, errors = np.empty((2, runs, len(queries)))
    for seed in range(runs):
        density = sketch(kernel, random_state=seed).fit(rows, sample_weight=weights)
        means[seed], errors[seed] = density.kernel_mean(queries, return_std=True)
    spread = means.std(axis=0, ddof=1)
    assert (np.abs(means.mean(axis=0) - wanted) < 4 * spread / np.sqrt(runs)).all()
    ratio = (errors**2).mean(axis=0) / spread**2
    assert 0.7 < np.exp(np.log(ratio).mean()) < 1.6  # hashes of one rotation vary less together


@pytest.mark.parametrize("share", [0.4, 0.001])
def test_no_error_is_less_than_what_folding_leaves(share):
    """Hashes that agree have all missed the rows of other buckets, of which one may be heavy."""
    rng = np.random.default_rng(0)
    places = rng.normal(size=(1000, 5))
    shares = np.full(1000, (1 - share) / 999)
    shares[0] = share
    rows, queries = places[rng.choice(1000, 20_000, p=shares)], places[1:400]
    wanted = np.exp(log_mean("laplacian", queries, rows, 0.05))
    for n_bits, n_hashes in ((12, 32), (12, 256), (16, 32)):
        got = []
        for seed in range(4):
            options = dict(n_bits=n_bits, n_hashes=n_hashes, random_state=seed)
            density = LSHKernelDensity("laplacian", 0.05, algorithm="bucket_sum", **options)
            got.append(density.fit(rows).kernel_mean(queries, return_std=True))
        mean, std = np.swapaxes(got, 0, 1)
        assert (np.abs(mean - wanted) > 3 * std).mean() < 0.015
        assert 0.5 < np.sqrt((std**2).mean() / ((mean - wanted) ** 2).mean()) < 2


@pytest.mark.parametrize("kinds", ["1 / i^1.1", "1 / 2^i", "one of 60 %"])
def test_no_error_is_less_than_what_was_not_met_at_right_angles(kinds):
    """One-hot rows: of kinds that no hash has met, the angular density lacks all that they add."""
    shares = {"1 / i^1.1": np.arange(1, 61) ** -1.1, "1 / 2^i": 0.5 ** np.arange(1, 9)}
    shares = shares.get(kinds, np.r_[1500, np.ones(999)])
    for n_hashes in (32, 128):
        errors, stated = [], []
        for seed in range(8):
            rng = np.random.default_rng(seed)
            kind = rng.choice(len(shares), 4400, p=shares / shares.sum())
            own = np.bincount(kind[:4000], minlength=len(shares))[kind[4000:]] / 4000
            rows, wanted = np.eye(len(shares))[kind], own + (1 - own) * 0.5**8
            density = sketch("angular", random_state=seed, n_bits=8, n_hashes=n_hashes)
            mean, std = density.fit(rows[:4000]).kernel_mean(rows[4000:], return_std=True)
            errors.append(np.abs(mean - wanted))
            stated.append(std)
        assert (np.array(errors) > 3 * np.array(stated)).mean() < 0.005


@pytest.mark.parametrize("n_bits", [4, 8, 12])
def test_no_row_counts_twice_at_right_angles(n_bits):
    """The spread of full tables has it already, and opposite rows never meet."""
    rng = np.random.default_rng(0)
    rows, queries = rng.normal(size=(4000, 8)), rng.normal(size=(100, 8))
    exact = LSHKernelDensity("angular", n_bits=n_bits, rtol=0, normalize=False).fit(rows)
    wanted, got = exact.kernel_mean(queries), []
    for seed in range(8):
        density = sketch("angular", random_state=seed, n_bits=n_bits, n_hashes=128)
        got.append(density.fit(rows).kernel_mean(queries, return_std=True))
    mean, std = np.swapaxes(got, 0, 1)
    assert 0.8 < np.sqrt((std**2).mean() / ((mean - wanted) ** 2).mean()) < 1.3


@pytest.mark.parametrize("n_bits", [1, 4, 8, 12])
def test_rows_that_share_buckets_leave_no_more(n_bits):
    """A full table shows in each hash what folding adds: it is not counted twice."""
    rng = np.random.default_rng(0)
    rows, queries = rng.normal(size=(30_000, 6)), rng.normal(size=(100, 6))
    wanted = np.exp(log_mean("laplacian", queries, rows, 0.3))
    got = []
    for seed in range(4):
        options = dict(n_bits=n_bits, n_hashes=32, random_state=seed)
        density = LSHKernelDensity("laplacian", 0.3, algorithm="bucket_sum", **options)
        got.append(density.fit(rows).kernel_mean(queries, return_std=True))
    mean, std = np.swapaxes(got, 0, 1)
    assert 0.8 < np.sqrt((std**2).mean() / ((mean - wanted) ** 2).mean()) < 1.3


def test_folding_leaves_what_is_in_the_window():
    """A block that is nearly out of it counts with the share that is inside."""
    places = np.random.default_rng(0).normal(size=(100, 5))
    options = dict(algorithm="bucket_sum", n_bits=8, n_hashes=32, random_state=0)
    rows = np.r_[np.repeat(places[:1], 4000, axis=0), places[np.arange(39_600) % 99 + 1]]
    window = dict(sliding_window=40_000, sliding_window_error=0.1)
    density = LSHKernelDensity("laplacian", 0.05, **options, **window).fit(rows)
    inside = density._kde_sketch.forgetting.inside
    assert 0 < inside < 0.2
    weights = np.r_[np.full(4000, inside), np.ones(39_600)]
    wanted = LSHKernelDensity("laplacian", 0.05, **options).fit(rows, sample_weight=weights)
    (mean, std), (mean_wanted, least) = (x.kernel_mean(places[1:], True) for x in (density, wanted))
    assert np.allclose(mean, mean_wanted, rtol=0, atol=1e-8)  # weights are rounded
    assert 1 <= np.median(std / least) < 1.2  # more, as the oldest rows may be inside or outside


@pytest.mark.parametrize("size", [0, 1e-3])
@pytest.mark.parametrize("kernel", ["laplacian", "angular"])
def test_hashes_that_agree_are_not_stated_to_be_exact(kernel, size):
    """They do not tell equal rows from nearly equal ones: of m hashes a share of 1 / m is open."""
    rows = 1 + size * np.random.default_rng(0).normal(size=(500, 8))
    options = dict(algorithm="bucket_sum", normalize=False, random_state=0)
    density = LSHKernelDensity(kernel, **options).fit(rows)
    mean, std = density.kernel_mean(rows, return_std=True)
    wanted = np.exp(log_mean(kernel, rows, rows, 1.0 if kernel == "laplacian" else 8))
    assert (mean == 1).any() and (std >= mean / 32).all()
    assert (np.abs(mean - wanted) <= 3 * std).all()


@pytest.mark.parametrize("half_life", [None, 20.0])
def test_empty_buckets_are_not_stated_to_be_exact(half_life):
    rows, queries = np.random.default_rng(0).normal(size=(2, 300, 16))
    options = dict(n_bits=16, random_state=0, half_life=half_life)
    density = LSHKernelDensity("angular", algorithm="bucket_sum", **options)
    mean, std = density.fit(rows).kernel_mean(queries, return_std=True)
    assert (mean < 1e-6).sum() > 30
    counting = 300 if half_life is None else (0.5 ** (np.arange(300) / half_life)).sum()
    assert (std >= (1 - 1e-9) / counting / 32).all()


@pytest.mark.parametrize("kernel", SKETCHES)
def test_errors_of_what_is_left_of_weights(kernel):
    """A part of one row's weight; weights that fell by 2^-900."""
    rows = np.random.default_rng(0).normal(size=(1000, 4))
    part = sketch(kernel).fit(rows[:1], sample_weight=[2.0])
    part.partial_unfit(rows[:1], sample_weight=[1.0])
    faded = sketch(kernel, half_life=1.0).fit(rows)
    faded.partial_fit(rows[:900], sample_weight=np.zeros(900))
    for density in (part, faded):
        mean, std = density.kernel_mean(rows[-3:], return_std=True)
        assert np.isfinite(mean).all() and (std > 0).all()


@pytest.mark.parametrize("kernel", SKETCHES)
def test_parts_make_the_whole_bit_for_bit(kernel, data):
    rows, queries, weights = data
    weights = weights / 3  # no multiples of anything
    whole = sketch(kernel).fit(rows, sample_weight=weights).kernel_mean(queries)
    stream = sketch(kernel)
    for part in np.array_split(np.random.default_rng(0).permutation(700), 5):
        stream.partial_fit(rows[part], sample_weight=weights[part])
    merged = sketch(kernel).fit(rows[400:], sample_weight=weights[400:])
    merged.merge(sketch(kernel).fit(rows[:400], sample_weight=weights[:400]))
    more = sketch(kernel).fit(
        np.r_[rows, rows[:50] + 1], sample_weight=np.r_[weights, weights[:50]]
    )
    more.partial_unfit(rows[:50] + 1, sample_weight=weights[:50])
    for density in (stream, merged, more):
        assert np.array_equal(density.kernel_mean(queries), whole)
        assert density.n_samples_seen_ == 700


@pytest.mark.parametrize("kernel", SKETCHES)
@pytest.mark.parametrize("window", [1, 64, 250, 10_000])
def test_window_is_a_fit_of_the_last_rows(kernel, window, data):
    rows, queries, weights = data
    density = sketch(kernel, sliding_window=window)
    done = 0
    for size in (3, 100, 64, 1, 300, 232):
        part = slice(done, done + size)
        density.partial_fit(rows[part], sample_weight=weights[part])
        done += size
        last = slice(max(0, done - window), done)
        fresh = sketch(kernel).fit(rows[last], sample_weight=weights[last])
        assert np.array_equal(density.kernel_mean(queries), fresh.kernel_mean(queries))
        assert density.n_samples_seen_ == last.stop - last.start


def test_memory_does_not_grow(data):
    rows, queries, _ = data
    density = sketch("angular")
    sizes = set()
    for _ in range(4):
        density.partial_fit(rows)
        sizes.add(density._kde_sketch.nbytes)
        assert not density._kde_rows
    assert len(sizes) == 1
    assert np.array_equal(
        density.kernel_mean(queries), sketch("angular").fit(rows).kernel_mean(queries)
    )


def test_laplacian_density_has_its_normaliser(data):
    rows, queries, _ = data
    density = sketch("laplacian", n_bits=12, n_hashes=3000).set_params(normalize=True).fit(rows)
    brute = LSHKernelDensity("laplacian", 1.5, algorithm="brute").fit(rows)
    score, std = density.score_samples(queries, return_std=True)
    assert (np.abs(score - brute.score_samples(queries)) < 4 * std).all()
    assert std.max() < 0.2


def test_estimates_below_zero_are_minus_infinity():
    density = sketch("laplacian", n_hashes=8).fit(np.zeros((10, 3)))
    far = np.full((1, 3), 1e6)
    mean = density.kernel_mean(far)
    score, std = density.score_samples(far, return_std=True)
    assert mean <= 0 and score == -np.inf and std == np.inf


@pytest.mark.parametrize("kernel", SKETCHES)
def test_of_no_rows_the_mean_is_zero(kernel, data):
    rows, queries, _ = data
    empty = sketch(kernel).fit(rows).partial_unfit(rows)
    mean, std = empty.kernel_mean(queries, return_std=True)
    assert not mean.any() and (std == np.inf).all()
    assert (empty.score_samples(queries) == -np.inf).all()
    again = empty.partial_fit(rows).kernel_mean(queries)
    assert np.array_equal(again, sketch(kernel).fit(rows).kernel_mean(queries))


@pytest.mark.parametrize(("one", "other"), [("bucket_sum", "brute"), ("random", "bucket_sum")])
def test_rows_and_a_sketch_do_not_mix(one, other, data):
    """Neither can hold what the other does: the rows of one part would count for nothing."""
    rows, queries, _ = data
    density = sketch("angular").set_params(algorithm=one).fit(rows)
    before = density.kernel_mean(queries)
    with pytest.raises(ValueError, match=f"algorithm must.*got '{other}'"):
        density.set_params(algorithm=other).partial_fit(rows)
    assert density.n_samples_seen_ == 700 and np.array_equal(density.kernel_mean(queries), before)
    assert density.fit(rows[:9]).n_samples_seen_ == 9


def test_first_rows_that_are_refused_leave_nothing_behind(data):
    rows, queries, _ = data
    density = sketch("angular")
    with pytest.raises(ValueError, match="scale them up"):
        density.fit(rows, sample_weight=np.full(700, 1e-9))
    with pytest.raises(NotFittedError):
        density.kernel_mean(queries)
    fresh = sketch("angular").fit(rows)
    assert np.array_equal(
        density.partial_fit(rows).kernel_mean(queries), fresh.kernel_mean(queries)
    )


def test_one_hash_does_not_know_its_error(data):
    rows, queries, _ = data
    std = sketch("angular", n_hashes=1).fit(rows).kernel_mean(queries, return_std=True)[1]
    assert np.isinf(std).all()


def test_bad_calls(data):
    rows, queries, _ = data
    density = sketch("angular").fit(rows)
    with pytest.raises(ValueError, match="hash functions"):
        density.merge(sketch("angular", random_state=1).fit(rows))
    with pytest.raises(ValueError, match="sketches"):
        density.merge(LSHKernelDensity("angular", algorithm="brute").fit(rows))
    with pytest.raises(ValueError, match="window"):
        sketch("angular", sliding_window=5).fit(rows).merge(density)
    with pytest.raises(ValueError, match="keeps no rows|does not keep"):
        sketch("laplacian").fit(rows).sample()
    with pytest.raises(ValueError, match="does not keep"):
        sketch("laplacian").fit(rows).tune(queries)
    with pytest.raises(ValueError, match="kernel must be one of.*bucket_sum"):
        LSHKernelDensity("gaussian", algorithm="bucket_sum").fit(rows)
    with pytest.raises(ValueError, match="more rows"):
        density.partial_unfit(np.r_[rows, rows])
    with pytest.raises(ValueError, match="X must be rows that were added"):
        density.partial_unfit(10 - rows[:100])
    heavy = sketch("angular").fit(rows, sample_weight=np.full(700, 2.0**19 + 0.5))
    with pytest.raises(ValueError, match="2.29"):
        heavy.merge(sketch("angular").fit(rows, sample_weight=np.full(700, 2.0**19 + 0.5)))
    with pytest.raises(ValueError, match="scale them up"):
        sketch("angular").fit(rows, sample_weight=np.full(700, 1e-9))
    with pytest.raises(ValueError, match="bucket_sum"):
        LSHKernelDensity().fit(rows).partial_unfit(rows)
    with pytest.raises(ValueError, match="window"):
        LSHKernelDensity(sliding_window=3).fit(rows)
    assert np.array_equal(
        density.kernel_mean(queries), sketch("angular").fit(rows).kernel_mean(queries)
    )  # nothing of the failed calls is left behind


def test_a_batch_of_rows_without_weight(data):
    rows = data[0]
    weights = np.r_[np.ones(10), np.zeros(5)]
    at_once = sketch("angular", half_life=10.0).fit(rows[:15], sample_weight=weights)
    parts = sketch("angular", half_life=10.0).fit(rows[:10])
    parts.partial_fit(rows[10:15], sample_weight=np.zeros(5))
    assert np.allclose(at_once.kernel_mean(rows[:5]), parts.kernel_mean(rows[:5]), rtol=1e-12)
    with pytest.raises(ValueError, match="sample_weight must not be all zero"):
        sketch("angular").fit(rows[:5], sample_weight=np.zeros(5))
    unweighted = sketch("angular").fit(rows).partial_fit(rows[:5], sample_weight=np.zeros(5))
    assert unweighted.partial_unfit(rows[:5], sample_weight=np.zeros(5)).n_samples_seen_ == 700


def test_a_billion_rows():
    """Counts are exact up to 2^53; sums of weights with a fraction, in units of 2^-24, to 2^29."""
    rows = np.random.default_rng(0).normal(size=(64, 4))
    whole, parts = (sketch("angular").fit(rows) for _ in range(2))
    for _ in range(25):  # doubled each time: 2^31 rows
        whole.merge(whole)
    assert whole.n_samples_seen_ == 2**31
    np.testing.assert_array_equal(whole.kernel_mean(rows), parts.kernel_mean(rows))
    loaded = type(whole).from_bytes(whole.to_bytes()).partial_fit(rows)
    assert loaded.n_samples_seen_ == 2**31 + 64
    message = r"below 2\^29 \(2\^53 where all are whole numbers\), would be 2147483680"
    with pytest.raises(ValueError, match=message):
        whole.partial_fit(rows, sample_weight=np.full(64, 0.5))
    with pytest.raises(ValueError, match=message):
        whole.merge(sketch("angular").fit(rows, sample_weight=np.full(64, 0.5)))
    assert whole.n_samples_seen_ == 2**31
    whole.partial_fit(rows[:1], sample_weight=[2.0**52])
    with pytest.raises(ValueError, match=r"must stay below 2\^53"):
        whole.partial_fit(rows[:1], sample_weight=[2.0**52])


@pytest.mark.parametrize("options", [{}, {"sliding_window": 9}], ids=["all rows", "window"])
@pytest.mark.parametrize("parts", [[[2.0**53]], [[2.0**53 - 1], [1.0]], [[2.0**53 - 2, 1.0, 1.0]]])
def test_weights_that_would_swallow_a_row_of_weight_1(parts, options):
    """2^53 + 1 is 2^53 in float64: the sum must be less, in whatever parts it comes."""
    rows = np.random.default_rng(0).normal(size=(3, 4))
    *first, last = parts
    density = sketch("angular", **options)
    for weights in first:
        density.partial_fit(rows[: len(weights)], sample_weight=weights)
    with pytest.raises(ValueError, match=r"stay below 2\^53, would be 9007199254740992"):
        density.partial_fit(rows[: len(last)], sample_weight=last)


def test_halves_of_the_largest_sum_do_not_merge():
    rows = np.random.default_rng(0).normal(size=(1, 4))
    half = sketch("angular").fit(rows, sample_weight=[2.0**52])
    with pytest.raises(ValueError, match=r"stay below 2\^53, would be 9007199254740992"):
        half.merge(half)

    def double(header, arrays):
        header["sketch"]["total"] *= 2
        arrays["table"] *= 2

    with pytest.raises(ValueError, match=r"stay below 2\^53, would be 9007199254740992"):
        LSHKernelDensity.load(changed(io.BytesIO(half.to_bytes()), double))


def test_weights_with_fractions_in_a_loaded_window_are_not_forgotten():
    """They may add up to whole numbers in the table, and leave it one by one."""
    rows = np.ones((2, 4))
    density = sketch("angular", sliding_window=2).fit(rows, sample_weight=[1.25, 0.75])
    for one in (density, LSHKernelDensity.from_bytes(density.to_bytes())):
        with pytest.raises(ValueError, match=r"below 2\^29 \(2\^53 where all are whole numbers\)"):
            one.partial_fit(rows[:1], sample_weight=[2.0**30])


def test_weights_beyond_float64_in_units():
    rows = np.random.default_rng(0).normal(size=(3, 4))
    density = sketch("angular").fit(rows)
    with pytest.raises(ValueError, match=r"stay below 2\^53, would be inf"):
        density.partial_fit(rows, sample_weight=[1e305, 1.0, 1.0])
    with pytest.raises(ValueError, match="cannot remove more rows or weight"):
        density.partial_unfit(rows, sample_weight=[1e305, 1.0, 1.0])
    ruled = LSHKernelDensity("laplacian", "scott", algorithm="bucket_sum")
    with pytest.raises(ValueError, match=r"stay below 2\^53, would be inf"):
        ruled.fit(rows, sample_weight=np.full(3, 1e308))


MANY_BLOCKS = """
import resource, sys
import numpy as np
from lshkit.kde import LSHKernelDensity

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

X = np.random.default_rng(0).standard_normal((30_000, 64), np.float32)
density = LSHKernelDensity(sys.argv[1], algorithm="bucket_sum", n_hashes=32, random_state=0)
for _ in range(3):
    before = faults()
    density.partial_fit(X)
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc's malloc")
@pytest.mark.parametrize("kernel", SKETCHES)
def test_blocks_take_no_fresh_memory(kernel):
    """Under the settings of Dask's workers, which give memory back at once: 30,000 rows as float64,
    for example, are 3,750 pages. (The one buffer has 170.)"""
    environment = os.environ | {"MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = sys.executable, "-c", MANY_BLOCKS, kernel
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(run.stdout) < 250, run.stdout


def test_rows_that_are_refused_leave_nothing_behind():
    """Of a block of several chunks; the error names the row of the block."""
    X = np.random.default_rng(0).normal(size=(3000, 4))
    density = LSHKernelDensity(
        "laplacian", bandwidth=0.01, algorithm="bucket_sum", random_state=0
    ).fit(X)
    before = density.score_samples(X[:50])
    wrong = X.copy()
    wrong[-1] = 1.7e308
    with pytest.raises(ValueError, match="row 2999"):
        density.partial_fit(wrong)
    assert np.array_equal(density.score_samples(X[:50]), before)
    assert density.partial_unfit(X[:2999]).n_samples_seen_ == 1


def test_finite_rows_beyond_float64_in_bandwidths_are_told_from_nan():
    rows = np.full((5, 2), 1e10)
    density = LSHKernelDensity("laplacian", [1.0, 1e-300], algorithm="bucket_sum")
    message = (
        r"X must lie within 1.8e\+308 bandwidths of 0 .*got 1e\+10 in row 0, feature 1, whose "
        "bandwidth is 1e-300"
    )
    with pytest.raises(ValueError, match=message):
        density.fit(rows)
    density.fit(rows * [1, 0])
    with pytest.raises(ValueError, match=message):
        density.score_samples(rows)


@pytest.mark.parametrize(
    "other", [dict(kernel="angular"), dict(n_bits=6), dict(n_hashes=9), dict(half_life=5.0)]
)
def test_parameters_that_a_sketch_cannot_follow_are_refused(other, data):
    rows = data[0]
    density = sketch("laplacian").fit(rows)
    wanted = density.kernel_mean(rows)
    with pytest.raises(ValueError, match=f"{next(iter(other))} must be .* earlier rows .* use fit"):
        density.set_params(**other).partial_fit(rows)
    assert np.array_equal(density.kernel_mean(rows), wanted)
    density.set_params(**sketch("laplacian").get_params()).partial_fit(rows)


@pytest.mark.parametrize("kernel", SKETCHES)
def test_memory_counts_the_random_numbers_too(kernel, data):
    """laplacian: 20 bytes a hash and feature (scale, shift, multiplier), 16 a hash to fold."""
    density = sketch(kernel).fit(data[0])
    table = 24 * 2 ** SKETCHES[kernel]["n_bits"] * 8
    numbers = (
        density._kde_sketch.hasher.parameters.nbytes if kernel == "angular" else 24 * (5 * 20 + 16)
    )
    assert density.extra_memory_ == table + numbers


@pytest.mark.parametrize("algorithm", ["bucket_sum", "brute"])
def test_the_default_n_bits_merges_with_its_value(algorithm, data):
    rows, one = data[0], LSHKernelDensity("angular", algorithm=algorithm, random_state=0)
    one.set_params(normalize=False).fit(rows)
    same = LSHKernelDensity("angular", algorithm=algorithm, n_bits=8, random_state=0).fit(rows)
    wanted = one.kernel_mean(rows)
    np.testing.assert_allclose(one.merge(same).kernel_mean(rows), wanted, rtol=1e-6)
    with pytest.raises(ValueError, match="n_bits .* differ"):
        one.merge(same.set_params(n_bits=9).fit(rows))


def test_parameters_that_were_set_do_not_change_what_merges():
    rows = np.random.default_rng(0).standard_normal((50, 3))
    one, two = (
        LSHKernelDensity("angular", algorithm="bucket_sum", n_bits=6, random_state=0) for _ in "12"
    )
    one.fit(rows).set_params(n_bits=7)
    merged = one.merge(two.fit(rows))
    assert merged.n_samples_seen_ == 100
