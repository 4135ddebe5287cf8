"""Attention functions for models of transformers 5.24 and newer.

`register()` registers the names "lshkit_yoso", "lshkit_lsh" and "lshkit_bert_lsh" for
`attn_implementation=...` of any model that uses the attention interface, and
`keep_attn_implementation(model)` has the name saved with the model. `repair(model)` fixes
transformers' own `YosoModel`. transformers is imported only when one of them is called.
"""

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import nn

    from lshkit.attention.estimators import Estimator
    from lshkit.attention.huggingface.cache import ModelCodeCache

__all__ = ["code_cache", "keep_attn_implementation", "register", "repair"]

Model = TypeVar("Model", bound="nn.Module")


def register(
    *,
    yoso: "Estimator | dict[str, Any] | None" = None,
    lsh: dict[str, Any] | None = None,
    bert_lsh: dict[str, Any] | None = None,
) -> None:
    """Registers lshkit's attention functions under their names for `attn_implementation`.

    They are "lshkit_yoso", "lshkit_lsh", "lshkit_bert_lsh" and, for `code_cache`, "lshkit_cache".

    Models choose one by `from_pretrained(..., attn_implementation="lshkit_yoso")`, in a config, or
    later by `model.set_attn_implementation(...)`. Their masks then also come from lshkit: padding,
    left or right, causal masks with any cache, and packed sequences are exact; an unsupported mask
    raises an error with the reason. Models whose classes do not use transformers' attention
    interface raise an error, or go on computing softmax: docs/transformers.md has how to check.
    Calling it again sets all options: those left out have their defaults.

    Each dict of options may have seed (0), of the hash functions in eval mode, to which every layer
    adds its index. In training mode every call draws new ones from torch's generator. A model's own
    options override these: `model.config.lshkit = {"n_bits": 10}`. For another estimator there,
    missing options have their own defaults.

    `save_pretrained` does not keep which function a model uses: a model that is loaded again
    computes softmax attention, without a warning, unless `from_pretrained` is given
    `attn_implementation` or `keep_attn_implementation` was called before it was saved.

    Args:
        yoso: of "lshkit_yoso": an estimator (`Sampled(...)`, `Expected(...)`, `Soft(...)`,
            `Colliding(...)`), or a dict of its `to_dict` form, {"estimator": "soft", "n_bits": 10},
            which may also have normalize ("l2") and n_hashes_eval (64), the number of hashes in
            eval mode.
        lsh: options of "lshkit_lsh", arguments of `lsh_attention`: weighting, n_bits, n_hashes,
            hasher, window, n_sinks, center; and exact_steps (True): the single query of a
            generation step gets exact softmax attention, which is less work than hashing all keys
            (not with weighting="none").
        bert_lsh: options of "lshkit_bert_lsh", arguments of `bert_lsh_attention`: n_bits,
            table_size, n_hashes, faithful.

    Raises:
        ImportError: transformers is missing, or older than 5.24.
        TypeError, ValueError: an option is unknown or wrong.
    """
    _require_transformers()
    from lshkit.attention.huggingface import cache, interface

    interface.register({"yoso": yoso, "lsh": lsh, "bert_lsh": bert_lsh})
    cache.register()


