"""Linformer (Wang et al., 2020): softmax attention to keys and values projected to fewer."""

import torch
from torch import nn

from benchmarks.baselines.projected import Heads, explicit_softmax, softmax, without_masked

SHARING = ("none", "headwise", "key-value", "layerwise")


class Linformer(Heads):
    """softmax(Q (E K)^T / sqrt(d)) F V, with E and F learned, (rank, length).

    Args:
        rank: rows of E and F, k in the paper.
        sharing: what shares a projection (the paper's section 4). "none": every head has an E and
            an F. "headwise": one E and one F for all heads. "key-value": one matrix for all heads,
            keys and values. "layerwise": the same one in all layers of a model.
        fused: softmax by torch's own kernel; False writes it out as the paper does, and keeps the
            (length, rank) weights for the gradient.
        projection: the matrix of another layer, (rank, length), for "layerwise".

    Of a sequence shorter than `length` the first columns are used. Tokens that take no part add
    nothing to the projected keys and values.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        length: int,
        rank: int = 256,
        sharing: str = "key-value",
        fused: bool = True,
        projection: nn.Parameter | None = None,
    ) -> None:
        super().__init__(dim, heads)
        if sharing not in SHARING:
            raise ValueError(f"sharing must be one of {SHARING}, got {sharing!r}")
        if projection is not None and sharing != "layerwise":
            raise ValueError(f'projection must be None unless sharing is "layerwise": {sharing!r}')
        if projection is not None and projection.shape != (rank, length):
            raise ValueError(
                f"projection must be {(rank, length)}, got shape {tuple(projection.shape)}"
            )
        self.sharing = sharing
        self.attend = softmax if fused else explicit_softmax
        shape = (heads, rank, length) if sharing == "none" else (rank, length)

        def drawn():  # projected keys are as large as keys
            return nn.Parameter(torch.randn(shape) * length**-0.5)

        self.key_projection = drawn() if projection is None else projection
        shared = sharing in ("key-value", "layerwise")
        self.value_projection = self.key_projection if shared else drawn()

    def mix(self, query, key, value, mask):
        length = key.shape[-2]
        key = self.key_projection[..., :length] @ without_masked(key, mask)
        value = self.value_projection[..., :length] @ without_masked(value, mask)
        return self.attend(query, key, value)
