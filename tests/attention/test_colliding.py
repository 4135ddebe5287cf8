"""Colliding: softmax of cosines from the pairs that collide, as an estimator."""

import math
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from cases.attention import attention_inputs, softmax_of_cosines  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from lshkit.attention import (  # noqa: E402
    Colliding,
    YosoAttention,
    lsh_attention,
    yoso_attention,
)
from lshkit.attention.unit_norm import unit_rows  # noqa: E402

SAMPLED = Colliding(n_bits=4, n_hashes=12, exact_up_to=0, scale=6.0)


def leaves(case):
    return [x.detach().requires_grad_() for x in (case.query, case.key, case.value)]


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("offset", [None, 0, 7])
def test_all_pairs_are_softmax_of_cosines(offset, key_heads):
    """With the gradients of rows and of the scale, in float64."""
    case = attention_inputs(40, 47, 16, 9, heads=4)
    case.key, case.value = case.key[:, :key_heads], case.value[:, :key_heads]
    mask = torch.rand(len(case.key), 47, generator=torch.Generator().manual_seed(1)) < 0.8
    mask[:, 0] = True  # no query without a key
    hidden = ~mask[:, None, None]
    if offset is not None:
        hidden = hidden | (torch.arange(47) > torch.arange(40)[:, None] + offset)
    scale = torch.linspace(2, 9, key_heads, requires_grad=True)
    inputs = leaves(case)
    out = yoso_attention(
        *(*inputs, mask),
        is_causal=offset is not None,
        causal_offset=offset,
        enable_gqa=True,
        estimator=Colliding(),
        parameters={"scale": scale},
        normalize=None,
        seed=0,
    )
    exact = [x.detach().double().requires_grad_() for x in (*inputs, scale)]
    by_head = exact[3].repeat_interleave(4 // key_heads)[:, None, None]
    wanted = softmax_of_cosines(*exact[:3], by_head, hidden)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(out, (*inputs, scale), case.grad_out)
    for got, expected in zip(
        grads, torch.autograd.grad(wanted, exact, case.grad_out.double()), strict=True
    ):
        error = (got.double() - expected).abs().max() / expected.abs().max()
        assert error < 1e-5


@pytest.mark.parametrize("window", [1, 5])
@pytest.mark.parametrize("is_causal", [False, True])
def test_samples_are_those_of_lsh_attention(is_causal, window):
    case = attention_inputs(90, 90, 16, 9)
    estimator = replace(SAMPLED, window=window)
    inputs, others = leaves(case), leaves(case)
    options = {"is_causal": is_causal, "seed": 3}
    out = yoso_attention(*inputs, estimator=estimator, normalize=None, **options)
    wanted = lsh_attention(
        F.normalize(others[0], dim=-1) * 6,
        F.normalize(others[1], dim=-1),
        others[2],
        scale=1,
        n_bits=4,
        n_hashes=12,
        window=window,
        n_sinks=0,
        center=False,
        **options,
    )
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)
    grads = [torch.autograd.grad(o, x, case.grad_out) for o, x in ((out, inputs), (wanted, others))]
    for got, expected in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("clustered", [False, True])
def test_sums_are_unbiased(clustered):
    """Numerator and denominator over 3,000 sets of hash functions, to 4 standard errors.

    A column that is 1 at one position only has that position's weight over the denominator there,
    and a position always sees itself.
    """
    n, d, seeds, scale = 24, 8, 3000, 3.0
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(n, d, generator=generator)
    if clustered:  # three clusters, and duplicates
        rows = rows[:3].repeat_interleave(8, 0) + 0.2 * rows
        rows[5], rows[13] = rows[4], rows[12]
    query, key = rows + 0.3 * torch.randn(n, d, generator=generator), rows
    value = torch.cat((torch.eye(n), torch.randn(n, 4, generator=generator)), 1)
    inputs = [
        x.expand(1, seeds, *x.shape) for x in (query, key, value)
    ]  # a head has its own hashes
    estimator = Colliding(
        n_bits=3, n_hashes=4, hasher="hyperplane", exact_up_to=0, scale=scale, unit_norm="l2"
    )
    out = yoso_attention(*inputs, estimator=estimator, normalize=None, seed=1)[0].double()
    weights = (
        scale * F.normalize(query.double(), dim=-1) @ F.normalize(key.double(), dim=-1).T
    ).exp()
    denominator = weights.diagonal() / torch.diagonal(out[..., :n], dim1=1, dim2=2)
    numerator = out[..., n:] * denominator[..., None]
    for got, wanted in (
        (denominator, weights.sum(1)),
        (numerator, weights @ value[:, n:].double()),
    ):
        error = got.std(0) / seeds**0.5
        assert ((got.mean(0) - wanted).abs() <= 4 * error + 1e-5 * wanted.abs()).all()


