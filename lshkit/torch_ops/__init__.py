"""torch.ops.lshkit.*: the core's operators for PyTorch, with fake kernels, autograd and autocast.

Every operator is functional, allocates its results and takes the hash parameters as a tensor, so a
compiled graph needs no new trace for new hash functions. Tensors are (batch, heads, rows, columns)
and may be strided, key masks (batch, keys) booleans with True for a key that takes part, codes
uint8 (n_bits <= 8) or uint16. Options are the core's integers: FAMILY, NORMALIZE, GRADIENT,
WEIGHTING and, for bucket_sum, order 0 (all keys), 1 (causal) or 2 (the transpose of causal).
The public doors with the checks of shapes and words are lshkit.attention and lshkit.buckets.
"""

from lshkit import _torch  # noqa: F401
from lshkit.hash_functions import FAMILY
from lshkit.torch_ops.attention import (
    GRADIENT,
    NORMALIZE,
    expected_attention,
    expected_attention_backward,
    yoso_attention,
    yoso_attention_backward,
)
from lshkit.torch_ops.buckets import bucket_sum
from lshkit.torch_ops.hashing import hash, hash_parameters
from lshkit.torch_ops.lsh_attention import WEIGHTING, lsh_attention, lsh_attention_backward
from lshkit.torch_ops.soft import soft_hash, soft_hash_backward
from lshkit.torch_ops.soft_attention import soft_attention, soft_attention_backward
from lshkit.torch_ops.tensors import code_dtype
from lshkit.torch_ops.weighted_buckets import weighted_bucket_sum, weighted_bucket_sum_backward

__all__ = [
    "FAMILY",
    "GRADIENT",
    "NORMALIZE",
    "WEIGHTING",
    "bucket_sum",
    "code_dtype",
    "expected_attention",
    "expected_attention_backward",
    "hash",
    "hash_parameters",
    "lsh_attention",
    "lsh_attention_backward",
    "soft_attention",
    "soft_attention_backward",
    "soft_hash",
    "soft_hash_backward",
    "weighted_bucket_sum",
    "weighted_bucket_sum_backward",
    "yoso_attention",
    "yoso_attention_backward",
]
