"""causal_offset: query i sees the keys j <= i + causal_offset, for every estimator."""

import math
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from cases.attention import (  # noqa: E402
    NORMALIZE,
    SAMPLED,
    attention_inputs,
    codes_of,
    leaves_of,
    normalized,
    padding_mask,
)
from test_soft_attention import parameters_of, probe_features, projections_of  # noqa: E402

from lshkit import torch_ops  # noqa: E402
from lshkit.attention import Expected, Sampled, Soft, yoso_attention  # noqa: E402
from lshkit.attention.unit_norm import lift  # noqa: E402

SEED = 5
SIZES = {"n_bits": 4, "n_hashes": 6}
LIFT = {"unit_norm": "lift", "lift_scale": 200.0}
ESTIMATORS = [
    replace(SAMPLED, **SIZES),
    replace(SAMPLED, hasher="hyperplane", **LIFT, **SIZES),
    Expected(n_bits=4),
    Expected(n_bits=4, gradient="lower_bound", **LIFT),
    Soft(n_probes=(4, 2), **SIZES),
    Soft(hasher="hyperplane", **LIFT, **SIZES),
]
IDS = ["sampled", "sampled-lift", "expected", "expected-lift", "soft", "soft-lift"]
N_Q, N_K = 9, 14
HUGE = 2**31 - 1
OFFSETS = [None, 0, 1, 3, N_K - 2, N_K - 1, N_K + 1, HUGE, -1, -4, 1 - N_Q, -N_Q, -HUGE - 1]


def soft_weights(estimator, query, key):
    sizes, heads, d = (estimator.n_bits, estimator.n_hashes), key.shape[1], key.shape[-1]
    parameters = parameters_of(SEED, heads, d, *sizes, estimator.hasher)
    floats = [x.detach().float() for x in (query, key, key)]
    options = torch_ops.FAMILY[estimator.hasher], *sizes, *estimator.probes(), False, 0
    sharpness = torch.tensor([estimator.sharpness])
    saved = torch_ops.soft_attention(*floats, None, None, None, parameters, sharpness, *options)
    features = []
    for x, codes, margins, n_probes in zip(
        (query, key), saved[1:5:2], saved[2:5:2], estimator.probes(), strict=True
    ):
        projected = projections_of(x, parameters, estimator.hasher, *sizes)
        weights = probe_features(projected, codes, margins, n_probes, estimator.sharpness)
        features.append(weights.flatten(-2))
    return features[0] @ features[1].mT / estimator.n_hashes


def pair_weights(estimator, query, key):
    """Of all pairs, with the derivative that the estimator takes for theirs."""
    if estimator.unit_norm == "lift":
        query, key = lift(query, key, None, estimator.lift_scale)
    if isinstance(estimator, Soft):
        return soft_weights(estimator, query, key)
    cosine = torch.nn.functional.normalize(query, dim=-1) @ (
        torch.nn.functional.normalize(key, dim=-1).mT
    )
    probability = (1 - torch.acos(cosine) / math.pi) ** estimator.n_bits
    if isinstance(estimator, Expected) and estimator.gradient == "exact":
        return probability
    weights = probability.detach()
    if isinstance(estimator, Sampled):
        codes = [codes_of(x.detach().float(), SEED, estimator) for x in (query, key)]
        weights = (codes[0][..., :, None, :] == codes[1][..., None, :, :]).double().mean(-1)
    return weights * (1 + estimator.n_bits / 2 * (cosine - cosine.detach()))  # the lower bound's


def dense(estimator, query, key, value, mask, offset, normalize):
    """All pairs in float64. Query heads that share a head of keys are rows of one head."""
    group = query.shape[1] // key.shape[1]
    query = query.unflatten(1, (-1, group)).flatten(2, 3).double()
    position = torch.arange(N_Q).repeat(group)[:, None] + offset
    distance = position - torch.arange(key.shape[2])
    weights = pair_weights(estimator, query, key.double()) * (distance >= 0)
    if mask is not None:
        weights = weights * mask[:, None, None]
    out = normalized(weights, value.double(), normalize)
    return out.unflatten(2, (group, -1)).flatten(1, 2)


def with_gradients(function, tensors, grad_out):
    inputs = leaves_of(*tensors)
    out = function(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, grad_out.to(out.dtype))


