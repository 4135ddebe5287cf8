"""The ways in which ranks compute the attention of a sequence that is spread over them."""

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lshkit import torch_ops
from lshkit.attention.call import Call
from lshkit.attention.estimators import BucketSums, Estimator, Soft
from lshkit.attention.unit_norm import unit_rows
from lshkit.distributed.ranks import tables
from lshkit.distributed.ranks.collectives import Fetch, Ranks, fetch, fetch_plan, to_heads, to_rows
from lshkit.distributed.ranks.rows import Rows, Run, merged, runs_of


class Sequences(NamedTuple):
    """Where the rows of queries and keys are, and which sequences they belong to."""

    queries: Rows
    keys: Rows
    starts: list[int] | None  # of packed sequences
    is_causal: bool
    offset: int  # query i of all sees the keys j <= i + offset

    def runs(self, rank: int) -> list[Run]:
        n_keys = self.keys.total
        return runs_of(rank, self.queries, n_keys, self.starts, self.is_causal, self.offset)

    def wanted(self, rank: int) -> list[tuple[int, int]]:
        """Ranges of the keys that a rank's queries need."""
        return merged([(run.start, run.stop) for run in self.runs(rank)])


def fetch_mask(ranks: Ranks, mask: Tensor | None, plan: Fetch) -> Tensor | None:
    if mask is None:
        return None
    (whole,) = fetch(ranks, plan, mask.to(torch.uint8)[:, None, :, None])
    return whole[:, 0, :, 0].bool()


# --- Whole sequences of some heads ----------------------------------------------------------------


def attend_by_heads(ranks: Ranks, estimator: Estimator, call: Call, where: Sequences) -> Tensor:
    """All-to-all to whole sequences of a part of the heads, attention as ever, and back."""
    of_all = call.key.shape[1]
    rows = where.queries, where.keys, where.keys
    query, key, value = to_heads(ranks, rows, call.query, call.key, call.value)
    n_heads = of_all // ranks.size
    first = ranks.rank * n_heads
    plan = fetch_plan(ranks.rank, where.keys, [[(0, where.keys.total)]] * ranks.size)
    starts = None
    if where.starts is not None:
        starts = torch.tensor(where.starts, dtype=torch.int64, device=query.device)
    call = call._replace(
        query=query,
        key=key,
        value=value,
        key_mask=fetch_mask(ranks, call.key_mask, plan),
        query_starts=starts,
        key_starts=starts,
        offset=where.offset,
        heads=(first, of_all),
        parameters={
            name: x[first : first + n_heads] if x.dim() and len(x) == of_all else x
            for name, x in call.parameters.items()
        },
    )
    (out,) = to_rows(ranks, rows[:1], estimator.attend(call))
    return out


# --- Keys and values of other ranks ---------------------------------------------------------------


def attend_by_keys(ranks: Ranks, estimator: Estimator, call: Call, where: Sequences) -> Tensor:
    """Fetches the keys and values that the rank's queries need, and hashes them here."""
    wanted = [where.wanted(rank) for rank in range(ranks.size)]
    plan = fetch_plan(ranks.rank, where.keys, wanted)
    key, value = fetch(ranks, plan, call.key, call.value)
    mask = fetch_mask(ranks, call.key_mask, plan)
    outs = []
    for run in where.runs(ranks.rank):
        base = 0
        for start, stop in wanted[ranks.rank]:
            if start <= run.start and run.stop <= stop:
                base -= start
                break
            base += stop - start
        keys = slice(base + run.start, base + run.stop) if run.start < run.stop else slice(0)
        query, query_starts = call.query[:, :, run.first : run.last], run.query_starts
        starts = (query_starts, run.key_starts)
        query_starts, key_starts = (
            None if x is None else torch.tensor(x, dtype=torch.int64, device=key.device)
            for x in starts
        )
        part = call._replace(
            query=query,
            key=key[:, :, keys],
            value=value[:, :, keys],
            key_mask=None if mask is None else mask[:, keys],
            query_starts=query_starts,
            key_starts=key_starts,
            offset=run.offset if where.is_causal else 0,
        )
        outs.append(estimator.attend(part))
    if outs:
        return torch.cat(outs, 2)
    # No rows, but the others await this rank's part in the backward pass, and DDP its zeros.
    none = value[:1, :1, :0] + key[:1, :1, :0, :1] + call.query[..., :1]
    for x in call.parameters.values():
        none = none + x.flatten()[:0].sum().to(none.dtype)
    return none


# --- Tables ---------------------------------------------------------------------------------------


class Pieces(NamedTuple):
    """What of a rank's rows goes by tables, and the whole sequences among them."""

    plan: tables.Plan
    whole: list[Run]


def pieces_of(ranks: Ranks, where: Sequences) -> Pieces:
    """A slot is a sequence's part in a chunk; without a causal mask all of its parts on a rank."""
    chains: dict[int, list[tuple[int, int, int]]] = {}
    slots: list[tables.Slot] = []
    n_slots = 0
    whole: list[Run] = []
    for rank in range(ranks.size):
        of_sequence: dict[int, tables.Slot] = {}
        found: list[tables.Slot] = []
        for sequence, start, queries, keys in _partial(rank, where):
            if where.is_causal or sequence not in of_sequence:
                of_sequence[sequence] = tables.Slot([], [])
                chains.setdefault(sequence, []).append((start, rank, len(found)))
                found.append(of_sequence[sequence])
            of_sequence[sequence].queries.append(queries)
            of_sequence[sequence].keys.append(keys)
        n_slots = max(n_slots, len(found))
        if rank == ranks.rank:
            slots = found
            whole = _whole(rank, where)
    ordered = [[link[1:] for link in sorted(chain)] for chain in chains.values()]
    return Pieces(tables.Plan(slots, n_slots, ordered, where.is_causal), whole)


