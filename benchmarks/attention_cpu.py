"""YOSO attention against torch's softmax attention on the CPU: time, threads and memory.

Both sides run in one process, in turn, and the tables give ratios of their shortest times; a ratio
above 1 means that lshkit is the faster. The call measured is the public one, with fresh hash
functions each time (seed=None), so drawing them counts.

    python benchmarks/attention_cpu.py                      # all of it, some 8 minutes
    python benchmarks/attention_cpu.py --lengths 128 1024 --repeats 3
    LSHKIT_ISA=avx2 python benchmarks/attention_cpu.py --json benchmarks/results/avx2.json
"""

import argparse
import json
import pathlib
import platform
import resource
import subprocess
import sys
import time

import torch
from torch.nn import functional as F
from tqdm import tqdm

import lshkit
from lshkit import _C
from lshkit.attention import yoso_attention
from lshkit.attention.baselines import yoso_index_add

RESULTS = pathlib.Path(__file__).parent / "results"
HEADS, DIM, N_BITS, N_HASHES = 8, 64, 8, 32
MB = 2**20


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[128, 512, 1024, 4096, 16384], metavar="N"
    )
    parser.add_argument("--repeats", type=int, default=7, help="of each call (the shortest counts)")
    parser.add_argument("--threads", type=int, default=1, help="of both sides")
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS / "attention_cpu.json")
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)  # in a fresh process
    args = parser.parse_args()
    if min(args.lengths) < 1 or args.repeats < 1 or args.threads < 1:
        parser.error("--lengths, --repeats and --threads must be at least 1")
    return args


def shortest(calls, repeats, budget=40.0):
    """The shortest time of each call in seconds; they take turns, for about `budget` seconds."""
    best = dict.fromkeys(calls, float("inf"))
    end = time.perf_counter() + budget
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
        if time.perf_counter() > end:
            break
    return best


def inputs(n, heads=HEADS, requires_grad=False):
    generator = torch.Generator().manual_seed(n)
    return [
        torch.randn(1, heads, n, DIM, generator=generator).requires_grad_(requires_grad)
        for _ in range(3)
    ]


def sampled(query, key, value, **options):
    return yoso_attention(
        query, key, value, n_bits=N_BITS, n_hashes=N_HASHES, estimator="sampled", **options
    )


def automatic(query, key, value, **options):
    return yoso_attention(query, key, value, n_bits=N_BITS, n_hashes=N_HASHES, **options)


def softmax(query, key, value, is_causal=False):
    return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)


def measure_length(n, repeats):
    qkv, leaves = inputs(n), inputs(n, requires_grad=True)
    grad = torch.randn(1, HEADS, n, DIM)

    def train(attention, **options):
        torch.autograd.grad(attention(*leaves, **options), leaves, grad)

    repeats = repeats if n >= 4096 else 5 * repeats
    row = {}
    for side, ours in (("sampled", sampled), ("auto", automatic)):
        modes = {
            "forward": (lambda: softmax(*qkv), lambda ours=ours: ours(*qkv)),
            "causal forward": (
                lambda: softmax(*qkv, is_causal=True),
                lambda ours=ours: ours(*qkv, is_causal=True),
            ),
            "forward + backward": (lambda: train(softmax), lambda ours=ours: train(ours)),
            "causal forward + backward": (
                lambda: train(softmax, is_causal=True),
                lambda ours=ours: train(ours, is_causal=True),
            ),
        }
        if side == "auto" and n > 6 * N_HASHES:
            continue  # it is the sampled one
        for mode, (theirs, call) in modes.items():
            best = shortest({"softmax": theirs, "lshkit": call}, repeats)
            best["ratio"] = best["softmax"] / best["lshkit"]
            row[f"{mode} ({side})"] = best
    if n >= 1024:
        with torch.no_grad():
            calls = {"index_add_": lambda: yoso_index_add(*qkv), "lshkit": lambda: sampled(*qkv)}
            best = shortest(calls, min(repeats, 7), budget=20)
        row["plain torch forward"] = best | {"ratio": best["index_add_"] / best["lshkit"]}
        row |= second_thread(qkv, train, repeats)
    return row


