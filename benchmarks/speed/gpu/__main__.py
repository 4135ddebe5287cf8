"""YOSO attention on a GPU against exact attention: time and memory, forward and forward + backward.

    python -m benchmarks.speed.gpu [--quick] [--seconds 200] [--parts hard,soft] [--more]
    python -m benchmarks.speed.gpu --table gpu.json
    python -m benchmarks.speed.gpu --counters counters.log

All sides in one process, interleaved, by CUDA events after a warm-up, medians. The GPU is kept busy
while the host queues a call, of every side, so that no time is the host's. Inputs rotate among
several sets, so that a result does not come from the cache, and every call has fresh hash
functions, as in training. The others are torch's FlashAttention-2 and cuDNN's attention, each asked
for by name, and FlashAttention-3 where its package is installed. Clustered inputs have buckets of
thousands of rows.

The JSON has the settings and every sample, and is written after each row: what ran before the
seconds were over, or before an error, is there. --more adds parts to it. --table prints it, and
--counters what Nsight Compute printed, a line a kernel; both need no GPU and no torch.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time

from benchmarks import RESULTS, write_json
from benchmarks.speed.gpu.sides import (
    BATCH,
    HARD,
    HEADS,
    LENGTHS,
    OURS,
    D,
    call,
    inputs,
    of_kind,
    opponents,
    ours,
)
from benchmarks.speed.gpu.table import HEADER, PASSES, counters, lines, table
from benchmarks.speed.gpu.timing import measure, timed

KINDS = "hard", "soft"
# Of the sum in tables of fp32: two bytes each way, read-modify-write and read, of 64 columns.
BYTES_OF_A_SUM = 768


class Run:
    """The results so far, in memory and in the file."""

    def __init__(self, arguments):
        self.path, self.device = pathlib.Path(arguments.out), arguments.device
        self.end = time.monotonic() + arguments.seconds
        self.quick = arguments.quick
        self.batch = 1 if self.quick else BATCH
        self.repeats = 3 if self.quick else 20
        self.result = {"rows": []}
        if arguments.more and self.path.exists():
            self.result = json.loads(self.path.read_text())

    def left(self):
        return self.end - time.monotonic()

    def save(self, **values):
        self.result.update(values)
        write_json(self.path, self.result)

    def add(self, row):
        self.result["rows"].append(row)
        self.save()

    def failed(self, what, error):
        """Notes an error; after one of CUDA itself nothing can run any more."""
        message = f"{type(error).__name__}: {str(error).strip()}"[:500]
        self.save(errors=[*self.result.get("errors", []), f"{what}: {message}"])
        print(f"{what}: {message}", flush=True)
        if "CUDA error" in message or type(error).__name__ == "AcceleratorError":
            sys.exit(1)


def clocks():
    """MHz of the multiprocessors and the memory, watts and degrees, as nvidia-smi has them now."""
    query = "clocks.sm,clocks.max.sm,clocks.mem,power.draw,temperature.gpu"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"],
            **{"capture_output": True, "text": True, "timeout": 10},
        )
        return dict(
            zip(query.split(","), done.stdout.strip().splitlines()[0].split(", "), strict=0)
        )
    except (OSError, IndexError, subprocess.SubprocessError):
        return {}


def saved_bytes(function, arrays):
    """What a forward pass keeps for backward beyond inputs and output, a token and hash."""
    import torch

    leaves = [x.detach().requires_grad_() for x in arrays[:3]]
    call(function, arrays, True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = function(*leaves)
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before - out.numel() * out.element_size()


def kernels(function, arrays, backward):
    """Each kernel of one pass: how many times, and milliseconds in all."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    for _ in range(2):  # the first starts the profiler itself
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            call(function, arrays, backward)
            torch.cuda.synchronize()
    events = [e for e in profiler.key_averages() if e.device_time_total]
    events.sort(key=lambda e: -e.device_time_total)
    return [
        {"kernel": e.key, "calls": e.count, "milliseconds": e.device_time_total / 1e3}
        for e in events
    ]


# ---------------------------------------------------------------- parts


