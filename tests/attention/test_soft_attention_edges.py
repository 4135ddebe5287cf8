"""Soft attention where its parts meet: packing, checkpoints, threads, unequal probes."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from cases.attention import attention_inputs  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from lshkit.attention import Sampled, Soft, yoso_attention  # noqa: E402

SOFT = Soft(n_bits=8)


def gradients(case, estimator):
    inputs = [x.detach().requires_grad_() for x in (case.query, case.key, case.value)]
    out = yoso_attention(*inputs, estimator=estimator, seed=1)
    return out, *torch.autograd.grad(out, inputs, case.grad_out)


def assert_close(results, wanted):
    for got, want in zip(results, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("probes", [(2, 256), (256, 2), (1, 512), (512, 4), (129, 1)])
def test_very_unequal_probes_end(probes):
    # The few probes of one side are expanded for many hashes at once, those of the other are not.
    case = attention_inputs(40, 33, batch=1, heads=1)
    estimator = Soft(n_bits=9, n_hashes=20, n_probes=probes)
    results = gradients(case, estimator)
    assert all(x.isfinite().all() for x in results)
    wanted = [gradients(case, replace(estimator, n_probes=p))[0] for p in ((probes[0], 1), (1, 1))]
    assert not torch.equal(results[0], wanted[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalize", ["l2", "sum"])
@pytest.mark.parametrize("first", [3, 100, 200])
def test_causal_queries_do_not_depend_on_later_rows(first, normalize, dtype):
    """Not in a bit, though later rows that are all alike would be summed another way."""
    case = attention_inputs(300, 300, batch=1, heads=2)
    inputs = [x.to(dtype) for x in (case.query, case.key, case.value)]
    alike = [x.clone() for x in inputs]
    for x in alike:
        x[:, :, first:] = x[:, :, first : first + 1]
    options = {"is_causal": True, "normalize": normalize, "seed": 1}
    options |= {"estimator": Soft(n_bits=12, n_hashes=20)}
    out, of_alike = (yoso_attention(*x, **options) for x in (inputs, alike))
    assert torch.equal(out[:, :, :first], of_alike[:, :, :first])
    wanted = yoso_attention(*(x.double() for x in alike), **options)
    torch.testing.assert_close(
        of_alike.double(), wanted, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.01
    )


@pytest.mark.parametrize(
    ("hasher", "dtype"),
    [
        *(("hadamard", torch.float32), ("hadamard", torch.bfloat16)),
        ("hyperplane", torch.float32),  # with planes that are learnt
    ],
)
@pytest.mark.parametrize("n_sequences", [5, 90])
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences_equal_sequences_alone(is_causal, n_sequences, hasher, dtype):
    # More sequences than sums that are kept apart; some without a row.
    generator = torch.Generator().manual_seed(0)
    lengths = [0, 30, *torch.randint(0, 7, (n_sequences,), generator=generator).tolist(), 0, 1]
    starts = torch.tensor((0, *torch.tensor(lengths).cumsum(0)), dtype=torch.int32)
    case = attention_inputs(sum(lengths), None, 16, 24, batch=1, heads=2, dtype=dtype)
    parameters = {"sharpness": torch.tensor([1.0, 3.0], requires_grad=True)}
    if hasher == "hyperplane":
        planes = torch.randn(2, 3, 4, 16, generator=generator)
        parameters["planes"] = planes.requires_grad_()
    inputs = [x.detach().requires_grad_() for x in (case.query, case.key, case.value)]
    options = {"is_causal": is_causal, "parameters": parameters, "seed": 1}
    options["estimator"] = Soft(n_bits=4, n_hashes=3, hasher=hasher)
    packed = yoso_attention(*inputs, cu_seqlens=starts, **options)
    parts = zip(*(x.split(lengths, 2) for x in inputs), strict=True)
    alone = torch.cat([yoso_attention(*p, **options) for p in parts], 2)
    leaves = *inputs, *parameters.values()
    results = ((x, *torch.autograd.grad(x, leaves, case.grad_out)) for x in (packed, alone))
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {}
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, **tolerance)


def test_checkpointing():
    case = attention_inputs(40, 40)
    inputs = [x.detach().requires_grad_() for x in (case.query, case.key, case.value)]

    def attend(*x):
        return yoso_attention(*x, estimator=SOFT, seed=1)

    grads = [
        torch.autograd.grad(out, inputs, case.grad_out)
        for out in (attend(*inputs), checkpoint(attend, *inputs, use_reentrant=False))
    ]
    assert all(map(torch.equal, *grads))


def test_no_heads():
    x = torch.randn(2, 0, 5, 8, requires_grad=True)
    sharpness = torch.tensor(1.0, requires_grad=True)
    out = yoso_attention(x, x, x, estimator=SOFT, parameters={"sharpness": sharpness})
    out.sum().backward()
    assert x.grad.shape == x.shape
    assert sharpness.grad == 0


def test_the_lift_of_packed_sequences_needs_a_number():
    x = torch.randn(1, 1, 4, 8)
    packing = torch.tensor([0, 2, 4])
    with pytest.raises(ValueError, match="lift_scale must be a number or tensor with cu_seqlens"):
        lift = Sampled(unit_norm="lift", lift_scale="auto")
        yoso_attention(x, x, x, estimator=lift, cu_seqlens=packing)
