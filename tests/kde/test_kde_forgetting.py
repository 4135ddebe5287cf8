"""Sketches that forget: a half-life, and a sliding window of blocks with a stated error."""

import io
import pickle

import numpy as np
import pytest
from cases.kde import SKETCHES, clustered, exact, sketch
from sklearn.base import clone

from lshkit.kde import LSHKernelDensity

WINDOW, ERROR = 4000, 0.1  # blocks of 400 rows
FORGETTING = {
    "half_life": dict(half_life=150.5),
    "blocked": dict(sliding_window=WINDOW, sliding_window_error=ERROR),
    "exact": dict(sliding_window=700),
}


def bursts(n, kind, seed=0):
    """Rows of 6 clusters that come in bursts, their weights, and queries: the centres first."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(6, 5))
    lengths = {"long": 900, "short": 37}[kind]
    which = rng.integers(6, size=n // lengths + 1).repeat(lengths)[:n]
    rows = centres[which] + 0.1 * rng.normal(size=(n, 5))
    weights = rng.pareto(0.7, n) + 0.01  # without a mean
    weights = np.minimum(weights, 1e4)
    return rows, weights, np.r_[centres, centres + 0.2 * rng.normal(size=centres.shape)]


def raw(density, kernel, queries):
    """Sum over the window of what shares a bucket, before a correction; and the window's weight."""
    total = density._kde_sketch.total
    chance = 0 if kernel == "angular" else 2.0 ** -SKETCHES[kernel]["n_bits"]
    return (density.kernel_mean(queries) * (1 - chance) + chance) * total, total


# ---- a half-life ----


@pytest.mark.parametrize("kernel", SKETCHES)
@pytest.mark.parametrize("half_life", [1, 2.5, 60, 1e12])
def test_half_life_weighs_rows_by_age(kernel, half_life):
    """Against sums of those weights; the table was scaled 3 rows before the end, or never."""
    n = 1283
    rows, queries = clustered(n, 5, 20, n_queries=6)
    weights = np.random.default_rng(7).integers(1, 9, n) / 4
    density = sketch(kernel, half_life=half_life).fit(rows, sample_weight=weights)
    aged = weights * 2.0 ** (-np.arange(n)[::-1] / half_life)
    codes = density._kde_sketch.codes
    collide = codes(rows)[None] == codes(queries)[:, None]  # (queries, rows, hashes)
    wanted = (collide * aged[:, None]).sum(axis=1).mean(axis=1) / aged.sum()
    got, total = raw(density, kernel, queries)
    # 1e-12: roundings of 2^-53 in each of 1283 sums, and of the weights
    assert np.allclose(got / total, wanted, rtol=1e-12, atol=1e-15)
    assert density.n_samples_seen_ == n


@pytest.mark.parametrize("kernel", SKETCHES)
@pytest.mark.parametrize("name", ["half_life", "blocked"])
def test_unbiased_with_the_stated_error(kernel, name):
    rows, queries = clustered(4700, 5, 20, n_queries=6)
    weights = np.random.default_rng(7).integers(1, 9, 4700) / 4
    ages = np.arange(4700)[::-1]
    # 4700 rows are 11 blocks of 400 and 300 more: one is gone, a quarter of the next is inside.
    blocks = np.select([ages < 3900, ages < 4300], [1.0, 0.25])
    counts = 2.0 ** (-ages / 150.5) if name == "half_life" else blocks
    wanted = exact(kernel, queries, rows, weights * counts)
    runs = 60
    means, errors = np.empty((2, runs, len(queries)))
    for seed in range(runs):
        density = sketch(kernel, random_state=seed, **FORGETTING[name])
        density.fit(rows, sample_weight=weights)
        means[seed], errors[seed] = density.kernel_mean(queries, return_std=True)
        each = density._kde_sketch.of_each_hash(queries)
        assert np.allclose(each.mean(axis=1), means[seed], rtol=1e-10, atol=1e-14)
        if name == "blocked":  # without the part of the oldest block, the same for all seeds
            of_hashes = each.std(axis=1, ddof=1) / np.sqrt(24)
            assert (of_hashes < errors[seed]).all()
            errors[seed] = of_hashes
    spread = means.std(axis=0, ddof=1)
    assert (np.abs(means.mean(axis=0) - wanted) < 4 * spread / np.sqrt(runs)).all()
    ratio = (errors**2).mean(axis=0) / spread**2
    assert 0.7 < np.exp(np.log(ratio).mean()) < 1.6  # hashes of one rotation vary less together


