"""Sums of any size: "l2" gives them their direction, and gradients stay finite."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cases.attention import attention_inputs  # noqa: E402

from lshkit import reference  # noqa: E402
from lshkit.attention import Expected, Sampled, Soft, YosoState, yoso_attention  # noqa: E402

SIZES = {"n_bits": 4, "n_hashes": 16}
ESTIMATORS = [
    Sampled(**SIZES, expectation="never"),
    Expected(n_bits=4, gradient="lower_bound"),
    Soft(**SIZES),
]


def bound_of(exponent):
    """Relative errors of values near 2^exponent: subnormal numbers have few digits."""
    return 1e-2 if exponent < -126 else 1e-4 if exponent == -126 else 1e-5


def attend(case, factor, estimator, **options):
    inputs = [x.clone().requires_grad_() for x in (case.query, case.key, case.value * factor)]
    out = yoso_attention(*inputs, estimator=estimator, seed=0, **options)
    return out.detach(), *torch.autograd.grad(out, inputs, case.grad_out)


# Powers of two, about 1e-20 to 1e-38, a subnormal size and a large one.
@pytest.mark.parametrize("exponent", [-66, -126, -140, 66])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=str)
def test_the_size_of_values_does_not_change_the_output(estimator, is_causal, exponent):
    case = attention_inputs(70, d=16)
    wanted, *_ = attend(case, 1.0, estimator, is_causal=is_causal)
    out, *gradients = attend(case, 2.0**exponent, estimator, is_causal=is_causal)
    seen = wanted.norm(dim=-1) > 0
    torch.testing.assert_close(out.norm(dim=-1), seen.float())
    bound = bound_of(exponent)
    torch.testing.assert_close(out, wanted, rtol=bound, atol=bound)
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("exponent", [-66, -90, 66])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=str)
def test_gradients_of_tiny_values(estimator, is_causal, exponent):
    case = attention_inputs(70, d=16)
    _, *wanted = attend(case, 1.0, estimator, is_causal=is_causal)
    _, *gradients = attend(case, 2.0**exponent, estimator, is_causal=is_causal)
    gradients[2] = (gradients[2].double() * 2.0**exponent).float()
    for gradient, expected in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("exponent", [-66, -126, -140, 66])
def test_queries_that_follow_a_cache(exponent):
    case = attention_inputs(20, 50, d=16)
    options = {"estimator": Expected(n_bits=4), "is_causal": True}  # all queries see 30 keys
    wanted = yoso_attention(case.query, case.key, case.value, **options)
    out = yoso_attention(case.query, case.key, case.value * 2.0**exponent, **options)
    bound = bound_of(exponent)
    torch.testing.assert_close(out, wanted, rtol=bound, atol=bound)


@pytest.mark.parametrize("exponent", [-66, -664, -1030, 600])  # 1e-20, 1e-200, subnormal, 1e180
def test_the_expectation_in_float64(exponent):
    case = attention_inputs(40, d=16)
    for name in ("query", "key", "value", "grad_out"):
        setattr(case, name, getattr(case, name).double())
    wanted = attend(case, 1.0, ESTIMATORS[1])
    out, *gradients = attend(case, 2.0**exponent, ESTIMATORS[1])
    bound = 1e-9 if exponent < -1000 else 1e-12
    torch.testing.assert_close(out, wanted[0], rtol=bound, atol=bound)
    assert all(g.isfinite().all() for g in gradients)
    if exponent > -990:
        gradients[2] = gradients[2] * 2.0**exponent
        for gradient, expected in zip(gradients, wanted[1:], strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9)
    if exponent < -1000:
        return  # the reference divides by norms as they are
    tensors = (case.query, case.key, case.value * 2.0**exponent)
    same = reference.expected_forward(*(x.numpy() for x in tensors), 4)
    np.testing.assert_allclose(out, same, rtol=bound, atol=bound)


@pytest.mark.parametrize("exponent", [-66, -126, -140])
@pytest.mark.parametrize("estimator", ESTIMATORS[::2], ids=str)
def test_decoding(estimator, exponent):
    case = attention_inputs(30, d=16)
    outs = []
    for factor in (1.0, 2.0**exponent):
        state = YosoState(*case.query.shape[:2], 16, estimator=estimator, seed=0)
        rows = case.query, case.key, case.value * factor
        first = state.prefill(*(x[..., :20, :] for x in rows))
        rest = [state.step(*(x[..., i : i + 1, :] for x in rows)) for i in range(20, 30)]
        outs.append(torch.cat([first, *rest], -2))
    bound = bound_of(exponent)
    torch.testing.assert_close(outs[1], outs[0], rtol=bound, atol=bound)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=str)
def test_sums_of_zero_stay_zero(estimator):
    case = attention_inputs(20, d=16)
    out, *gradients = attend(case, 0.0, estimator)
    assert (out == 0).all() and all((g == 0).all() for g in gradients)


# A query that meets keys with the smallest weights alone: their sum is near the smallest number.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharpness", [20.0, 50.0, 100.0])
def test_gradients_of_tiny_sums_of_weights_are_finite(sharpness, dtype):
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad_out = torch.randn(4, 1, 1, 512, 64, generator=generator)
    key = key[..., :1, :].expand_as(key)
    inputs = [x.to(dtype).requires_grad_() for x in (query, key.contiguous(), value)]
    estimator = Soft(n_bits=4, n_hashes=1, n_probes=16, sharpness=sharpness)
    out = yoso_attention(*inputs, estimator=estimator, normalize="sum", seed=1)
    for gradient in torch.autograd.grad(out, inputs, grad_out.to(dtype)):
        assert gradient.isfinite().all()
