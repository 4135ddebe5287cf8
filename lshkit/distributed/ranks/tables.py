"""The exchange of bucket tables: a rank sends sums by bucket, whatever the number of its rows.

A slot is a part of a sequence that other ranks have parts of too. Its rows are added to tables
(batch * key heads, n_hashes, buckets, columns), these are summed over the ranks, and its queries
read the sums: of all rows, or of the rows before the slot where attention is causal.

The gradient goes the same way: the output's gradient is added to the buckets of the queries, summed
over the ranks the other way round, and read by the keys. Weights of soft codes need both tables, so
the first ones are made and summed again in the backward pass: nothing but rows is kept for it.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lshkit import _C, torch_ops
from lshkit.distributed.ranks.collectives import Ranks, sum_tables
from lshkit.hash_functions import FAMILY
from lshkit.torch_ops.library import once_differentiable
from lshkit.torch_ops.tensors import code_dtype

# Tables of the heads in flight. Others wait.
TABLE_BYTES = 2**28
# Inputs whose soft codes are in memory at once in the backward pass.
CODE_ROWS = 2**15

Span = tuple[int, int]  # local rows [first, last)


class Slot(NamedTuple):
    queries: list[Span]
    keys: list[Span]


class Plan(NamedTuple):
    """What a rank adds and reads, and how the tables of all ranks belong together."""

    slots: list[Slot]
    n_slots: int  # the most of any rank
    chains: list[list[tuple[int, int]]]  # (rank, slot) of each sequence in order
    is_causal: bool


class Functions(NamedTuple):
    """Hash functions as the core takes them; sharpness is of soft codes."""

    planes: Tensor
    family: int
    n_bits: int
    n_hashes: int
    sharpness: Tensor | None
    query_probes: int
    key_probes: int

    def of_heads(self, heads: slice) -> "Functions":
        sharpness = self.sharpness
        if sharpness is not None and len(sharpness) > 1:
            sharpness = sharpness[heads]
        return self._replace(planes=self.planes[heads].contiguous(), sharpness=sharpness)

    def reversed(self) -> "Functions":
        """For keys that read and queries that are added."""
        return self._replace(query_probes=self.key_probes, key_probes=self.query_probes)


class Inputs(NamedTuple):
    query: Tensor  # (B, H, n_q, D)
    key: Tensor  # (B, H_k, n_k, D)
    value: Tensor  # (B, H_k, n_k, columns)
    key_mask: Tensor | None


def attend_by_tables(
    ranks: Ranks, plan: Plan, inputs: Inputs, functions: Functions, normalize: int, own: bool
) -> Tensor:
    """The mean over the hashes of the sums that the queries read, `(B, H, n_q, columns)` float32.

    Inputs outside the slots are zeros. own: causal queries read the keys j <= i of their own slot
    too, in the same pass; this and a normalisation are not differentiable.
    """
    if not own and not normalize:
        learnt = functions.planes, functions.sharpness
        out: Tensor = _TableSums.apply(*inputs, *learnt, functions, ranks, plan)
        return out
    with torch.no_grad():
        return _forward(ranks, plan, _floats(inputs), functions, normalize, own)


def _floats(inputs: Inputs) -> Inputs:
    query, key, value = (x.detach().to(torch.float32) for x in inputs[:3])
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    return Inputs(query, key, value, inputs.key_mask)


# --- Heads in flight ------------------------------------------------------------------------------


class _Part(NamedTuple):
    """Inputs of some sequences and key heads, whose tables are in memory together."""

    inputs: Inputs
    functions: Functions
    first_head: int  # of the keys
    out: Any  # of the same heads: views to write to

    @property
    def units(self) -> int:
        return self.inputs.key.shape[0] * self.inputs.key.shape[1]

    def new_tables(self, slots: int) -> Tensor:
        f, value = self.functions, self.inputs.value
        shape = slots, self.units, f.n_hashes, 2**f.n_bits, value.shape[-1]
        return value.new_zeros(shape)


def _parts(
    inputs: Inputs, functions: Functions, slots: int, outs: Sequence[tuple[Tensor, bool]]
) -> Iterator[_Part]:
    """outs: tensors (B, heads, ...), and whether their heads are those of queries."""
    batch, heads = inputs.key.shape[:2]
    group = inputs.query.shape[1] // max(1, heads)
    table = 4 * functions.n_hashes * 2**functions.n_bits * inputs.value.shape[-1] * max(1, slots)
    at_once = max(1, TABLE_BYTES // max(1, table))
    sequences, heads_at_once = max(1, at_once // max(1, heads)), min(heads, at_once)
    for b in range(0, batch, sequences):
        for h in range(0, heads, heads_at_once):
            some, those = slice(b, b + sequences), slice(h, h + heads_at_once)
            of_queries = slice(h * group, (h + heads_at_once) * group)
            mask = None if inputs.key_mask is None else inputs.key_mask[some]
            yield _Part(
                Inputs(
                    inputs.query[some, of_queries],
                    inputs.key[some, those],
                    inputs.value[some, those],
                    mask,
                ),
                functions.of_heads(those),
                h,
                [x[some, of_queries if queries else those] for x, queries in outs],
            )


def _add(
    tables: Tensor,
    f: Functions,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    spans: Sequence[Span],
) -> None:
    for a, b in spans:
        if a == b:
            continue
        part = None if mask is None else mask[:, a:b].contiguous()
        _decode(tables, f, key.shape[0], None, key[:, :, a:b], value[:, :, a:b], part, None)


def _read(tables: Tensor, f: Functions, query: Tensor, span: Span, normalize: int = 0) -> Tensor:
    a, b = span
    out = query.new_empty((*query.shape[:2], b - a, tables.shape[-1]))
    _decode(tables, f, query.shape[0], query[:, :, a:b], None, None, None, out, normalize)
    return out


def _decode(
    tables: Tensor,
    f: Functions,
    batch: int,
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor | None,
    mask: Tensor | None,
    out: Tensor | None,
    normalize: int = 0,
    is_causal: bool = False,
) -> None:
    _C.decode(
        *(tables, None, batch, f.planes),
        *(f.family, f.n_bits, f.n_hashes),
        f.sharpness,
        *(f.query_probes, f.key_probes, normalize),
        *(query, key, value, mask),
        is_causal,
        out,
        torch.get_num_threads(),
    )


# --- Forward --------------------------------------------------------------------------------------


def _summed_tables(ranks: Ranks, plan: Plan, part: _Part) -> Tensor:
    """(slots, units, n_hashes, buckets, columns): what the queries of each slot read."""
    tables = part.new_tables(plan.n_slots)
    inputs = part.inputs
    for slot, (_, keys) in zip(tables, plan.slots, strict=False):
        _add(slot, part.functions, inputs.key, inputs.value, inputs.key_mask, keys)
    order = "before" if plan.is_causal else "all"
    sum_tables(ranks, tables, plan.chains, order)
    return tables


def _forward(
    ranks: Ranks, plan: Plan, inputs: Inputs, functions: Functions, normalize: int, own: bool
) -> Tensor:
    out = inputs.query.new_zeros((*inputs.query.shape[:3], inputs.value.shape[-1]))
    for part in _parts(inputs, functions, plan.n_slots, [(out, True)]):
        tables = _summed_tables(ranks, plan, part)
        f, (query, key, value, mask) = part.functions, part.inputs
        for slot, (queries, keys) in zip(tables, plan.slots, strict=False):
            for (a, b), (c, d) in zip(queries, keys, strict=True):
                if a == b:
                    continue
                if not own:
                    part.out[0][:, :, a:b] = _read(slot, f, query, (a, b), normalize)
                    continue
                read = query.new_empty((*query.shape[:2], b - a, value.shape[-1]))
                some = None if mask is None else mask[:, c:d].contiguous()
                of_keys = key[:, :, c:d], value[:, :, c:d]
                _decode(
                    *(slot, f, query.shape[0], query[:, :, a:b], *of_keys, some, read, normalize),
                    is_causal=True,
                )
                part.out[0][:, :, a:b] = read
    return out


# --- Backward -------------------------------------------------------------------------------------


class _TableSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        planes: Tensor,
        sharpness: Tensor | None,
        functions: Functions,
        ranks: Ranks,
        plan: Plan,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, key_mask, planes, sharpness)
        ctx.rest = functions, ranks, plan
        inputs = _floats(Inputs(query, key, value, key_mask))
        return _forward(ranks, plan, inputs, functions, 0, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, key_mask, planes, sharpness = saved
        functions, ranks, plan = ctx.rest
        functions = functions._replace(planes=planes, sharpness=sharpness)
        inputs = _floats(Inputs(query, key, value, key_mask))
        grad_out = grad_out.to(torch.float32).contiguous()
        grad_value = torch.zeros_like(inputs.value)
        grad_planes = torch.zeros_like(planes) if ctx.needs_input_grad[4] else None
        outs = [(grad_out, True), (grad_value, False)]
        if sharpness is None:
            for part in _parts(inputs, functions, plan.n_slots, outs):
                _backward_hard(ranks, plan, part)
            return None, None, grad_value.to(value.dtype), None, grad_planes, *(None,) * 4
        if key_mask is not None:  # whatever such keys hold, NaN included, it reaches no gradient
            unmasked = inputs.key.masked_fill(~key_mask[:, None, :, None], 0)
            inputs = inputs._replace(key=unmasked)
        grad_query, grad_key = torch.zeros_like(inputs.query), torch.zeros_like(inputs.key)
        grad_sharpness = torch.zeros_like(sharpness)
        outs += [(grad_query, True), (grad_key, False)]
        for part in _parts(inputs, functions, plan.n_slots, outs):
            _backward_soft(ranks, plan, part, grad_planes, grad_sharpness)
        return (
            *(grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)),
            *(None, grad_planes, grad_sharpness, None, None, None),
        )


def _backward_hard(ranks: Ranks, plan: Plan, part: _Part) -> None:
    """Writes the gradient of one part's values."""
    grad_out, grad_value = part.out
    query, f = part.inputs.query, part.functions.reversed()
    group = query.shape[1] // part.inputs.key.shape[1]
    reverse = part.new_tables(plan.n_slots)
    for slot, (spans, _) in zip(reverse, plan.slots, strict=False):
        for g in range(group):
            of_group = slice(g, None, group)
            _add(slot, f, query[:, of_group], grad_out[:, of_group], None, spans)
    _read_reverse(ranks, plan, part, reverse, _takes_part(part.inputs), grad_value)


