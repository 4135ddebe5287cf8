"""Soft codes on CUDA: hashing, the weighted sum and attention, against the references and the CPU.

See test_cuda.py for what runs them without a GPU.
"""

import numpy as np
import pytest

from lshkit import _C, hashing, reference
from lshkit.buckets import bucket_sum

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.cuda
attention_cases = pytest.importorskip("cases.attention")

from lshkit import torch_ops  # noqa: E402
from lshkit.attention import Soft, YosoAttention, yoso_attention  # noqa: E402

# Relative to the root mean square: sums of float32 in another order, then the rounding of the
# result.
TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float64: 1e-12}
N_HASHES = 3


def assert_close(got, wanted, dtype=torch.float32):
    got, wanted = got.detach().double().cpu(), torch.as_tensor(wanted).double()
    size = wanted[torch.isfinite(wanted)].square().mean().sqrt().item()
    torch.testing.assert_close(
        got, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * size + 1e-12, equal_nan=True
    )


@pytest.fixture
def on_cpu(monkeypatch):
    """Runs a function with the CPU's kernels, in a build with emulated ones too."""

    def run(function, *args, **words):
        with monkeypatch.context() as patch:
            patch.setenv("LSHKIT_EMULATE_CUDA", "0")
            return function(*args, **words)

    return run


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def leaf_of(x, device="cpu"):
    """A copy, as on the CPU the inputs of both ways would be one tensor."""
    return x.detach().clone().to(device).requires_grad_()


@pytest.mark.parametrize("family", ["FastHadamard", "Hyperplane"])
@pytest.mark.parametrize("d, n_bits, n_probes", [(64, 12, 4), (20, 5, 32), (70, 9, 3), (9, 16, 1)])
def test_soft_hash(cuda_device, on_cpu, family, d, n_bits, n_probes):
    hasher = getattr(hashing, family)(d, n_bits, 10, seed=0)
    x = normal(140, d)
    x[3] = 0
    sharpness = torch.tensor(1.7)
    grad = normal(140, 10, n_probes, seed=1)
    leaves = [leaf_of(z, cuda_device) for z in (x, sharpness)]
    codes, weights = hasher.soft_hash(leaves[0], n_probes, leaves[1])
    weights.backward(grad.to(cuda_device))
    wanted_leaves = [leaf_of(z) for z in (x, sharpness)]
    wanted_codes, wanted = on_cpu(hasher.soft_hash, wanted_leaves[0], n_probes, wanted_leaves[1])
    on_cpu(wanted.backward, grad)
    # Bits change places where projections are within rounding of one another.
    same = (codes.cpu() == wanted_codes).all(-1)
    assert same.float().mean() > 0.995
    assert_close(weights.cpu()[same], wanted[same].detach())
    rows = same.all(-1)
    assert_close(leaves[0].grad.cpu()[rows], wanted_leaves[0].grad[rows])
    if rows.all():
        assert_close(leaves[1].grad, wanted_leaves[1].grad)


def test_soft_hash_of_bad_rows(cuda_device):
    hasher = hashing.FastHadamard(20, 5, 4, seed=0)
    x = normal(6, 20)
    x[2, 3], x[4, 0] = float("nan"), float("inf")
    leaf = leaf_of(x, cuda_device)
    _, weights = hasher.soft_hash(leaf, 4, 2.0, check_finite=False)
    weights.square().sum().backward()
    bad = torch.tensor([False, False, True, False, True, False])
    assert torch.equal(weights.isnan().any(-1).any(-1).cpu(), bad)
    assert torch.equal(leaf.grad.isnan().any(-1).cpu(), bad)


# (n_q, n_k, probes of queries, of keys, n_bits, n_values)
SUMS = [(17, 65, 4, 4, 6, 9), (40, 33, 1, 3, 4, 70), (33, 20, 8, 8, 3, 33), (1, 1, 2, 1, 9, 1)]


@pytest.mark.parametrize("sizes", SUMS)
@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weighted_sum(cuda_device, sizes, order, dtype):
    n_q, n_k, query_probes, key_probes, n_bits, n_values = sizes
    generator = torch.Generator().manual_seed(1)
    codes, weights = [], []
    for n, probes in ((n_q, query_probes), (n_k, key_probes)):
        shape = 2, 1, n, N_HASHES, probes
        one = torch.randint(2**n_bits, shape, generator=generator)
        codes.append(one.to(torch_ops.code_dtype(n_bits)))
        weights.append(torch.rand(shape, generator=generator).to(dtype))
    values, grad = normal(2, 1, n_k, n_values).to(dtype), normal(2, 1, n_q, n_values, seed=1)
    mask = torch.rand(2, n_k, generator=generator) < 0.7
    values[~mask[:, None]] = float("nan")  # of keys that take no part
    leaves = [leaf_of(x, cuda_device) for x in (values, *weights)]
    sums = torch_ops.weighted_bucket_sum(
        *(c.to(cuda_device) for c in codes), *leaves, 2**n_bits, order, mask.to(cuda_device)
    )
    sums.backward(grad.to(cuda_device, dtype))
    # The same from all pairs, in float64.
    wanted_leaves = [leaf_of(x.double().nan_to_num(0)) for x in (values, *weights)]
    value, query_weights, key_weights = wanted_leaves
    met = codes[0][:, :, :, None, :, :, None].int() == codes[1][:, :, None, :, :, None].int()
    pairs = torch.ones(n_q, n_k, dtype=torch.bool)
    pairs = pairs if order == 0 else pairs.tril() if order == 1 else pairs.triu()
    product = query_weights[:, :, :, None, :, :, None] * key_weights[:, :, None, :, :, None]
    total = (met * product).sum((-1, -2, -3)) * (pairs & mask[:, None, None]) / N_HASHES
    wanted = total @ value
    wanted.backward(grad.double())
    assert sums.dtype is dtype
    assert_close(sums, wanted.detach(), dtype)
    for leaf, wanted_leaf in zip(leaves, wanted_leaves, strict=True):
        assert_close(leaf.grad, wanted_leaf.grad, dtype)


