"""Options of the attention functions: defaults, those of `register` and those of a model."""

import torch

from lshkit import checks
from lshkit.attention import bert_lsh_attention, lsh_attention, yoso_attention

YOSO = (
    "n_bits",
    "n_hashes",
    "hasher",
    "estimator",
    "gradient",
    "normalize",
    "unit_norm",
    "lift_scale",
    "window",
    "n_probes",
    "sharpness",
    "gradient_rank",
    "precision",
)
BERT_LSH = ("n_bits", "table_size", "n_hashes", "faithful")
LSH = ("weighting", "n_bits", "n_hashes", "hasher", "window", "n_sinks", "center")

_FUNCTIONS = {
    "yoso": (yoso_attention, YOSO),
    "lsh": (lsh_attention, LSH),
    "bert_lsh": (bert_lsh_attention, BERT_LSH),
}
# Beside those of the functions themselves: 64 hashes where less noise is worth more.
OWN = {
    "yoso": {"seed": 0, "n_hashes_eval": 64},
    "lsh": {"seed": 0, "exact_steps": True},
    "bert_lsh": {"seed": 0},
}
DEFAULTS = {
    kind: {name: function.__kwdefaults__[name] for name in names} | OWN[kind]
    for kind, (function, names) in _FUNCTIONS.items()
}


def checked(kind: str, options: dict | None, where: str) -> dict:
    """The options complete, after a look at each."""
    if options is None:
        options = {}
    if not isinstance(options, dict):
        raise TypeError(f"{where} must be a dict of options, got {type(options).__name__}")
    check_names(kind, options, where)
    function, names = _FUNCTIONS[kind]
    options = DEFAULTS[kind] | options
    for training in (True, False):
        nothing = torch.zeros(1, 1, 1, 8, device="cpu")
        given = call_options(options, training)
        given = {name: given[name] for name in (*names, "seed")}
        function(nothing, nothing, nothing, **given)
    return options


def check_names(kind: str, options: dict, where: str) -> None:
    for name in options:
        if name not in DEFAULTS[kind]:
            known = ", ".join(DEFAULTS[kind])
            raise TypeError(f"{where} has an unknown option {name!r}; lshkit_{kind} has {known}")


def call_options(options: dict, training: bool, layer: int = 0) -> dict:
    """As the function takes them: fresh hash functions in training mode, the layer's own else."""
    options = dict(options)
    n_hashes_eval = options.pop("n_hashes_eval", None)
    if "exact_steps" in options:
        checks.boolean("exact_steps", options["exact_steps"])
    seed = checks.integer("seed", options.pop("seed"), 0, 2**62)
    if training:
        options["seed"] = None
    else:
        options["seed"] = seed + layer
        if n_hashes_eval is not None:
            options["n_hashes"] = n_hashes_eval
    return options


def of_model(kind: str, registered: dict, module) -> dict:
    """The options of a call by an attention layer: the model's own before the registered ones."""
    own = getattr(getattr(module, "config", None), "lshkit", None)
    if own is not None:
        if not isinstance(own, dict):
            raise TypeError(f"config.lshkit must be a dict of options, got {type(own).__name__}")
        check_names(kind, own, "config.lshkit")
        registered = {**registered, **own}
    return call_options(registered, module.training, getattr(module, "layer_idx", None) or 0)
