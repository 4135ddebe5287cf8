"""Soft codes: several buckets of a hash for each row, with weights."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lshkit import checks, torch_ops
from lshkit.attention.call import Call, aligned, without_first
from lshkit.attention.estimators.hashed import BucketSums
from lshkit.attention.parameters import one_or_each_head


@dataclass(frozen=True, kw_only=True, repr=False)
class Soft(BucketSums):
    """Soft codes: multi-probe soft hashing. A row belongs to its likeliest buckets, with weights.

    In each hash a row has its own code and those with its least certain bits flipped, weighted by
    the softmax of `-2 sharpness sum |z|` over the projections z that the flipped bits cross.
    Time and memory are linear in the lengths; the gradient is exact given the selected buckets.
    Computed in float32; on the CPU, sums of bfloat16 and float16 inputs without a causal mask are
    added up in 16-bit integers where that is precise (docs/numerics.md).

    Args:
        n_bits, max_length: see `Sampled`.
        n_hashes: number of codes, 1 to 65535. More reduce the noise.
        hasher: "hadamard" (fast rotations) or "hyperplane" (independent normals, or those in
            `parameters`).
        n_probes: buckets a row belongs to in each hash, of queries and keys or `(queries, keys)`, 1
            to 2^n_bits. 1 is its code alone.
        sharpness: how fast a bucket's weight falls with the projections that its flipped bits
            cross, > 0. A tensor, of one number or one for each key head, goes into `parameters`.
        unit_norm, lift_scale: see `Estimator`.

    parameters: "sharpness", `()` or `(H_k,)`; with hasher="hyperplane" "planes", `(H_k, n_hashes,
    n_bits, D)` or `(H_k, n_hashes * n_bits, D)` ("lift": D + 2). Normals drawn from N(0, 1) give
    the projections z unit variance; larger norms are sharper.
    """

    n_probes: int | tuple[int, int] = 4
    sharpness: float = 2.0

    name: ClassVar[str] = "soft"

    def __post_init__(self) -> None:
        super().__post_init__()
        n_probes, most = self.n_probes, 2**self.n_bits
        if isinstance(n_probes, (tuple, list)):
            if len(n_probes) != 2:
                raise ValueError(f"n_probes must be a number or (queries, keys), got {n_probes!r}")
            n_probes = tuple(checks.integer("n_probes", t, 1, most) for t in n_probes)
        else:
            n_probes = checks.integer("n_probes", n_probes, 1, most)
        self._set(n_probes=n_probes, sharpness=self._positive("sharpness"))

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The tensors that `parameters` may hold: planes only with hasher="hyperplane"."""
        lifted = ("lift_scale",) if self.unit_norm == "lift" else ()
        return (*lifted, "sharpness", *(("planes",) if self.hasher == "hyperplane" else ()))

    def probes(self) -> tuple[int, int]:
        n_probes = self.n_probes
        return n_probes if isinstance(n_probes, tuple) else (n_probes, n_probes)

    def sharpness_of(self, call: Call) -> Tensor:
        """(1,) or one for each key head of the call."""
        heads, device = call.key.shape[1], call.query.device
        sharpness = call.parameters.get("sharpness")
        if sharpness is None:
            return torch.full((1,), self.sharpness, dtype=torch.float32, device=device)
        return one_or_each_head("sharpness", sharpness, heads, device)

    def _attend(self, call: Call) -> Tensor:
        self.check_length(call.lengths[1])
        call, first = aligned(call)
        sharpness = self.sharpness_of(call)
        planes, *family = self.functions_of(call)
        out, *_ = torch_ops.soft_attention(
            *(*call.tensors, planes, sharpness, *family, *self.probes(), *call.options)
        )
        return without_first(out, first)
