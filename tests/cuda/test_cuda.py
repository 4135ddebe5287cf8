"""The operators on CUDA tensors against the references, and against themselves.

Without a GPU, a build with -DLSHKIT_CUDA=EMULATED runs the same tests on the kernels' source,
compiled for the CPU; else they are skipped.
"""

from dataclasses import replace

import numpy as np
import pytest

from lshkit import _C, hashing, reference
from lshkit.buckets import bucket_sum

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.cuda
attention_cases = pytest.importorskip("cases.attention")

from lshkit import torch_ops  # noqa: E402
from lshkit.attention import Expected, Sampled, YosoAttention, yoso_attention  # noqa: E402

SHAPES = [(1, 1, 1, 1), (17, 65, 64, 7), (65, 17, 60, 64), (130, 70, 80, 33)]
N_BITS, N_HASHES = 5, 12
SAMPLED = Sampled(n_bits=N_BITS, n_hashes=N_HASHES, expectation="never")
# Relative to the output's root mean square: sums of float32 in another order, then the rounding of
# the result; a normalised row divides by what may be small. And 1e-6, where terms of size 1 cancel.
TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def assert_close(got, wanted, dtype=torch.float32):
    got, wanted = got.double().cpu(), torch.as_tensor(wanted).double().cpu()
    size = wanted[torch.isfinite(wanted)].square().mean().sqrt().item()
    torch.testing.assert_close(
        got, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * size + 1e-6, equal_nan=True
    )


def moved(case, device):
    return [x.to(device) for x in (case.query, case.key, case.value, case.grad_out)]


def parameters(x, device, family="hadamard", n_bits=N_BITS, n_hashes=N_HASHES):
    seed = torch.tensor(3)
    sizes = x.shape[1], x.shape[-1], n_bits, n_hashes
    return torch_ops.hash_parameters(seed, *sizes, torch_ops.FAMILY[family]).to(device)


@pytest.mark.parametrize("family", ["hadamard", "hyperplane"])
@pytest.mark.parametrize("n_bits", [3, 8, 12])
@pytest.mark.parametrize("d", [1, 64, 70])
def test_codes(cuda_device, family, n_bits, d):
    x = torch.randn(2, 3, 70, d, generator=torch.Generator().manual_seed(0))
    planes = parameters(x, "cpu", family, n_bits)
    options = torch_ops.FAMILY[family], n_bits, N_HASHES
    codes = torch_ops.hash(x.to(cuda_device), planes.to(cuda_device), *options).cpu().numpy()
    projected = reference.projections(x.numpy(), planes.numpy(), family, n_bits, N_HASHES)
    differ = (codes[..., None] >> np.arange(n_bits) & 1) != (projected > 0)
    # Only where the projection is within rounding of zero: it sums the row's entries, each times a
    # number of about the columns' root.
    size = np.linalg.norm(x.numpy(), axis=-1) * np.sqrt(planes.shape[-1]) * planes.shape[-1]
    assert (np.abs(projected) <= 1e-6 * size[..., None, None])[differ].all()
    assert differ.mean() < 1e-3


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("n_bits", [2, 8, 13])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_bucket_sum(cuda_device, order, n_bits, dtype):
    generator = torch.Generator().manual_seed(1)
    query, key = (
        torch.randint(2**n_bits, (2, 2, n, 5), generator=generator).to(torch_ops.code_dtype(n_bits))
        for n in (70, 133)
    )
    values = torch.randn(2, 2, 133, 9, generator=generator).to(dtype)
    mask = torch.rand(2, 133, generator=generator) < 0.7
    inputs = query, key, values, 2**n_bits, order, mask
    out = torch_ops.bucket_sum(*(x.to(cuda_device) if torch.is_tensor(x) else x for x in inputs))
    assert out.dtype is dtype
    pairs = np.ones((70, 133), bool)
    if order:
        pairs = np.tril(pairs) if order == 1 else np.triu(pairs)
    weights = reference.collision_counts(query.numpy(), key.numpy()) * pairs / 5
    wanted = (weights * mask[:, None, None].numpy()) @ values.double().numpy()
    tolerance = TOLERANCE.get(dtype, 1e-12)
    np.testing.assert_allclose(out.double().cpu(), wanted, rtol=tolerance, atol=tolerance)


