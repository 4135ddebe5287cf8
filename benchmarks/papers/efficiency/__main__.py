"""Time and memory of a training step against length: YOSO and other efficient attention on a CPU.

The model of YOSO's tables 1 and 2 in the appendix (ICML 2021, protocol of its section 4.3): six
layers of the same weights, dim 256, feed-forward 1024, 4 heads of 64, a vocabulary of 512, mean
pooling, 10 classes, random tokens; tau = log2 n. A step is a forward and a backward pass, after one
for warming up. All methods take turns in one process; what is given is the median of the rounds,
divided by the batch (as many sequences as make 1024 tokens, one from there on). With one thread it
is CPU time: less disturbed by other work on the machine, and the time itself where there is none.

Memory is that of one sequence: by how much the peak resident size of a process during its first
step at that length exceeds its size before, with model and gradients in place and after a step on a
sequence of 64 tokens. Each figure is from a process of its own, in which malloc gives freed tensors
back at once. It counts all that is allocated, by torch or not.

    python -m benchmarks.papers.efficiency
    python -m benchmarks.papers.efficiency --lengths 1024 4096 --methods softmax YOSO-32
    python -m benchmarks.papers.efficiency --tables
    python -m benchmarks.papers.efficiency --quick
"""

import argparse
import datetime
import importlib
import itertools
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import time
import warnings

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from benchmarks import IMAGES, RESULTS, baselines, command_line, measurement, positive, write_json
from benchmarks.papers.efficiency import tables
from lshkit.attention import Sampled, Soft

LAYERS, DIM, HIDDEN, HEADS, VOCABULARY, CLASSES = 6, 256, 1024, 4, 512, 10
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 16384)
TWO_THREADS = (4096,)
BATCH_TOKENS = 1024
ROUNDS, LONG_ROUNDS, LONG_FROM = 3, 1, 16384  # a step of 16384 tokens takes seconds
SLOW = 4.0  # seconds of a step from which one round has to do


def yoso(n_hashes, gradient="lower_bound", **options):
    """The papers' setting, whose tau grows with the length."""
    return lambda n: {
        "estimator": Sampled(
            n_bits=min(16, int(math.log2(n))),
            n_hashes=n_hashes,
            expectation="never",
            gradient=gradient,
        ),
        **options,
    }


# Names as in the appendix; what follows the comma is what they don't have. (layer, options by n)
METHODS = {
    "softmax": ("softmax", {"how": "explicit"}),
    "softmax, fused": ("softmax", {}),
    "Nystromformer": ("Nystromformer", {"n_landmarks": 64, "conv_window": 33}),
    "Nystromformer, no convolution": ("Nystromformer", {"n_landmarks": 64}),
    "Longformer": ("Longformer", {"window": 512}),
    "Linformer": ("Linformer", {"rank": 256, "fused": False}),
    "Linformer, fused": ("Linformer", {"rank": 256}),
    "Reformer": ("Reformer", {"n_hashes": 2}),
    "Performer": ("Performer", {"n_features": 256}),
    "YOSO-32": ("YOSO", yoso(32)),
    "YOSO-16": ("YOSO", yoso(16)),
    "YOSO-C-32": ("YOSO", yoso(32, conv_window=33)),
    "YOSO-C-16": ("YOSO", yoso(16, conv_window=33)),
    "*YOSO-32": ("YOSO", yoso(32, gradient="collided")),
    "*YOSO-16": ("YOSO", yoso(16, gradient="collided")),
    "YOSO-32, tau 8": ("YOSO", {}),
    "soft codes, 32 hashes": ("YOSO", {"estimator": Soft(n_probes=2)}),
    "window only": ("window only", {"reach": 256}),
    "convolution only": ("convolution only", {"conv_window": 33}),
    "no attention": ("no attention", {}),
}
BASELINES = tuple(name for name in METHODS if METHODS[name][0] not in ("YOSO", *baselines.CONTROLS))
# Quadratic ones would take minutes beyond; of the others one of a kind.
LONG_METHODS = (
    "Nystromformer",
    "Nystromformer, no convolution",
    "Longformer",
    "Linformer",
    "Reformer",
    "Performer",
    "YOSO-32",
    "YOSO-16",
    "YOSO-32, tau 8",
    "soft codes, 32 hashes",
    "no attention",
)


