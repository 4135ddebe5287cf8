"""Context parallelism: attention over a sequence whose rows are spread over ranks."""

import hashlib
import json
import logging
import warnings
from collections.abc import Callable
from typing import Any

from lshkit import _torch  # noqa: F401  (says how to get torch)

# isort: split
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lshkit import checks
from lshkit.attention.across_ranks import AcrossRanks, T, check_values
from lshkit.attention.arguments import seed_tensor
from lshkit.attention.call import Call, mean_lengths
from lshkit.attention.estimators import BucketSums, Estimator
from lshkit.distributed.ranks import choice
from lshkit.distributed.ranks.arguments import (
    cast,
    check_parameter_values,
    group_of,
    sequence_starts,
    short,
)
from lshkit.distributed.ranks.collectives import Ranks, fetch, fetch_plan
from lshkit.distributed.ranks.costs import even_lengths
from lshkit.distributed.ranks.exchanges import (
    Sequences,
    attend_by_heads,
    attend_by_keys,
    attend_by_tables,
)
from lshkit.distributed.ranks.rows import LAYOUTS, Rows

EXCHANGES = ("auto", "tables", "keys", "heads")
REFUSED = -1  # the digest of a rank whose arguments are wrong
LOGGER = logging.getLogger("lshkit.distributed")


