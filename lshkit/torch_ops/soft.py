"""Soft codes: the most likely buckets of every hash with weights that are differentiable."""

from typing import Any

import torch
from torch import Tensor

from lshkit import _C
from lshkit.hash_functions import FAMILY
from lshkit.torch_ops import library
from lshkit.torch_ops.assertions import may_be_read
from lshkit.torch_ops.tensors import in_dtype, new_codes, new_gradient, rows

_HASHER = "int family, int n_bits"
library.define(
    # Weights and probe codes (batch, heads, n, n_hashes, n_probes), then what the gradient needs:
    # own codes (batch, heads, n, n_hashes) and margins of selected bits (..., n_selected): int32
    # words, floats but for the 4 lowest bits, which are the numbers of the bits.
    f"soft_hash(Tensor x, Tensor parameters, Tensor sharpness, {_HASHER}, int n_hashes, "
    "int n_probes) -> (Tensor, Tensor, Tensor, Tensor)",
    # Gradients of x, of sharpness for every (batch, head), and of the parameters if wanted.
    "soft_hash_backward(Tensor grad_weights, Tensor x, Tensor parameters, Tensor sharpness, "
    f"Tensor codes, Tensor margins, Tensor weights, {_HASHER}, bool parameters_too) "
    "-> (Tensor, Tensor, Tensor)",
)


def selected_bits(n_probes: int) -> int:
    """Bits that are flipped in some of n_probes probes: ceil(log2(n_probes))."""
    return (n_probes - 1).bit_length()


def check_sharpness(sharpness: Tensor) -> None:
    if not may_be_read(sharpness):
        return
    sharpness = sharpness.to(torch.float32)  # what is computed with: 1e60 would be infinite
    good = torch.isfinite(sharpness) & (sharpness > 0)
    if not good.all():
        bad = sharpness[~good][0].item()
        raise ValueError(f"sharpness must be a finite number > 0, got {bad}")


def _new_soft_codes(x: Tensor, n_bits: int, n_hashes: int, n_probes: int) -> tuple[Tensor, ...]:
    codes = new_codes(x, n_bits, n_hashes)
    selected = (*codes.shape, selected_bits(n_probes))
    return (
        x.new_empty((*codes.shape, n_probes), dtype=torch.float32),
        codes.new_empty((*codes.shape, n_probes)),
        codes,
        x.new_empty(selected, dtype=torch.int32),
    )


def _soft_hash(
    x: Tensor,
    parameters: Tensor,
    sharpness: Tensor,
    family: int,
    n_bits: int,
    n_hashes: int,
    n_probes: int,
) -> tuple[Tensor, ...]:
    check_sharpness(sharpness)
    out = _new_soft_codes(x, n_bits, n_hashes, n_probes)
    if x.numel() == 0:
        return tuple(o.zero_() for o in out)
    weights, probe_codes, codes, margins = out
    x, parameters = rows(x, torch.float32), parameters.contiguous()
    sharpness = sharpness.to(torch.float32).contiguous()
    _C.soft_hash(
        *(x, parameters, sharpness, family, n_bits, n_hashes, n_probes, codes),
        *(margins.flatten(3), probe_codes.flatten(3), weights.flatten(3)),
        torch.get_num_threads(),
    )
    return out


def _new_gradients(
    x: Tensor, parameters: Tensor, parameters_too: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    shape = parameters.shape if parameters_too else (0,)
    return (
        new_gradient(x, dtype),
        x.new_empty(x.shape[:2], dtype=torch.float32),
        parameters.new_empty(shape),
    )


def _soft_hash_backward(
    grad_weights: Tensor,
    x: Tensor,
    parameters: Tensor,
    sharpness: Tensor,
    codes: Tensor,
    margins: Tensor,
    weights: Tensor,
    family: int,
    n_bits: int,
    parameters_too: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = _new_gradients(x, parameters, parameters_too, torch.float32)
    grad_x, grad_sharpness, grad_parameters = grads
    if x.numel() == 0:
        return in_dtype(grad_x.zero_(), x.dtype), grad_sharpness.zero_(), grad_parameters.zero_()
    n_hashes, n_probes = weights.shape[-2:]
    scale = sharpness.to(torch.float32).contiguous()
    margins, weights = (a.contiguous().flatten(3) for a in (margins, weights))
    of_weights = grad_weights.to(torch.float32).contiguous().flatten(3)
    _C.soft_hash_backward(
        *(rows(x, torch.float32), parameters.contiguous(), scale, family, n_bits, n_hashes),
        *(n_probes, codes.contiguous(), margins, weights, of_weights),
        *(grad_x, grad_sharpness, grad_parameters if parameters_too else None),
        torch.get_num_threads(),
    )
    return in_dtype(grad_x, x.dtype), grad_sharpness, grad_parameters


library.register_kernel("soft_hash", _soft_hash)
library.register_kernel("soft_hash_backward", _soft_hash_backward)


@library.fake("soft_hash")
def _(
    x: Tensor,
    parameters: Tensor,
    sharpness: Tensor,
    family: int,
    n_bits: int,
    n_hashes: int,
    n_probes: int,
) -> Any:
    return _new_soft_codes(x, n_bits, n_hashes, n_probes)


@library.fake("soft_hash_backward")
def _(grad_weights: Tensor, x: Tensor, parameters: Tensor, *rest: Any) -> Any:
    return _new_gradients(x, parameters, rest[-1], x.dtype)


def _setup_soft_hash(ctx: Any, inputs: Any, output: Any) -> None:
    x, parameters, sharpness, family, n_bits, _, _ = inputs
    weights, probe_codes, codes, margins = output
    ctx.mark_non_differentiable(probe_codes, codes, margins)
    ctx.set_materialize_grads(False)  # zeros for the codes would cost as much as the codes
    ctx.save_for_backward(x, parameters, sharpness, codes, margins, weights)
    ctx.options = family, n_bits


def _soft_hash_grad(ctx: Any, grad_weights: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad_weights is None:
        return (None,) * 7
    parameters_too = ctx.needs_input_grad[1] and ctx.options[0] == FAMILY["hyperplane"]
    x, parameters, sharpness, *saved = ctx.saved_tensors
    grad_x, grad_sharpness, grad_parameters = soft_hash_backward(
        grad_weights, x, parameters, sharpness, *saved, *ctx.options, parameters_too
    )
    grad_sharpness = grad_sharpness.sum(0)
    if sharpness.shape[0] == 1:
        grad_sharpness = grad_sharpness.sum(0, keepdim=True)
    return (
        grad_x,
        grad_parameters if parameters_too else None,
        grad_sharpness.to(sharpness.dtype),
        *(None,) * 4,
    )


soft_hash = library.differentiable("soft_hash", _setup_soft_hash, _soft_hash_grad)
soft_hash_backward = library.gradient_of("soft_hash")
library.register_vmap("soft_hash", (0,))
# A gradient of the parameters is summed over the batch.
library.register_vmap("soft_hash_backward", ())
