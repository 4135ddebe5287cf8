"""Every op in plain numpy and float64, written to be read: the oracle of the tests.

Nothing here is fast, and some of it is quadratic on purpose. Arrays have any leading dimensions,
`(..., rows, columns)`; every result is float64 (codes: unsigned integers).
"""

from lshkit.reference.attention import (
    attention_backward,
    attention_forward,
    expected_backward,
    expected_forward,
    yoso_backward,
    yoso_forward,
)
from lshkit.reference.buckets import (
    bucket_sum,
    collision_counts,
    collisions,
    draw,
    random_words,
    visible,
)
from lshkit.reference.code_cache import StepOptions, code_keys, code_step
from lshkit.reference.hashing import (
    angle,
    bin_codes,
    codes,
    collision_probability,
    cosine_probability,
    cosine_probability_slope,
    feature_bins,
    hadamard_projections,
    hash,
    lift,
    projection_bins,
    projections,
    random_parameters,
    soft_codes,
    unit,
    unit_projections,
    walsh_hadamard,
)
from lshkit.reference.kernel_sums import kernel_sums, leave_one_out, log_kernel, partition_sums
from lshkit.reference.lsh_attention import (
    bert_lsh_forward,
    key_centre,
    lsh_attention_backward,
    lsh_attention_forward,
    lsh_attention_sums,
)
from lshkit.reference.soft_attention import soft_attention_backward, soft_attention_forward

__all__ = [
    "StepOptions",
    "angle",
    "attention_backward",
    "attention_forward",
    "bert_lsh_forward",
    "bin_codes",
    "bucket_sum",
    "code_keys",
    "code_step",
    "codes",
    "collision_counts",
    "collision_probability",
    "collisions",
    "cosine_probability",
    "cosine_probability_slope",
    "draw",
    "expected_backward",
    "expected_forward",
    "feature_bins",
    "hadamard_projections",
    "hash",
    "kernel_sums",
    "key_centre",
    "leave_one_out",
    "lift",
    "log_kernel",
    "lsh_attention_backward",
    "lsh_attention_forward",
    "lsh_attention_sums",
    "partition_sums",
    "projection_bins",
    "projections",
    "random_parameters",
    "random_words",
    "soft_attention_backward",
    "soft_attention_forward",
    "soft_codes",
    "unit",
    "unit_projections",
    "visible",
    "walsh_hadamard",
    "yoso_backward",
    "yoso_forward",
]
