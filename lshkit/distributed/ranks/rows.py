"""Where the rows of a sequence are: which ranks hold which, and which keys a rank's queries see."""

import bisect
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

LAYOUTS = ("contiguous", "head_tail")


class Chunk(NamedTuple):
    """Rows [start, stop) of the sequence, which are a rank's own rows from `local` on."""

    start: int
    stop: int
    local: int


class Rows:
    """The chunks of every rank, in the order in which the rank holds them.

    "contiguous": the ranks' rows follow each other. "head_tail": of 2 P chunks, the sizes those of
    `torch.tensor_split`, rank r holds numbers r and 2 P - 1 - r, so that all have as much to do
    under a causal mask. name: of what has the rows, for the error of lengths that are none such.
    """

    def __init__(self, lengths: Sequence[int], layout: str, name: str = "query and key") -> None:
        self.lengths = tuple(lengths)
        self.total = sum(self.lengths)
        self.chunks: list[tuple[Chunk, ...]]
        ranks = len(self.lengths)
        if layout == "contiguous":
            starts = list(accumulate(self.lengths, initial=0))
            self.chunks = [(Chunk(a, b, 0),) for a, b in pairwise(starts)]
            return
        starts = chunk_starts(self.total, 2 * ranks)
        self.chunks = []
        for rank, length in enumerate(self.lengths):
            head, tail = rank, 2 * ranks - 1 - rank
            size = starts[head + 1] - starts[head]
            chunks = (
                Chunk(starts[head], starts[head + 1], 0),
                Chunk(starts[tail], starts[tail + 1], size),
            )
            wanted = size + chunks[1].stop - chunks[1].start
            if length != wanted:
                raise ValueError(
                    f"{name} must have {wanted} of the {self.total} rows on rank {rank} "
                    f"with layout='head_tail', got {length}: ContextParallel.shard cuts them so"
                )
            self.chunks.append(chunks)

    def overlaps(self, rank: int, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(global start, local start, rows) of the rank's rows within [start, stop)."""
        found = []
        for chunk in self.chunks[rank]:
            low, high = max(start, chunk.start), min(stop, chunk.stop)
            if low < high:
                found.append((low, chunk.local + low - chunk.start, high - low))
        return found


def chunk_starts(total: int, parts: int) -> list[int]:
    """Where the parts of `torch.tensor_split` start, and the end."""
    size, larger = divmod(total, parts)
    return [i * size + min(i, larger) for i in range(parts + 1)]


class Run(NamedTuple):
    """Queries of a rank, local rows [first, last), with the keys [start, stop) that they need.

    offset: the position of the first query among these keys. Of packed sequences: where they start
    among the queries and among the keys of the run.
    """

    first: int
    last: int
    start: int
    stop: int
    offset: int = 0
    query_starts: list[int] | None = None
    key_starts: list[int] | None = None


def runs_of(
    rank: int,
    queries: Rows,
    n_keys: int,
    starts: Sequence[int] | None,
    is_causal: bool,
    offset: int,
) -> list[Run]:
    """One run a chunk; of packed causal sequences two, where a chunk continues a sequence."""
    runs = []
    for start, stop, local in queries.chunks[rank]:
        if start == stop:
            continue
        if starts is None:
            last = min(n_keys, max(0, stop + offset)) if is_causal else n_keys
            runs.append(Run(local, local + stop - start, 0, last, offset + start))
            continue
        first = bisect.bisect_right(starts, start) - 1  # the sequence of the first row
        end = bisect.bisect_left(starts, stop)  # where the sequence of the last row ends
        if is_causal and starts[first] < start:
            until = min(starts[first + 1], stop)
            begin = starts[first]
            runs.append(Run(local, local + until - start, begin, until, start - begin))
            local, start, first = local + until - start, until, first + 1
            if start == stop:
                continue
        borders = starts[first : end + 1]
        query_starts = [min(max(a, start), stop) - start for a in borders]
        if is_causal:
            runs.append(
                Run(local, local + stop - start, start, stop, 0, query_starts, query_starts)
            )
        else:
            key_starts = [a - borders[0] for a in borders]
            run = Run(local, local + stop - start, borders[0], borders[-1], start - borders[0])
            runs.append(run._replace(query_starts=query_starts, key_starts=key_starts))
    return runs


def merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Disjoint ranges in ascending order that cover the given ones, without the empty."""
    out: list[tuple[int, int]] = []
    for start, stop in sorted(r for r in ranges if r[0] < r[1]):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], stop))
        else:
            out.append((start, stop))
    return out
