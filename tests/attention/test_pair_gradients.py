"""The gradients "collided" and "unbiased": against the reference, and what they are on average."""

import math
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cases.attention import (  # noqa: E402
    FAMILIES,
    SAMPLED,
    SHAPES,
    arrays,
    attention_inputs,
    codes_of,
    dense_attention,
    padding_mask,
    reference_options,
)
from test_attention_gradients import (  # noqa: E402
    assert_gradients_close,
    attention_inputs_as,
    gradients,
)

from lshkit import _C, reference, torch_ops  # noqa: E402
from lshkit.attention import Expected, Sampled  # noqa: E402

PAIR_GRADIENTS = ["collided", "unbiased"]


def gradient_rounding(case, codes, n_bits, gradient, mask=None, is_causal=False, normalize="l2"):
    """What float32 may leave of gradients that cancel: 6 standard deviations, element by element.

    A query that collides with one key alone has a normalised output that no weight changes: its
    gradient, g . v of a g that is orthogonal to v, is what rounding leaves of the terms. To first
    order each rounding has a standard deviation of 2^-24 / sqrt(3) of what it rounds at most, which
    for a sum is the root of its terms' squares, and they add in the square: those of the raw sums
    and their norm, of g . y, g . v, the sum over the pairs, unit rows and the way back through
    them.
    """
    q, k, v, g = *arrays(case), case.grad_out.double().numpy()
    counts = reference.collision_counts(*codes)
    pairs = np.ones(counts.shape, bool)
    if is_causal:
        pairs = np.tril(pairs)
    if mask is not None:
        pairs = pairs & (mask.numpy()[:, None, None, :] != 0)
    weights = np.where(pairs, counts, 0) / codes[0].shape[-1]
    cosine = reference.unit(q) @ reference.unit(k).swapaxes(-1, -2)
    slopes = (weights > 0) * reference.cosine_probability_slope(cosine, n_bits, 1e-6)
    if gradient == "unbiased":
        misses = codes[0].shape[-1] * np.log1p(-reference.cosine_probability(cosine, n_bits))
        slopes = np.divide(slopes, -np.expm1(misses), out=np.zeros_like(slopes), where=misses < 0)
    raw = weights @ v
    scale = np.ones_like(raw[..., :1])
    if normalize:
        scale = weights.sum(-1, keepdims=True)
        if normalize == "l2":
            scale = np.linalg.norm(raw, axis=-1, keepdims=True)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0) ** 2
    # From here on squares: of y, which may cancel or not, and likewise of g . y.
    y = np.maximum(raw**2, weights**2 @ v**2) * inverse
    along = (g * raw).sum(-1, keepdims=True) ** 2 * inverse
    along = np.maximum(along, (g**2 * y).sum(-1, keepdims=True))
    grad_raw, bias = g**2 * inverse, along * inverse if normalize == "sum" else 0
    if normalize == "l2":  # and the norm is that of a sum whose terms may cancel
        cancelled = np.maximum(1, y.sum(-1, keepdims=True))
        grad_raw = (g**2 + along * y) * inverse * cancelled
    of_pairs = slopes**2 * (grad_raw @ (v**2).swapaxes(-1, -2) + bias)

    def through_unit(x, grad):
        u = reference.unit(x) ** 2
        return (grad + (grad * u).sum(-1, keepdims=True) * u) / (x**2).sum(-1, keepdims=True)

    roundings = 2 * max(counts.shape[-2:]) + 3 * v.shape[-1] + 3 * q.shape[-1] + 20
    return [
        6 * 2.0**-24 * np.sqrt(roundings / 3 * x)
        for x in (
            through_unit(q, of_pairs @ reference.unit(k) ** 2),
            through_unit(k, of_pairs.swapaxes(-1, -2) @ reference.unit(q) ** 2),
            (weights**2).swapaxes(-1, -2) @ grad_raw,
        )
    ]


