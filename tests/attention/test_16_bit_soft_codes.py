"""Soft codes of bfloat16 and float16 inputs on the CPU, whose sums are in tables of integers.

float32 inputs of the same rows have the same probes, and are summed in full.
"""

import pytest

torch = pytest.importorskip("torch")

from cases.attention import NORMALIZE, attention_inputs, padding_mask  # noqa: E402
from cases.commands import run_by_instruction_set  # noqa: E402

from lshkit import _C  # noqa: E402
from lshkit.attention import Soft, yoso_attention  # noqa: E402

SHORT = (torch.bfloat16, torch.float16)
# Of a result, beside the rounding to its dtype. Each gradient depends on sums of both tables.
LARGEST_ERROR = 1.5e-3
IN_FLOAT32 = ("base", "avx2")  # sums of all inputs
KINDS = ["random", "clustered", "duplicated", "mean", "values like keys", "heavy tail"]


def rows(kind, n, d_v=64, dtype=torch.bfloat16, seed=0):
    """query, key, value and the output's gradient, (1, 2, n, columns)."""
    case = attention_inputs(n, d=64, d_v=d_v, batch=1, heads=2, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    which = torch.randint(16, (n,), generator=generator)
    if kind == "clustered":
        case.key = case.key[..., :16, :][..., which, :] + 0.1 * case.key
        case.query = case.key + 0.1 * case.query
    if kind == "duplicated":
        case.key, case.value = (
            x[..., : n // 8, :].repeat(1, 1, 8, 1) for x in (case.key, case.value)
        )
    if kind == "mean":
        case.value, case.grad_out = case.value + 1, case.grad_out + 1
    if kind == "values like keys":
        case.value = 0.1 * case.value + 3 * case.value[..., :16, :][..., which, :]
        case.key = 0.1 * case.key + case.key[..., :16, :][..., which, :]
    if kind == "small in a cluster":  # as behind a normalisation, which divides by their number
        case.key[..., : n // 20, :] = case.key[..., :1, :] + 0.1 * case.key[..., : n // 20, :]
        case.query = case.key.clone()
        case.grad_out[..., : n // 20, :] /= 100
    if kind == "heavy tail":
        case.value, case.grad_out = (x.sign() * x.abs() ** 3 for x in (case.value, case.grad_out))
    return [x.to(dtype) for x in (case.query, case.key, case.value, case.grad_out)]


def attend(
    query, key, value, grad, dtype, mask=None, *, normalize=None, sharpness=None, seed=3, **options
):
    """The output and its gradients, in float32."""
    x = [t.to(dtype).detach().requires_grad_() for t in (query, key, value)]
    parameters = None
    if sharpness is not None:
        x.append(torch.full((2,), sharpness, requires_grad=True))
        parameters = {"sharpness": x[-1]}
    options = {"n_bits": 12, "n_hashes": 16} | options
    out = yoso_attention(
        *x[:3],
        mask,
        estimator=Soft(**options),
        normalize=normalize,
        seed=seed,
        parameters=parameters,
    )
    gradients = torch.autograd.grad(out, x, grad.to(out.dtype))
    return [t.detach().float() for t in (out, *gradients)]


def relative_error(got, wanted):
    return float((got - wanted).norm() / wanted.norm())


def bound(dtype, roundings=1):
    """Independent errors: ours, and of as many roundings to the dtype, 0.21 eps each."""
    return (LARGEST_ERROR**2 + roundings * (0.25 * torch.finfo(dtype).eps) ** 2) ** 0.5


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("n, d_v", [(900, 64), (1500, 33), (2000, 130)])
@pytest.mark.parametrize("kind", KINDS)
def test_output_and_gradients_are_those_of_float32(kind, n, d_v, dtype):
    inputs = rows(kind, n, d_v, dtype)
    full = attend(*inputs, torch.float32)
    short = attend(*inputs, dtype)
    for got, wanted in zip(short, full, strict=True):
        assert relative_error(got, wanted) < bound(dtype)


@pytest.mark.parametrize("n_bits", [3, 8, 14, 16])
@pytest.mark.parametrize("n_probes", [1, 2, 3, 4, 8])
def test_any_bits_and_probes(n_probes, n_bits):
    inputs = rows("random", 1000)
    options = {"n_bits": n_bits, "n_probes": n_probes}
    full = attend(*inputs, torch.float32, **options)
    short = attend(*inputs, torch.bfloat16, **options)
    for i in (0, 3) if n_probes == 1 else range(4):  # one probe has a weight of 1: no gradient
        got, wanted = short[i], full[i]
        assert relative_error(got, wanted) < bound(torch.bfloat16)


@pytest.mark.parametrize("normalize", NORMALIZE)
def test_masks_normalisation_and_sharpness(normalize):
    inputs = rows("random", 1200)
    mask = padding_mask(2, 1200)[:1]
    options = {"normalize": normalize, "sharpness": 2.0}
    full = attend(*inputs, torch.float32, mask, **options)
    short = attend(*inputs, torch.bfloat16, mask, **options)
    assert all((x[..., ~mask[0], :] == 0).all() for x in short[2:4])
    # The gradients start from the output as it was rounded: see docs/numerics.md.
    for got, wanted in zip(short, full, strict=True):
        assert relative_error(got, wanted) < bound(torch.bfloat16, 3)


def test_rows_that_are_small_where_most_collide():
    """The mean of all is not theirs, which most readers meet.

    That is seen where the first hash has the cluster in one bucket, as most have. Where it cuts it,
    the cluster's own error is up to 0.4 %: see docs/numerics.md.
    """
    inputs = rows("small in a cluster", 1400, dtype=torch.float16)
    errors = []
    for seed in range(9):
        full, short = (
            attend(*inputs, x, n_bits=10, seed=seed)[3] for x in (torch.float32, torch.float16)
        )
        assert relative_error(short, full) < bound(torch.float16)
        errors.append(relative_error(short[..., :70, :], full[..., :70, :]))
    assert sorted(errors)[4] < bound(torch.float16) and max(errors) < 4e-3


@pytest.mark.parametrize("n", [1024, 6000])
def test_rounding_has_no_bias(n):
    inputs = rows("mean", n, dtype=torch.float16)
    full, short = (attend(*inputs, dtype)[0] for dtype in (torch.float32, torch.float16))
    error = short - full
    in_use = (short != full.half().float()).float().mean() > 0.05
    assert in_use == (_C.instruction_set() not in IN_FLOAT32)
    size = error.square().mean().sqrt()
    # Rounding down would move all numbers by as much as their errors are large. What every row
    # adds to a bucket is rounded with it to the same side: some columns have a mean of their own.
    assert abs(error.mean()) < 0.1 * size


def test_equal_weights():
    """Halves and quarters of integers, which are all rounded up, would add up in full buckets."""
    inputs = rows("random", 8000, dtype=torch.float16)
    options = {"n_bits": 6, "sharpness": 1e-8}
    full, short = (attend(*inputs, x, **options)[0] for x in (torch.float32, torch.float16))
    assert relative_error(short, full) < bound(torch.float16)


@pytest.mark.parametrize("normalize", ["l2", "sum"])
@pytest.mark.parametrize("sharpness", [2.0, 8.0])
@pytest.mark.parametrize("valid", [1, 3, 20, 100])
def test_few_keys(valid, sharpness, normalize):
    """A normalisation shows how rows are rounded whose pairs have small weights alone."""
    inputs = rows("random", 1000)
    mask = torch.zeros(1, 1000, dtype=torch.bool)
    mask[0, :valid] = True
    options = {"n_bits": 8, "normalize": normalize, "sharpness": sharpness}
    full, short = (attend(*inputs, x, mask, **options) for x in (torch.float32, torch.bfloat16))
    for i in (0, 3):
        assert relative_error(short[i], full[i]) < bound(torch.bfloat16, 2)


@pytest.mark.parametrize("n_bits", [4, 6, 7])
def test_values_that_depend_on_the_position(n_bits):
    """Sums go far beyond what rows in another order would have, and come back."""
    query, key, value, grad = rows("random", 8192)
    half = torch.arange(8192)[:, None] < 4096
    value, grad = (x * 0.3 + torch.where(half, 1.0, -1.0) for x in (value, grad))
    inputs = [x.bfloat16() for x in (query, key, value, grad)]
    full, short = (attend(*inputs, x, n_bits=n_bits) for x in (torch.float32, torch.bfloat16))
    for got, wanted in zip(short, full, strict=True):
        assert relative_error(got, wanted) < bound(torch.bfloat16)


def test_one_bucket():
    """Sums of 3,000 equal rows, far beyond what was expected: float32 takes over."""
    query, key, value, grad = rows("random", 3000)
    key[:], query[:] = key[..., :1, :], key[..., :1, :]
    value[:] = 1
    full, short = (attend(query, key, value, grad, x) for x in (torch.float32, torch.bfloat16))
    for i in (0, 3):
        assert relative_error(short[i], full[i]) < bound(torch.bfloat16)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite(bad):
    query, key, value, grad = rows("random", 1000)
    value[0, 0, 3, 50] = bad
    query[0, 1, 5, 7] = float("nan")
    mask = torch.ones(1, 1000, dtype=torch.bool)
    mask[0, 3] = False
    for hidden in (None, mask):
        full, short = (
            attend(query, key, value, grad, x, hidden) for x in (torch.float32, torch.bfloat16)
        )
        for got, wanted in zip(short, full, strict=True):
            finite = wanted.isfinite()
            assert torch.equal(got.isfinite(), finite)
            assert relative_error(got[finite], wanted[finite]) < bound(torch.bfloat16)


@pytest.mark.parametrize("name", [x for x in _C.instruction_sets.split() if x not in IN_FLOAT32])
def test_instruction_set(name):
    run_by_instruction_set(__file__, name)


def check():
    """Of the instruction set in use: AMX's twin has these tables on every machine."""
    for kind in KINDS:
        test_output_and_gradients_are_those_of_float32(kind, 900, 64, torch.bfloat16)
    test_rows_that_are_small_where_most_collide()
    test_rounding_has_no_bias(1024)


if __name__ == "__main__":
    check()
