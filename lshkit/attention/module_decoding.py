"""Step-by-step decoding of a module: the options of its state, and its output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lshkit.attention.arguments import check_cpu
from lshkit.attention.convolution import convolve_features
from lshkit.attention.decoding import YosoState
from lshkit.attention.estimators import Colliding, Soft, estimator_of
from lshkit.attention.parameters import sharpness_values
from lshkit.attention.softmax_cache import SoftmaxCache

if TYPE_CHECKING:
    from lshkit.attention.modules import YosoAttention


State = YosoState | SoftmaxCache

CACHE_OPTIONS = "n_bits", "epsilon", "delta", "min_share", "max_share", "window", "n_sinks"


def new_state(module: YosoAttention, batch_size: int, table_dtype: torch.dtype) -> YosoState:
    """An empty state that stands for a module's causal forward in eval mode."""
    return YosoState(
        batch_size,
        dtype=module.out_proj.weight.dtype,
        table_dtype=table_dtype,
        seed=int(module.hash_seed),
        device=module.out_proj.weight.device,
        parameters=module.estimator_parameters(),
        **module_options(module),
    )


def new_cache(module: YosoAttention, batch_size: int, of_cache: dict[str, Any]) -> SoftmaxCache:
    """An empty cache that stands for the causal forward of a module with `Colliding`."""
    estimator = estimator_of(module.eval_estimator)
    if not isinstance(estimator, Colliding):
        raise ValueError(
            f"estimator must be Colliding for a cache, got {estimator!r}, which is no "
            "softmax: decode with new_state"
        )
    for name in of_cache:
        if name not in CACHE_OPTIONS:
            raise TypeError(f"new_cache has no option {name!r}; it has {', '.join(CACHE_OPTIONS)}")
    weight = module.out_proj.weight
    check_cpu("Colliding", weight, "Sampled and Soft decode")
    options = module_options(module) | {"seed": int(module.hash_seed), "dtype": weight.dtype}
    return SoftmaxCache(batch_size, of_cache=of_cache, **options)


def module_options(module: YosoAttention) -> dict[str, Any]:
    """The arguments of a module's state, but the seed and the parameters, which may be on a GPU."""
    estimator = estimator_of(module.eval_estimator)  # which may have been set since
    if not isinstance(estimator, Colliding):
        estimator = estimator.for_decoding()
    return {
        "num_heads": module.num_heads,
        "head_dim": module.head_dim,
        "estimator": estimator,
        "normalize": module.normalize,
        "conv_window": module.conv_window,
        "short_conv": module.short_conv,
    }


def decode(
    module: YosoAttention,
    state: State,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
) -> Tensor:
    """The module's output `(B, n, embed_dim)` for positions that follow those in the state."""
    if not isinstance(state, (YosoState, SoftmaxCache)):
        raise TypeError(f"state must be a YosoState or SoftmaxCache, got {type(state).__name__}")
    if module.training:
        raise ValueError("state must be None while training: call eval() to decode step by step")
    if not is_causal:
        raise ValueError("is_causal must be True with a state: it holds what came before")
    estimator = estimator_of(module.eval_estimator)
    if isinstance(estimator, Colliding) != isinstance(state, SoftmaxCache):
        raise _other("estimator", estimator, state.estimator)
    for name, wanted in module_options(module).items():
        if getattr(state, name) != wanted:
            raise _other(name, wanted, getattr(state, name))
    if isinstance(state, YosoState):
        _check_numbers(module, state)
    elif int(module.hash_seed) != state.cache.seed:
        raise _other("seed", int(module.hash_seed), state.cache.seed)
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = (x.to(state.dtype) for x in (query, key, value))
    state._check(query=query, key=key, value=value)
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"key must have query's length {query.shape[2]} with a state, got {key.shape[2]}"
        )
    if isinstance(state, SoftmaxCache):
        scale = state.estimator.scale if module.log_scale is None else _scales(module.log_scale)
        state.check(mask, query.shape[2], scale)
    inputs = None
    if module.short_conv_weight is not None:
        assert state._inputs is not None
        inputs = torch.cat((state._inputs, torch.cat((query, key, value), 1)), -2)
        query, key, value = convolve_features(inputs, module.short_conv_weight).chunk(3, 1)
    if isinstance(state, SoftmaxCache):
        out = state.prefill(query, key, value, mask, scale)
    else:
        out = state.prefill(query, key, value, mask)
        state._interrupted = True  # until what convolutions keep is of the same positions
    if inputs is not None:  # now that nothing can be refused any more
        _keep_last(state._inputs, inputs)
    values = None
    if module.conv is not None and out.shape[-2] > 0:  # Conv2d refuses an empty sequence
        assert state._tail is not None
        if mask is not None:
            value = value.masked_fill(~mask[:, None, :, None], 0)
        values = torch.cat((state._tail, value), -2)
        _keep_last(state._tail, values)
    if not isinstance(state, SoftmaxCache):
        state._interrupted = False
    if module.conv is not None and values is not None:
        out = out + module.conv(values)
    return module.out_proj(out.transpose(1, 2).flatten(2))


def _check_numbers(module: YosoAttention, state: YosoState) -> None:
    """That the seed and the parameters of a state are the module's."""
    parameters = module.estimator_parameters()
    if (missing := state._given.keys() ^ parameters.keys()) - {"sharpness"}:
        raise ValueError(f"state must have the module's {missing.pop()}: make it by new_state")
    # To look at numbers on a GPU is to wait for it: only where they may have changed. The planes'
    # values go with the seed, which differs among modules.
    seen: dict[str, Any] = {
        "seed": _version(module.hash_seed),
        "sharpness": _version(module.log_sharpness),
    }

    def as_before(name: str) -> bool:
        before = state._seen.get(name)
        return seen[name] is not None and before is not None and seen[name][:2] == before[:2]

    if "sharpness" in parameters or "sharpness" in state._given:
        if not as_before("sharpness"):
            heads = state.num_key_heads
            assert isinstance(state.estimator, Soft) and state._sharpness is not None
            given = parameters.get("sharpness", state.estimator.sharpness)
            wanted = sharpness_values(given, heads).expand(heads).tolist()
            has = state._sharpness.expand(heads).tolist()
            if has != wanted:
                raise ValueError(f"state must have the module's sharpness={wanted}, has {has}")
    if not as_before("seed") and int(module.hash_seed) != state.seed:
        raise _other("seed", int(module.hash_seed), state.seed)
    state._seen = seen


def _scales(logarithm: Tensor) -> Tensor:
    return logarithm.detach().float().exp()[:, None, None]


def _keep_last(kept: Tensor | None, rows: Tensor) -> None:
    """As many as are kept, in the same memory, where a CUDA graph will find them again."""
    assert kept is not None
    kept.copy_(rows[:, :, rows.shape[2] - kept.shape[2] :])


def _version(tensor: Tensor | None) -> tuple[int, int, Tensor] | None:
    """What changes with a tensor's numbers; None where it may not."""
    if tensor is None or tensor.is_cpu or tensor.is_inference():
        return None
    return tensor.data_ptr(), tensor._version, tensor.detach()  # kept, so is its address


def _other(name: str, wanted: Any, has: Any) -> ValueError:
    return ValueError(f"state must have the module's {name}={wanted!r}, has {has!r}")
