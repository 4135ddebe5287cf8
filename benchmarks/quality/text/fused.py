"""On a GPU: the kernel of all pairs in few passes over memory, where steps of torch take ten."""

import functools
import math

import torch
from torch import Tensor

LARGEST_COSINE = 0.9999  # the derivative is infinite at 1


def kernel(cosine: Tensor, a: Tensor, b: Tensor, c: Tensor, n_bits: int) -> Tensor:
    """exp(n_bits log p + a + b + c), p = 1 - acos(cosine) / pi."""
    bounded = cosine.clamp(-LARGEST_COSINE, LARGEST_COSINE)
    return torch.exp(n_bits * torch.log(0.5 + torch.asin(bounded) / math.pi) + a + b + c)


PROBABILITY = f"""
  const T limit = {LARGEST_COSINE}f;
  const T bounded = cosine < -limit ? -limit : cosine > limit ? limit : cosine;
  const T probability = T(0.5) + asin(bounded) * T({1 / math.pi});
"""
FORWARD = f"""
template <typename T> T kernel_forward(T cosine, T a, T b, T c, T n_bits) {{
  {PROBABILITY}
  return exp(n_bits * log(probability) + a + b + c);
}}"""
BACKWARD = f"""
template <typename T> T kernel_backward(T cosine, T weight, T grad, T n_bits) {{
  {PROBABILITY}
  if (bounded != cosine) return T(0);
  return grad * weight * n_bits * T({1 / math.pi}) /
      (probability * sqrt(T(1) - cosine * cosine));
}}"""


@functools.cache
def compiled(code: str):
    return torch.cuda.jiterator._create_jit_fn(code, n_bits=12.0)


class Kernel(torch.autograd.Function):
    """`kernel` of float32 on CUDA; c has no gradient."""

    @staticmethod
    def forward(ctx, cosine: Tensor, a: Tensor, b: Tensor, c: Tensor, n_bits: int) -> Tensor:
        weight = compiled(FORWARD)(cosine, a, b, c, n_bits=float(n_bits))
        ctx.save_for_backward(cosine, weight)
        ctx.n_bits, ctx.shapes = n_bits, (a.shape, b.shape)
        return weight

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        cosine, weight = ctx.saved_tensors
        of_cosine = compiled(BACKWARD)(cosine, weight, grad, n_bits=float(ctx.n_bits))
        of_a = of_b = None
        if any(ctx.needs_input_grad[1:3]):
            of_log = grad * weight
            of_a, of_b = (of_log.sum_to_size(shape) for shape in ctx.shapes)
        return of_cosine, of_a, of_b, None, None


def count(of_q: Tensor, of_k: Tensor) -> Tensor:
    """(B, H, n, m): in how many hashes codes (B, H, n, hashes) and (B, H, m, hashes) agree."""
    sums = torch.zeros((*of_q.shape[:-1], of_k.shape[-2]), dtype=torch.int32, device=of_q.device)
    for mine, theirs in zip(of_q.unbind(-1), of_k.unbind(-1), strict=True):
        sums += mine[..., :, None] == theirs[..., None, :]
    return sums


@functools.cache
def works() -> bool:
    """Whether this GPU and torch compile it, to the same numbers."""
    generator = torch.Generator().manual_seed(0)
    cosine, a, b, c = torch.rand(4, 2, 2, 64, 64, generator=generator).cuda() * 2.02 - 1.01
    inputs = cosine, a[..., :1], b[..., :1, :], c[0, 0]
    results = []
    try:
        for make in (kernel, Kernel.apply):
            leaves = [x.detach().clone().requires_grad_() for x in inputs[:3]]
            out = make(*leaves, inputs[3], 12)
            gradients = torch.autograd.grad(out.square().sum(), leaves)
            results.append((out.detach(), *gradients))
    except RuntimeError as error:
        print(f"kernels are not fused: {error}", flush=True)
        return False
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    return True