def _backward_soft(
    ranks: Ranks, plan: Plan, part: _Part, grad_planes: Tensor | None, grad_sharpness: Tensor
) -> None:
    """Writes the gradients of one part's rows, and adds to those of the functions."""
    grad_out, grad_value, grad_query, grad_key = part.out
    query, key, value, _ = part.inputs
    f = part.functions

    def codes_of(x: Tensor, head: int, probes: int) -> "_SoftRows":
        return _SoftRows(x, f.of_heads(slice(head, head + 1)), probes, grad_planes is not None)

    def collect(codes: "_SoftRows", grad: Tensor, head: int) -> Tensor:
        of_x, of_planes, of_sharpness = codes.backward(grad)
        head += part.first_head
        if grad_planes is not None:
            grad_planes[head] += of_planes
        grad_sharpness[head if len(grad_sharpness) > 1 else 0] += of_sharpness
        return of_x

    # The output's gradient by the queries' buckets, and the gradient of the queries' weights.
    tables = _summed_tables(ranks, plan, part)
    reverse = torch.zeros_like(tables)
    for table, head, rows in _blocks([x.queries for x in plan.slots], query, key):
        codes = codes_of(query[rows], head, f.query_probes)
        of_weights, added = codes.products(grad_out[rows], tables[table], codes.finite)
        reverse[table] += added
        grad_query[rows] = collect(codes, of_weights, head)
    del tables
    takes_part = _takes_part(part.inputs)
    _read_reverse(ranks, plan, part, reverse, takes_part, grad_value)
    for table, head, rows in _blocks([x.keys for x in plan.slots], key, key):
        codes = codes_of(key[rows], head, f.key_probes)
        of_weights, _ = codes.products(value[rows], reverse[table], takes_part[rows])
        grad_key[rows] = collect(codes, of_weights, head)


