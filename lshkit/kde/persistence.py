"""Files of LSHKernelDensity: what is in them, and whether it makes an estimator."""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from lshkit import archive, checks
from lshkit.archive import Archive, Expected
from lshkit.hashing import FastHadamard, RandomBinning
from lshkit.kde import bandwidth as bandwidths
from lshkit.kde import forgetting, kernels
from lshkit.kde.arguments import (
    as_weights,
    check_confidence,
    check_parameters,
    check_tolerance,
    random_of,
)
from lshkit.kde.changes import alone
from lshkit.kde.geometry import Geometry, has_zero_row
from lshkit.kde.methods import METHODS
from lshkit.kde.sketch import SKETCH_BITS, Sketch, check_total
from lshkit.typing import File

if TYPE_CHECKING:
    from lshkit.kde.estimator import LSHKernelDensity
    from lshkit.kde.outliers import LSHOutlierDetector

Density = TypeVar("Density", bound="LSHKernelDensity")
Detector = TypeVar("Detector", bound="LSHOutlierDetector")

KIND, VERSION = "LSHKernelDensity", 1
DETECTOR = "LSHOutlierDetector"
KEPT = "detector.rows", "detector.keys"  # of a sketch


# --- Writing ------------------------------------------------------------------------------------


def save(estimator: LSHKernelDensity, file: File) -> None:
    with alone(estimator._kde_sketch):
        archive.write(file, KIND, VERSION, *_contents(estimator))


def save_detector(detector: LSHOutlierDetector, file: File) -> None:
    """A file of an LSHOutlierDetector: its density's, and what it found out about the rows."""
    with alone(detector.density_._kde_sketch):
        archive.write(file, DETECTOR, VERSION, *_contents_of_detector(detector))


