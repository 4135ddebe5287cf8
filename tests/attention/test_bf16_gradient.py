"""The lower bound's gradient of bfloat16 inputs, whose bucket products may be of bfloat16."""

from dataclasses import replace

import pytest

from lshkit import _C

_C.instruction_set()  # a process with one that is refused ends here, before torch is imported

torch = pytest.importorskip("torch")

from cases.attention import (  # noqa: E402
    NORMALIZE,
    SAMPLED,
    attention_inputs,
    float32_gradients,
    padding_mask,
)
from cases.commands import run_by_instruction_set  # noqa: E402

from lshkit.attention import yoso_attention  # noqa: E402

# n_q, n_k, d, d_v, n_bits: buckets of many rows, then of some 40, 9 and 150, whose pairs are taken
# (of 150 by tiles alone, of 9 in vectors). The last two have rows that stay in float32.
CASES = [
    (300, 300, 64, 64, 1),
    (1200, 1300, 64, 64, 5),
    (1200, 1100, 32, 80, 7),
    (1100, 1400, 64, 64, 3),
    (501, 333, 32, 80, 2),
    (90, 700, 112, 16, 1),
    (400, 400, 20, 64, 2),
    (400, 400, 64, 33, 2),
]


def gradients(inputs, grad_out, n_bits, mask=None, is_causal=False, **options):
    inputs = [x.detach().requires_grad_() for x in inputs]
    estimator = replace(SAMPLED, n_bits=n_bits, n_hashes=9)
    options |= {"estimator": estimator, "is_causal": is_causal, "causal_offset": 0, "seed": 3}
    out = yoso_attention(*inputs, mask, **options)
    return torch.autograd.grad(out, inputs, grad_out)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_within_rounding_of_float32(sizes, normalize, is_causal):
    check_rounding(sizes, normalize, is_causal)


def check_rounding(sizes, normalize, is_causal, **heads):
    *shape, n_bits = sizes
    case = attention_inputs(*shape, dtype=torch.bfloat16, **heads)
    mask = padding_mask(len(case.key), shape[1])
    mask[-1, : shape[1] // 2] = True
    tensors = case.query, case.key, case.value
    options = {"normalize": normalize}
    got = gradients(tensors, case.grad_out, n_bits, mask, is_causal, **options)
    options |= {"n_bits": n_bits, "n_hashes": 9}
    wanted = float32_gradients(tensors, case.grad_out, mask, is_causal, seed=3, **options)
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == torch.bfloat16
        error = (a.float() - b).square().mean().sqrt()
        assert error < 1e-2 * b.square().mean().sqrt()


def test_rows_that_take_no_part():
    case = attention_inputs(300, 300, 64, 64, batch=1, dtype=torch.bfloat16)
    mask = torch.ones(1, 300, dtype=torch.bool)
    mask[0, 7] = False
    tensors = case.query, case.key, case.value
    clean = gradients(tensors, case.grad_out, 1, mask, normalize="sum")
    case.key[:, :, 7], case.value[:, :, 7] = torch.inf, torch.nan
    got = gradients(tensors, case.grad_out, 1, mask, normalize="sum")
    for a, b in zip(got, clean, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    case.query[:, :, 5, 3] = torch.nan
    got = gradients(tensors, case.grad_out, 1, mask, normalize="sum")
    assert got[0][:, :, 5].isnan().all()
    assert got[0].isnan().sum() == got[0][:, :, 5].numel()
    assert got[1].isfinite().all() and got[2].isfinite().all()


def test_a_value_that_is_not_finite_reaches_the_queries_that_collide():
    case = attention_inputs(300, 300, 64, 64, batch=1, dtype=torch.bfloat16)
    tensors = case.query, case.key, case.value
    clean = gradients(tensors, case.grad_out, 2, normalize=None)
    case.value[:, :, 7, 3] = torch.nan
    got = gradients(tensors, case.grad_out, 2, normalize=None)
    for grad, before, most in zip(got[:2], clean[:2], (295, 1), strict=True):  # of 300, and itself
        bad = grad.isnan().any(dim=-1)
        assert ((bad.sum(dim=-1) > 0) & (bad.sum(dim=-1) <= most)).all()
        assert torch.equal(grad[~bad], before[~bad])
    assert got[1][:, :, 7].isnan().all()


def test_autocast_takes_the_same_path():
    case = attention_inputs(300, 300, 64, 64, batch=1)
    inputs = [x.requires_grad_() for x in (case.query, case.key, case.value)]
    options = {"estimator": replace(SAMPLED, n_hashes=9, n_bits=1), "seed": 3}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = yoso_attention(*inputs, **options)
    got = torch.autograd.grad(out, inputs, case.grad_out.bfloat16())
    halves = [x.bfloat16() for x in inputs]
    wanted = gradients(halves, case.grad_out.bfloat16(), n_bits=1)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=0, atol=0)


@pytest.mark.parametrize(
    "name", [x for x in _C.instruction_sets.split() if x not in ("base", "avx2")]
)
def test_instruction_set(name):
    run_by_instruction_set(__file__, name)


def check():
    """Of the instruction set in use; AMX's twin takes its time."""
    for sizes in CASES[:4]:
        check_rounding(sizes, "l2", is_causal=False, batch=1, heads=1)
    for sizes in CASES[:2]:
        check_rounding(sizes, "sum", is_causal=True, batch=1, heads=1)
    test_rows_that_take_no_part()
    test_a_value_that_is_not_finite_reaches_the_queries_that_collide()


if __name__ == "__main__":
    check()