def _read_reverse(
    ranks: Ranks, plan: Plan, part: _Part, reverse: Tensor, takes_part: Tensor, grad_value: Tensor
) -> None:
    """Sums the tables of the output's gradient by the queries' buckets; the keys read them."""
    sum_tables(ranks, reverse, plan.chains, "after" if plan.is_causal else "all")
    for slot, (_, spans) in zip(reverse, plan.slots, strict=False):
        for a, b in spans:
            if a == b:
                continue
            read = _read(slot, part.functions.reversed(), part.inputs.key, (a, b))
            grad_value[:, :, a:b] = torch.where(takes_part[:, :, a:b, None], read, 0)


def _takes_part(inputs: Inputs) -> Tensor:
    """(B, H_k, n_k), True for a key that is added."""
    finite = inputs.key.isfinite().all(-1)
    return finite if inputs.key_mask is None else finite & inputs.key_mask[:, None]


def _blocks(
    of_slots: Sequence[Sequence[Span]], x: Tensor, key: Tensor
) -> Iterator[tuple[tuple[int, int], int, tuple[int, int, slice]]]:
    """For at most CODE_ROWS rows of one head of x, queries or keys: the (slot, unit) of their
    table, their key head, and their index in x."""
    (batch, heads), key_heads = x.shape[:2], key.shape[1]
    for s, spans in enumerate(of_slots):
        starts = [(a, last) for first, last in spans for a in range(first, last, CODE_ROWS)]
        for b, head, (a, last) in itertools.product(range(batch), range(heads), starts):
            h = head * key_heads // heads
            yield (s, b * key_heads + h), h, (b, head, slice(a, min(a + CODE_ROWS, last)))


