"""Times and memory of attention, and tables of them, for the sections of speed/attention."""

import contextlib
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention

import lshkit
from lshkit import _C

HEADS, HEAD_DIM, N_BITS, N_HASHES = 8, 64, 8, 32
# Elsewhere softmax of bfloat16 takes several times as long as that of float32.
FAST_BFLOAT16 = torch.cpu._is_avx512_bf16_supported()
FORWARD, CAUSAL, BACKWARD, CAUSAL_BACKWARD = PASSES = (
    "forward",
    "causal forward",
    "forward + backward",
    "causal forward + backward",
)
# Forward and backward of softmax attention take 23 seconds at this length: once in a process.
ONCE_FROM = 16384
ENOUGH_ROUNDS = 300
LONG_ROUNDS = 20.0  # seconds after which two rounds are enough
FASTER_CALLS = 3  # a call that takes less than the slowest one runs up to so often in a round
CPUS = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


@dataclass(frozen=True)
class Section:
    """Something to measure: `measure(lengths, stopwatch)` gives what is stored under its name.

    `tables(results)` and `goals(results)` read that, keys as strings; a goal is (what, reached,
    "at least" or "at most", goal). `options` are written beside the results.
    """

    measure: Callable
    tables: Callable
    lengths: tuple = ()
    quick: tuple = ()
    options: dict = field(default_factory=dict)
    goals: Callable = lambda results: ()
    shortest: int = 1  # lengths below are left out
    own_lengths: bool = False  # --lengths does not apply


def inputs(length, requires_grad=False, heads=HEADS, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shape = (1, heads, length, HEAD_DIM)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]
    return [x.requires_grad_(requires_grad) for x in tensors]


def of_pass(attention, name, tensors, grad_out=None):
    """A call without arguments that runs one pass of the attention."""
    is_causal = name in (CAUSAL, CAUSAL_BACKWARD)

    def forward():
        with torch.no_grad():
            attention(*tensors, is_causal=is_causal)

    if name in (FORWARD, CAUSAL):
        return forward
    if grad_out is None:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            like = attention(*tensors, is_causal=is_causal)
        grad_out = torch.randn(like.shape, generator=generator).to(like.dtype)
    return lambda: torch.autograd.grad(attention(*tensors, is_causal=is_causal), tensors, grad_out)


# --- Time ---------------------------------------------------------------------------------------


def in_turns(calls, goes_on, most=1):
    """Smallest seconds of each named call. They alternate, so that noise meets all of them.

    A round follows while goes_on(rounds, elapsed). From the second one on, a call that takes less
    than the slowest one runs up to `most` times in it.
    """
    best = dict.fromkeys(calls, float("inf"))
    start, rounds = time.perf_counter(), 0
    while goes_on(rounds, time.perf_counter() - start):
        slowest = max(best.values())
        for name, call in calls.items():
            for _ in range(min(most, int(slowest / best[name])) if rounds else 1):
                begin = time.perf_counter()
                call()
                best[name] = min(best[name], time.perf_counter() - begin)
        rounds += 1
    return best


def best_in_turns(calls, seconds, rounds=2, most=1):
    """The same for some seconds, and for `rounds` at least."""
    return in_turns(calls, lambda done, elapsed: done < rounds or elapsed < seconds, most)


