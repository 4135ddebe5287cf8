"""The kinds of attention that learn the tasks, with their estimators."""

from benchmarks.encoder import CONTROLS
from lshkit.attention import Expected, Sampled, Soft

LOWER_BOUND = Sampled(expectation="never")
ESTIMATORS = {
    "YOSO-E": Expected(),
    "YOSO-32": LOWER_BOUND,
    "*YOSO-32": Sampled(gradient="collided", expectation="never"),
    "YOSO-32, unbiased": Sampled(gradient="unbiased", expectation="never"),
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