def _contents_of_detector(
    detector: LSHOutlierDetector,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    detector._check_parameters()
    density, arrays = _contents(detector.density_)
    offset, scores, _ = detector._prepare()
    header = {"density": density, "offset": offset}
    header["contamination"] = _plain(detector.contamination)
    own = {"n_jobs": _plain(detector.n_jobs)}
    if isinstance(detector.random_state, numbers.Integral):
        own["random_state"] = int(detector.random_state)
    header["parameters"] = own
    if hasattr(detector, "feature_names_in_"):
        arrays["detector.feature_names"] = _joined(detector.feature_names_in_)
    arrays["detector.scores"] = scores
    if detector._kept is not None:
        header["n_added"] = detector._n_added
        arrays |= dict(zip(KEPT, detector._kept, strict=True))
    return header, arrays


def _check(estimator: LSHKernelDensity, n_features: int) -> None:
    """The parameters, as `fit` does."""
    check_parameters(estimator)
    bandwidths.check(estimator.bandwidth, n_features, estimator.kernel)
    random_of(estimator.random_state)


def _plain(value: Any) -> Any:
    """A number of NumPy as one for JSON."""
    return value.item() if isinstance(value, np.generic) else value


def _joined(feature_names: np.ndarray) -> np.ndarray:
    names = "\0".join(str(x) for x in feature_names)
    if names.count("\0") != len(feature_names) - 1:
        raise ValueError("a feature name with a NUL character cannot be saved")
    return np.frombuffer(names.encode(), np.uint8)


def _contents(estimator: LSHKernelDensity) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Header and arrays of an LSHKernelDensity's file, whose parameters are checked as in `fit`."""
    _check(estimator, estimator.n_features_in_)
    header: dict[str, Any] = {"parameters": {}, "seed": int(estimator._kde_seed)}
    header["n_samples_seen"] = int(estimator.n_samples_seen_)
    header["n_features"] = int(estimator.n_features_in_)
    arrays = {}
    for name, value in estimator.get_params(deep=False).items():
        if name == "random_state" and not (value is None or isinstance(value, int)):
            value = int(value) if isinstance(value, np.integer) else None  # a RandomState moves on
        if isinstance(value, (list, tuple, np.ndarray)):
            arrays[f"parameter.{name}"] = np.asarray(value, np.float64)
        else:
            header["parameters"][name] = _plain(value)
    if hasattr(estimator, "feature_names_in_"):
        arrays["feature_names"] = _joined(estimator.feature_names_in_)
    if estimator._kde_sketch is None:
        _save_rows(estimator, header, arrays)
    else:
        _save_sketch(estimator._kde_sketch, header, arrays)
    return header, arrays


def _save_rows(
    estimator: LSHKernelDensity, header: dict[str, Any], arrays: dict[str, np.ndarray]
) -> None:
    arrays["X"], weights = estimator._training_rows()
    if weights is not None:
        arrays["weights"] = weights
    header["weighted"] = weights is not None
    header["picked"] = estimator._kde_picked
    fitted = estimator._kde_fitted
    if estimator._kde_picked is not None and fitted is not None:
        kernel, n_bits, arrays["bandwidth"] = fitted
        header["fitted"] = {"kernel": str(kernel), "n_bits": n_bits}


def _save_sketch(sketch: Sketch, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    settings, of_family = archive.split_family(sketch.hasher)
    arrays |= of_family | {"bandwidth": sketch.geometry.bandwidth, "table": sketch.table.table}
    header["fitted"] = {"kernel": str(sketch.geometry.kernel), "n_bits": int(sketch.n_bits)}
    total = float(sketch.table.table[0].sum())
    header["sketch"] = {"hasher": settings, "total": total, "forgetting": None}
    if sketch.forgetting is not None:
        header["sketch"]["forgetting"] = sketch.forgetting.settings()
        arrays |= sketch.forgetting.arrays()


# --- Reading ------------------------------------------------------------------------------------


def load(cls: type[Density], file: File) -> Density:
    with archive.opened(file, KIND, VERSION) as stored:
        return _restore(cls, stored)


class _DensityOf:
    """The density in a detector's archive: what `_restore` reads. The rest is in `own`."""

    def __init__(self, stored: Archive, expected: Expected) -> None:
        self.header, self.stored, self.expected = stored.header["density"], stored, expected
        self.arrays = {k: x for k, x in stored.arrays.items() if k not in expected}

    def read(self, expected: Expected) -> dict[str, np.ndarray]:
        arrays = self.stored.read(expected | self.expected)
        self.own = {name: arrays.pop(name) for name in self.expected}
        return arrays


def load_detector(
    cls: type[Detector], density_class: type[LSHKernelDensity], file: File
) -> Detector:
    with archive.opened(file, DETECTOR, VERSION) as stored:
        header = stored.header
        expected: Expected = {"detector.scores": (("<f8",), None)}
        if "detector.feature_names" in stored.arrays:
            expected["detector.feature_names"] = (("|u1",), None)
        if "n_added" in header:
            expected |= {name: (archive.FLOATS, None) for name in KEPT}
        part = _DensityOf(stored, expected)
        density = _restore(density_class, part)
        detector = cls(contamination=header["contamination"], **header["parameters"])
        detector._restore(density, header, part.own)
        if "detector.feature_names" in part.own:
            names = part.own["detector.feature_names"]
            detector.feature_names_in_ = _split(names, density.n_features_in_)
        return detector


def _split(names: np.ndarray, n_features: int) -> np.ndarray:
    names = names.tobytes()
    if names.count(b"\0") != n_features - 1:
        raise ValueError(f"feature_names must have {n_features} names")
    return np.array(names.decode().split("\0"), object)


def _restore(cls: type[Density], stored: Archive | _DensityOf) -> Density:
    header = stored.header
    n = checks.integer("n_samples_seen", header["n_samples_seen"], 0, 2**63 - 1)
    d = checks.integer("n_features", header["n_features"], 1)
    listed = [x for x in cls._get_param_names() if f"parameter.{x}" in stored.arrays]
    expected: Expected = {f"parameter.{x}": (("<f8",), None) for x in listed}
    if "feature_names" in stored.arrays:
        expected["feature_names"] = (("|u1",), None)
    if "sketch" in header:
        expected |= _sketch_arrays(header, d)
    else:
        expected |= _row_arrays(header, n, d)
    arrays = stored.read(expected)
    own: dict[str, Any] = {x: arrays[f"parameter.{x}"] for x in listed}
    estimator = cls(**header["parameters"], **own)
    _check(estimator, d)
    estimator._begin(checks.integer("seed", header["seed"], 0, 2**31 - 2))
    estimator.n_features_in_, estimator.n_samples_seen_ = d, n
    if "feature_names" in arrays:
        estimator.feature_names_in_ = _split(arrays["feature_names"], d)
    if "sketch" in header:
        _restore_sketch(estimator, header, arrays)
        return estimator
    _restore_rows(estimator, header, arrays)
    return estimator._prepare()


def _row_arrays(header: dict[str, Any], n: int, d: int) -> Expected:
    """What `Archive.read` is to expect of an estimator that keeps its rows."""
    expected: Expected = {"X": (archive.FLOATS, (n, d))}
    if checks.boolean("weighted", header["weighted"]):
        expected["weights"] = (("<f8",), (n,))
    if header["picked"] is not None:
        expected["bandwidth"] = (("<f8",), (d,))
    return expected


def _restore_rows(
    estimator: LSHKernelDensity, header: dict[str, Any], arrays: dict[str, np.ndarray]
) -> None:
    X = arrays["X"]
    if len(X) == 0 or not np.isfinite(X).all():
        raise ValueError("X must have at least one row and finite numbers")
    weights = as_weights(arrays.get("weights"), len(X))
    estimator._kde_rows, estimator._kde_weights = [X], [weights]
    kernel = estimator.kernel
    if header["picked"] is not None:
        fitted = header["fitted"]
        kernel, n_bits = fitted["kernel"], checks.integer("n_bits", fitted["n_bits"], 1, 64)
        checks.choice("kernel", kernel, kernels.CODES)
        widths = bandwidths.check_widths(arrays["bandwidth"], X.shape[1], kernel)
        picked = header["picked"]
        for name, settings in picked["methods"].items():
            if name not in METHODS:
                raise ValueError(f"method must be one of {', '.join(METHODS)}, got {name!r}")
            METHODS[name].check_saved(settings, len(X), kernel, n_bits)
        if picked["asked"] not in ("auto", *METHODS):
            raise ValueError(f"algorithm must be 'auto' or a method's, got {picked['asked']!r}")
        for name in ("rtol", "negligible"):
            check_tolerance(name, picked[name])
        check_tolerance("at_risk", picked.get("at_risk", 0.0))
        check_confidence(picked["confidence"])
        estimator._kde_picked, estimator._kde_fitted = picked, (kernel, n_bits, widths)
    if kernel == "angular" and has_zero_row(X):
        raise ValueError("X has a row of zeros, which has no angle")


def _sketch_arrays(header: dict[str, Any], d: int) -> Expected:
    """What `Archive.read` is to expect of a sketch."""
    sketch, n_bits = header["sketch"], header["fitted"]["n_bits"]
    n_hashes = checks.integer("n_hashes", sketch["hasher"]["n_hashes"], 1, 65535)
    n_buckets = 2 ** checks.integer("n_bits", n_bits, 1, SKETCH_BITS)
    expected = archive.family_arrays(sketch["hasher"])
    expected |= {"table": (("<f8",), (n_hashes, n_buckets, 1)), "bandwidth": (("<f8",), (d,))}
    if sketch["forgetting"] is not None:
        name = sketch["forgetting"]["name"]
        if name not in forgetting.BY_NAME:
            known = ", ".join(forgetting.BY_NAME)
            raise ValueError(f"forgetting must be one of {known}, got {name!r}")
        shape = n_hashes, n_buckets, 1
        expected |= forgetting.BY_NAME[name].expected(sketch["forgetting"], shape)
    return expected


def _restore_sketch(
    estimator: LSHKernelDensity, header: dict[str, Any], arrays: dict[str, np.ndarray]
) -> None:
    settings, fitted = header["sketch"], header["fitted"]
    kernel, n_bits = fitted["kernel"], fitted["n_bits"]
    checks.choice("kernel", kernel, kernels.COLLISION)
    widths = bandwidths.check_widths(arrays["bandwidth"], estimator.n_features_in_, kernel)
    hasher = archive.join_family(settings["hasher"], arrays)
    family = FastHadamard if kernel == "angular" else RandomBinning
    if type(hasher) is not family or getattr(hasher, "n_bits", n_bits) != n_bits:
        raise ValueError(f"a sketch of the kernel {kernel!r} has no hash family {hasher!r}")
    if hasher.n_features != len(widths):
        raise ValueError(f"{hasher!r} must have n_features={len(widths)}")
    total = settings["total"]
    if not (np.isfinite(arrays["table"]).all() and math.isfinite(total) and total >= 0):
        raise ValueError("table and total must be finite, and total >= 0")
    _check_sums(arrays["table"], total)
    geometry = Geometry(kernel, n_bits, np.zeros(len(widths)), widths)
    sketch = Sketch(geometry, n_bits, hasher.n_hashes, estimator._kde_seed, hasher=hasher)
    n_rows, sketch.total = estimator.n_samples_seen_, float(total)
    sketch.table.table[:], sketch.table.count = arrays["table"], n_rows
    # A window takes out weights that are not in the table alone.
    sums = [x for name, x in arrays.items() if name == "table" or name.startswith("forgetting.")]
    sketch.whole = all((x == np.floor(x)).all() for x in sums if x.dtype.kind == "f")
    if (saved := settings["forgetting"]) is not None:
        kind = forgetting.BY_NAME[saved["name"]]
        sketch.forgetting = kind.restored(saved, arrays, sketch.table, n_rows)
        sketch.total = sketch.forgetting.weight(sketch.table)
    if sketch.forgetting is None or sketch.forgetting.exact:
        check_total(sketch._held, sketch.whole)
    estimator._kde_sketch = sketch


def _check_sums(table: np.ndarray, total: float) -> None:
    """ValueError unless every hash's buckets hold all of the weight.

    A bucket below 0 is possible: `partial_unfit` once took rows that were never added.
    """
    rounding = 1e-6 * max(total, np.abs(table).max(), 1)
    off = np.abs(table.sum(axis=(1, 2)) - total).max()
    if not off <= rounding:
        raise ValueError(
            f"table must add up to total={total:g} for each hash, it is off by {off:g}"
        )
