"""torch.ops.lshkit.*: opcheck, torch.compile, autocast, torch.func and fake tensors."""

import dataclasses
import re

import pytest

torch = pytest.importorskip("torch")

from cases.attention import (  # noqa: E402
    EXPECTED,
    FAMILIES,
    SAMPLED,
    attention_inputs,
    codes_of,
    padding_mask,
)
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from lshkit import hash_functions, torch_ops  # noqa: E402
from lshkit.attention import Colliding, Soft, yoso_attention  # noqa: E402

OPS = torch.ops.lshkit
SAMPLED_9 = dataclasses.replace(SAMPLED, n_bits=9)
HASH = {"family": 1, "n_bits": 8, "n_hashes": 32}


def random_codes(n_bits, n_hashes=4, rows=17, seed=0):
    dtype = torch_ops.code_dtype(n_bits)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2**n_bits, (2, 3, rows, n_hashes), generator=generator).to(dtype)


# ---------------------------------------------------------------- opcheck


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("n_features", [1, 64, 65, 200])
def test_opcheck_hash_parameters(family, n_features):
    arguments = (3, n_features, 9, 70, torch_ops.FAMILY[family])
    torch.library.opcheck(OPS.hash_parameters.default, (torch.tensor([5]), *arguments))
    parameters = OPS.hash_parameters(torch.tensor(5), *arguments)
    expected = hash_functions.make_parameters(family, n_features, 9, 70, 3, 5)
    assert torch.equal(parameters, torch.from_numpy(expected))


@pytest.mark.parametrize("n_bits", [8, 9])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_hash(n_bits, requires_grad):
    x = attention_inputs().query.requires_grad_(requires_grad)
    parameters = OPS.hash_parameters(torch.tensor(0), 3, 32, n_bits, 5, 1)
    torch.library.opcheck(OPS.hash.default, (x, parameters, 1, n_bits, 5))


@pytest.mark.parametrize(
    ("order", "masked", "n_bits"), [(0, False, 3), (1, True, 8), (2, False, 12), (0, True, 12)]
)
def test_opcheck_bucket_sum(order, masked, n_bits):
    values = attention_inputs(13).value.requires_grad_()
    query_codes, key_codes = random_codes(n_bits), random_codes(n_bits, rows=13, seed=1)
    mask = padding_mask(2, 13) if masked else None
    arguments = (query_codes, key_codes, values, 2**n_bits, order, mask)
    torch.library.opcheck(OPS.bucket_sum.default, arguments)


@pytest.mark.parametrize(
    ("n_bits", "masked", "dtype"),
    [
        *((8, True, torch.float32), (9, False, torch.bfloat16), (9, True, torch.float64)),
        (4, False, torch.bfloat16),
    ],
)
def test_opcheck_attention(n_bits, masked, dtype):
    case = attention_inputs(17, 13, dtype=dtype)
    inputs = [x.requires_grad_() for x in (case.query, case.key, case.value)]
    mask = padding_mask(2, 13) if masked else None
    parameters = OPS.hash_parameters(torch.tensor(0), 3, 32, n_bits, 4, 1)
    options, starts = (True, 2, 0), (None, None)
    arguments = *inputs, mask, *starts, parameters, 1, n_bits, 4, *options
    for gradient_hashes in ((), (3,)):
        torch.library.opcheck(OPS.yoso_attention.default, (*arguments, *gradient_hashes))
    torch.library.opcheck(
        OPS.expected_attention.default, (*inputs, mask, *starts, n_bits, *options)
    )

    inputs = [x.detach() for x in inputs]
    out, *codes, divisors = OPS.yoso_attention(*inputs, *arguments[3:])
    if dtype is not torch.float64:
        tensors = case.grad_out, *inputs, mask, *starts, *codes
        torch.library.opcheck(
            OPS.yoso_attention_backward.default, (*tensors, n_bits, *options, 3, out, divisors)
        )
    for words in ({}, {"output_mask": [False, True, False]}):
        torch.library.opcheck(
            OPS.yoso_attention_backward.default,
            (case.grad_out, *inputs, mask, *starts, *codes, n_bits, *options),
            words,
        )
        arguments = *inputs, mask, *starts, n_bits, *options
        kept = OPS.expected_attention(*arguments) if dtype is not torch.float64 else (None, None)
        torch.library.opcheck(
            OPS.expected_attention_backward.default, (case.grad_out, *arguments, *kept), words
        )


# ---------------------------------------------------------------- values