def test_half_life_never_overflows_or_dies():
    """Long after a cluster has gone its density is 0 or tiny; the present one is right."""
    old, new = np.ones((50, 3)), -np.ones((40_000, 3))
    density = sketch(half_life=1).fit(old).partial_fit(new)
    assert np.isfinite(density._kde_sketch.table.table).all()
    gone, present = density.kernel_mean(np.array([[1.0, 1, 1], [-1, -1, -1]]))
    assert gone == 0 and present == 1
    heavy = sketch(half_life=1).fit(new[:2000], sample_weight=np.full(2000, 2.0**29 - 1))
    assert heavy.kernel_mean(new[:1]) == 1
    with pytest.raises(ValueError, match=r"must stay below 2\^29 .*, got 536870912"):
        heavy.partial_fit(new[:1], sample_weight=[2.0**29])


@pytest.mark.parametrize("kernel", SKETCHES)
def test_half_lives_merge_as_if_fitted_after(kernel):
    rows, queries = clustered(3000, 5, 20, n_queries=6)
    weights = np.random.default_rng(7).uniform(0.5, 2, 3000)
    options = dict(half_life=4.5)  # rows until the table is scaled: 1152
    whole = sketch(kernel, **options).fit(rows, sample_weight=weights)
    ends = [0, 900, 2300, 2990, 2997, 3000]
    parts = [slice(*pair) for pair in zip(ends[:-1], ends[1:], strict=True)]
    merged, *others = (
        sketch(kernel, **options).fit(rows[part], sample_weight=weights[part]) for part in parts
    )
    for other in others:
        merged.merge(other)
    assert np.allclose(merged.kernel_mean(queries), whole.kernel_mean(queries), rtol=1e-12)
    assert merged.n_samples_seen_ == 3000
    merged.partial_fit(rows[:77])
    whole.partial_fit(rows[:77])
    assert np.allclose(merged.kernel_mean(queries), whole.kernel_mean(queries), rtol=1e-12)
    twice = sketch(kernel, **options).fit(np.r_[rows, rows]).kernel_mean(queries)
    once = sketch(kernel, **options).fit(rows)
    assert np.allclose(once.merge(once).kernel_mean(queries), twice, rtol=1e-12)


# ---- the window of blocks ----


@pytest.mark.parametrize("kernel", SKETCHES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["long", "short"])
def test_blocked_window_lies_between_two_exact_ones(kernel, weighted, kind):
    """The bound, for every query at every time, whatever comes: bursts, weights without a mean."""
    rows, weights, queries = bursts(10_000, kind)
    weights = weights if weighted else np.ones(len(rows))
    block = int(ERROR * WINDOW)
    blocked = sketch(kernel, **FORGETTING["blocked"])
    sizes = {"shorter": WINDOW - block, "longer": WINDOW + block, "same": WINDOW}
    exact_ones = {x: sketch(kernel, sliding_window=n) for x, n in sizes.items()}
    seen = 0
    for part in np.array_split(np.arange(len(rows)), 83):
        for density in (blocked, *exact_ones.values()):
            density.partial_fit(rows[part], sample_weight=weights[part])
        seen += len(part)
        assert blocked.n_samples_seen_ == min(seen, WINDOW)
        got, total = raw(blocked, kernel, queries)
        (low, least), (high, most), (same, weight) = (
            raw(exact_ones[x], kernel, queries) for x in sizes
        )
        slack = 1e-9 * most  # of undoing the correction
        assert (low - slack <= got).all() and (got <= high + slack).all()
        assert least - slack <= total <= most + slack
        if seen <= WINDOW:
            assert np.array_equal(got, same) and total == weight
        if not weighted:
            assert abs(total - weight) < slack
            assert (np.abs(got - same) <= ERROR / 4 * weight + slack).all()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["long", "short"])
def test_stated_error_covers_the_oldest_block(kind, weighted):
    """Apart from the hashes' own: over time in the root mean square, of bursts too."""
    off, stated = [], []
    for seed in range(4):
        rows, weights, queries = bursts(16_000, kind, seed)
        weights = weights if weighted else np.ones(len(rows))
        blocked, same = sketch(**FORGETTING["blocked"]), sketch(sliding_window=WINDOW)
        for part in np.array_split(np.arange(len(rows)), 133):
            for density in (blocked, same):
                density.partial_fit(rows[part], sample_weight=weights[part])
            if part[0] > WINDOW:
                mean, error = blocked.kernel_mean(queries, return_std=True)
                each = blocked._kde_sketch.of_each_hash(queries)
                off.append(mean - same.kernel_mean(queries))
                stated.append(error**2 - each.var(axis=1, ddof=1) / 24)
    assert np.mean(np.square(off)) <= np.mean(stated)


