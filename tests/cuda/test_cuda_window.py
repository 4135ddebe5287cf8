"""The near window on CUDA tensors against the references."""

from dataclasses import replace

import numpy as np
import pytest

from lshkit import reference

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.cuda
attention_cases = pytest.importorskip("cases.attention")
test_cuda = pytest.importorskip("test_cuda")

from lshkit import torch_ops  # noqa: E402
from lshkit.attention import Sampled, yoso_attention  # noqa: E402

assert_close, moved, parameters = test_cuda.assert_close, test_cuda.moved, test_cuda.parameters
N_BITS, N_HASHES = test_cuda.N_BITS, test_cuda.N_HASHES


def both(case, device, mask, is_causal, normalize, window, gradients):
    """Output and gradients, of the operators and of the reference, with the same codes."""
    query, key, value, grad_out = moved(case, device)
    options = is_causal, torch_ops.NORMALIZE[normalize]
    there = None if mask is None else mask.to(device)
    inputs = query, key, value, there, None, None
    planes = parameters(case.query, device)
    out, *codes, _ = torch_ops.yoso_attention(
        *(*inputs, planes, torch_ops.FAMILY["hadamard"], N_BITS, N_HASHES, *options, 0, window)
    )
    arrays = *attention_cases.arrays(case), *(c.cpu().numpy() for c in codes)
    words = attention_cases.reference_options(mask, is_causal, normalize) | {"window": window}
    with np.errstate(invalid="ignore"):
        yield out, reference.yoso_forward(*arrays, N_BITS, **words)
    for gradient in gradients:
        options = *options[:2], torch_ops.GRADIENT[gradient], window
        got = torch_ops.yoso_attention_backward(grad_out, *inputs, *codes, N_BITS, *options)
        with np.errstate(invalid="ignore"):
            wanted = reference.yoso_backward(
                *(*arrays, case.grad_out.double().numpy(), N_BITS), gradient=gradient, **words
            )
        yield from zip(got, wanted, strict=True)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("normalize", "shape"),
    [
        *[(None, (1, 1, 3, 2)), ("sum", (1, 1, 3, 2)), ("l2", (1, 1, 3, 2))],
        *[(None, (17, 65, 64, 7)), ("sum", (17, 65, 64, 7)), ("l2", (130, 70, 80, 33))],
    ],
)
def test_equals_reference(cuda_device, shape, is_causal, normalize):
    case = attention_cases.attention_inputs(*shape, heads=2)
    mask = attention_cases.padding_mask(2, shape[1])
    for window in (1, 20, 10**6):
        others = ("collided", "unbiased") if window == 20 else ()
        gradients = "lower_bound", *others
        for got, wanted in both(case, cuda_device, mask, is_causal, normalize, window, gradients):
            assert_close(got, wanted)


@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_without_a_direction(cuda_device, is_causal):
    case = attention_cases.attention_inputs(30, 30, 16, 8, heads=2)
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[:, -3:] = False
    case.query[0, 1, 4, 3] = case.key[1, 0, 9] = float("nan")
    case.query[1, 1, 0] = case.key[0, 1, 6, 3] = float("inf")
    case.key[:, :, -2] = case.value[:, :, -1] = float("nan")  # padding may hold anything
    case.query[0, 0, 2] = case.key[0, 0, 3] = 0
    for got, wanted in both(case, cuda_device, mask, is_causal, "l2", 7, ("unbiased",)):
        assert_close(got, wanted)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_nan_stays_with_the_pairs_that_see_it(cuda_device, is_causal):
    n, bad, window = 150, 60, 10
    i = torch.arange(n)
    case = attention_cases.attention_inputs(n, d=16, batch=1, heads=1)
    query, key, value, _ = moved(case, cuda_device)
    value[..., bad, 3] = float("nan")
    few = Sampled(n_bits=16, n_hashes=2, expectation="never")
    options = {"is_causal": is_causal, "seed": 0, "normalize": None}
    sampled = yoso_attention(query, key, value, estimator=few, **options)
    out = yoso_attention(query, key, value, estimator=replace(few, window=window), **options)
    near = ((i - bad).abs() < window) & ((i >= bad) | (not is_causal))
    reached = near | sampled[0, 0, :, 3].isnan().cpu()
    assert torch.equal(out[0, 0, :, 3].isnan().cpu(), reached)
    assert not out[0, 0, :, :3].isnan().any()


def test_grouped_heads_and_packed_sequences(cuda_device):
    case = attention_cases.attention_inputs(40, 40, 12, batch=1, heads=4)
    query, key, value, grad_out = moved(case, cuda_device)
    key, value = key[:, :2], value[:, :2]
    options = dict(estimator=replace(test_cuda.SAMPLED, window=5), seed=0, is_causal=True)

    def run(*tensors, **more):
        leaves = [x.detach().requires_grad_() for x in tensors[:3]]
        out = yoso_attention(*leaves, enable_gqa=True, **options, **more)
        return out.detach(), *torch.autograd.grad(out, leaves, tensors[3])

    starts = torch.tensor([0, 13, 13, 40], dtype=torch.int32, device=cuda_device)
    packed = run(query, key, value, grad_out, cu_seqlens=starts)
    for first, last in ((0, 13), (13, 40)):
        alone = run(*(x[:, :, first:last] for x in (query, key, value, grad_out)))
        for got, wanted in zip(packed, alone, strict=True):
            assert_close(got[:, :, first:last], wanted.cpu())
    heads = [run(query[:, g::2], key, value, grad_out[:, g::2]) for g in range(2)]
    whole = run(query, key, value, grad_out)
    for g in range(2):
        for got, wanted in zip(whole[:2], heads[g][:2], strict=True):
            assert_close(got[:, g::2], wanted.cpu())
    for got, *parts in zip(whole[2:], heads[0][2:], heads[1][2:], strict=True):
        assert_close(got, sum(parts).cpu())


def test_same_bits_again(cuda_device):
    case = attention_cases.attention_inputs(140, 133, 32, batch=1, heads=2)
    runs = [
        [x for x, _ in both(case, cuda_device, None, False, "sum", 40, ("lower_bound",))]
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