def test_arguments_by_name():
    case = attention_inputs(20)
    parameters = torch_ops.hash_parameters(seed=torch.tensor(1), n_sets=3, n_features=32, **HASH)
    options = {"key_mask": None, "query_starts": None, "key_starts": None, "is_causal": True}
    options |= {"parameters": parameters, "normalize": 2, "gradient": 0, **HASH}

    def loss(value, **more):
        out, *_ = torch_ops.yoso_attention(case.query, value=value, key=case.key, **options, **more)
        return (out * case.grad_out).sum()

    wanted = OPS.yoso_attention(case.query, case.key, case.value, **options, gradient_hashes=3)[0]
    torch.testing.assert_close(loss(case.value, gradient_hashes=3), (wanted * case.grad_out).sum())
    value = case.value.clone().requires_grad_()
    loss(value).backward()
    torch.testing.assert_close(torch.func.grad(loss)(case.value), value.grad)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(case.value), loss(case.value))
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'widow'"):
        loss(case.value, widow=3)


def test_attention_returns_the_codes_of_hash():
    case = attention_inputs(33)
    parameters = OPS.hash_parameters(torch.tensor(7), 3, 32, 8, 32, 1)
    inputs = case.query, case.key, case.value
    _, *codes, _ = OPS.yoso_attention(*inputs, None, None, None, parameters, 1, 8, 32, False, 2, 0)
    for x, returned in zip(inputs, codes, strict=False):
        assert torch.equal(returned, codes_of(x, 7))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("order", [0, 1, 2])
def test_bucket_sum_gradients(order, masked):
    """Linear in the values, and differentiable any number of times."""
    query_codes, key_codes = random_codes(2, rows=5), random_codes(2, rows=4, seed=1)
    values = torch.randn(2, 3, 4, 2, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, False, True, True], [False] * 4]) if masked else None

    def total(values):
        return OPS.bucket_sum(query_codes, key_codes, values, 4, order, mask)

    torch.autograd.gradcheck(total, values)
    torch.autograd.gradgradcheck(total, values)


def test_bucket_sum_refuses_codes_beyond_the_table():
    codes, values = random_codes(8), torch.ones(2, 3, 17, 1)
    with pytest.raises(ValueError, match="query_codes has code .* n_buckets=8"):
        OPS.bucket_sum(codes, codes, values, 8, 0, None)
    with pytest.raises(ValueError, match="key_codes has code .* n_buckets=8"):
        OPS.bucket_sum(codes % 8, codes, values, 8, 0, None)
    with pytest.raises(ValueError, match="key_codes has code .* n_buckets=300"):
        OPS.bucket_sum(
            *(c.to(torch.uint16) for c in (codes, codes.int() * 9)), values, 300, 0, None
        )


def test_attention_backward_refuses_codes_beyond_the_table():
    case, good, bad = attention_inputs(), random_codes(3), random_codes(8)
    tensors = case.grad_out, case.query, case.key, case.value, None, None, None
    for name, codes in (("query_codes", (bad, good)), ("key_codes", (good, bad))):
        with pytest.raises(ValueError, match=f"{name} has code .* n_buckets=8"):
            OPS.yoso_attention_backward(*tensors, *codes, 3, False, 2, 0)
    with pytest.raises(ValueError, match="query_codes: shape .* is wanted"):
        OPS.yoso_attention_backward(*tensors, good[:, :, :0], good, 3, False, 2, 0)


def test_weighted_bucket_sum_names_shapes_as_given():
    codes, values = random_codes(3), torch.ones(2, 3, 17, 1)
    probed, weights = codes[..., None], torch.ones(*codes.shape, 1)
    rest = 8, 0, None
    assert OPS.weighted_bucket_sum(probed, probed, values, weights, None, *rest).isfinite().all()
    shape = re.escape(str(tuple(codes.shape)))
    with pytest.raises(ValueError, match=f"key_codes must have shape .* got {shape}"):
        OPS.weighted_bucket_sum(probed, codes, values, weights, None, *rest)
    with pytest.raises(ValueError, match=f"query_weights must have the shape .* got {shape}"):
        OPS.weighted_bucket_sum(probed, probed, values, weights[..., 0], None, *rest)


# ---------------------------------------------------------------- torch.compile


def compiled(function, backend, **options):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, fullgraph=True, backend=counter, **options), counter


@pytest.mark.parametrize("estimator", [SAMPLED, EXPECTED], ids=["sampled", "expected"])
def test_compile_once_for_all_steps(estimator):
    """Forward and backward in one graph each; new hash functions take no new trace."""

    def step(query, key, value, mask):
        return yoso_attention(query, key, value, mask, is_causal=True, estimator=estimator)

    fast, counter = compiled(step, "aot_eager")
    for seed in range(3):
        case = attention_inputs(21, seed=seed)
        inputs = [x.requires_grad_() for x in (case.query, case.key, case.value)]
        mask = torch.rand(2, 21) < 0.7
        torch.manual_seed(seed)
        out = fast(*inputs, mask)
        gradients = torch.autograd.grad(out, inputs, case.grad_out)
        torch.manual_seed(seed)
        eager = step(*inputs, mask)
        assert torch.equal(out, eager)
        for a, e in zip(gradients, torch.autograd.grad(eager, inputs, case.grad_out), strict=True):
            assert torch.equal(a, e)
    assert counter.frame_count == 1


