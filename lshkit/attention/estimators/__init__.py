"""Estimators: values that own the options of one kind of attention and compute it.

An estimator specifies the attention weights. It is frozen, contains only JSON values, compares and
hashes by its fields, and validates them when it is made, so it can be an attribute of a module, a
key of a dict, an entry of a config file, and a constant of a compiled graph. `Sampled` (YOSO-m) and
`Expected` (YOSO-E) are from YOSO (ICML 2021), `Soft` is multi-probe soft hashing, `Colliding` is
softmax estimated from the pairs that collide. Tensors that may require a gradient are passed to the
call instead, as `parameters`.
"""

import dataclasses

from lshkit.attention.estimators.base import ESTIMATORS, OPTIONS, Estimator
from lshkit.attention.estimators.colliding import Colliding
from lshkit.attention.estimators.expected import Expected
from lshkit.attention.estimators.hashed import BucketSums, Hashed, bits_for
from lshkit.attention.estimators.sampled import Sampled
from lshkit.attention.estimators.soft import Soft

__all__ = [
    "ESTIMATORS",
    "OPTIONS",
    "BucketSums",
    "Colliding",
    "Estimator",
    "Expected",
    "Hashed",
    "Sampled",
    "Soft",
    "bits_for",
    "estimator_of",
]

_KINDS: tuple[type[Estimator], ...] = (Sampled, Expected, Soft, Colliding)
for _kind in _KINDS:
    ESTIMATORS[_kind.name] = _kind
    OPTIONS[_kind.name] = tuple(field.name for field in dataclasses.fields(_kind))


def estimator_of(given: Estimator | str) -> Estimator:
    """The estimator itself, or the one with default options that a name stands for."""
    if isinstance(given, Estimator):
        return given
    if isinstance(given, str) and given in ESTIMATORS:
        return ESTIMATORS[given]()
    classes = ", ".join(f"{kind.__name__}(...)" for kind in _KINDS)
    message = f"estimator must be {classes} or one of {', '.join(map(repr, ESTIMATORS))}"
    raise (ValueError if isinstance(given, str) else TypeError)(f"{message}, got {given!r}")
