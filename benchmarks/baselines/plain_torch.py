"""What a user could write without this library: attention to compare with, in plain torch."""

import torch
from torch import Tensor
from torch.nn import functional as F


def yoso_index_add(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    n_bits: int = 8,
    n_hashes: int = 32,
    normalize: str | None = "l2",
    lookup: str = "gather",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Sampled YOSO attention (YOSO, ICML 2021, eq. 2) by `index_add_` and a lookup.

    The same estimate as `Sampled(hasher="hyperplane")`, in time
    linear in the lengths too: codes by one matrix product; then, for each hash, the values are
    added into a table of 2^n_bits buckets, from which every query takes its bucket's row. Holds
    n_bits n_hashes floats a token for the projections. Differentiable in the values alone: a code
    has no derivative. Runs on any device; arguments are not checked.

    Args:
        query: `(B, H, N_q, D)`, floating point.
        key: `(B, H, N_k, D)`.
        value: `(B, H, N_k, D_v)`.
        n_bits, n_hashes: bits of a code, codes of a token.
        normalize: "l2" scales the output rows to unit norm, None leaves them.
        lookup: "gather", as most would write it, from one table at a time; or "embedding_bag",
            from the tables of all hashes at once, the fastest found in plain torch on a CPU.
        generator: draws the hash functions, one set for each head; None takes torch's own.

    Returns:
        `(B, H, N_q, D_v)`.
    """
    batch, heads, n_queries, n_features = query.shape
    n_values = value.shape[-1]
    table_rows = batch * heads * 2**n_bits  # each head of each sequence has its own
    first_row = 2**n_bits * torch.arange(batch * heads, device=query.device).view(batch, heads, 1)
    normals = torch.randn(
        heads, n_features, n_hashes * n_bits, generator=generator, device=query.device
    ).to(query.dtype)
    bit_weights = 2.0 ** torch.arange(n_bits, device=query.device)

    def rows(x: Tensor) -> Tensor:  # (n_hashes, tokens): each token's row in the table of a hash
        bits = (x @ normals > 0).unflatten(-1, (n_hashes, n_bits))
        codes = (bits.float() @ bit_weights).long() + first_row[..., None]
        return codes.flatten(0, 2).T

    values = value.reshape(-1, n_values)
    query_rows, key_rows = rows(query), rows(key)
    if lookup == "gather":
        out = values.new_zeros(batch * heads * n_queries, n_values)
        for of_query, of_key in zip(query_rows, key_rows, strict=True):
            table = values.new_zeros(table_rows, n_values).index_add_(0, of_key, values)
            out = out + table.gather(0, of_query[:, None].expand(-1, n_values))
    else:
        tables = [values.new_zeros(table_rows, n_values).index_add_(0, r, values) for r in key_rows]
        first_table = table_rows * torch.arange(n_hashes, device=query.device)
        out = F.embedding_bag(query_rows.T + first_table, torch.cat(tables), mode="sum")
    out = out.view(batch, heads, n_queries, n_values) / n_hashes
    return F.normalize(out, dim=-1) if normalize == "l2" else out
