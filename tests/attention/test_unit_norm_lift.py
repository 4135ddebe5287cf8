"""unit_norm="lift": inner products instead of cosines, by two more features."""

import math
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cases.attention import (  # noqa: E402
    EXPECTED,
    NORMALIZE,
    SAMPLED,
    arrays,
    attention_inputs,
    codes_of,
    dense_attention,
    padding_mask,
    reference_options,
)
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from lshkit import reference  # noqa: E402
from lshkit.attention import Expected, Sampled, Soft, yoso_attention  # noqa: E402
from lshkit.attention.unit_norm import lift  # noqa: E402

FLOAT32 = {"rtol": 1e-4, "atol": 1e-5}  # as in test_attention


def lift_case(*args, bound=2.0, **options):
    """Inputs whose norms vary from nearly zero to sqrt(bound), with some exactly zero."""
    case = attention_inputs(*args, **options)
    generator = torch.Generator().manual_seed(9)
    for name in ("query", "key"):
        x = getattr(case, name)
        length = torch.rand(*x.shape[:-1], 1, generator=generator, dtype=x.dtype)
        x = torch.nn.functional.normalize(x, dim=-1) * length * math.sqrt(0.98 * bound)
        x[..., -1, :] = 0
        setattr(case, name, x)
    return case


def lifted_arrays(case, scale):
    query, key, value = arrays(case)
    return *reference.lift(query, key, scale), value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [2, 2.5, 1e-3, 1e4])
def test_inner_products_are_kept(scale, dtype):
    case = lift_case(17, 23, 12, bound=scale)
    query, key = case.query.to(dtype), case.key.to(dtype)
    lifted = lift(query, key, None, scale)
    assert all(x.dtype == dtype and x.shape[-1] == 14 for x in lifted)
    eps = torch.finfo(dtype).eps
    products = lifted[0].double() @ lifted[1].double().mT
    torch.testing.assert_close(
        products, query.double() @ key.double().mT / scale, rtol=0, atol=4 * eps
    )
    for x in lifted:
        norm = x.double().norm(dim=-1)
        torch.testing.assert_close(norm, torch.ones_like(norm), rtol=0, atol=4 * eps)
    if dtype == torch.float64:
        for a, e in zip(lifted, reference.lift(query.numpy(), key.numpy(), scale), strict=True):
            torch.testing.assert_close(a, torch.from_numpy(e))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("normalize", NORMALIZE)
def test_sampled_equals_reference_on_lifted_rows(normalize, is_causal):
    case = lift_case(33, 41, 30, 9)
    mask = padding_mask(2, 41)
    estimator = replace(SAMPLED, n_bits=4, n_hashes=11)
    out = yoso_attention(
        case.query,
        case.key,
        case.value,
        mask,
        estimator=replace(estimator, unit_norm="lift", lift_scale=2.0),
        is_causal=is_causal,
        causal_offset=0,
        normalize=normalize,
        seed=5,
    )
    query, key, value = lifted_arrays(case, 2.0)
    lifted = lift(case.query, case.key, None, 2.0)
    codes = [codes_of(x, 5, estimator).numpy() for x in lifted]
    expected = reference.yoso_forward(
        query, key, value, *codes, **reference_options(mask, is_causal, normalize)
    )
    torch.testing.assert_close(out.double(), torch.from_numpy(expected), **FLOAT32)


@pytest.mark.parametrize("scale", [2.5, "heads", "auto"])
@pytest.mark.parametrize("normalize", NORMALIZE)
def test_expected_output_and_gradients_are_those_of_the_inner_product(normalize, scale):
    case = lift_case(17, 23, 12, 9, dtype=torch.float64)
    mask = torch.rand(2, 23, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[:, 0] = True
    inputs = [x.requires_grad_() for x in (case.query, case.key, case.value)]
    is_causal = scale != "auto"
    given = dense = scale
    parameters = {}
    if scale == "heads":
        given = torch.tensor([2.0, 2.5, 4.0], dtype=torch.float64, requires_grad=True)
        inputs, dense = [*inputs, given], given[:, None, None]
        parameters, given = {"lift_scale": given}, 1.0
    if scale == "auto":
        squares = [(x**2).sum(-1) for x in inputs[:2]]
        squares[1] = squares[1] * mask[:, None]
        dense = torch.cat(squares, -1).amax(-1)[..., None, None]
    out = yoso_attention(
        *inputs[:3],
        mask,
        estimator=Expected(n_bits=3, unit_norm="lift", lift_scale=given),
        parameters=parameters,
        is_causal=is_causal,
        causal_offset=0,
        normalize=normalize,
    )
    expected = dense_attention(*inputs[:3], mask, is_causal, 3, normalize, scale=dense)
    # A row on its bound has a root of sqrt(eps) where it should have 0: a norm of 1 + eps / 2.
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-11)
    actual = torch.autograd.grad(out, inputs, case.grad_out)
    wanted = torch.autograd.grad(expected, inputs, case.grad_out)
    for a, e in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-7, atol=1e-7 * float(e.abs().max()))


