"""The kinds of attention that learn the tasks, with their options."""

from benchmarks.encoder import CONTROLS

EXPECTED = {"n_bits": 8, "estimator": "expected", "gradient": "expected"}
LOWER_BOUND = {"n_bits": 8, "estimator": "sampled", "gradient": "lower_bound"}
COLLIDED = {"n_bits": 8, "estimator": "sampled", "gradient": "collided"}
UNBIASED = {"n_bits": 8, "estimator": "sampled", "gradient": "unbiased"}
SOFT = {"n_bits": 12, "estimator": "soft", "n_probes": 4, "sharpness": 2.0}
OPTIONS = {
    "YOSO-E": EXPECTED,
    "YOSO-32": LOWER_BOUND,
    "*YOSO-32": COLLIDED,
    "YOSO-32, unbiased": UNBIASED,
    "YOSO-C-32": LOWER_BOUND,
    "soft codes-32": SOFT,
}
METHODS = {
    "softmax": ("softmax", {}),
    **{name: ("YOSO-C" if "-C-" in name else "YOSO", options) for name, options in OPTIONS.items()},
    "Linformer": ("Linformer", {"rank": 64}),
    "Performer": ("Performer", {"n_features": 128}),
    **CONTROLS,
}
SAMPLED = [name for name in OPTIONS if name != "YOSO-E"]  # the result depends on hash functions
ONE_LENGTH = ["Linformer"]