def assert_equal_to_reference(case, mask, is_causal, normalize, gradient, n_bits, n_hashes):
    estimator = replace(SAMPLED, gradient=gradient, n_bits=n_bits, n_hashes=n_hashes)
    codes = [codes_of(x, 5, estimator).numpy() for x in (case.query, case.key)]
    actual = gradients(case, estimator, mask, is_causal, normalize=normalize, seed=5)
    with np.errstate(invalid="ignore"):
        expected = reference.yoso_backward(
            *arrays(case),
            *codes,
            case.grad_out.double().numpy(),
            n_bits,
            gradient=gradient,
            **reference_options(mask, is_causal, normalize),
        )
    rounding = gradient_rounding(case, codes, n_bits, gradient, mask, is_causal, normalize)
    # l2 divides by the norm of a sum that a row of few collisions makes small
    assert_gradients_close(actual, expected, rtol=2e-4, rounding=rounding)
    return actual


@pytest.mark.parametrize("gradient", PAIR_GRADIENTS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("n_bits", [1, 8, 16])
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)  # d = 1 knows no cosines but 1 and -1
def test_equal_to_reference(shape, n_bits, is_causal, gradient):
    case = attention_inputs(*shape)
    for mask, normalize in (
        (None, "l2"),
        (padding_mask(2, shape[1]), "sum"),
        (padding_mask(2, shape[1]), None),
    ):
        assert_equal_to_reference(case, mask, is_causal, normalize, gradient, n_bits, 11)


@pytest.mark.parametrize("gradient", PAIR_GRADIENTS)
@pytest.mark.parametrize("n_hashes", [1, 255, 256, 5000])
def test_numbers_of_hashes(n_hashes, gradient):
    """One that a byte counts and one that it does not; many, where 1 - p loses what p is."""
    for n_bits in (2, 12):
        case = attention_inputs(17, 21, 16, batch=1, heads=2)
        assert_equal_to_reference(case, None, False, None, gradient, n_bits, n_hashes)


@pytest.mark.parametrize("n_hashes", [1, 32, 65535])
def test_unbiased_weight_at_every_cosine(n_hashes):
    """Of pairs that did collide, however unlikely: from 1 down to where no float holds p."""
    angle = np.linspace(0.01, np.pi - 0.01, 500)
    n_bits, n = 16, len(angle)
    query = np.zeros((1, 1, 1, 2), np.float32)
    query[..., 0] = 1
    key = np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32)[None, None]
    value = np.ones((1, 1, n, 1), np.float32)
    # all share the code of the first hash
    codes = [np.full((1, 1, rows, n_hashes), other, np.uint16) for rows, other in ((1, 1), (n, 2))]
    for c in codes:
        c[..., 0] = 7
    got = [np.empty_like(x) for x in (query, key, value)]
    grad_out = np.ones((1, 1, 1, 1), np.float32)
    code = torch_ops.GRADIENT["unbiased"]
    _C.yoso_backward(*(query, key, value, None, *codes, n_bits, False, 0, code, grad_out, *got), 1)
    expected = reference.yoso_backward(
        query, key, value, *codes, grad_out, n_bits, normalize=None, gradient="unbiased"
    )
    # Key by key. The sine and, near pi, the angle to it are what float32 knows of the cosine.
    size = np.linalg.norm(expected[1], axis=-1)[0, 0]
    error = np.linalg.norm(got[1] - expected[1], axis=-1)[0, 0] / size
    noise = 2e-7 / np.minimum(np.sin(angle), np.pi - angle) ** 2
    assert (error < 2e-5 + noise).all()


@pytest.mark.parametrize("gradient", PAIR_GRADIENTS)
def test_for_the_expectation_every_pair_counts(gradient):
    case = attention_inputs(17)
    exact = gradients(case, Expected())
    got = gradients(case, Sampled(gradient=gradient))  # 17 positions
    assert all(torch.equal(a, e) for a, e in zip(got, exact, strict=True))


# ---------------------------------------------------------------- on average


