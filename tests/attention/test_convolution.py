"""The convolution along positions is torch's, and so are its gradients."""

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402

from lshkit.attention import Sampled, YosoAttention  # noqa: E402
from lshkit.attention.convolution import convolve_positions  # noqa: E402


def conv2d(value, weight, before):
    after = weight.shape[-1] - 1 - before
    padded = F.pad(value, (0, 0, before, after))
    return F.conv2d(padded, weight[:, None, :, None], groups=weight.shape[0])


@pytest.mark.parametrize("n", [1, 31, 32, 33, 100])
@pytest.mark.parametrize(("width", "before"), [(1, 0), (3, 1), (33, 16), (33, 32), (7, 0)])
def test_outputs_and_gradients_are_those_of_conv2d(n, width, before):
    torch.manual_seed(n)
    value = torch.randn(2, n, 3, 5, dtype=torch.float64).transpose(1, 2).requires_grad_()
    weight = torch.randn(3, width, dtype=torch.float64, requires_grad=True)
    grad_out = torch.randn(2, 3, n, 5, dtype=torch.float64)
    out, wanted = (f(value, weight, before) for f in (convolve_positions, conv2d))
    torch.testing.assert_close(out, wanted)
    for got, gradient in zip(
        torch.autograd.grad(out, (value, weight), grad_out),
        torch.autograd.grad(wanted, (value, weight), grad_out),
        strict=True,
    ):
        torch.testing.assert_close(got, gradient)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(("width", "before"), [(1, 0), (5, 4), (33, 16)])
def test_a_row_that_is_not_finite_reaches_those_whose_kernel_reads_it(width, before, bad):
    torch.manual_seed(0)
    value, weight = torch.randn(1, 2, 100, 3), torch.randn(2, width)
    value[0, 1, 40, 2] = bad
    reached = torch.zeros(100, dtype=torch.bool)
    reached[40 - (width - 1 - before) : 40 + before + 1] = True
    wanted = conv2d(value, weight, before)
    out = convolve_positions(value, weight, before)
    mapped = torch.func.vmap(lambda x: convolve_positions(x, weight, before))(value[None])[0]
    torch._dynamo.reset()  # or other tests' graphs count
    compiled = torch.compile(convolve_positions, backend="aot_eager", fullgraph=True)
    for got in (out, mapped, compiled(value, weight, before)):
        assert torch.equal(~got[0, 1].isfinite().all(-1), reached)
        good = got.isfinite()
        torch.testing.assert_close(got[good], wanted[good])
    value = torch.randn(1, 2, 100, 3, requires_grad=True)
    grad_out = torch.randn(1, 2, 100, 3)
    grad_out[0, 1, 40, 2] = bad
    out = convolve_positions(value, weight, before)
    (gradient,) = torch.autograd.grad(out, value, grad_out)
    assert torch.equal(~gradient[0, 1].isfinite().all(-1), reached.flip(0).roll(-19))


def test_short_floats_and_autocast():
    torch.manual_seed(0)
    value = torch.randn(2, 3, 50, 4, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(3, 9, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = convolve_positions(value, weight, 4)
        out.float().square().sum().backward()
    assert out.dtype == value.grad.dtype == torch.bfloat16 and weight.grad.dtype == torch.float32
    wanted = conv2d(value.detach().float(), weight.detach(), 4)
    torch.testing.assert_close(out.float(), wanted, atol=0.1, rtol=0.02)  # 9 terms of 8-bit floats


def test_torch_func():
    torch.manual_seed(0)
    value = torch.randn(4, 2, 3, 40, 5, dtype=torch.float64)
    weight = torch.randn(4, 3, 9, dtype=torch.float64)

    def loss(function):
        return lambda value, weight: function(value, weight, 4).sin().sum()

    def per_sample(function):
        return torch.func.vmap(torch.func.grad(loss(function), argnums=(0, 1)))(value, weight)

    torch.testing.assert_close(per_sample(convolve_positions), per_sample(conv2d))
    value, weight = value[0].requires_grad_(), weight[0].requires_grad_()
    wanted = torch.autograd.grad(loss(conv2d)(value, weight), (value, weight))
    compiled = torch.compile(loss(convolve_positions), backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(value, weight), (value, weight))
    torch.testing.assert_close(got, wanted)


@torch.no_grad()
@pytest.mark.parametrize("is_causal", [False, True])
def test_export_with_a_dynamic_length(is_causal):
    estimator = Sampled(n_hashes=4, expectation="never")
    module = YosoAttention(16, 2, estimator=estimator, conv_window=3, seed=0).eval()
    length = {1: torch.export.Dim("length", min=1, max=4096)}
    shapes = {name: length for name in ("query", "key", "value")} | {"is_causal": None}
    options, x = {"is_causal": is_causal}, torch.randn(2, 300, 16)
    program = torch.export.export(module, (x, x, x), options, dynamic_shapes=shapes).module()
    for n in (1, 2, 31, 32, 33, 500):
        x = torch.randn(2, n, 16)
        wanted, _ = module(x, x, x, **options)
        torch.testing.assert_close(program(x, x, x, **options)[0], wanted)
