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

TAG = 0x6C7368  # of these messages: those of the caller in the same group have others
JOINED_BYTES = 2**16  # a message, on average, below which the tensors for a rank are sent as one


class Ranks:
    """A process group, and the bytes that this rank has sent to the others of it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.bytes_sent = 0

    def exchange(
        self, send: Sequence[Sequence[Tensor]], receive: Sequence[Sequence[Tensor]]
    ) -> None:
        """Sends each rank the contiguous tensors of `send`, and fills those of `receive` by rank.

        Large ones go straight from where they are to where they belong. Empty ones are left out.
        """
        work: list[dist.P2POp] = []
        joined = []
        for rank, (outgoing, incoming) in enumerate(zip(send, receive, strict=True)):
            if rank == self.rank:
                for x, out in zip(outgoing, incoming, strict=True):
                    out.copy_(x)
                continue
            outgoing = [x for x in outgoing if x.numel()]
            incoming = [x for x in incoming if x.numel()]
            if _are_small(outgoing):
                outgoing = [torch.cat([x.flatten() for x in outgoing])]
            if _are_small(incoming):
                whole = incoming[0].new_empty(sum(x.numel() for x in incoming))
                joined.append((incoming, whole))
                incoming = [whole]
            for operation, tensors in ((dist.isend, outgoing), (dist.irecv, incoming)):
                work += [
                    dist.P2POp(operation, x, group=self.group, group_peer=rank, tag=TAG)
                    for x in tensors
                ]
            self.bytes_sent += sum(x.nbytes for x in outgoing)
        with _of_all(self.size):
            for request in dist.batch_isend_irecv(work) if work else ():
                request.wait()
        for parts, whole in joined:
            for x, part in zip(parts, whole.split([x.numel() for x in parts]), strict=True):
                x.copy_(part.view_as(x))

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


def _are_small(tensors: Sequence[Tensor]) -> bool:
    """The same of those that a rank sends and of those that the other one receives."""
    if len(tensors) < 2 or len({x.dtype for x in tensors}) > 1:
        return False
    return sum(x.nbytes for x in tensors) < JOINED_BYTES * len(tensors)


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


def fetch(ranks: Ranks, plan: Fetch, *tensors: Tensor) -> tuple[Tensor, ...]:
    """`(B, H, plan.rows, columns)` of every rank's tensors `(B, H, its rows, columns)`.

    Rows that no rank holds are zeros. The gradient goes back to where the rows came from.
    """
    return _Fetch.apply(ranks, plan, *tensors)


def _rows(x: Tensor, spans: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Contiguous parts of a contiguous x `(B, H, n, columns)`: the rows of each sequence's head."""
    return [head[at : at + n] for head in x.flatten(0, 1).unbind() for at, n in spans]


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Ranks, plan: Fetch, *tensors: Tensor) -> Any:
        ctx.ranks, ctx.plan, ctx.lengths = ranks, plan, [x.shape[2] for x in tensors]
        whole = sum(n for spans in plan.receive for _, n in spans) == plan.rows
        outs = []
        for x in tensors:
            shape = *x.shape[:2], plan.rows, x.shape[3]
            outs.append(x.new_empty(shape) if whole else x.new_zeros(shape))
        tensors = tuple(x.contiguous() for x in tensors)
        send = [[part for x in tensors for part in _rows(x, spans)] for spans in plan.send]
        receive = [[part for x in outs for part in _rows(x, spans)] for spans in plan.receive]
        ranks.exchange(send, receive)
        return tuple(outs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Rows that went to several ranks come back from all: their sum, in the ranks' order."""
        plan = ctx.plan
        grads = tuple(x.contiguous() for x in grads)
        outs = [
            x.new_zeros((*x.shape[:2], n, x.shape[3]), dtype=_wide(x))
            for x, n in zip(grads, ctx.lengths, strict=True)
        ]
        send = [[part for x in grads for part in _rows(x, spans)] for spans in plan.receive]
        places = [[part for x in outs for part in _rows(x, spans)] for spans in plan.send]
        arrived = [
            [x.new_empty(part.shape) for x, out in zip(grads, outs, strict=True)
             for part in _rows(out, spans)]
            for spans in plan.send
        ]  # fmt: skip
        ctx.ranks.exchange(send, arrived)
        for from_rank, parts in zip(arrived, places, strict=True):
            for x, out in zip(from_rank, parts, strict=True):
                out += x
        return None, None, *(out.to(x.dtype) for out, x in zip(outs, grads, strict=True))


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
    of_heads = []
    for x, held in zip(tensors, rows, strict=True):
        batch, heads, _, columns = x.shape
        of_heads.append(x.new_empty((batch, heads // ranks.size, held.total, columns)))
    of_rows = [x.contiguous() for x in tensors]
    send, receive = _parts_of_heads(ranks, rows, of_rows, of_heads)
    ranks.exchange(send, receive)
    return tuple(of_heads)


def _scatter_heads(
    ranks: Ranks, rows: Sequence[Rows], tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    of_rows = []
    for x, held in zip(tensors, rows, strict=True):
        batch, heads, _, columns = x.shape
        of_rows.append(x.new_empty((batch, heads * ranks.size, held.lengths[ranks.rank], columns)))
    of_heads = [x.contiguous() for x in tensors]
    receive, send = _parts_of_heads(ranks, rows, of_rows, of_heads)
    ranks.exchange(send, receive)
    return tuple(of_rows)


def _parts_of_heads(
    ranks: Ranks, rows: Sequence[Rows], of_rows: Sequence[Tensor], of_heads: Sequence[Tensor]
) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """By rank: this rank's rows of the other's heads, and the other's rows of this rank's heads."""
    own: list[list[Tensor]] = [[] for _ in range(ranks.size)]
    others: list[list[Tensor]] = [[] for _ in range(ranks.size)]
    for x, whole, held in zip(of_rows, of_heads, rows, strict=True):
        for rank, heads in enumerate(x.tensor_split(ranks.size, 1)):
            of_rank = [(local, b - a) for a, b, local in held.chunks[ranks.rank]]
            own[rank] += [part for sequence in heads for part in _rows(sequence[None], of_rank)]
            others[rank] += _rows(whole, [(a, b - a) for a, b, _ in held.chunks[rank]])
    return own, others


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
        parts = [x[: size * own].view(size, own) for x in memory]
        of_ranks = list(zip(*(piece.split(sizes) for piece in pieces), strict=True))
        from_ranks = list(zip(*parts, strict=True))
        ranks.exchange(of_ranks, from_ranks)
        for chain in chains:
            links = [parts[slot][rank] for rank, slot in chain]
            _sum_links(links[::-1] if order == "after" else links, order == "all")
        ranks.exchange(from_ranks, of_ranks)


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
