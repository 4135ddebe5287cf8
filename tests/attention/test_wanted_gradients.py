"""Gradients of some of the inputs: the bits that they have in the whole backward pass, and no more
work than for them.
"""

import itertools
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from cases.attention import SAMPLED, attention_inputs, padding_mask  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from lshkit import _C, torch_ops  # noqa: E402
from lshkit.attention import Expected, Soft, lsh_attention, yoso_attention  # noqa: E402

SUBSETS = [s for s in itertools.product((False, True), repeat=3) if 0 < sum(s) < 3]
SMALL = replace(SAMPLED, n_hashes=4)
# By pairs; buckets of about 20, 40 (causal), 80 and 160 of 320 rows, each with a form of its own.
ESTIMATORS = {
    "pairs": SMALL,
    "direct": replace(SMALL, n_bits=4),
    "causal_direct": replace(SMALL, n_bits=3),
    "quadratic": replace(SMALL, n_bits=2),
    "linear": replace(SMALL, n_bits=1),
    "hashes": replace(SMALL, n_bits=4, gradient_hashes=2),
    "collided": replace(SMALL, gradient="collided"),
    "unbiased": replace(SMALL, gradient="unbiased"),
    "lower_bound": Expected(gradient="lower_bound"),
    "exact": Expected(),
    "soft": Soft(n_bits=6, n_hashes=4),
    "codes": Soft(n_bits=6, n_hashes=4, n_probes=1),
}


def differentiate(attend, case, wanted):
    """The gradients of the inputs that are wanted, None for the others."""
    tensors = [
        x.clone().requires_grad_(w)
        for x, w in zip((case.query, case.key, case.value), wanted, strict=True)
    ]
    attend(*tensors).backward(case.grad_out)
    return [x.grad for x in tensors]


def check(attend, case, subsets=SUBSETS):
    whole = differentiate(attend, case, (True,) * 3)
    for wanted in subsets:
        got = differentiate(attend, case, wanted)
        for x, of_all, w in zip(got, whole, wanted, strict=True):
            if w:
                torch.testing.assert_close(x, of_all, rtol=0, atol=0, equal_nan=True)
            else:
                assert x is None


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("columns", [64, 24])
@pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS)
def test_the_bits_of_the_whole(estimator, columns, causal):
    case = attention_inputs(320, d=columns, heads=2, batch=1)

    def attend(*tensors):
        options = {"is_causal": causal, "normalize": "sum", "seed": 0}
        return yoso_attention(*tensors, estimator=estimator, **options)

    check(attend, case)


