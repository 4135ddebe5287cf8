"""What the estimator's parameters, rows and weights may be."""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from joblib import effective_n_jobs
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_array, check_is_fitted, validate_data

from lshkit import _C, checks
from lshkit.kde import bandwidth as bandwidths
from lshkit.kde import kernels
from lshkit.kde.forgetting import check_half_life
from lshkit.kde.geometry import has_zero_row
from lshkit.kde.methods import METHODS
from lshkit.typing import RandomState, Rows

if TYPE_CHECKING:
    from lshkit.kde.sketch import Sketch


def keeps_rows(algorithm: str) -> bool:
    return algorithm == "auto" or METHODS[algorithm].keeps_rows


def check_parameters(estimator: BaseEstimator) -> int:
    """n_bits in use; raises for parameters that are wrong or do not go together."""
    checks.choice("kernel", estimator.kernel, kernels.CODES)
    checks.choice("algorithm", estimator.algorithm, ["auto", *METHODS])
    for name in ("rtol", "atol"):
        check_tolerance(name, getattr(estimator, name))
    check_confidence(estimator.confidence)
    if estimator.algorithm == "bucket_sum":
        for name, none in (("atol", 0), ("confidence", None)):
            if getattr(estimator, name) != none:
                raise ValueError(
                    f"{name} must be {none} for algorithm='bucket_sum', whose n_hashes set its "
                    f"error, got {checks.shown(getattr(estimator, name))}"
                )
    method = METHODS.get(estimator.algorithm)  # None: "auto"
    if method is not None and estimator.kernel not in method.kernels:
        raise ValueError(
            f"kernel must be one of {list(method.kernels)} for algorithm={method.name!r}, got "
            f"{estimator.kernel!r} ('auto' supports every kernel)"
        )
    if method is not None and method.uses_rtol and estimator.rtol == 0:
        raise ValueError(f"rtol must be > 0 for algorithm={method.name!r}, got 0")
    checks.boolean("normalize", estimator.normalize)
    checks.integer("batch_size", estimator.batch_size, 1)
    check_n_jobs(estimator.n_jobs)
    checks.integer("n_hashes", estimator.n_hashes, 1, 65535)
    _check_forgetting(estimator)
    return bits_of(estimator, 64 if method is None else method.max_bits)


def bits_of(estimator: BaseEstimator, most: int) -> int:
    """n_bits in use, at most `most`."""
    if estimator.n_bits is None:
        return 8 if estimator.kernel == "angular" else 12
    return checks.integer("n_bits", estimator.n_bits, 1, most)


def check_as_earlier(estimator: BaseEstimator, sketch: Sketch | None, n_bits: int) -> None:
    """ValueError unless the parameters go with the earlier rows, which a sketch holds or none."""
    if (sketch is None) != keeps_rows(estimator.algorithm):
        wanted = "not be" if sketch is None else "be"
        raise ValueError(
            f"algorithm must {wanted} 'bucket_sum', as for the earlier rows (a sketch stores "
            f"none), got {estimator.algorithm!r}: use fit"
        )
    if sketch is None:
        return
    held = {
        "kernel": sketch.geometry.kernel,
        "n_bits": sketch.n_bits,
        "n_hashes": sketch.n_hashes,
        "sliding_window": getattr(sketch.forgetting, "size", None),
        "half_life": getattr(sketch.forgetting, "half_life", None),
    }
    asked = {name: getattr(estimator, name, None) for name in held} | {"n_bits": n_bits}
    for name, value in held.items():
        if asked[name] != value:
            raise ValueError(
                f"{name} must be {value!r}, as for the earlier rows of the sketch, got "
                f"{asked[name]!r}: use fit"
            )


def _check_forgetting(estimator: BaseEstimator) -> None:
    window, error = estimator.sliding_window, estimator.sliding_window_error
    if not 0 <= checks.real(error) <= 0.5:
        got = checks.shown(error)
        raise ValueError(f"sliding_window_error must be a number from 0 to 0.5, got {got}")
    if window is not None:
        checks.integer("sliding_window", window, 1, 2**63 - 1)
    elif float(error) > 0:
        raise ValueError("sliding_window_error needs a sliding_window")
    if estimator.half_life is not None:
        check_half_life(estimator.half_life)
        if window is not None:
            raise ValueError("half_life and sliding_window exclude each other")
    for name in ("sliding_window", "half_life"):
        if getattr(estimator, name) is not None and keeps_rows(estimator.algorithm):
            raise ValueError(f"{name} needs algorithm='bucket_sum'")


