"""Files of estimators: npz, with a JSON header; no pickle."""

import json
import math
import os
import threading

import numpy as np
from sklearn.utils import check_array

from lshkit import checks
from lshkit.kde import bandwidth as bandwidths
from lshkit.kde import kernels
from lshkit.kde.arguments import as_weights, check_parameters
from lshkit.kde.sketch import MAX_BITS

FORMAT, VERSION = "lshkit.kde", 1


def save(estimator, file):
    header = {"format": FORMAT, "version": VERSION, "arrays": []}
    arrays, parameters = {}, {}
    for name, value in estimator.get_params(deep=False).items():
        if name == "random_state" and not (value is None or isinstance(value, int)):
            value = int(value) if isinstance(value, np.integer) else None  # a RandomState moves on
        if isinstance(value, (list, tuple, np.ndarray)):
            arrays[f"parameter.{name}"] = np.asarray(value, np.float64)
        else:
            parameters[name] = value.item() if isinstance(value, np.generic) else value
    header["parameters"] = parameters
    header["seed"] = int(estimator._kde_seed)
    header["n_samples_seen"] = int(estimator.n_samples_seen_)
    if hasattr(estimator, "feature_names_in_"):
        header["feature_names_in"] = [str(x) for x in estimator.feature_names_in_]
    sketch = estimator._kde_sketch
    if sketch is None:
        X, weights = estimator._training_rows()
        arrays["X"] = X
        if estimator._kde_picked is not None:
            header["picked"] = estimator._kde_picked
            if estimator._kde_fitted is not None:
                kernel, n_bits, arrays["bandwidth"] = estimator._kde_fitted
                header["fitted"] = {"kernel": str(kernel), "n_bits": n_bits}
        if weights is not None:
            arrays["weights"] = weights
    else:
        header["total"] = sketch.total
        header["fitted"] = {
            "kernel": str(sketch.geometry.kernel),
            "n_bits": int(sketch.n_bits),
            "n_hashes": int(sketch.n_hashes),
            "window_size": None if sketch.window is None else int(sketch.window.size),
        }
        arrays["bandwidth"] = np.asarray(sketch.geometry.bandwidth)
        arrays["table"] = sketch.table.table
        if sketch.window is not None:
            header["window"] = [sketch.window.at, sketch.window.filled]
            arrays["window.codes"] = sketch.window.codes
            arrays["window.weights"] = sketch.window.weights
    header["arrays"] = sorted(arrays)
    np.savez(file, header=np.array(json.dumps(header)), **arrays)


def load(cls, file):
    if isinstance(file, (str, os.PathLike)) and not os.path.exists(file):
        written = f"{os.fspath(file)}.npz"  # by save, where the name does not end so
        file = written if os.path.exists(written) else file
    try:
        with np.load(file, allow_pickle=False) as stored:
            header = json.loads(str(stored["header"]))
            known = isinstance(header, dict) and header.get("format") == FORMAT
            if known and header["version"] > VERSION:
                raise _Newer(header["version"])
            if not known:
                raise KeyError("format")
            arrays = {name: stored[name] for name in header["arrays"]}
        return _restore(cls, header, arrays)
    except _Newer as newer:
        raise ValueError(
            f"{file!r} is of version {newer} of this format, this lshkit reads {VERSION}: update it"
        ) from None
    except Exception as error:  # of a broken file, numpy and zipfile raise whatever they meet
        if isinstance(error, OSError) and error.filename is not None:  # it cannot be opened
            raise
        raise ValueError(
            f"{file!r} is no file that LSHKernelDensity.save wrote, or is cut short: {error}"
        ) from error


class _Newer(Exception):
    pass


def _restore(cls, header, arrays):
    parameters = dict(header["parameters"])
    for name in list(arrays):
        if name.startswith("parameter."):
            parameters[name.removeprefix("parameter.")] = arrays.pop(name)
    estimator = cls(**parameters)
    # What was fitted, whatever parameters were set later; older files have the parameters alone.
    fitted = {
        "kernel": estimator.kernel,
        "n_bits": check_parameters(estimator),
        "n_hashes": estimator.n_hashes,
        "window_size": estimator.window,
    } | header.get("fitted", {})
    if fitted["kernel"] not in kernels.CODES:
        raise ValueError(f"there is no kernel {fitted['kernel']!r}")
    estimator._kde_seed = checks.integer("seed", header["seed"], 0, 2**31 - 2)
    estimator._kde_sketch = None
    estimator._kde_rows, estimator._kde_weights, estimator._kde_method = [], [], None
    estimator._kde_picked, estimator._kde_lock = header.get("picked"), threading.RLock()
    estimator._kde_fitted = None
    if "feature_names_in" in header:
        estimator.feature_names_in_ = np.array(header["feature_names_in"], object)
    if "table" not in arrays:
        X = check_array(arrays["X"], dtype=[np.float64, np.float32], order="C", input_name="X")
        if len(X) != header["n_samples_seen"]:
            raise ValueError(f"X has shape {X.shape}")
        weights = as_weights(arrays.get("weights"), len(X))
        estimator._kde_rows, estimator._kde_weights = [X], [weights]
        estimator.n_features_in_ = X.shape[1]
        estimator.n_samples_seen_ = header["n_samples_seen"]
        if "bandwidth" in arrays:
            n_bits = checks.integer("n_bits", fitted["n_bits"], 1, 64)
            widths = bandwidths.check(arrays["bandwidth"], X.shape[1], fitted["kernel"])
            estimator._kde_fitted = fitted["kernel"], n_bits, widths
        return estimator._prepare()
    _restore_sketch(estimator, header, arrays, fitted)
    return estimator


def _restore_sketch(estimator, header, arrays, fitted):
    from lshkit.kde.sketch import Sketch
    from lshkit.kde.sums import Geometry

    kernel, size = fitted["kernel"], fitted["window_size"]
    if kernel not in kernels.COLLISION:
        raise ValueError(f"there is no sketch of the kernel {kernel!r}")
    n_bits = checks.integer("n_bits", fitted["n_bits"], 1, MAX_BITS)
    n_hashes = checks.integer("n_hashes", fitted["n_hashes"], 1, 65535)
    if size is not None:
        checks.integer("window_size", size, 1)
    widths = bandwidths.check(arrays["bandwidth"], arrays["bandwidth"].size, kernel)
    geometry = Geometry(kernel, n_bits, np.zeros(len(widths)), widths)
    sketch = Sketch(geometry, n_bits, n_hashes, header["seed"], size)
    if arrays["table"].shape != sketch.table.table.shape:
        raise ValueError(f"table has shape {arrays['table'].shape}")
    count, total = checks.integer("n_samples_seen", header["n_samples_seen"], 0), header["total"]
    if not (np.isfinite(arrays["table"]).all() and math.isfinite(total) and total >= 0):
        raise ValueError("numbers that are not finite, or a total below 0")
    sketch.table.table[:] = arrays["table"]
    sketch.table.count, sketch.total = count, float(total)
    if size is not None:
        at, filled = header["window"]
        if arrays["window.codes"].max(initial=0) >= 2**n_bits:
            raise ValueError("window.codes beyond the buckets")
        sketch.window.at = checks.integer("window", at, 0, size - 1)
        sketch.window.filled = checks.integer("window", filled, 0, size)
        sketch.window.codes[:] = arrays["window.codes"]
        sketch.window.weights[:] = arrays["window.weights"]
    estimator._kde_sketch = sketch
    estimator.n_features_in_ = len(widths)
    estimator.n_samples_seen_ = count
