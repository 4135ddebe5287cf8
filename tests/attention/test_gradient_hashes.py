"""The gradient from a subset of the hashes, and the sums restored from the output."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from cases.attention import (  # noqa: E402
    attention_inputs,
    codes_of,
    forward_and_gradients,
    padding_mask,
)

from lshkit import torch_ops  # noqa: E402
from lshkit.attention import Expected, Sampled  # noqa: E402

SAMPLED = Sampled(n_bits=3, n_hashes=12, expectation="never")
GRADIENTS = "lower_bound", "unbiased"


def results(case, estimator, seed=3, **options):
    out, gradients = forward_and_gradients(case, estimator, seed=seed, **options)
    return out, *gradients


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("normalize", [None, "sum", "l2"])
def test_is_that_of_these_hashes_codes(gradient, normalize, is_causal):
    """Of all hashes the output and the values' gradient, of the first five the others."""
    case, mask = attention_inputs(40, 40, 16, 9), padding_mask(2, 40)
    whole = replace(SAMPLED, gradient=gradient)
    options = {"mask": mask, "is_causal": is_causal, "normalize": normalize}
    subset = replace(whole, gradient_hashes=5)
    wanted, got = results(case, whole, **options), results(case, subset, **options)
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[3], wanted[3])
    assert not torch.allclose(got[1], wanted[1])
    all_of_them = results(case, replace(subset, gradient_hashes=12), **options)
    assert all(torch.equal(a, b) for a, b in zip(all_of_them, wanted, strict=True))
    if normalize is not None:
        return
    # Without a division the gradient is one of the codes alone.
    codes = [codes_of(x, 3, whole)[..., :5].contiguous() for x in (case.query, case.key)]
    few = torch_ops.yoso_attention_backward(
        *(case.grad_out, case.query, case.key, case.value, mask, None, None, *codes, 3),
        *(is_causal, 0, torch_ops.GRADIENT[gradient]),
    )
    for a, b in zip(got[1:3], few[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("n", [64, 300])  # pairs, and products of buckets
def test_is_unbiased(gradient, n):
    """The mean over hash functions is the expectation's gradient, within 4 standard errors."""
    case = attention_inputs(n, n, 16, 8, batch=1, heads=1)
    estimator = replace(SAMPLED, n_bits=2, gradient=gradient, gradient_hashes=3)
    exact = Expected(n_bits=2, gradient="exact" if gradient == "unbiased" else "lower_bound")
    wanted = torch.stack(results(case, exact, normalize=None)[1:3])[..., 0, 0, :, :]
    heads, calls = 200, 10
    shape = (1, heads, -1, -1)
    many = attention_inputs(1, 1)
    for name in ("query", "key", "value", "grad_out"):
        setattr(many, name, getattr(case, name).expand(shape))
    samples = [
        torch.stack(results(many, estimator, seed, normalize=None)[1:3])[:, 0].double()
        for seed in range(calls)
    ]
    samples = torch.cat(samples, 1) - wanted[:, None]
    # Of projections on fixed directions, so that few numbers are compared, with all of the rows.
    directions = torch.randn(20, *wanted.shape, generator=torch.Generator().manual_seed(1))
    errors = torch.einsum("shnd,ksnd->kh", samples, directions.double())
    standard_error = errors.std(1) / (heads * calls) ** 0.5
    assert (errors.mean(1).abs() < 4 * standard_error).all()
    # With the noise of three hashes, not of twelve.
    plain = torch.stack(results(many, replace(estimator, gradient_hashes=None), 99)[1:3])
    assert plain.shape == (2, 1, heads, n, 16)


def test_noise_falls_with_the_hashes():
    case = attention_inputs(200, 200, 16, 8, batch=1, heads=1)
    many = attention_inputs(1, 1)
    for name in ("query", "key", "value", "grad_out"):
        setattr(many, name, getattr(case, name).expand(1, 300, -1, -1))
    variances = []
    for count in (3, 12):
        estimator = replace(SAMPLED, gradient_hashes=count)
        grads = torch.stack(results(many, estimator, normalize=None)[1:3])
        variances.append(grads.var(2).sum().item())
    assert 3 < variances[0] / variances[1] < 5  # four times the hashes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalize", ["sum", "l2"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_restored_sums_are_those_of_the_codes(is_causal, normalize, dtype):
    """With the output and its divisors, the gradient is that of the sums computed again."""
    case = attention_inputs(70, 50, 16, 9, dtype=dtype)
    mask = padding_mask(2, 50)
    inputs = case.query, case.key, case.value, mask, None, None
    planes = torch_ops.hash_parameters(torch.tensor(3), 3, 16, 4, 6, 1)
    options = is_causal, torch_ops.NORMALIZE[normalize], 0
    out, *codes, divisors = torch_ops.yoso_attention(*inputs, planes, 1, 4, 6, *options)
    assert divisors.shape == out.shape[:3] and divisors.dtype is torch.float32
    again = torch_ops.yoso_attention_backward(case.grad_out, *inputs, *codes, 4, *options)
    got = torch_ops.yoso_attention_backward(
        case.grad_out, *inputs, *codes, 4, *options, out=out, divisors=divisors
    )
    for a, b in zip(got, again, strict=True):
        error = (a.double() - b.double()).norm() / b.double().norm()
        assert error < (1e-5 if dtype is torch.float32 else 5e-3)


def test_bad_input():
    for count in (0, 13, -1):
        with pytest.raises(ValueError, match="gradient_hashes.*12.*got"):
            replace(SAMPLED, gradient_hashes=count)
    with pytest.raises(TypeError, match="gradient_hashes"):
        replace(SAMPLED, gradient_hashes=2.5)
    with pytest.raises(ValueError, match="gradient_hashes needs .*'collided'"):
        replace(SAMPLED, gradient_hashes=2, gradient="collided")
    case = attention_inputs(20, 20)
    codes = [codes_of(x, 3, SAMPLED) for x in (case.query, case.key)]
    tensors = case.grad_out, case.query, case.key, case.value, None, None, None, *codes
    with pytest.raises(ValueError, match="divisors: out needs them, was None"):
        torch_ops.yoso_attention_backward(*tensors, 3, False, 2, 0, out=case.grad_out)


def test_fewer_hashes_of_inference():
    estimator = replace(SAMPLED, gradient_hashes=5)
    assert estimator.for_inference(8) == replace(estimator, n_hashes=8)
    assert estimator.for_inference(5) == replace(SAMPLED, n_hashes=5)
    assert estimator.for_inference(None) is estimator
