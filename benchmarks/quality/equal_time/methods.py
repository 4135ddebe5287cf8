"""What is compared at equal time: mixers of the heads' values, and schedules of lengths."""

from fractions import Fraction
from typing import NamedTuple

from benchmarks.encoder import CONTROLS
from benchmarks.measurement import FAST_BFLOAT16
from lshkit.attention import Sampled, Soft


def yoso(n_bits: int) -> tuple:
    return "YOSO", {"estimator": Sampled(n_bits=n_bits, expectation="never")}


METHODS = {
    "softmax": ("softmax", {"how": "bfloat16" if FAST_BFLOAT16 else "fused"}),
    "YOSO, 8 bits": yoso(8),
    "YOSO, 10 bits": yoso(10),
    "YOSO, 12 bits": yoso(12),
    "YOSO, 14 bits": yoso(14),
    "soft codes, 4 probes": ("YOSO", {"estimator": Soft()}),
    "soft codes, 2 probes": ("YOSO", {"estimator": Soft(n_probes=2)}),
    "Performer": ("Performer", {"n_features": 256}),
    "delta rule": ("delta rule", {}),
    "window only": CONTROLS["window only"],
    "convolution only": CONTROLS["convolution only"],
}


class Stage(NamedTuple):
    """A part of a run: sequences of a share of the length, so many in a step."""

    length: Fraction
    batch_size: int
    until: float  # the share of the seconds that have passed at its end


def stages(*parts: tuple[int, float]) -> tuple[Stage, ...]:
    """Of (divisor of the length, until): half as many tokens a step as the full length has."""
    return tuple(Stage(Fraction(1, by), max(1, by // 2), until) for by, until in parts)


SCHEDULES = {
    "plain": stages((1, 1.0)),
    "1/8 throughout": stages((8, 1.0)),
    "1/8, then full": stages((8, 0.7), (1, 1.0)),
    "1/16, 1/4, full": stages((16, 0.5), (4, 0.85), (1, 1.0)),
}
