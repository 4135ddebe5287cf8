"""lsh_attention: softmax attention from the pairs that collide."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from cases.attention import leaves_of  # noqa: E402

from lshkit import reference, torch_ops  # noqa: E402
from lshkit.attention import lsh_attention  # noqa: E402

WEIGHTINGS = ["horvitz_thompson", "none", "magicpig"]


def inputs(n_q=60, n_k=None, d=24, d_v=20, *, batch=2, heads=4, key_heads=2, seed=0):
    """Keys have a mean, as those of trained models do."""
    n_k = n_q if n_k is None else n_k
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *size: torch.randn(*size, generator=generator)  # noqa: E731
    case = SimpleNamespace(
        query=normal(batch, heads, n_q, d),
        key=normal(batch, key_heads, n_k, d) + 0.7,
        value=normal(batch, key_heads, n_k, d_v),
        grad_out=normal(batch, heads, n_q, d_v),
    )
    case.mask = torch.rand(batch, n_k, generator=generator) < 0.8
    return case


def leaves(case):
    return leaves_of(case.query, case.key, case.value)


def run(case, mask=None, is_causal=False, **options):
    """Output, gradients and the numbers of pairs."""
    tensors = leaves(case)
    options = {"seed": 5, "enable_gqa": True, **options}
    out, pairs = lsh_attention(*tensors, mask, is_causal=is_causal, return_pairs=True, **options)
    out.backward(case.grad_out.to(out.dtype))
    return SimpleNamespace(out=out.detach(), grads=[x.grad for x in tensors], pairs=pairs)


def reference_of(case, mask, causal, offset, *, n_bits, n_hashes, window, n_sinks, weighting):
    """Arguments of the reference for the codes that seed 5 gives, heads of keys repeated."""
    query, key, value = (x.double().numpy() for x in (case.query, case.key, case.value))
    batch, heads, n_q, d = query.shape
    key_heads = key.shape[1]
    key_mask = None if mask is None else mask[:, None].numpy()
    centre = reference.key_centre(key, key_mask, causal=causal, window=window)
    parameters = torch_ops.hash_parameters(torch.tensor([5]), key_heads, d, n_bits, n_hashes, 1)
    hashing = parameters, 1, n_bits, n_hashes
    key_codes = torch_ops.hash(torch.from_numpy(key - centre).float(), *hashing).numpy()
    grouped = case.query.reshape(batch, key_heads, -1, d)
    query_codes = torch_ops.hash(grouped, *hashing).reshape(batch, heads, n_q, -1).numpy()
    repeat = lambda x: np.repeat(x, heads // key_heads, 1)  # noqa: E731
    arguments = query, repeat(key), repeat(value), query_codes, repeat(key_codes)
    options = {"weighting": weighting, "causal": causal, "offset": offset, "key_mask": key_mask}
    options |= {"window": window, "n_sinks": n_sinks, "centre": repeat(centre)}
    return arguments, options | {"scale": 1 / math.sqrt(d)}


CASES = {
    "plain": {},
    "masked": {"masked": True},
    "causal": {"causal": True, "masked": True},
    "decoding": {"causal": True, "n_q": 3, "n_k": 300},
    "more queries than keys": {"causal": True, "n_q": 80, "n_k": 50},
    "an offset": {"causal": True, "n_q": 40, "n_k": 90, "offset": 13},
    "whole registers": {"d": 64, "d_v": 64, "n_k": 280},
    "no window": {"window": 0, "n_sinks": 0, "masked": True},
    "long codes": {"n_bits": 10, "n_hashes": 40},
    "many hashes": {"n_bits": 9, "n_hashes": 300, "n_q": 20},
    "one feature": {"d": 1, "d_v": 1, "n_bits": 2},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_equals_reference(name, weighting):
    check_against_reference(weighting, **CASES[name])


@pytest.mark.parametrize(
    ("weighting", "n_bits", "is_causal"), [("horvitz_thompson", 12, False), ("magicpig", 14, True)]
)
def test_pairs_found_by_buckets_equal_reference(weighting, n_bits, is_causal):
    """Many keys and long codes: few pairs collide, so that buckets are searched for them."""
    sizes = {"n_q": 260, "n_k": 9000, "batch": 1, "heads": 2, "key_heads": 1}
    check_against_reference(weighting, **sizes, n_bits=n_bits, causal=is_causal, masked=True)


def check_against_reference(weighting, **options):
    names = ("n_q", "n_k", "d", "d_v", "batch", "heads", "key_heads")
    case = inputs(**{key: options.pop(key) for key in names if key in options})
    causal, masked = options.pop("causal", False), options.pop("masked", False)
    n_q, n_k = case.query.shape[2], case.key.shape[2]
    offset = options.pop("offset", None)
    wanted_offset = offset if offset is not None else (n_k - n_q if causal else 0)
    options = {"n_bits": 5, "n_hashes": 12, "window": 6, "n_sinks": 2} | options
    options["weighting"] = weighting
    mask = case.mask if masked else None
    got = run(case, mask, causal, causal_offset=offset, **options)
    arguments, reference_options = reference_of(case, mask, causal, wanted_offset, **options)
    n_bits = options["n_bits"]
    out = reference.lsh_attention_forward(*arguments, n_bits, **reference_options)
    *_, pairs = reference.lsh_attention_sums(*arguments, n_bits, **reference_options)
    grads = reference.lsh_attention_backward(
        *arguments, case.grad_out.double().numpy(), n_bits, **reference_options
    )
    shape = *case.key.shape[:2], -1, n_k
    grads = [grads[0], *(x.reshape(*shape, x.shape[-1]).sum(2) for x in grads[1:])]
    assert np.array_equal(got.pairs.numpy(), pairs.sum(-1))
    # float32 sums; small probabilities are differences of numbers near 1
    np.testing.assert_allclose(got.out.numpy(), out, rtol=1e-4, atol=2e-5)
    for x, wanted in zip(got.grads, grads, strict=True):
        np.testing.assert_allclose(x.numpy(), wanted, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_window_over_everything_is_softmax(is_causal):
    case = inputs()
    case.mask[:, 0] = True  # else a causal query sees nothing, and SDPA says NaN
    got = run(case, case.mask, is_causal, window=60)
    tensors = leaves(case)
    mask = case.mask[:, None, None]
    if is_causal:
        mask = mask & torch.ones(60, 60, dtype=torch.bool).tril()
    out = F.scaled_dot_product_attention(*tensors, mask, enable_gqa=True)
    out.backward(case.grad_out)
    torch.testing.assert_close(got.out, out, rtol=1e-4, atol=1e-5)
    for x, tensor in zip(got.grads, tensors, strict=True):
        torch.testing.assert_close(x, tensor.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weighting", ["horvitz_thompson", "magicpig"])
def test_numerator_and_denominator_are_unbiased(weighting):
    """Over the hash functions, in projections on fixed directions: 4 standard errors."""
    case = inputs(14, d=8, d_v=5, batch=1, heads=2, key_heads=2, seed=3)
    scale = 0.25
    scores = (scale * case.query @ (case.key - case.key.mean(2, keepdim=True)).mT).double().exp()
    exact = torch.cat([scores @ case.value.double(), scores.sum(-1, keepdim=True)], -1)
    directions = torch.randn(4, exact.numel(), generator=torch.Generator().manual_seed(1)).double()
    directions = torch.cat([directions, torch.ones(1, exact.numel()).double()])
    family = torch_ops.FAMILY["hyperplane"]
    samples = []
    for seed in range(1500):
        parameters = torch_ops.hash_parameters(torch.tensor([seed]), 2, 8, 3, 6, family)
        out, log_sum, *_ = torch_ops.lsh_attention(
            *(case.query, case.key, case.value, None, parameters, family, 3, 6, True),
            *(scale, torch_ops.WEIGHTING[weighting], False, 0, 1, 0),
        )
        total = log_sum.double().exp()[..., None]
        estimate = torch.cat([out.double() * total, total], -1)
        samples.append(directions @ (estimate - exact).flatten())
    samples = torch.stack(samples)
    z = samples.mean(0) / (samples.std(0) / len(samples) ** 0.5)
    assert z.abs().max() < 4, z


def test_gradient_is_autograds_on_the_pairs():
    """With pairs and probabilities held fixed, in float64."""
    case = inputs(40, d=12, d_v=12, heads=2)
    options = {"n_bits": 4, "n_hashes": 8, "window": 3, "n_sinks": 1}
    options["weighting"] = "horvitz_thompson"
    got = run(case, case.mask, **options)
    arguments, reference_options = reference_of(case, case.mask, False, 0, **options)
    pair_options = ("causal", "offset", "key_mask", "window", "n_sinks")
    pairs, probability = reference.lsh_attention.sampled_pairs(
        *(arguments[0], arguments[1] - reference_options["centre"], *arguments[3:5], 4),
        *("horvitz_thompson", {name: reference_options[name] for name in pair_options}),
    )
    tensors = [x.double().requires_grad_() for x in (case.query, case.key, case.value)]
    query, key, value = tensors
    scores = query @ key.mT / math.sqrt(12) - torch.from_numpy(np.log(probability))
    weights = scores.masked_fill(~torch.from_numpy(pairs), -math.inf).softmax(-1)
    (weights @ value).backward(case.grad_out.double())
    for x, tensor in zip(got.grads, tensors, strict=True):
        torch.testing.assert_close(x.double(), tensor.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_padding_changes_nothing(is_causal):
    case = inputs()
    case.mask[0, :7] = False  # padding on the left
    before = run(case, case.mask, is_causal)
    hidden = ~case.mask[:, None, :, None].expand_as(case.key)
    case.key = torch.where(hidden, torch.nan, case.key)
    case.value = torch.where(hidden[..., :1], torch.inf, case.value)
    after = run(case, case.mask, is_causal)
    assert torch.equal(before.out, after.out)
    assert torch.equal(before.pairs, after.pairs)
    for x, y in zip(before.grads, after.grads, strict=True):
        assert torch.equal(x, y)
    assert not before.grads[1][hidden].any()


def test_causal_sees_no_future():
    case = inputs(n_q=80)
    before = run(case, None, True).out
    for x in (case.query, case.key, case.value):
        x[:, :, 50:] = torch.randn_like(x[:, :, 50:]) - 3
    after = run(case, None, True).out
    assert torch.equal(before[:, :, :50], after[:, :, :50])
    assert not torch.equal(before[:, :, 50:], after[:, :, 50:])


def test_causal_sees_no_future_but_for_rounding():
    """Of the first `window` keys, whose mean is taken from all: scores are of what is left."""
    case = inputs(n_q=80)
    before = run(case, None, True).out
    case.key[:, :, 5] = torch.randn_like(case.key[:, :, 5])
    after = run(case, None, True).out
    assert (before - after)[:, :, :5].abs().max() < 1e-5
    assert (before - after)[:, :, 5].abs().min() > 1e-5
    exact = run(case, None, True, center=False).out
    case.key[:, :, 5] = 1e5
    assert torch.equal(run(case, None, True, center=False).out[:, :, :5], exact[:, :, :5])


@pytest.mark.parametrize(("hasher", "bias"), [("hyperplane", 0), ("hadamard", 0.01)])
@pytest.mark.parametrize("cosine", [0.3, 0.5, 0.7])
def test_pairs_are_met_with_their_probability(hasher, bias, cosine):
    """Over hash functions: within 4 standard errors, rotations within 1 % more."""
    generator = torch.Generator().manual_seed(0)
    query, other = torch.randn(2, 1, 1, 1000, 64, generator=generator)
    query = F.normalize(query, dim=-1)
    other = F.normalize(other - (other * query).sum(-1, keepdim=True) * query, dim=-1)
    key = cosine * query + math.sqrt(1 - cosine**2) * other
    rates = []
    for seed in range(60):
        family = torch_ops.FAMILY[hasher]
        parameters = torch_ops.hash_parameters(torch.tensor([seed]), 1, 64, 8, 32, family)
        codes = (torch_ops.hash(x, parameters, family, 8, 32) for x in (query, key))
        rates.append(torch.eq(*codes).any(-1).double().mean())
    rates = torch.stack(rates)
    wanted = 1 - (1 - (1 - math.acos(cosine) / math.pi) ** 8) ** 32
    error = rates.std().item() / math.sqrt(len(rates))
    assert abs(rates.mean() - wanted) < 4 * error + bias * wanted


def test_decoding_is_the_last_row():
    case = inputs(n_q=90)
    whole = run(case, case.mask, True).out
    for n in (1, 5, 40, 90):
        out = lsh_attention(
            *(case.query[:, :, n - 1 : n], case.key[:, :, :n], case.value[:, :, :n]),
            case.mask[:, :n],
            is_causal=True,
            seed=5,
            enable_gqa=True,
        )
        torch.testing.assert_close(out[:, :, 0], whole[:, :, n - 1], rtol=1e-5, atol=1e-6)


def test_queries_without_pairs_are_zero():
    case = inputs()
    got = run(case, None, n_bits=16, n_hashes=1, window=None, n_sinks=0)
    empty = got.pairs == 0
    assert empty.any()
    assert not got.out[empty].any() and not got.grads[0][empty].any()
    assert torch.isfinite(got.out).all()
    nothing = run(case, torch.zeros_like(case.mask))
    assert not nothing.out.any() and not any(x.any() for x in nothing.grads)


@pytest.mark.parametrize("size", [1e2, 1e4, 1e7, 1e10])
def test_scores_of_any_size(size):
    """Beyond 2^24 a rounded score differs from the next by more than one, whatever comes of it: the
    weights of a query still have the sum 1, and a largest score apart from the others all of it."""
    case = inputs(d=12)
    case.query *= size
    got = run(case, window=100, center=False)
    tensors = [x.detach().double().requires_grad_() for x in (case.query, case.key, case.value)]
    out = F.scaled_dot_product_attention(*tensors, enable_gqa=True)
    out.backward(case.grad_out.double())
    torch.testing.assert_close(got.out.double(), out, rtol=0, atol=1e-4)
    torch.testing.assert_close(got.grads[2].double(), tensors[2].grad, rtol=0, atol=1e-4)


def test_large_scores_and_rows_of_zeros():
    case = inputs()
    case.query *= 300
    case.query[:, :, 3] = 0
    got = run(case)
    assert torch.isfinite(got.out).all() and all(torch.isfinite(x).all() for x in got.grads)
    case.query[:] = torch.randn_like(case.query) * 1e17  # rounding of scores is far above 1
    got = run(case, window=60, center=False)
    largest = case.value.abs().amax() + 1e-4
    assert torch.isfinite(got.out).all() and (got.out.abs() < largest).all()
    case.query[:, :, 3] = 0
    case.key[:] = 2.5  # without their mean, rows of zeros
    got = run(case)
    mean = case.value.mean(2).repeat_interleave(2, 1)
    torch.testing.assert_close(got.out[:, :, 3], mean, rtol=1e-4, atol=1e-4)
    case.key[:] = 2.0**123  # their sum overflows, their mean does not
    for mask in (None, torch.ones_like(case.mask)):
        got = run(case, mask)
        assert (got.pairs > 0).all()
        torch.testing.assert_close(got.out[:, :, 3], mean, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype):
    case = inputs()
    for name in ("query", "key", "value", "grad_out"):
        setattr(case, name, getattr(case, name).to(dtype))
    got = run(case)
    for name in ("query", "key", "value", "grad_out"):
        setattr(case, name, getattr(case, name).float())
    wanted = run(case)
    assert got.out.dtype is dtype and all(x.dtype is dtype for x in got.grads)
    assert torch.equal(got.out, wanted.out.to(dtype))
    # the output that the backward pass reads has been rounded
    tolerance = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float64: 1e-6}[dtype]
    for x, y in zip(got.grads, wanted.grads, strict=True):
        torch.testing.assert_close(x.float(), y, rtol=tolerance, atol=tolerance)


def test_shapes_and_seeds():
    case = inputs(heads=2)
    out = run(case).out
    x = case.query[:, 0], case.key[:, 0], case.value[:, 0]
    torch.manual_seed(0)
    first = lsh_attention(*x)
    torch.manual_seed(0)
    assert first.shape == (2, 60, 20) and torch.equal(first, lsh_attention(*x))
    five = lsh_attention(case.query[None], case.key[None], case.value[None], seed=5)
    assert torch.equal(five[0], out)
    assert lsh_attention(*(x[:, :0] for x in (case.query, case.key, case.value))).shape[1] == 0
    assert lsh_attention(case.query[:, :, :0], case.key, case.value).shape == (2, 2, 0, 20)
    none = lsh_attention(case.query, case.key[:, :, :0], case.value[:, :, :0])
    assert none.shape == out.shape and not none.any()


@pytest.mark.parametrize("n_bits", [8, 9])
@pytest.mark.parametrize("masked", [False, True])
def test_opcheck(n_bits, masked):
    case = inputs(17, 13, heads=4)
    parameters = torch_ops.hash_parameters(torch.tensor([0]), 2, 24, n_bits, 4, 1)
    mask = case.mask if masked else None
    options = 0.2, 0, True, -4, 3, 1
    op = torch.ops.lshkit.lsh_attention.default
    arguments = (*leaves(case), mask, parameters, 1, n_bits, 4, True, *options)
    torch.library.opcheck(op, arguments)
    out, log_sum, query_codes, key_codes, centre, _ = op(*arguments)
    backward = (
        *(case.grad_out, case.query, case.key, case.value, mask, out.detach(), log_sum),
        *(centre, query_codes, key_codes, n_bits, *options),
    )
    for output_mask in ([True, True, True], [False, True, False]):
        torch.library.opcheck(
            torch.ops.lshkit.lsh_attention_backward.default, (*backward, output_mask)
        )


def test_compile():
    case = inputs()

    def loss(query, key, value):
        out = lsh_attention(query, key, value, case.mask, is_causal=True, enable_gqa=True, seed=5)
        return (out * case.grad_out).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    tensors = leaves(case)
    compiled(*tensors).backward()
    wanted = run(case, case.mask, True)
    for x, y in zip(tensors, wanted.grads, strict=True):
        assert torch.equal(x.grad, y)


def test_autocast_and_vmap():
    case = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        out = lsh_attention(case.query, case.key, case.value, enable_gqa=True, seed=5)
    assert out.dtype is torch.bfloat16

    def attend(query, key, value):
        return lsh_attention(query[None], key[None], value[None], enable_gqa=True, seed=5)[0]

    mapped = torch.func.vmap(attend)(case.query, case.key, case.value)
    assert torch.equal(mapped, run(case).out)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"weighting": "uniform"}, ValueError, "weighting must be one of"),
        ({"n_bits": 17}, ValueError, "n_bits"),
        ({"n_hashes": 0}, ValueError, "n_hashes"),
        ({"hasher": "simhash"}, ValueError, "hasher must be one of"),
        ({"window": -1}, ValueError, "window"),
        ({"n_sinks": 1.5}, TypeError, "n_sinks"),
        ({"scale": 0.0}, ValueError, "scale"),
        ({"center": "yes"}, TypeError, "center"),
        ({"causal_offset": 0.5}, TypeError, "causal_offset"),
        ({"attn_mask": torch.ones(60, 60, dtype=torch.bool)}, ValueError, "key padding mask"),
        ({"attn_mask": torch.zeros(2, 60)}, TypeError, "boolean"),
        ({"value": torch.zeros(2, 2, 59, 20)}, ValueError, "value must have key's length"),
        ({"key": torch.zeros(2, 2, 60, 23)}, ValueError, "number of features"),
        ({"key": np.zeros((2, 2, 60, 24))}, TypeError, "key must be a torch tensor"),
        ({"enable_gqa": False}, ValueError, "batch and heads"),
        ({"seed": -1}, ValueError, "seed"),
    ],
)
def test_bad_input(change, error, words):
    case = inputs()
    arguments = {"query": case.query, "key": case.key, "value": case.value, "enable_gqa": True}
    with pytest.raises(error, match=words):
        lsh_attention(**(arguments | change))