def test_compile_with_dynamic_lengths_and_seed_tensors():
    def attend(query, key, value, seed):
        return yoso_attention(query, key, value, estimator=SAMPLED_9, seed=seed)

    fast, counter = compiled(attend, "aot_eager", dynamic=True)
    for n in (20, 31, 44):
        case = attention_inputs(n, n + 3)
        inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in vars(case).values()][:3]
        inputs = [x.requires_grad_() for x in inputs]
        seed = torch.tensor(n)
        out, eager = fast(*inputs, seed), attend(*inputs, seed)
        assert torch.equal(out, eager)
        gradients = [torch.autograd.grad(x.sum(), inputs) for x in (out, eager)]
        assert all(torch.equal(a, e) for a, e in zip(*gradients, strict=True))
    assert counter.frame_count == 1


def test_compile_with_inductor():
    def loss(query, key, value):
        out = yoso_attention(query * 2, key, value, estimator=SAMPLED_9, seed=0)
        return (out + 1).square().mean()

    fast, _ = compiled(loss, "inductor")
    case = attention_inputs(21)
    inputs = [x.requires_grad_() for x in (case.query, case.key, case.value)]
    gradients = [torch.autograd.grad(f(*inputs), inputs) for f in (fast, loss)]
    for a, e in zip(*gradients, strict=True):
        torch.testing.assert_close(a, e)


# ---------------------------------------------------------------- autocast


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("estimator", [SAMPLED, EXPECTED], ids=["sampled", "expected"])
def test_autocast(estimator, dtype, compile):
    """As scaled_dot_product_attention has it: the inputs are cast, and the output with them."""
    case = attention_inputs(21)
    inputs = [x.requires_grad_() for x in (case.query, case.key, case.value)]

    def attend(query, key, value):
        return yoso_attention(query, key, value, estimator=estimator, seed=0)

    function = compiled(attend, "aot_eager")[0] if compile else attend
    with torch.autocast("cpu", dtype=dtype):
        out = function(inputs[0], inputs[1].to(dtype), inputs[2])
        reference_dtype = torch.nn.functional.scaled_dot_product_attention(*inputs).dtype
    by_hand = attend(*(x.to(dtype) for x in inputs))
    assert out.dtype == reference_dtype == dtype
    assert torch.equal(out, by_hand)
    gradients = [torch.autograd.grad(x.float().sum(), inputs) for x in (out, by_hand)]
    for a, e in zip(*gradients, strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, e)


def test_autocast_leaves_float64():
    case = attention_inputs(5, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert yoso_attention(case.query, case.key, case.value).dtype == torch.float64


# ---------------------------------------------------------------- torch.func


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("estimator", [SAMPLED, EXPECTED], ids=["sampled", "expected"])
def test_vmap_folds_into_the_batch(estimator, batch):
    case, other = attention_inputs(9, batch=batch), attention_inputs(9, batch=5 * batch, seed=1)
    queries = other.query.unflatten(0, (5, batch)).movedim(0, 2)
    masks = padding_mask(5 * batch, 9).unflatten(0, (5, batch)).movedim(0, 1)

    def attend(query, mask):
        return yoso_attention(query, case.key, case.value, mask, estimator=estimator, seed=3)

    out = torch.func.vmap(attend, in_dims=(2, 1))(queries, masks)
    expected = torch.stack([attend(queries[:, :, i], masks[:, i]) for i in range(5)])
    assert torch.equal(out, expected)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("estimator", [SAMPLED, EXPECTED], ids=["sampled", "expected"])
def test_jacobian(estimator, batch):
    case = attention_inputs(3, 4, 8, 2, batch=batch, heads=1)

    def attend(query, key, value):
        few = dataclasses.replace(estimator, n_bits=2)
        return yoso_attention(query, key, value, estimator=few, seed=3)

    inputs = case.query, case.key, case.value
    jacobians = torch.func.jacrev(attend, argnums=(0, 1, 2))(*inputs)
    for a, e in zip(jacobians, torch.autograd.functional.jacobian(attend, inputs), strict=True):
        torch.testing.assert_close(a, e)


def test_vmap_over_seeds():
    case = attention_inputs(9)

    def attend(seed):
        return yoso_attention(case.query, case.key, case.value, estimator=SAMPLED, seed=seed)

    out = torch.func.vmap(attend)(torch.arange(4))
    assert torch.equal(out, torch.stack([attend(i) for i in range(4)]))
    fresh = torch.func.vmap(lambda _: attend(None), randomness="different")(torch.arange(4))
    assert not torch.equal(fresh[0], fresh[1])
    with pytest.raises(RuntimeError, match="random"):
        torch.func.vmap(lambda _: attend(None))(torch.arange(4))


def test_vmap_bucket_sum():
    values = torch.randn(2, 3, 17, 4, 6)
    codes = random_codes(4)

    def total(values):
        return OPS.bucket_sum(codes, codes, values, 16, 1, None)

    out = torch.func.vmap(total, in_dims=3, out_dims=3)(values)
    expected = torch.stack([total(values[..., i, :]) for i in range(4)], 3)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("estimator", [SAMPLED, EXPECTED], ids=["sampled", "expected"])
def test_gradients_per_sample(estimator):
    case = attention_inputs(9, batch=5)

    def loss(query, key, value):  # (heads, rows, columns), as vmap hands it over
        out = yoso_attention(query[None], key[None], value[None], estimator=estimator, seed=0)
        return out[..., 0].sum()

    inputs = case.query, case.key, case.value
    transformed = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*inputs)
    inputs = [x.requires_grad_() for x in inputs]
    out = yoso_attention(*inputs, estimator=estimator, seed=0)[..., 0].sum()
    for a, e in zip(transformed, torch.autograd.grad(out, inputs), strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("estimator", [SAMPLED, EXPECTED], ids=["sampled", "expected"])
def test_once_differentiable(estimator):
    case = attention_inputs(5)
    query = case.query.requires_grad_()

    def loss(query):
        return yoso_attention(query, case.key, case.value, estimator=estimator, seed=0)[
            ..., 0
        ].sum()

    (grad,) = torch.autograd.grad(loss(query), query, create_graph=True)
    with pytest.raises(NotImplementedError, match="can be differentiated once"):
        grad.sum().backward()
    with pytest.raises(NotImplementedError, match="can be differentiated once"):
        torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())(query)