def test_gradcheck():
    case = lift_case(4, 5, 3, batch=1, heads=2, dtype=torch.float64)
    scale = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
    inputs = [x.requires_grad_() for x in (case.query, case.key)]
    mask = torch.tensor([[True, True, False, True, True]])
    torch.autograd.gradcheck(lambda q, k, s: lift(q, k, mask, s), (*inputs, scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "estimator", [replace(SAMPLED, gradient="unbiased"), Expected()], ids=["sampled", "expected"]
)
def test_rows_on_the_bound_have_the_gradients_of_the_inner_product(estimator, dtype):
    """Where the root's slope is infinite. The radial part is in them: it turns the lifted row."""
    case = attention_inputs(33, 41, 12, 9, dtype=torch.float64)
    for name in ("query", "key"):
        unit = torch.nn.functional.normalize(getattr(case, name), dim=-1)
        setattr(case, name, unit.to(dtype).requires_grad_())
    inputs = case.query, case.key
    out = yoso_attention(
        *inputs,
        case.value.to(dtype),
        estimator=replace(estimator, n_bits=3, unit_norm="lift"),
        seed=0,
    )
    actual = torch.autograd.grad(out, inputs, case.grad_out.to(dtype))
    assert all(grad.isfinite().all() for grad in actual)
    if estimator.name == "sampled":  # its values are noisy
        return
    inputs = [x.detach().double().requires_grad_() for x in inputs]
    out = dense_attention(*inputs, case.value, None, False, 3, "l2", scale=1)
    expected = torch.autograd.grad(out, inputs, case.grad_out)
    for a, e in zip(actual, expected, strict=True):
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(a.double(), e, rtol=0, atol=20 * eps * float(e.abs().max()))


def test_auto_is_the_largest_norm_of_a_sequence_and_head():
    case = lift_case(9, 13, bound=50.0)
    mask = torch.ones(2, 13, dtype=torch.bool)
    mask[0, 4] = False
    case.key[0, :, 4] = 1e6  # masked
    case.query[1, 2, 3] = math.inf
    case.key[1, 1, 6] = math.nan
    options = {"normalize": None}
    auto = {"estimator": Expected(unit_norm="lift", lift_scale="auto"), **options}
    inputs = case.query, case.key, case.value
    out = yoso_attention(*inputs, mask, **auto)
    assert out[1, 2, 3].isnan().all()
    assert torch.equal(out.isnan().any(-1).nonzero(), torch.tensor([[1, 2, 3]]))

    squares = torch.cat([(x.double() ** 2).sum(-1) for x in (case.query, case.key)], -1)
    takes_part = torch.cat((torch.ones(2, 9, dtype=torch.bool), mask), -1)[:, None]
    largest = squares.where(takes_part & squares.isfinite(), 0).amax(-1)
    for b in range(2):
        alone = yoso_attention(
            *(x[b : b + 1] for x in inputs),
            mask[b : b + 1],
            estimator=Expected(unit_norm="lift"),
            parameters={"lift_scale": largest[b]},
            **options,
        )
        torch.testing.assert_close(out[b : b + 1], alone, equal_nan=True)
    for b in range(2):  # whatever the other sequences hold
        alone = yoso_attention(*(x[b : b + 1] for x in inputs), mask[b : b + 1], **auto)
        assert torch.equal(alone.nan_to_num(), out[b : b + 1].nan_to_num())
    # and a common factor of queries and keys changes nothing
    larger = yoso_attention(4 * case.query, 4 * case.key, case.value, mask, **auto)
    assert torch.equal(larger.nan_to_num(), out.nan_to_num())


@pytest.mark.parametrize("scale", ["tensor", "auto", 60.0])
@pytest.mark.parametrize("estimator", [SAMPLED, EXPECTED], ids=str)
def test_rows_that_take_no_part_reach_no_gradient(estimator, scale):
    case = lift_case(12, 15, bound=50.0)
    mask = torch.ones(2, 15, dtype=torch.bool)
    mask[:, -3:] = False
    case.key[:, :, -1] = math.nan
    case.key[:, :, -2] = 1e30
    case.key[:, :, -3] = -math.inf
    case.key[1, 0, 3, 2] = math.nan
    case.query[0, 1, 5] = math.inf
    inputs = [x.requires_grad_() for x in (case.query, case.key, case.value)]
    estimator = replace(estimator, unit_norm="lift")
    parameters = {}
    if scale == "tensor":
        parameters["lift_scale"] = torch.tensor(60.0, requires_grad=True)
        inputs.append(parameters["lift_scale"])
    else:
        estimator = replace(estimator, lift_scale=scale)
    options = {"estimator": estimator, "parameters": parameters, "seed": 0}
    out = yoso_attention(*inputs[:3], mask, **options)
    grads = torch.autograd.grad(out, inputs, case.grad_out)
    finite = [x.isfinite().all(-1) for x in grads[:3]]
    assert torch.equal((~finite[0]).nonzero(), torch.tensor([[0, 1, 5]]))
    assert torch.equal((~finite[1]).nonzero(), torch.tensor([[1, 0, 3]]))
    assert finite[2].all() and not grads[1][:, :, -3:].any()
    assert all(x.isfinite().all() for x in grads[3:])


@pytest.mark.parametrize("scale", [1.0, "auto"])
def test_zeros_and_empty_sequences(scale):
    options = {"estimator": Expected(unit_norm="lift", lift_scale=scale, n_bits=1)}
    query, key, value = torch.zeros(2, 3, 5, 8), torch.zeros(2, 3, 7, 8), torch.randn(2, 3, 7, 4)
    out = yoso_attention(query, key, value, normalize="sum", **options)  # all at right angles
    torch.testing.assert_close(out, value.mean(-2, keepdim=True).expand_as(out))
    assert yoso_attention(query[:, :, :0], key, value, **options).shape == (2, 3, 0, 4)
    nothing = yoso_attention(query, key[:, :, :0], value[:, :, :0], **options)
    assert nothing.shape == (2, 3, 5, 4) and not nothing.any()
    none = yoso_attention(query[:, :, :0], key[:, :, :0], value[:, :, :0], **options)
    assert none.shape == (2, 3, 0, 4)
    one_head = yoso_attention(query[:, 0], key[:, 0], value[:, 0], **options)
    assert one_head.shape == (2, 5, 4)


def test_bound_to_rounding():
    """Rows that were scaled to the bound in their own dtype are on it, not outside."""
    case = attention_inputs(257, d=200)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        query, key = (
            torch.nn.functional.normalize(x.to(dtype), dim=-1) for x in (case.query, case.key)
        )
        for factor in (1, 3):
            out = yoso_attention(
                factor * query,
                factor * key,
                case.value.to(dtype),
                estimator=Expected(unit_norm="lift", lift_scale=factor**2),
            )
            assert out.isfinite().all() and out.dtype == dtype


def test_outside_the_bound():
    case = lift_case(9, 13, bound=4.0)
    inputs = [case.query, case.key, case.value]
    four = Expected(unit_norm="lift", lift_scale=4)

    def attend(*args, lift_scale=4):
        if isinstance(lift_scale, torch.Tensor):
            parameters = {"lift_scale": lift_scale}
            return yoso_attention(*args, estimator=four, parameters=parameters)
        return yoso_attention(*args, estimator=replace(four, lift_scale=lift_scale))

    for i, name in enumerate(("query", "key")):
        changed = [x.clone() for x in inputs]
        changed[i][1, 2, 3] = 0
        changed[i][1, 2, 3, 0] = 2.5
        message = rf"{name} must have rows of norm at most sqrt\(lift_scale\) = 2, got 2.5: give a"
        for scale in (4, np.float64(4), torch.tensor(4.0), torch.tensor([9.0, 9.0, 4.0])):
            with pytest.raises(ValueError, match=message):
                attend(*changed, lift_scale=scale)
        changed[i][1, 2, 3, 0] = 1e25  # whose square float32 does not hold
        with pytest.raises(ValueError, match=rf"{name} must .* got 1e\+25"):
            attend(*changed)
        assert attend(*changed, lift_scale="auto").isfinite().all()
        with pytest.raises(ValueError, match=f"{name} must have rows of norm"):
            torch.func.vmap(attend)(
                *(torch.stack((x, y)) for x, y in zip(inputs, changed, strict=True))
            )
    mask = torch.ones(2, 13, dtype=torch.bool)
    mask[1, 3] = False  # the key outside
    assert attend(*changed, mask).isfinite().all()


@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        (0, ValueError, "lift_scale must be a number > 0.* got 0"),
        (-1.0, ValueError, "lift_scale must be a number > 0.* got -1.0"),
        (math.nan, ValueError, "lift_scale must be a number > 0.* got nan"),
        (math.inf, ValueError, "lift_scale must be a number > 0.* got inf"),
        (True, TypeError, "lift_scale must be a number > 0.* got True"),
        (None, TypeError, "lift_scale must be a number > 0.* got None"),
        ("largest", ValueError, "lift_scale must be .* 'auto' .*, got 'largest'"),
        (torch.tensor(2.0), TypeError, "lift_scale must be .*a tensor goes into parameters"),
    ],
)
def test_bad_scales(scale, error, message):
    for kind in (Sampled, Expected, Soft):
        with pytest.raises(error, match=message):
            kind(lift_scale=scale)


