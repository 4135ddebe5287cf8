"""The operator soft_hash: gradients against float64 autograd, opcheck, compile, autocast, vmap."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cases.attention import bits_of_margins  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

from lshkit import reference, torch_ops  # noqa: E402
from lshkit.hash_functions import FAMILY, make_parameters  # noqa: E402
from lshkit.hashing import FastHadamard, Hyperplane  # noqa: E402

OPS = torch.ops.lshkit
FAMILIES = {"hyperplane": Hyperplane, "hadamard": FastHadamard}
both_families = pytest.mark.parametrize("family", FAMILIES)


def rows_of(parameters, family, n_bits, n_hashes):
    """The projections of a unit row as a matrix `(sets, n_hashes, n_bits, n_features)`, float64."""

    def matrix(one, n_features):
        eye = reference.projections(np.eye(n_features), one, family, n_bits, n_hashes)
        scale = one.shape[-1] if family == "hadamard" else 1
        return torch.from_numpy(np.moveaxis(eye, 0, -1) / scale)

    return lambda n_features: torch.stack([matrix(one.numpy(), n_features) for one in parameters])


def weights_of(unit, matrix, sharpness, codes, selected, n_probes):
    """Weights `(batch, heads, n, n_hashes, n_probes)` for a given selection, by plain torch."""
    z = torch.einsum("bhnd,hmtd->bhnmt", unit, matrix.expand(unit.shape[1], -1, -1, -1))
    bits = bits_of_margins(selected)
    signs = torch.where(codes.long()[..., None] >> bits & 1 == 1, 1, -1)
    margins = z.gather(-1, bits) * signs
    flipped = torch.arange(n_probes)[:, None] >> torch.arange(bits.shape[-1]) & 1
    logits = -2 * sharpness.view(-1, 1, 1, 1) * (flipped * margins[..., None, :]).sum(-1)
    return logits.softmax(-1)


def problem(family, d, n_bits, n_hashes, n_sets, n_sharpness, n=19, seed=0):
    parameters = torch.from_numpy(
        make_parameters(family, d, n_bits, n_hashes, n_sets=n_sets, seed=seed)
    )
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, n, d, generator=generator)
    sharpness = 1 + torch.rand(n_sharpness, generator=generator)
    return x, parameters, sharpness, generator


@both_families
@pytest.mark.parametrize("n_probes", [1, 2, 3, 4, 5, 8, 12, 16])
@pytest.mark.parametrize(
    ("d", "n_bits", "n_hashes"), [(1, 4, 3), (7, 4, 5), (64, 12, 32), (80, 8, 33), (200, 9, 70)]
)
def test_gradients(family, d, n_bits, n_hashes, n_probes):
    """Of the rows, the sharpness and the planes: float64 autograd for the selected bits."""
    n_sets, n_sharpness = (3, 1) if n_probes % 2 else (1, 3)
    x, parameters, sharpness, generator = problem(
        family, d, n_bits, n_hashes, n_sets, n_sharpness, seed=n_probes
    )
    inputs = [t.requires_grad_() for t in (x, parameters, sharpness)]
    options = FAMILY[family], n_bits, n_hashes, n_probes
    weights, _, codes, selected = torch_ops.soft_hash(*inputs, *options)
    grad = torch.randn(weights.shape, generator=generator)
    wanted_inputs = [t.detach().double().requires_grad_() for t in inputs]
    if family == "hyperplane":
        matrix = wanted_inputs[1].view(n_sets, n_hashes, n_bits, d)
    else:
        matrix = rows_of(parameters.detach(), family, n_bits, n_hashes)(d)
    unit = wanted_inputs[0] / wanted_inputs[0].norm(dim=-1, keepdim=True)
    wanted = weights_of(unit, matrix, wanted_inputs[2], codes, selected, n_probes)
    torch.testing.assert_close(weights.detach(), wanted.float().detach(), rtol=1e-5, atol=1e-5)

    gradients = torch.autograd.grad(weights, inputs, grad, allow_unused=True)
    # What the gradient of sharpness sums, without its signs.
    likelihood = (wanted / wanted[..., :1]).detach()
    s_scale = (grad * wanted * likelihood.log()).abs().sum().detach() / sharpness.detach().min()
    wanted = torch.autograd.grad(
        wanted, [*wanted_inputs, unit], grad.double(), allow_unused=True, materialize_grads=True
    )
    # Through the norm a part cancels, all of it for one feature: what counts is the length before.
    x_scale = wanted[3].norm(dim=-1, keepdim=True) / wanted_inputs[0].norm(dim=-1, keepdim=True)
    scales = x_scale, wanted[1].abs().max(), s_scale
    for got, expected, scale, name in zip(
        gradients, wanted, scales, ("x", "planes", "sharpness"), strict=False
    ):
        if name == "planes" and family == "hadamard":
            assert got is None
        else:  # the margins have 20 bits, and there are some terms to round
            assert (got - expected).abs().le(2e-5 * scale + 1e-12).all(), name


@both_families
def test_gradient_is_that_of_finite_differences(family):
    """Nothing fixed: the whole of soft_hash in float64, at rows that lie far from ties."""
    hasher = FAMILIES[family](12, 5, 4, seed=0)
    x = np.random.default_rng(0).standard_normal((200, 12)).astype(np.float32)
    z = np.sort(np.abs(projections(hasher, x)), -1)
    far = (z[..., 0].min(-1) > 1e-3) & (np.diff(z, axis=-1)[..., :2].min((-1, -2)) > 2e-4)
    x = x[far][:5]
    assert len(x) == 5
    grad = np.random.default_rng(1).standard_normal((5, 4, 4))

    def loss(x):
        return (reference.soft_codes(projections(hasher, x), 4, 2.0)[1] * grad).sum((-1, -2))

    step, wanted = 1e-6, np.empty(x.shape)
    for c in range(12):
        e = step * np.eye(12)[c]
        wanted[:, c] = (loss(np.float64(x) + e) - loss(np.float64(x) - e)) / (2 * step)
    tensor = torch.from_numpy(x).requires_grad_()
    _, weights = hasher.soft_hash(tensor, 4, 2.0)
    (weights * torch.from_numpy(grad).float()).sum().backward()
    np.testing.assert_allclose(tensor.grad.numpy(), wanted, atol=2e-5 * np.abs(wanted).max())


def projections(hasher, x):
    sizes = hasher.family, hasher.n_bits, hasher.n_hashes
    return reference.unit_projections(x, hasher.parameters, *sizes)


@both_families
def test_gradients_of_rows_without_a_direction(family):
    """Zeros have none, NaN rows NaN; neither reaches another row or the parameters."""
    x, parameters, sharpness, generator = problem(family, 20, 5, 7, 1, 1)
    grad = torch.randn(2, 3, 19, 7, 4, generator=generator)
    options = FAMILY[family], 5, 7, 4
    bad = torch.zeros(2, 3, 19, dtype=torch.bool)
    bad[0, 1, 3] = bad[1, 2, 18] = bad[1, 0, 0] = True

    def gradients(x):
        inputs = [t.clone().requires_grad_() for t in (x, parameters, sharpness)]
        weights = torch_ops.soft_hash(*inputs, *options)[0]
        return torch.autograd.grad(weights, inputs, grad * ~bad[..., None, None], allow_unused=True)

    clean = gradients(x)
    x[0, 1, 3] = 0
    x[1, 2, 18, 5] = torch.nan
    x[1, 0, 0, 0] = torch.inf
    spoiled = gradients(x)
    assert not spoiled[0][0, 1, 3].any()
    assert spoiled[0][1, 2, 18].isnan().all() and spoiled[0][1, 0, 0].isnan().all()
    assert torch.equal(spoiled[0][~bad], clean[0][~bad])
    torch.testing.assert_close(spoiled[2], clean[2])
    if family == "hyperplane":
        torch.testing.assert_close(spoiled[1], clean[1])


# ---------------------------------------------------------------- torch in, torch out


@both_families
@pytest.mark.parametrize("n_bits", [8, 9])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_torch_equals_numpy(family, shape, n_bits):
    hasher = FAMILIES[family](7, n_bits, 5, seed=0)
    x = np.random.default_rng(0).standard_normal((*shape, 7)).astype(np.float32)
    wanted_codes, wanted_weights = hasher.soft_hash(x, 4, 1.5)
    for tensor in (torch.from_numpy(x), torch.from_numpy(x).double().requires_grad_()):
        for sharpness in (1.5, torch.tensor(1.5), torch.tensor([1.5], dtype=torch.float64)):
            codes, weights = hasher.soft_hash(tensor, 4, sharpness)
            assert codes.dtype == torch_ops.code_dtype(n_bits)
            assert weights.dtype == torch.float32
            assert weights.requires_grad == tensor.requires_grad
            assert not codes.requires_grad
            np.testing.assert_array_equal(codes.numpy(), wanted_codes)
            np.testing.assert_array_equal(weights.detach().numpy(), wanted_weights)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_have_the_type_of_their_inputs(dtype):
    hasher = FastHadamard(7, 8, 5, seed=0)
    x = torch.randn(6, 7, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    sharpness = torch.tensor(2.0, dtype=dtype, requires_grad=True)
    _, weights = hasher.soft_hash(x, 4, sharpness)
    weights.square().sum().backward()
    assert x.grad.dtype == sharpness.grad.dtype == dtype
    full, full_sharpness = (t.detach().float().requires_grad_() for t in (x, sharpness))
    _, weights = hasher.soft_hash(full, 4, full_sharpness)
    weights.square().sum().backward()
    assert torch.equal(full.grad.to(dtype), x.grad)
    assert torch.equal(full_sharpness.grad.to(dtype), sharpness.grad)


def test_strided_rows():
    hasher = FastHadamard(7, 8, 5, seed=0)
    x = torch.randn(4, 7, 6).transpose(1, 2).requires_grad_()
    codes, weights = hasher.soft_hash(x, 4, 2.0)
    grad = torch.randn(weights.shape)
    (gradient,) = torch.autograd.grad(weights, x, grad)
    dense = x.detach().contiguous().requires_grad_()
    dense_codes, dense_weights = hasher.soft_hash(dense, 4, 2.0)
    assert torch.equal(codes, dense_codes) and torch.equal(weights, dense_weights)
    assert torch.equal(gradient, torch.autograd.grad(dense_weights, dense, grad)[0])
    (total,) = torch.autograd.grad(hasher.soft_hash(x, 4, 2.0)[1].sum(), x)  # stride 0
    assert total.abs().max() < 1e-5  # the weights sum to one


# ---------------------------------------------------------------- opcheck, compile, transforms


@both_families
@pytest.mark.parametrize(("n_bits", "n_probes", "n_sets"), [(8, 1, 3), (9, 3, 1), (9, 4, 3)])
def test_opcheck(family, n_bits, n_probes, n_sets):
    x, parameters, sharpness, _ = problem(family, 20, n_bits, 5, n_sets, n_sets)
    options = FAMILY[family], n_bits, 5, n_probes
    inputs = [x.requires_grad_(), parameters, sharpness.requires_grad_()]
    if family == "hyperplane":
        parameters.requires_grad_()
    torch.library.opcheck(OPS.soft_hash.default, (*inputs, *options))
    inputs = [t.detach() for t in inputs]
    weights, _, *saved = OPS.soft_hash(*inputs, *options)
    for parameters_too in {False, family == "hyperplane"}:
        torch.library.opcheck(
            OPS.soft_hash_backward.default,
            (torch.randn(weights.shape), *inputs, *saved, weights, *options[:2], parameters_too),
        )


def test_numbers_of_bits_beyond_the_code_count_as_the_last():
    x, parameters, sharpness, _ = problem("hyperplane", 20, 8, 5, 1, 1)
    weights, _, codes, margins = OPS.soft_hash(x, parameters, sharpness, 0, 8, 5, 4)

    def gradients(bit):
        saved = codes, margins & ~15 | bit, weights
        return OPS.soft_hash_backward(weights, x, parameters, sharpness, *saved, 0, 8, True)

    for got, wanted in zip(gradients(15), gradients(7), strict=True):
        assert torch.equal(got, wanted)


def test_compile_once_for_all_steps():
    def step(x, seed, sharpness):
        parameters = OPS.hash_parameters(seed, 3, 20, 9, 5, 1)
        return torch_ops.soft_hash(x, parameters, sharpness, 1, 9, 5, 4)[0].square().sum()

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(step, fullgraph=True, backend=counter)
    for seed in range(3):
        x, _, sharpness, _ = problem("hadamard", 20, 9, 5, 1, 3, seed=seed)
        inputs = x.requires_grad_(), torch.tensor(seed), sharpness.requires_grad_()
        results = [f(*inputs) for f in (fast, step)]
        assert torch.equal(*results)
        gradients = [torch.autograd.grad(r, (x, sharpness)) for r in results]
        for a, b in zip(*gradients, strict=True):
            assert torch.equal(a, b)
    assert counter.frame_count == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    """Soft codes stay in float32, as codes do."""
    hasher = FastHadamard(20, 8, 5, seed=0)
    x = torch.randn(9, 20, requires_grad=True)
    sharpness = torch.tensor(2.0, requires_grad=True)
    plain = hasher.soft_hash(x, 4, sharpness)
    with torch.autocast("cpu", dtype=dtype):
        cast = hasher.soft_hash(x, 4, sharpness)
    assert torch.equal(plain[0], cast[0]) and torch.equal(plain[1], cast[1])
    gradients = [torch.autograd.grad(w.square().sum(), (x, sharpness)) for _, w in (plain, cast)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@both_families
def test_transforms(family):
    """vmap over batches, sharpness and functions; gradients of each sample; jacobians."""
    x, parameters, sharpness, _ = problem(family, 20, 9, 5, 3, 3, n=4)
    options = FAMILY[family], 9, 5, 4

    def weights(x, parameters, sharpness):
        return torch_ops.soft_hash(x, parameters, sharpness, *options)[0]

    many = torch.randn(2, 3, 4, 6, 20)
    out = torch.func.vmap(weights, in_dims=(3, None, None))(many, parameters, sharpness)
    wanted = [weights(many[..., i, :], parameters, sharpness) for i in range(6)]
    assert torch.equal(out, torch.stack(wanted))
    several = torch.stack([sharpness, 2 * sharpness])
    out = torch.func.vmap(weights, in_dims=(None, None, 0))(x, parameters, several)
    assert torch.equal(out, torch.stack([weights(x, parameters, s) for s in several]))

    def loss(x, parameters, sharpness):
        return weights(x[None], parameters, sharpness).square().sum()

    argnums = (0, 1, 2) if family == "hyperplane" else (0, 2)
    each = torch.func.vmap(torch.func.grad(loss, argnums=argnums), in_dims=(0, None, None))
    gradients = each(x, parameters, sharpness)
    for i in range(2):
        inputs = [t.clone().requires_grad_() for t in (x[i], parameters, sharpness)]
        wanted = torch.autograd.grad(loss(*inputs), [inputs[a] for a in argnums])
        for a, b in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(a[i], b)


def test_once_differentiable_and_not_forward():
    hasher = FastHadamard(7, 8, 5, seed=0)
    x = torch.randn(3, 7, requires_grad=True)

    def loss(x):
        return hasher.soft_hash(x, 4, 2.0)[1].square().sum()

    (grad,) = torch.autograd.grad(loss(x), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="can be differentiated once"):
        grad.sum().backward()
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(loss, (x.detach(),), (x.detach(),))


def test_a_whole_graph_with_the_check_of_rows():
    hasher, x = FastHadamard(5, 4, 3, seed=0), torch.randn(6, 5)
    compiled = torch.compile(
        lambda a: hasher.soft_hash(a, 2, 1.5)[1], fullgraph=True, backend="eager"
    )
    assert torch.equal(compiled(x), hasher.soft_hash(x, 2, 1.5)[1])
    with pytest.raises(ValueError, match="row 0"):
        hasher.soft_hash(x * torch.nan, 2, 1.5)