def spread(case, sets, **options):
    """Mean and its standard error of the raw output's gradients over sets of hash functions."""
    many = attention_inputs_as(case, torch.float32)
    for name, x in vars(many).items():  # a head has its own functions
        setattr(many, name, x.expand(1, sets, -1, -1))
    got = gradients(many, replace(SAMPLED, **options), normalize=None, seed=11)
    return [(x.double().mean(1), x.double().std(1) / sets**0.5) for x in got]


def exact_gradients(case, n_bits):
    inputs = [x.double().requires_grad_() for x in (case.query, case.key, case.value)]
    out = dense_attention(*inputs, None, False, n_bits, None)
    return [g[:, 0] for g in torch.autograd.grad(out, inputs, case.grad_out.double())]


# Few hashes: where a pair fails to collide in a handful of 2000 sets only, the error is unknown.
@pytest.mark.parametrize(("n_bits", "n_hashes"), [(1, 2), (4, 8), (8, 8)])
@pytest.mark.parametrize("hasher", FAMILIES)
def test_unbiased(hasher, n_bits, n_hashes):
    """The mean over hash functions is the derivative of YOSO-E, which autograd computes."""
    case = attention_inputs(5, 6, 16, 3, batch=1, heads=1, seed=3)
    options = {"n_bits": n_bits, "n_hashes": n_hashes, "hasher": hasher}
    got = spread(case, 2000, gradient="unbiased", **options)
    for (mean, error), exact in zip(got, exact_gradients(case, n_bits), strict=True):
        assert ((mean - exact).abs() < 4 * error + 1e-6).all()


@pytest.mark.parametrize("hasher", FAMILIES)
def test_collided_is_short_of_the_pairs_that_do_not_collide(hasher):
    """Its mean has each pair's exact weight times 1 - (1 - p)^m."""
    n_bits, n_hashes = 4, 8
    case = attention_inputs(5, 6, 16, 3, batch=1, heads=1, seed=3)
    (mean_query, error_query), (mean_key, error_key), _ = spread(
        case, 2000, gradient="collided", n_bits=n_bits, n_hashes=n_hashes, hasher=hasher
    )
    query, key, value = (x[0, 0] for x in arrays(case))
    grad_out = case.grad_out[0, 0].double().numpy()
    cosine = reference.unit(query) @ reference.unit(key).T
    seen = 1 - (1 - reference.cosine_probability(cosine, n_bits)) ** n_hashes
    assert seen.min() < 0.3  # there is a bias
    slopes = seen * reference.cosine_probability_slope(cosine, n_bits, 0)
    grad_query, grad_key, _ = reference.attention_backward(
        query, key, value, np.ones_like(cosine), slopes, None, grad_out
    )
    for mean, error, wanted in (
        (mean_query, error_query, grad_query),
        (mean_key, error_key, grad_key),
    ):
        assert ((mean[0] - torch.from_numpy(wanted)).abs() < 4 * error[0] + 1e-6).all()


@pytest.mark.parametrize("gradient", PAIR_GRADIENTS)
@pytest.mark.parametrize("angle", [1e-4, 3e-4, 9e-4, 3e-3])
def test_bias_next_to_one(angle, gradient):
    """1 - x^2 is floored at 1e-6: a pair at a smaller angle has angle / 1e-3 of its gradient.

    The exact one, slope times sine, does not vanish there: it is n_bits / pi times g . v.
    """
    n_bits = 8
    case = attention_inputs(1, 1, 2, 1, batch=1, heads=1)
    case.query[:] = torch.tensor([1.0, 0.0])
    case.key[:] = torch.tensor([math.cos(angle), math.sin(angle)])
    case.value[:] = case.grad_out[:] = 1
    grad_query, _, _ = gradients(
        case, replace(SAMPLED, gradient=gradient, n_hashes=64), normalize=None, seed=0
    )
    exact = n_bits / math.pi * (1 - angle / math.pi) ** (n_bits - 1)
    assert grad_query[..., 0].abs().max() == 0  # along the query itself
    assert float(grad_query[..., 1]) / exact == pytest.approx(min(1, angle / 1e-3), rel=2e-2)
