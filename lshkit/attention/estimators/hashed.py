"""Bases of the estimators that hash, and of those that sum values by bucket."""

import dataclasses
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lshkit import checks, torch_ops
from lshkit.attention.arguments import seed_tensor
from lshkit.attention.call import Call
from lshkit.attention.estimators.base import Estimator
from lshkit.attention.parameters import plane_rows
from lshkit.hash_functions import MAX_HASHES

DEFAULT_BITS = 12  # enough for 16,384 positions: see bits_for


def bits_for(max_length: int, least: int = DEFAULT_BITS) -> int:
    """Bits of a code for sequences of so many positions: 4 a bucket at most, up to 16 bits.

    In recall (docs/choosing.md) 8 positions a bucket cost 4 points of accuracy and 4 at most 0.6,
    by collisions with unrelated keys. On text sums of 12 bits are better than of fewer at 512
    positions too, so they have at least as many.
    """
    return min(max((max_length - 1).bit_length() - 2, least), 16)


@dataclass(frozen=True, kw_only=True, repr=False)
class Hashed(Estimator):
    """Base of the estimators that hash: the family of hash functions and its sizes."""

    n_bits: int = None  # type: ignore[assignment]  # an integer as soon as it is made
    n_hashes: int = 32
    hasher: str = "hadamard"
    max_length: int | None = None

    least_bits: ClassVar[int] = DEFAULT_BITS  # of max_length, and where neither is given

    def __post_init__(self) -> None:
        if self.max_length is not None:
            self._set(max_length=checks.integer("max_length", self.max_length, 1, 2**31 - 1))
            by_rule = bits_for(self.max_length, self.least_bits)
            if self.n_bits is not None and self.n_bits != by_rule:
                raise ValueError(
                    f"n_bits must be None with max_length={self.max_length}, which sets it to "
                    f"{by_rule}, got {self.n_bits!r}"
                )
            self._set(n_bits=by_rule)
        elif self.n_bits is None:
            self._set(n_bits=self.least_bits)
        super().__post_init__()
        checks.choice("hasher", self.hasher, torch_ops.FAMILY)
        self._set(
            n_bits=checks.integer("n_bits", self.n_bits, 1, 16),
            n_hashes=checks.integer("n_hashes", self.n_hashes, 1, MAX_HASHES),
        )

    def for_inference(self, n_hashes: int | None) -> "Hashed":
        return self if n_hashes is None else dataclasses.replace(self, n_hashes=n_hashes)

    def hash_functions(
        self,
        heads: int,
        columns: int,
        parameters: dict[str, Any],
        seed: int | Tensor | None,
        device: torch.device,
    ) -> tuple[Tensor, int, int, int]:
        """As the operators take them: the planes, given or drawn from the seed, of each key head;
        the number of the family, n_bits, n_hashes."""
        sizes, family = (self.n_bits, self.n_hashes), torch_ops.FAMILY[self.hasher]
        if "planes" in parameters:
            planes = plane_rows(parameters["planes"], heads, columns, *sizes, device)
        else:
            seed = seed_tensor(seed, device)
            planes = torch_ops.hash_parameters(seed, heads, columns, *sizes, family)
        return planes, family, *sizes

    def functions_of(self, call: Call) -> tuple[Tensor, int, int, int]:
        """`hash_functions` of the key heads that the call has."""
        n_heads, columns = call.key.shape[1], call.query.shape[-1]
        parameters, seed, device = call.parameters, call.seed, call.query.device
        if call.heads is None or "planes" in parameters:  # which are those of the call's heads
            return self.hash_functions(n_heads, columns, parameters, seed, device)
        first, of_all = call.heads
        planes, *sizes = self.hash_functions(of_all, columns, parameters, seed, device)
        return planes[first : first + n_heads], sizes[0], sizes[1], sizes[2]


@dataclass(frozen=True, kw_only=True, repr=False)
class BucketSums(Hashed):
    """Base of the estimators that sum values by bucket, in tables of 2^n_bits rows a hash."""

    def check_length(self, n_keys: int) -> None:
        """A warning where a query sees more keys than max_length."""
        # Before the length is looked at, which graphs guard.
        if self.max_length is None or torch.compiler.is_compiling() or n_keys <= self.max_length:
            return
        # The length itself is left out: Python shows a warning of the same text once.
        warnings.warn(
            f"a sequence is longer than max_length={self.max_length} of {self!r}: unrelated keys "
            "may outweigh those that fit. Train with a larger max_length",
            stacklevel=checks.outside(),
        )

    def at_lengths(self, n_queries: int, n_keys: int) -> Estimator:
        self.check_length(n_keys)
        return self

    def for_decoding(self) -> "BucketSums":
        if self.unit_norm == "lift":
            raise ValueError(
                "unit_norm must be 'l2' to decode step by step, got 'lift': its bound is "
                "unknown before the last key"
            )
        return self

    def probes(self) -> tuple[int, int]:
        """Buckets of a hash that a query and a key belong to."""
        return 1, 1