def as_queries(estimator: BaseEstimator, X: Rows, kernel: str) -> np.ndarray:
    """`as_rows` of rows to be asked for: without scikit-learn's checks where all is in order."""
    if (
        type(X) is np.ndarray
        and X.dtype in (np.float32, np.float64)
        and X.ndim == 2
        and X.flags.c_contiguous
        and len(X) > 0
        and X.shape[1] == estimator.n_features_in_
        and not hasattr(estimator, "feature_names_in_")
        and math.isfinite(np.vdot(X, X))
        and not (kernel == "angular" and has_zero_row(X))
    ):
        return X
    return as_rows(estimator, X, False, kernel)


def detached(name: str, value: Any) -> Any:
    """An array; a tensor's of half precision as float32. Frames, whose columns scikit-learn names,
    and objects, which it refuses, stay as they are.

    TypeError for what scikit-learn would convert to numbers without a word: dates, times, strings
    of digits, what a mask hides; and for what is no array, of which its error names no argument.
    """
    torch = checks.torch_of(**{name: value})
    if torch is None and hasattr(value, "iloc") and hasattr(value, "columns"):
        for column, dtype in zip(value.columns, value.dtypes, strict=True):
            if dtype.kind not in "fiubcO":
                got = f"column {column!r} of dtype {dtype}"
                raise TypeError(f"{name} must hold real numbers, got {got}")
        objects = [i for i, dtype in enumerate(value.dtypes) if dtype.kind == "O"]
        if objects:
            checks.refuse_words(name, value, np.asarray(value.iloc[:, objects], object))
        return value
    if torch is None:
        found = checks.array(name, value, kinds="fiubcO")
        checks.refuse_words(name, value, found)
        if found.dtype == object and not (value is None or found.ndim or hasattr(value, "shape")):
            raise TypeError(f"{name} must hold real numbers, got a {type(value).__name__}")
        named = hasattr(value, "columns")
        return value if named or found.dtype == object or isinstance(value, np.ndarray) else found
    value = checks.array(name, value, torch).detach()
    return (value.float() if value.dtype in (torch.bfloat16, torch.float16) else value).numpy()


def detached_rows(name: str, value: Any) -> Any:
    """`detached`, of two dimensions: scikit-learn's error about others names no argument."""
    value = detached(name, value)
    if np.ndim(value) != 2:
        got = "None" if value is None else f"shape {np.shape(value)}"
        raise ValueError(
            f"{name} must be (n, n_features), got {got}. Reshape your data: reshape(-1, 1) makes "
            "rows of one feature, reshape(1, -1) one row"
        )
    return value


def as_rows(estimator: BaseEstimator, X: Rows, reset: bool, kernel: str) -> np.ndarray:
    X = detached_rows("X", X)
    X = validate_data(estimator, X, reset=reset, order="C", dtype=[np.float64, np.float32])
    if kernel == "angular" and has_zero_row(X):
        raise ValueError("X has a row of zeros, which has no angle")
    return X


def as_weights(weights: Rows | None, n: int, all_zero: bool = False) -> np.ndarray | None:
    """all_zero: whether they may all be 0, as those of rows beside others may."""
    if weights is None:
        return None
    weights = detached("sample_weight", weights)
    if np.iscomplexobj(weights):  # scikit-learn's error names no argument
        got = f"dtype {np.asarray(weights).dtype}"
        raise TypeError(f"sample_weight must hold real numbers, got {got}")
    options = dict(ensure_2d=False, ensure_min_samples=0, input_name="sample_weight")
    weights = check_array(weights, allow_nd=True, dtype=np.float64, **options)
    if weights.shape != (n,):
        raise ValueError(
            f"sample_weight must have shape ({n},), one for each row, got {weights.shape}"
        )
    if (weights < 0).any():
        raise ValueError(f"sample_weight must be >= 0, got {weights.min()}")
    if not (all_zero or weights.any()):
        raise ValueError("sample_weight must not be all zero")
    return weights


