"""Every op in plain numpy and float64, written to be read: the oracle of the tests.

Nothing here is fast, and some of it is quadratic on purpose. Arrays have any leading dimensions,
`(..., rows, columns)`; every result is float64 (codes: unsigned integers).
"""

# isort: off
from lshkit.reference.attention import (
    attention_backward as attention_backward,
    attention_forward as attention_forward,
    expected_backward as expected_backward,
    expected_forward as expected_forward,
    yoso_backward as yoso_backward,
    yoso_forward as yoso_forward,
)
from lshkit.reference.buckets import (
    as_probes as as_probes,
    below as below,
    bucket_sum as bucket_sum,
    collision_counts as collision_counts,
    collisions as collisions,
    draw as draw,
    probe_weights as probe_weights,
    random_words as random_words,
    visible as visible,
    weighted_sum as weighted_sum,
)
from lshkit.reference.code_cache import (
    Codes as Codes,
    StepOptions as StepOptions,
    code_keys as code_keys,
    code_step as code_step,
    code_values as code_values,
)
from lshkit.reference.hashing import (
    angle as angle,
    bin_codes as bin_codes,
    codes as codes,
    collision_probability as collision_probability,
    cosine_probability as cosine_probability,
    cosine_probability_slope as cosine_probability_slope,
    feature_bins as feature_bins,
    hadamard_projections as hadamard_projections,
    hash as hash,
    hyperplane_projections as hyperplane_projections,
    lift as lift,
    projection_bins as projection_bins,
    projections as projections,
    random_parameters as random_parameters,
    soft_codes as soft_codes,
    unit as unit,
    unit_projections as unit_projections,
    walsh_hadamard as walsh_hadamard,
)
from lshkit.reference.kernel_sums import (
    kernel_sums as kernel_sums,
    leave_one_out as leave_one_out,
    log_kernel as log_kernel,
    partition_sums as partition_sums,
)
from lshkit.reference.lsh_attention import (
    bert_lsh_forward as bert_lsh_forward,
    exact_pairs as exact_pairs,
    inclusion_probability as inclusion_probability,
    key_centre as key_centre,
    lsh_attention_backward as lsh_attention_backward,
    lsh_attention_forward as lsh_attention_forward,
    lsh_attention_sums as lsh_attention_sums,
)
from lshkit.reference.soft_attention import (
    soft_attention_backward as soft_attention_backward,
    soft_attention_forward as soft_attention_forward,
)
