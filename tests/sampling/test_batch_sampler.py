"""Batches from buckets: unbiased means whatever the tables, and the way through a DataLoader."""

import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from lshkit.hashing import EuclideanLSH, FastHadamard, Hyperplane, RandomBinning
from lshkit.sampling import LSHBatchSampler, WeightedDataset

N, D = 60, 6
ROWS = np.random.default_rng(0).standard_normal((N, D)) * np.linspace(0.3, 3, N)[:, None]
QUERY = np.random.default_rng(1).standard_normal(D)
TWO = np.stack([QUERY, -QUERY])
COSINES = ROWS @ QUERY / np.linalg.norm(ROWS, axis=-1) / np.linalg.norm(QUERY)
VALUES = np.linspace(1, 2, N) * np.exp(COSINES)  # what the mean of is estimated

FAMILIES = {
    "hyperplane": lambda seed, n_bits=3: Hyperplane(D, n_bits, 4, seed=seed),
    "hadamard": lambda seed, n_bits=3: FastHadamard(D, n_bits, 4, seed=seed),
    "euclidean": lambda seed: EuclideanLSH(D, 2, 4, width=6.0, seed=seed),
    "binning": lambda seed: RandomBinning(D, 4, bandwidth=5.0, seed=seed),
}
ROW_WEIGHTS = [None, "norms", np.linspace(1, 2, N)]


def sampler_of(hasher, query=QUERY, batch_size=10, rows=ROWS, **options):
    return LSHBatchSampler(hasher, rows, lambda: query, batch_size, **options)


def estimates(sampler, n_batches, values=VALUES):
    """`(n_batches,)`: the weighted means."""
    batches = (sampler.draw() for _ in range(n_batches))
    return np.array([(weights * values[indices]).mean() for indices, weights in batches])


def assert_unbiased(estimated, expected):
    standard_error = estimated.std() / np.sqrt(len(estimated))
    assert abs(estimated.mean() - expected) < 4 * standard_error
    return standard_error


# ---------------------------------------------------------------- mixture: for the very tables


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("row_weights", ROW_WEIGHTS, ids=["uniform", "norms", "array"])
@pytest.mark.parametrize("query", [QUERY, TWO], ids=["one", "two"])
def test_mixture_is_unbiased_for_any_tables(family, row_weights, query):
    hasher = FAMILIES[family](seed=0)
    sampler = sampler_of(hasher, query, row_weights=row_weights, batch_size=7, seed=1)
    error = assert_unbiased(estimates(sampler, 800), VALUES.mean())
    assert error < 0.02 * VALUES.mean()