def applies(name, n):
    """As in the tables, Longformer begins where its window fits."""
    if name == "Longformer" and n < 512:
        return False
    return n < LONG_FROM or name in LONG_METHODS


class Classifier(nn.Module):
    """The protocol's model: one layer, applied six times."""

    def __init__(self, name: str, length: int) -> None:
        super().__init__()
        kind, options = METHODS[name]
        options = options(length) if callable(options) else options
        self.tokens, self.positions = nn.Embedding(VOCABULARY, DIM), nn.Embedding(length, DIM)
        self.attention = baselines.build(kind, DIM, HEADS, length, **options)
        self.norm1, self.norm2, self.norm = (nn.LayerNorm(DIM) for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(DIM, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, DIM))
        self.output = nn.Linear(DIM, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for _ in range(LAYERS):
            x = x + self.attention(self.norm1(x))
            x = x + self.mlp(self.norm2(x))
        return self.output(self.norm(x).mean(1))


class Step:
    """Forward and backward passes of one method on the same random tokens."""

    def __init__(self, name: str, length: int, batch: int) -> None:
        torch.manual_seed(0)
        self.model = Classifier(name, length)
        self.tokens = torch.randint(VOCABULARY, (batch, length))
        self.classes = torch.randint(CLASSES, (batch,))
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def __call__(self) -> None:
        F.cross_entropy(self.model(self.tokens), self.classes).backward()


# --- Time ---------------------------------------------------------------------------------------


def time_steps(names, n, batch, rounds, clock, bar):
    """Seconds of a sequence: all rounds of each method, which take turns."""
    steps = {name: Step(name, n, batch) for name in names}
    seconds = {name: [] for name in names}
    for i in range(rounds + 1):  # the first one warms up
        for name, step in steps.items():
            bar.update()
            if i > 1 and seconds[name][0] * batch > SLOW:
                continue
            bar.set_postfix_str(f"n = {n}, {name}")
            begin = clock()
            step()
            if i:
                seconds[name].append((clock() - begin) / batch)
    return {
        "batch": batch,
        "seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "rounds": {name: [round(t, 6) for t in times] for name, times in seconds.items()},
    }


def measure_times(args):
    plan = {1: [n for n in args.lengths]}
    if args.threads > 1:
        plan[args.threads] = [n for n in args.lengths if n in TWO_THREADS or args.quick]
    rounds = {n: args.rounds or (ROUNDS if n < LONG_FROM else LONG_ROUNDS) for n in args.lengths}
    batch = {n: 1 if args.quick else max(1, BATCH_TOKENS // n) for n in args.lengths}
    names = {n: [name for name in args.methods if applies(name, n)] for n in args.lengths}
    total = sum(len(names[n]) * (rounds[n] + 1) for lengths in plan.values() for n in lengths)
    times = {}
    with tqdm(total=total, desc="time", disable=None, dynamic_ncols=True) as bar:
        for threads, lengths in plan.items():
            torch.set_num_threads(threads)
            measurement.on_cpus({max(measurement.CPUS)} if threads == 1 else measurement.CPUS)
            clock = time.process_time if threads == 1 else time.perf_counter
            times[threads] = {
                n: time_steps(names[n], n, batch[n], rounds[n], clock, bar) for n in lengths
            }
    return times


# --- Memory -------------------------------------------------------------------------------------


def step_bytes(name, n):
    """Of one sequence, in a process that measures nothing else."""
    Step(name, 64, 1)()  # code and thread buffers of the libraries
    step = Step(name, n, 1)
    with measurement.PeakGrowth() as growth:
        step()
    return growth.bytes


def print_bytes(tasks):
    """A line for each (method, length), from a fork of this process: nothing is imported twice."""
    torch.set_num_threads(1)
    if {METHODS[name][0] for name, _ in tasks} & {"Nystromformer", "Reformer", "Longformer"}:
        importlib.import_module("benchmarks.baselines.from_transformers")
    for name, n in tasks:
        if os.fork() == 0:
            print(json.dumps([name, n, step_bytes(name, n)]), flush=True)
            os._exit(0)
        if status := os.wait()[1]:
            sys.exit(f"memory of {name} at {n}: status {status}")


def measure_memory(args):
    tasks = [(name, n) for n in args.lengths for name in args.methods if applies(name, n)]
    # Every larger tensor is a mapping of its own, given back when it is freed.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.papers.efficiency", "--memory-of"]
    processes = [
        subprocess.Popen(
            [*command, json.dumps(tasks[i :: args.processes])],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(args.processes)
    ]
    found = {n: {} for n in args.lengths}
    measurement.on_cpus(measurement.CPUS)
    lines = itertools.chain.from_iterable(process.stdout for process in processes)
    for line in tqdm(lines, total=len(tasks), desc="memory", disable=None, dynamic_ncols=True):
        name, n, size = json.loads(line)
        found[n][name] = size
    if any([process.wait() for process in processes]):
        sys.exit("memory: a process failed")
    return {n: {name: of_n[name] for name in args.methods if name in of_n}
            for n, of_n in found.items()}  # fmt: skip


# --- Command line -------------------------------------------------------------------------------


def parse_arguments():
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME",
        help=f"all by default: {'; '.join(METHODS)}")  # fmt: skip
    add("--lengths", type=int, nargs="+", metavar="N", help=f"{', '.join(map(str, LENGTHS))}")
    add("--threads", type=positive, default=2, help="measured beside one thread, at 4096 (2)")
    add(
        "--rounds", type=positive, help=f"timed steps ({ROUNDS}; from {LONG_FROM} on {LONG_ROUNDS})"
    )
    add("--processes", type=positive, default=2, help="that measure memory at a time (2)")
    add("--quick", action="store_true", help="two short lengths, one round: works, says little")
    add("--json", type=pathlib.Path, default=RESULTS / "efficiency.json")
    add("--picture", type=pathlib.Path, default=IMAGES / "efficiency.png")
    add("--tables", action="store_true", help="tables and picture of the file, measure nothing")
    add("--memory-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.lengths is None:
        args.lengths = [64, 128] if args.quick else list(LENGTHS)
    args.lengths = sorted(set(args.lengths))
    if args.lengths[0] < 64:
        parser.error(f"--lengths must be at least 64, got {args.lengths[0]}")
    if args.rounds is None and args.quick:
        args.rounds = 1
    return args


def measure(args):
    machine = measurement.machine()
    if machine["load_average_at_start"] > 0.5:
        load = machine["load_average_at_start"]
        print(f"note: other work is running here (load {load:.1f}), times will be off\n")
    begin = datetime.datetime.now(datetime.timezone.utc)
    results = {
        "machine": machine,
        "settings": {
            "layers": f"{LAYERS} of the same weights",
            "dim": DIM,
            "feed_forward": HIDDEN,
            "heads": HEADS,
            "vocabulary": VOCABULARY,
            "classes": CLASSES,
            "dtype": "float32",
            "batch_tokens": BATCH_TOKENS,
            "tau": "log2 n, but for the rows that say otherwise",
            "seconds": "of a sequence, forward and backward, median of the rounds",
            "bytes": "growth of the peak resident size in one step with one sequence, one thread",
        },
        "baselines": [name for name in args.methods if name in BASELINES],
        "times": measure_times(args),
        "bytes": measure_memory(args),
    }
    took = datetime.datetime.now(datetime.timezone.utc) - begin
    results["date"], results["took"] = begin.isoformat(timespec="seconds"), took.seconds
    return json.loads(json.dumps(results))  # keys as they will be in the file


def main():
    warnings.filterwarnings("ignore", module="transformers")
    args = parse_arguments()
    if args.memory_of:
        print_bytes(json.loads(args.memory_of))
        return
    if args.tables:
        results = json.loads(args.json.read_text())
    else:
        for path in (args.json, args.picture):
            path.parent.mkdir(parents=True, exist_ok=True)  # now, not after minutes
        results = measure(args)
        write_json(args.json, results)
    tables.draw(results, args.picture)
    print("\n".join(tables.report(results)))
    print(f"written: {args.json}, {args.picture}")


if __name__ == "__main__":
    main()
