"""Linear attention with the delta rule (DeltaNet: Yang et al., 2024), in chunks and plain torch."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.baselines.projected import Heads, without_masked


def delta_rule(query: Tensor, key: Tensor, value: Tensor, beta: Tensor, chunk: int = 64) -> Tensor:
    """S_t = S_{t-1} + beta_t k_t (v_t - k_t^T S_{t-1}), and the rows q_t^T S_t.

    `(..., n, d)` each, beta `(..., n)`. Within a chunk all writes are solved for at once (the WY
    form, their equations 8 to 11): matrix products in the place of n steps one by one.
    """
    n, missing = query.shape[-2], -query.shape[-2] % chunk
    query, key, value = (
        F.pad(x, (0, 0, 0, missing)).unflatten(-2, (-1, chunk)) for x in (query, key, value)
    )
    beta = F.pad(beta, (0, missing)).unflatten(-1, (-1, chunk)).unsqueeze(-1)
    inside = (query @ key.transpose(-1, -2)).tril()
    system = (beta * (key @ key.transpose(-1, -2))).tril(-1)  # of I + system, unit triangular
    writes = torch.linalg.solve_triangular(
        system, torch.cat((beta * value, beta * key), -1), upper=False, unitriangular=True
    )
    values, keys = writes.split((value.shape[-1], key.shape[-1]), -1)
    state = key.new_zeros(*key.shape[:-3], key.shape[-1], value.shape[-1])
    rows = []
    for q, k, own, u, w in zip(
        *(x.unbind(-3) for x in (query, key, inside, values, keys)), strict=True
    ):
        new = u - w @ state
        rows.append(q @ state + own @ new)
        state = state + k.transpose(-1, -2) @ new
    return torch.stack(rows, -3).flatten(-3, -2)[..., :n, :]


class DeltaRule(Heads):
    """Unit queries and keys, learned writing strengths beta, outputs of unit mean square.

    Causal, unlike the others: a token sees those before it and itself. The state has head_dim^2
    numbers a head. beta depends on the token's keys and values.
    """

    def __init__(self, dim: int, heads: int, length: int) -> None:
        strength, norm = nn.Linear(2 * dim, heads), nn.RMSNorm(dim // heads)
        super().__init__(dim, heads)
        self.strength, self.norm = strength, norm

    def mix(self, query, key, value, mask):
        value = without_masked(value, mask)
        both = torch.cat((without_masked(key, mask), value), -1).transpose(1, 2).flatten(2)
        beta = self.strength(both).sigmoid().transpose(1, 2)
        if mask is not None:
            beta = beta.masked_fill(~mask[:, None], 0)
        query, key = (F.normalize(x, dim=-1) for x in (query, key))
        return self.norm(delta_rule(query, key, value, beta))
