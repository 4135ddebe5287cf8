"""The oracle against things simpler than itself: loops, known values and finite differences."""

import numpy as np
import pytest

from lshkit import reference
from lshkit.hash_functions import make_parameters

NORMALIZE = ["l2", "sum", None]


def attention_inputs(n_q=5, n_k=7, d=4, d_v=3, seed=0):
    rng = np.random.default_rng(seed)
    query, key = rng.standard_normal((n_q, d)), rng.standard_normal((n_k, d))
    value, grad_out = rng.standard_normal((n_k, d_v)), rng.standard_normal((n_q, d_v))
    return query, key, value, grad_out


def random_codes(n_q=5, n_k=7, n_hashes=6, n_bits=2, seed=1):
    rng = np.random.default_rng(seed)
    return (rng.integers(0, 2**n_bits, (n, n_hashes), dtype=np.uint8) for n in (n_q, n_k))


def derivative(function, x, direction, step=1e-6):
    return (function(x + step * direction) - function(x - step * direction)) / (2 * step)


def assert_gradient(function, x, grad, seed=3):
    """The directional derivative of a scalar function in a random direction."""
    direction = np.random.default_rng(seed).standard_normal(x.shape)
    # central differences at step 1e-6 in float64: truncation 1e-12, cancellation 1e-10
    np.testing.assert_allclose(
        (grad * direction).sum(), derivative(function, x, direction), rtol=1e-6, atol=1e-8
    )


def test_walsh_hadamard():
    matrix = reference.walsh_hadamard(8)
    popcount = [[bin(i & j).count("1") for j in range(8)] for i in range(8)]
    np.testing.assert_array_equal(matrix, (-1.0) ** np.array(popcount))


@pytest.mark.parametrize("d", [1, 7, 64, 100])
def test_hadamard_projections_are_rotations(d):
    n_bits, columns = 3, 64 if d <= 64 else 128
    parameters = make_parameters("hadamard", d, n_bits, 2 * columns, seed=0)
    x = np.random.default_rng(1).standard_normal((4, d))
    z = reference.projections(x, parameters, "hadamard", n_bits, 2 * columns)
    assert z.shape == (4, 2 * columns, n_bits)
    rotations = z.reshape(4, 2, columns, n_bits)
    length = np.linalg.norm(x, axis=-1)[:, None, None] * columns**1.5  # three unnormalised H
    # parameters are float32, so cosines and sines are off by 6e-8
    np.testing.assert_allclose(np.linalg.norm(rotations, axis=2) / length, 1, rtol=1e-6)


def test_hyperplane_projections():
    parameters = make_parameters("hyperplane", 5, 3, 4, seed=0)
    x = np.random.default_rng(1).standard_normal((2, 5))
    z = reference.projections(x, parameters, "hyperplane", 3, 4)
    for hash_, bit in np.ndindex(4, 3):
        np.testing.assert_allclose(z[:, hash_, bit], x @ parameters[0, hash_ * 3 + bit])


@pytest.mark.parametrize("family", ["hyperplane", "hadamard"])
def test_one_function_set_for_each_head(family):
    parameters = make_parameters(family, 5, 3, 4, n_sets=2, seed=0)
    x = np.random.default_rng(1).standard_normal((3, 2, 6, 5))  # (batch, heads, rows, features)
    both = reference.hash(x, parameters, family, 3, 4)
    assert both.shape == (3, 2, 6, 4)
    for head in range(2):
        one = reference.hash(x[:, head], parameters[head], family, 3, 4)
        np.testing.assert_array_equal(both[:, head], one)


def test_codes():
    projected = np.array([[1.0, -1.0, 2.0], [0.0, np.nan, -0.0], [-np.inf, np.inf, 1e-300]])
    np.testing.assert_array_equal(reference.codes(projected), [0b101, 0, 0b110])
    assert reference.codes(np.ones((1, 8))).dtype == np.uint8
    assert reference.codes(np.ones((1, 9))).dtype == np.uint16
    assert reference.codes(np.ones((1, 16)))[0] == 65535


@pytest.mark.parametrize(
    ("angle", "expected"), [(0, 1), (np.pi / 4, 0.75**3), (np.pi / 2, 0.5**3), (np.pi, 0)]
)
def test_collision_probability(angle, expected):
    y = 5 * np.array([np.cos(angle), np.sin(angle)])
    probability = reference.collision_probability(np.array([2.0, 0]), y, 3)
    np.testing.assert_allclose(probability, expected, rtol=1e-7, atol=1e-20)
    assert 0 <= probability <= 1


