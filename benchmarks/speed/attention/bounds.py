"""The sum verb's time over its bound, which this machine's own limits give in the same run.

A bound is the least that adding rows to tables and reading them takes, in nanoseconds a row and
hash, at 64 float32 columns (rows of 256 bytes). `limits.cpp` measures, on tables and arrays of so
many bytes, what a core needs for a row at random (gather, scatter_add) and in turn (read, update).
Then, for H heads of n rows, b bits, m hashes and t probes,

    bound = min over g = 1, 2, 4 .. m of  steps * t * (gather(g T) + scatter_add(g T))
                                          + ((m / g - 1) * stream(V) + stream(H V)) / m
                                          + c * read(H c m n) / 256

    T = 256 * min(2^b, n) bytes   a table, of which those of g hashes are in use together
    V = 256 n bytes               an array of the values, outputs or gradients of a head, which is
                                  gone through once for the g hashes; the first time, it comes from
                                  where the arrays of all heads lie
    stream(x)                     reads * read(x) + updates * update(x), by the arrays of a kernel
    c                             bytes of codes a row and hash, of both sides

Empty tables, hash functions, normalisation, fresh memory and Python are not in it. Tables beyond
16 MB, and slices of columns, which would visit less of a table at a time, are not tried.

Its bare rows are gather(T) + scatter_add(T): what a row would take if nothing streamed by.
"""

import ctypes
import os
import pathlib
import shlex
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache

import torch

from benchmarks.measurement import (
    BACKWARD,
    FORWARD,
    HEADS,
    N_HASHES,
    Section,
    figure,
    inputs,
    of_pass,
    table,
)
from benchmarks.speed.attention.options import soft
from lshkit import _C
from lshkit.hashing import Hyperplane

LENGTHS, QUICK_LENGTHS = (512, 4096, 16384, 65536), (128, 256)
SOURCE = pathlib.Path(__file__).with_name("limits.cpp")
TABLES = tuple(2**k for k in range(16, 25))  # bytes: 64 KB to 16 MB
SIZES = {"gather": TABLES, "scatter_add": TABLES}
SIZES |= dict.fromkeys(("read", "update"), (*TABLES, *(2**k for k in range(25, 28))))
PRODUCT = (4096, 64, 256)  # the product of Hyperplane hashing: rows, features, bits of all hashes
FEW_HEADS = 2  # beyond 16384
ROW = 256


# --- Limits -------------------------------------------------------------------------------------


@cache
def limits():
    """{kind: {bytes: nanoseconds a row}} and {"products": {what: Gflop/s}}."""
    with tempfile.TemporaryDirectory() as folder:
        library = pathlib.Path(folder) / "limits.so"
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        options = ["-std=c++17", "-O3", "-march=native", "-Wno-psabi", "-shared", "-fPIC"]
        subprocess.run([*compiler, *options, "-o", library, SOURCE], check=True)
        functions = ctypes.CDLL(str(library))
    measured = {}
    for kind, sizes in SIZES.items():
        function = getattr(functions, kind)
        function.restype, function.argtypes = ctypes.c_double, [ctypes.c_size_t]
        measured[kind] = {str(size): function(size) for size in sizes}
    return measured