def test_stated_error_covers_the_weight_of_other_rows():
    """Rows that never collide with the query, in bursts of weight: the window's weight is off."""
    here = np.array([[1.0, 2, 3, 4]])
    off, stated = [], []
    for seed in range(8):
        heavy = np.random.default_rng(seed).random(40) < 0.25
        blocked, same = sketch(**FORGETTING["blocked"]), sketch(sliding_window=WINDOW)
        for density in (blocked, same):
            density.fit(np.repeat(-here, 4000, axis=0), sample_weight=4.0 * heavy.repeat(100))
        for _ in range(30):
            for density in (blocked, same):
                density.partial_fit(np.repeat(here, 70, axis=0))
            mean, error = blocked.kernel_mean(here, return_std=True)
            assert (blocked._kde_sketch.of_each_hash(here) == mean).all()  # no error of hashes
            off.append(mean - same.kernel_mean(here))
            stated.append(error)
    assert 0 < np.mean(np.square(off)) <= np.mean(np.square(stated))


def test_memory_of_blocks_does_not_grow_with_the_window():
    rows = np.random.default_rng(0).normal(size=(8192, 4)).astype(np.float32)
    sizes = {}
    for window in (8000, 32_000):
        density = sketch(sliding_window=window, sliding_window_error=ERROR)
        for _ in range(2 * window // len(rows) + 1):
            density.partial_fit(rows)
        sizes[window] = density.extra_memory_
    table = 24 * 64 * 8  # bytes
    assert sizes[8000] == sizes[32_000] <= 3 * table + (1 / ERROR + 1) * table / 4
    assert sketch(sliding_window=32_000).fit(rows).extra_memory_ > 10 * sizes[32_000]


@pytest.mark.parametrize("options", [{"sliding_window": 2000}, {"n_bits": 12}])
def test_window_is_exact_where_blocks_save_nothing(options):
    rows = np.random.default_rng(0).normal(size=(6000, 4))
    options = FORGETTING["blocked"] | options
    density = sketch(**options).fit(rows)
    same = sketch(**options | {"sliding_window_error": 0.0}).fit(rows)
    assert np.array_equal(density.kernel_mean(rows[:5]), same.kernel_mean(rows[:5]))
    assert density.extra_memory_ == same.extra_memory_


def test_counts_of_a_block_beyond_16_bits():
    rows = np.zeros((60_000, 2)) + [1.0, 2.0]
    density = sketch(n_bits=1, sliding_window=200_000, sliding_window_error=0.4)
    for _ in range(6):
        density.partial_fit(rows)
    window = density._kde_sketch.forgetting
    assert {block.dtype for block in window.blocks} == {np.dtype(np.uint32)}
    assert density.kernel_mean(rows[:1]) == 1 and density.n_samples_seen_ == 200_000
    density.partial_fit(rows, sample_weight=np.full(len(rows), 1 / 3))
    density.partial_fit(rows, sample_weight=np.full(len(rows), 1 / 3))
    assert window.blocks[-1].dtype == np.float64
    assert np.allclose(density.kernel_mean(rows[:1]), 1, rtol=1e-12)


# ---- all of them ----


@pytest.mark.parametrize("kernel", SKETCHES)
@pytest.mark.parametrize("name", FORGETTING)
def test_batches_do_not_matter(kernel, name):
    rows, queries = clustered(6000, 5, 20, n_queries=6)
    weights = np.random.default_rng(7).uniform(0.5, 2, 6000)
    options = FORGETTING[name]
    whole = sketch(kernel, **options).fit(rows, sample_weight=weights)
    threads = sketch(kernel, n_jobs=2, **options).fit(rows, sample_weight=weights)
    parts = sketch(kernel, **options)
    cuts = np.sort(np.random.default_rng(1).integers(6000, size=40))
    for part in np.split(np.arange(6000), cuts):
        if len(part):
            parts.partial_fit(rows[part], sample_weight=weights[part])
    single = sketch(kernel, **options).fit(rows[:5000], sample_weight=weights[:5000])
    for i in range(5000, 6000):
        single.partial_fit(rows[i : i + 1], sample_weight=weights[i : i + 1])
    wanted = whole.kernel_mean(queries, return_std=True)
    assert np.array_equal(threads.kernel_mean(queries, return_std=True), wanted)
    for density in (parts, single):
        got = density.kernel_mean(queries, return_std=True)
        if name == "half_life":  # numpy may round the power of 2 of one row in another way
            assert np.allclose(got, wanted, rtol=1e-12, atol=0)
        else:
            assert np.array_equal(got, wanted)
        assert density.n_samples_seen_ == whole.n_samples_seen_


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("n", [100, 4400, 5000])
@pytest.mark.parametrize("name", FORGETTING)
def test_copies_go_on_alike(name, n, weighted):
    rows, queries = clustered(6000, 5, 20, n_queries=6)
    weights = np.random.default_rng(7).uniform(0.5, 2, 6000) if weighted else np.ones(6000)
    density = sketch(**FORGETTING[name]).fit(rows[:n], sample_weight=weights[:n])
    file = io.BytesIO()
    density.save(file)
    file.seek(0)
    copies = [LSHKernelDensity.load(file), pickle.loads(pickle.dumps(density))]
    again = io.BytesIO()
    copies[0].save(again)
    assert again.getvalue() == file.getvalue()
    for step in range(2):
        for copy in copies:
            assert np.array_equal(
                copy.kernel_mean(queries, return_std=True),
                density.kernel_mean(queries, return_std=True),
            )
            assert copy.n_samples_seen_ == density.n_samples_seen_
            assert copy.extra_memory_ == density.extra_memory_
        for copy in (density, *copies) if step == 0 else ():
            copy.partial_fit(rows[n:], sample_weight=weights[n:])
    fresh = clone(density).fit(rows, sample_weight=weights)
    assert np.array_equal(fresh.kernel_mean(queries), density.kernel_mean(queries))


def test_queries_change_nothing():
    rows, queries = clustered(4500, 5, 20, n_queries=6)
    for options in FORGETTING.values():
        density = sketch(**options).fit(rows)
        before = pickle.dumps(density)
        density.kernel_mean(queries, return_std=True)
        density.score_samples(queries)
        assert pickle.dumps(density) == before


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(half_life=0), ValueError, "half_life must be a finite number > 0"),
        (dict(half_life=0.9), ValueError, "half_life must be at least 1"),
        (dict(half_life=np.inf), ValueError, "half_life must be a finite number"),
        (dict(half_life="9"), TypeError, "half_life must be a finite number"),
        (dict(half_life=9, sliding_window=9), ValueError, "exclude each other"),
        (dict(sliding_window_error=0.1), ValueError, "needs a sliding_window"),
        (dict(sliding_window=9, sliding_window_error=0.6), ValueError, "from 0 to 0.5, got 0.6"),
        (dict(sliding_window=9, sliding_window_error=None), ValueError, "from 0 to 0.5, got None"),
        (dict(sliding_window=9.0), TypeError, "sliding_window must be an integer"),
        (
            dict(half_life=9, algorithm="brute"),
            ValueError,
            "half_life needs algorithm='bucket_sum'",
        ),
    ],
)
def test_bad_parameters(options, error, message):
    density = sketch().set_params(**options)
    with pytest.raises(error, match=message):
        density.fit(np.eye(4))


@pytest.mark.parametrize("name", FORGETTING)
def test_what_forgets_cannot_be_unfitted_or_merged_with_others(name):
    rows = np.random.default_rng(0).normal(size=(5000, 4))
    density = sketch(**FORGETTING[name]).fit(rows)
    before = pickle.dumps(density)
    with pytest.raises(ValueError, match="partial_unfit needs sliding_window=None and half_life"):
        density.partial_unfit(rows[:9])
    with pytest.raises(ValueError, match="both or none"):
        density.merge(sketch().fit(rows))
    with pytest.raises(ValueError, match="hash functions"):
        density.merge(sketch(random_state=1, **FORGETTING[name]).fit(rows))
    other = dict(half_life=9) if name == "half_life" else FORGETTING[name]
    with pytest.raises(ValueError, match="half_life differ|sliding window cannot be merged"):
        density.merge(sketch(**other).fit(rows))
    assert pickle.dumps(density) == before