def test_collision_probability_of_zero_is_nan():
    assert np.isnan(reference.collision_probability(np.zeros(2), np.ones(2), 3))


@pytest.mark.parametrize("n_bits", [1, 8, 16])
def test_slope_and_its_lower_bound(n_bits):
    cosine = np.linspace(-0.99, 0.99, 41)
    slope = reference.cosine_probability_slope(cosine, n_bits, 1e-12)
    numeric = derivative(lambda c: reference.cosine_probability(c, n_bits), cosine, 1.0)
    np.testing.assert_allclose(slope, numeric, rtol=1e-6, atol=1e-9)
    assert (n_bits / 2 * reference.cosine_probability(cosine, n_bits) <= slope).all()  # eq. 4
    floored = reference.cosine_probability_slope(np.array([1.0]), n_bits, 1e-6)
    np.testing.assert_allclose(floored, n_bits / np.pi * 1e3)


@pytest.mark.parametrize("causal", [False, True])
def test_bucket_sum_against_loops(causal):
    _, _, value, _ = attention_inputs()
    query_codes, key_codes = random_codes()
    key_mask = np.array([1, 1, 0, 1, 1, 0, 1], bool)
    expected = np.zeros((5, 3))
    for i, j, h in np.ndindex(5, 7, 6):
        if key_mask[j] and not (causal and j > i) and query_codes[i, h] == key_codes[j, h]:
            expected[i] += value[j] / 6
    value[~key_mask] = np.nan  # what a masked key holds does not matter
    got = reference.bucket_sum(query_codes, key_codes, value, causal=causal, key_mask=key_mask)
    np.testing.assert_allclose(got, expected, atol=1e-15)


def test_nan_value_reaches_the_sums_that_contain_it():
    query_codes, key_codes = np.array([[0], [1], [1], [2]]), np.array([[3], [1], [2]])
    value = np.ones((3, 3))
    value[1, 1] = np.nan
    got = reference.bucket_sum(query_codes, key_codes, value)
    np.testing.assert_array_equal(np.isnan(got[:, 1]), [False, True, True, False])
    assert np.isfinite(got[:, [0, 2]]).all()


@pytest.mark.parametrize("normalize", NORMALIZE)
def test_attention_rows_are_normalised(normalize):
    query, key, value, _ = attention_inputs()
    query_codes, key_codes = random_codes()
    raw = reference.bucket_sum(query_codes, key_codes, value)
    out = reference.yoso_forward(query, key, value, query_codes, key_codes, normalize=normalize)
    if normalize == "l2":
        expected = raw / np.linalg.norm(raw, axis=-1, keepdims=True)
    elif normalize == "sum":
        expected = raw / reference.bucket_sum(query_codes, key_codes, np.ones((7, 1)))
    else:
        expected = raw
    np.testing.assert_allclose(out, expected, rtol=1e-12)


@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("estimator", ["sampled", "expected"])
def test_no_visible_key_gives_zeros(estimator, normalize):
    query, key, value, grad_out = attention_inputs()
    options = {"key_mask": np.zeros(7, bool), "normalize": normalize}
    if estimator == "sampled":
        codes = tuple(random_codes())
        out = reference.yoso_forward(query, key, value, *codes, **options)
        grads = reference.yoso_backward(query, key, value, *codes, grad_out, 2, **options)
    else:
        out = reference.expected_forward(query, key, value, 2, **options)
        grads = reference.expected_backward(query, key, value, grad_out, 2, **options)
    for array in (out, *grads):
        assert not array.any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("normalize", NORMALIZE)
def test_expected_gradient_against_finite_differences(normalize, causal):
    query, key, value, grad_out = attention_inputs()
    options = {"normalize": normalize, "causal": causal}
    options["key_mask"] = np.array([1, 1, 0, 1, 1, 0, 1], bool)

    def loss(query=query, key=key, value=value):
        return (grad_out * reference.expected_forward(query, key, value, 8, **options)).sum()

    grads = reference.expected_backward(query, key, value, grad_out, 8, gradient="exact", **options)
    assert_gradient(lambda x: loss(query=x), query, grads[0])
    assert_gradient(lambda x: loss(key=x), key, grads[1])
    assert_gradient(lambda x: loss(value=x), value, grads[2])