def test_more_hashes_come_nearer_to_softmax():
    case = attention_inputs(300, 300, 16, 9, batch=1)
    wanted = softmax_of_cosines(case.query, case.key, case.value, 6.0)

    def error(n_hashes):
        estimator = replace(SAMPLED, n_bits=7, n_hashes=n_hashes)
        out = yoso_attention(
            *(case.query, case.key, case.value), estimator=estimator, normalize=None, seed=0
        )
        return ((out - wanted).square().mean() / wanted.square().mean()).sqrt()

    errors = [error(n_hashes) for n_hashes in (4, 32, 256)]
    assert errors[0] > 1.5 * errors[1] > 3 * errors[2]


@pytest.mark.parametrize("n, exact", [(60, True), (61, False)])
def test_all_pairs_up_to_a_length(n, exact):
    case = attention_inputs(20, n, 16, 9)
    inputs = case.query, case.key, case.value
    estimator = replace(SAMPLED, exact_up_to=60)
    options = {"normalize": None, "seed": 0}
    out = yoso_attention(*inputs, estimator=estimator, **options)
    always = yoso_attention(*inputs, estimator=replace(estimator, exact_up_to=61), **options)
    never = yoso_attention(*inputs, estimator=SAMPLED, **options)
    assert torch.equal(out, always if exact else never) and not torch.equal(always, never)
    for lengths, same in (((20, n), out), ((99, 60), always), ((1, 61), never)):
        fixed = estimator.at_lengths(*lengths)
        assert torch.equal(yoso_attention(*inputs, estimator=fixed, **options), same)


def test_normalize():
    case = attention_inputs(70, 70, 16, 9)
    inputs = case.query, case.key, case.value
    of = {
        how: yoso_attention(*inputs, estimator=SAMPLED, normalize=how, seed=0)
        for how in (None, "sum", "l2")
    }
    assert torch.equal(of[None], of["sum"])
    torch.testing.assert_close(of["l2"], F.normalize(of[None], dim=-1))


