"""gradient_rank: a sketch of the lower bound's gradient, against its formula and its statistics."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cases.attention import (  # noqa: E402
    NORMALIZE,
    SAMPLED,
    arrays,
    attention_inputs,
    codes_of,
    gradients,
    padding_mask,
    reference_options,
)

from lshkit import hash_functions, reference, torch_ops  # noqa: E402
from lshkit.attention import Sampled, yoso_attention  # noqa: E402

# n_q, n_k, d, d_v, n_bits, gradient_rank: buckets of many rows, so that all products are sketched.
CASES = [
    (200, 200, 64, 64, 1, 8),
    (120, 130, 32, 32, 1, 4),
    (310, 290, 20, 33, 2, 7),  # parts of registers, padding to 64, groups that wrap around
    (90, 150, 16, 80, 1, 13),
    (150, 90, 96, 20, 1, 1),
    (70, 70, 17, 5, 1, 2),
]


def rotation_of(case, seed):
    n_values = case.value.shape[-1]
    parameters = hash_functions.make_rotation(n_values, case.value.shape[1], seed)
    return reference.rotation_matrix(parameters, n_values)


def core_gradients(case, codes, n_bits, rank, seed, normalize=None):
    """For codes that stay while the rotation changes."""
    rotation = torch.from_numpy(hash_functions.make_rotation(case.value.shape[-1], 1, seed))
    tensors = case.grad_out, case.query, case.key, case.value, None, None, None, *codes
    options = n_bits, False, torch_ops.NORMALIZE[normalize], 0, rank, rotation
    return [g.double().numpy() for g in torch_ops.yoso_attention_backward(*tensors, *options)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_equals_reference(sizes, normalize, is_causal):
    *shape, n_bits, rank = sizes
    case = attention_inputs(*shape)
    case.grad_out /= shape[1]
    mask = padding_mask(2, shape[1])
    mask[-1, : shape[1] // 2] = True
    estimator = replace(SAMPLED, n_bits=n_bits, n_hashes=11)
    sketched = replace(estimator, gradient_rank=rank)
    options = {"normalize": normalize, "seed": 5}
    actual = gradients(case, sketched, mask, is_causal, **options)
    exact = gradients(case, estimator, mask, is_causal, **options)
    expected = reference.sketched_backward(
        *arrays(case),
        *(codes_of(x, 5, estimator).numpy() for x in (case.query, case.key)),
        case.grad_out.double().numpy(),
        n_bits,
        rotation_of(case, 5),
        rank,
        **reference_options(mask, is_causal, normalize),
    )
    for a, e in zip(actual, expected, strict=False):
        # l2 divides by the norm of a sum that a row of few collisions makes small
        np.testing.assert_allclose(a.double().numpy(), e, rtol=0, atol=2e-4 * np.abs(e).max())
    torch.testing.assert_close(actual[2], exact[2], rtol=0, atol=0)  # values know no sketch


def test_rotation_is_orthogonal_and_isotropic():
    for n_values, columns in ((1, 16), (64, 64), (80, 128)):
        parameters = hash_functions.make_rotation(n_values, 3, seed=1)
        assert parameters.shape == (3, 3, columns) and parameters.dtype == np.float32
        rotation = reference.rotation_matrix(parameters, n_values)
        product = np.swapaxes(rotation, -1, -2) @ rotation
        np.testing.assert_allclose(
            product, np.broadcast_to(np.eye(n_values), product.shape), atol=1e-6
        )
    # E[u u^T] = 1 / D for every row u, so that any coordinates give an unbiased product
    rotations = reference.rotation_matrix(hash_functions.make_rotation(16, 4000, seed=2), 16)
    products = np.einsum("sri,srj->srij", rotations, rotations)
    error = products.mean(0) - np.eye(16) / 16
    standard_error = products.std(0) / np.sqrt(len(products))
    assert np.abs(error / standard_error).max() < 5  # of 4096, the largest of a normal sample is 4


@pytest.mark.parametrize("normalize", NORMALIZE)
def test_unbiased_over_the_rotation(normalize):
    """4 standard errors from the exact lower bound, with the codes fixed."""
    case = attention_inputs(60, 50, 16, 24, batch=1, heads=1)
    estimator = replace(SAMPLED, n_bits=1, n_hashes=6)
    codes = [codes_of(x, 3, estimator) for x in (case.query, case.key)]
    exact = core_gradients(case, codes, 1, 0, 0, normalize)
    n = 600
    samples = [core_gradients(case, codes, 1, 5, seed, normalize)[:2] for seed in range(n)]
    generator = np.random.default_rng(0)
    for which in range(2):
        x = np.stack([s[which] for s in samples]).reshape(n, -1)
        # Directions at random: single elements would be too many for four standard errors.
        directions = generator.standard_normal((x.shape[1], 12))
        x, wanted = x @ directions, exact[which].reshape(-1) @ directions
        error = (x.mean(0) - wanted) / (x.std(0, ddof=1) / np.sqrt(n))
        assert np.abs(error).max() < 4
        assert x.std(0).min() > 0  # it is a sketch


def test_variance_equals_theory():
    """Of one query's gradient along a direction w, for a uniformly random rotation.

    Hash h gives g^T Q m_h with Q = (D/R) P, P the projection on the group's R rotated coordinates,
    and m_h = sum_j v_j (k_j . w) over the colliding keys. With E[Q] = 1 and, for one group,
    var(g^T Q a) = kappa (D |g|^2 |a|^2 + (D - 2) (g . a)^2), kappa = (D - R) / (R (D + 2) (D - 1)),
    the errors of the C = D / R groups add up to zero: any two have a covariance of -1 / (C - 1)
    times that. So with a_c the sum of m_h over the hashes of group c, and abar their mean,
    var = kappa C / (C - 1) sum_c (D |g|^2 |a_c - abar|^2 + (D - 2) (g . (a_c - abar))^2).
    """
    size, rank, n_hashes, n_bits = 64, 16, 7, 1
    case = attention_inputs(40, 60, 24, size, batch=1, heads=1)
    case.grad_out[:, :, 1:] = 0
    estimator = replace(SAMPLED, n_bits=n_bits, n_hashes=n_hashes)
    codes = [codes_of(x, 3, estimator) for x in (case.query, case.key)]
    n = 4000
    rows = [core_gradients(case, codes, n_bits, rank, seed)[0][0, 0, 0] for seed in range(n)]
    query, key, value = (x[0, 0] for x in arrays(case))
    g = case.grad_out[0, 0, 0].double().numpy()
    generator = np.random.default_rng(1)
    unit = reference.unit(query[:1])[0]
    for w in generator.standard_normal((4, 24)):
        # The gradient's way through the unit norm: a tangent over the norm.
        tangent = (w - (w @ unit) * unit) / np.linalg.norm(query[0])
        along = reference.unit(key) @ tangent
        a = np.zeros((size // rank, size))
        for h in range(n_hashes):
            collide = codes[1][0, 0, :, h] == codes[0][0, 0, 0, h]
            a[h * len(a) // n_hashes] += n_bits / 2 / n_hashes * (along * collide.numpy()) @ value
        a -= a.mean(0)
        kappa = (size - rank) / (rank * (size + 2) * (size - 1))
        variance = (size * (g @ g) * (a**2).sum() + (size - 2) * ((a @ g) ** 2).sum()) * (
            kappa * len(a) / (len(a) - 1)
        )
        x = np.stack(rows) @ w
        x = (x - x.mean()) ** 2
        assert abs(x.mean() - variance) < 4 * x.std() / np.sqrt(n)


def test_exact_where_pairs_or_small_buckets_are_taken():
    for n, n_bits in ((150, 8), (1100, 12)):
        case = attention_inputs(n, n, 64, 64, batch=1, heads=1)
        estimator = replace(SAMPLED, n_bits=n_bits, n_hashes=3)
        exact = gradients(case, estimator, seed=1)
        sketched = gradients(case, replace(estimator, gradient_rank=1), seed=1)
        for a, b in zip(sketched, exact, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_full_rank_is_exact():
    case = attention_inputs(200, 200, 64, 64)
    estimator = replace(SAMPLED, n_bits=1, n_hashes=4)
    exact = gradients(case, estimator, seed=1)
    full = gradients(case, replace(estimator, gradient_rank=64), seed=1)
    for a, b in zip(full, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_that_take_no_part(is_causal):
    """A NaN or infinity, or anything in a masked key, reaches no other row."""
    case = attention_inputs(120, 100, 32, 32, batch=1, heads=2)
    mask = torch.ones(1, 100, dtype=torch.bool)
    mask[0, 7] = False
    estimator = replace(SAMPLED, n_bits=1, n_hashes=5, gradient_rank=4)
    options = {"seed": 2, "normalize": "sum"}
    clean = gradients(case, estimator, mask, is_causal, **options)
    bad = attention_inputs(120, 100, 32, 32, batch=1, heads=2)
    bad.key[:, :, 7], bad.value[:, :, 7] = torch.inf, torch.nan
    got = gradients(bad, estimator, mask, is_causal, **options)
    for a, b in zip(got, clean, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    bad.query[:, :, 5, 3] = torch.nan
    got = gradients(bad, estimator, mask, is_causal, **options)
    assert got[0][:, :, 5].isnan().all()
    assert got[0].isnan().sum() == got[0][:, :, 5].numel()
    assert got[1].isfinite().all() and got[2].isfinite().all()


def test_another_seed_gives_another_gradient():
    case = attention_inputs(130, 120, 64, 64, batch=1, heads=3)
    estimator = replace(SAMPLED, n_bits=4, n_hashes=8, gradient_rank=8)
    one, same, other = (gradients(case, estimator, seed=seed)[0] for seed in (9, 9, 10))
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_rotation_is_independent_of_the_hash_functions():
    parameters = hash_functions.make_parameters("hadamard", 64, 8, 32, 1, seed=4)
    rotation = hash_functions.make_rotation(64, 1, seed=4)
    assert not np.isin(rotation, parameters[:, :3]).any()


def test_half_precision_and_auto():
    case = attention_inputs(400, 400, 32, 32, batch=1, dtype=torch.bfloat16)
    inputs = [x.requires_grad_() for x in (case.query, case.key, case.value)]
    out = yoso_attention(*inputs, estimator=Sampled(n_bits=2, n_hashes=8, gradient_rank=4), seed=0)
    out.backward(case.grad_out)
    assert all(x.grad.dtype == torch.bfloat16 and x.grad.isfinite().all() for x in inputs)
    short = attention_inputs(9, 9, 8, 8)  # auto: the expectation, whose gradient is exact
    inputs = [x.requires_grad_() for x in (short.query, short.key, short.value)]
    out = yoso_attention(*inputs, estimator=Sampled(gradient_rank=2))
    got = torch.autograd.grad(out, inputs, short.grad_out)
    wanted = torch.autograd.grad(yoso_attention(*inputs), inputs, short.grad_out)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"gradient_rank": 0}, ValueError, "gradient_rank must be an integer >= 1, got 0"),
        ({"gradient_rank": 2.0}, TypeError, "gradient_rank must be an integer"),
        ({"gradient_rank": 4, "gradient": "unbiased"}, ValueError, 'gradient="lower_bound", got'),
    ],
)
def test_errors(options, error, match):
    with pytest.raises(error, match=match):
        Sampled(**options)


@pytest.mark.parametrize("expectation", ["auto", "never"])
def test_rank_is_at_most_the_columns_of_values(expectation):
    case = attention_inputs(17)
    estimator = Sampled(gradient_rank=33, expectation=expectation)
    with pytest.raises(ValueError, match="gradient_rank must be at most .* columns 32, got 33"):
        yoso_attention(case.query, case.key, case.value, estimator=estimator)


def test_opcheck_and_compile():
    case = attention_inputs(64, 64, 32, 32, batch=1, heads=2)
    seed = torch.tensor([3])
    torch.library.opcheck(torch.ops.lshkit.gradient_rotation.default, (seed, 2, 33))
    parameters = torch_ops.hash_parameters(seed, 2, 32, 1, 4, 1)
    rotation = torch_ops.gradient_rotation(seed, 2, 32)
    inputs = [x.requires_grad_() for x in (case.query, case.key, case.value)]
    arguments = *inputs, None, None, None, parameters, 1, 1, 4, False, 2, 0, 4, rotation
    torch.library.opcheck(torch.ops.lshkit.yoso_attention.default, arguments)

    def attend(query, key, value):
        estimator = replace(SAMPLED, n_bits=1, n_hashes=4, gradient_rank=4)
        return yoso_attention(query, key, value, estimator=estimator, seed=3)

    wanted = torch.autograd.grad(attend(*inputs), inputs, case.grad_out)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(*inputs), inputs, case.grad_out)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_vmap():
    case = attention_inputs(64, 64, 32, 32, batch=3, heads=2)

    def loss(query, key, value):
        estimator = replace(SAMPLED, n_bits=1, n_hashes=4, gradient_rank=4)
        tensors = (x[None] for x in (query, key, value))
        return yoso_attention(*tensors, estimator=estimator, seed=3).sum()

    tensors = case.query, case.key, case.value
    got = torch.func.vmap(torch.func.grad(loss))(*tensors)
    for b in range(3):
        wanted = torch.func.grad(loss)(*(x[b] for x in tensors))
        torch.testing.assert_close(got[b], wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("shape", "match"),
    [((1, 3, 32), "rotation: .*columns"), ((2, 3, 64), "rotation"), ((1, 2, 64), "rotation")],
)
def test_core_checks_the_rotation(shape, match):
    case = attention_inputs(40, 40, 64, 64, batch=1, heads=3)
    codes = [codes_of(x, 3) for x in (case.query, case.key)]
    tensors = case.grad_out, case.query, case.key, case.value, None, None, None, *codes
    with pytest.raises(ValueError, match=match):
        torch_ops.yoso_attention_backward(*tensors, 8, False, 2, 0, 4, torch.ones(shape))
    with pytest.raises(ValueError, match="rotation: gradient_rank needs one, was None"):
        torch_ops.yoso_attention_backward(*tensors, 8, False, 2, 0, 4)