@pytest.mark.parametrize("row_weights", ROW_WEIGHTS, ids=["uniform", "norms", "array"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_mixture_with_mostly_empty_buckets(row_weights, batch_size):
    hasher = FAMILIES["hyperplane"](seed=3, n_bits=10)
    sampler = sampler_of(hasher, TWO, batch_size, row_weights=row_weights, seed=1)
    empty = sampler._tables.bucket_sizes(hasher.hash(TWO)) == 0
    assert 0.5 <= empty.mean() < 1
    assert_unbiased(estimates(sampler, 1500), VALUES.mean())


@pytest.mark.parametrize("row_weights", ROW_WEIGHTS, ids=["uniform", "norms", "array"])
@pytest.mark.parametrize("uniform_share", [0.05, 0.5, 1.0])
def test_draws_of_mixture_have_the_stated_probabilities(row_weights, uniform_share):
    """Chi-square over the rows, and the probabilities of all rows sum to 1."""
    hasher = FAMILIES["hyperplane"](seed=0)
    options = {"row_weights": row_weights, "uniform_share": uniform_share}
    sampler = sampler_of(hasher, TWO, 50, seed=5, **options)
    probability, counts = np.full(N, np.nan), np.zeros(N)
    for _ in range(500):
        indices, weights = sampler.draw()
        probability[indices] = 1 / (N * weights)
        np.add.at(counts, indices, 1)
    np.testing.assert_allclose(probability.sum(), 1, rtol=1e-12)
    # Draws of a batch come from the tables by turns, which makes counts less random, never more.
    assert stats.chisquare(counts, counts.sum() * probability).pvalue > 1e-4


def test_weights_of_mixture_are_bounded():
    sampler = sampler_of(FAMILIES["hadamard"](seed=0), uniform_share=0.25, seed=0)
    assert max(sampler.draw()[1].max() for _ in range(200)) <= 4


def test_near_rows_are_drawn_more_often():
    hasher = Hyperplane(D, 4, 32, seed=0)
    sampler = sampler_of(hasher, batch_size=1000, uniform_share=0.1, seed=0)
    indices, _ = sampler.draw()
    assert COSINES[indices].mean() > COSINES.mean() + 0.3


# ---------------------------------------------------------------- collision: over hash functions


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("row_weights", ROW_WEIGHTS, ids=["uniform", "norms", "array"])
def test_collision_weights_are_unbiased_over_hash_functions(family, row_weights):
    means = []
    for seed in range(250):
        hasher = FAMILIES[family](seed=seed)
        options = {"row_weights": row_weights, "weighting": "collision", "seed": seed}
        means.append(estimates(sampler_of(hasher, TWO, 16, **options), 1)[0])
    assert_unbiased(np.array(means), VALUES.mean())


def test_an_empty_bucket_counts_as_zero():
    """Skipping the empty draws would give 1 / (1 - their share) times as much."""
    means, empty = [], []
    for seed in range(500):
        hasher = FAMILIES["hyperplane"](seed=seed, n_bits=10)
        sampler = sampler_of(hasher, batch_size=16, weighting="collision", seed=seed)
        indices, weights = sampler.draw()
        assert (indices >= 0).all() and (indices < N).all()
        means.append((weights * VALUES[indices]).mean())
        empty.append((weights == 0).mean())
    assert np.mean(empty) > 0.5
    error = assert_unbiased(np.array(means), VALUES.mean())
    assert np.mean(means) / (1 - np.mean(empty)) > VALUES.mean() + 8 * error


# ---------------------------------------------------------------- the model's gradient


@pytest.mark.parametrize("weighting", ["mixture", "collision"])
def test_gradient_of_least_squares_is_unbiased(weighting):
    rng = np.random.default_rng(2)
    x, y, theta = rng.standard_normal((N, D)), rng.standard_normal(N), rng.standard_normal(D)
    rows = np.concatenate([x, y[:, None]], -1)
    query = np.append(theta, -1)
    gradients = 2 * (x @ theta - y)[:, None] * x
    means = []
    for seed in range(250):
        sampler = LSHBatchSampler(
            Hyperplane(D + 1, 3, 8, seed=seed),
            rows,
            lambda: np.stack([query, -query]),
            8,
            weighting=weighting,
            seed=seed,
        )
        indices, weights = sampler.draw()
        means.append((weights[:, None] * gradients[indices]).mean(0))
    error = np.std(means, 0) / np.sqrt(len(means))
    assert (np.abs(np.mean(means, 0) - gradients.mean(0)) < 4 * error).all()


def test_the_query_is_asked_for_at_every_batch():
    asked = []

    def query():
        asked.append(len(asked))
        return QUERY if len(asked) % 2 else -QUERY

    sampler = LSHBatchSampler(Hyperplane(D, 4, 32, seed=0), ROWS, query, 400, n_batches=6, seed=0)
    means = [(ROWS[[i for i, _ in batch]] @ QUERY).mean() for batch in sampler]
    assert len(asked) == len(means) == 6
    assert min(means[::2]) > 0 > max(means[1::2])


# ---------------------------------------------------------------- batches


def test_pairs_of_a_pass():
    sampler = sampler_of(FAMILIES["hadamard"](seed=0), batch_size=7, seed=4)
    assert len(sampler) == 9  # 60 rows
    batches = list(sampler)
    assert len(batches) == 9
    assert all(len(batch) == 7 for batch in batches)
    index, weight = batches[0][0]
    assert type(index) is int and type(weight) is float
    same = sampler_of(FAMILIES["hadamard"](seed=0), batch_size=7, seed=4)
    assert list(same) == batches
    assert list(same) != batches
    indices, weights = sampler_of(FAMILIES["hadamard"](seed=0), batch_size=7, seed=4).draw()
    assert list(zip(indices.tolist(), weights.tolist(), strict=True)) == batches[0]
    assert indices.dtype == np.int64 and weights.dtype == np.float64


def test_update():
    sampler = sampler_of(FAMILIES["hyperplane"](seed=0), row_weights="norms", seed=0)
    other = FAMILIES["hyperplane"](seed=1)
    assert sampler.update(hasher=other) is sampler
    fresh = sampler_of(other, row_weights="norms", seed=0)
    assert list(sampler) == list(fresh)
    sampler.update(ROWS[:20])  # the norms of these
    indices, weights = sampler.draw()
    assert indices.max() < 20
    assert sampler.n_rows == 20 and len(sampler) == 2
    assert_unbiased(estimates(sampler, 800), VALUES[:20].mean())
    with pytest.raises(ValueError, match="rows must be finite"):
        sampler.update(np.full((3, D), np.nan))
    assert sampler.n_rows == 20  # as it was


def test_rows_without_weight_are_never_drawn():
    weights = np.arange(N) % 2
    sampler = sampler_of(FAMILIES["hyperplane"](seed=0), row_weights=weights, seed=0)
    drawn = np.concatenate([sampler.draw()[0] for _ in range(200)])
    assert (drawn % 2 == 1).all()
    assert_unbiased(estimates(sampler, 800, VALUES * weights), (VALUES * weights).mean())


def test_zero_queries_and_rows_have_no_angle():
    rows = ROWS.copy()
    rows[5] = 0
    hasher = FAMILIES["hyperplane"](seed=0)
    sampler = sampler_of(hasher, np.zeros(D), rows=rows, seed=0)  # a model that starts at zero
    assert_unbiased(estimates(sampler, 800), VALUES.mean())
    with pytest.raises(ValueError, match="rows must not be zeros, .* got row 5"):
        sampler_of(hasher, rows=rows, weighting="collision")
    with pytest.raises(ValueError, match="query.. must not be zeros"):
        sampler_of(hasher, np.zeros(D), weighting="collision").draw()


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be an integer >= 1, got 0"),
        ({"weighting": "lgd"}, ValueError, "weighting must be 'mixture' or 'collision', got 'lgd'"),
        ({"uniform_share": 0}, ValueError, "uniform_share must be a finite number > 0, got 0"),
        ({"uniform_share": 1.5}, ValueError, "uniform_share must be at most 1, got 1.5"),
        ({"n_batches": 0}, ValueError, "n_batches must be an integer >= 1, got 0"),
        ({"seed": -1}, ValueError, "seed must be an integer >= 0, got -1"),
        ({"row_weights": "length"}, ValueError, "row_weights must be None, 'norms' or an array"),
        ({"row_weights": np.ones(3)}, ValueError, r"weights must have shape \(60,\), got \(3,\)"),
        ({"row_weights": -np.ones(N)}, ValueError, "weights must be finite and >= 0, got -1.0 in"),
        ({"row_weights": np.zeros(N)}, ValueError, "row_weights must not be all zero"),
        ({"rows": ROWS[:0]}, ValueError, "rows must have at least one row"),
        ({"rows": ROWS[:, :3]}, ValueError, r"rows must have shape \(n, 6\), got \(60, 3\)"),
        ({"rows": np.where(ROWS > 2.9, np.nan, ROWS)}, ValueError, "got NaN or infinity in row"),
        ({"rows": "rows"}, TypeError, "rows must hold real numbers"),
    ],
)
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=message):
        sampler_of(FAMILIES["hyperplane"](seed=0), **options)