def check_tolerance(name: str, value: float) -> None:
    if not 0 <= checks.real(value) < math.inf:
        raise ValueError(f"{name} must be a finite number >= 0, got {checks.shown(value)}")


def check_confidence(value: float | None) -> None:
    if value is not None and not 0 < checks.real(value) < 1:
        raise ValueError(f"confidence must be None or in (0, 1), got {checks.shown(value)}")


def random_of(random_state: RandomState) -> np.random.RandomState:
    """scikit-learn's `check_random_state`, whose errors name no argument; a bool is no int."""
    try:
        if isinstance(random_state, (bool, np.bool_)):
            raise ValueError
        return check_random_state(random_state)
    except ValueError:
        wanted = "None, an int from 0 to 2^32 - 1 or a RandomState"
        got = checks.shown(random_state)
        raise ValueError(f"random_state must be {wanted}, got {got}") from None


def check_n_jobs(n_jobs: int | None) -> None:
    if n_jobs is None:
        return
    if (
        isinstance(n_jobs, bool)
        or not isinstance(n_jobs, numbers.Integral)
        or not 0 < abs(n_jobs) < 2**31
    ):
        wanted = "None or a nonzero 32-bit integer"
        raise ValueError(f"n_jobs must be {wanted}, got {checks.shown(n_jobs)}")


@contextlib.contextmanager
def core_threads(n_jobs: int | None) -> Iterator[int]:
    """The number of threads, which hashing, drawing and sorting inside take too.

    They are set for the calling thread alone.
    """
    check_n_jobs(n_jobs)
    threads = effective_n_jobs(n_jobs)
    before = _C.set_max_threads(threads)
    try:
        yield threads
    finally:
        _C.set_max_threads(before)


def check_mergeable(mine: BaseEstimator, other: BaseEstimator) -> None:
    """Raises where two fitted estimators do not describe rows in the same way."""
    if not isinstance(other, type(mine)):
        raise TypeError(f"other must be a {type(mine).__name__}, got {type(other).__name__}")
    check_is_fitted(other)
    sketches = [x._kde_sketch is not None for x in (mine, other)]
    if sketches[0] != sketches[1]:
        got = f"{mine.algorithm!r} and {other.algorithm!r}"
        raise ValueError(f"sketches can only be merged with sketches, got algorithms {got}")
    names: Any = [getattr(x, "feature_names_in_", None) for x in (mine, other)]
    if all(x is not None for x in names) and not np.array_equal(*names):
        raise ValueError(f"feature names differ: {list(names[0])} and {list(names[1])}")
    kinds: list[tuple[Any, ...]] = []
    for x in (mine, other):
        kernel, n_bits = x.kernel, None
        if x._kde_sketch is not None:  # what it is, whatever was set since
            kernel, n_bits = x._kde_sketch.geometry.kernel, x._kde_sketch.n_bits
        elif kernel == "angular":
            n_bits = bits_of(x, 64)
        kinds.append((kernel, n_bits if kernel == "angular" else None, x.n_features_in_))
    if kinds[0] != kinds[1]:
        raise ValueError(f"kernel, n_bits and features differ: {kinds[0]} and {kinds[1]}")
    if sketches[0]:
        if not np.array_equal(mine.bandwidth_, other.bandwidth_):
            raise ValueError(f"bandwidth_ differ: {mine.bandwidth_} and {other.bandwidth_}")
        return
    widths: Any = [bandwidths.check(x.bandwidth, x.n_features_in_, x.kernel) for x in (mine, other)]
    if not np.array_equal(*widths):
        raise ValueError(f"bandwidth differ: {mine.bandwidth!r} and {other.bandwidth!r}")


@overload
def of_unit_size(weights: np.ndarray) -> np.ndarray: ...


@overload
def of_unit_size(weights: None) -> None: ...


def of_unit_size(weights: np.ndarray | None) -> np.ndarray | None:
    """Weights times a power of 2 that brings the largest to 1 or so: only their ratios count."""
    if weights is None:
        return None
    return np.ldexp(weights, -int(np.frexp(weights.max())[1]))
