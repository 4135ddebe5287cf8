"""The lower bound's gradient of 16-bit inputs on CUDA, which the tensor cores make, against the
definition: in every form that buckets take, by how many rows they have.

Without a GPU, a build with -DLSHKIT_CUDA=EMULATED runs the same tests on the kernels' source.
"""

import numpy as np
import pytest

from lshkit import reference

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.cuda
attention_cases = pytest.importorskip("cases.attention")

from lshkit import torch_ops  # noqa: E402
from lshkit.attention import Sampled, yoso_attention  # noqa: E402

# Of the roundings of g, g . v, the unit vectors and what a hash contributes, relative to the sizes
# of the terms that a number sums: their root mean square is what a sum of them has.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
# Queries, keys, columns, those of values, bits, hashes: buckets of pairs; of products; both, with
# more columns than a tile has; more bits than are sorted by.
SHAPES = [
    (70, 67, 16, 9, 5, 12),
    (90, 100, 24, 64, 1, 3),
    (130, 70, 80, 33, 2, 4),
    (40, 50, 16, 16, 12, 3),
]


def gradients(case, device, n_bits, n_hashes, is_causal, normalize, mask=None, starts=None):
    query, key, value, grad_out = (
        x.to(device) for x in (case.query, case.key, case.value, case.grad_out)
    )
    options = n_bits, is_causal, torch_ops.NORMALIZE[normalize]
    family = torch_ops.FAMILY["hadamard"]
    planes = torch_ops.hash_parameters(
        torch.tensor(3), query.shape[1], query.shape[-1], n_bits, n_hashes, family
    )
    rest = None if mask is None else mask.to(device), starts, starts
    _, *codes, _ = torch_ops.yoso_attention(
        *(query, key, value, *rest, planes.to(device), family, n_bits, n_hashes),
        *(*options[1:], 0),
    )
    got = torch_ops.yoso_attention_backward(
        *(grad_out, query, key, value, *rest, *codes, *options),
        torch_ops.GRADIENT["lower_bound"],
    )
    return got, [c.cpu().numpy() for c in codes]


def assert_near(got, wanted, tolerance, terms):
    """Relative to the root mean square of a row of the terms, or of all rows where that is more."""
    got, wanted, terms = (torch.as_tensor(x).double().cpu() for x in (got, wanted, terms))
    size = terms.square().mean(-1, keepdim=True).sqrt()
    size = size.clamp_min(terms.square().mean().sqrt().item())
    error = (got - wanted).abs()
    assert (error <= tolerance * (size + wanted.abs())).all(), (error / size).max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("is_causal", "normalize"), [(False, "l2"), (True, "l2"), (False, "sum"), (True, "sum")]
)
def test_lower_bound(cuda_device, dtype, shape, is_causal, normalize):
    *sizes, n_bits, n_hashes = shape
    case = attention_cases.attention_inputs(*sizes, dtype=dtype)
    mask = attention_cases.padding_mask(2, sizes[1])
    got, codes = gradients(case, cuda_device, n_bits, n_hashes, is_causal, normalize, mask)
    arrays, words = tuple(attention_cases.arrays(case)), {"gradient": "lower_bound"}
    rules = attention_cases.reference_options(mask, is_causal, normalize)
    grad_out = case.grad_out.double().numpy()
    wanted = reference.yoso_backward(*arrays, *codes, grad_out, n_bits, **words, **rules)
    # Each a difference: of g . v and of its mean over what a query sees, or of its part along the
    # output, which is all of it where a query sees one key.
    rules["normalize"] = None
    values = np.ones_like(arrays[2][..., :1]) if normalize == "sum" else arrays[2]
    sums = reference.yoso_forward(*arrays[:2], values, *codes, **rules)
    sums = np.linalg.norm(sums, axis=-1, keepdims=True)
    g = np.divide(grad_out, sums, where=sums > 0, out=np.zeros_like(grad_out))
    terms = reference.yoso_backward(*arrays, *codes, g, n_bits, **words, **rules)
    for a, b, size in zip(got, wanted, terms, strict=True):
        assert a.dtype is dtype
        assert_near(a, b, TOLERANCE[dtype], size)


@pytest.mark.parametrize("scale", [2.0**-8, 2.0**8])
def test_scaled_losses_in_float16(cuda_device, scale):
    case = attention_cases.attention_inputs(70, 90, 16, 9, dtype=torch.float16)
    plain, _ = gradients(case, cuda_device, 1, 3, False, None)
    case.grad_out = case.grad_out * scale
    got, _ = gradients(case, cuda_device, 1, 3, False, None)
    for a, b in zip(got, plain, strict=True):
        assert_near(a, b * scale, TOLERANCE[torch.float16], b * scale)