@pytest.mark.parametrize("scale", [2.0**-1040, 2.0**1000])
def test_size_of_row_weights_does_not_matter(scale):
    weights = np.arange(1.0, N + 1)
    draws = [
        sampler_of(FAMILIES["hadamard"](seed=0), row_weights=w, seed=0).draw()
        for w in (weights, weights * scale)
    ]
    np.testing.assert_array_equal(*draws)


def test_errors_of_weights_name_the_argument():
    for weights in (np.ones(3), -np.ones(N)):
        with pytest.raises(ValueError, match="^row_weights must"):
            sampler_of(FAMILIES["hadamard"](seed=0), row_weights=weights)


@pytest.mark.parametrize("weighting", ["mixture", "collision"])
def test_lengths_that_float32_does_not_hold(weighting):
    hasher = FAMILIES["hadamard"](seed=0)
    options = dict(weighting=weighting, seed=0)
    for scale in (1e-200, 1e200):
        got = sampler_of(hasher, scale * QUERY, rows=scale * ROWS, **options).draw()
        expected = sampler_of(hasher, QUERY, **options).draw()
        np.testing.assert_array_equal(got[0], expected[0])
        np.testing.assert_allclose(got[1], expected[1], rtol=1e-6)


def test_weights_of_far_rows_that_share_a_code_by_chance_are_bounded():
    hasher = RandomBinning(6, 4, bandwidth=1e-6, seed=0)
    sampler = sampler_of(hasher, QUERY, weighting="collision", seed=0)
    p = sampler._collision_probability(QUERY[None], ROWS[:5])
    np.testing.assert_allclose(p, 2.0**-32)


