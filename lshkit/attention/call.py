"""One call of attention as estimators take it, and what several of them make of it."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lshkit import torch_ops
from lshkit.attention.unit_norm import unit_rows


class Call(NamedTuple):
    """What `yoso_attention` hands to an estimator, checked: tensors `(B, H, N, columns)`."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None  # (B, N_k), True takes part
    query_starts: Tensor | None  # of packed sequences, int64
    key_starts: Tensor | None
    is_causal: bool
    offset: int  # query i sees the keys j <= i + offset
    normalize: str | None
    parameters: dict[str, Tensor]
    seed: int | Tensor | None
    # Of a call for some of a sequence's key heads: the number of the first, and that of all. They
    # have the hash functions that they have among all.
    heads: tuple[int, int] | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        return self.query, self.key, self.value, self.key_mask, self.query_starts, self.key_starts

    @property
    def lengths(self) -> tuple[int, int]:
        """Queries and keys of a sequence; of packed ones their mean."""
        n_sequences = 1 if self.query_starts is None else self.query_starts.shape[0] - 1
        return self.query.shape[2] // n_sequences, self.key.shape[2] // n_sequences

    @property
    def options(self) -> tuple[bool, int]:
        return self.is_causal, torch_ops.NORMALIZE[self.normalize]


def expected_attention(call: Call, n_bits: int, gradient: str) -> Tensor:
    code = torch_ops.GRADIENT[gradient]

    def of_pairs(call: Call) -> Tensor:
        return torch_ops.expected_attention(*call.tensors, n_bits, *call.options, code)[0]

    past = call.offset
    if not call.is_causal or past <= 0:
        return of_pairs(aligned(call)[0])
    n_keys = call.key.shape[2]
    if past >= n_keys - 1:
        return of_pairs(call._replace(is_causal=False))
    # The sum over the keys before the first query, and the causal one over the rest.
    query, key, value = call.query, call.key, call.value
    if call.normalize == "sum":
        value = F.pad(value, (0, 1), value=1.0)  # the sum of the weights beside the values'
    if query.dtype in (torch.float16, torch.bfloat16):  # one rounding, at the end
        query, key, value = query.float(), key.float(), value.float()
    mask = call.key_mask
    masks = (None, None) if mask is None else (mask[:, :past], mask[:, past:])
    keys, values = (x.split((past, n_keys - past), 2) for x in (key, value))
    parts = []
    for i in range(2):
        part = call._replace(
            query=query,
            key=keys[i],
            value=values[i],
            key_mask=masks[i],
            is_causal=i == 1,
            offset=0,
            normalize=None,
        )
        parts.append(of_pairs(part))
    out = parts[0] + parts[1]
    if call.normalize == "l2":
        out = unit_rows(out)
    elif call.normalize == "sum":
        out = out[..., :-1] / torch.where(out[..., -1:] > 0, out[..., -1:], 1)
    return out.to(call.query.dtype)


def aligned(call: Call) -> tuple[Call, int]:
    """The call with rows for the positions before, so that query i sees the keys j <= i.

    They cost what others do, which is linear too. Also returns their number, which the caller cuts
    off the result. Not causal where every query sees every key.
    """
    if not call.is_causal or call.offset == 0:
        return call, 0
    if call.offset > 0:
        if call.offset >= call.key.shape[2] - 1:
            return call._replace(is_causal=False, offset=0), 0
        return call._replace(query=F.pad(call.query, (0, 0, call.offset, 0))), call.offset
    batch, _, n_keys, _ = call.key.shape
    before = min(-call.offset, call.query.shape[2])  # beyond it none sees a key
    mask = call.key_mask
    if mask is None:
        mask = call.key.new_ones((batch, n_keys), dtype=torch.bool)
    call = call._replace(
        key=F.pad(call.key, (0, 0, before, 0)),
        value=F.pad(call.value, (0, 0, before, 0)),
        key_mask=F.pad(mask, (before, 0), value=False),
        offset=0,
    )
    return call, 0
