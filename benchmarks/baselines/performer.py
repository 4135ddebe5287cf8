"""Performer (Choromanski et al., 2021): softmax attention by positive random features."""

import torch
from torch import Tensor

from benchmarks.baselines.projected import Heads, without_masked


def orthogonal_normals(n_features: int, dim: int) -> Tensor:
    """(n_features, dim): rows N(0, I) each, orthogonal within every dim of them (FAVOR+)."""
    blocks = -(-n_features // dim)
    # The diagonal of the triangle positive: the rotation is uniform then.
    q, r = torch.linalg.qr(torch.randn(blocks, dim, dim))
    q = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]
    lengths = torch.randn(blocks * dim, dim).norm(dim=-1, keepdim=True)
    return (q.transpose(-1, -2).reshape(-1, dim) * lengths)[:n_features]


def log_features(x: Tensor, normals: Tensor) -> Tensor:
    """Logarithms of features whose products have the mean exp(x . y): w . x - |x|^2/2 - log(m)/2.

    x is (..., n, d), normals (m, d), the result (..., n, m).
    """
    constant = x.square().sum(-1, keepdim=True) / 2 + torch.tensor(normals.shape[0]).log() / 2
    return x @ normals.T - constant


class Performer(Heads):
    """FAVOR+ with positive orthogonal features: phi(Q) (phi(K)^T V), each row by its sum.

    Features are drawn once, a buffer; `redraw` draws others.
    """

    def __init__(self, dim: int, heads: int, length: int, n_features: int = 256) -> None:
        super().__init__(dim, heads)
        self.n_features = n_features
        self.register_buffer("normals", orthogonal_normals(n_features, dim // heads))

    def redraw(self) -> None:
        self.normals.copy_(orthogonal_normals(*self.normals.shape))

    def mix(self, query, key, value, mask):
        scale = query.shape[-1] ** -0.25  # so that products are scores by sqrt(d)
        query, key = (log_features(x * scale, self.normals) for x in (query, key))
        if mask is not None:
            key = key.masked_fill(~mask[:, None, :, None], -torch.inf)
        # Factors of a row of queries, and of all keys, cancel between the sum and its norm.
        query = (query - query.detach().amax(-1, keepdim=True)).exp()
        largest = key.detach().amax((-2, -1), keepdim=True).clamp_min(torch.finfo(key.dtype).min)
        key = (key - largest).exp()
        norm = query @ key.sum(-2).unsqueeze(-1)
        return (query @ (key.transpose(-1, -2) @ without_masked(value, mask))) / (norm + 1e-12)
