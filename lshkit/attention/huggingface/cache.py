"""transformers' Cache interface on `CodeCache`, and the attention function that reads from it."""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    get_layer_types_and_kwargs,
)
from transformers.utils import logging

from lshkit import checks
from lshkit.attention import CodeCache, StepReport, lsh_attention
from lshkit.attention.huggingface.interface import check_handed_over, softmax_attention
from lshkit.attention.huggingface.masks import Mask, mask_function, read_mask
from lshkit.attention.huggingface.options import KINDS, LSH
from lshkit.attention.state_dicts import decoded_config

logger = logging.get_logger(__name__)
NAME = "lshkit_cache"
OPTIONS = (
    *("n_bits", "epsilon", "delta", "min_share", "max_share", "window", "n_sinks", "seed"),
    *("max_queries", "prefill"),
)


class _Owner:
    """The module that a cache was filled by, which it does not keep alive. A pickle has none."""

    def __init__(self) -> None:
        self._module: weakref.ref[nn.Module] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Owner":
        other = _Owner()
        if self._module is not None and (module := self._module()) is not None:
            other.set(memo.get(id(module), module))  # the copy, where the model was copied with it
        else:
            other._module = self._module
        return other

    def __reduce__(self) -> Any:
        return _Owner, ()

    def admits(self, module: nn.Module) -> bool:
        return self._module is None or self._module() is module

    def set(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)