def test_public_weighted_sum(cuda_device, on_cpu):
    hasher = hashing.FastHadamard(20, 6, 4, seed=0)
    x = normal(30, 20)
    codes, weights = on_cpu(hasher.soft_hash, x, 4, 2.0)
    inputs = codes, codes[..., 0], normal(30, 5, seed=1)
    wanted = on_cpu(bucket_sum, *inputs, 64, causal=True, query_weights=weights)
    inputs = (z.to(cuda_device) for z in inputs)
    words = dict(causal=True, query_weights=weights.to(cuda_device))
    assert_close(bucket_sum(*inputs, 64, **words), wanted)


def operator_inputs(case, device, family, n_bits, n_hashes):
    seed = torch.tensor(3)
    sizes = case.query.shape[1], case.query.shape[-1], n_bits, n_hashes
    planes = torch_ops.hash_parameters(seed, *sizes, torch_ops.FAMILY[family])
    sharpness = torch.linspace(1.5, 2.5, case.query.shape[1])
    inputs = case.query, case.key, case.value, planes, sharpness
    return [leaf_of(x, device) for x in inputs]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "family, normalize, n_probes",
    [
        ("hadamard", None, (4, 4)),
        ("hadamard", "sum", (1, 3)),
        ("hadamard", "l2", (8, 16)),
        ("hyperplane", "sum", (4, 2)),
        ("hyperplane", "l2", (16, 16)),
    ],
)
def test_attention(cuda_device, family, is_causal, normalize, n_probes):
    n_bits, shape = 4, (17, 23, 20, 9)
    case = attention_cases.attention_inputs(*shape)
    mask = attention_cases.padding_mask(2, shape[1])
    leaves = operator_inputs(case, cuda_device, family, n_bits, N_HASHES)
    query, key, value, planes, sharpness = leaves
    out, *_ = torch_ops.soft_attention(
        *(query, key, value, mask.to(cuda_device), None, None, planes, sharpness),
        *(torch_ops.FAMILY[family], n_bits, N_HASHES, *n_probes, is_causal),
        torch_ops.NORMALIZE[normalize],
    )
    out.backward(case.grad_out.to(cuda_device))
    hasher = planes.detach().cpu().numpy(), family, n_bits, N_HASHES
    words = attention_cases.reference_options(mask, is_causal, normalize)
    arrays = tuple(attention_cases.arrays(case))
    beta = sharpness.detach().cpu().double().numpy().reshape(-1, 1, 1, 1)
    wanted = reference.soft_attention_forward(*arrays, hasher, n_probes, beta, **words)
    assert_close(out, wanted)
    wanted = reference.soft_attention_backward(
        *(*arrays, hasher, case.grad_out.double().numpy(), n_probes, beta), **words
    )
    *wanted, of_sharpness = wanted
    for leaf, gradient in zip(leaves, wanted, strict=False):
        assert_close(leaf.grad, gradient)
    assert_close(sharpness.grad, of_sharpness.sum(0))
    if family == "hyperplane":
        assert planes.grad.shape == planes.shape and planes.grad.isfinite().all()


def soft(leaves, estimator, **words):
    out = yoso_attention(*leaves, estimator=estimator, seed=0, **words)
    out.backward(normal(*out.shape, seed=7).bfloat16().to(out))  # the same number in all dtypes
    return out, *(x.grad for x in leaves)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_public_attention(cuda_device, on_cpu, dtype, is_causal):
    # All that a benchmark has but its lengths: 64 columns, 4096 buckets.
    case = attention_cases.attention_inputs(30, 33, 64, 64, batch=1, heads=2, dtype=dtype)
    leaves = [leaf_of(x, cuda_device) for x in (case.query, case.key, case.value)]
    estimator = Soft(n_bits=12, n_hashes=8, n_probes=4)
    got = soft(leaves, estimator, is_causal=is_causal)
    # With tables of bfloat16 the CPU's result is no reference: it is rounded elsewhere.
    compute = torch.float32 if dtype is torch.bfloat16 else dtype
    on_host = [leaf_of(x.detach().to(compute)) for x in leaves]
    wanted = on_cpu(soft, on_host, estimator, is_causal=is_causal)
    assert got[0].dtype is dtype
    for a, b in zip(got, wanted, strict=True):
        if dtype is torch.bfloat16:
            difference = (a.detach().cpu().double() - b.detach().double()).norm()
            assert difference <= 2**-7 * b.detach().double().norm()
        else:
            assert_close(a, b.detach(), dtype)