def _partial(rank: int, where: Sequences) -> list[tuple[int, int, tables.Span, tables.Span]]:
    """(sequence, first row, local queries, local keys) of sequences that a chunk holds in part."""
    parts = []
    if where.starts is None:
        chunks = zip(where.queries.chunks[rank], where.keys.chunks[rank], strict=True)
        for (a, b, at), (c, d, to) in chunks:
            parts.append((0, a, (at, at + b - a), (to, to + d - c)))
        return parts
    for run in _border_runs(rank, where):
        sequence, start, stop, local = run
        span = local, local + stop - start
        parts.append((sequence, start, span, span))
    return parts


def _border_runs(rank: int, where: Sequences) -> list[tuple[int, int, int, int]]:
    assert where.starts is not None
    parts = []
    for start, stop, local in where.queries.chunks[rank]:
        for sequence in _sequences_of(where.starts, start, stop):
            a, b = where.starts[sequence], where.starts[sequence + 1]
            if a < start or b > stop:
                low, high = max(a, start), min(b, stop)
                parts.append((sequence, low, high, local + low - start))
    return parts


def _sequences_of(starts: Sequence[int], start: int, stop: int) -> list[int]:
    """The first and the last sequence, empty ones aside, that have rows within [start, stop)."""
    if start == stop:
        return []
    first = bisect.bisect_right(starts, start) - 1
    last = bisect.bisect_left(starts, stop) - 1
    return sorted({first, last})


def _whole(rank: int, where: Sequences) -> list[Run]:
    """Runs of packed sequences that a chunk holds whole."""
    if where.starts is None:
        return []
    runs = []
    for start, stop, local in where.queries.chunks[rank]:
        partial = [p for p in _border_runs(rank, where) if start <= p[1] < stop]
        low, high = start, stop
        for _, a, b, _ in partial:
            if a == start:
                low = b
            else:
                high = a
        if low >= high:
            continue
        inside = [a - low for a in where.starts if low <= a <= high]
        first, last = local + low - start, local + high - start
        runs.append(Run(first, last, low, high, 0, inside, inside))
    return runs


def attend_by_tables(ranks: Ranks, estimator: BucketSums, call: Call, where: Sequences) -> Tensor:
    """Sums tables over the ranks, which other parts of the same sequences are read from."""
    pieces = pieces_of(ranks, where)
    call = estimator.lifted(call)
    differentiated = torch.is_grad_enabled() and any(
        x.requires_grad for x in (call.query, call.key, call.value, *call.parameters.values())
    )
    value = call.value
    if call.normalize == "sum":
        value = F.pad(value, (0, 1), value=1.0)  # the sum of the weights
    planes, family, n_bits, n_hashes = estimator.functions_of(call)
    sharpness = None
    if isinstance(estimator, Soft):
        sharpness = estimator.sharpness_of(call).to(torch.float32)
    sizes = family, n_bits, n_hashes
    functions = tables.Functions(planes, *sizes, sharpness, *estimator.probes())
    rows = tables.Inputs(call.query, call.key, value, call.key_mask)
    # Without a gradient a pass over a slot's rows does all: what it reads is normalised, too.
    code = torch_ops.NORMALIZE[call.normalize] if call.normalize == "l2" else 0
    fused = not differentiated and (where.is_causal or code != 0)
    code = 0 if differentiated else code
    own = fused and where.is_causal
    out = tables.attend_by_tables(ranks, pieces.plan, rows, functions, code, own)
    raw = call._replace(value=value, normalize=None, offset=0)
    if where.is_causal and not own:
        out = out + _own_parts(estimator, raw, pieces.plan, out)
    out = out.to(value.dtype) if not differentiated else out
    if call.normalize == "l2" and not code:
        out = unit_rows(out)
    elif call.normalize == "sum":
        out = out[..., :-1] / torch.where(out[..., -1:] > 0, out[..., -1:], 1)
    out = out.to(call.query.dtype)
    return _with_whole(estimator, call, pieces.whole, out) if pieces.whole else out


def _own_parts(estimator: Estimator, raw: Call, plan: tables.Plan, out: Tensor) -> Tensor:
    """What the queries of a slot see of its own keys, by the operator of one process."""
    parts, end = [], 0
    for slot in plan.slots:
        for a, b in slot.queries:
            parts.append(out.new_zeros((*out.shape[:2], a - end, out.shape[-1])))
            part = raw._replace(
                query=raw.query[:, :, a:b].float(),
                key=raw.key[:, :, a:b].float(),
                value=raw.value[:, :, a:b].float(),
                key_mask=None if raw.key_mask is None else raw.key_mask[:, a:b],
            )
            parts.append(estimator._attend(part))
            end = b
    parts.append(out.new_zeros((*out.shape[:2], out.shape[2] - end, out.shape[-1])))
    return torch.cat(parts, 2)


def _with_whole(estimator: Estimator, call: Call, runs: list[Run], out: Tensor) -> Tensor:
    parts, end = [], 0
    for run in runs:
        starts = torch.tensor(run.query_starts, dtype=torch.int64, device=out.device)
        rows = slice(run.first, run.last)
        part = call._replace(
            query=call.query[:, :, rows],
            key=call.key[:, :, rows],
            value=call.value[:, :, rows],
            key_mask=None if call.key_mask is None else call.key_mask[:, rows],
            query_starts=starts,
            key_starts=starts,
            offset=0,
        )
        parts += [out[:, :, end : run.first], estimator._attend(part)]
        end = run.last
    return torch.cat([*parts, out[:, :, end:]], 2)
