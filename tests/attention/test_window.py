"""The exact window of the sampled estimator."""

import math
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cases.attention import (  # noqa: E402
    FAMILIES,
    NORMALIZE,
    SAMPLED,
    arrays,
    attention_inputs,
    codes_of,
    float32_gradients,
    forward_and_gradients,
    padding_mask,
    reference_options,
)

from lshkit import reference, torch_ops  # noqa: E402
from lshkit.attention import Expected, Sampled, yoso_attention  # noqa: E402

GRADIENTS = ["lower_bound", "collided", "unbiased"]
# Odd lengths, n_q != n_k, d_v != d; below, at and above a block of 128 keys, of 24 queries, and a
# run of 768 queries.
SHAPES = [  # n_q, n_k, d, d_v
    (1, 1, 7, 5),
    (17, 17, 32, 32),
    (65, 17, 60, 64),
    (17, 200, 64, 7),
    (257, 257, 80, 80),
    (301, 130, 20, 33),
    (24, 129, 64, 64),
    (800, 801, 16, 16),
]
WINDOWS = [1, 2, 31, 130, 10**6]

# As in test_attention and test_attention_gradients. A weight that the window cancels leaves its
# rounding.
FLOAT32 = {"rtol": 1e-4, "atol": 1e-5}


def forward_and_gradients_reference(case, estimator, codes, mask, is_causal, normalize):
    n_bits, gradient, window = estimator.n_bits, estimator.gradient, estimator.window
    options = reference_options(mask, is_causal, normalize)
    codes = [x.numpy() for x in codes]
    out = reference.yoso_forward(*arrays(case), *codes, n_bits, window=window, **options)
    grad_out = case.grad_out.double().numpy()
    grads = reference.yoso_backward(
        *arrays(case), *codes, grad_out, n_bits, gradient=gradient, window=window, **options
    )
    return torch.from_numpy(out), [torch.from_numpy(x) for x in grads]