@pytest.mark.parametrize("normalize", ["l2", None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS)
def test_grouped_heads_masks_and_rows_that_are_not_finite(estimator, dtype, normalize):
    case = attention_inputs(70, 50, 32, 16, heads=4, dtype=dtype)
    case.key, case.value = case.key[:, :2].clone(), case.value[:, :2].clone()
    case.query[0, 0, 3, 1] = float("nan")
    case.key[0, 1, 5] = float("inf")
    mask = padding_mask(2, 50)

    def attend(*tensors):
        options = {"enable_gqa": True, "normalize": normalize, "seed": 0}
        return yoso_attention(*tensors, mask, estimator=estimator, **options)

    check(attend, case, [(False, True, False), (True, False, True)])


def test_packed_sequences():
    case = attention_inputs(60, batch=1)
    starts = torch.tensor([0, 20, 20, 60])
    for estimator in (SMALL, ESTIMATORS["soft"]):
        check(
            lambda *x, e=estimator: yoso_attention(*x, cu_seqlens=starts, estimator=e, seed=0), case
        )


@pytest.mark.parametrize("causal", [False, True])
def test_lsh_attention(causal):
    case = attention_inputs(300, 280, 24, 40)
    case.key[0, 1, 5] = float("nan")
    check(lambda *x: lsh_attention(*x, is_causal=causal, n_bits=4, n_hashes=6, seed=0), case)


@pytest.mark.parametrize("wanted", [(False, False), (False, True), (True, False), (True, True)])
def test_soft_codes_parameters_alone(wanted):
    """Sharpness and hyperplanes get theirs without a gradient of queries and keys, and with one."""
    case = attention_inputs(40, 30, 16, 8, heads=2)
    family = torch_ops.FAMILY["hyperplane"]
    planes = torch_ops.hash_parameters(torch.tensor(0), 2, 16, 4, 3, family)
    options = family, 4, 3, 4, 2, False, 2

    def gradients(of_inputs, *of_parameters):
        query, key = (x.clone().requires_grad_(of_inputs) for x in (case.query, case.key))
        parameters = [
            x.clone().requires_grad_(w)
            for x, w in zip((planes, torch.tensor([1.0, 2.0])), of_parameters, strict=True)
        ]
        rest = case.value, None, None, None, *parameters, *options
        out = torch_ops.soft_attention(query, key, *rest)[0]
        if out.requires_grad:
            out.backward(case.grad_out)
        return [x.grad for x in (query, key, *parameters)]

    whole = gradients(True, True, True)
    for of_inputs in (False, True):
        got = gradients(of_inputs, *wanted)
        for x, of_all, w in zip(got, whole, (of_inputs, of_inputs, *wanted), strict=True):
            assert torch.equal(x, of_all) if w else x is None


class Results(TorchDispatchMode):
    """How many elements lshkit's backward operators gave, by result."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "lshkit" and "backward" in func.__name__:
            self.sizes.append([x.numel() for x in out])
        return out


@pytest.mark.parametrize("estimator", [SMALL, Expected(), Soft(n_bits=6, n_hashes=4), "lsh"])
def test_what_is_not_wanted_is_not_computed(estimator):
    """The core has no memory to write it to: such a gradient is an empty tensor."""
    case = attention_inputs(20, 30, 16, 8)
    for wanted in SUBSETS:
        with Results() as results:
            differentiate(
                lambda *x: (
                    lsh_attention(*x, seed=0)
                    if estimator == "lsh"
                    else yoso_attention(*x, estimator=estimator, seed=0)
                ),
                case,
                wanted,
            )
        (sizes,) = results.sizes
        inputs = (case.query, case.key, case.value)
        assert sizes[:3] == [x.numel() * w for x, w in zip(inputs, wanted, strict=True)]
        assert sum(sizes[3:]) == 0  # sharpness and hyperplanes


@pytest.mark.parametrize("estimator", [SMALL, Expected(), Soft(n_bits=6, n_hashes=4)])
def test_compiled_and_mapped(estimator):
    case = attention_inputs(20, batch=2)

    def attend(query, key, value):
        return yoso_attention(query, key, value, estimator=estimator, seed=0)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    for wanted in ((False, False, True), (False, True, False)):
        for _ in range(2):
            got = differentiate(compiled, case, wanted)
        for x, y in zip(got, differentiate(attend, case, wanted), strict=True):
            assert x is y is None or torch.equal(x, y)
    assert counter.frame_count == 2  # one for each choice of what requires a gradient

    def of_values(query, key, value, grad_out):
        return torch.func.vjp(lambda v: attend(query[None], key[None], v[None])[0], value)[1](
            grad_out
        )[0]

    *_, wanted = differentiate(attend, case, (False, False, True))
    inputs = case.query, case.key, case.value, case.grad_out
    mapped = torch.func.vmap(of_values, randomness="same")(*inputs)
    torch.testing.assert_close(mapped, wanted, rtol=1e-5, atol=1e-6)


def test_the_core_takes_none():
    case = attention_inputs(12, 9, 8, 8, heads=1, batch=1)
    inputs = case.query, case.key, case.value
    codes = [torch.zeros(1, 1, n, 4, dtype=torch.uint8) for n in (12, 9)]
    whole, got = ([torch.full_like(x, float("nan")) for x in inputs] for _ in range(2))
    options = 3, False, 2, 0, case.grad_out
    _C.yoso_backward(*inputs, None, *codes, *options, *whole, 1)
    _C.yoso_backward(*inputs, None, *codes, *options, None, got[1], None, 1)
    assert torch.equal(got[1], whole[1])
    _C.yoso_backward(*inputs, None, *codes, *options, None, None, None, 1)  # nothing to do
    with pytest.raises(ValueError, match="grad_key: shape"):
        _C.yoso_backward(*inputs, None, *codes, *options, None, got[0], None, 1)
    with pytest.raises(TypeError, match="grad_value: "):
        _C.yoso_backward(*inputs, None, *codes, *options, None, None, got[2].double(), 1)