class ContextParallel(AcrossRanks):
    """A sequence whose rows are spread over the ranks of a process group, for `yoso_attention`.

    Each rank calls `yoso_attention(..., context_parallel=cp)` with its own rows of queries, keys
    and values, and gets its rows of the output: those of one process with the whole sequence, but
    for rounding. The gradient goes back to the ranks that the rows came from.

    What is sent goes by the exchange:

    - "heads": all-to-all to whole sequences of a part of the heads, and back. Exact for every
      estimator and gradient, the same work on every rank; the ranks must divide the key heads.
    - "keys": every rank fetches the keys and values that its queries see and hashes them itself.
      Exact for every estimator, but each rank computes with all the keys, and under a causal mask
      with as many rows of queries.
    - "tables": the ranks sum tables of buckets, whose size does not depend on the length. For
      `Soft`, and for `Sampled` where queries and keys need no gradient: theirs has no such tables.

    Parameters
    ----------
    group_or_mesh : ProcessGroup or one-dimensional DeviceMesh, optional
        The ranks, in the order of the rows; None: all. Of a mesh of more dimensions give one,
        `mesh["cp"]`.
    layout : "contiguous" or "head_tail"
        Which rows a rank has: consecutive ones, of any number (ranks may have different numbers,
        none too), or chunks r and 2 P - 1 - r of 2 P, sized as by `torch.tensor_split`, which
        gives all ranks as much to do under a causal mask. `shard` cuts a whole sequence.
    exchange : "auto", "tables", "keys" or "heads"
        "auto" is the one that sends the fewest bytes in a forward pass, and in a backward pass
        where there will be one, of those that can compute the call. A named one that cannot is
        replaced, with a warning.
    cu_seqlens : integer tensor `(S + 1,)`, optional
        Packed sequences, of the whole length: see `yoso_attention`. They may cross ranks. The same
        on all ranks.

    Attributes
    ----------
    last_exchange, last_reason : str or None
        The exchange of the last call, and why.

    Notes
    -----
    Every call begins with an all-gather of 40 bytes, in which the ranks compare what must be the
    same on all of them: the options, seed, dtype, shapes but for the rows, and which tensors
    require a gradient. Ranks that disagree, or one whose arguments are wrong, raise an error on
    every rank. A rank that does not call at all, or has ended, is reported by the timeout of the
    process group. An error that depends on the values of a rank's rows (a norm above lift_scale's
    bound) is raised on that rank, and on the others when it ends.

    A seed of None is drawn on every rank, and that of rank 0 is used.

    In a compiled function the call is a graph break: `fullgraph=True` is an error.
    """

    def __init__(
        self,
        group_or_mesh: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        layout: str = "contiguous",
        exchange: str = "auto",
        cu_seqlens: Tensor | None = None,
    ) -> None:
        checks.choice("layout", layout, LAYOUTS)
        checks.choice("exchange", exchange, EXCHANGES)
        self.group = group_of(group_or_mesh)
        self.layout, self.exchange = layout, exchange
        self.cu_seqlens = None if cu_seqlens is None else sequence_starts(cu_seqlens)
        self.last_exchange: str | None = None
        self.last_reason: str | None = None
        self._ranks = Ranks(self.group)

    @property
    def rank(self) -> int:
        """Of this process in the group."""
        return self._ranks.rank

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self._ranks.size

    @property
    def bytes_sent(self) -> int:
        """To other ranks, by this object, since it was made."""
        return self._ranks.bytes_sent

    def __repr__(self) -> str:
        packed = "" if self.cu_seqlens is None else f", {len(self.cu_seqlens) - 1} sequences"
        return (
            f"ContextParallel(rank {self.rank} of {self.size}, layout={self.layout!r}, "
            f"exchange={self.exchange!r}{packed})"
        )

    # --- Rows -------------------------------------------------------------------------------------

    def positions(self, n_rows: int, device: torch.device | str | None = None) -> Tensor:
        """The positions of this rank's rows in a sequence of n_rows, int64, as `shard` cuts it.

        TypeError, ValueError where n_rows is no integer from 0 to 2**63 - 1, or device no device
        that this torch knows.
        """
        n_rows = checks.integer("n_rows", n_rows, 0, 2**63 - 1)
        try:
            device = None if device is None else torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device must be a device of torch, got {device!r}: {error}") from None
        held = Rows(even_lengths(self.size, n_rows, self.layout), self.layout)
        return torch.cat([torch.arange(a, b, device=device) for a, b, _ in held.chunks[self.rank]])

    def shard(self, x: Tensor, dim: int = -2) -> Tensor:
        """This rank's rows of x, a tensor with all of them along dim, of any dtype.

        Parts differ by a row (or two) at most.
        """
        dim = _checked_dim(x, dim)
        return x.index_select(dim, self.positions(x.shape[dim], x.device))

    def gather(self, x: Tensor, dim: int = -2) -> Tensor:
        """The rows of all ranks in order along dim, on every rank: the reverse of `shard`.

        Differentiable; all ranks must call, with dense tensors of one dtype and the same sizes but
        for the rows: ValueError on all of them otherwise, TypeError for what is no dense tensor.
        """
        dim = self.checked(_checked_rows, x, dim)
        x = x.movedim(dim, 0).resolve_conj().resolve_neg()
        rows = x[None, None].flatten(3) if x.dim() > 1 else x[None, None, :, None]
        description = {
            **{"call": "gather", "dtype": str(x.dtype), "device": x.device.type},
            **{"dim": dim, "sizes beside dim": list(x.shape[1:])},
        }
        headers = self._agree(description, [_digest(description), len(x), 0, 0, 0])
        held = Rows([length for _, length, *_ in headers], self.layout, "x")
        plan = fetch_plan(self.rank, held, [[(0, held.total)]] * self.size)
        (out,) = fetch(self._ranks, plan, rows)
        return out.reshape(held.total, *x.shape[1:]).movedim(0, dim)

    @torch.compiler.disable(reason="ranks exchange rows")
    def neighbours(self, x: Tensor, before: int, after: int) -> list[tuple[Tensor, int, int, int]]:
        """Each chunk of this rank's x `(B, H, n, D)` with the rows around it, for a convolution.

        Returns for each chunk its rows, `before` more in front and `after` more behind them, zeros
        outside the sequence, where it starts and stops among the rank's rows, and its first
        position among all. All ranks must call. Differentiable.
        """
        before, after = self.checked(_checked_window, x, before, after)
        description = {
            **{"call": "neighbours", "dtype": str(x.dtype), "device": x.device.type},
            "batch, heads, features": [*x.shape[:2], x.shape[3]],
            **{"before": before, "after": after},
        }
        headers = self._agree(description, [_digest(description), x.shape[2], 0, 0, 0])
        held = Rows([length for _, length, *_ in headers], self.layout, "x")
        spans = [[(a - before, b + after) for a, b, _ in chunks if a < b] for chunks in held.chunks]
        plan = fetch_plan(self.rank, held, spans)
        (rows,) = fetch(self._ranks, plan, x)
        parts, position = [], 0
        for a, b, local in held.chunks[self.rank]:
            size = before + b - a + after if a < b else 0
            parts.append((rows[:, :, position : position + size], local, local + b - a, a))
            position += size
        return parts

    # --- Attention --------------------------------------------------------------------------------

    # Not in lshkit.attention: naming torch.compiler.disable loads TorchDynamo, for a second.
    @torch.compiler.disable(reason="ranks exchange what they agree on")
    def uncompiled(self, function: Callable[..., T], *args: Any) -> T:
        """What the function returns for this object and args, left out of compiled graphs."""
        return function(self, *args)

    @torch.compiler.disable(reason="ranks exchange what they agree on")
    def checked(self, check: Callable[..., T], *args: Any) -> T:
        """What check returns. An error that it raises is raised on the other ranks, too."""
        try:
            return check(*args)
        except Exception as error:
            self._agree({}, [REFUSED, 0, 0, 0, 0], str(error))
            raise

    @torch.compiler.disable(reason="ranks exchange what they agree on")
    def agree(self, call: str, **options: Any) -> None:
        """ValueError on all ranks unless each makes this call, with the same options."""
        description = {"call": call} | options
        self._agree(description, [_digest(description), 0, 0, 0, 0])

    def attend(self, estimator: Estimator, call: Call, causal_offset: int | None) -> Tensor:
        """What `yoso_attention` returns for this rank's rows.

        The call is checked, and its causal offset not yet resolved.
        """
        call = cast(call)
        self.checked(check_parameter_values, call)
        seed = int(seed_tensor(call.seed))
        n_rows = call.query.shape[2], call.key.shape[2]
        description = self._describe(estimator, call, causal_offset)
        digest = _digest(description)
        headers = self._agree(description, [digest, seed, *n_rows, call.key_mask is not None])
        seeds, query_lengths, key_lengths, masks = zip(*(h[1:] for h in headers), strict=True)
        if call.key_mask is None and any(masks):
            mask = call.key.new_ones((call.key.shape[0], n_rows[1]), dtype=torch.bool)
            call = call._replace(key_mask=mask)
        if call.query.is_cuda and "nccl" not in str(dist.get_backend(self.group)):
            raise ValueError(
                f"context_parallel: tensors on {call.query.device} need a group with NCCL, its "
                f"backend is {dist.get_backend(self.group)}"
            )
        call = call._replace(seed=seed_tensor(seeds[0], call.query.device))
        where = self._where(call, query_lengths, key_lengths, causal_offset)
        n_sequences = 1 if where.starts is None else len(where.starts) - 1
        lengths = mean_lengths(where.queries.total, where.keys.total, n_sequences)
        estimator = estimator.at_lengths(*lengths)
        if self.size == 1:
            starts = None
            if where.starts is not None:
                starts = torch.tensor(where.starts, device=call.query.device)
            self.last_exchange, self.last_reason = None, "one rank"
            call = call._replace(offset=where.offset, query_starts=starts, key_starts=starts)
            return estimator.attend(call)
        exchange = self._choose(estimator, call, where)
        if exchange == "heads":
            return attend_by_heads(self._ranks, estimator, call, where)
        if exchange == "keys":
            return attend_by_keys(self._ranks, estimator, call, where)
        assert isinstance(estimator, BucketSums)
        return attend_by_tables(self._ranks, estimator, call, where)

    def _describe(
        self, estimator: Estimator, call: Call, causal_offset: int | None
    ) -> dict[str, Any]:
        """What must be the same on all ranks, in the words of the caller."""
        grad = torch.is_grad_enabled()
        tensors = {"query": call.query, "key": call.key, "value": call.value} | call.parameters
        batch, heads, _, n_features = call.query.shape
        _, key_heads, _, n_values = call.value.shape
        starts = self.cu_seqlens
        return {
            "call": "yoso_attention",
            "estimator": estimator.to_dict(),
            "normalize": call.normalize,
            "is_causal": call.is_causal,
            "causal_offset": causal_offset,
            "seed": None if call.seed is None else int(call.seed),
            "dtype": str(call.query.dtype),
            "device": call.query.device.type,
            "batch, heads, key heads, features, values": [
                *(batch, heads, key_heads, n_features, n_values)
            ],
            "parameters": {name: list(x.shape) for name, x in call.parameters.items()},
            "requires_grad": [name for name, x in tensors.items() if grad and x.requires_grad],
            "layout": self.layout,
            "exchange": self.exchange,
            "cu_seqlens": None if starts is None else starts,
        }

    def _agree(
        self, description: dict[str, Any], header: list[int], refusal: str | None = None
    ) -> list[list[int]]:
        """All ranks' headers: digest, seed, rows of queries and of keys, and whether it has a
        mask.

        description: what must be the same on all ranks, "call" first, which says what it is of.
        """
        place = torch.device("cpu")
        if "nccl" in str(dist.get_backend(self.group)):
            place = torch.device("cuda", torch.cuda.current_device())
        headers = self._ranks.all_gather(torch.tensor(header, dtype=torch.int64, device=place))
        everyone: list[list[int]] = headers.tolist()
        if len({h[0] for h in everyone}) == 1 and refusal is None:
            return everyone
        told = self._ranks.all_gather_object(refusal if refusal is not None else description)
        if refusal is not None:
            return everyone  # the caller raises its own error
        for rank, other in enumerate(told):
            if isinstance(other, str):
                raise RuntimeError(f"context_parallel: rank {rank} refused its arguments: {other}")
        for name in description:
            values = [other[name] for other in told]
            if any(value != values[0] for value in values):
                listed = "; ".join(f"rank {i}: {short(x)}" for i, x in enumerate(values))
                raise ValueError(f"{name} must be the same on all ranks of the group, got {listed}")
        raise RuntimeError("context_parallel: ranks disagree, and nothing differs")

    def _where(
        self,
        call: Call,
        query_lengths: tuple[int, ...],
        key_lengths: tuple[int, ...],
        causal_offset: int | None,
    ) -> Sequences:
        queries, keys = Rows(query_lengths, self.layout), Rows(key_lengths, self.layout)
        starts = self.cu_seqlens
        if starts is not None:
            if query_lengths != key_lengths:
                raise ValueError(
                    f"key must have query's rows on each rank with cu_seqlens, got "
                    f"{list(key_lengths)} and {list(query_lengths)}"
                )
            if starts[-1] != queries.total:
                raise ValueError(
                    f"cu_seqlens must go from 0 to the {queries.total} rows of all ranks, got "
                    f"{starts[0]} to {starts[-1]}"
                )
            if call.query.shape[0] != 1:
                raise ValueError(
                    f"query must have batch 1 with cu_seqlens, got batch {call.query.shape[0]}"
                )
        offset = 0
        if call.is_causal and starts is None:
            offset = keys.total - queries.total if causal_offset is None else causal_offset
        return Sequences(queries, keys, starts, call.is_causal, offset)

    # --- Which exchange ---------------------------------------------------------------------------

    def _choose(self, estimator: Estimator, call: Call, where: Sequences) -> str:
        reasons = choice.impossible(self.size, estimator, call, where)
        possible = [name for name in EXCHANGES[1:] if name not in reasons]
        if not possible:
            raise ValueError(
                "context_parallel: no exchange can compute this call: "
                + "; ".join(f"{name}: {why}" for name, why in reasons.items())
            )
        if self.exchange in possible:
            self.last_exchange, self.last_reason = self.exchange, "as asked for"
            return self.exchange
        sent = choice.bytes_sent(self._ranks, estimator, call, where)
        chosen = min(possible, key=lambda name: sent[name])
        if self.exchange == "heads" and "keys" in possible:
            chosen = "keys"
        listed = ", ".join(f"{name} {sent[name]:,}" for name in possible)
        why = f"bytes that a rank sends: {listed}"
        left_out = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        if self.exchange != "auto":
            why = f"{self.exchange} cannot compute this call ({reasons[self.exchange]})"
            message = f"context_parallel: exchange={chosen!r} is used: {why}"
            warnings.warn(message, stacklevel=checks.outside())
        elif left_out:
            why += f" (not possible: {left_out})"
        if (chosen, why) != (self.last_exchange, self.last_reason):
            LOGGER.info("exchange=%r: %s", chosen, why)
        self.last_exchange, self.last_reason = chosen, why
        return chosen


def _digest(description: dict[str, Any]) -> int:
    text = json.dumps(description, sort_keys=True).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:7], "big")


def _checked_rows(x: Any, dim: Any) -> int:
    """The dim of rows that are sent."""
    dim = _checked_dim(x, dim)
    check_values("x", x)
    return dim


def _checked_window(x: Any, before: Any, after: Any) -> tuple[int, int]:
    """How many rows before and after those of x `(B, H, n, D)`."""
    _checked_rows(x, -1)
    if x.dim() != 4:
        raise ValueError(f"x must have shape (B, H, n, D), got {tuple(x.shape)}")
    return checks.integer("before", before, 0), checks.integer("after", after, 0)


def _checked_dim(x: Any, dim: Any) -> int:
    """From 0 on."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, got {type(x).__name__}")
    if x.layout is not torch.strided:
        raise TypeError(f"x must be a dense tensor, got one of {x.layout}")
    if not -x.dim() <= checks.integer("dim", dim, -64) < x.dim():
        wanted = f"a dimension of x, of shape {tuple(x.shape)}"
        raise ValueError(f"dim must be {wanted}, got {dim}")
    return int(dim) % x.dim()