def products(stopwatch):
    """Gflop/s of torch's product, and of hashing with as many hyperplanes."""
    rows, features, bits = PRODUCT
    planes = Hyperplane(features, bits // N_HASHES, N_HASHES, seed=0)
    calls = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, y = torch.ones(rows, features, dtype=dtype), torch.ones(features, bits, dtype=dtype)
        name = str(dtype).removeprefix("torch.")
        calls[name] = lambda x=x, y=y: x @ y
        calls[f"{name}, hashing"] = lambda x=x: planes.hash(x)
    flops = 2 * rows * features * bits
    return {name: flops / seconds / 1e9 for name, seconds in stopwatch.in_turns(calls).items()}


# --- Bounds -------------------------------------------------------------------------------------


def at(limits, kind, size):
    """At the next larger size that was measured, or the largest."""
    sizes = [x for x in SIZES[kind] if x >= size] or SIZES[kind][-1:]
    return limits[kind][str(sizes[0])]


@dataclass(frozen=True)
class Kernel:
    """What the formula above needs to know of one."""

    n_bits: int
    n_probes: int = 1
    steps: int = 1  # tables that are filled and read
    reads: int = 1
    updates: int = 1
    code_bytes: int = 2  # of both sides, a row and hash, in all steps

    def table(self, n):
        return ROW * min(2**self.n_bits, n)

    def rows(self, n, limits, group=1):
        tables = group * self.table(n)
        both = at(limits, "gather", tables) + at(limits, "scatter_add", tables)
        return self.steps * self.n_probes * both

    def bound(self, n, heads, limits):
        def stream(size):
            read, update = at(limits, "read", size), at(limits, "update", size)
            return self.reads * read + self.updates * update

        def of(group):
            again = (N_HASHES / group - 1) * stream(ROW * n)
            return self.rows(n, limits, group) + (again + stream(heads * ROW * n)) / N_HASHES

        groups = [g for g in (1, 2, 4, 8, 16, 32) if g * self.table(n) <= TABLES[-1]]
        codes = self.code_bytes * at(limits, "read", heads * self.code_bytes * N_HASHES * n) / ROW
        return codes + min(map(of, groups))


# A soft code, its selected bits and margins take 12 bytes a row and hash with 4 probes; backward,
# their gradients 8 more. There the values, then the gradients are added to tables; reading are the
# queries with the gradients, then the keys with the values, whose own gradients are summed.
KERNELS = {
    "sum, 8 bits": Kernel(8),
    "sum, 12 bits": Kernel(12, code_bytes=4),
    "soft codes, forward": Kernel(12, 4, code_bytes=24),
    "soft codes, forward + backward": Kernel(
        12, 4, steps=3, reads=5, updates=2, code_bytes=2 * 24 + 16
    ),
}


def calls_of(n, heads):
    """A call without arguments for each kernel, on uniform codes."""
    generator = torch.Generator().manual_seed(0)
    tensors = inputs(n, requires_grad=True, heads=heads)
    values, out = tensors[2].detach(), torch.empty(1, heads, n, tensors[2].shape[-1])
    calls = {}
    for name, kernel in KERNELS.items():
        if name.startswith("soft"):
            calls[name] = of_pass(soft, BACKWARD if name.endswith(BACKWARD) else FORWARD, tensors)
            continue
        n_buckets, dtype = 2**kernel.n_bits, torch.uint8 if kernel.n_bits <= 8 else torch.uint16
        shape = (1, heads, n, N_HASHES)
        codes = [torch.randint(n_buckets, shape, generator=generator).to(dtype) for _ in range(2)]
        rest = n_buckets, 0, None, 1 / N_HASHES, out
        calls[name] = lambda codes=codes, rest=rest: _C.bucket_sum(
            *codes, values, *rest, torch.get_num_threads()
        )
    return calls


def measure(lengths, stopwatch):
    measured = limits() | {"products": products(stopwatch)}
    times = {}
    for n in lengths:
        heads = HEADS if n <= 16384 else FEW_HEADS
        seconds = stopwatch.in_turns(calls_of(n, heads))
        times[n] = {
            name: {
                "ns": s / (heads * n * N_HASHES) * 1e9,
                "bound": KERNELS[name].bound(n, heads, measured),
            }
            for name, s in seconds.items()
        }
    return {"limits": measured, "times": times}


def tables(results):
    measured = results["limits"]
    yield table(
        "Limits of one core: nanoseconds for a row of 256 bytes",
        ["KB", *SIZES],
        [
            [
                size // 1024,
                *(figure(measured[k][str(size)]) if size in SIZES[k] else "" for k in SIZES),
            ]
            for size in SIZES["read"]
        ],
    )
    gflops = ", ".join(f"{name} {figure(x)}" for name, x in measured["products"].items())
    yield f"Products of {PRODUCT[0]} x {PRODUCT[1]} by {PRODUCT[2]} hash bits, Gflop/s: {gflops}\n"
    times = results["times"]
    rows = [[n, *(figure(of[name]["ns"]) for name in KERNELS)] for n, of in times.items()]
    yield table("Nanoseconds a row and hash", ["n", *KERNELS], rows)
    over = {n: over_bounds(n, results) for n in times}
    rows = [[n, *(f"{x:.2f}" for x in of.values())] for n, of in over.items()]
    yield table("Time over the bound", ["n", *GOALS], rows)


BARE = "sum, 12 bits"
GOALS = dict(zip(KERNELS, (1.3, 1.6, 1.6, 1.8), strict=True)) | {f"{BARE}, over bare rows": 2.3}


def over_bounds(n, results):
    """{what GOALS names: time over the bound} at a length that was measured."""
    times = results["times"][n]
    over = {name: times[name]["ns"] / times[name]["bound"] for name in KERNELS}
    bare = times[BARE]["ns"] / KERNELS[BARE].rows(int(n), results["limits"])
    return over | {f"{BARE}, over bare rows": bare}


def goals(results):
    for n in results["times"]:
        for name, over in over_bounds(n, results).items():
            yield f"{name} at {n}: time over bound", over, "at most", GOALS[name]


SECTIONS = {"bounds": Section(measure, tables, LENGTHS, QUICK_LENGTHS, goals=goals)}
