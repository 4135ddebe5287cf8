"""The kinds of attention whose loss is compared, with their estimators."""

from benchmarks.encoder import CONTROLS
from lshkit.attention import Expected, Sampled, Soft

N_HASHES = 32  # of all of them
YOSO = {
    "YOSO-E": Expected(n_bits=8),
    "lower_bound": Sampled(n_bits=8, expectation="never"),
    "lower_bound, 12 bits": Sampled(n_bits=12, expectation="never"),  # the default
    "collided": Sampled(n_bits=8, gradient="collided", expectation="never"),
    "unbiased": Sampled(n_bits=8, gradient="unbiased", expectation="never"),
    "soft, 4 probes": Soft(),
    # As in RACE Attention: few buckets, and every token belongs to all of them.
    "soft, all of 16": Soft(n_bits=4, n_probes=16),
}
METHODS = {
    "softmax": ("softmax", {}),
    **{name: ("YOSO", {"estimator": estimator}) for name, estimator in YOSO.items()},
    **CONTROLS,
}
