"""How a module's causal forward goes on step by step: the options of its state, and its output."""

import torch
from torch import Tensor

from lshkit.attention.arguments import check_probes, sharpness_values
from lshkit.attention.decoding import YosoState


def module_options(module) -> dict:
    """The arguments of the state that stands for a module's causal forward in eval mode.

    All but the seed, which may be on a GPU.
    """
    if module.estimator not in ("sampled", "auto", "soft"):
        raise ValueError(
            f"estimator must be 'sampled', 'auto' or 'soft' to decode step by step, "
            f"is {module.estimator!r}"
        )
    if module.window is not None:
        raise ValueError(
            f"window must be None to decode step by step, is {module.window}: the state keeps no "
            f"keys to compare with"
        )
    options = {
        "num_heads": module.num_heads,
        "head_dim": module.head_dim,
        "n_bits": module.n_bits,
        "n_hashes": module.n_hashes if module.n_hashes_eval is None else module.n_hashes_eval,
        "hasher": module.hasher,
        "estimator": "sampled",
        "normalize": module.normalize,
        "unit_norm": module.unit_norm,
        "conv_window": module.conv_window,
    }
    if module.estimator == "soft":
        probes = check_probes(module.n_probes, module.n_bits)
        options |= {"estimator": "soft", "n_probes": probes, **module._soft_parameters()}
    return options


def decode(module, state, query, key, value, mask, is_causal) -> Tensor:
    """The module's output `(B, n, embed_dim)` for positions that follow those in the state."""
    if not isinstance(state, YosoState):
        raise TypeError(f"state must be a YosoState, got {type(state).__name__}")
    if module.training:
        raise ValueError("state must be None while training: call eval() to decode step by step")
    if not is_causal:
        raise ValueError("is_causal must be True with a state: it holds what came before")
    # To look at numbers on a GPU is to wait for it: only where they may have changed.
    seen = {"seed": _version(module.hash_seed), "sharpness": _version(module.log_sharpness)}

    def as_before(name):
        before = state._seen.get(name)
        return seen[name] is not None and before is not None and seen[name][:2] == before[:2]

    for name, wanted in module_options(module).items():
        if name == "sharpness":
            if as_before(name):
                continue
            heads = state.num_key_heads
            wanted = sharpness_values(wanted, heads).expand(heads).tolist()
            has = state._sharpness.expand(heads).tolist()
            if has != wanted:
                raise ValueError(f"state must have the module's sharpness={wanted}, has {has}")
        elif name == "projections":  # their values go with the seed, which differs among modules
            if (state._projections is None) is not (wanted is None):
                words = "the module's learned" if wanted is not None else "no"
                raise ValueError(f"state must have {words} projections: make it by new_state")
        elif getattr(state, name) != wanted:
            raise _other(name, wanted, getattr(state, name))
    if not as_before("seed") and int(module.hash_seed) != state.seed:
        raise _other("seed", int(module.hash_seed), state.seed)
    state._seen = seen
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = (x.to(state.dtype) for x in (query, key, value))
    out = state.prefill(query, key, value, mask)
    if module.conv is not None and out.shape[-2] > 0:  # Conv2d refuses an empty sequence
        if mask is not None:
            value = value.masked_fill(~mask[:, None, :, None], 0)
        values = torch.cat((state._tail, value), -2)
        # Into the same memory, where a CUDA graph will find it again.
        state._tail.copy_(values[:, :, values.shape[2] - state._tail.shape[2] :])
        out = out + module.conv(values)
    return module.out_proj(out.transpose(1, 2).flatten(2))


def _version(tensor):
    """What changes with a tensor's numbers; None where it may not."""
    if tensor is None or tensor.is_cpu or tensor.is_inference():
        return None
    return tensor.data_ptr(), tensor._version, tensor.detach()  # kept, so is its address


def _other(name, wanted, has) -> ValueError:
    return ValueError(f"state must have the module's {name}={wanted!r}, has {has!r}")