def compare(run, kind):
    """Time and memory against the others at all lengths."""
    lengths = LENGTHS[:1] if run.quick else (4096, 16384, 65536, 1024)
    for n, causal in [(n, causal) for causal in (False, True) for n in lengths]:
        if run.left() < 5:
            run.save(stopped_before=[kind, n, causal])
            break
        count = 2 if n > 20000 else 4
        sets = {False: inputs(run.batch, n, count, run.device)}
        for backward in (False, True):
            names = [name for name in of_kind(kind, backward) if name == kind or not causal]
            if any(OURS[name][1] for name in names) and True not in sets:
                sets[True] = inputs(run.batch, n, count, run.device, clustered=True)
            functions = {name: (f, sets[False]) for name, f in opponents(causal).items()}
            functions |= {name: (ours(name, causal), sets[OURS[name][1]]) for name in names}
            seconds = min(6, max(run.left(), 0) / 6)
            sides = measure(run, functions, backward, seconds)
            row = {
                **{"n": n, "causal": causal, "backward": backward},
                "milliseconds": {name: side.samples for name, side in sides.items()},
                "peak_bytes": {name: side.memory for name, side in sides.items()},
                **{"late": {name: side.late for name, side in sides.items() if side.late}},
                **{"clocks": clocks()},
            }
            run.add(row)
            print(*lines(row), sep="\n", flush=True)
        if not causal:
            inside(run, kind, n, sets[False][0])
        del sets


def inside(run, kind, n, arrays):
    """The memory that one pass keeps, and its kernels."""
    pairs = 2 * run.batch * HEADS * n * OURS[kind][0]["n_hashes"]  # queries' and keys'
    function = ours(kind, False)
    found = {"kind": kind, "n": n, "passes": {}}
    try:
        found["saved_bytes"] = saved_bytes(function, arrays) / pairs
        for backward in (False, True):
            found["passes"][PASSES[backward]] = kernels(function, arrays, backward)
    except Exception as error:
        run.failed(f"kernels of {kind}, n={n}", error)
    if "saved_bytes" in found:
        run.save(kernels=[*run.result.get("kernels", []), found])
        print_kernels(run, found)


def print_kernels(run, found):
    tokens = run.batch * HEADS * found["n"] * OURS[found["kind"]][0]["n_hashes"]
    bytes_a_token = found["saved_bytes"]
    print(f"  {found['kind']}, n={found['n']}: {bytes_a_token:.2f} bytes saved a token and hash")
    for name, passes in found["passes"].items():
        print(f"  {name}:")
        for kernel in passes[:14]:
            took = kernel["milliseconds"]
            print(
                f"    {took:9.3f} ms {kernel['calls']:4d} x {took * 1e6 / tokens:8.4f} "
                f"ns a token and hash: {kernel['kernel'][:70]}"
            )
            if "sum" in kernel["kernel"] and "lshkit" in kernel["kernel"]:
                rate = tokens * BYTES_OF_A_SUM / took / 1e9
                kernel["tb_per_s_of_768_bytes"] = rate
                print(f"              {rate:.1f} TB/s of {BYTES_OF_A_SUM} bytes a token and hash")
    run.save()


def ceilings(run):
    """What the device reaches: a copy and a matrix product."""
    import torch

    size = 2**20 if run.quick else 2**31
    source = torch.randint(0, 255, (size,), device=run.device, dtype=torch.uint8)
    target = torch.empty_like(source)
    times = [timed(target.copy_, source)[0] for _ in range(6)][1:]
    del source, target
    n = 256 if run.quick else 8192
    a, b = (torch.randn(n, n, device=run.device, dtype=torch.bfloat16) for _ in range(2))
    products = [timed(torch.matmul, a, b)[0] for _ in range(8)][3:]
    run.save(
        copy_tb_per_s=2 * size / statistics.median(times) / 1e9,
        bf16_tflops=2 * n**3 / statistics.median(products) / 1e9,
        clocks=clocks(),
    )
    print(
        f"copy {run.result['copy_tb_per_s']:.2f} TB/s, bf16 product "
        f"{run.result['bf16_tflops']:.0f} TFLOP/s, {run.result['clocks']}",
        flush=True,
    )


def errors(run):
    """Of output and gradients, relative to lshkit's own on the CPU in float32."""
    import torch

    found = {}
    for kind, (_, clustered) in OURS.items():
        # The clusters' buckets are cut into parts from some hundred rows on.
        n = (200 if run.quick else 700) * (3 if clustered else 1)
        cpu = [x.float().cpu() for x in inputs(1, n, 1, run.device, clustered)[0]]
        for causal in (False, True):
            try:
                function = ours(kind, causal, seed=1)
                wanted = [call(function, cpu, False), *call(function, cpu, True)]
                for dtype in (torch.float32, torch.bfloat16):
                    arrays = [x.to(run.device, dtype) for x in cpu]
                    got = [call(function, arrays, False), *call(function, arrays, True)]
                    found[f"{kind}{', causal' * causal}, {str(dtype)[6:]}"] = [
                        ((a.cpu().double() - b.double()).norm() / b.double().norm()).item()
                        for a, b in zip(got, wanted, strict=True)
                    ]
            except Exception as error:
                run.failed(f"error of {kind}, causal={causal}", error)
    run.save(relative_errors=found)
    print("relative error of output, dQ, dK, dV against float32 on the CPU:")
    for name, numbers in found.items():
        print(f"  {name}: " + ", ".join(f"{x:.1e}" for x in numbers), flush=True)


