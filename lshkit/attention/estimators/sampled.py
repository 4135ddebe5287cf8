"""YOSO-m: collisions of hard codes."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lshkit import checks, torch_ops
from lshkit.attention.arguments import seed_tensor
from lshkit.attention.call import Call, aligned, expected_attention, exporting, without_first
from lshkit.attention.estimators.base import Estimator
from lshkit.attention.estimators.expected import Expected
from lshkit.attention.estimators.hashed import BucketSums

# The expectation costs products of every query with every key, a sample codes and tables of every
# row. They cost the same at 6 keys a hash where queries are as many as keys. Measured at 32 hashes,
# 8 heads, d = 64, fp32, one AVX-512 thread: forward is equal at 210 keys, causal forward at 290,
# forward and backward at 190.
EXPECTED_KEYS_PER_HASH = 6

EXPECTATION = ("auto", "never")


@dataclass(frozen=True, kw_only=True, repr=False)
class Sampled(BucketSums):
    """YOSO-m: counts of the collisions of n_hashes codes as weights (YOSO, ICML 2021, equation 2).

    The mean over the hash functions is `Expected`. Time and memory are linear in the lengths.
    Queries and keys are only hashed, so their gradient is an estimate of the expectation's; values
    get the exact gradient of the computed sum. Computed in float32.

    Args:
        n_bits: bits of a code, tau in the paper, 1 to 16. More make the weights sharper. None: by
            max_length, or 12, which suffice for 16,384 positions.
        max_length: instead of n_bits, the number of keys in the longest sequence: 12 bits up to
            16,384 and one more each time it doubles. Tables and states grow with 2^n_bits. A
            warning is given where a sequence is longer (not in compiled graphs).
        n_hashes: number of codes, m in the paper, 1 to 65535. More reduce the noise.
        hasher: "hadamard" (fast rotations) or "hyperplane" (independent normals).
        gradient: of queries and keys. "lower_bound" weights a pair by n_bits/2 times its weight
            (eq. 4). "collided" (`*YOSO`) takes the derivative of the probability (eq. 3) on the
            pairs that collide in some hash, "unbiased" divides it by the inclusion probability 1 -
            (1 - p)^n_hashes, so that its mean is the exact gradient (with hasher="hadamard" to
            within 1 %, as its hashes are not independent); both compare all pairs of codes, in
            quadratic time and linear memory. Where the expectation is computed instead, both are
            its exact derivative.
        expectation: "auto" computes the expectation, which has no noise, wherever it costs less:
            for N_q queries and N_k keys where 2 N_q N_k <= 6 n_hashes (N_q + N_k), so for up to 6
            n_hashes positions (of packed sequences their mean lengths count), and for one query
            over a cache. "never" samples at all lengths. `torch.export` samples, since a graph for
            all lengths can hold only one of the two; so does `YosoState`.
        gradient_hashes: the gradient of queries and keys is taken from so many of the n_hashes, 1
            to n_hashes, which divides its cost: unbiased, with the noise that so few hashes have.
            The output and the gradient of values have all of them. None: all. For gradient
            "lower_bound" and "unbiased".
        unit_norm, lift_scale: see `Estimator`.
    """

    gradient: str = "lower_bound"
    expectation: str = "auto"
    gradient_hashes: int | None = None

    name: ClassVar[str] = "sampled"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.choice("gradient", self.gradient, ("lower_bound", "collided", "unbiased"))
        checks.choice("expectation", self.expectation, EXPECTATION)
        if self.gradient_hashes is not None:
            count = checks.integer("gradient_hashes", self.gradient_hashes, 1, self.n_hashes)
            self._set(gradient_hashes=count)
            if self.gradient == "collided":
                raise ValueError(
                    'gradient_hashes needs gradient="lower_bound" or "unbiased", got '
                    "gradient='collided', whose mean depends on the number of hashes"
                )

    def for_inference(self, n_hashes: int | None) -> "Sampled":
        if n_hashes is None:
            return self
        subset = self.gradient_hashes
        if subset is not None and subset >= n_hashes:
            subset = None
        return dataclasses.replace(self, n_hashes=n_hashes, gradient_hashes=subset)

    def for_decoding(self) -> "Sampled":
        super().for_decoding()
        return Sampled(
            n_bits=self.n_bits,
            n_hashes=self.n_hashes,
            max_length=self.max_length,
            hasher=self.hasher,
            expectation="never",
        )

    @property
    def mean(self) -> Expected:
        """With the gradient that goes with the samples'."""
        return Expected(
            n_bits=self.n_bits,
            gradient="lower_bound" if self.gradient == "lower_bound" else "exact",
            unit_norm=self.unit_norm,
            lift_scale=self.lift_scale,
        )

    def at_lengths(self, n_queries: int, n_keys: int) -> Estimator:
        super().at_lengths(n_queries, n_keys)
        if self.expectation == "auto" and self._expectation_is_cheaper(n_queries, n_keys):
            return self.mean
        return dataclasses.replace(self, expectation="never")

    def _expectation_is_cheaper(self, n_queries: int, n_keys: int) -> bool:
        hashed = EXPECTED_KEYS_PER_HASH * self.n_hashes * (n_queries + n_keys)
        return 2 * n_queries * n_keys <= hashed

    def _functions_or_seed(self, call: Call) -> tuple[Tensor, int, int, int]:
        """`functions_of`, or the seed that the operator draws them from, for one operator less."""
        if call.heads is not None:
            return self.functions_of(call)
        family = torch_ops.FAMILY[self.hasher]
        return seed_tensor(call.seed, call.query.device), family, self.n_bits, self.n_hashes

    def _attend(self, call: Call) -> Tensor:
        n_queries, n_keys = call.lengths
        self.check_length(n_keys)
        if (
            self.expectation == "auto"
            and not exporting()
            and self._expectation_is_cheaper(n_queries, n_keys)
        ):
            exact = self.gradient != "lower_bound"
            return expected_attention(call, self.n_bits, "exact" if exact else "lower_bound")
        call, first = aligned(call)
        out, *_ = torch_ops.yoso_attention(
            *call.tensors,
            *self._functions_or_seed(call),
            *(*call.options, torch_ops.GRADIENT[self.gradient]),
            self.gradient_hashes or 0,
        )
        return without_first(out, first)
