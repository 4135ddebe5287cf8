"""Linformer (Wang et al., 2020): softmax attention to keys and values projected to fewer."""

import torch
from torch import nn

from benchmarks.baselines.projected import Heads, explicit_softmax, softmax, without_masked


class Linformer(Heads):
    """softmax(Q (E K)^T / sqrt(d)) E V with E learned, (rank, length): one for all heads.

    That is the paper's key-value sharing (section 4); `rank` is k there.

    `fused`: softmax by torch's own kernel; False writes it out as the paper does, and keeps the
    (length, rank) weights for the gradient. Of a sequence shorter than `length` the first columns
    are used. Tokens that take no part add nothing to the projected keys and values.
    """

    def __init__(
        self, dim: int, heads: int, length: int, rank: int = 256, fused: bool = True
    ) -> None:
        super().__init__(dim, heads)
        self.attend = softmax if fused else explicit_softmax
        # Projected keys are as large as keys.
        self.projection = nn.Parameter(torch.randn(rank, length) * length**-0.5)

    def mix(self, query, key, value, mask):
        projection = self.projection[:, : key.shape[-2]]
        key, value = (projection @ without_masked(x, mask) for x in (key, value))
        return self.attend(query, key, value)
