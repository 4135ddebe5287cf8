"""YOSO attention against softmax attention and plain-torch YOSO on a CPU: time and memory.

Both sides run in one process in turns, and each keeps the smallest of its times: what is printed
are ratios. Ours is always the public call, `lshkit.attention.yoso_attention`, with seed=None: fresh
hash functions at every call, whose drawing is part of the time. Softmax attention is
`torch.nn.functional.scaled_dot_product_attention` in float32. Forward passes run under no_grad.
Memory is measured in processes of its own. A quiet machine takes about four minutes.

    python benchmarks/attention_cpu.py
    python benchmarks/attention_cpu.py --quick
    LSHKIT_ISA=avx2 python benchmarks/attention_cpu.py --json benchmarks/results/avx2.json
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

import lshkit
from lshkit import _C
from lshkit.attention import yoso_attention
from lshkit.attention.baselines import yoso_index_add

HEADS, HEAD_DIM, N_BITS, N_HASHES = 8, 64, 8, 32
LENGTHS = (128, 512, 1024, 4096, 16384)
QUICK_LENGTHS = (128, 512, 1024)
PASSES = ("forward", "causal forward", "forward + backward", "causal forward + backward")
# Ratios to reach on AVX-512 with one thread, by length, for each pass (None: no goal).
GOALS = {
    512: (4, 4, 4, None),
    1024: (8, 6.5, 5.5, None),
    4096: (33, 19, 10, None),
    16384: (130, 70, 12, None),
}
NO_GOALS = (None,) * len(PASSES)
AUTO_GOALS = (1,) * len(PASSES)  # estimator="auto" at n = 128
PLAIN_GOALS = {"gather": 20.0, "embedding_bag": None}  # by yoso_index_add's lookup
THREAD_GOAL = 1.8  # a second thread
PLAIN_FROM, AUTO_UP_TO = 1024, 128  # lengths for these two
ENOUGH_ROUNDS = 300


def inputs(length, requires_grad=False):
    generator = torch.Generator().manual_seed(0)
    shape = (1, HEADS, length, HEAD_DIM)
    return [torch.randn(shape, generator=generator).requires_grad_(requires_grad) for _ in range(3)]


def yoso(*tensors, is_causal=False, estimator="sampled"):
    return yoso_attention(
        *tensors, is_causal=is_causal, n_bits=N_BITS, n_hashes=N_HASHES, estimator=estimator
    )


def auto(*tensors, **options):
    return yoso(*tensors, estimator="auto", **options)


# --- Time ---------------------------------------------------------------------------------------


def in_turns(calls, args):
    """Smallest seconds of each call. The calls alternate, so that noise meets all of them."""
    best = dict.fromkeys(calls, float("inf"))
    start = time.perf_counter()
    rounds = 0
    while rounds < args.repeats or (
        rounds < ENOUGH_ROUNDS and time.perf_counter() - start < args.seconds
    ):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - begin)
        rounds += 1
    return best


def of_pass(attention, name, tensors, grad_out):
    """A call without arguments that runs one pass of the attention."""
    is_causal = "causal" in name

    def forward():
        with torch.no_grad():
            attention(*tensors, is_causal=is_causal)

    def forward_and_backward():
        torch.autograd.grad(attention(*tensors, is_causal=is_causal), tensors, grad_out)

    return forward_and_backward if "backward" in name else forward


def time_against_softmax(length, args):
    sides = {"softmax": scaled_dot_product_attention, "yoso": yoso}
    if length <= AUTO_UP_TO:
        sides["auto"] = auto
    tensors = inputs(length, requires_grad=True)
    grad_out = torch.ones_like(tensors[0])
    return {
        name: in_turns(
            {side: of_pass(call, name, tensors, grad_out) for side, call in sides.items()}, args
        )
        for name in PASSES
    }


def time_against_plain_torch(length, args):
    tensors = inputs(length)

    def plain(lookup):
        return lambda: yoso_index_add(*tensors, n_bits=N_BITS, n_hashes=N_HASHES, lookup=lookup)

    calls = {"yoso": lambda: yoso(*tensors)} | {lookup: plain(lookup) for lookup in PLAIN_GOALS}
    with torch.no_grad():
        return in_turns(calls, args)


def time_threads(length, args):
    """Seconds with args.threads threads and with twice as many."""
    tensors = inputs(length, requires_grad=True)
    grad_out = torch.ones_like(tensors[0])

    def with_threads(count, call):
        def run():
            torch.set_num_threads(count)
            call()

        return run

    counts = (args.threads, 2 * args.threads)
    times = {}
    for name in PASSES:
        call = of_pass(yoso, name, tensors, grad_out)
        calls = {str(count): with_threads(count, call) for count in counts}
        times[name] = in_turns(calls, args)
    torch.set_num_threads(args.threads)
    return times


# --- Memory -------------------------------------------------------------------------------------


def status_bytes(field):
    """A size from /proc/self/status: VmRSS, resident now, or VmHWM, the largest it has been.

    (Not getrusage's ru_maxrss: a process starts with its parent's.)
    """
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}: memory cannot be measured here")


class PeakGrowth:
    """Bytes by which the peak resident size in the with block exceeds the size before it."""

    def __enter__(self):
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
        self.before = status_bytes("VmRSS")
        return self

    def __exit__(self, *_):
        self.bytes = status_bytes("VmHWM") - self.before


def measure_memory(length, threads):
    """Bytes of scratch of forward and backward, and what autograd keeps. Runs in a new process.

    Scratch: growth of the peak resident size over the size before the call, less the results.
    A call on a single token before loads most of the code, so that it is not counted as scratch.
    Resident pages are counted to some 0.1 MiB, and the backward reuses what the forward keeps.
    """
    torch.set_num_threads(threads)
    first = inputs(1, requires_grad=True)
    torch.autograd.grad(yoso(*first), first, torch.ones_like(first[0]))
    tensors = inputs(length, requires_grad=True)
    grad_out = torch.ones_like(tensors[0])
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with PeakGrowth() as forward, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = yoso(*tensors)
    kept_inputs = sum(kept.pop(x.untyped_storage().data_ptr(), 0) for x in tensors)

    with PeakGrowth() as backward:
        gradients = torch.autograd.grad(out, tensors, grad_out)

    codes = 2 * HEADS * length * N_HASHES  # of queries and keys, a byte each
    return {
        "forward_scratch": forward.bytes - out.nbytes - codes,
        "backward_scratch": backward.bytes - sum(x.nbytes for x in gradients),
        "saved_inputs": kept_inputs,
        "saved_besides_inputs": sum(kept.values()),
        "codes": codes,
    }


def memory(length, threads):
    # A fixed threshold: every tensor is a mapping of its own, given back when it is freed.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, __file__, "--memory-of", str(length), "--threads", str(threads)]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


# --- Tables -------------------------------------------------------------------------------------


def table(title, header, rows):
    rows = [header, *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(r, widths, strict=True)) for r in rows
    ]
    return "\n".join([title, *lines, ""])


def against(ratio, goal):
    return f"{ratio:.2f}" if goal is None else f"{ratio:.1f} (goal {goal:g})"


def ratio_rows(results, ours):
    for n, times in results["softmax"].items():
        if ours in times[PASSES[0]]:
            goals = GOALS.get(int(n), NO_GOALS) if ours == "yoso" else AUTO_GOALS
            ratios = [t["softmax"] / t[ours] for t in times.values()]
            yield [n, *map(against, ratios, goals)]


def time_rows(results, ours):
    for n, times in results["softmax"].items():
        yield [n, *(f"{1e3 * t[ours]:.3g}" for t in times.values())]


def report(results):
    threads = results["settings"]["threads"]
    header = ["n", *PASSES]
    yield table("Ours in ms, estimator='sampled'", header, list(time_rows(results, "yoso")))
    yield table(
        "Softmax attention's time / ours, estimator='sampled' (goals: AVX-512, one thread)",
        header,
        list(ratio_rows(results, "yoso")),
    )
    if rows := list(ratio_rows(results, "auto")):
        yield table("Softmax attention's time / ours, estimator='auto'", header, rows)
    if results["plain_torch"]:
        rows = [
            [n, *(against(t[x] / t["yoso"], goal) for x, goal in PLAIN_GOALS.items())]
            for n, t in results["plain_torch"].items()
        ]
        title = "Plain-torch YOSO's time / ours, forward: index_add_ and ..."
        yield table(title, ["n", *PLAIN_GOALS], rows)
    if results["threads"]:
        few, many = str(threads), str(2 * threads)
        rows = [
            [n, *(against(t[few] / t[many], THREAD_GOAL) for t in times.values())]
            for n, times in results["threads"].items()
        ]
        yield table(f"Ours with {few} thread(s) / ours with {many}", header, rows)
    yield table(
        "Memory beyond inputs and results: forward scratch a thread (goal: at most 2 MiB),\n"
        "backward scratch a token and head in flight (600 bytes), saved for the backward (1 byte)",
        ["n", "forward, MiB", "backward, bytes", "saved, bytes / (token hash)"],
        [
            [
                n,
                f"{m['forward_scratch'] / threads / 2**20:.2f}",
                f"{max(m['backward_scratch'], 0) / (int(n) * min(threads, HEADS)):.0f}",
                f"{m['saved_besides_inputs'] / m['codes']:.2f}",
            ]
            for n, m in results["memory"].items()
        ],
    )


# --- Command line -------------------------------------------------------------------------------


def cpu_model():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def machine():
    return {
        "cpu": cpu_model(),
        "logical_cpus": os.cpu_count(),
        "load_average_at_start": os.getloadavg()[0],
        "instruction_set": _C.instruction_set(),
        "LSHKIT_ISA": os.environ.get("LSHKIT_ISA"),
        "compiler": _C.compiler(),
        "lshkit": lshkit.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def positive(text):
    number = int(text)
    if number < 1:
        raise ValueError
    return number


positive.__name__ = "positive integer"  # the name in argparse's message


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--lengths", type=positive, nargs="+", default=list(LENGTHS), metavar="N")
    add("--quick", action="store_true", help=f"lengths {QUICK_LENGTHS} alone, in seconds")
    add("--repeats", type=positive, default=3, help="least number of rounds of a measurement")
    add("--seconds", type=float, default=2.0, help="short calls are repeated for as long as this")
    add("--threads", type=positive, default=1, help="CPU threads")
    add(
        "--json",
        type=pathlib.Path,
        default=pathlib.Path(__file__).parent / "results" / "attention_cpu.json",
        help="where the results go; LSHKIT_ISA=avx2 in the environment measures other kernels",
    )
    add("--memory-of", type=positive, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.lengths = list(QUICK_LENGTHS)
    return args


def main():
    args = parse_arguments()
    if args.memory_of:
        print(json.dumps(measure_memory(args.memory_of, args.threads)))
        return
    args.json.parent.mkdir(parents=True, exist_ok=True)  # now, not after minutes
    torch.set_num_threads(args.threads)
    results = {
        "machine": machine(),
        "settings": {
            "batch": 1,
            "heads": HEADS,
            "head_dim": HEAD_DIM,
            "n_bits": N_BITS,
            "n_hashes": N_HASHES,
            "dtype": "float32",
            "seed": "None: fresh hash functions at every call",
            "threads": args.threads,
            "repeats": args.repeats,
            "seconds": args.seconds,
            "times": "seconds, the smallest of all rounds",
        },
        "softmax": {},
        "plain_torch": {},
        "threads": {},
        "memory": {},
    }
    load = results["machine"]["load_average_at_start"]
    if load > 0.5:
        print(f"note: other work is running here (load {load:.1f}), times will be off\n")

    for n in sorted(set(args.lengths)):
        print(f"n = {n} ...", end="\r", file=sys.stderr, flush=True)
        key = str(n)  # as it will be in JSON
        results["softmax"][key] = time_against_softmax(n, args)
        if n >= PLAIN_FROM:
            results["plain_torch"][key] = time_against_plain_torch(n, args)
            if 2 * args.threads <= len(os.sched_getaffinity(0)):
                results["threads"][key] = time_threads(n, args)
        results["memory"][key] = memory(n, args.threads)
    results["ratios"] = {
        n: {
            name: {side: t["softmax"] / t[side] for side in t if side != "softmax"}
            for name, t in times.items()
        }
        for n, times in results["softmax"].items()
    }

    print(
        f"{results['machine']['cpu']}, {_C.instruction_set()}, torch {torch.__version__}, "
        f"{args.threads} thread(s): {HEADS} heads, d = {HEAD_DIM}, n_bits {N_BITS}, "
        f"n_hashes {N_HASHES}\n"
    )
    print("\n".join(report(results)))
    args.json.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written to {args.json}")


if __name__ == "__main__":
    main()
