"""What the estimator's parameters, rows and weights may be."""

import math
import numbers

import numpy as np
from sklearn.utils.validation import check_array, validate_data

from lshkit import checks
from lshkit.kde import kernels

ALGORITHMS = ("auto", "brute", "random", "bucket_sum", "near_far", "split", "hbe")
SAMPLED = ("random", "near_far", "split", "hbe")
MAX_SKETCH_BITS = 16


def check_parameters(estimator):
    """n_bits in use; raises for parameters that are wrong or do not go together."""
    if estimator.kernel not in kernels.CODES:
        raise ValueError(f"kernel must be one of {list(kernels.CODES)}, got {estimator.kernel!r}")
    if estimator.algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {ALGORITHMS}, got {estimator.algorithm!r}")
    if (
        isinstance(estimator.rtol, bool)
        or not isinstance(estimator.rtol, numbers.Real)
        or not 0 <= estimator.rtol < math.inf
    ):
        raise ValueError(f"rtol must be a finite number >= 0, got {estimator.rtol!r}")
    if estimator.algorithm in SAMPLED and estimator.kernel in kernels.COMPACT:
        raise ValueError(
            f"algorithm must be 'brute' or 'auto' for the kernel {estimator.kernel!r}, "
            f"got {estimator.algorithm!r}"
        )
    if estimator.algorithm in SAMPLED and estimator.rtol == 0:
        raise ValueError(f"rtol must be > 0 for algorithm={estimator.algorithm!r}, got 0")
    checks.boolean("normalize", estimator.normalize)
    checks.integer("batch_size", estimator.batch_size, 1)
    checks.integer("n_hashes", estimator.n_hashes, 1, 65535)
    sketch = estimator.algorithm == "bucket_sum"
    if sketch and estimator.kernel not in kernels.COLLISION:
        raise ValueError(
            f"algorithm='bucket_sum' needs a kernel that is a collision probability, one of "
            f"{kernels.COLLISION}, got {estimator.kernel!r}"
        )
    if estimator.window is not None:
        checks.integer("window", estimator.window, 1)
        if not sketch:
            raise ValueError("window needs algorithm='bucket_sum'")
    n_bits = estimator.n_bits
    if n_bits is None:
        n_bits = 8 if estimator.kernel == "angular" else 12
    return checks.integer("n_bits", n_bits, 1, MAX_SKETCH_BITS if sketch else 64)


def as_rows(estimator, X, reset):
    torch = checks.torch_of(X=X)
    if torch is not None:
        X = checks.array("X", X.detach(), torch)
        X = (X.float() if X.dtype in (torch.bfloat16, torch.float16) else X).numpy()
    return validate_data(estimator, X, reset=reset, order="C", dtype=[np.float64, np.float32])


def as_weights(weights, n):
    if weights is None:
        return None
    weights = check_array(weights, ensure_2d=False, dtype=np.float64, input_name="sample_weight")
    if weights.shape != (n,):
        raise ValueError(
            f"sample_weight must have shape ({n},), one for each row, got {weights.shape}"
        )
    if (weights < 0).any():
        raise ValueError(f"sample_weight must be >= 0, got {weights.min()}")
    if not weights.any():
        raise ValueError("sample_weight must not be all zero")
    return weights