@pytest.mark.parametrize("normalize", ["l2", "sum"])
def test_groups_and_packed_sequences(cuda_device, on_cpu, normalize):
    case = attention_cases.attention_inputs(40, 40, 12, 9, batch=1, heads=4)
    tensors = case.query, case.key[:, :2], case.value[:, :2]
    starts = torch.tensor([0, 13, 13, 40], dtype=torch.int32)
    words = dict(enable_gqa=True, is_causal=True, normalize=normalize)
    words["estimator"] = Soft(n_bits=5, n_hashes=3)
    leaves = [leaf_of(x, cuda_device) for x in tensors]
    got = soft(leaves, cu_seqlens=starts.to(cuda_device), **words)
    leaves = [leaf_of(x) for x in tensors]
    wanted = on_cpu(soft, leaves, cu_seqlens=starts, **words)
    for a, b in zip(got, wanted, strict=True):
        assert_close(a, b.detach())


def test_learned_projections(cuda_device, on_cpu):
    case = attention_cases.attention_inputs(25, 30, 12, batch=2, heads=2)
    planes = normal(2, 4 * 5, 12, seed=5)
    tensors = case.query, case.key, case.value

    def run(device):
        leaves = [leaf_of(x, device) for x in (*tensors, planes)]
        out = yoso_attention(
            *leaves[:3],
            estimator=Soft(hasher="hyperplane", n_bits=5, n_hashes=4),
            parameters={"planes": leaves[3]},
        )
        out.backward(case.grad_out.to(device))
        return out, *(x.grad for x in leaves)

    for a, b in zip(run(cuda_device), on_cpu(run, "cpu"), strict=True):
        assert_close(a, b.detach())


def test_bad_rows_and_the_same_bits_again(cuda_device):
    case = attention_cases.attention_inputs(60, 57, 64, batch=1, heads=2)
    tensors = [x.to(cuda_device) for x in (case.query, case.key, case.value)]
    tensors[0][0, 0, 3, 2] = float("nan")
    tensors[1][0, 0, 5, 1] = float("inf")

    def run():
        return soft([leaf_of(x, cuda_device) for x in tensors], Soft(n_bits=6, n_hashes=4))

    first, again = run(), run()
    bad = first[0].isnan().any(-1)
    assert bad[0, 0, 3] and bad.sum() == 1
    assert first[1][0, 0, 3].isnan().all() and first[2][0, 0, 5].isnan().all()
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a.nan_to_num(0), b.nan_to_num(0))


def test_module(cuda_device):
    module = YosoAttention(16, 2, estimator=Soft(n_bits=4, n_hashes=3)).to(cuda_device)
    out, _ = module(*(normal(2, 9, 16).to(cuda_device),) * 3, is_causal=True)
    out.sum().backward()
    assert module.in_proj_weight.grad.isfinite().all()


def test_errors(cuda_device):
    if cuda_device.type != "cuda":
        pytest.skip("needs a GPU")
    codes = torch.zeros(1, 1, 4, 6, dtype=torch.uint8).cuda()
    values, sums = torch.ones(1, 1, 4, 2).cuda(), torch.empty(1, 1, 4, 2).cuda()
    with pytest.raises(ValueError, match="key_weights: must be on the same device"):
        weights = torch.ones(1, 1, 4, 6)
        _C.weighted_bucket_sum(codes, None, 2, codes, weights, 2, values, 2, 0, None, 1.0, sums)


def test_cpu_and_gpu_select_the_same_bits(cuda_device, on_cpu):
    case = attention_cases.attention_inputs(50, 50, 64, batch=1, heads=2)
    query, key, value, planes, sharpness = operator_inputs(case, cuda_device, "hadamard", 12, 8)
    inputs = [query, key, value, None, None, None, planes, sharpness]
    options = torch_ops.FAMILY["hadamard"], 12, 8, 4, 4, False, 2
    got = torch_ops.soft_attention(*inputs, *options)[1:6]
    inputs = [None if x is None else x.detach().cpu() for x in inputs]
    wanted = on_cpu(torch_ops.soft_attention, *inputs, *options)[1:6]
    for a, b in zip(got, wanted, strict=True):
        a, b = (x.view(torch.float32) if x.dtype is torch.int32 else x for x in (a, b))  # margins
        equal = np.isclose(a.cpu().numpy(), b.numpy(), rtol=1e-5, atol=1e-6)
        assert equal.mean() > 0.995