def test_codes_out_of_range_are_in_no_bucket(cuda_device):
    codes = torch.tensor([0, 1, 200], dtype=torch.uint8).reshape(1, 1, 3, 1).to(cuda_device)
    values = torch.ones(1, 1, 3, 2).to(cuda_device)
    if cuda_device.type == "cpu":
        pytest.skip("codes of CPU tensors are looked at")
    out = torch_ops.bucket_sum(codes, codes, values, 2, 0, None)
    assert out[0, 0, :, 0].tolist() == [1, 1, 0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("normalize", [None, "sum", "l2"])
def test_sampled_attention(cuda_device, shape, is_causal, normalize):
    case = attention_cases.attention_inputs(*shape)
    mask = attention_cases.padding_mask(2, shape[1])
    query, key, value, grad_out = moved(case, cuda_device)
    options = is_causal, torch_ops.NORMALIZE[normalize]
    planes = parameters(case.query, cuda_device)
    family = torch_ops.FAMILY["hadamard"]
    out, *codes, _ = torch_ops.yoso_attention(
        *(query, key, value, mask.to(cuda_device), None, None, planes, family, N_BITS, N_HASHES),
        *(*options, 0),
    )
    arrays = *attention_cases.arrays(case), *(c.cpu().numpy() for c in codes)
    words = attention_cases.reference_options(mask, is_causal, normalize)
    assert_close(out, reference.yoso_forward(*arrays, **words))
    for gradient in ("lower_bound", "collided", "unbiased"):
        number = torch_ops.GRADIENT[gradient]
        got = torch_ops.yoso_attention_backward(
            *(grad_out, query, key, value, mask.to(cuda_device), None, None, *codes, N_BITS),
            *(*options, number),
        )
        wanted = reference.yoso_backward(
            *arrays, case.grad_out.double().numpy(), N_BITS, gradient=gradient, **words
        )
        for a, b in zip(got, wanted, strict=True):
            assert_close(a, b)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("normalize", [None, "sum", "l2"])
@pytest.mark.parametrize("gradient", ["lower_bound", "exact"])
def test_expected_attention(cuda_device, is_causal, normalize, gradient):
    case = attention_cases.attention_inputs(70, 67, 33, 9)
    mask = attention_cases.padding_mask(2, 67)
    query, key, value, grad_out = moved(case, cuda_device)
    options = N_BITS, is_causal, torch_ops.NORMALIZE[normalize], torch_ops.GRADIENT[gradient]
    inputs = query, key, value, mask.to(cuda_device), None, None, *options
    arrays = tuple(attention_cases.arrays(case))
    words = attention_cases.reference_options(mask, is_causal, normalize)
    out, divisors = torch_ops.expected_attention(*inputs)
    assert_close(out, reference.expected_forward(*arrays, N_BITS, **words))
    got = torch_ops.expected_attention_backward(grad_out, *inputs)
    for a, b in zip(
        torch_ops.expected_attention_backward(grad_out, *inputs, out, divisors), got, strict=True
    ):
        assert_close(a, b)
    grad_out = case.grad_out.double().numpy()
    wanted = reference.expected_backward(
        *arrays, grad_out, N_BITS, gradient=gradient, floor=1e-6, **words
    )
    for a, b in zip(got, wanted, strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats(cuda_device, dtype):
    case = attention_cases.attention_inputs(70, 67, 16, 9, dtype=dtype)
    query, key, value, grad_out = moved(case, cuda_device)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    options = dict(estimator=SAMPLED, seed=0)
    out = yoso_attention(*leaves, **options)
    out.backward(grad_out)
    full = [x.detach().float().requires_grad_() for x in leaves]
    wanted = yoso_attention(*full, **options)
    wanted.backward(grad_out.float())
    assert out.dtype is dtype and leaves[0].grad.dtype is dtype
    assert_close(out, wanted.detach().cpu(), dtype)
    # The output is kept rounded, and a row's gradient is divided by its norm: relative to the row's
    # root mean square, or that of all rows where it is more.
    for got, leaf in zip(leaves, full, strict=True):
        a, b = got.grad.double().cpu(), leaf.grad.double().cpu()
        size = b.square().mean(-1, keepdim=True).sqrt().clamp_min(b.square().mean().sqrt().item())
        assert ((a - b).abs() <= TOLERANCE[dtype] * (size + b.abs())).all()


def test_grouped_heads_and_packed_sequences(cuda_device):
    case = attention_cases.attention_inputs(40, 40, 12, batch=1, heads=4)
    query, key, value, _ = moved(case, cuda_device)
    key, value = key[:, :2], value[:, :2]
    options = dict(estimator=SAMPLED, seed=0, is_causal=True)
    grouped = yoso_attention(query, key, value, enable_gqa=True, **options)
    single = yoso_attention(query[:, ::2], key, value, **options)
    assert_close(grouped[:, ::2], single.cpu())
    starts = torch.tensor([0, 13, 13, 40], dtype=torch.int32, device=cuda_device)
    packed = yoso_attention(query, key, value, enable_gqa=True, cu_seqlens=starts, **options)
    for first, last in ((0, 13), (13, 40)):
        part = (x[:, :, first:last] for x in (query, key, value))
        alone = yoso_attention(*part, enable_gqa=True, **options)
        assert_close(packed[:, :, first:last], alone.cpu())


def test_bad_rows_stay_alone(cuda_device):
    case = attention_cases.attention_inputs(40, 41, 12)
    query, key, value, _ = moved(case, cuda_device)
    query[0, 0, 3, 2] = float("nan")
    key[0, 0, 5, 1] = float("inf")
    for estimator in (Sampled(n_bits=3, expectation="never"), Expected(n_bits=3)):
        out = yoso_attention(query, key, value, estimator=estimator, seed=0)
        bad = out.isnan().any(-1)
        assert bad[0, 0, 3] and bad.sum() == 1


def test_same_bits_again(cuda_device):
    case = attention_cases.attention_inputs(300, 257, 32, batch=1, heads=2)
    query, key, value, grad_out = moved(case, cuda_device)
    few = replace(SAMPLED, n_bits=4, n_hashes=8)

    def run():
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        out = yoso_attention(*leaves, estimator=few, seed=0)
        out.backward(grad_out)
        return out, *(x.grad for x in leaves)

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_public_functions(cuda_device):
    x = torch.randn(50, 20, generator=torch.Generator().manual_seed(0))
    hasher = hashing.FastHadamard(20, 6, 4, seed=0)
    codes = hasher.hash(x.to(cuda_device))
    assert codes.device.type == cuda_device.type
    assert (codes.cpu() != hasher.hash(x)).float().mean() < 0.01
    sums = bucket_sum(codes, codes, x.to(cuda_device), 64)
    assert_close(sums, bucket_sum(codes.cpu(), codes.cpu(), x, 64))
    module = YosoAttention(16, 2, estimator=SAMPLED).to(cuda_device)
    out, _ = module(*(torch.randn(2, 9, 16, device=cuda_device),) * 3, is_causal=True)
    out.sum().backward()
    assert module.in_proj_weight.grad.device.type == cuda_device.type


def test_errors(cuda_device):
    if cuda_device.type != "cuda":
        pytest.skip("needs a GPU")
    x = torch.ones(1, 1, 4, 8)
    with pytest.raises(ValueError, match="key must be on query's device cuda:0, got cpu"):
        yoso_attention(x.cuda(), x, x)
    with pytest.raises(ValueError, match="parameters: must be on the same device"):
        codes = torch.empty(1, 1, 4, N_HASHES, dtype=torch.uint8, device="cuda")
        _C.hash(x.cuda(), parameters(x, "cpu"), 1, N_BITS, N_HASHES, codes)