@dataclass
class Stopwatch:
    """Smallest seconds of calls, and those of softmax attention at lengths that take it long."""

    repeats: int  # least number of rounds
    seconds: float  # more rounds until then
    threads: int
    long: bool  # measure softmax attention beyond ONCE_FROM, on one head
    notes: dict = field(default_factory=dict)  # how softmax attention was timed, by length
    _once: dict = field(default_factory=dict)

    def in_turns(self, calls):
        def goes_on(rounds, elapsed):
            return (rounds < self.repeats and (rounds < 2 or elapsed < LONG_ROUNDS)) or (
                rounds < ENOUGH_ROUNDS and elapsed < self.seconds
            )

        return in_turns(calls, goes_on, FASTER_CALLS)

    def against_softmax(self, length, name, calls):
        """Seconds of the calls, and of that pass of softmax attention under "softmax"."""
        if length >= ONCE_FROM:
            return {"softmax": self.softmax_once(length, name)} | self.in_turns(calls)
        tensors = inputs(length, requires_grad=True)
        softmax = of_pass(scaled_dot_product_attention, name, tensors)
        self.notes[str(length)] = "in turns with ours"
        return self.in_turns({"softmax": softmax} | calls)

    def softmax_once(self, length, name, dtype=torch.float32):
        """Seconds of one run, or where it would take minutes what they come to."""
        if length > ONCE_FROM and not self.long:
            factor = (length / ONCE_FROM) ** 2
            self.notes[str(length)] = f"extrapolated: {factor:g} times that at {ONCE_FROM}"
            return factor * self.softmax_once(ONCE_FROM, name, dtype)
        heads = HEADS if length == ONCE_FROM else 1
        self.notes[str(length)] = (
            "one run" if heads == HEADS else f"one run of one head, times {HEADS}"
        )
        if (length, name, dtype) not in self._once:
            tensors = inputs(length, requires_grad=True, heads=heads, dtype=dtype)
            call = of_pass(scaled_dot_product_attention, name, tensors, torch.ones_like(tensors[0]))
            begin = time.perf_counter()
            call()
            self._once[length, name, dtype] = HEADS / heads * (time.perf_counter() - begin)
        return self._once[length, name, dtype]


def on_cpus(cpus):
    """The threads that this one starts, and itself, run there alone: no moves between cores."""
    if cpus:
        os.sched_setaffinity(0, cpus)


def pin_to_one_cpu():
    on_cpus({max(CPUS)} if CPUS else None)


# --- Memory -------------------------------------------------------------------------------------


def status_bytes(name):
    """A size from /proc/self/status: VmRSS, resident now, or VmHWM, the largest it has been.

    (Not getrusage's ru_maxrss: a process starts with its parent's.)
    """
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}: memory cannot be measured here")


class PeakGrowth:
    """Bytes by which the peak resident size in the with block exceeds the size before it."""

    def __enter__(self):
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
        self.before = status_bytes("VmRSS")
        return self

    def __exit__(self, *_):
        self.bytes = status_bytes("VmHWM") - self.before


def in_new_process(name, length, threads):
    """What `--alone name` of speed.attention returns, in a process that did nothing yet."""
    # A fixed threshold: every tensor is a mapping of its own, given back when it is freed.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-m", "benchmarks.speed.attention"]
    command += ["--alone", name, str(length), "--threads", str(threads)]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


# --- Tables, in Markdown ------------------------------------------------------------------------


def table(title, header, rows):
    """Columns of words to the left, of numbers to the right."""
    rows = [[str(cell) for cell in row] for row in (header, *rows)]
    lines = [[] for _ in range(len(rows) + 1)]
    for cells in zip(*rows, strict=True):
        words = any(any(c.isalpha() for c in cell) for cell in cells[1:])
        width = max(map(len, cells))
        cells = [cell.ljust(width) if words else cell.rjust(width) for cell in cells]
        rule = "-" * (width + 2) if words else "-" * (width + 1) + ":"
        for line, cell in zip(lines, (cells[0], rule, *cells[1:]), strict=True):
            line.append(cell if cell is rule else f" {cell} ")
    return "\n".join([title, "", *("|" + "|".join(line) + "|" for line in lines), ""])


def figure(x):
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def milliseconds(seconds):
    return figure(1e3 * seconds)


def ratio_table(title, results, passes):
    """results[n][pass][side] as softmax's time by that of each other side, a row a length."""
    sides = list(dict.fromkeys(s for times in results.values() for p in passes for s in times[p]))
    sides.remove(over := "softmax")
    header = ["n", *(f"{s}: {p}" if len(passes) > 1 else s for p in passes for s in sides)]
    rows = [
        [n, *(figure(t[p][over] / t[p][s]) if s in t[p] else "" for p in passes for s in sides)]
        for n, t in results.items()
    ]
    return table(title, header, rows)


def cpu_model():
    """The name of the CPU, with the numbers of its model where Linux has them: names are vague."""
    about = {}
    if (cpuinfo := pathlib.Path("/proc/cpuinfo")).exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            about.setdefault(key.strip(), value.strip())
    name = about.get("model name") or platform.processor() or platform.machine()
    if "cpu family" not in about:
        return name
    return f"{name}, family {about['cpu family']}, model {about['model']}"


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
    }


MISSING = "not installed: left out"


def installed(*packages):
    """{package: its version, or MISSING}"""
    found = dict.fromkeys(packages, MISSING)
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
