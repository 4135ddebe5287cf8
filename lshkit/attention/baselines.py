"""What lshkit's attention is compared with. For benchmarks and tests, not for use."""

import torch
from torch import Tensor
from torch.nn import functional as F


def yoso_index_add(
    query: Tensor, key: Tensor, value: Tensor, *, n_bits: int = 8, n_hashes: int = 32
) -> Tensor:
    """YOSO-m in plain torch, as a user could write it: matmul, `index_add_` and `gather`.

    query `(..., N_q, D)`, key `(..., N_k, D)`, value `(..., N_k, D_v)` to `(..., N_q, D_v)` with
    unit rows (YOSO, ICML 2021, eq. 2, normalised by l2). Fresh hyperplanes in each call, one set
    for all heads.
    """
    n_buckets, d_v = 2**n_bits, value.shape[-1]
    planes = torch.randn(query.shape[-1], n_hashes * n_bits, dtype=query.dtype)
    powers = 2 ** torch.arange(n_bits)

    def hash(x: Tensor) -> Tensor:  # (heads, N, n_hashes)
        bits = (x.flatten(0, -3) @ planes > 0).unflatten(-1, (n_hashes, n_bits))
        return (bits * powers).sum(-1)

    query_codes, key_codes, values = hash(query), hash(key), value.flatten(0, -3)
    heads = values.shape[0]
    offsets = torch.arange(heads)[:, None] * n_buckets
    out = values.new_zeros(*query_codes.shape[:2], d_v)
    for h in range(n_hashes):
        table = values.new_zeros(heads * n_buckets, d_v)
        table.index_add_(0, (key_codes[..., h] + offsets).flatten(), values.flatten(0, 1))
        rows = (query_codes[..., h] + offsets).flatten()[:, None].expand(-1, d_v)
        out += table.gather(0, rows).view_as(out)
    return F.normalize(out, dim=-1).view(*query.shape[:-1], d_v)
