"""Exchanges of tensors between ranks that are differentiable and count what they send.

Sums over ranks run in the order of the ranks, so that results have the same bits in every run.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lshkit.distributed.ranks.costs import PIECE_BYTES
from lshkit.distributed.ranks.rows import Rows, chunk_starts


class Ranks:
    """A process group, and the bytes that this rank has sent to the others of it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.bytes_sent = 0

    def all_to_all(
        self,
        rows: Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        out: Tensor | None = None,
    ) -> Tensor:
        """The first `send[0]` rows go to rank 0, and so on; those received are in rank order."""
        if out is None:
            out = rows.new_empty((sum(receive), *rows.shape[1:]))
        row_bytes = rows.element_size() * rows[:1].numel() if len(rows) else 0
        self.bytes_sent += row_bytes * (sum(send) - send[self.rank])
        with _of_all(self.size):
            dist.all_to_all_single(out, rows, list(receive), list(send), group=self.group)
        return out

    def all_gather(self, x: Tensor) -> Tensor:
        """`(size, *x.shape)` of tensors of one shape."""
        out = x.new_empty((self.size, *x.shape))
        self.bytes_sent += x.nbytes * (self.size - 1)
        with _of_all(self.size):
            dist.all_gather(list(out.unbind()), x, group=self.group)
        return out

    def all_gather_object(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        with _of_all(self.size):
            dist.all_gather_object(values, value, group=self.group)
        return values


@contextmanager
def _of_all(ranks: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"context_parallel: an exchange among {ranks} ranks has failed: a rank has ended, or "
            f"has not called within the timeout of the process group ({error})"
        ) from error


def _wide(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def _flat(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([x.reshape(-1) for x in parts]) if parts else like.new_empty(0)


# --- Rows that other ranks hold -------------------------------------------------------------------


class Fetch(NamedTuple):
    """What each rank is sent: local rows (start, rows), and where what it sends lands."""

    send: list[list[tuple[int, int]]]
    receive: list[list[tuple[int, int]]]
    rows: int  # of the result


def fetch_plan(rank: int, held: Rows, wanted: Sequence[Sequence[tuple[int, int]]]) -> Fetch:
    """wanted: of each rank the disjoint ranges of rows, whose rows stand in the result in turn."""
    send = []
    for ranges in wanted:
        found = (part for a, b in ranges for part in held.overlaps(rank, a, b))
        send.append([(local, rows) for _, local, rows in found])
    receive = []
    total = 0
    bases = []
    for a, b in wanted[rank]:
        bases.append(total - a)
        total += b - a
    for source in range(len(wanted)):
        receive.append(
            [
                (base + start, rows)
                for (a, b), base in zip(wanted[rank], bases, strict=True)
                for start, _, rows in held.overlaps(source, a, b)
            ]
        )
    return Fetch(send, receive, total)


def fetch(ranks: Ranks, x: Tensor, plan: Fetch) -> Tensor:
    """`(B, H, plan.rows, columns)` of every rank's x `(B, H, its rows, columns)`.

    Rows that no rank holds are zeros. The gradient goes back to where the rows came from.
    """
    return _Fetch.apply(x, ranks, plan)


def _move(
    ranks: Ranks,
    x: Tensor,
    send: list[list[tuple[int, int]]],
    receive: list[list[tuple[int, int]]],
    rows: int,
    dtype: torch.dtype,
) -> Tensor:
    """Sums what arrives, in this dtype: rows that went to several ranks come back from all."""
    batch, heads, _, columns = x.shape
    row = batch * heads * columns
    out = x.new_zeros((batch, heads, rows, columns), dtype=dtype)
    others = [
        [() if rank == ranks.rank else s for rank, s in enumerate(x)] for x in (send, receive)
    ]
    parts = [x[:, :, at : at + n] for spans in others[0] for at, n in spans]
    sent, awaited = ([row * sum(n for _, n in s) for s in side] for side in others)
    arrived = ranks.all_to_all(_flat(parts, x), sent, awaited)
    position = 0
    for source, spans in enumerate(receive):
        for i, (at, n) in enumerate(spans):
            if source == ranks.rank:
                start, _ = send[source][i]
                part = x[:, :, start : start + n]
            else:
                part = arrived[position : position + row * n].view(batch, heads, n, columns)
                position += row * n
            out[:, :, at : at + n] += part
    return out.to(x.dtype)


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, plan: Fetch) -> Tensor:
        ctx.ranks, ctx.plan, ctx.rows = ranks, plan, x.shape[2]
        return _move(ranks, x, plan.send, plan.receive, plan.rows, x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        send, receive, _ = ctx.plan
        return _move(ctx.ranks, grad, receive, send, ctx.rows, _wide(grad)), None, None


# --- Whole sequences of some heads ----------------------------------------------------------------


def to_heads(ranks: Ranks, rows: Sequence[Rows], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors `(B, H, a rank's rows, columns)` as `(B, H / size, all rows, columns)`, in order.

    rows: where each tensor's rows are. Rank r gets the r-th part of the heads of each.
    """
    return _ToHeads.apply(ranks, rows, *tensors)


def to_rows(ranks: Ranks, rows: Sequence[Rows], *tensors: Tensor) -> tuple[Tensor, ...]:
    """The opposite of `to_heads`, and its gradient."""
    return _ToRows.apply(ranks, rows, *tensors)


def _gather_heads(
    ranks: Ranks, rows: Sequence[Rows], tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    parts = [x.tensor_split(ranks.size, 1) for x in tensors]
    others = [rank for rank in range(ranks.size) if rank != ranks.rank]
    sent = [x[rank] for rank in others for x in parts]
    outs, receive = [], []
    for x, held in zip(tensors, rows, strict=True):
        batch, heads, _, columns = x.shape
        outs.append(x.new_empty((batch, heads // ranks.size, held.total, columns)))
    for source in range(ranks.size):
        sizes = (out[:, :, : held.lengths[source]] for out, held in zip(outs, rows, strict=True))
        receive.append(sum(x.numel() for x in sizes))
    send = [sum(x[rank].numel() for x in parts) for rank in range(ranks.size)]
    send[ranks.rank] = receive[ranks.rank] = 0
    arrived = ranks.all_to_all(_flat(sent, tensors[0]), send, receive)
    position = 0
    for source in range(ranks.size):
        for out, own, held in zip(outs, parts, rows, strict=True):
            part = own[source]
            if source != ranks.rank:
                batch, heads, _, columns = out.shape
                n = held.lengths[source]
                part = arrived[position : position + batch * heads * n * columns]
                part = part.view(batch, heads, n, columns)
                position += part.numel()
            for start, stop, local in held.chunks[source]:
                out[:, :, start:stop] = part[:, :, local : local + stop - start]
    return tuple(outs)


def _scatter_heads(
    ranks: Ranks, rows: Sequence[Rows], tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    sent, send, receive, outs = [], [], [], []
    for rank in range(ranks.size):
        size = 0
        for x, held in zip(tensors, rows, strict=True):
            if rank != ranks.rank:
                chunks = held.chunks[rank]
                part = torch.cat([x[:, :, start:stop] for start, stop, _ in chunks], 2)
                sent.append(part)
                size += part.numel()
        send.append(size)
    for x, held in zip(tensors, rows, strict=True):
        batch, heads, _, columns = x.shape
        n = held.lengths[ranks.rank]
        outs.append(x.new_empty((batch, heads * ranks.size, n, columns)))
    receive = [sum(x.numel() for x in outs) // ranks.size] * ranks.size
    receive[ranks.rank] = 0
    arrived = ranks.all_to_all(_flat(sent, tensors[0]), send, receive)
    position = 0
    for source in range(ranks.size):
        for x, out, held in zip(tensors, outs, rows, strict=True):
            part = out.tensor_split(ranks.size, 1)[source]
            if source == ranks.rank:
                for start, stop, local in held.chunks[source]:
                    part[:, :, local : local + stop - start] = x[:, :, start:stop]
                continue
            part.copy_(arrived[position : position + part.numel()].view(part.shape))
            position += part.numel()
    return tuple(outs)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Ranks, rows: Sequence[Rows], *tensors: Tensor) -> Any:
        ctx.ranks, ctx.rows = ranks, rows
        return _gather_heads(ranks, rows, tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *_scatter_heads(ctx.ranks, ctx.rows, grads)


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Ranks, rows: Sequence[Rows], *tensors: Tensor) -> Any:
        ctx.ranks, ctx.rows = ranks, rows
        return _scatter_heads(ranks, rows, tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *_gather_heads(ctx.ranks, ctx.rows, grads)


# --- Sums of tables over ranks --------------------------------------------------------------------


def sum_tables(
    ranks: Ranks, tables: Tensor, chains: Sequence[Sequence[tuple[int, int]]], order: str
) -> None:
    """Replaces tables by sums over those of the same chain, in place.

    Piece by piece: every rank gets an equal part of a piece, sums it, and sends it back. Pieces are
    small enough to stay in cache and in memory that is used again.

    Args:
        tables: contiguous, a slot's along the first dimension.
        chains: (rank, slot) of the tables that belong together, in the order of their rows.
        order: "all": the sum of all. "before": of those before it. "after": of those after it.
    """
    size, slots = ranks.size, len(tables)
    rows = tables.flatten(1)
    step = size * (PIECE_BYTES // tables.element_size())
    memory = tables.new_empty((slots, min(rows.shape[1] + size, step)))
    for pieces in rows.split(step, 1):
        starts = chunk_starts(pieces.shape[1], size)
        sizes = [b - a for a, b in zip(starts, starts[1:], strict=False)]
        own = sizes[ranks.rank]
        parts = [x[: size * own] for x in memory]
        for piece, part in zip(pieces, parts, strict=True):
            ranks.all_to_all(piece, sizes, [own] * size, part)
        for chain in chains:
            links = [parts[slot].view(size, own)[rank] for rank, slot in chain]
            _sum_links(links[::-1] if order == "after" else links, order == "all")
        for piece, part in zip(pieces, parts, strict=True):
            ranks.all_to_all(part, [own] * size, sizes, piece)


def _sum_links(links: list[Tensor], of_all: bool) -> None:
    """Each link's sum of all, or of those before it, in their place."""
    running = torch.zeros_like(links[0])
    for link in links:
        following = running + link
        link.copy_(running)
        running = following
    if of_all:
        for link in links:
            link.copy_(running)
