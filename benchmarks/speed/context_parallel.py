"""Attention over ranks: seconds and bytes of each exchange, beside ring attention.

    python -m benchmarks.speed.context_parallel [--quick] [--json results.json]

Starts 1 to 4 processes of one thread each on this machine (gloo over the loopback device). Seconds
are those of the slowest rank, the smallest of a few calls; the efficiency is the seconds of one
process over ranks times theirs, and means something up to as many ranks as there are cores. Ring
attention is softmax attention whose keys and values go from rank to rank, written plainly below:
torch's own context_parallel is tried first, and compared with one process. "computing alone" is
what ranks of "heads" compute, on all of them at once, with nothing sent: what the machine's memory
and caches leave of the speed of one process. The C library keeps freed memory in all processes, as
jemalloc and tcmalloc do: see KEEP_MEMORY. Bytes are those that a
rank hands to the process group for the others, on average over the ranks, counted at every call;
the simulation runs the code of single ranks of up to 1024 with a process group that counts and
sends nothing.
"""

import argparse
import json
import os
import pathlib
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tqdm import tqdm

from benchmarks import write_json
from benchmarks.measurement import figure, machine, table
from lshkit.attention import Sampled, Soft, yoso_attention
from lshkit.attention.call import Call
from lshkit.distributed import ContextParallel, exchange_costs
from lshkit.distributed.ranks.collectives import Ranks
from lshkit.distributed.ranks.exchanges import Sequences, attend_by_keys, attend_by_tables
from lshkit.distributed.ranks.rows import Rows

HEAD_DIM = 64
# glibc gives large arrays back to the system at once, which takes 1.4 us for each page of the next.
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**34),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**26),
}
ESTIMATORS = {
    "Sampled, 8 bits": Sampled(n_bits=8, expectation="never"),
    "Sampled, 12 bits": Sampled(n_bits=12, expectation="never"),
    "Soft, 12 bits": Soft(n_bits=12),
}
EXCHANGES = ("tables", "keys", "heads")
ALONE = "computing alone"
RING = "ring attention"
PASSES = ("forward", "causal forward", "forward + backward", "causal forward + backward")


# --- Ring attention -------------------------------------------------------------------------------


class Ring:
    """Softmax attention, not causal, forward: each rank's keys and values visit every rank."""

    def __init__(self, group):
        self.rank, self.size, self.bytes_sent = dist.get_rank(group), dist.get_world_size(group), 0

    def __call__(self, query, key, value, compute=True):
        out = total = None
        for step in range(self.size):
            if step < self.size - 1:
                arriving = torch.empty_like(key), torch.empty_like(value)
                work = []
                for sent, received in zip((key, value), arriving, strict=True):
                    work.append(dist.P2POp(dist.isend, sent, (self.rank + 1) % self.size))
                    work.append(dist.P2POp(dist.irecv, received, (self.rank - 1) % self.size))
                    self.bytes_sent += sent.nbytes
                requests = dist.batch_isend_irecv(work)
            if compute:
                part, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    query, key, value
                )
                weight = weight[..., None]  # the logarithm of the sum of the weights
                if out is None:
                    out, total = part, weight
                else:
                    both = torch.logaddexp(total, weight)
                    out = out * (total - both).exp() + part * (weight - both).exp()
                    total = both
            if step < self.size - 1:
                for request in requests:
                    request.wait()
                key, value = arriving
        return out


def torchs_own(group):
    """How torch's context_parallel does here."""
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import context_parallel
        from torch.nn.functional import scaled_dot_product_attention

        mesh = init_device_mesh("cpu", (dist.get_world_size(group),))
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.randn(1, 2, 64, 16, generator=generator) for _ in range(3)]
        whole = scaled_dot_product_attention(*tensors)
        with context_parallel(mesh, buffers=[*tensors, whole], buffer_seq_dims=[2] * 4):
            out = scaled_dot_product_attention(*tensors)
            alone = scaled_dot_product_attention(*(x.clone() for x in tensors))
            off, local = (float((out - x).abs().max()) for x in (whole, alone))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    if off < 1e-4:
        return "as one process"
    what = "each rank attends to its own rows alone" if local < 1e-5 else "wrong"
    return f"no error, but {what}: off by {off:.2f}"


# --- A rank ---------------------------------------------------------------------------------------