@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        (torch.tensor(2), TypeError, "parameters.'lift_scale'. must hold floats, got .*int64"),
        (
            torch.ones(2),
            ValueError,
            r"parameters.'lift_scale'. .* \(3,\), got \(2,\)",
        ),
        (torch.tensor([1.0, 0, 1]), ValueError, "lift_scale must be > 0 and finite"),
        (1.0, TypeError, "parameters.'lift_scale'. must be a torch tensor, got float"),
    ],
)
def test_bad_scales_that_are_given(scale, error, message):
    x = torch.full((2, 3, 5, 8), 0.1)
    for kind in (Sampled, Expected, Soft):
        with pytest.raises(error, match=message):
            options = {"estimator": kind(unit_norm="lift"), "parameters": {"lift_scale": scale}}
            yoso_attention(x, x, x, **options)
    with pytest.raises(ValueError, match="parameters may hold nothing with Sampled"):
        yoso_attention(x, x, x, parameters={"lift_scale": torch.tensor(1.0)})


def test_auto_would_show_the_future():
    x = torch.full((2, 3, 5, 8), 0.1)
    with pytest.raises(ValueError, match="lift_scale must be .* with is_causal=True, got 'auto'"):
        estimator = Sampled(unit_norm="lift", lift_scale="auto")
        yoso_attention(x, x, x, estimator=estimator, is_causal=True)


