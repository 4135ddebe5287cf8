"""What the exchanges of context parallelism send and hold, without torch."""

from typing import NamedTuple

from lshkit import checks
from lshkit.distributed.ranks.rows import LAYOUTS, Rows, chunk_starts, merged, runs_of
from lshkit.hash_functions import MAX_HASHES, MAX_PROBE_BITS

PIECE_BYTES = 2**21  # of a slot's tables that a rank sends to each other rank at a time


class Cost(NamedTuple):
    """Bytes of a rank, on average over the ranks: sent in a forward and in a backward pass, and of
    what an exchange holds beside the rank's own rows while it runs."""

    forward: int
    backward: int
    memory: int


def exchange_costs(
    ranks: int,
    n_rows: int,
    heads: int,
    head_dim: int,
    *,
    n_bits: int = 8,
    n_hashes: int = 32,
    batch: int = 1,
    key_heads: int | None = None,
    value_dim: int | None = None,
    is_causal: bool = False,
    layout: str = "contiguous",
    itemsize: int = 4,
    heads_in_flight: int | None = None,
) -> dict[str, Cost]:
    """Bytes that each exchange of `ContextParallel` sends for a call of self-attention.

    Parameters
    ----------
    ranks : int >= 1
    n_rows : int >= 0
        Rows of the whole sequence, as equal parts on the ranks.
    heads, head_dim : int >= 1
    n_bits, n_hashes : int, 1 to 16 and 1 to 65535
        Of the tables, whose size is n_hashes * 2**n_bits * value_dim numbers of 4 bytes for a key
        head.
    batch : int >= 0
    key_heads, value_dim : int >= 1, optional
        Those of the queries where they are the same.
    is_causal : bool
    layout : "contiguous" or "head_tail"
    itemsize : int >= 1
        Bytes of a number of queries, keys and values.
    heads_in_flight : int >= 1, optional
        Key heads of all sequences whose tables are in memory at once; None: all.

    Returns
    -------
    costs : dict
        "tables", "keys" and "heads", each a tuple of bytes of a rank, on average over the ranks:
        `forward` and `backward`, sent in these passes, and `memory`, held beside the rank's own
        rows while an exchange runs. The backward pass of tables sums both the tables of keys,
        again, and those of the gradient. A ring that passes keys and values from rank to rank sends
        "keys" without a causal mask.

    Raises
    ------
    TypeError, ValueError
        An argument of the wrong type or out of range.

    Examples
    --------
    >>> costs = exchange_costs(8, 262_144, 8, 64, n_bits=8)
    >>> round(costs["keys"].forward / costs["tables"].forward)
    32
    """
    ranks = checks.integer("ranks", ranks, 1)
    n_rows = checks.integer("n_rows", n_rows, 0)
    heads = checks.integer("heads", heads, 1)
    head_dim = checks.integer("head_dim", head_dim, 1)
    n_bits = checks.integer("n_bits", n_bits, 1, MAX_PROBE_BITS)
    n_hashes = checks.integer("n_hashes", n_hashes, 1, MAX_HASHES)
    batch = checks.integer("batch", batch, 0)
    key_heads = heads if key_heads is None else checks.integer("key_heads", key_heads, 1)
    value_dim = head_dim if value_dim is None else checks.integer("value_dim", value_dim, 1)
    if heads % key_heads:
        raise ValueError(f"key_heads must divide heads={heads}, got {key_heads}")
    is_causal = checks.boolean("is_causal", is_causal)
    itemsize = checks.integer("itemsize", itemsize, 1)
    checks.choice("layout", layout, LAYOUTS)
    where = Rows(even_lengths(ranks, n_rows, layout), layout)
    slots = len(where.chunks[0]) if is_causal else 1
    wanted = keys_sent(where, where, None, is_causal, 0)
    units = batch * key_heads
    at_once = units
    if heads_in_flight is not None:
        at_once = min(units, checks.integer("heads_in_flight", heads_in_flight, 1))
    table = slots * n_hashes * 2**n_bits * value_dim * 4
    return costs_of(
        ranks,
        n_rows,
        units * table,
        wanted,
        batch * itemsize * key_heads * (head_dim + value_dim),
        batch * itemsize * (heads * head_dim + heads * value_dim),
        table * at_once + min(table * at_once, slots * ranks * PIECE_BYTES),
    )


def even_lengths(ranks: int, n_rows: int, layout: str) -> list[int]:
    """Rows of each rank."""
    parts = ranks if layout == "contiguous" else 2 * ranks
    starts = chunk_starts(n_rows, parts)
    sizes = [b - a for a, b in zip(starts, starts[1:], strict=False)]
    if layout == "contiguous":
        return sizes
    return [sizes[i] + sizes[-1 - i] for i in range(ranks)]


def keys_sent(
    queries: Rows, keys: Rows, starts: list[int] | None, is_causal: bool, offset: int
) -> int:
    """Rows of keys that ranks need of others, of all ranks."""
    rows = 0
    for rank in range(len(queries.lengths)):
        runs = runs_of(rank, queries, keys.total, starts, is_causal, offset)
        for a, b in merged([(run.start, run.stop) for run in runs]):
            rows += b - a - sum(n for _, _, n in keys.overlaps(rank, a, b))
    return rows


def costs_of(
    ranks: int,
    n_rows: int,
    tables: int,
    keys_sent: int,
    key_bytes: int,
    query_bytes: int,
    tables_memory: int,
) -> dict[str, Cost]:
    """key_bytes: of a row of keys and values; query_bytes: of a row of queries and of the output;
    tables: bytes of all heads' tables."""
    others = ranks - 1
    by_tables = 2 * tables * others // ranks
    by_keys = keys_sent * key_bytes // ranks
    by_heads = n_rows * (key_bytes + query_bytes) * others // ranks**2
    return {
        "tables": Cost(by_tables, 2 * by_tables, tables_memory),
        "keys": Cost(by_keys, by_keys, n_rows * key_bytes),
        "heads": Cost(by_heads, by_heads, n_rows * (key_bytes + query_bytes) // ranks),
    }