def pieces(run):
    """Hashing alone, a decoding step, a kept table."""
    import torch

    from lshkit import torch_ops
    from lshkit.attention import Estimator, YosoState
    from lshkit.buckets import BucketTable

    options = HARD
    n_bits, n_hashes = options["n_bits"], options["n_hashes"]
    n = 256 if run.quick else 16384
    found = {}

    def median(name, function):
        try:
            function()
            found[name] = statistics.median(timed(function)[0] for _ in range(run.repeats))
            print(f"  {name}: {found[name]:.4f} ms", flush=True)
        except Exception as error:
            run.failed(name, error)
        run.save(pieces=found)

    query, key, value, _ = inputs(run.batch, n, 1, run.device)[0]
    planes = torch_ops.hash_parameters(torch.tensor(0), HEADS, D, n_bits, n_hashes, 1)
    planes = planes.to(run.device)
    with torch.no_grad():
        median(f"hash, n={n}", lambda: torch_ops.hash(query, planes, 1, n_bits, n_hashes))
        step = [x[:, :, :1].contiguous() for x in (query, key, value)]
        try:
            own = {"estimator": Estimator.from_dict(options), "device": run.device, "seed": 0}
            state = YosoState(run.batch, HEADS, D, dtype=torch.bfloat16, **own)
            median(f"prefill, n={n}", lambda: state.prefill(query, key, value))
            median("decoding step", lambda: state.step(*step))
        except Exception as error:
            run.failed("decoding", error)
        try:
            table = BucketTable(n_hashes, 2**n_bits, D, device=run.device)
            codes = torch_ops.hash(query[:1, :1], planes[:1], 1, n_bits, n_hashes)[0, 0]
            rows = value[0, 0].float()
            median(f"BucketTable.add, {n} rows", lambda: table.add(codes, rows))
            median(f"BucketTable.query, {n} rows", lambda: table.query(codes))
        except Exception as error:
            run.failed("BucketTable", error)


PARTS = {
    "ceilings": ceilings,
    "errors": errors,
    "hard": lambda run: compare(run, "hard"),
    "pieces": pieces,
    "soft": lambda run: compare(run, "soft"),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one short length, few samples")
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--out", default=RESULTS / "gpu.json")
    parser.add_argument("--parts", default=",".join(PARTS), help="of %(default)s")
    parser.add_argument("--more", action="store_true", help="add to what --out has")
    parser.add_argument("--once", metavar="CODES", help="one pass of hard,soft for a profiler")
    parser.add_argument("--table", metavar="JSON", help="print the table of these results, no more")
    parser.add_argument("--counters", metavar="LOG", help="print a line a kernel of this, no more")
    arguments = parser.parse_args()
    arguments.device = "cuda"
    if arguments.table:
        print(table(json.loads(pathlib.Path(arguments.table).read_text())))
        return
    if arguments.counters:
        print(counters(pathlib.Path(arguments.counters).read_text(errors="replace")))
        return
    parts = arguments.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: unknown {', '.join(sorted(unknown))}")
    import torch

    import lshkit
    from lshkit import _C

    if not torch.cuda.is_available() or not _C.with_cuda:
        sys.exit("benchmarks.speed.gpu needs a GPU and a build with CUDA kernels")
    run = Run(arguments)
    if arguments.once:
        for kind in arguments.once.split(","):
            n = 1024 if run.quick else 16384
            call(ours(kind, False), inputs(run.batch, n, 1, run.device)[0], True)
        torch.cuda.synchronize()
        return
    properties = torch.cuda.get_device_properties(0)
    run.save(
        device=torch.cuda.get_device_name(),
        capability=torch.cuda.get_device_capability(),
        multiprocessors=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        torch=torch.__version__,
        cuda=torch.version.cuda,
        lshkit=lshkit.__version__,
        architectures=_C.cuda_architectures(),
        settings={
            **{"batch": run.batch, "heads": HEADS, "d": D, "dtype": "bfloat16"},
            "codes": {name: options for name, (options, _) in OURS.items()},
            **{"gradient": "lower_bound", "quick": run.quick},
        },
    )
    for part in parts:
        if run.left() < 3:
            print(f"no time left for {part}")
            continue
        print(f"\n{part}:", flush=True)
        try:
            if part in KINDS:
                print(HEADER)
            PARTS[part](run)
        except Exception as error:
            run.failed(part, error)
    run.save(
        seconds_used={
            **run.result.get("seconds_used", {}),
            arguments.parts: round(arguments.seconds - run.left(), 1),
        }
    )
    if run.result["rows"]:
        print(f"\n{table(run.result)}\nsamples in {run.path}")
    if run.result.get("errors"):
        sys.exit(1)


if __name__ == "__main__":
    main()
