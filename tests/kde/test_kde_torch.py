"""Densities of torch tensors: the same numbers, and gradients of the exact path."""

import numpy as np
import pytest
from cases.kde import KERNELS

from lshkit.kde import LSHKernelDensity

torch = pytest.importorskip("torch")

rng = np.random.default_rng(0)
ROWS, QUERIES = rng.normal(size=(100, 3)), rng.normal(size=(3, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors_in_tensors_out(dtype):
    rows, queries = (torch.tensor(x, dtype=dtype) for x in (ROWS, QUERIES))
    for options in (
        dict(algorithm="brute"),
        dict(kernel="angular", algorithm="bucket_sum", normalize=False, random_state=0),
    ):
        density = LSHKernelDensity(**options).fit(rows)
        plain = LSHKernelDensity(**options).fit(rows.numpy())
        score, std = density.score_samples(queries, return_std=True)
        assert score.dtype == std.dtype == dtype
        assert np.array_equal(score.numpy(), plain.score_samples(queries.numpy()))
        if not density.normalize:
            assert torch.allclose(density.kernel_mean(queries), score.exp(), rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_as_a_tensor(dtype):
    weights = torch.linspace(0, 2, 100, dtype=dtype, requires_grad=True)
    density, plain = (
        LSHKernelDensity(algorithm="brute").fit(ROWS, sample_weight=x)
        for x in (weights, weights.detach().double().numpy())
    )
    assert np.array_equal(density.score_samples(QUERIES), plain.score_samples(QUERIES))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype, requires_grad):
    """float32, which holds the log-densities of queries far from all rows."""
    rows = torch.tensor(ROWS, dtype=dtype)
    queries = torch.cat((torch.tensor(QUERIES, dtype=dtype), rows[:1] + 500))
    density = LSHKernelDensity(algorithm="brute").fit(rows)
    plain = LSHKernelDensity(algorithm="brute").fit(rows.double())
    std = density.score_samples(queries, True)[1]
    queries.requires_grad_(requires_grad)
    score, mean = density.score_samples(queries), density.kernel_mean(queries)
    assert score.dtype == mean.dtype == std.dtype == torch.float32
    exact = queries.detach().double()
    torch.testing.assert_close(score.detach(), plain.score_samples(exact).float())
    torch.testing.assert_close(mean.detach(), plain.kernel_mean(exact).float())
    assert score[-1] < torch.finfo(torch.float16).min


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients(kernel):
    bandwidth = 1.0 if kernel == "angular" else np.array([2.0, 2.5, 3.0])
    density = LSHKernelDensity(kernel, bandwidth, algorithm="brute", normalize=kernel != "angular")
    density.fit(ROWS, sample_weight=rng.uniform(0.1, 1, 100))
    x = torch.tensor(QUERIES, requires_grad=True)
    score = density.score_samples(x)
    assert np.allclose(score.detach(), density.score_samples(QUERIES), atol=1e-6)
    if kernel == "tophat":  # piecewise constant
        assert not torch.autograd.grad(score.sum(), x)[0].any()
        return
    assert density.score(x) == pytest.approx(density.score(QUERIES))
    assert torch.autograd.gradcheck(density.score_samples, (x,), atol=1e-5)
    mean = density.kernel_mean(x)
    assert np.allclose(mean.detach(), density.kernel_mean(QUERIES), rtol=1e-6)
    wanted = mean.detach()[:, None] * torch.autograd.grad(score.sum(), x)[0]
    torch.testing.assert_close(torch.autograd.grad(mean.sum(), x)[0], wanted)
    if kernel == "gaussian":
        assert torch.autograd.gradgradcheck(density.score_samples, (x[:1],), atol=1e-5)


def test_gradients_at_a_row_and_far_away_are_finite():
    for kernel in ("gaussian", "exponential", "laplacian", "linear", "angular"):
        density = LSHKernelDensity(kernel, algorithm="brute", normalize=False).fit(ROWS)
        x = torch.tensor(np.r_[ROWS[:2], 100 * ROWS[:1]], requires_grad=True)
        (gradient,) = torch.autograd.grad(density.score_samples(x)[:2].sum(), x)
        assert torch.isfinite(gradient).all()
    density = LSHKernelDensity(algorithm="brute").fit(ROWS)
    x = torch.full((1, 3), 1e4, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(density.score_samples(x).sum(), x)
    nearest = ROWS[np.argmin(((x.detach().numpy() - ROWS) ** 2).sum(1))]
    assert np.allclose(gradient.numpy(), nearest - 1e4, rtol=1e-3)  # no underflow


@pytest.mark.parametrize("kernel", ["gaussian", "exponential", "laplacian"])
def test_gradients_beside_far_rows_are_of_rows_as_given(kernel):
    rows = np.r_[ROWS[:50], ROWS[50:100] + [1e17, 0, 0]]
    density = LSHKernelDensity(kernel, 0.7, algorithm="brute", normalize=False).fit(rows)
    x, y = (torch.tensor(ROWS[:20] + 0.1, requires_grad=True) for _ in range(2))
    differences = (y[:, None] - torch.tensor(rows)) / 0.7
    if kernel == "gaussian":
        logs = -0.5 * differences.square().sum(-1)
    else:
        logs = -differences.norm(p=1 if kernel == "laplacian" else 2, dim=-1)
    wanted, score = logs.logsumexp(1) - np.log(100), density.score_samples(x)
    assert torch.allclose(score, wanted, rtol=0, atol=1e-9)
    gradients = [torch.autograd.grad(s.sum(), v)[0] for s, v in ((score, x), (wanted, y))]
    assert torch.allclose(*gradients, rtol=0, atol=1e-9)


@pytest.mark.parametrize("scale", [1e160, 1e-200])
def test_angular_gradients_of_rows_of_any_norm(scale):
    density = LSHKernelDensity("angular", algorithm="brute", normalize=False).fit(ROWS)
    x, y = (torch.tensor(s * QUERIES, requires_grad=True) for s in (1.0, scale))
    scores = density.score_samples(x), density.score_samples(y)
    assert torch.allclose(*scores, atol=1e-12)
    plain, scaled = (
        torch.autograd.grad(s.sum(), v)[0] for s, v in zip(scores, (x, y), strict=True)
    )
    assert torch.allclose(scale * scaled, plain, atol=1e-12)


@pytest.mark.parametrize("side", [1, -1])
@pytest.mark.parametrize("angle", [1e-2, 1e-4, 1e-6, 1e-8])
def test_angular_gradients_at_small_angles(angle, side):
    """The angle's are unit vectors, and the score's 8 over the agreement, at any angle."""
    density = LSHKernelDensity("angular", n_bits=8, rtol=0, normalize=False).fit([[side, 0.0]])
    query = [[np.cos(angle), np.sin(angle)]]
    x = torch.tensor(query, dtype=torch.float64, requires_grad=True)
    score = density.score_samples(x)
    agreement = 1 - angle / np.pi if side > 0 else angle / np.pi
    torch.testing.assert_close(score.item(), 8 * np.log(agreement), rtol=1e-7, atol=1e-8)
    (gradient,) = torch.autograd.grad(score, x, create_graph=True)
    away = side * torch.tensor([[np.sin(angle), -np.cos(angle)]])
    wanted = 8 / (np.pi * agreement) * away
    torch.testing.assert_close(gradient.detach(), wanted, rtol=1e-6, atol=1e-7 * wanted.abs().max())
    (second,) = torch.autograd.grad((gradient * away).sum(), x)
    along = (second * away).sum().item()  # of log(1 - t / pi) and of log(t / pi), by t twice
    assert np.isclose(along, -8 / (np.pi * agreement) ** 2, rtol=1e-4, atol=1e-3)


def test_angular_gradients_of_equal_and_opposite_rows_are_zero():
    density = LSHKernelDensity("angular", n_bits=8, rtol=0, normalize=False)
    density.fit([[1.0, 0.3], [-1.0, -0.3]])
    x = torch.tensor([[2.0, 0.6], [-2.0, -0.6]], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(density.score_samples(x).sum(), x, create_graph=True)
    assert not gradient.any() and not torch.autograd.grad(gradient.sum(), x)[0].any()


@pytest.mark.parametrize("kernel", ["gaussian", "exponential", "linear"])
def test_gradients_far_from_the_centre(kernel):
    rows = np.r_[ROWS - 1e8, ROWS + 1e8]
    density = LSHKernelDensity(kernel, 2.0, algorithm="brute").fit(rows)
    near = LSHKernelDensity(kernel, 2.0, algorithm="brute").fit(np.round((rows - 1e8)[100:], 7))
    x = torch.tensor(QUERIES + 1e8, requires_grad=True)
    y = (x - 1e8).detach().requires_grad_()
    scores = density.score_samples(x), near.score_samples(y) - np.log(2)
    assert torch.allclose(*scores, atol=1e-5)
    gradients = (torch.autograd.grad(s.sum(), v)[0] for s, v in zip(scores, (x, y), strict=True))
    assert torch.allclose(*gradients, atol=1e-5)


@pytest.mark.parametrize("kernel", ["gaussian", "exponential", "laplacian"])
@pytest.mark.parametrize("far", [1e12, 1e17, 1e30])
def test_gradients_of_log_densities_that_hold_no_sum(kernel, far):
    """Those of the kernel of the nearest rows, not as many times that as there are rows."""
    density = LSHKernelDensity(kernel, algorithm="brute").fit(ROWS)
    x = torch.tensor([[far, -far / 3, 1.0]], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(density.score_samples(x).sum(), x)
    wanted = -x / {"gaussian": 1, "exponential": x.norm(), "laplacian": x.abs()}[kernel]
    if kernel == "laplacian":
        gradient, wanted = gradient[:, :2], wanted[:, :2]
    torch.testing.assert_close(gradient, wanted.detach(), rtol=1e-6, atol=1e-6 * far)


def test_sampled_methods_refuse_gradients():
    density = LSHKernelDensity(algorithm="random", random_state=0).fit(np.tile(ROWS, (24, 1)))
    x = torch.tensor(QUERIES, requires_grad=True)
    exact = LSHKernelDensity(rtol=0).fit(ROWS)
    for name in ("score_samples", "kernel_mean"):
        with pytest.raises(ValueError, match="brute"):
            getattr(density, name)(x)
        with torch.no_grad():
            assert getattr(density, name)(x).shape == (3,)
        with pytest.raises(ValueError, match="return_std"):
            getattr(exact, name)(x, return_std=True)


@pytest.mark.parametrize("kernel", ["tophat", "epanechnikov", "linear", "cosine"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_beyond_all_rows_the_density_is_zero_with_a_gradient_too(kernel, dtype):
    density = LSHKernelDensity(kernel, 2.0, rtol=0).fit(ROWS)
    x = torch.zeros(2, ROWS.shape[1], dtype=dtype)
    x[1] = 50
    logs = density.score_samples(x.requires_grad_())
    assert logs[0].isfinite() and logs[1] == -torch.inf
    (gradient,) = torch.autograd.grad(logs[0], x)
    assert gradient.isfinite().all()
