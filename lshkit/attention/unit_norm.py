"""Rows of unit norm: by a division, or by two more coordinates (attention by inner products)."""

import math

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lshkit.torch_ops.assertions import require

AUTO = "auto"


def unit_rows(x: Tensor) -> Tensor:
    """Rows divided by their norm. A row of zeros stays, and its gradient is zero; NaN stays NaN.

    So that gradients are finite, a norm below 2^-100 (float64: 2^-1000) counts as that in them.
    """
    if x.shape[-1]:  # the squares of numbers of about 1 leave no type
        given = x.detach()
        largest = given.abs().amax(-1, keepdim=True)
        largest = torch.where(largest > 0, largest, 1)
        scaled = given / largest
        if x.requires_grad or forward_ad._current_level >= 0:  # duals require none
            least = 2.0 ** (-1000 if x.dtype is torch.float64 else -100)
            least = least / torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
            scaled = scaled + (x - given) / torch.maximum(largest, least)
        x = scaled
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.where(norm == 0, 0, x / torch.where(norm == 0, 1, norm))


def lift(
    query: Tensor, key: Tensor, key_mask: Tensor | None, lift_scale: float | Tensor | str
) -> tuple[Tensor, Tensor]:
    """Unit rows whose inner products are those of query and key over tau = lift_scale.

    [q, sqrt(tau - |q|^2), 0] / sqrt(tau) and [k, 0, sqrt(tau - |k|^2)] / sqrt(tau) (YOSO, ICML
    2021, appendix 1.1, after Neyshabur and Srebro 2015). tau bounds the squared norms.

    The root's argument (in units of tau) is kept at the machine epsilon and above, while its
    derivative stays that of the argument itself. So a row on the bound, where the root has an
    infinite slope, has finite gradients, and they are the right ones: a cosine q . k / tau does not
    depend on the roots, whose parts in its gradient cancel for whatever value they have.

    Args:
        query: `(B, H, N_q, D)`. Half precision is lifted in float32 and rounded at the end.
        key: `(B, H_k, N_k, D)`; H is a multiple of H_k.
        key_mask: `(B, N_k)`, True takes part, or None.
        lift_scale: tau, of shape () or (H_k,) if a tensor, or "auto": the largest squared norm of
            the finite rows that take part, for each sequence and key head, so that a sequence does
            not depend on its batch mates. It is differentiated too: otherwise the gradient would
            increase the norms without bound, which has no effect on the output.

    Returns:
        `(B, H, N_q, D + 2)` and `(B, H_k, N_k, D + 2)`.

    Raises:
        ValueError: a finite row of a query or of a key that takes part exceeds the bound by more
            than rounding, or lift_scale is not positive. In a compiled graph and on CUDA this is an
            assertion, raised at run time.
    """
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    if key_mask is not None:  # whatever they hold, NaN included, it reaches no gradient
        key = key.masked_fill(~key_mask[:, None, :, None], 0)
    rows = query.to(wide), key.to(wide)
    groups = query.shape[1] // max(1, key.shape[1])
    if isinstance(lift_scale, str):  # cosines do not depend on the size, squares may leave the type
        size = _largest(_by_key_head(*rows).detach().abs())
        rows = rows[0] / size.repeat_interleave(groups, 1), rows[1] / size
        both = _by_key_head(*rows)
        tau = _largest((both * both).sum(-1, keepdim=True))
    elif isinstance(lift_scale, Tensor):
        tau = lift_scale.to(wide).reshape(1, -1, 1, 1)
        given = lift_scale.detach()
        message = "lift_scale must be > 0 and finite"
        require((tau > 0) & tau.isfinite(), message, lambda: f", got {given.tolist()}")
    else:
        tau = float(lift_scale)
    query_tau = tau
    if isinstance(tau, Tensor):
        # A sum of its own for each feature in the gradient: torch's threads share out a single one.
        tau = tau.expand(-1, -1, -1, key.shape[-1])
        query_tau = tau.repeat_interleave(groups, 1) if tau.shape[1] > 1 else tau
    bounded = not isinstance(lift_scale, str)  # or else the bound comes from the rows
    if bounded:
        _require_inside("query", query, rows[0], query_tau)
        _require_inside("key", key, rows[1], tau)
    lifted = _lift(rows[0], query_tau, True), _lift(rows[1], tau, False)
    return lifted[0].to(query.dtype), lifted[1].to(key.dtype)


def _finite(x: Tensor) -> Tensor:
    return x.detach().isfinite().all(-1, keepdim=True)


def _by_key_head(query: Tensor, key: Tensor) -> Tensor:
    """The queries of the heads that share a key head and its keys, in a row; finite rows alone."""
    groups = query.shape[1] // max(1, key.shape[1])
    query = query.unflatten(1, (key.shape[1], groups)).flatten(2, 3)
    return torch.cat([torch.where(_finite(x), x, 0) for x in (query, key)], -2)


def _largest(sizes: Tensor) -> Tensor:
    """(B, H_k, 1, 1); one where all are zero."""
    if sizes.shape[-2] == 0:
        return sizes.new_ones(()).expand(*sizes.shape[:2], 1, 1)
    largest = sizes.amax((-2, -1), keepdim=True)
    return torch.where(largest > 0, largest, 1)


def _lift(x: Tensor, tau: float | Tensor, is_query: bool) -> Tensor:
    # A NaN must not reach the gradient of a scale that other rows share.
    shared = isinstance(tau, Tensor) and tau.requires_grad
    finite = _finite(x) if shared else None
    scaled = _over_root(x if finite is None else torch.where(finite, x, 0), tau)
    rest = 1 - (scaled * scaled).sum(-1, keepdim=True)
    rest = rest + (torch.finfo(x.dtype).eps - rest.detach()).clamp(min=0)
    root, other = rest.sqrt(), torch.zeros_like(rest)
    lifted = torch.cat((scaled, root, other) if is_query else (scaled, other, root), -1)
    if finite is None:
        return lifted
    return torch.where(finite, lifted, torch.nn.functional.pad(x, (0, 2)))


def _over_root(x: Tensor, tau: float | Tensor) -> Tensor:
    return x / (tau.sqrt() if isinstance(tau, Tensor) else math.sqrt(tau))


def _require_inside(name: str, given: Tensor, x: Tensor, tau: float | Tensor) -> None:
    """x: the rows given, in the wider dtype. The slack is what scaling them to the bound rounds."""
    slack = 2 * torch.finfo(given.dtype).eps + 8 * torch.finfo(x.dtype).eps
    x = x.detach()
    scaled = _over_root(x, tau.detach() if isinstance(tau, Tensor) else tau)
    square = (scaled * scaled).sum(-1)
    inside = (square <= 1 + slack) | ~_finite(x).squeeze(-1)

    def details() -> str:
        worst = int(square.masked_fill(inside, 0).argmax())
        norm = float(x.reshape(-1, x.shape[-1])[worst].double().norm())
        bound = norm / float(scaled.reshape(-1, x.shape[-1])[worst].double().norm())
        return f" = {bound:.6g}, got {norm:.6g}: give a larger lift_scale, or 'auto'"

    require(inside, f"{name} must have rows of norm at most sqrt(lift_scale)", details)