def code_cache(model: "nn.Module", **options: Any) -> "ModelCodeCache":
    """A cache of a decoder's keys, values and sign codes, for a call's `cache`.

    With it, a model that uses attn_implementation="lshkit_cache" estimates each step's softmax
    attention from a few per cent of the keys, in every layer of full attention: see
    `lshkit.attention.CodeCache`, whose options it takes (n_bits, epsilon, delta, min_share,
    max_share, window, n_sinks). Layers of a sliding window stay exact. The cache has all operations
    of transformers' `Cache`, `state_dict` (without sliding windows), and says what its last step
    read and what error it states: `cache.report()`, `cache.share_read`. A cache belongs to the
    model that first fills it; ValueError with another one. Padding must be on the left. A model
    with an encoder takes transformers' `EncoderDecoderCache(code_cache(model), DynamicCache())`.

    Args:
        model: a decoder of transformers, after `register()` and
            `model.set_attn_implementation("lshkit_cache")`.
        seed: of the codes, 0 unless given; layer i adds i to it.
        max_queries: a call with at most this many new positions (64) and some before them is a
            step; others, such as the prompt, read all keys.
        prefill: None, exact softmax attention for them, or a dict of arguments of `lsh_attention`
            (weighting, n_bits, n_hashes, hasher, window, n_sinks, center), which is then used.

    Raises:
        ImportError: transformers is missing, or older than 5.24.
        TypeError, ValueError: an option is unknown or wrong; the model uses another function.
        NotImplementedError: the model has a layer that is neither of full attention nor of a
            sliding window; when it is called, a mask that the cache cannot hold.
    """
    _require_transformers()
    from lshkit.attention.huggingface import cache

    return cache.make(model, options)


def keep_attn_implementation(model: Model) -> Model:
    """Has `save_pretrained` save which of lshkit's functions a model uses; returns the model.

    Writes "attn_implementation" into the model's config and the configs of its parts, which
    `from_pretrained` then reads: after `register()` it selects the function again; without it, it
    raises an error instead of computing softmax attention. An argument `attn_implementation` of
    `from_pretrained` comes before it. Call it again after `set_attn_implementation`, and on a
    loaded model that is to be saved again.

    Args:
        model: of transformers. If it does not use a function of lshkit, an earlier entry is
            removed.

    Raises:
        ImportError: transformers is missing, or older than 5.24.
        TypeError: model has no config of transformers.
    """
    _require_transformers()
    from transformers import PretrainedConfig

    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        raise TypeError(f"model must have a config of transformers, got {type(model).__name__}")
    _keep(config)
    return model


def _keep(config: Any) -> None:
    name = config._attn_implementation
    if name is not None and name.startswith("lshkit_"):
        config.attn_implementation = name
    else:
        vars(config).pop("attn_implementation", None)
    for part in config.sub_configs:
        if getattr(config, part, None) is not None:
            _keep(getattr(config, part))


def repair(model: Model, *, seed: int = 0) -> Model:
    """Makes a model of transformers' YOSO family compute what its config specifies; returns it.

    Replaces the attention layers of the model, in place. Parameters keep their names, so that
    checkpoints load before and after. This fixes: the padding mask `(batch, n)` (1 for a token, 0
    for padding, whose attention is 0); `use_expectation=False` (hash tables instead of the
    expectation) in training too, with `use_fast_hash`, `num_hash` and `lsh_backward`;
    `conv_window`; queries equal to their keys; `torch.compile`. The gradient is the lower bound
    (eq. 4), as in the model's own code.

    Args:
        model: a `YosoModel`, one of its heads (`YosoForMaskedLM`, ...), or a module with one
            inside.
        seed: of the hash functions in eval mode; layer i adds i to it. In training mode every call
            draws fresh ones from torch's generator.

    Raises:
        ImportError: transformers is missing, or older than 5.24.
        TypeError: model is no torch module.
        ValueError: the model has no attention layer of a family that can be repaired.
    """
    _require_transformers()
    from lshkit.attention.huggingface import yoso_model

    yoso_model.repair(model, seed)
    return model


def _require_transformers() -> None:
    install = "pip install transformers accelerate"
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f"lshkit.attention.huggingface needs the package transformers: {install}"
        ) from error
    from packaging.version import Version  # which transformers needs itself

    # Earlier releases name a call's cache in another way.
    if Version(transformers.__version__).release < (5, 24):
        raise ImportError(
            f"lshkit.attention.huggingface needs transformers 5.24 or newer, got "
            f"{transformers.__version__}: {install} --upgrade"
        )
