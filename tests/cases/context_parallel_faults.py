"""What ranks do that disagree, refuse or end, and what they send and hold."""

import logging
import os
import pathlib
import re
import time
import warnings

import numpy as np
import torch
from cases.context_parallel import D, attend, inputs

from lshkit.attention import Sampled, yoso_attention
from lshkit.distributed import ContextParallel
from lshkit.distributed.ranks.collectives import Ranks

NEVER = Sampled(n_bits=5, n_hashes=8, expectation="never")


def disagree(group, options, exchange="auto"):
    """options: what each rank calls with. The error of this rank as (type, message)."""
    cp = ContextParallel(group, exchange=exchange)
    mine = dict(options[cp.rank])
    query, key, value, _ = inputs(
        heads=mine.pop("heads", 4), dtype=mine.pop("dtype", torch.float32)
    )
    columns = mine.pop("columns", D)
    tensors = [cp.shard(query)[..., :columns], cp.shard(key)[..., :columns], cp.shard(value)]
    device = mine.pop("device", "cpu")
    tensors = [x.to(device) for x in tensors]
    if mine.pop("requires_grad", False):
        tensors[0].requires_grad_()
    try:
        yoso_attention(*tensors, **{"seed": 0} | mine, context_parallel=cp)
    except (TypeError, ValueError, RuntimeError) as error:
        answer = type(error).__name__, str(error)
    else:
        answer = None
    # The group goes on.
    yoso_attention(*(cp.shard(x) for x in inputs()[:3]), seed=0, context_parallel=cp)
    return answer


def one_rank_ends(group):
    cp = ContextParallel(group)
    tensors = [cp.shard(x) for x in inputs()[:3]]
    yoso_attention(*tensors, seed=0, context_parallel=cp)
    if cp.rank == 1:
        os._exit(1)
    try:
        for _ in range(3):
            yoso_attention(*tensors, seed=0, context_parallel=cp)
    except RuntimeError as error:
        return str(error)


def one_rank_stops_in_an_exchange(group, ends):
    """The ranks have agreed; when tables are to be sent one ends, at once or after the timeout."""
    cp = ContextParallel(group, exchange="tables")
    tensors = [cp.shard(x) for x in inputs()[:3]]
    if cp.rank == 1:
        Ranks.exchange = lambda *_: (time.sleep(0 if ends else 6), os._exit(1))
    begin = time.monotonic()
    try:
        with torch.no_grad():
            yoso_attention(*tensors, estimator=NEVER, seed=0, context_parallel=cp)
    except RuntimeError as error:
        return str(error), time.monotonic() - begin


def one_rank_stays_away(group):
    cp = ContextParallel(group)
    if cp.rank == 1:
        return None
    tensors = [cp.shard(x) for x in inputs()[:3]]
    begin = time.monotonic()
    try:
        yoso_attention(*tensors, seed=0, context_parallel=cp)
    except RuntimeError as error:
        return str(error), time.monotonic() - begin


def own_peak():
    """Bytes. (Not getrusage's ru_maxrss, which starts at that of the process that started this.)"""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1024


def peak_memory(group, heads, n_bits):
    """Bytes by which a causal call by tables raises the peak of a fresh process, and a table's."""
    cp = ContextParallel(group, exchange="tables")
    estimator = Sampled(n_bits=n_bits, n_hashes=32, expectation="never")
    x = torch.randn(1, heads, 256, 64)

    def call(estimator):
        return yoso_attention(
            x, x, x, is_causal=True, estimator=estimator, seed=0, context_parallel=cp
        )

    with torch.no_grad():
        call(Sampled(n_bits=2, n_hashes=2, expectation="never"))
        before = own_peak()
        call(estimator)
    return own_peak() - before, heads * 32 * 2**n_bits * 64 * 4


def count_bytes(group, cases):
    """Bytes that a rank has sent, beside those of what the ranks agree on."""
    sent = []
    for case in cases:
        cp = ContextParallel(
            group, layout=case.get("layout", "contiguous"), exchange=case["exchange"]
        )
        attend(cp, case)
        sent.append(cp.bytes_sent - 40 * (cp.size - 1))
    return sent


