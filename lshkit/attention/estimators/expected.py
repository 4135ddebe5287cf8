"""YOSO-E: the expectation over the hash functions."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lshkit import checks
from lshkit.attention.call import Call, expected_attention
from lshkit.attention.estimators.base import Estimator
from lshkit.attention.estimators.hashed import DEFAULT_BITS


@dataclass(frozen=True, kw_only=True, repr=False)
class Expected(Estimator):
    """YOSO-E: exact collision probabilities as weights (YOSO, ICML 2021, equations 1 and 3).

    (1 - acos(cosine) / pi)^n_bits for every pair, in quadratic time and linear memory, without
    noise. Computed in float32, for float64 inputs in float64; products of bfloat16 inputs have
    bfloat16 factors where the CPU has AVX512-BF16 or AMX, with errors of 2^-8 of their terms.

    Args:
        n_bits: bits of the codes, tau in the paper, 1 to 16. More make the weights sharper.
        gradient: of queries and keys. "exact": the derivative (eq. 3), which is infinite for
            cosines of 1 and bounded there. "lower_bound": n_bits/2 times the weight (eq. 4).
        unit_norm, lift_scale: see `Estimator`.
    """

    n_bits: int = DEFAULT_BITS
    gradient: str = "exact"

    name: ClassVar[str] = "expected"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.choice("gradient", self.gradient, ("exact", "lower_bound"))
        self._set(n_bits=checks.integer("n_bits", self.n_bits, 1, 16))

    @property
    def mean(self) -> "Expected":
        """Itself."""
        return self

    def _attend(self, call: Call) -> Tensor:
        return expected_attention(call, self.n_bits, self.gradient)