@pytest.mark.parametrize("estimator", ["sampled", "expected"])
@pytest.mark.parametrize("normalize", NORMALIZE)
def test_lower_bound_gradient_against_finite_differences(normalize, estimator):
    """Weights w (1 + n_bits / 2 (cosine - cosine_0)) have the slope n_bits / 2 w at cosine_0."""
    query, key, value, grad_out = attention_inputs()
    query_codes, key_codes = random_codes()
    n_bits = 3
    base = reference.unit(query) @ reference.unit(key).T
    if estimator == "sampled":
        weights = reference.collision_counts(query_codes, key_codes) / query_codes.shape[-1]
        grads = reference.yoso_backward(
            query, key, value, query_codes, key_codes, grad_out, n_bits, normalize=normalize
        )
    else:
        weights = reference.cosine_probability(base, n_bits)
        grads = reference.expected_backward(
            query, key, value, grad_out, n_bits, normalize=normalize
        )

    def loss(query=query, key=key, value=value):
        moved = reference.unit(query) @ reference.unit(key).T - base
        surrogate = weights * (1 + n_bits / 2 * moved)
        return (grad_out * reference.attention_forward(surrogate, value, normalize)).sum()

    assert_gradient(lambda x: loss(query=x), query, grads[0])
    assert_gradient(lambda x: loss(key=x), key, grads[1])
    assert_gradient(lambda x: loss(value=x), value, grads[2])


@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize(
    "estimator, gradient",
    [
        *(("sampled", "lower_bound"), ("sampled", "unbiased")),
        *(("expected", "lower_bound"), ("expected", "exact")),
    ],
)
def test_non_finite_rows_and_masked_keys(estimator, normalize, gradient):
    """A bad query spoils its row, a bad key takes no part, a masked key does not exist."""
    query, key, value, grad_out = attention_inputs()
    query_codes, key_codes = random_codes()
    mask = np.ones(7, bool)
    mask[[2, 5]] = False
    bad_query, bad_key, bad_value = query.copy(), key.copy(), value.copy()
    bad_query[1, 2], bad_key[3, 0], bad_value[3] = np.nan, np.inf, np.nan
    bad_key[2], bad_value[2], bad_value[5] = np.nan, np.nan, np.inf

    def run(query, key, value, mask, grad_out):
        options = {"key_mask": mask, "normalize": normalize}
        if estimator == "sampled":
            codes = (query_codes, key_codes)
            out = reference.yoso_forward(query, key, value, *codes, **options)
            backward, last = reference.yoso_backward, (*codes, grad_out, 2)
        else:
            out = reference.expected_forward(query, key, value, 2, **options)
            backward, last = reference.expected_backward, (grad_out, 2)
        return out, backward(query, key, value, *last, gradient=gradient, **options)

    out, (grad_query, grad_key, grad_value) = run(bad_query, bad_key, bad_value, mask, grad_out)
    # the same with the bad key masked and no gradient from the bad query
    mask, grad_out = mask.copy(), grad_out.copy()
    mask[3], grad_out[1] = False, 0
    want, (want_query, want_key, want_value) = run(query, key, value, mask, grad_out)
    want[1] = want_query[1] = want_key[3] = np.nan
    np.testing.assert_allclose(out, want, rtol=1e-12)
    np.testing.assert_allclose(grad_query, want_query, rtol=1e-12)
    np.testing.assert_allclose(grad_key, want_key, rtol=1e-12)
    np.testing.assert_allclose(grad_value, want_value, rtol=1e-12)
    assert not grad_key[[2, 5]].any()
    assert not grad_value[[2, 3, 5]].any()


def test_expected_forward_is_the_mean_of_sampled_ones():
    n_bits, n_seeds = 2, 400
    query, key, value, _ = attention_inputs()
    sums = []
    for seed in range(n_seeds):
        parameters = make_parameters("hyperplane", 4, n_bits, 1, seed=seed)
        codes = (reference.hash(x, parameters, "hyperplane", n_bits, 1) for x in (query, key))
        sums.append(reference.yoso_forward(query, key, value, *codes, normalize=None))
    expected = reference.expected_forward(query, key, value, n_bits, normalize=None)
    standard_error = np.std(sums, axis=0) / np.sqrt(n_seeds)
    assert (np.abs(np.mean(sums, axis=0) - expected) < 4 * standard_error).all()
