"""The kinds of attention that learn the tasks, with their estimators."""

from benchmarks.encoder import CONTROLS
from lshkit.attention import Expected, Sampled, Soft

SIZES = {"n_bits": 8, "n_hashes": 32}  # as in the ICML paper
LOWER_BOUND = Sampled(**SIZES, expectation="never")
ESTIMATORS = {
    "YOSO-E": Expected(n_bits=8),
    "YOSO-32": LOWER_BOUND,
    "*YOSO-32": Sampled(**SIZES, gradient="collided", expectation="never"),
    "YOSO-32, unbiased": Sampled(**SIZES, gradient="unbiased", expectation="never"),
    "YOSO-C-32": LOWER_BOUND,
    "soft codes-32": Soft(),
}
METHODS = {
    "softmax": ("softmax", {}),
    **{
        name: ("YOSO-C" if "-C-" in name else "YOSO", {"estimator": estimator})
        for name, estimator in ESTIMATORS.items()
    },
    "Linformer": ("Linformer", {"rank": 64}),
    "Performer": ("Performer", {"n_features": 128}),
    **CONTROLS,
}
SAMPLED = [name for name in ESTIMATORS if name != "YOSO-E"]  # the result depends on hash functions
ONE_LENGTH = ["Linformer"]