def chosen(group, cases):
    """The exchange that "auto" takes, why, and what it logs."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("lshkit.distributed")
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)
    answers = []
    for case in cases:
        cp = ContextParallel(group, layout=case.get("layout", "contiguous"))
        attend(cp, case)
        answers.append((cp.last_exchange, cp.last_reason, list(records)))
        records.clear()
    logger.setLevel(before)
    logger.removeHandler(handler)
    return answers


# --- Other arguments ------------------------------------------------------------------------------


def warnings_of(group, case):
    """The exchange, why, and the warnings of a call that asks for another."""
    cp = ContextParallel(group, exchange=case["exchange"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attend(cp, case)
    found = [(pathlib.Path(w.filename).parent.name, str(w.message)) for w in caught]
    return cp.last_exchange, cp.last_reason, found


def rows_round_trip(group, layout, n):
    cp = ContextParallel(group, layout=layout)
    x = torch.arange(3.0 * n).view(n, 3)
    own = cp.shard(x)
    return torch.equal(cp.gather(own), x), cp.positions(n).tolist(), own[:, 0].tolist()


def gather_unlike_rows(group, unlike):
    """The error of gathering what differs on the last rank, and whether the group goes on."""
    cp, dim = ContextParallel(group), -2
    x = torch.ones(4, 6)
    if cp.rank == cp.size - 1:
        x = {"dtype": x.double(), "sizes": x[:, :5], "dims": x[None], "none": None}.get(unlike, x)
        dim = 1 if unlike == "dim" else np.int64(0)  # the others' -2
    try:
        cp.gather(x, dim)
    except (TypeError, ValueError, RuntimeError) as error:
        answer = type(error).__name__, str(error)
    return answer, cp.gather(torch.ones(2, 3)).shape == (2 * cp.size, 3)


def error_of(group, make):
    """The error of making a ContextParallel, or of a call with one."""
    try:
        make(group)
    except (TypeError, ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)


def with_tuple(group):
    ContextParallel((0, 1))


def with_word(group):
    ContextParallel(group, layout="striped")


def with_exchange(group):
    ContextParallel(group, exchange="ring")


def with_floats(group):
    ContextParallel(group, cu_seqlens=torch.tensor([0.0, 3.0]))


def with_decreasing(group):
    ContextParallel(group, cu_seqlens=torch.tensor([0, 5, 3]))


def with_mesh(group):
    from torch.distributed.device_mesh import init_device_mesh

    ContextParallel(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")))


def with_short_starts(group):
    cp = ContextParallel(group, cu_seqlens=torch.tensor([0, 5]))
    x = torch.randn(1, 4, 8, 4)
    yoso_attention(x, x, x, context_parallel=cp)


def with_starts_of_the_call(group):
    cp = ContextParallel(group)
    x = torch.randn(1, 4, 8, 4)
    yoso_attention(x, x, x, cu_seqlens=torch.tensor([0, 8]), context_parallel=cp)


def with_wrong_chunks(group):
    cp = ContextParallel(group, layout="head_tail")
    x = torch.randn(1, 4, 8 + 5 * cp.rank, 4)
    yoso_attention(x, x, x, context_parallel=cp)


def with_wrong_rows(group):
    cp = ContextParallel(group, layout="head_tail")
    cp.gather(torch.randn(8 + 5 * cp.rank, 4))


def with_too_many_positions(group):
    ContextParallel(group).positions(2**70)


def with_unknown_device(group):
    ContextParallel(group).positions(3, device="foo")


def with_rows_before(group):
    ContextParallel(group).neighbours(torch.randn(1, 4, 8, 4), -1, 0)


def with_flat_rows(group):
    ContextParallel(group).neighbours(torch.randn(4, 8, 4), 1, 0)


def with_auto_scale(group):
    cp = ContextParallel(group)
    x = torch.randn(1, 3, 8, 4)
    estimator = Sampled(unit_norm="lift", lift_scale="auto")
    yoso_attention(x, x, x, estimator=estimator, context_parallel=cp)


def with_a_string(group):
    x = torch.randn(1, 3, 8, 4)
    yoso_attention(x, x, x, context_parallel="cp")