@pytest.mark.parametrize("exact_up_to", [32, 33])
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences_are_each_alone(is_causal, exact_up_to):
    """All of their pairs by their mean length of 32.5."""
    case = attention_inputs(130, 130, 16, 9, batch=1)
    mask = torch.rand(1, 130, generator=torch.Generator().manual_seed(1)) < 0.8
    starts = [0, 40, 41, 41, 130]
    options = {"is_causal": is_causal, "seed": 2}
    inputs = leaves(case)
    packed = {"estimator": replace(SAMPLED, exact_up_to=exact_up_to)} | options
    out = yoso_attention(*inputs, mask, cu_seqlens=torch.tensor(starts), **packed)
    options["estimator"] = replace(SAMPLED, exact_up_to=130 if exact_up_to == 33 else 0)
    grads = torch.autograd.grad(out, inputs, case.grad_out)
    for start, stop in zip(starts[:-1], starts[1:], strict=True):
        part = [x.detach()[:, :, start:stop].requires_grad_() for x in inputs]
        alone = yoso_attention(*part, mask[:, start:stop], **options)
        assert torch.equal(out[:, :, start:stop], alone)
        wanted = torch.autograd.grad(alone, part, case.grad_out[:, :, start:stop])
        for got, expected in zip(grads, wanted, strict=True):
            assert torch.equal(got[:, :, start:stop], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_are_computed_in_float32(dtype):
    case = attention_inputs(70, 70, 16, 9, dtype=dtype)
    inputs = case.query, case.key, case.value
    out = yoso_attention(*inputs, estimator=SAMPLED, normalize=None, seed=0)
    wide = yoso_attention(*(x.float() for x in inputs), estimator=SAMPLED, normalize=None, seed=0)
    assert out.dtype is dtype
    if dtype is torch.float64:  # whose norms are computed as such
        torch.testing.assert_close(out, wide.double(), rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(out, wide.to(dtype))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("offset", [47, 1000, 2**31 - 1, -40, -(2**31)])
def test_all_pairs_at_any_offset(offset, is_causal):
    case = attention_inputs(40, 47, 16, 9)
    inputs = case.query, case.key, case.value
    out = yoso_attention(
        *inputs,
        estimator=Colliding(),
        is_causal=is_causal,
        causal_offset=offset,
        normalize=None,
        seed=0,
    )
    wanted = softmax_of_cosines(*inputs, 12.0)
    if is_causal and offset < 0:
        wanted = torch.zeros_like(wanted)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("estimator", [Colliding(), SAMPLED])
def test_autocast_changes_the_dtype_of_the_output_alone(estimator):
    case = attention_inputs(50, 50, 16, 9)
    inputs = case.query, case.key, case.value
    wanted = yoso_attention(*inputs, estimator=estimator, seed=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = yoso_attention(*inputs, estimator=estimator, seed=0)
    assert out.dtype is torch.bfloat16 and torch.equal(out, wanted.bfloat16())


def test_shapes_without_contents():
    case = attention_inputs(50, 50, 16, 9, batch=1)
    inputs = [x.to("meta") for x in (case.query, case.key, case.value)]
    starts = torch.tensor([0, 20, 50])
    for options in ({}, {"cu_seqlens": starts.to("meta")}):
        assert yoso_attention(*inputs, estimator=Colliding(), **options).shape == (1, 3, 50, 9)


def test_lifted_scores_are_inner_products():
    case = attention_inputs(30, 30, 16, 9)
    inputs = [0.1 * case.query, 0.1 * case.key, case.value]
    estimator = Colliding(unit_norm="lift", lift_scale=4.0, scale=8.0)
    out = yoso_attention(*inputs, estimator=estimator, normalize=None, seed=0)
    wanted = F.scaled_dot_product_attention(*inputs, scale=2.0)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


def test_rows_of_any_size():
    """Cosines have none; a row of zeros has a cosine of 0 with every other."""
    case = attention_inputs(50, 50, 16, 9)
    inputs = [case.query.clone(), case.key.clone(), case.value]
    inputs[0][:, :, 3], inputs[1][:, :, 7] = 0, 0
    wanted = yoso_attention(*inputs, estimator=Colliding(), normalize=None, seed=0)
    torch.testing.assert_close(wanted, softmax_of_cosines(*inputs, 12.0), rtol=1e-5, atol=1e-5)
    for estimator in (Colliding(), SAMPLED):
        near = yoso_attention(*inputs, estimator=estimator, normalize=None, seed=0)
        for size in (1e-30, 1e30):
            sized = [size * inputs[0], inputs[1] / size, inputs[2]]
            out = yoso_attention(*sized, estimator=estimator, normalize=None, seed=0)
            torch.testing.assert_close(out, near, rtol=1e-4, atol=1e-4)
        sized = [1e200 * inputs[0].double(), 1e-200 * inputs[1].double(), inputs[2].double()]
        out = yoso_attention(*sized, estimator=estimator, normalize=None, seed=0)
        torch.testing.assert_close(out.float(), near, rtol=1e-4, atol=1e-4)


def test_subnormal_rows_are_zeros_and_others_have_finite_gradients():
    key = torch.eye(4)[None, None, :2]
    for dtype in (torch.float32, torch.float64):
        tiny = torch.finfo(dtype).tiny
        for size in (0, tiny / 1000, tiny * 0.9, tiny, 1e-20):
            query = torch.full((1, 1, 2, 4), size, dtype=dtype, requires_grad=True)
            tensors = query, key.to(dtype), key.to(dtype)
            out = yoso_attention(*tensors, estimator="colliding", normalize=None)
            (grad,) = torch.autograd.grad(out[..., 0].sum(), query)
            assert grad.isfinite().all() and (grad == 0).all() == (size < tiny)


@pytest.mark.parametrize("size", [1e-31, 1e-35, 1e-40])
def test_gradients_of_small_sums_of_values_are_finite(size):
    """Normalised, with norms that count as 2^-100 where they are less."""
    case = attention_inputs(40, 40, 16, 8)
    case.value[:, :, 0] *= size
    inputs = leaves(case)
    out = yoso_attention(*inputs, estimator=SAMPLED, seed=1, is_causal=True)
    assert torch.allclose(out[:, :, 0].norm(dim=-1), torch.ones(()))
    for x in torch.autograd.grad(out, inputs, case.grad_out):
        assert x.isfinite().all()
    few = torch.tensor([[3.0, 4.0]], dtype=torch.float64) * 2.0**-1010
    few.requires_grad_()
    unit_rows(few).backward(torch.tensor([[1.0, 0.0]], dtype=torch.float64))
    torch.testing.assert_close(few.grad * 2.0**-1000, torch.tensor([[0.64, -0.48]]).double())


def test_the_longest_sequence_sets_the_bits_and_longer_ones_are_no_warning(recwarn):
    """More keys than max_length take time, not accuracy: each pair has its own probability."""
    case = attention_inputs(40, 2100, 16, 3)
    by_rule, by_bits = (
        yoso_attention(case.query, case.key, case.value, seed=0, normalize=None, estimator=made)
        for made in (Colliding(max_length=2048), Colliding(n_bits=9))
    )
    assert torch.equal(by_rule, by_bits) and not recwarn.list


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scale": 0.0}, ValueError, "scale must be a finite number > 0"),
        ({"scale": torch.tensor(3.0)}, TypeError, "goes into parameters={'scale': tensor}"),
        ({"window": -1}, ValueError, "window must be an integer from 0 to 2147483647, got -1"),
        ({"exact_up_to": -1}, ValueError, "exact_up_to must be an integer from 0"),
        ({"exact_up_to": 2.5}, TypeError, "exact_up_to must be an integer"),
        ({"max_length": 0}, ValueError, "max_length must be an integer from 1"),
        ({"max_length": 4096, "n_bits": 8}, ValueError, "which sets it to 10, got 8"),
        ({"sharpness": 2.0}, TypeError, "sharpness"),
        ({"n_bits": 8.5}, TypeError, "n_bits must be an integer"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        Colliding(**options)


def test_bad_calls():
    case = attention_inputs(10, 10, 8, 3)
    inputs = case.query, case.key, case.value
    for scale, message in (
        (torch.ones(5), r"parameters\['scale'\] must have shape \(\) or \(heads of keys,\)"),
        (torch.ones(1, dtype=torch.int32), r"parameters\['scale'\] must hold floats"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            yoso_attention(*inputs, estimator="colliding", parameters={"scale": scale})
    for scale in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(
            ValueError, match=r"parameters\['scale'\] must be finite and > 0 in float32, got"
        ):
            yoso_attention(
                *inputs, estimator="colliding", parameters={"scale": torch.tensor([1.0, scale, 2])}
            )
    with pytest.raises(ValueError, match="parameters may hold 'scale' with Colliding"):
        yoso_attention(*inputs, estimator="colliding", parameters={"sharpness": torch.tensor(1.0)})
    with pytest.raises(ValueError, match="learn may hold 'scale' with Colliding"):
        YosoAttention(8, 2, estimator="colliding", learn=["planes"])