class _SoftRows:
    """Soft codes of rows (n, D) by the functions of one head, which their gradient needs again."""

    def __init__(self, x: Tensor, f: Functions, probes: int, planes_too: bool) -> None:
        self.x = x[None, None].contiguous()
        self.f, self.planes_too = f, planes_too and f.family == FAMILY["hyperplane"]
        self.finite = x.isfinite().all(-1)
        sizes = f.family, f.n_bits, f.n_hashes, probes
        self.weights, self.probe_codes, *self.saved = torch_ops.soft_hash(
            self.x, f.planes, f.sharpness, *sizes
        )

    def products(self, rows: Tensor, table: Tensor, takes_part: Tensor) -> tuple[Tensor, Tensor]:
        """Of table (n_hashes, buckets, columns) and rows (n, columns): the gradient of the weights,
        each row's products with the table's rows of its buckets over n_hashes, and the table of the
        rows added by weight.

        That is the gradient of the weighted sum whose keys are the buckets: hashes are its heads.
        """
        hashes, buckets, columns = table.shape
        n = len(rows)
        by_hash = [
            x[0, 0].transpose(0, 1).reshape(1, hashes, n, 1, -1)
            for x in (self.probe_codes, self.weights)
        ]
        by_hash[1] = torch.where(takes_part[:, None, None], by_hash[1], 0)  # 0 * NaN is NaN
        rows = torch.where(takes_part[:, None], rows, 0)
        every = torch.arange(buckets, device=table.device).to(code_dtype(self.f.n_bits))
        every = every.view(1, 1, buckets, 1, 1).expand(1, hashes, buckets, 1, 1)
        added, of_weights, _ = torch_ops.weighted_bucket_sum_backward(
            rows.expand(1, hashes, n, columns),
            *(by_hash[0], every, table[None], by_hash[1], None, buckets, 0, None),
        )
        of_weights = of_weights.view(hashes, n, -1).transpose(0, 1) / hashes
        of_weights = torch.where(takes_part[:, None, None], of_weights, 0)
        return of_weights.reshape(self.weights.shape), added[0]

    def backward(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of x (n, D), of the head's planes and of its sharpness."""
        of_x, of_sharpness, of_planes = torch_ops.soft_hash_backward(
            *(grad, self.x, self.f.planes, self.f.sharpness, *self.saved, self.weights),
            *(self.f.family, self.f.n_bits, self.planes_too),
        )
        planes = of_planes[0] if self.planes_too else of_planes
        return of_x[0, 0], planes, of_sharpness.sum()