def assert_close(results, wanted, rtol=2e-4):
    """Relative to the largest element, as single ones cancel to nearly nothing."""
    for got, want in zip(results, wanted, strict=True):
        atol = rtol * max(0.01, float(want.abs().max()) if want.numel() else 0)
        torch.testing.assert_close(got.double(), want.double(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=IDS)
def test_equals_the_dense_formula(estimator, offset):
    case = attention_inputs(N_Q, N_K, 12, 7, batch=2, heads=4)
    shared = case.key[:, ::2], case.value[:, ::2]
    some = torch.rand(2, N_K, generator=torch.Generator().manual_seed(1)) < 0.7
    for mask, normalize, key, value in (
        (None, None, case.key, case.value),
        (some, "sum", case.key, case.value),
        (padding_mask(2, N_K), "l2", *shared),
        (None, "sum", *shared),
    ):

        def ours(*x, mask=mask, normalize=normalize):
            options = {"estimator": estimator, "normalize": normalize, "seed": SEED}
            options |= {"is_causal": True, "causal_offset": offset, "enable_gqa": True}
            return yoso_attention(*x, mask, **options)

        def wanted(*x, mask=mask, normalize=normalize):
            first = N_K - N_Q if offset is None else offset
            return dense(estimator, *x, mask, first, normalize)

        tensors = case.query, key, value
        got = with_gradients(ours, tensors, case.grad_out)
        assert_close(got, with_gradients(wanted, tensors, case.grad_out))
        if offset is not None and offset <= -N_Q:
            assert not any(x.any() for x in got)  # nothing is seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=IDS)
def test_last_rows_of_the_whole_causal_call(estimator, masked, dtype):
    """As with a cache: the other queries' gradients are zero, so that the keys' are comparable."""
    for normalize in NORMALIZE:
        case = attention_inputs(60, 60, 16, 9, dtype=dtype)
        case.grad_out[:, :, :-N_Q] = 0
        mask = padding_mask(2, 60) if masked else None
        options = {"estimator": estimator, "normalize": normalize, "seed": SEED}
        options |= {"is_causal": True, "attn_mask": mask}
        whole = [
            x[:, :, -N_Q:] if i < 2 else x
            for i, x in enumerate(
                with_gradients(
                    lambda *x, o=options: yoso_attention(*x, **o),
                    (case.query, case.key, case.value),
                    case.grad_out,
                )
            )
        ]
        last = with_gradients(
            lambda *x, o=options: yoso_attention(*x, **o),
            (case.query[:, :, -N_Q:], case.key, case.value),
            case.grad_out[:, :, -N_Q:],
        )
        assert all(x.dtype is dtype for x in last)
        rounding = max(2e-5, 4 * torch.finfo(dtype).eps)
        assert_close(last, whole, rounding if dtype is not torch.float64 else 2e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=IDS)
def test_a_chunk_of_queries_in_the_middle(estimator):
    case = attention_inputs(60, 60, 16, 9)
    options = {"estimator": estimator, "is_causal": True, "seed": SEED}
    whole = yoso_attention(case.query, case.key, case.value, **options)
    for first, last in ((0, 1), (7, 20), (30, 60)):
        rows = case.query[:, :, first:last]
        out = yoso_attention(rows, case.key, case.value, causal_offset=first, **options)
        torch.testing.assert_close(out, whole[:, :, first:last], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=IDS)
def test_no_rows(estimator):
    case = attention_inputs(N_Q, N_K, 12, 7)
    query, key, value = case.query, case.key, case.value
    options = {"estimator": estimator, "is_causal": True, "seed": SEED}
    for offset in (None, 0, 4, -1, -4, HUGE, -HUGE - 1):
        options["causal_offset"] = offset
        assert yoso_attention(query[:, :, :0], key, value, **options).shape == (2, 3, 0, 7)
        out = yoso_attention(query, key[:, :, :0], value[:, :, :0], **options)
        assert out.shape == (2, 3, N_Q, 7) and not out.any()


def test_without_is_causal_it_says_nothing():
    case = attention_inputs(N_Q, N_K, 12, 7)
    inputs = case.query, case.key, case.value
    for estimator in ESTIMATORS:
        options = {"estimator": estimator, "seed": SEED}
        out = yoso_attention(*inputs, causal_offset=3, **options)
        assert torch.equal(out, yoso_attention(*inputs, **options))


@pytest.mark.parametrize(
    ("offset", "error", "words"),
    [
        (1.5, TypeError, "causal_offset must be an integer"),
        (True, TypeError, "causal_offset must be an integer"),
        (2**31, ValueError, "causal_offset must be an integer from -2147483648 to 2147483647"),
    ],
)
def test_bad_offsets(offset, error, words):
    x = torch.zeros(1, 2, 10, 8)
    with pytest.raises(error, match=words):
        yoso_attention(x, x, x, is_causal=True, causal_offset=offset)


def test_packed_sequences_have_their_own():
    x = torch.zeros(1, 2, 10, 8)
    packing = torch.tensor([0, 4, 10])
    with pytest.raises(ValueError, match="causal_offset must be None with cu_seqlens, got 0"):
        yoso_attention(x, x, x, is_causal=True, causal_offset=0, cu_seqlens=packing)