class CodeCacheLayer(DynamicLayer):
    """One layer of a model: a `CodeCache`, made when the first keys come."""

    keys: Any
    values: Any
    calls = 0  # of `attention`, of all models

    def __init__(self, group: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.group = group  # query heads to a key head
        self.options = dict(options)
        self.max_queries: int = self.options.pop("max_queries")
        self.prefill: dict[str, Any] | None = self.options.pop("prefill")
        self.reset()

    def reset(self) -> None:
        """Removes everything, and what model the cache is of."""
        self.keys = self.values = None
        self.is_initialized = False
        self.cache: CodeCache | None = None
        self.owner = _Owner()
        self.last: StepReport | None = None
        self.read = self.seen = 0  # keys, of all steps
        self.unread_since = -1  # `calls` when the last keys came
        self.newest = 0  # positions, those of the last call of `update`

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, heads, _, head_dim = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        self.cache = CodeCache(
            *(batch, heads * self.group, head_dim, value_states.shape[-1]),
            num_key_heads=heads,
            dtype=key_states.dtype,
            **self.options,
        )
        self.is_initialized = True
        self._show()

    def _made(self) -> CodeCache:
        if self.cache is None:
            raise RuntimeError("the layer holds nothing yet")
        return self.cache

    def _show(self) -> None:
        self.keys, self.values = self._made().key, self._made().value

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends, and returns all keys and values, of which `attention` learns the layer."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.unread_since == CodeCacheLayer.calls:
            raise RuntimeError(
                f"the last keys that came to the cache were not read by {NAME}: their model has "
                f"another attn_implementation, or its call ended with an error (reset() empties it)"
            )
        cache = self._made()
        if torch.is_autocast_enabled("cpu"):  # projections have its dtype, rotated keys have not
            key_states, value_states = key_states.to(self.dtype), value_states.to(self.dtype)
        cache.append(key_states, value_states)
        self.unread_since, self.newest = CodeCacheLayer.calls, key_states.shape[-2]
        self._show()
        read: Any = cache.key, cache.value
        for x in read:
            x.lshkit_layer = self
        return read

    def get_seq_length(self) -> int:
        return 0 if self.cache is None else self.cache.positions

    @property
    def batch_size(self) -> int:
        return -1 if self.cache is None else self.cache.batch_size

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.cache is not None:
            self.cache.reorder(beam_idx)
            self._show()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove must be 0 or negative, the number of last positions to remove, "
                f"got {tokens_to_remove}"
            )
        if self.cache is not None:
            self.cache.crop(max(self.cache.positions + tokens_to_remove, 0))
            self._show()

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.cache is not None:
            self.reorder_cache(torch.arange(self.cache.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.cache is not None:
            self.reorder_cache(torch.arange(self.cache.batch_size)[indices])

    def check_owner(self, module: nn.Module) -> None:
        """ValueError where the keys that came before are another module's."""
        if not self.owner.admits(module):
            raise ValueError(
                "cache must be of this model: the cache was filled by another one, or by another "
                "layer (reset() empties it; a model with an encoder takes "
                "EncoderDecoderCache(code_cache(model), DynamicCache()))"
            )

    def attend(self, query: Tensor, mask: Mask, scaling: float | None) -> Tensor:
        """Of the queries of the last positions: few of them read few keys, a prompt all."""
        cache = self._made()
        starts = (cache.positions - cache.length).tolist()
        try:
            _set_padding(cache, mask)
            if scaling is not None:
                cache.scale = scaling
            return self._attend(cache, query)
        except Exception:
            cache.set_starts(starts)
            raise

    def take_back(self) -> None:
        """What `update` has appended for a call that is refused."""
        if self.newest == self._made().positions:
            self.reset()
        else:
            self.crop(-self.newest)

    def _attend(self, cache: CodeCache, query: Tensor) -> Tensor:
        n = query.shape[2]
        past = cache.positions - n
        if 0 < past and n <= self.max_queries:
            out, self.last = cache.attend(query, return_report=True)
            self.read += int(self.last.keys.sum())
            own = torch.arange(1 - n, 1) + cache.length[:, None]
            self.seen += int(own.clamp_min(0).sum()) * query.shape[1]
            return out
        if self.prefill is None:
            return cache.attend_exactly(query)
        keys = torch.arange(cache.positions) >= cache.positions - cache.length[:, None]
        return lsh_attention(
            *(query, cache.key, cache.value, keys),
            is_causal=True,
            scale=cache.scale,
            enable_gqa=self.group > 1,
            seed=cache.seed,
            **self.prefill,
        )


def _set_padding(cache: CodeCache, mask: Mask) -> None:
    """The start of each sequence, from a mask that must be causal and padded on the left."""
    held = mask.is_causal or mask.is_step
    if mask.is_dense or mask.starts is not None or not held or mask.n_keys != cache.positions:
        raise NotImplementedError(
            f"{NAME} can only hold causal sequences with padding on the left: for masks of pairs, "
            f"sliding windows in a full layer, packed sequences or a bias use another "
            f"attn_implementation"
        )
    if mask.keys is None or mask.keys.all():
        starts = torch.zeros(cache.batch_size, dtype=torch.int64)
    else:
        starts = mask.keys.logical_not().sum(1)
        if not torch.equal(mask.keys, torch.arange(mask.n_keys) >= starts[:, None]):
            raise NotImplementedError(
                f"{NAME} can only hold padding on the left: attention_mask has a 0 behind a 1, "
                f"or is too short (set the tokenizer's padding_side to 'left')"
            )
    cache.set_starts(starts.tolist())


class ModelCodeCache(Cache):
    """The `CodeCache` of each layer of a model, as `code_cache` makes it."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx == 0:
            lengths = {layer.get_seq_length() for layer in self.layers if layer.is_initialized}
            if len(lengths) > 1:
                raise RuntimeError(
                    "the layers of the cache hold different lengths, since a call ended with "
                    "an error behind the first layer: reset() empties it"
                )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def report(self) -> list[StepReport | None]:
        """Of each layer's last step: stated errors, keys read, log denominators."""
        return [getattr(layer, "last", None) for layer in self.layers]

    @property
    def share_read(self) -> float:
        """Of the keys that steps could see since the last reset, the share that they read."""
        layers = [layer for layer in self.layers if isinstance(layer, CodeCacheLayer)]
        return sum(layer.read for layer in layers) / max(sum(layer.seen for layer in layers), 1)

    @property
    def nbytes(self) -> int:
        """Memory of keys, values and codes."""
        caches = [layer.cache for layer in self.layers if isinstance(layer, CodeCacheLayer)]
        return sum(cache.nbytes for cache in caches if cache is not None)

    def state_dict(self) -> dict[str, Tensor]:
        """Plain tensors, under "0.key", "0.value", ..."""
        return {
            f"{i}.{name}": x
            for i, layer in enumerate(self.layers)
            for name, x in _code_layer(layer)._made().state_dict().items()
        }

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Loads what `state_dict` gave, into a cache made for the same model and options."""
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must be a dict, got {type(state_dict).__name__}")
        parts: dict[str, dict[str, Tensor]] = {str(i): {} for i in range(len(self.layers))}
        for name, x in state_dict.items():
            layer, _, entry = str(name).partition(".")
            if layer not in parts:
                raise ValueError(f"state_dict must be of {len(parts)} layers, got {name!r}")
            parts[layer][entry] = x
        new = []
        for part, layer in zip(parts.values(), self.layers, strict=True):
            own = CodeCacheLayer(
                _code_layer(layer).group,
                {**layer.options, "max_queries": layer.max_queries, "prefill": layer.prefill},
            )
            key, value = part.get("key"), part.get("value")
            for name, x in (("key", key), ("value", value)):
                if not isinstance(x, Tensor) or x.dim() != 4:
                    raise ValueError(f"state_dict must have {name} (B, H_k, n, D) of every layer")
            assert key is not None and value is not None
            own.lazy_initialization(key, value)
            # Models name their scale when they attend.
            scale = decoded_config(part.get("config")).get("scale")
            own._made().scale = checks.positive("scale", scale)
            own._made().load_state_dict(part)
            own._show()
            new.append(own)
        self.layers[:] = new


def _code_layer(layer: Any) -> CodeCacheLayer:
    if not isinstance(layer, CodeCacheLayer):
        raise NotImplementedError("a cache with sliding windows has no state_dict")
    return layer


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """ "lshkit_cache": from the codes where the keys come from a `code_cache`, else exact."""
    CodeCacheLayer.calls += 1
    holder = getattr(key, "lshkit_layer", None)
    # Where the model has changed the keys or the values that it was given, all is exact.
    layer = holder if getattr(value, "lshkit_layer", None) is holder else None
    try:
        if holder is not None:
            holder.check_owner(module)
        check_handed_over(NAME, kwargs)
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        if query.shape[0] != key.shape[0]:  # learned queries, one set for the batch
            query = query.expand(key.shape[0], -1, -1, -1)
        mask = read_mask(NAME, attention_mask, query, key, bool(is_causal), takes_pairs=True)
        if layer is not None and position_bias is None:
            if torch.is_autocast_enabled("cpu"):
                query = query.to(layer.dtype)
            out = layer.attend(query, mask, scaling)
        else:
            if position_bias is not None:
                mask = mask._replace(bias=position_bias[..., : mask.n_keys])
            if mask.starts is not None:
                raise NotImplementedError(f"{NAME} can't take packed sequences")
            key, value = key[:, :, : mask.n_keys], value[:, :, : mask.n_keys]
            out = softmax_attention(query, key, value, mask, scaling)
        if holder is not None:
            holder.owner.set(module)
    except Exception:
        if holder is not None:
            holder.take_back()
        raise
    out = F.dropout(out.transpose(1, 2), dropout, dropout > 0)
    return out.contiguous(), None


def register() -> None:
    """Registers "lshkit_cache" and its masks."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask_function(NAME, takes_pairs=True))


def make(model: nn.Module, given: dict[str, Any]) -> ModelCodeCache:
    """See `lshkit.attention.huggingface.code_cache`."""
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise TypeError(f"model must be of transformers, got {type(model).__name__}")
    if unknown := sorted(given.keys() - set(OPTIONS)):
        raise TypeError(f"code_cache has no option {unknown[0]!r}; it has {', '.join(OPTIONS)}")
    if config._attn_implementation != NAME:
        raise ValueError(
            f"model must use attn_implementation='{NAME}', which reads from this cache, has "
            f"{config._attn_implementation!r}: call model.set_attn_implementation('{NAME}')"
        )
    options = {"seed": 0, "max_queries": 64, "prefill": None} | given
    options["max_queries"] = checks.integer("max_queries", options["max_queries"], 1)
    options["seed"] = checks.integer("seed", options["seed"], 0, 2**62)
    if (prefill := options["prefill"]) is not None:
        if not isinstance(prefill, Mapping) or prefill.keys() - set(LSH):
            raise TypeError(
                f"prefill must be None or a dict of lsh_attention's {', '.join(LSH)}, got "
                f"{prefill!r}"
            )
        lsh = KINDS["lsh"]
        lsh.check(lsh.complete(prefill, "prefill"))
    decoder = config.get_text_config(decoder=True)
    names, arguments = get_layer_types_and_kwargs(decoder)
    heads_of_layers = getattr(decoder, "num_attention_heads_per_layer", None)  # Laguna's
    layers: list[Any] = []
    for i, (name, own) in enumerate(zip(names, arguments, strict=True)):
        if name == "full_attention":
            own_options = options | {"seed": options["seed"] + i}
            heads = heads_of_layers[i] if heads_of_layers else decoder.num_attention_heads
            key_heads = getattr(decoder, "num_key_value_heads", None) or heads
            layers.append(CodeCacheLayer(heads // key_heads, own_options))
        elif name == "sliding_attention":
            layers.append(DynamicSlidingWindowLayer(**own))
        else:
            raise NotImplementedError(f"code_cache can't hold a layer of kind {name!r}")
    probe = {k: v for k, v in options.items() if k not in ("max_queries", "prefill")}
    CodeCache(1, 1, 1, **probe)  # checks the options
    return ModelCodeCache(layers=layers)