def test_same_bits_again(cuda_device):
    case = attention_cases.attention_inputs(300, 257, 32, batch=1, heads=2, dtype=torch.bfloat16)
    first, second = (gradients(case, cuda_device, 3, 8, True, "l2")[0] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


SUBSET = Sampled(n_bits=2, n_hashes=6, expectation="never", gradient_hashes=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalize", [None, "l2", "sum"])
def test_subset_of_the_hashes(cuda_device, normalize, dtype):
    """Of the first two hashes' codes, with the sums that the output keeps of all six."""
    case = attention_cases.attention_inputs(40, 37, 16, 9, dtype=dtype)
    query, key, value, grad_out = (
        x.to(cuda_device) for x in (case.query, case.key, case.value, case.grad_out)
    )
    planes = torch_ops.hash_parameters(torch.tensor(3), 3, 16, 2, 6, 1).to(cuda_device)
    options = False, torch_ops.NORMALIZE[normalize], 0
    inputs = query, key, value, None, None, None
    out, *codes, divisors = torch_ops.yoso_attention(*inputs, planes, 1, 2, 6, *options)
    got = torch_ops.yoso_attention_backward(
        *(grad_out, *inputs, *codes, 2, *options),
        gradient_hashes=2,
        out=out,
        divisors=divisors,
    )
    arrays = tuple(attention_cases.arrays(case))
    numbers = [c.cpu().numpy() for c in codes]
    wanted = subset_gradients(arrays, numbers, 2, case.grad_out.double().numpy(), normalize)
    tolerance = TOLERANCE.get(dtype, 1e-4)
    for a, b in zip(got, wanted, strict=True):
        assert_near(a, b, tolerance, b)


def subset_gradients(arrays, codes, count, grad_out, normalize):
    """By the reference: the gradient of the sums of all hashes, then that of a few of them."""
    n_bits = 2
    *_, grad_value = reference.yoso_backward(*arrays, *codes, grad_out, n_bits, normalize=normalize)
    few = [c[..., :count] for c in codes]
    if normalize is None:
        g = grad_out
    else:
        sums = reference.yoso_forward(*arrays, *codes, normalize=None)
        ones = np.ones_like(arrays[2][..., :1])
        weights = reference.yoso_forward(*arrays[:2], ones, *codes, normalize=None)
    if normalize == "l2":
        norm = np.linalg.norm(sums, axis=-1, keepdims=True)
        unit = sums / norm
        g = (grad_out - (grad_out * unit).sum(-1, keepdims=True) * unit) / norm
    if normalize == "sum":  # the ones' column has the gradient -g . y
        g = grad_out / weights
        ones_grad = -(g * sums / weights).sum(-1, keepdims=True)
        g, value = np.concatenate([g, ones_grad], -1), np.concatenate([arrays[2], ones], -1)
        arrays = *arrays[:2], value
    grads = reference.yoso_backward(*arrays, *few, g, n_bits, normalize=None)
    return *grads[:2], grad_value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_subset_is_unbiased(cuda_device, dtype):
    """The mean over hash functions is the expectation's lower bound, within 4 standard errors."""
    n, heads, calls = 24, 60, 3
    case = attention_cases.attention_inputs(n, n, 8, 8, batch=1, heads=1, dtype=dtype)
    one = case.query, case.key, case.value, case.grad_out

    def gradients_of(estimator, heads, seed):
        *leaves, grad_out = (x.expand(1, heads, n, 8).to(cuda_device) for x in one)
        leaves = [x.detach().requires_grad_() for x in leaves]
        out = yoso_attention(*leaves, estimator=estimator, seed=seed, normalize=None)
        return torch.stack(torch.autograd.grad(out, leaves, grad_out)[:2])[:, 0].double().cpu()

    wanted = gradients_of(SUBSET.mean, 1, 0)
    samples = torch.cat([gradients_of(SUBSET, heads, seed) for seed in range(calls)], 1) - wanted
    directions = torch.randn(20, *wanted[:, 0].shape, generator=torch.Generator().manual_seed(1))
    errors = torch.einsum("shnd,ksnd->kh", samples, directions.double())
    assert (errors.mean(1).abs() < 4 * errors.std(1) / (heads * calls) ** 0.5).all()
