"""Gradients of yoso_attention: against the reference, autograd and their own expectation."""

import math
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from cases.attention import (  # noqa: E402
    EXPECTED,
    FAMILIES,
    NORMALIZE,
    SAMPLED,
    SHAPES,
    arrays,
    attention_inputs,
    codes_of,
    dense_attention,
    float32_gradients,
    gradients,
    padding_mask,
    reference_options,
)

from lshkit import reference, torch_ops  # noqa: E402
from lshkit.attention import Expected, Sampled, yoso_attention  # noqa: E402

ESTIMATORS = [SAMPLED, EXPECTED, Expected()]  # EXPECTED is of the lower bound
OF_PAIRS = [replace(SAMPLED, gradient=gradient) for gradient in ("collided", "unbiased")]


def assert_gradients_close(actual, expected, rtol, rounding=None):
    """Relative to the largest element of each gradient, as single ones cancel to nearly nothing.

    Where all of them may, rounding has what that leaves of each, as gradient_rounding does. Without
    it, with one feature all of a query's and key's do: 0.01 is what elements are otherwise like.
    """
    for i, (name, a, e) in enumerate(zip(("query", "key", "value"), actual, expected, strict=True)):
        e = torch.as_tensor(e)
        largest = float(e.nan_to_num().abs().max())
        atol = rtol * (largest if rounding else max(0.01, largest))
        if rounding:  # beyond that of each element, the rest as ever
            left = torch.as_tensor(rounding[i])
            a = e + (a.double() - e).sign() * ((a.double() - e).abs() - left).clamp(min=0)
        torch.testing.assert_close(
            a.double(),
            e.double(),
            rtol=rtol,
            atol=atol,
            equal_nan=True,
            msg=lambda m, n=name: n + m,
        )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("n_bits", [1, 8, 9, 16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sampled_gradients_equal_reference(shape, n_bits, is_causal):
    case = attention_inputs(*shape)
    estimator = replace(SAMPLED, n_bits=n_bits, n_hashes=11)
    codes = [codes_of(x, 5, estimator).numpy() for x in (case.query, case.key)]
    # Every option, not every combination of them: a case takes a few milliseconds in the core.
    for mask, normalize in (
        (None, "l2"),
        (padding_mask(2, shape[1]), "sum"),
        (padding_mask(2, shape[1]), "l2"),
        (None, None),
    ):
        actual = gradients(case, estimator, mask, is_causal, normalize=normalize, seed=5)
        expected = reference.yoso_backward(
            *arrays(case),
            *codes,
            case.grad_out.double().numpy(),
            n_bits,
            gradient="lower_bound",
            **reference_options(mask, is_causal, normalize),
        )
        # l2 divides by the norm of a sum that a row of few collisions makes small
        assert_gradients_close(actual, expected, rtol=2e-4)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("n_bits", "alike_from"), [(9, None), (12, None), (12, 0), (12, 480)])
@pytest.mark.parametrize("n", [1050, 520])
def test_sampled_gradients_of_long_sequences(n, n_bits, alike_from, is_causal):
    """Few rows in a bucket, or in some hashes most of them in one."""
    case = attention_inputs(n + 50, n, d=24, d_v=40, batch=1, heads=1)
    mask = torch.arange(n)[None] % 5 != 3
    if alike_from is not None:
        case.key[:, :, alike_from:] = case.key[:, :, :1].clone()
        case.query[:, :, alike_from:] = case.key[:, :, :1] + 0.1 * case.query[:, :, :1].clone()
    estimator = replace(SAMPLED, n_bits=n_bits, n_hashes=11)
    codes = [codes_of(x, 5, estimator).numpy() for x in (case.query, case.key)]
    actual = gradients(case, estimator, mask, is_causal, normalize=None, seed=5)
    expected = reference.yoso_backward(
        *arrays(case),
        *codes,
        case.grad_out.double().numpy(),
        n_bits,
        gradient="lower_bound",
        **reference_options(mask, is_causal, None),
    )
    assert_gradients_close(actual, expected, rtol=2e-4)
    for i, name in enumerate(("query", "key")):  # alone
        x = getattr(case, name)
        wanted = [y.detach().requires_grad_(y is x) for y in (case.query, case.key, case.value)]
        options = {"is_causal": is_causal, "causal_offset": 0, "normalize": None, "seed": 5}
        out = yoso_attention(*wanted, mask, estimator=estimator, **options)
        (alone,) = torch.autograd.grad(out, wanted[i], case.grad_out)
        assert torch.equal(alone, actual[i])


@pytest.mark.parametrize(("size", "of_values"), [(1e-30, 1e-15), (1e-20, 1e-25), (1e30, 1e15)])
@pytest.mark.parametrize("estimator", [SAMPLED, EXPECTED], ids=str)
def test_gradients_of_very_long_and_short_rows(estimator, size, of_values):
    """The gradient of a row is inversely proportional to its length."""
    case = attention_inputs(12)

    def scaled(of_rows, of_values):
        rows = [(x * of_rows).requires_grad_() for x in (case.query, case.key)]
        value, options = case.value * of_values, {"normalize": None, "seed": 0}
        out = yoso_attention(*rows, value, estimator=estimator, **options)
        grads = torch.autograd.grad(out, rows, case.grad_out)
        return [x.double() * of_rows / of_values for x in grads]

    for got, wanted in zip(scaled(size, of_values), scaled(1, 1), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("n_bits", [1, 8, 16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_expected_gradients_equal_reference(shape, n_bits, is_causal):
    case = attention_inputs(*shape, dtype=torch.float64)
    if shape[2] == 1:  # opposite numbers have the weight 0, or a rounding error of it
        case.query, case.key = case.query.abs(), case.key.abs()
    for mask, normalize, gradient in (
        (None, "l2", "lower_bound"),
        (padding_mask(2, shape[1]), "sum", "lower_bound"),
        (padding_mask(2, shape[1]), "l2", "exact"),
        (None, None, "exact"),
        (None, "sum", "exact"),
    ):
        estimator = Expected(n_bits=n_bits, gradient=gradient)
        actual = gradients(case, estimator, mask, is_causal, normalize=normalize)
        expected = reference.expected_backward(
            *arrays(case),
            case.grad_out.numpy(),
            n_bits,
            gradient="expected" if gradient == "exact" else gradient,
            **reference_options(mask, is_causal, normalize),
        )
        if gradient == "lower_bound" or shape[2] > 1:  # as above
            assert_gradients_close(actual, expected, rtol=1e-8)


def test_expected_gradients_in_float32():
    case = attention_inputs(65, 130, 64, 33)
    in_float64 = gradients(
        attention_inputs_as(case, torch.float64), Expected(), grad_out=case.grad_out.double()
    )
    assert_gradients_close(gradients(case, Expected()), in_float64, rtol=1e-4)


@pytest.mark.parametrize("normalize", ["sum", "l2"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("one_head", [False, True])  # one: its rows are cut among threads
def test_expected_gradients_from_the_output(one_head, is_causal, normalize):
    """With the output and its divisors, the gradient is that of the sums computed again."""
    if one_head:
        case, mask = attention_inputs(800, 50, 16, 9, batch=1, heads=1), None
    else:
        case, mask = attention_inputs(70, 50, 16, 9), padding_mask(2, 50)
    inputs = case.query, case.key, case.value, mask
    options = 6, is_causal, torch_ops.NORMALIZE[normalize], 0
    out, divisors = torch_ops.expected_attention(*inputs, None, None, *options)
    assert divisors.shape == out.shape[:3] and divisors.dtype is torch.float32
    tensors = case.grad_out, *inputs, None, None, *options
    again = torch_ops.expected_attention_backward(*tensors)
    got = torch_ops.expected_attention_backward(*tensors, out, divisors)
    for a, b in zip(got, again, strict=True):
        assert (a - b).norm() < 1e-5 * b.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("estimator", [Sampled(expectation="never"), Expected()], ids=str)
def test_a_changed_output_is_an_error_of_the_backward_pass(estimator, dtype):
    case = attention_inputs(9, dtype=dtype)
    inputs = [x.requires_grad_() for x in (case.query, case.key, case.value)]
    out = yoso_attention(*inputs, estimator=estimator, seed=0)
    out += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_float64_sums_again():
    case = attention_inputs(9, dtype=torch.float64)
    tensors = case.query, case.key, case.value, None, None, None, 6, False, 2, 0
    out, divisors = torch_ops.expected_attention(*tensors)
    assert out.dtype is torch.float64 and divisors.numel() == 0
    with pytest.raises(ValueError, match="out: None is wanted with float64 inputs"):
        torch_ops.expected_attention_backward(case.grad_out, *tensors, out, divisors)


def attention_inputs_as(case, dtype):
    return type(case)(**{name: x.to(dtype) for name, x in vars(case).items()})


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("normalize", NORMALIZE)
def test_expected_gradient_is_the_derivative(normalize, is_causal):
    case = attention_inputs(17, 23, 12, 9, dtype=torch.float64)
    mask = torch.rand(2, 23, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[:, 0] = True
    for n_bits in (1, 8):
        actual = gradients(case, Expected(n_bits=n_bits), mask, is_causal, normalize=normalize)
        inputs = [x.requires_grad_() for x in (case.query, case.key, case.value)]
        out = dense_attention(*inputs, mask, is_causal, n_bits, normalize)
        expected = torch.autograd.grad(out, inputs, case.grad_out)
        assert_gradients_close(actual, expected, rtol=1e-9)


@pytest.mark.parametrize("hasher", FAMILIES)
def test_sampled_gradients_are_unbiased(hasher):
    """Without normalisation, the mean of the sampled gradients is the gradient of the expectation:
    exactly for the values, and with weights n_bits/2 p (eq. 4) for queries and keys."""
    sets, n_bits = 2000, 4
    case = attention_inputs(5, 6, 16, 3, batch=1, heads=1, seed=3)
    many = attention_inputs_as(case, torch.float32)
    for name, x in vars(many).items():
        setattr(many, name, x.expand(1, sets, -1, -1))
    estimator = replace(SAMPLED, n_bits=n_bits, n_hashes=8, hasher=hasher)
    sampled = gradients(many, estimator, seed=11, normalize=None)
    double = attention_inputs_as(case, torch.float64)
    exact = gradients(double, replace(EXPECTED, n_bits=n_bits), normalize=None)
    for a, e in zip(sampled, exact, strict=True):
        mean, error = a.double().mean(1), a.double().std(1) / sets**0.5
        assert ((mean - e[:, 0]).abs() < 4 * error).all()


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=str)
def test_broadcast_and_strided_gradients(estimator):
    """sum().backward() hands down a gradient whose strides are all zero."""
    case = attention_inputs(17)
    ones = torch.ones_like(case.grad_out)
    contiguous = gradients(case, estimator, grad_out=ones, seed=0)
    row = torch.ones(32).expand(2, 3, 17, 32)
    transposed = ones.transpose(1, 2).contiguous().transpose(1, 2)
    columns_first = ones.mT.contiguous().mT
    for grad_out in (torch.ones(()).expand_as(ones), row, transposed, columns_first):
        assert not grad_out.is_contiguous()
        actual = gradients(case, estimator, grad_out=grad_out, seed=0)
        for a, e in zip(actual, contiguous, strict=True):
            assert torch.equal(a, e)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype):
    case = attention_inputs(33, d=20, dtype=dtype)
    actual = gradients(case, SAMPLED, seed=2)
    inputs = case.query, case.key, case.value
    in_float32 = float32_gradients(inputs, case.grad_out, seed=2)
    for a, e in zip(actual, in_float32, strict=True):
        assert a.dtype == dtype
        assert torch.equal(a, e.to(dtype))


# Lists, all pairs, buckets of a few keys and of many.
@pytest.mark.parametrize(("n_bits", "n_hashes"), [(12, 32), (8, 32), (8, 8), (2, 32)])
@pytest.mark.parametrize("d", [32, 64])
def test_nan_in_a_value_or_gradient_stays_with_the_pairs_that_see_it(d, n_bits, n_hashes):
    bad = 1500
    estimator = replace(SAMPLED, n_bits=n_bits, n_hashes=n_hashes)
    options = {"normalize": None, "seed": 0}
    case = attention_inputs(2048, d=d, batch=1, heads=1)
    case.value[..., bad, 3] = math.nan
    grad_query, _, grad_value = gradients(case, estimator, None, True, **options)
    assert grad_query[..., :bad, :].isfinite().all()
    assert grad_value.isfinite().all()

    case = attention_inputs(2048, d=d, batch=1, heads=1)
    case.grad_out[..., bad, 3] = math.nan
    _, grad_key, grad_value = gradients(case, estimator, None, True, **options)
    assert grad_key[..., bad + 1 :, :].isfinite().all()
    assert grad_value[..., bad + 1 :, :].isfinite().all()


@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("estimator", [*ESTIMATORS, *OF_PAIRS], ids=str)
def test_nothing_to_attend_to(estimator, normalize):
    """Masked keys, rows of zeros and empty sequences have finite gradients."""
    case = attention_inputs(6, 9)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1] = False
    case.query[0, 0, 2] = case.key[0, 0, 3] = case.value[0, 1] = 0
    options = {"normalize": normalize, "seed": 0}
    grad_query, grad_key, grad_value = gradients(case, estimator, mask, **options)
    assert all(x.isfinite().all() for x in (grad_query, grad_key, grad_value))
    assert not any(x[1].any() for x in (grad_query, grad_key, grad_value))
    assert not grad_query[0, 0, 2].any() and not grad_key[0, 0, 3].any()

    for name, shorter in (("query", 0), ("key", 0)):
        empty = attention_inputs(6, 9)
        setattr(empty, name, getattr(empty, name)[:, :, :shorter])
        if name == "key":
            empty.value = empty.value[:, :, :0]
        else:
            empty.grad_out = empty.grad_out[:, :, :0]
        grads = gradients(empty, estimator, **options)
        for x, grad in zip(vars(empty).values(), grads, strict=False):
            assert grad.shape == x.shape and not grad.any()


def test_saved_for_backward():
    """The inputs, and one byte for each token and hash: no scores, no parameters, no copies.

    The output too, and a number for each of its rows.
    """
    case = attention_inputs(130, 257, 64, 48, batch=2, heads=3)
    inputs = [x.requires_grad_() for x in (case.query, case.key, case.value)]
    for n_bits, code_bytes in ((8, 1), (9, 2)):
        saved = []

        def keep(tensor, saved=saved):
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            yoso_attention(*inputs, estimator=replace(SAMPLED, n_bits=n_bits, n_hashes=20))
        sizes = {x.data_ptr(): x.numel() * x.element_size() for x in saved}
        own = sum(size for at, size in sizes.items() if at not in {x.data_ptr() for x in inputs})
        output = 2 * 3 * 130 * (48 + 1) * 4
        assert own == 2 * 3 * (130 + 257) * 20 * code_bytes + output
