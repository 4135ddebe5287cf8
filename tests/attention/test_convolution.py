"""The convolution along positions and its gradients, and which rows it mixes."""

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402

from lshkit.attention import Sampled, YosoAttention  # noqa: E402
from lshkit.attention.convolution import convolve_positions  # noqa: E402


def shifted(value, weight, before):
    """The sum of the values, shifted by each of the window's positions."""
    n, width = value.shape[2], weight.shape[-1]
    padded = F.pad(value, (0, 0, before, width - 1 - before))
    return sum(weight[:, t, None, None] * padded[:, :, t : t + n] for t in range(width))


@pytest.mark.parametrize("n", [1, 7, 100])
@pytest.mark.parametrize(("width", "before"), [(1, 0), (3, 1), (33, 16), (33, 32), (7, 0)])
def test_outputs_and_gradients_are_those_of_the_formula(n, width, before):
    torch.manual_seed(n)
    value = torch.randn(2, n, 3, 5, dtype=torch.float64).transpose(1, 2).requires_grad_()
    weight = torch.randn(3, width, dtype=torch.float64, requires_grad=True)
    grad_out = torch.randn(2, 3, n, 5, dtype=torch.float64)
    out, wanted = (f(value, weight, before) for f in (convolve_positions, shifted))
    torch.testing.assert_close(out, wanted)
    got, gradients = (torch.autograd.grad(x, (value, weight), grad_out) for x in (out, wanted))
    torch.testing.assert_close(got, gradients)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(("width", "before"), [(1, 0), (5, 4), (33, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_reaches_those_whose_kernel_reads_it(width, before, bad, dtype):
    torch.manual_seed(0)
    value, weight = torch.randn(1, 2, 100, 3, dtype=dtype), torch.randn(2, width)
    value[0, 1, 40, 2] = bad
    value.requires_grad_()
    out = convolve_positions(value, weight, before)
    reached = torch.zeros(out.shape, dtype=torch.bool)
    reached[0, 1, 40 - (width - 1 - before) : 40 + before + 1, 2] = True
    assert torch.equal(~out.isfinite(), reached)
    grad_out = torch.zeros_like(out)
    grad_out[0, 1, 40, 2] = bad
    (gradient,) = torch.autograd.grad(out, value, grad_out)
    assert torch.equal(~gradient.isfinite()[0, 1, :, 2], reached[0, 1, :, 2].flip(0).roll(-19))


def test_short_floats_and_autocast():
    torch.manual_seed(0)
    value = torch.randn(2, 3, 50, 4, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(3, 9, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = convolve_positions(value, weight, 4)
        out.float().square().sum().backward()
    assert out.dtype == value.grad.dtype == torch.bfloat16 and weight.grad.dtype == torch.float32
    wanted = shifted(value.detach().float(), weight.detach(), 4)
    torch.testing.assert_close(out, wanted.bfloat16())  # rounded once


def test_torch_func_and_compilation():
    torch.manual_seed(0)
    value = torch.randn(4, 2, 3, 40, 5, dtype=torch.float64)
    weight = torch.randn(4, 3, 9, dtype=torch.float64)

    def loss(value, weight):
        return convolve_positions(value, weight, 4).sin().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)))(value, weight)
    torch._dynamo.reset()  # or other tests' graphs count
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for i in range(2):
        inputs = value[i].requires_grad_(), weight[i].requires_grad_()
        wanted = torch.autograd.grad(loss(*inputs), inputs)
        torch.testing.assert_close(tuple(x[i] for x in per_sample), wanted)
        torch.testing.assert_close(torch.autograd.grad(compiled(*inputs), inputs), wanted)


@torch.no_grad()
@pytest.mark.parametrize("is_causal", [False, True])
def test_export_with_a_dynamic_length(is_causal):
    estimator = Sampled(n_hashes=4, expectation="never")
    module = YosoAttention(16, 2, estimator=estimator, conv_window=3, seed=0).eval()
    length = {1: torch.export.Dim("length", min=1, max=4096)}
    shapes = {name: length for name in ("query", "key", "value")} | {"is_causal": None}
    options, x = {"is_causal": is_causal}, torch.randn(2, 300, 16)
    program = torch.export.export(module, (x, x, x), options, dynamic_shapes=shapes).module()
    for n in (1, 2, 33, 500):
        x = torch.randn(2, n, 16)
        wanted, _ = module(x, x, x, **options)
        torch.testing.assert_close(program(x, x, x, **options)[0], wanted)
