"""Fitted samplers in .npz files: arrays only, versioned, checked before anything is loaded."""

import os

import numpy as np

from lshkit import hashing

KIND, VERSION = "lshkit.sampling.LSHSampler", 1
_HASHER = "hasher/"


def save(path, hasher, data, following):
    """Writes the file. data: rows, codes, indices and weights (or None); following: next index."""
    arrays = {name: x for name, x in data.items() if x is not None}
    arrays |= {_HASHER + name: x for name, x in hasher.to_arrays().items()}
    arrays |= {"kind": np.array(KIND), "version": np.array(VERSION), "next": np.array(following)}
    part = f"{os.fspath(path)}.part"  # what is at path stays whole until the new file is
    with open(part, "wb") as file:
        np.savez(file, **arrays)
    os.replace(part, path)


def load(path):
    """What `save` was given: hasher, data, following. ValueError for any other file."""
    with open(os.fspath(path), "rb") as file:  # a number would be a file descriptor
        arrays = _read(path, file)
    if str(arrays.get("kind")) != KIND:
        raise ValueError(f"{path} is no file of an LSHSampler")
    version = arrays.get("version")
    if version is None or version.dtype.kind not in "iu" or version.shape != ():
        raise ValueError(f"{path} has no version")
    if version < 1:
        raise ValueError(f"{path} is damaged: version must be 1 or more, got {version}")
    if version > VERSION:
        raise ValueError(
            f"{path} has version {version}, this lshkit reads up to {VERSION}: use a newer one"
        )
    try:
        return _checked(arrays)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _read(path, file):
    """All arrays of the file."""
    try:
        with np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (AttributeError, TypeError):  # np.load gave an array, which is no archive
        raise ValueError(f"{path} is no file of an LSHSampler") from None
    except Exception as error:  # of a damaged file, numpy and zipfile raise whatever they meet
        wanted = "no whole .npz file: cut short, damaged or of another kind"
        raise ValueError(f"{path} is {wanted} ({error})") from error
    if not all(isinstance(x, np.ndarray) for x in arrays.values()):  # members of a plain zip
        raise ValueError(f"{path} is no file of an LSHSampler")
    return arrays


def _checked(arrays):
    prefixed = [name for name in arrays if name.startswith(_HASHER)]
    hasher = hashing.from_arrays({name[len(_HASHER) :]: arrays[name] for name in prefixed})
    rows, codes, indices, following = (arrays[k] for k in ("rows", "codes", "indices", "next"))
    weights = arrays.get("weights")
    n = len(indices)
    code_type = hasher.hash(np.ones((1, hasher.n_features))).dtype
    _check("rows", rows, (np.float32, np.float64), (n, hasher.n_features))
    _check("codes", codes, (code_type,), (n, hasher.n_hashes))
    _check("indices", indices, (np.int64,), (n,))
    _check("next", following, (np.int64,), ())
    ends = np.concatenate([[-1], indices, [following]])
    if not (np.diff(ends) > 0).all():
        raise ValueError("indices must increase from 0 on and be below next")
    if not np.isfinite(rows).all():
        raise ValueError("rows must be finite")
    if weights is not None:
        _check("weights", weights, (np.float64,), (n,))
        if not (np.isfinite(weights) & (weights >= 0)).all():
            raise ValueError("weights must be finite and >= 0")
    data = {"rows": rows, "codes": codes, "weights": weights, "indices": indices}
    return hasher, data, int(following)


def _check(name, x, types, shape):
    if x.dtype not in types or x.shape != shape:
        wanted = " or ".join(str(np.dtype(t)) for t in types)
        raise ValueError(f"{name} must be {wanted} {shape}, got {x.dtype} {x.shape}")
