"""One call of attention as estimators take it, and what several of them make of it."""

from typing import Any, NamedTuple

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
        """Queries and keys of a sequence; of packed ones their mean, rounded up."""
        n_queries, n_keys = self.query.shape[2], self.key.shape[2]
        if self.query_starts is None:
            return n_queries, n_keys
        return mean_lengths(n_queries, n_keys, self.query_starts.shape[0] - 1)

    @property
    def options(self) -> tuple[bool, int]:
        return self.is_causal, torch_ops.NORMALIZE[self.normalize]


def mean_lengths(n_queries: int, n_keys: int, n_sequences: int) -> tuple[int, int]:
    """Of so many packed sequences, rounded up: one row more than a limit is beyond it."""
    return -(-n_queries // n_sequences), -(-n_keys // n_sequences)


def expected_attention(call: Call, n_bits: int, gradient: str) -> Tensor:
    code = torch_ops.GRADIENT[gradient]

    def of_pairs(call: Call) -> Tensor:
        return torch_ops.expected_attention(*call.tensors, n_bits, *call.options, code)[0]

    if not call.is_causal:
        return of_pairs(call)
    past, n_keys = call.offset, call.key.shape[2]
    if not (holds(past > 1) and holds(past < n_keys - 1)):
        call, first = aligned(call)
        return without_first(of_pairs(call), first)
    # The sum over the keys before the first query, and the causal one over the rest. Both have two
    # keys or more: another query costs less than a product, and graphs take a size of 1 for fixed.
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

    They cost what others do, which is linear too. Also returns the number of rows before the first
    query, for `without_first`. Not causal where every query sees every key. Where an exported graph
    has to serve offsets of both signs it adds rows to both sides, none to one of them.
    """
    offset = call.offset
    if not call.is_causal or holds(offset == 0):
        return call, 0
    n_queries, n_keys = call.query.shape[2], call.key.shape[2]
    if holds(offset >= n_keys - 1):
        return call._replace(is_causal=False, offset=0), 0
    first = 0
    if not holds(offset <= 0):
        first = _within(offset, n_keys)
        call = call._replace(query=F.pad(call.query, (0, 0, first, 0)))
    if not holds(offset >= 0):
        before = _within(-offset, n_queries)  # beyond it none sees a key
        mask = call.key_mask
        if mask is None:
            mask = call.key.new_ones((call.key.shape[0], n_keys), dtype=torch.bool)
        call = call._replace(
            key=F.pad(call.key, (0, 0, before, 0)),
            value=F.pad(call.value, (0, 0, before, 0)),
            key_mask=F.pad(mask, (before, 0), value=False),
        )
    return call._replace(offset=0), first


def _within(number: int, most: int) -> int:
    """The nearest of 0 to most."""
    if exporting():
        return torch.sym_min(torch.sym_max(number, 0), most)
    return min(max(number, 0), most)  # torch 2.11 compiles no sym_max of constants


def without_first(out: Tensor, first: int) -> Tensor:
    """The output without the rows that `aligned` put before the first query.

    In an exported graph a copy: a slice is contiguous at some lengths only, to which it would hold.
    """
    if not exporting():
        return out[:, :, first:] if first else out
    return out if holds(first == 0) else F.pad(out, (0, 0, -first, 0))


def exporting() -> bool:
    """Whether `torch.export` is at work. (`torch.compiler.is_exporting` is True in each compiled
    graph of torch 2.11 too.)
    """
    return torch.compiler._is_exporting_flag


def holds(condition: Any) -> bool:
    """Whether a condition on lengths holds; of an exported graph's, for all that it serves.

    Plain `if` would limit the graph to the lengths for which the condition is what it is now.
    """
    if not exporting():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy

    return statically_known_true(condition)