def test_bad_hasher_and_query():
    hasher = FAMILIES["hyperplane"](seed=0)
    with pytest.raises(TypeError, match="hasher must be a hash family of lshkit.hashing, got int"):
        sampler_of(3)
    with pytest.raises(TypeError, match="query must be callable, got ndarray"):
        LSHBatchSampler(hasher, ROWS, QUERY, 10)
    for query, message in (
        (QUERY[:3], r"query.. must have shape \(6,\) or \(k, 6\), got \(1, 3\)"),
        (TWO[:0], r"query.. must have shape .* got \(0, 6\)"),
        (QUERY * np.nan, "query.. must be finite"),
    ):
        with pytest.raises(ValueError, match=message):
            sampler_of(hasher, query).draw()


# ---------------------------------------------------------------- torch


def test_sampling_does_not_import_torch(tmp_path):
    code = "import sys, lshkit.sampling; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_tensors():
    torch = pytest.importorskip("torch")
    query = torch.from_numpy(QUERY).requires_grad_()
    rows = torch.from_numpy(ROWS)
    hasher = FAMILIES["hadamard"](seed=0)
    sampler = sampler_of(hasher, query, rows=rows, row_weights="norms", seed=4)
    indices, weights = sampler.draw()
    assert indices.dtype == torch.int64 and weights.dtype == torch.float64
    expected = sampler_of(hasher, row_weights="norms", seed=4).draw()
    np.testing.assert_array_equal(indices.numpy(), expected[0])
    np.testing.assert_array_equal(weights.numpy(), expected[1])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_data_loader(num_workers):
    torch = pytest.importorskip("torch")
    from torch.utils.data import DataLoader, TensorDataset

    items = torch.arange(N), torch.from_numpy(ROWS)
    hasher = FAMILIES["hadamard"](seed=0)
    sampler = sampler_of(hasher, batch_size=7, n_batches=5, seed=4)
    expected = list(sampler_of(hasher, batch_size=7, n_batches=5, seed=4))
    dataset = WeightedDataset(TensorDataset(*items))
    assert len(dataset) == N
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers)
    assert len(loader) == 5
    for (index, rows, weight), batch in zip(loader, expected, strict=True):
        assert index.tolist() == [i for i, _ in batch]
        assert torch.equal(rows, items[1][index])
        assert weight.tolist() == [w for _, w in batch]
        assert weight.dtype == torch.float64


def test_items_that_are_no_tuples():
    dataset = WeightedDataset([10, 11, 12])
    assert dataset[2, 0.5] == (12, 0.5)
    assert WeightedDataset([(1, 2)])[0, 0.5] == (1, 2, 0.5)
    with pytest.raises(TypeError, match="an .index, weight. of LSHBatchSampler is wanted, got 2"):
        dataset[2]


def test_an_update_that_fails_changes_nothing():
    sampler, other = (
        LSHBatchSampler(FastHadamard(5, 3, 4, seed=0), np.eye(5), lambda: np.ones(5), 6, seed=1)
        for _ in range(2)
    )
    with pytest.raises(ValueError, match="hasher must have n_features=5"):
        sampler.update(hasher=FastHadamard(3, 3, 4, seed=0))
    with pytest.raises(ValueError, match="rows must have shape"):
        sampler.update(np.ones((4, 3)))
    assert all(np.array_equal(*x) for x in zip(sampler.draw(), other.draw(), strict=True))