def second_thread(qkv, train, repeats):
    """How many times faster two threads are than one; both take turns."""

    def on(threads, call):
        def run():
            torch.set_num_threads(threads)
            call()

        return run

    before = torch.get_num_threads()
    row = {}
    for mode, call in (("forward", lambda: sampled(*qkv)), ("training", lambda: train(sampled))):
        best = shortest({"one": on(1, call), "two": on(2, call)}, repeats, budget=20)
        row[f"second thread, {mode}"] = best | {"ratio": best["one"] / best["two"]}
    torch.set_num_threads(before)
    return row


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_of(n):
    """Bytes that a call holds beside inputs, outputs and codes, by the growth of the peak.

    In a fresh process, one head: the peak does not go down again. Run once at a small length
    before, so that what is loaded on first use does not count.
    """
    torch.set_num_threads(1)
    options = {"seed": torch.tensor([0])}
    sampled(*inputs(256, 1, True), **options).sum().backward()
    qkv, leaves = inputs(n, 1), inputs(n, 1, True)
    out_bytes, code_bytes = 4 * n * DIM, 2 * n * N_HASHES
    # The parts a call must allocate, touched once and given back, so that reusing them is free.
    before = peak()
    sampled(*qkv, **options)
    forward = peak() - before - out_bytes - code_bytes
    saved = []
    pack = lambda x: saved.append(x.numel() * x.element_size()) or x  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = sampled(*leaves, **options)
    grad = torch.ones_like(out)
    before = peak()
    out.backward(grad)
    backward = peak() - before - 3 * out_bytes
    return {
        "forward scratch": max(forward, 0),
        "backward scratch": max(backward, 0),
        "saved beyond inputs": sum(saved) - 3 * out_bytes,
    }


def measure_memory(lengths):
    rows = {}
    for n in lengths:
        command = [sys.executable, __file__, "--memory-of", str(n)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows[n] = json.loads(done.stdout)
    return rows


def cpu_name():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def table(title, header, rows):
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    print(f"\n{title}")
    for row in [header, *rows]:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def show(results):
    times = results["time"]
    for side in ("sampled", "auto"):
        modes = ["forward", "causal forward", "forward + backward", "causal forward + backward"]
        rows = [
            [n, *(f"{row[f'{mode} ({side})']['ratio']:.1f}" for mode in modes)]
            for n, row in times.items()
            if f"forward ({side})" in row
        ]
        if rows:
            title = f'Softmax time / lshkit time, estimator="{side}"'
            table(title, ["n", *modes], rows)
    others = ["plain torch forward", "second thread, forward", "second thread, training"]
    rows = [
        [n, *(f"{row[name]['ratio']:.2f}" for name in others)]
        for n, row in times.items()
        if others[0] in row
    ]
    if rows:
        table("Times as fast as plain torch YOSO; as one thread", ["n", *others], rows)
    rows = [
        [
            str(n),
            f"{m['forward scratch'] / MB:.2f} MB",
            f"{m['backward scratch'] / MB:.2f} MB",
            f"{m['backward scratch'] / n:.0f} n bytes",
            f"{m['saved beyond inputs'] / n:.0f} n bytes",
        ]
        for n, m in results["memory"].items()
    ]
    header = ["n", "forward scratch", "backward scratch", "that is", "saved beyond inputs"]
    table("One head: memory beside inputs, outputs and codes", header, rows)


def main():
    args = arguments()
    if args.memory_of:
        print(json.dumps(memory_of(args.memory_of)))
        return
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    times = {}
    for n in tqdm(args.lengths, desc="lengths"):
        times[str(n)] = measure_length(n, args.repeats)
    results = {
        "settings": {
            "batch": 1,
            "heads": HEADS,
            "head dim": DIM,
            "dtype": "float32",
            "n_bits": N_BITS,
            "n_hashes": N_HASHES,
            "hasher": "hadamard",
            "seed": "fresh in each call",
            "threads": args.threads,
            "times": "shortest of several, in seconds",
        },
        "machine": {
            "cpu": cpu_name(),
            "instruction set": _C.instruction_set(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torch cpu capability": torch.backends.cpu.get_cpu_capability(),
            "lshkit": lshkit.__version__,
        },
        "time": times,
        "memory": measure_memory([n for n in args.lengths if n >= 512] or [512]),
    }
    show(results)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\nwritten to {args.json}")


if __name__ == "__main__":
    main()