def assert_gradients_close(actual, expected, rtol=2e-4):
    """Relative to the largest element of each, as single ones cancel to nearly nothing."""
    for a, e in zip(actual, expected, strict=True):
        atol = rtol * max(0.01, float(e.nan_to_num().abs().max()))
        torch.testing.assert_close(a.double(), e, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_reference(shape, window, is_causal):
    case = attention_inputs(*shape, batch=2, heads=1 if shape[0] > 500 else 2)
    some = padding_mask(2, shape[1])
    # Every option, not every combination of them. 300 hashes are counted in 16 bits.
    for n_bits, n_hashes, mask, normalize, gradient in (
        (4, 11, None, None, "lower_bound"),
        (8, 11, some, "l2", "unbiased"),
        (9, 20, None, "sum", "collided"),
        (3, 11, some, "sum", "lower_bound"),
        (3, 300, None, "l2", "unbiased"),
    ):
        if n_hashes == 300 and shape[0] > 100:
            continue
        sizes = {"n_bits": n_bits, "n_hashes": n_hashes}
        estimator = replace(SAMPLED, gradient=gradient, window=window, **sizes)
        codes = [codes_of(x, 5, estimator) for x in (case.query, case.key)]
        words = {"normalize": normalize}
        out, grads = forward_and_gradients(case, estimator, mask, is_causal, seed=5, **words)
        expected, expected_grads = forward_and_gradients_reference(
            case, estimator, codes, mask, is_causal, **words
        )
        torch.testing.assert_close(out.double(), expected, **FLOAT32)
        assert_gradients_close(grads, expected_grads)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("normalize", NORMALIZE)
def test_a_window_over_all_is_the_expectation(normalize, gradient, is_causal):
    """Up to the rounding of the sampled sum, added and taken out again."""
    case = attention_inputs(65, 49, 24, 16)
    mask = torch.rand(2, 49, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[:, 0] = True
    estimator = replace(SAMPLED, n_bits=4, gradient=gradient, window=65)
    options = {"normalize": normalize}
    out, grads = forward_and_gradients(case, estimator, mask, is_causal, seed=0, **options)
    inputs = [x.requires_grad_() for x in (case.query, case.key, case.value)]
    options |= {"is_causal": is_causal, "causal_offset": 0}
    expected = yoso_attention(*inputs, mask, estimator=estimator.mean, **options)
    torch.testing.assert_close(out, expected.detach(), **FLOAT32)
    expected_grads = torch.autograd.grad(expected, inputs, case.grad_out)
    assert_gradients_close(grads, [x.double() for x in expected_grads])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("hasher", FAMILIES)
def test_unbiased_and_less_noisy(hasher, is_causal):
    """The raw output and the gradients whose mean is an exact one, over many hash functions."""
    sets = 4000
    case = attention_inputs(9, 9, 16, 3, batch=1, heads=1, seed=4)
    exact = type(case)(**{name: x.double() for name, x in vars(case).items()})
    for name, x in vars(case).items():
        setattr(case, name, x.expand(1, sets, -1, -1))
    for gradient, word in (("lower_bound", "lower_bound"), ("unbiased", "exact")):
        inputs = [x.requires_grad_() for x in (exact.query, exact.key, exact.value)]
        mean = Expected(n_bits=4, gradient=word)
        out = yoso_attention(*inputs, estimator=mean, is_causal=is_causal, normalize=None)
        expected = out, *torch.autograd.grad(out, inputs, exact.grad_out)
        variances = []
        for window in (3, None):
            estimator = Sampled(
                n_bits=4,
                n_hashes=8,
                hasher=hasher,
                gradient=gradient,
                window=window,
                expectation="never",
            )
            out, grads = forward_and_gradients(
                case, estimator, None, is_causal, normalize=None, seed=11
            )
            results = [x.double() for x in (out, *grads)]
            variances.append([x.var(1).sum() for x in results])
            for a, e in zip(results, expected, strict=True):
                mean, error = a.mean(1), a.std(1) / sets**0.5
                # a row that the window holds whole has no error but rounding
                rounding = 1e-5 * e.abs().max()
                assert ((mean - e[:, 0]).abs() < 4 * error + rounding).all()
        for near, without in zip(*variances, strict=True):
            assert near < 0.75 * without


@pytest.mark.parametrize("is_causal", [False, True])
def test_variance_is_that_of_the_pairs_outside(is_causal):
    """A single value of 1 makes the output its weight: variance p (1 - p) / m, in the window 0."""
    sets, n_bits, n_hashes, window = 4000, 4, 8, 3
    case = attention_inputs(9, 9, 16, 1, batch=1, heads=1, seed=4)
    p = reference.collision_probability(
        *(x[0, 0].double().numpy() for x in (case.query[..., None, :], case.key[..., None, :, :])),
        n_bits,
    )
    near = reference.near_pairs(case.query, case.key, window, is_causal)
    far = reference.visible(9, 9, is_causal) & ~near
    for name, x in vars(case).items():
        setattr(case, name, x.expand(1, sets, -1, -1))
    for j in (0, 4, 8):
        case.value = torch.zeros(1, sets, 9, 1)
        case.value[..., j, :] = 1
        estimator = Sampled(
            n_bits=n_bits,
            n_hashes=n_hashes,
            hasher="hyperplane",
            window=window,
            expectation="never",
        )
        options = {"is_causal": is_causal, "normalize": None, "seed": 11}
        out = yoso_attention(case.query, case.key, case.value, estimator=estimator, **options)
        out = out[0, :, :, 0].double()
        squares = (out - out.mean(0)) ** 2
        error = squares.std(0) / sets**0.5
        wanted = torch.from_numpy(np.where(far, p * (1 - p) / n_hashes, 0)[:, j])
        assert ((squares.mean(0) - wanted).abs() < 4 * error + 1e-12).all()
        weight = torch.from_numpy(np.where(near, p, 0)[:, j])
        in_window = torch.from_numpy(near[:, j])
        torch.testing.assert_close(out.mean(0)[in_window], weight[in_window], **FLOAT32)


def test_where_the_expectation_is_computed_it_says_the_same():
    case = attention_inputs(33)
    inputs = case.query, case.key, case.value
    out = yoso_attention(*inputs, estimator=Sampled(window=5))  # 33 keys: the expectation
    assert torch.equal(out, yoso_attention(*inputs, estimator=Expected()))
    few = Sampled(n_hashes=2, window=5)
    sampled = yoso_attention(*inputs, estimator=replace(few, expectation="never"), seed=1)
    assert torch.equal(yoso_attention(*inputs, estimator=few, seed=1), sampled)


# ---------------------------------------------------------------- rows without a direction


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("d", [32, 64])
def test_nan_in_a_value_or_gradient_stays_with_the_pairs_that_see_it(d, is_causal):
    bad, window, n = 150, 10, 300
    i = torch.arange(n)
    near = ((i - bad).abs() < window) & ((i >= bad) | (not is_causal))
    estimator = replace(SAMPLED, window=window, n_bits=16)
    options = {"normalize": None, "seed": 0}

    def collides(rows):  # outside the window a collision shows it too
        codes = [codes_of(x, 0, estimator)[0, 0] for x in (case.query, case.key)]
        codes = codes if rows == "queries" else codes[::-1]
        seen = (codes[0] == codes[1][bad]).any(-1)
        if is_causal:
            seen &= i >= bad if rows == "queries" else i <= bad
        return seen

    case = attention_inputs(n, d=d, batch=1, heads=1)
    case.value[..., bad, 3] = math.nan
    out, (grad_query, grad_key, grad_value) = forward_and_gradients(
        case, estimator, None, is_causal, **options
    )
    reached = near | collides("queries")
    assert torch.equal(out[0, 0].isnan().any(-1), reached)
    assert torch.equal(grad_query[0, 0].isnan().any(-1), reached)
    assert torch.equal(grad_key[0, 0].isnan().any(-1), i == bad)
    assert grad_value.isfinite().all()

    case = attention_inputs(n, d=d, batch=1, heads=1)
    case.grad_out[..., bad, 3] = math.nan
    _, (grad_query, grad_key, grad_value) = forward_and_gradients(
        case, estimator, None, is_causal, **options
    )
    near = ((i - bad).abs() < window) & ((i <= bad) | (not is_causal))
    reached = near | collides("keys")
    assert torch.equal(grad_query[0, 0].isnan().any(-1), i == bad)
    assert torch.equal(grad_key[0, 0].isnan().any(-1), reached)
    assert torch.equal(grad_value[0, 0].isnan().any(-1), reached)


@pytest.mark.parametrize("normalize", NORMALIZE)
def test_nothing_to_attend_to(normalize):
    case = attention_inputs(6, 9)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1] = False
    estimator = replace(SAMPLED, window=4)
    options = {"normalize": normalize, "seed": 0}
    out, grads = forward_and_gradients(case, estimator, mask, **options)
    assert out[0].any(-1).all() and not out[1].any()
    assert all(x.isfinite().all() and not x[1].any() for x in grads)
    inputs = case.query, case.key, case.value
    empty = {"estimator": estimator, **options}
    assert yoso_attention(inputs[0][:, :, :0], *inputs[1:], **empty).shape == (2, 3, 0, 32)
    out = yoso_attention(inputs[0], *(x[:, :, :0] for x in inputs[1:]), **empty)
    assert out.shape == (2, 3, 6, 32) and not out.any()
    assert yoso_attention(*inputs[:2], inputs[2][..., :0], **empty).shape == (2, 3, 6, 0)
    # queries beyond all keys by more than the window see none exactly
    far = attention_inputs(600, 3)
    out, grads = forward_and_gradients(far, estimator, None, True, **options)
    assert out.isfinite().all() and all(x.isfinite().all() for x in grads)


# ---------------------------------------------------------------- the rest of the contract


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_and_strides(dtype):
    case = attention_inputs(33, d=20, dtype=dtype)
    same = type(case)(**{name: x.float() for name, x in vars(case).items()})
    out, grads = forward_and_gradients(case, replace(SAMPLED, window=4), seed=2)
    expected, expected_grads = forward_and_gradients(same, replace(SAMPLED, window=4), seed=2)
    wanted = expected, *expected_grads
    if dtype is not torch.float64:  # their codes are those of 16 bits
        inputs = case.query, case.key, case.value
        wanted = out, *float32_gradients(inputs, case.grad_out, seed=2, window=4)
    for a, e in zip((out, *grads), wanted, strict=True):
        assert torch.equal(a, e.to(dtype))
    for name, x in vars(same).items():
        setattr(same, name, x.transpose(1, 2).contiguous().transpose(1, 2))
    out, grads = forward_and_gradients(same, replace(SAMPLED, window=4), seed=2)
    for a, e in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert torch.equal(a, e)


@pytest.mark.parametrize("masked", [False, True])
def test_opcheck(masked):
    case = attention_inputs(17, 13)
    inputs = [x.requires_grad_() for x in (case.query, case.key, case.value)]
    mask = padding_mask(2, 13) if masked else None
    parameters = torch.ops.lshkit.hash_parameters(torch.tensor(0), 3, 32, 8, 4, 1)
    torch.library.opcheck(
        torch.ops.lshkit.yoso_attention.default,
        (*inputs, mask, None, None, parameters, 1, 8, 4, True, 2, 0, 5),
    )
    codes = [torch_ops.hash(x.detach(), parameters, 1, 8, 4) for x in inputs[:2]]
    torch.library.opcheck(
        torch.ops.lshkit.yoso_attention_backward.default,
        (case.grad_out, *(x.detach() for x in inputs), mask, None, None, *codes, 8, True, 2, 0, 5),
    )


def test_transforms():
    case = attention_inputs(9, batch=5)
    inputs = case.query, case.key, case.value

    estimator = replace(SAMPLED, window=3)

    def attend(*inputs):
        return yoso_attention(*inputs, estimator=estimator, seed=0)

    out, grads = forward_and_gradients(case, estimator, seed=0)
    assert torch.equal(torch.func.vmap(attend)(*(x[:, None] for x in inputs)), out[:, None])
    actual = torch.func.grad(lambda *x: (attend(*x) * case.grad_out).sum(), (0, 1, 2))(*inputs)
    for a, e in zip(actual, grads, strict=True):
        torch.testing.assert_close(a, e)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    leaves = [x.clone().requires_grad_() for x in inputs]
    result = compiled(*leaves)
    assert torch.equal(result.detach(), out)
    for a, e in zip(torch.autograd.grad(result, leaves, case.grad_out), grads, strict=True):
        assert torch.equal(a, e)


@pytest.mark.parametrize(
    ("window", "error", "message"),
    [
        (0, ValueError, "window must be an integer from 1 to 2147483647, got 0"),
        (-3, ValueError, "window must be an integer from 1 .* got -3"),
        (2**31, ValueError, "window must be an integer from 1 .* got 2147483648"),
        (2.0, TypeError, "window must be an integer"),
        (True, TypeError, "window must be an integer"),
    ],
)
def test_bad_windows(window, error, message):
    with pytest.raises(error, match=message):
        Sampled(window=window)