def measure(rank, size, folder, options, answers):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=size)
    group = dist.group.WORLD
    found = {"seconds": [], "bytes": [], "torch": torchs_own(group) if size > 1 else None}
    cases = [(name, n, p) for n in options.lengths for name in options.estimators for p in PASSES]
    for name, n, which in tqdm(cases, desc=f"{size} ranks", disable=rank > 0):
        for exchange in (ALONE, *EXCHANGES) if size > 1 else (None,):
            seconds, sent = of_case(group, ESTIMATORS[name], n, which, exchange, options)
            if seconds is not None:
                row = {"estimator": name, "length": n, "pass": which, "exchange": exchange}
                found["seconds"].append(row | {"seconds": seconds, "bytes": sent})
    for n in options.lengths:
        if n <= options.longest_ring:
            ring = Ring(group)
            tensors = [torch.randn(1, options.heads, n // size, HEAD_DIM) for _ in range(3)]
            seconds = smallest(group, lambda r=ring, t=tensors: r(*t), 2)
            row = {"estimator": RING, "length": n, "pass": "forward", "exchange": None}
            found["seconds"].append(row | {"seconds": seconds, "bytes": None})
    for n in options.byte_lengths if size > 1 else ():
        found["bytes"] += bytes_of(group, n)
    if rank == 0:
        answers.put(found)
    dist.barrier()
    dist.destroy_process_group()


def smallest(group, call, times):
    """Seconds of the slowest rank, of the fastest of so many calls."""
    best = float("inf")
    for _ in range(times):
        dist.barrier(group)
        begin = time.perf_counter()
        call()
        took = torch.tensor(time.perf_counter() - begin)
        dist.all_reduce(took, dist.ReduceOp.MAX, group=group)
        best = min(best, float(took))
    return best


def of_case(group, estimator, n, which, exchange, options):
    """Seconds and bytes sent; None where the exchange cannot compute the case."""
    warnings.simplefilter("ignore")  # of such an exchange
    exchanges = exchange in EXCHANGES
    cp = ContextParallel(group, exchange=exchange if exchanges else "auto")
    trains = which.endswith("backward")
    shape = 1, options.heads, n // cp.size, HEAD_DIM
    if exchange == ALONE:
        if options.heads % cp.size:
            return None, None
        shape = 1, options.heads // cp.size, n, HEAD_DIM
    tensors = [torch.randn(shape).requires_grad_(trains) for _ in range(3)]
    grad = torch.randn(shape)

    def call():
        out = yoso_attention(
            *tensors,
            is_causal=which.startswith("causal"),
            estimator=estimator,
            seed=0,
            context_parallel=cp if exchanges else None,
        )
        if trains:
            torch.autograd.grad(out, tensors, grad)

    call()  # touches the memory
    if exchanges and cp.last_exchange != exchange:
        return None, None
    sent = cp.bytes_sent if exchanges else None
    return smallest(group, call, options.repeats), sent


def bytes_of(group, n):
    """Counted bytes of one head's forward, on average over the ranks, and what was foretold."""
    rows = []
    for n_bits in (8, 12):
        estimator = Sampled(n_bits=n_bits, expectation="never")
        for exchange in ("tables", "keys"):
            cp = ContextParallel(group, exchange=exchange)
            x = torch.randn(1, 1, n // cp.size, HEAD_DIM)
            with torch.no_grad():
                yoso_attention(x, x, x, estimator=estimator, seed=0, context_parallel=cp)
            foretold = exchange_costs(cp.size, n, 1, HEAD_DIM, n_bits=n_bits)[exchange].forward
            sent = mean(group, cp.bytes_sent - 40 * (cp.size - 1))
            row = {"length": n, "n_bits": n_bits, "exchange": exchange}
            rows.append(row | {"bytes": sent, "foretold": foretold})
    ring = Ring(group)
    ring(x, x, x, compute=False)
    row = {"length": n, "n_bits": None, "exchange": RING}
    return [*rows, row | {"bytes": mean(group, ring.bytes_sent), "foretold": None}]


def mean(group, number):
    total = torch.tensor(number)
    dist.all_reduce(total, group=group)
    return int(total) // dist.get_world_size(group)


# --- Simulation -----------------------------------------------------------------------------------


class Counting(Ranks):
    """A rank of any number that sends nothing."""

    def __init__(self, rank, size):
        self.rank, self.size, self.bytes_sent = rank, size, 0

    def exchange(self, send, receive):
        for rank, (outgoing, incoming) in enumerate(zip(send, receive, strict=True)):
            self.bytes_sent += sum(x.nbytes for x in outgoing) * (rank != self.rank)
            for x in incoming:
                x.zero_()


def simulate(sizes, n, n_bits):
    """One head: counted bytes of ranks spread evenly over all, and what was foretold for all."""
    rows, columns = [], 16
    estimator = Sampled(n_bits=n_bits, expectation="never")
    for size in tqdm(sizes, desc="simulated ranks"):
        held = Rows([n // size] * size, "contiguous")
        for is_causal in (False, True):
            foretold = exchange_costs(size, n, 1, columns, n_bits=n_bits, is_causal=is_causal)
            for exchange, attend in (("tables", attend_by_tables), ("keys", attend_by_keys)):
                sent = []
                some = {0, size // 3}  # and those as far from the end: what is sent is linear
                for rank in sorted(some | {size - 1 - rank for rank in some}):
                    ranks = Counting(rank, size)
                    x = torch.zeros(1, 1, n // size, columns)
                    rest = is_causal, 0, "l2", {}, torch.tensor([0])
                    call = Call(x, x, x, None, None, None, *rest)
                    with torch.no_grad():
                        where = Sequences(held, held, None, is_causal, 0)
                        attend(ranks, estimator, call, where)
                    sent.append(ranks.bytes_sent)
                row = {"ranks": size, "causal": is_causal, "exchange": exchange}
                rows.append(
                    row | {"bytes": sum(sent) // len(sent), "foretold": foretold[exchange].forward}
                )
    return rows


# --- All ------------------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    add("--lengths", type=int, nargs="+", default=[4096, 16384, 65536])
    add("--byte-lengths", type=int, nargs="+", default=[16384, 65536, 262144])
    add("--heads", type=int, default=4)
    add("--repeats", type=int, default=2, help="calls after the first")
    add("--longest-ring", type=int, default=16384, help="softmax takes minutes beyond")
    add("--simulated", type=int, nargs="+", default=[8, 64, 256, 1024])
    add("--quick", action="store_true", help="two ranks, one short length, two heads")
    add("--json", type=pathlib.Path, help="results file; other --ranks that it has stay")
    options = parser.parse_args()
    options.estimators = list(ESTIMATORS)
    if options.quick:
        options.estimators.remove("Sampled, 12 bits")
        options.ranks, options.lengths, options.byte_lengths = [1, 2], [1024], [4096]
        options.repeats, options.simulated, options.heads = 1, [8], 2
    os.environ |= KEEP_MEMORY  # of the processes that are started
    context = mp.get_context("forkserver")  # imports once for all of them
    context.set_forkserver_preload(["benchmarks.speed.context_parallel"])
    results = {}
    if options.json and options.json.exists():
        results = {int(n): x for n, x in json.loads(options.json.read_text())["results"].items()}
    for size in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            answers = context.SimpleQueue()
            workers = mp.start_processes(
                measure, (size, folder, options, answers), size, False, start_method="forkserver"
            )
            results[size] = answers.get()
            while not workers.join():
                pass
    simulated = simulate(options.simulated, 65536, 8)
    print_tables(results, simulated)
    if options.json:
        options.ranks = sorted(results)
        settings = {name: x for name, x in vars(options).items() if name != "json"}
        settings |= {"head_dim": HEAD_DIM, "threads of a rank": 1, "backend": "gloo"}
        settings["environment"] = KEEP_MEMORY
        settings["estimators"] = {x: ESTIMATORS[x].to_dict() for x in options.estimators}
        content = {"machine": machine(), "settings": settings, "results": results}
        content["simulated"] = simulated
        write_json(options.json, content)


def print_tables(results, simulated):
    alone = {
        (row["estimator"], row["length"], row["pass"]): row["seconds"]
        for row in results.get(1, {"seconds": []})["seconds"]
    }
    for size, found in results.items():
        rows = []
        for row in found["seconds"]:
            base = alone.get((row["estimator"], row["length"], row["pass"]))
            efficiency = "" if base is None else f"{base / size / row['seconds']:.2f}"
            sent = "" if row["bytes"] is None else f"{row['bytes'] / 1e6:,.1f}"
            rows.append(
                (row["estimator"], f"{row['length']:,}", row["pass"], row["exchange"] or "")
                + (figure(row["seconds"]), efficiency, sent)
            )
        names = ("attention", "rows", "pass", "exchange", "seconds", "efficiency", "MB sent")
        print(table(f"{size} ranks", names, rows))
        if found["torch"]:
            print(f"torch's own context_parallel: {found['torch']}\n")
    names = ("ranks", "rows", "bits", "exchange", "bytes sent", "foretold")
    rows = [
        (size, f"{row['length']:,}", row["n_bits"] or "", row["exchange"])
        + (f"{row['bytes']:,}", "" if row["foretold"] is None else f"{row['foretold']:,}")
        for size, found in results.items()
        for row in found["bytes"]
    ]
    print(table("Bytes of a rank, one head, forward", names, rows))
    names = ("ranks", "causal", "exchange", "bytes counted", "foretold")
    rows = [
        (row["ranks"], row["causal"], row["exchange"], f"{row['bytes']:,}", f"{row['foretold']:,}")
        for row in simulated
    ]
    print(table("Simulated ranks, 65,536 rows, one head of 16, 8 bits, forward", names, rows))


if __name__ == "__main__":
    main()