@pytest.mark.parametrize(
    "estimator",
    [SAMPLED, EXPECTED, Soft(n_bits=4, n_hashes=4), Colliding()],
    ids=["sampled", "expected", "soft", "colliding"],
)
def test_forward_mode_is_refused(estimator):
    """Tangents of zero would be worse than an error."""
    case = attention_inputs(5)

    def attend(query):
        return yoso_attention(query, case.key, case.value, estimator=estimator, seed=0)

    with pytest.raises(NotImplementedError, match="no forward-mode derivative .*jvp"):
        torch.func.jvp(attend, (case.query,), (case.query,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(case.query, case.query)
        with pytest.raises(NotImplementedError, match="jvp"):
            attend(dual)


# ---------------------------------------------------------------- shapes without data


@pytest.mark.parametrize("n_bits", [8, 9])
@pytest.mark.parametrize("estimator", [SAMPLED, EXPECTED], ids=["sampled", "expected"])
def test_fake_tensors(estimator, n_bits):
    estimator = dataclasses.replace(estimator, n_bits=n_bits)
    with FakeTensorMode():
        query = torch.empty(2, 3, 100_000, 64, dtype=torch.bfloat16, requires_grad=True)
        value = torch.empty(2, 3, 100_000, 48, dtype=torch.bfloat16)
        out = yoso_attention(query, query, value, estimator=estimator)
        assert out.shape == value.shape and out.dtype == torch.bfloat16
        out.sum().backward()
        assert query.grad.shape == query.shape
        with pytest.raises(ValueError, match="key must have query's number of features"):
            yoso_attention(query, value, value)


def test_the_core_refuses_fake_tensors():
    from lshkit import _C

    with FakeTensorMode():
        x = torch.empty(1, 1, 4, 64)
    parameters = OPS.hash_parameters(torch.tensor(0), 1, 64, 8, 4, 1)
    codes = torch.empty(1, 1, 4, 4, dtype=torch.uint8)
    with pytest.raises(TypeError, match="x: .*fake"):
        _C.hash(x, parameters, 1, 8, 4, codes, 1)


# ---------------------------------------------------------------- traces


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of the checks of arguments
@pytest.mark.parametrize(
    "estimator", [SAMPLED, EXPECTED, Soft()], ids=["sampled", "expected", "soft"]
)
def test_a_trace_holds_the_operators(estimator, tmp_path):
    """With a gradient wanted too; a call of Python's could be neither saved nor run elsewhere."""
    case = attention_inputs(5)
    query = case.query.requires_grad_()

    def attend(query):
        return yoso_attention(query, case.key, case.value, estimator=estimator, seed=0)

    traced = torch.jit.trace(attend, (query,), check_trace=False)
    assert "PythonOp" not in str(traced.graph)
    torch.jit.save(traced, str(tmp_path / "attention.pt"))
    again = torch.jit.load(str(tmp_path / "attention.pt"))(query)
    assert torch.equal(again, attend(query))
