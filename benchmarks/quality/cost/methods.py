"""The kinds of attention whose loss is compared, with their options."""

from benchmarks.encoder import CONTROLS

YOSO = {
    "YOSO-E": dict(n_bits=8, estimator="expected", gradient="expected"),
    "lower_bound": dict(n_bits=8, estimator="sampled", gradient="lower_bound"),
    "collided": dict(n_bits=8, estimator="sampled", gradient="collided"),
    "unbiased": dict(n_bits=8, estimator="sampled", gradient="unbiased"),
    "soft, 4 probes": dict(n_bits=12, estimator="soft", n_probes=4, sharpness=2.0),
    "soft, 2 probes": dict(n_bits=12, estimator="soft", n_probes=2, sharpness=2.0),
    # As in RACE Attention: few buckets, and every token belongs to all of them.
    "soft, all of 16": dict(n_bits=4, estimator="soft", n_probes=16, sharpness=2.0),
}
METHODS = {
    "softmax": ("softmax", {}),
    **{name: ("YOSO", options) for name, options in YOSO.items()},
    **CONTROLS,
}
