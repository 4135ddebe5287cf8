"""The exchange of bucket tables: a rank sends sums by bucket, whatever the number of its rows.

A slot is a part of a sequence that other ranks have parts of too. Its rows are added to tables
(batch * key heads, n_hashes, buckets, columns), these are summed over the ranks, and its queries
read the sums: of all rows, or of the rows before the slot where attention is causal.

The gradient goes the same way: the output's gradient is added to the buckets of the queries, summed
over the ranks the other way round, and read by the keys. Weights of soft codes need both tables, so
the first ones are made and summed again in the backward pass: nothing but rows is kept for it.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lshkit import _C, torch_ops
from lshkit.distributed.ranks.collectives import Ranks, sum_tables
from lshkit.hash_functions import FAMILY
from lshkit.torch_ops.library import code_dtype, once_differentiable

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
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, key_mask, planes, sharpness = ctx.saved_tensors
        functions, ranks, plan = ctx.rest
        functions = functions._replace(planes=planes, sharpness=sharpness)
        inputs = _floats(Inputs(query, key, value, key_mask))
        grad_out = grad_out.to(torch.float32).contiguous()
        soft = sharpness is not None
        grads = [torch.zeros_like(x) if soft else x for x in inputs[:2]]
        grads.append(torch.zeros_like(inputs.value))
        grad_planes = torch.zeros_like(planes) if ctx.needs_input_grad[4] else None
        grad_sharpness = torch.zeros_like(sharpness) if soft else None
        outs = [(inputs.query, True), (grad_out, True), (grads[0], True)]
        outs += [(grads[1], False), (grads[2], False)]
        heads = torch.arange(key.shape[1]).expand(key.shape[0], -1)
        for part in _parts(inputs, functions, plan.n_slots, [*outs, (heads, False)]):
            _backward(ranks, plan, part, grad_planes, grad_sharpness)
        return (
            grads[0].to(query.dtype) if soft else None,
            grads[1].to(key.dtype) if soft else None,
            grads[2].to(value.dtype),
            *(None, grad_planes, grad_sharpness, None, None, None),
        )


def _backward(
    ranks: Ranks,
    plan: Plan,
    part: _Part,
    grad_planes: Tensor | None,
    grad_sharpness: Tensor | None,
) -> None:
    """Writes the gradients of one part's rows, and adds to those of the functions."""
    _, grad_out, grad_query, grad_key, grad_value, heads = part.out
    query, key, value, mask = part.inputs
    f = part.functions
    soft = f.sharpness is not None
    group = query.shape[1] // key.shape[1]

    def codes_of(x: Tensor, unit: int, probes: int) -> "_SoftRows":
        return _SoftRows(x, f, unit % key.shape[1], probes, grad_planes is not None)

    def collect(codes: "_SoftRows", grad: Tensor, unit: int) -> Tensor:
        of_x, of_planes, of_sharpness = codes.backward(grad)
        head = int(heads.flatten()[unit])
        if grad_planes is not None:
            grad_planes[head] += of_planes
        if grad_sharpness is not None:
            grad_sharpness[head if len(grad_sharpness) > 1 else 0] += of_sharpness
        return of_x

    # The output's gradient by the queries' buckets, and the gradient of the queries' weights.
    if soft:
        tables = _summed_tables(ranks, plan, part)
        reverse = torch.zeros_like(tables)
        for s, (spans, _) in enumerate(plan.slots):
            for unit in range(part.units):
                b, h = divmod(unit, key.shape[1])
                for head in range(h * group, (h + 1) * group):
                    for a, c in _blocks(spans):
                        codes = codes_of(query[b, head, a:c], unit, f.query_probes)
                        of_weights, added = codes.products(
                            grad_out[b, head, a:c], tables[s, unit], codes.finite
                        )
                        reverse[s, unit] += added
                        grad_query[b, head, a:c] = collect(codes, of_weights, unit)
        del tables
    else:
        reverse = part.new_tables(plan.n_slots)
        for slot, (spans, _) in zip(reverse, plan.slots, strict=False):
            for g in range(group):
                of_group = slice(g, None, group)
                _add(slot, f.reversed(), query[:, of_group], grad_out[:, of_group], None, spans)
    sum_tables(ranks, reverse, plan.chains, "after" if plan.is_causal else "all")

    takes_part = key.isfinite().all(-1)
    if mask is not None:
        takes_part &= mask[:, None]
    for s, (_, spans) in enumerate(plan.slots):
        for a, c in spans:
            if a == c:
                continue
            read = _read(reverse[s], f.reversed(), key, (a, c))
            some = takes_part[:, :, a:c, None]
            grad_value[:, :, a:c] = torch.where(some, read, 0)
        if not soft:
            continue
        for unit in range(part.units):
            b, h = divmod(unit, key.shape[1])
            for a, c in _blocks(spans):
                some = takes_part[b, h, a:c]
                codes = codes_of(key[b, h, a:c], unit, f.key_probes)
                of_weights, _ = codes.products(value[b, h, a:c], reverse[s, unit], some)
                grad_key[b, h, a:c] = collect(codes, of_weights, unit)


def _blocks(spans: Sequence[Span]) -> Iterator[Span]:
    for first, last in spans:
        for a in range(first, last, CODE_ROWS):
            yield a, min(a + CODE_ROWS, last)


class _SoftRows:
    """Soft codes of rows (n, D) of one head, which their gradient needs again."""

    def __init__(self, x: Tensor, f: Functions, head: int, probes: int, planes_too: bool) -> None:
        assert f.sharpness is not None
        self.x = x[None, None].contiguous()
        self.planes = f.planes[head : head + 1]
        self.sharpness = f.sharpness[head : head + 1] if len(f.sharpness) > 1 else f.sharpness
        self.f, self.planes_too = f, planes_too and f.family == FAMILY["hyperplane"]
        self.finite = x.isfinite().all(-1)
        sizes = f.family, f.n_bits, f.n_hashes, probes
        self.weights, self.probe_codes, *self.saved = torch_ops.soft_hash(
            self.x, self.planes, self.sharpness, *sizes
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
            *(grad, self.x, self.planes, self.sharpness, *self.saved, self.weights),
            *(self.f.family, self.f.n_bits, self.planes_too),
        )
        planes = of_planes[0] if self.planes_too else of_planes
        return of_x[0, 0], planes, of_sharpness.sum()
