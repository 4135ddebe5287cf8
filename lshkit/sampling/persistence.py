"""Files of LSHSampler: what is in them, and whether it makes a sampler."""

from typing import Any, TypeAlias

import numpy as np

from lshkit import archive, checks
from lshkit.archive import Archive
from lshkit.buckets.draw import as_weights
from lshkit.hash_functions import code_dtype
from lshkit.hashing.family import HashFamily
from lshkit.sampling.rows import check_rows
from lshkit.typing import File

# Hasher, data and the index that the next row gets.
Contents: TypeAlias = tuple[HashFamily, dict[str, Any], int]

KIND, VERSION = "LSHSampler", 1
MAX_INDEX = 2**62  # of a row: there is room for those that are added later


def save(file: File, hasher: HashFamily, data: dict[str, Any], following: int) -> None:
    """Writes the file. data: rows, codes, indices and weights (or None); following: next index."""
    settings, arrays = archive.split_family(hasher)
    header = {"hasher": settings, "n_rows": len(data["rows"]), "next": int(following)}
    header["weighted"] = data["weights"] is not None
    arrays |= {name: x for name, x in data.items() if x is not None}
    archive.write(file, KIND, VERSION, header, arrays)


def load(file: File) -> Contents:
    """What `save` was given: hasher, data, following. ValueError for any other file."""
    with archive.opened(file, KIND, VERSION) as stored:
        return _checked(stored)


def _checked(stored: Archive) -> Contents:
    header = stored.header
    settings, n = header["hasher"], checks.integer("n_rows", header["n_rows"], 0)
    of_family = archive.family_arrays(settings)
    n_features, n_hashes = settings["n_features"], settings["n_hashes"]
    expected = {
        "rows": (archive.FLOATS, (n, n_features)),
        "codes": (archive.UNSIGNED, (n, n_hashes)),
        "indices": (("<i8",), (n,)),
    }
    if checks.boolean("weighted", header["weighted"]):
        expected["weights"] = (("<f8",), (n,))
    arrays = stored.read(expected | of_family)
    hasher = archive.join_family(settings, arrays)
    data: dict[str, Any] = {
        name: arrays.get(name) for name in ("rows", "codes", "weights", "indices")
    }
    codes, wanted = data["codes"], code_dtype(hasher.n_buckets)
    if codes.dtype != wanted or int(codes.max(initial=0)) >= hasher.n_buckets:
        got = f"{codes.dtype} up to {codes.max(initial=0)}"
        raise ValueError(f"codes must be {wanted} below {hasher.n_buckets}, got {got}")
    following = checks.integer("next", header["next"], 0, MAX_INDEX)
    ends = np.concatenate([[-1], data["indices"], [following]])
    if not (ends[1:] > ends[:-1]).all():
        raise ValueError("indices must increase from 0 on and be below next")
    check_rows("rows", data["rows"], direction=hasher.directional)
    if data["weights"] is not None:
        data["weights"] = as_weights(data["weights"], n)
    return hasher, data, following
