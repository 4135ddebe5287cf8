"""Options of the attention functions: defaults, those of `register` and those of a model."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lshkit import checks, torch_ops
from lshkit.attention import bert_lsh_attention, lsh_attention
from lshkit.attention.estimators import ESTIMATORS, OPTIONS, Colliding, Estimator, Sampled
from lshkit.hash_functions import MAX_HASHES

LSH = ("weighting", "n_bits", "n_hashes", "hasher", "window", "n_sinks", "center")
BERT_LSH = ("n_bits", "table_size", "n_hashes", "faithful")


class Yoso:
    """ "lshkit_yoso": an estimator, and what stands beside it in a call."""

    kind = "yoso"
    own = {"normalize": "l2", "seed": 0, "n_hashes_eval": 64}  # less noise is worth more there

    def defaults(self) -> dict[str, Any]:
        return Sampled().to_dict() | self.own

    def complete(
        self, options: Any, where: str, registered: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The options in full; those that are missing are the registered ones, or the defaults.

        Of the registered ones an estimator's own go with the estimator.
        """
        if isinstance(options, Estimator):
            options = {"estimator": options}
        options = _as_dict(options, where, "an estimator or a dict of options")
        if isinstance(options.get("estimator"), Estimator):
            given = options.pop("estimator").to_dict()
            if both := sorted(given.keys() & options.keys()):
                raise TypeError(f"{where} must not have {both} beside an estimator that has it")
            options |= given
        before = self.defaults() if registered is None else registered
        name = options.get("estimator", before["estimator"])
        checks.choice(f"estimator of {where}", name, ESTIMATORS)
        if name != before["estimator"]:
            before = {key: before[key] for key in self.own}
        for one, other in (("n_bits", "max_length"), ("max_length", "n_bits")):
            if one in options and other not in options and other in before:
                before = before | {other: None}
        known = ("estimator", *OPTIONS[name], *self.own)
        _check_names(options, known, where, f"lshkit_yoso with {name!r}")
        return before | options

    def call(self, options: dict[str, Any], training: bool) -> dict[str, Any]:
        """The options as `yoso_attention` takes them."""
        options = dict(options)
        call = {"seed": _seed(options), "normalize": options.pop("normalize")}
        checks.choice("normalize", call["normalize"], torch_ops.NORMALIZE)
        n_hashes = options.pop("n_hashes_eval")
        if n_hashes is not None:
            checks.integer("n_hashes_eval", n_hashes, 1, MAX_HASHES)
        estimator = Estimator.from_dict(options)
        call["estimator"] = estimator if training else estimator.for_inference(n_hashes)
        return call

    def check(self, options: dict[str, Any]) -> None:
        self.call(options, training=True)
        self.call(options, training=False)

    def depends_on_positions(self, options: dict[str, Any]) -> bool:
        """The window of `Colliding` goes by them."""
        return isinstance(options["estimator"], Colliding)

    def without_positions(self, options: dict[str, Any]) -> None:
        if isinstance(options["estimator"], Colliding):
            options["estimator"] = dataclasses.replace(options["estimator"], window=0)


class Lsh:
    """ "lshkit_lsh": arguments of `lsh_attention`, and exact_steps."""

    kind = "lsh"
    function: Callable[..., Any] = staticmethod(lsh_attention)
    names: tuple[str, ...] = LSH
    own = {"seed": 0, "exact_steps": True}

    def defaults(self) -> dict[str, Any]:
        usual = inspect.signature(self.function).parameters
        return {name: usual[name].default for name in self.names} | self.own

    def complete(
        self, options: Any, where: str, registered: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        options = _as_dict(options, where)
        _check_names(options, tuple(self.defaults()), where, f"lshkit_{self.kind}")
        return (self.defaults() if registered is None else registered) | options

    def call(self, options: dict[str, Any], training: bool) -> dict[str, Any]:
        options = dict(options)
        if "exact_steps" in options:
            checks.boolean("exact_steps", options["exact_steps"])
        return options | {"seed": _seed(options)}

    def check(self, options: dict[str, Any]) -> None:
        nothing = torch.zeros(1, 1, 1, 8, device="cpu")
        given = self.call(options, training=True)
        self.function(
            nothing, nothing, nothing, **{name: given[name] for name in (*self.names, "seed")}
        )

    def depends_on_positions(self, options: dict[str, Any]) -> bool:
        """ "none" is not an estimate of softmax attention, which could take its place."""
        return not (options["exact_steps"] and options["weighting"] != "none")

    def without_positions(self, options: dict[str, Any]) -> None:
        options["window"] = None


class BertLsh(Lsh):
    """ "lshkit_bert_lsh": arguments of `bert_lsh_attention`."""

    kind, function, names = "bert_lsh", staticmethod(bert_lsh_attention), BERT_LSH
    own = {"seed": 0}

    def depends_on_positions(self, options: dict[str, Any]) -> bool:
        return False

    def without_positions(self, options: dict[str, Any]) -> None:
        pass


KINDS = {options.kind: options for options in (Yoso(), Lsh(), BertLsh())}


def of_model(kind: str, registered: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """The options of a call by an attention layer: the model's own before the registered ones.

    In training mode hash functions are fresh ones, else the layer's own.
    """
    own, options = getattr(getattr(module, "config", None), "lshkit", None), KINDS[kind]
    if own is not None:
        registered = options.complete(own, "config.lshkit", registered)
    call = options.call(registered, module.training)
    layer = max(getattr(module, "layer_idx", None) or 0, 0)  # -1: of a layer that all share
    return call | {"seed": None if module.training else call["seed"] + layer}


def _as_dict(options: Any, where: str, wanted: str = "a dict of options") -> dict[str, Any]:
    if options is not None and not isinstance(options, dict):
        raise TypeError(f"{where} must be {wanted}, got {type(options).__name__}")
    return dict(options or {})


def _check_names(options: dict[str, Any], known: tuple[str, ...], where: str, of: str) -> None:
    for name in options:
        if name not in known:
            raise TypeError(f"{where} has an unknown option {name!r}; {of} has {', '.join(known)}")


def _seed(options: dict[str, Any]) -> int:
    return checks.integer("seed", options.pop("seed"), 0, 2**62)