@pytest.mark.parametrize("scale", [4.0, "auto"])
@pytest.mark.parametrize("estimator", [SAMPLED, EXPECTED], ids=str)
def test_transforms(estimator, scale):
    case = lift_case(9, 13, bound=3.9)
    inputs = case.query, case.key, case.value
    options = {"estimator": replace(estimator, unit_norm="lift", lift_scale=scale), "seed": 1}

    def attend(*inputs):
        return yoso_attention(*inputs, **options)

    out = attend(*inputs)
    folded = [x[:, None] for x in inputs]
    assert torch.equal(torch.func.vmap(attend)(*folded), out[:, None])
    leaves = [x.clone().requires_grad_() for x in inputs]
    expected = torch.autograd.grad(attend(*leaves), leaves, case.grad_out)
    actual = torch.func.grad(lambda *x: (attend(*x) * case.grad_out).sum(), (0, 1, 2))(*inputs)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), out)
    if scale != "auto":
        with pytest.raises(RuntimeError, match="query must have rows of norm at most"):
            compiled(2 * case.query, case.key, case.value)
    with FakeTensorMode():
        query = torch.empty(2, 3, 1000, 64, dtype=torch.bfloat16, requires_grad=True)
        out = attend(query, query, query)
        assert out.shape == query.shape and out.dtype == query.dtype
        out.sum().backward()
    for n_rows in (10, 0):
        query = torch.ones(2, 3, n_rows, 8, device="meta")
        assert attend(query, query, query).shape == query.shape


@pytest.mark.parametrize("estimator", [SAMPLED, EXPECTED], ids=str)
def test_autocast(estimator):
    case = lift_case(9, 13)
    inputs = case.query, case.key, case.value
    options = {"estimator": replace(estimator, unit_norm="lift", lift_scale=2.0), "seed": 1}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = yoso_attention(*inputs, **options)
    assert out.dtype == torch.bfloat16 and out.isfinite().all()


@pytest.mark.parametrize("estimator", [Expected(), Soft(n_hashes=8)], ids=str)
@pytest.mark.parametrize("size", [2.0**-100, 2.0**-80, 2.0**100])
def test_auto_does_not_depend_on_the_size_of_rows(estimator, size):
    """Where squares of the rows leave float32, too."""
    case = attention_inputs(9, d=8)
    estimator = replace(estimator, unit_norm="lift", lift_scale="auto")
    outs = []
    for factor in (1.0, size):
        inputs = [case.query * factor, case.key * factor]
        inputs = [x.detach().requires_grad_() for x in inputs]
        out = yoso_attention(*inputs, case.value, estimator=estimator, seed=0)
        gradients = torch.autograd.grad(out, inputs, case.grad_out)
        outs.append((out, *(g * factor for g in gradients)))
    for a, b in zip(*outs, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
