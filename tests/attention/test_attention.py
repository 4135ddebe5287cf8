"""yoso_attention: values, shapes, dtypes, rows without a direction, and what it refuses."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cases.attention import (  # noqa: E402
    EXPECTED,
    FAMILIES,
    NORMALIZE,
    SAMPLED,
    SHAPES,
    attention_inputs,
    codes_of,
    expected_reference,
    padding_mask,
    sampled_reference,
)

from lshkit.attention import Expected, Sampled, Soft, yoso_attention  # noqa: E402

# float32 sums of a few hundred terms of order 1: rounding of 1e-7 a term, and normalising a sum
# that cancels (a sparse row of codes) loses a digit or two of it.
FLOAT32 = {"rtol": 1e-4, "atol": 1e-5}
FLOAT64 = {"rtol": 1e-9, "atol": 1e-11}


def masks_and_normalisations(shape):
    mask = padding_mask(2, shape[1])
    return [(None, "l2"), *((mask, normalize) for normalize in NORMALIZE), (None, None)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("n_bits", [1, 8, 9, 16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sampled_equals_reference(shape, n_bits, is_causal):
    case = attention_inputs(*shape)
    estimator = replace(SAMPLED, n_bits=n_bits, n_hashes=11)
    codes = [codes_of(x, 5, estimator) for x in (case.query, case.key)]
    for mask, normalize in masks_and_normalisations(shape):
        out = yoso_attention(
            case.query,
            case.key,
            case.value,
            mask,
            estimator=estimator,
            is_causal=is_causal,
            causal_offset=0,
            normalize=normalize,
            seed=5,
        )
        expected = sampled_reference(case, *codes, mask, is_causal, normalize)
        torch.testing.assert_close(out.double(), expected, **FLOAT32)
        assert mask is None or not out[-1].any()


@pytest.mark.parametrize("n_hashes", [1, np.int64(32), 100])
@pytest.mark.parametrize("hasher", FAMILIES)
def test_sampled_hashers_and_hashes(hasher, n_hashes):
    case = attention_inputs(65)
    estimator = replace(SAMPLED, hasher=hasher, n_hashes=n_hashes)
    out = yoso_attention(case.query, case.key, case.value, estimator=estimator, seed=1)
    codes = [codes_of(x, 1, estimator) for x in (case.query, case.key)]
    torch.testing.assert_close(out.double(), sampled_reference(case, *codes), **FLOAT32)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("n_bits", [1, 8, 9, 16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_expected_equals_reference(shape, n_bits, is_causal):
    for dtype, tolerance in ((torch.float32, FLOAT32), (torch.float64, FLOAT64)):
        case = attention_inputs(*shape, dtype=dtype)
        if shape[2] == 1:
            # Opposite numbers have the weight 0, or a rounding error of it that normalises to 1.
            # Parallel ones have a cosine of 1 - eps, where acos keeps half of the digits.
            case.query, case.key = case.query.abs(), case.key.abs()
            tolerance = {"rtol": 0, "atol": 2 * n_bits * torch.finfo(dtype).eps ** 0.5}
        for mask, normalize in masks_and_normalisations(shape):
            out = yoso_attention(
                case.query,
                case.key,
                case.value,
                mask,
                estimator=Expected(n_bits=n_bits),
                is_causal=is_causal,
                causal_offset=0,
                normalize=normalize,
            )
            assert out.dtype == dtype
            expected = expected_reference(case, n_bits, mask, is_causal, normalize)
            torch.testing.assert_close(out.double(), expected, **tolerance)
            assert mask is None or not out[-1].any()


@pytest.mark.parametrize(
    ("hasher", "dtype"),
    [*((hasher, torch.float32) for hasher in FAMILIES), ("hyperplane", torch.bfloat16)],
)
def test_sampled_is_unbiased(hasher, dtype):
    """Without normalisation the mean over hash functions is the expectation. One set a head."""
    sets = 2000
    case = attention_inputs(5, 6, 16, 3, batch=1, heads=1, seed=3, dtype=dtype)
    query, key, value = (x.expand(1, sets, -1, -1) for x in (case.query, case.key, case.value))
    estimator = replace(SAMPLED, n_bits=4, n_hashes=8, hasher=hasher)
    out = yoso_attention(query, key, value, estimator=estimator, seed=11, normalize=None).double()
    mean, error = out.mean(1), out.std(1) / sets**0.5
    exact = expected_reference(case, 4, normalize=None)[:, 0]
    assert ((mean - exact).abs() < 4 * error).all()


@pytest.mark.parametrize(
    "estimator, dtype",
    [
        *[(EXPECTED, dtype) for dtype in (torch.float16, torch.float64)],
        (SAMPLED, torch.float64),  # 16 bits: test_16_bit_inputs.py, test_short_floats.py
    ],
    ids=str,
)
def test_dtypes_are_computed_in_float32(estimator, dtype):
    case = attention_inputs(33, d=20, dtype=dtype)
    inputs = case.query, case.key, case.value
    out = yoso_attention(*inputs, estimator=estimator, seed=2)
    in_float32 = yoso_attention(*(x.float() for x in inputs), estimator=estimator, seed=2)
    assert out.dtype == dtype
    if estimator is EXPECTED and dtype == torch.float64:  # and this one in float64
        torch.testing.assert_close(out, in_float32.double(), **FLOAT32)
        assert not torch.equal(out, in_float32.double())
    else:
        torch.testing.assert_close(out, in_float32.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("estimator", [SAMPLED, EXPECTED], ids=str)
def test_leading_dimensions_and_mask_shapes(estimator):
    case = attention_inputs(9, 13, batch=6, heads=2)
    inputs = case.query, case.key, case.value
    mask = padding_mask(6, 13)
    options = {"estimator": estimator, "seed": 4}
    out = yoso_attention(*inputs, mask, **options)

    def assert_same(result, expected=out):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)

    assert_same(yoso_attention(*inputs, mask[:, None, None], **options))
    folded = [x.unflatten(0, (2, 3)) for x in inputs]
    folded_mask = mask.unflatten(0, (2, 3))
    for shape in ((2, 3, 13), (2, 3, 1, 1, 13)):
        result = yoso_attention(*folded, folded_mask.reshape(shape), **options)
        assert_same(result, out.unflatten(0, (2, 3)))
    first_head = [x[:, 0] for x in inputs]  # the first of several sets is the only one of one
    for shape in ((6, 13), (6, 1, 13)):
        assert_same(yoso_attention(*first_head, mask.reshape(shape), **options), out[:, 0])
    every_second = torch.stack([mask, ~mask], -1).flatten(1)[:, ::2]  # strided rows
    assert_same(yoso_attention(*inputs, every_second, **options))


@pytest.mark.parametrize("estimator", [SAMPLED, EXPECTED], ids=str)
def test_strided_views(estimator):
    case = attention_inputs(19)
    options = {"estimator": estimator, "seed": 4}
    inputs = case.query, case.key, case.value
    out = yoso_attention(*inputs, **options)
    heads_inside = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    columns_first = [x.mT.contiguous().mT for x in inputs]
    packed = torch.cat(inputs, -1).split(32, -1)
    for views in (heads_inside, columns_first, packed):
        assert not all(x.is_contiguous() for x in views)
        assert torch.equal(yoso_attention(*views, **options), out)
    expanded = [x[:, :1].expand(-1, 3, -1, -1) for x in inputs]
    copied = [x.contiguous() for x in expanded]
    assert torch.equal(yoso_attention(*expanded, **options), yoso_attention(*copied, **options))


def test_seeds():
    case = attention_inputs(9)
    inputs = case.query, case.key, case.value

    def attend(seed=None):
        return yoso_attention(*inputs, estimator=SAMPLED, seed=seed)

    assert torch.equal(attend(3), attend(3))
    assert torch.equal(attend(3), attend(torch.tensor(3)))
    assert torch.equal(attend(3), attend(torch.tensor([3])))
    assert torch.equal(attend(3), attend(np.int64(3)))
    assert not torch.equal(attend(3), attend(4))
    torch.manual_seed(0)
    first, second = attend(), attend()
    torch.manual_seed(0)
    assert torch.equal(attend(), first)
    assert not torch.equal(first, second)


def test_a_sequence_does_not_depend_on_its_batch_mates():
    case = attention_inputs(33, batch=3)
    inputs = case.query, case.key, case.value
    out = yoso_attention(*inputs, estimator=SAMPLED, seed=0)
    alone = yoso_attention(*(x[1:2] for x in inputs), estimator=SAMPLED, seed=0)
    assert torch.equal(out[1:2], alone)
    query = case.query[:, :1].expand(-1, 3, -1, -1)  # while each head has its own functions
    codes = codes_of(query, 0)
    assert not torch.equal(codes[:, 0], codes[:, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_bits", [9, 12])
@pytest.mark.parametrize("first", [3, 100, 200, 299])
def test_causal_queries_do_not_depend_on_later_rows(first, n_bits, dtype):
    """Not in a bit, though later rows that are all alike are summed in tables."""
    case = attention_inputs(300, d=64, batch=1, heads=2)
    inputs = [x.to(dtype) for x in (case.query, case.key, case.value)]
    alike = [x.clone() for x in inputs]
    for x in alike:
        x[:, :, first:] = x[:, :, first : first + 1]
    options = {"is_causal": True, "normalize": None, "seed": 1}
    options |= {"estimator": Sampled(n_bits=n_bits, n_hashes=20, expectation="never")}
    out, of_alike = (yoso_attention(*x, **options) for x in (inputs, alike))
    assert torch.equal(out[:, :, :first], of_alike[:, :, :first])
    if dtype == torch.float32:
        codes = [codes_of(x, 1, options["estimator"]) for x in alike[:2]]
        case.query, case.key, case.value = alike
        wanted = sampled_reference(case, *codes, is_causal=True, normalize=None)
        torch.testing.assert_close(of_alike.double(), wanted, **FLOAT32)


# ---------------------------------------------------------------- rows without a direction


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("estimator", [SAMPLED, EXPECTED], ids=str)
def test_a_value_that_is_not_finite_reaches_the_sums_that_contain_it(estimator, is_causal, bad):
    case = attention_inputs(21)
    options = {"is_causal": is_causal, "estimator": estimator, "seed": 0, "normalize": None}
    clean = yoso_attention(case.query, case.key, case.value, **options)
    value = case.value.clone()
    value[0, 1, 4, 3] = bad
    out = yoso_attention(case.query, case.key, value, **options)
    if estimator is SAMPLED:
        codes = [codes_of(x, 0)[0, 1] for x in (case.query, case.key)]
        reached = (codes[0] == codes[1][4]).any(-1)
    else:
        reached = torch.ones(21, dtype=torch.bool)
    if is_causal:
        reached[:4] = False
    assert torch.equal(~out[0, 1, :, 3].isfinite(), reached)
    out[0, 1, :, 3] = clean[0, 1, :, 3] = 0
    torch.testing.assert_close(out, clean)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n_bits", [1, 8])
@pytest.mark.parametrize("normalize", ["l2", "sum"])
def test_opposite_rows_have_no_weight(normalize, n_bits, dtype):
    """A probability of 0, not one that rounding made and the normalisation blows up."""
    case = attention_inputs(33, 1, 60, 7, dtype=dtype)
    key = -case.query[:, :, :1] * torch.tensor([1, 2, 0.25], dtype=dtype)[:, None]
    query, value = case.query[:, :, :1].expand(-1, -1, 33, -1), case.value.expand(-1, -1, 3, -1)
    options = {"estimator": Expected(n_bits=n_bits), "normalize": normalize}
    out = yoso_attention(query, key, value, **options)
    assert torch.equal(out, torch.zeros_like(out))


def test_rows_of_zeros_share_the_code_zero():
    x = torch.zeros(1, 1, 4, 32)
    for hasher in FAMILIES:
        assert not codes_of(x, 0, replace(SAMPLED, hasher=hasher)).any()
    value = torch.randn(1, 1, 4, 5)
    out = yoso_attention(x, x, value, estimator=SAMPLED, normalize="sum", seed=0)
    torch.testing.assert_close(out, value.mean(-2, keepdim=True).expand_as(out))


@pytest.mark.parametrize("estimator", [Sampled(), SAMPLED, EXPECTED, Soft(n_bits=4)], ids=str)
def test_empty_sequences(estimator):
    case = attention_inputs(5, 7)
    query, key, value = case.query, case.key, case.value
    out = yoso_attention(query[:, :, :0], key, value, estimator=estimator)
    assert out.shape == (2, 3, 0, 32)
    out = yoso_attention(query, key[:, :, :0], value[:, :, :0], estimator=estimator)
    assert out.shape == (2, 3, 5, 32) and not out.any()
    no_keys = torch.ones(2, 0, dtype=torch.bool)
    out = yoso_attention(query, key[:, :, :0], value[:, :, :0], no_keys, estimator=estimator)
    assert out.shape == (2, 3, 5, 32) and not out.any()
    out = yoso_attention(query[:0], key[:0], value[:0], estimator=estimator)
    assert out.shape == (0, 3, 5, 32)
    assert yoso_attention(query, key, value[..., :0], estimator=estimator).shape == (2, 3, 5, 0)


# ---------------------------------------------------------------- bad input

NESTED = torch.nested.nested_tensor([torch.ones(3, 5, 8)] * 2)
GOOD = {"query": (2, 3, 5, 8), "key": (2, 3, 7, 8), "value": (2, 3, 7, 4)}


@pytest.mark.parametrize(
    ("name", "given", "error", "message"),
    [
        ("query", torch.ones(8), ValueError, r"query must be .* got shape \(8,\)"),
        ("query", torch.ones(5, 8), ValueError, r"query must be .* got shape \(5, 8\)"),
        ("query", torch.ones(3, 5, 8), ValueError, r"key must have query's batch and heads \(3,\)"),
        ("query", torch.ones(2, 3, 5, 6), ValueError, "key must have .* features 6, got 8"),
        ("query", torch.ones(2, 3, 5, 8).int(), TypeError, "query must be float32.*torch.int32"),
        ("query", torch.ones(2, 3, 5, 8, dtype=torch.cfloat), TypeError, "query .*complex64"),
        ("query", [[1.0]], TypeError, "query must be a torch tensor, got list"),
        ("query", torch.ones(2, 3, 5, 8).to_sparse(), TypeError, "query .* layout"),
        ("query", NESTED, TypeError, "query must be a dense tensor, got a nested one.*cu_seqlens"),
        ("key", torch.ones(1, 3, 7, 8), ValueError, r"key .* batch and heads \(2, 3\), got \(1"),
        ("key", torch.ones(2, 2, 7, 8), ValueError, r"key .* batch and heads \(2, 3\), got \(2, 2"),
        ("key", torch.ones(2, 3, 6, 8), ValueError, "value must have key's length 6, got 7"),
        ("key", torch.ones(2, 3, 7, 9), ValueError, "key must have .* features 8, got 9"),
        ("key", torch.ones(2, 3, 7, 8).double(), TypeError, "key .* dtype torch.float32, got"),
        ("key", torch.ones(2, 3, 7, 8).to("meta"), ValueError, "key .* device cpu, got meta"),
        ("value", torch.ones(2, 3, 7), ValueError, "value must have query's batch and heads"),
        ("value", torch.ones(2, 3, 7, 4).half(), TypeError, "value .* got torch.float16"),
        ("attn_mask", torch.ones(2, 7), TypeError, "attn_mask must be a boolean .* torch.float32"),
        ("attn_mask", torch.ones(2, 7).int(), TypeError, "attn_mask .* torch.int32"),
        ("attn_mask", True, TypeError, "attn_mask must be a boolean tensor, got bool"),
        ("attn_mask", torch.ones(5, 7) > 0, ValueError, r"attn_mask .* got \(5, 7\).*is_causal"),
        ("attn_mask", torch.ones(2, 3, 5, 7) > 0, ValueError, r"attn_mask .* \(2, 1, 1, 7\), got"),
        ("attn_mask", torch.ones(2, 6) > 0, ValueError, r"attn_mask .* \(2, 7\) or .* got \(2, 6"),
        ("attn_mask", (torch.ones(2, 7) > 0).to("meta"), ValueError, "attn_mask .* got meta"),
        (
            "estimator",
            "hard",
            ValueError,
            "estimator must be .* one of 'sampled', .*'hard'",
        ),
        ("estimator", 8, TypeError, r"estimator must be Sampled\(...\), .* got 8"),
        ("parameters", [1.0], TypeError, "parameters must be a dict of tensors .* got list"),
        ("normalize", "L2", ValueError, "normalize must be one of None, 'sum', 'l2', got 'L2'"),
        ("normalize", ["l2"], ValueError, r"normalize must be one of .* got \['l2'\]"),
        ("is_causal", 0.1, TypeError, r"is_causal must be a bool, got 0.1 \(float\)"),
        ("is_causal", "no", TypeError, r"is_causal must be a bool, got 'no' \(str\)"),
        ("enable_gqa", 1, TypeError, "enable_gqa must be a bool"),
        ("seed", -1, ValueError, "seed must be an integer from 0"),
        ("seed", 2**63, ValueError, "seed must be an integer from 0"),
        ("seed", 0.5, TypeError, "seed must be an integer"),
        ("seed", torch.tensor([1, 2]), ValueError, "seed must be an int64 tensor of one element"),
        ("seed", torch.tensor(1.0), ValueError, "seed must be an int64 tensor of one element"),
        ("seed", torch.tensor(1, device="meta"), ValueError, "seed must be on the cpu, got .*meta"),
    ],
)
def test_bad_input(name, given, error, message):
    arguments = {key: torch.ones(shape) for key, shape in GOOD.items()} | {name: given}
    for estimator in (SAMPLED, EXPECTED, Soft()):
        with pytest.raises(error, match=message):
            yoso_attention(**({"estimator": estimator} | arguments))


def test_seeds_that_are_drawn_or_read():
    case = attention_inputs(9)
    inputs = case.query, case.key, case.value
    with pytest.raises(ValueError, match="seed must be an integer >= 0, got -1"):
        yoso_attention(*inputs, estimator=SAMPLED, seed=torch.tensor(-1))
    before = torch.get_rng_state()
    yoso_attention(*inputs, estimator=EXPECTED)
    assert torch.equal(torch.get_rng_state(), before)
    causal = yoso_attention(*inputs, estimator=SAMPLED, is_causal=np.True_, seed=0)
    assert torch.equal(
        causal, yoso_attention(*inputs, None, estimator=SAMPLED, is_causal=True, seed=0)
    )


def test_features_are_wanted():
    with pytest.raises(ValueError, match="query must have features"):
        yoso_attention(torch.ones(1, 1, 2, 0), torch.ones(1, 1, 2, 0), torch.ones(1, 1, 2, 3))


def test_other_devices_are_not_implemented():
    x = torch.ones(2, 3, 5, 8).to(torch.device("meta"))
    assert yoso_attention(x, x, x).shape == x.shape  # shapes alone need no kernel

    class Elsewhere(torch.Tensor):
        device = torch.device("mps")
        is_cpu = False

    x = torch.ones(2, 3, 5, 8).as_subclass(Elsewhere)
    with pytest.raises(NotImplementedError, match="query must be on the cpu, got mps"):
        yoso_attention(x, x, x)
