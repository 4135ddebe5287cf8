"""Hash parameters that CUDA makes from the seed against those of the CPU."""

import numpy as np
import pytest
from devices import needs_gpu

from lshkit import _C, hash_functions

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.cuda

from lshkit import torch_ops  # noqa: E402
from lshkit.attention import Sampled, yoso_attention  # noqa: E402
from lshkit.attention.arguments import seed_tensor  # noqa: E402

SEEDS = [0, 3, 2**31, 2**63 - 1]


def made(device, seed, *sizes, family="hadamard"):
    tensor = torch.tensor([seed], dtype=torch.int64, device=device)
    return torch_ops.hash_parameters(tensor, *sizes, torch_ops.FAMILY[family])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "sizes", [(1, 64, 8, 32), (12, 64, 8, 32), (3, 7, 1, 1), (5, 300, 13, 70), (2, 64, 16, 129)]
)
def test_parameters_are_those_of_the_cpu(cuda_device, seed, sizes):
    n_sets, *functions = sizes
    got = made(cuda_device, seed, *sizes)
    wanted = hash_functions.make_parameters("hadamard", *functions, n_sets, seed)
    assert got.device.type == cuda_device.type
    np.testing.assert_array_equal(got.cpu().numpy(), wanted)


def test_a_negative_seed_is_its_64_bits(cuda_device):
    got = made(cuda_device, -1, 1, 64, 8, 32)
    wanted = hash_functions.make_parameters("hadamard", 64, 8, 32, 1, 2**64 - 1)
    assert np.array_equal(got.cpu().numpy(), wanted)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("sizes", [(1, 64, 8, 32), (2, 10, 4, 5), (3, 7, 3, 1), (1, 1, 1, 1)])
def test_hyperplanes_are_those_of_the_cpu(cuda_device, seed, sizes):
    n_sets, *functions = sizes
    got = made(cuda_device, seed, *sizes, family="hyperplane")
    wanted = hash_functions.make_parameters("hyperplane", *functions, n_sets, seed)
    assert got.device.type == cuda_device.type and got.shape == wanted.shape
    np.testing.assert_array_max_ulp(got.cpu().numpy(), wanted, maxulp=4)  # of other logarithms


def test_errors_of_the_core(cuda_device):
    seed, out = torch.tensor([1], device=cuda_device), torch.empty(1, 4, 64, device=cuda_device)
    with pytest.raises(TypeError, match="seed: dtype int64 or uint64 is wanted, was float32"):
        _C.random_numbers(seed.float(), 3, out)
    with pytest.raises(TypeError, match="seed: dtype int64 is wanted, was uint64"):
        _C.random_numbers(torch.ones(2, dtype=torch.uint64, device=cuda_device), 3, out)
    with pytest.raises(ValueError, match=r"seed: one element of int64 is wanted, was \(2,\)"):
        _C.random_numbers(seed.repeat(2), 3, out)
    with pytest.raises(ValueError, match="out: columns as many as a power of two"):
        _C.random_numbers(seed, 3, out[..., :60].contiguous())
    with pytest.raises(ValueError, match="out: columns as many as a power of two"):
        _C.random_numbers(seed, 3, out[..., :32].contiguous())
    with pytest.raises(ValueError, match="n_angle_rows"):
        _C.random_numbers(seed, 5, out)
    with pytest.raises(ValueError, match="out: must be aligned to 16 bytes"):
        _C.random_numbers(seed, 3, torch.empty(257, device=cuda_device)[1:].view(1, 4, 64))
    _C.random_numbers(seed, 3, out[:0])
    with pytest.raises(TypeError, match="seed: dtype int64 or uint64 is wanted, was float32"):
        _C.random_normals(seed.float(), out)
    with pytest.raises(TypeError, match="out: dtype float32 is wanted, was float64"):
        _C.random_normals(seed, out.double())
    _C.random_normals(seed, out[:0])


# --- Seeds ----------------------------------------------------------------------------------------


def test_all_forms_of_a_seed_give_the_same_functions(cuda_device):
    query, key, value = torch.randn(3, 2, 2, 40, 16).to(cuda_device)
    for hasher in ("hadamard", "hyperplane"):
        estimator = Sampled(n_bits=4, n_hashes=8, expectation="never", hasher=hasher)
        outs = [
            yoso_attention(query, key, value, seed=seed, estimator=estimator)
            for seed in (7, torch.tensor(7), torch.tensor([7]), torch.tensor([7]).to(cuda_device))
        ]
        assert all(torch.equal(out, outs[0]) for out in outs)


def test_seeds_are_made_on_the_device(cuda_device):
    needs_gpu(cuda_device)
    device = torch.device("cuda", torch.cuda.current_device())
    for seed in (None, 3, torch.tensor(3), torch.tensor([3], device=device)):
        assert seed_tensor(seed, device).device == device
    torch.manual_seed(0)
    first = seed_tensor(None, device)
    torch.manual_seed(0)
    assert torch.equal(seed_tensor(None, device), first)
    with pytest.raises(ValueError, match="seed must be on the cpu, got a tensor on cuda"):
        seed_tensor(torch.tensor([3], device=device), torch.device("cpu"))
    with pytest.raises(ValueError, match="seed must be an integer from 0 to"):
        seed_tensor(torch.tensor(-1), device)


def test_the_same_codes_as_on_the_cpu(cuda_device):
    needs_gpu(cuda_device)
    query, key, value = torch.randn(3, 1, 2, 60, 16, generator=torch.Generator().manual_seed(0))
    estimator = Sampled(n_bits=6, n_hashes=16, expectation="never")
    options = dict(estimator=estimator, normalize=None, seed=5)
    wanted = yoso_attention(query, key, value, **options)
    out = yoso_attention(query.cuda(), key.cuda(), value.cuda(), **options).cpu()
    # A pair whose code differs, at a projection within rounding of zero, counts 1 / 16 the less.
    assert ((out - wanted).abs() > 1e-4).any(-1).float().mean() < 0.05
