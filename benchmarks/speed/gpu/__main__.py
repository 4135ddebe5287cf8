"""YOSO attention on a GPU against flash attention: time and memory, forward and forward + backward.

    python -m benchmarks.speed.gpu [--quick] [--seconds 200] [--parts hard,soft] [--more]
    python -m benchmarks.speed.gpu --table benchmarks/results/gpu.json

All sides in one process, interleaved, by CUDA events after a warm-up, medians; inputs rotate among
several sets, so that a result does not come from the cache, and every call has fresh hash
functions, as in training. `scaled_dot_product_attention` is taken with its flash kernel (the ratio
is its time over ours) and, beside it, with the one that torch itself picks. The JSON has the
settings and every sample, and is written after each row: what ran before the seconds were over, or
before an error, is there. --more adds parts to it. --table prints it as the README's table, which
needs no GPU and no torch.
"""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from functools import partial

from benchmarks import RESULTS
from benchmarks.speed.gpu.table import HEADER, PASSES, line, table

BATCH, HEADS, D = 8, 12, 64
LENGTHS = 1024, 4096, 16384, 65536
OURS = {
    "hard": {"estimator": "sampled", "n_bits": 8, "n_hashes": 32, "expectation": "never"},
    "soft": {"estimator": "soft", "n_bits": 12, "n_hashes": 32, "n_probes": 4},
}
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
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(self.result, indent=1) + "\n")
        os.replace(beside, self.path)

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


def inputs(run, n, sets, dtype=None):
    import torch

    generator = torch.Generator(run.device).manual_seed(n)
    shape = run.batch, HEADS, n, D
    options = {"generator": generator, "device": run.device, "dtype": dtype or torch.bfloat16}
    return [[torch.randn(shape, **options) for _ in range(4)] for _ in range(sets)]


def call(function, arrays, backward):
    import torch

    query, key, value, grad = arrays
    if not backward:
        with torch.no_grad():
            return function(query, key, value)
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    return torch.autograd.grad(function(*leaves), leaves, grad)


def ours(kind, causal, seed=None):
    from lshkit.attention import Estimator, yoso_attention

    estimator = Estimator.from_dict(OURS[kind])
    return partial(yoso_attention, is_causal=causal, estimator=estimator, seed=seed)


def theirs(causal):
    from torch.nn.functional import scaled_dot_product_attention

    return lambda query, key, value: scaled_dot_product_attention(
        query, key, value, is_causal=causal
    )


def backend(name):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return (
        sdpa_kernel([SDPBackend.FLASH_ATTENTION]) if name == "flash" else contextlib.nullcontext()
    )


def timed(function, *arguments):
    import torch

    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function(*arguments)
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def measure(run, functions, sets, backward, seconds):
    """Milliseconds of each function, its samples taken in turn with the others', and its memory.

    A function that raises is left out, and its error noted.
    """
    import torch

    samples, memory = {}, {}
    for name, function in list(functions.items()):
        try:
            with backend(name):
                call(function, sets[0], backward)
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                call(function, sets[-1], backward)
                torch.cuda.synchronize()
            memory[name] = torch.cuda.max_memory_allocated() - before
            samples[name] = []
        except Exception as error:
            run.failed(f"{name}, n={sets[0][0].shape[2]}, {PASSES[backward]}", error)
    end = time.monotonic() + seconds
    for i in range(run.repeats):
        for name in samples:
            arrays = sets[i % len(sets)]
            with backend(name):
                samples[name].append(timed(call, functions[name], arrays, backward))
        if time.monotonic() > end and i >= 2:
            break
    return samples, memory


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
    """Time and memory against flash attention at all lengths."""
    lengths = LENGTHS[:1] if run.quick else (4096, 16384, 65536, 1024)
    todo = [(n, causal) for causal in (False, True) for n in lengths]
    for n, causal in todo:
        if run.left() < 5:
            run.save(stopped_before=[kind, n, causal])
            break
        sets = inputs(run, n, 2 if n > 20000 else 4)
        for backward in (False, True):
            functions = {"flash": theirs(causal), kind: ours(kind, causal)}
            if kind == "hard":
                functions["torch"] = theirs(causal)
            seconds = min(6, max(run.left(), 0) / 6)
            samples, memory = measure(run, functions, sets, backward, seconds)
            times = {name: statistics.median(x) for name, x in samples.items()}
            row = {
                **{"kind": kind, "n": n, "causal": causal, "backward": backward},
                **{"median": times, "milliseconds": samples, "peak_bytes": memory},
                **{"clocks": clocks()},
            }
            if "flash" in times and kind in times:
                row["ratio"] = times["flash"] / times[kind]
            run.add(row)
            print(line(row), flush=True)
        if not causal:
            inside(run, kind, n, sets[0])
        del sets


def inside(run, kind, n, arrays):
    """The memory that one pass keeps, and its kernels."""
    pairs = 2 * run.batch * HEADS * n * OURS[kind]["n_hashes"]  # queries' and keys'
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
    tokens = run.batch * HEADS * found["n"] * OURS[found["kind"]]["n_hashes"]
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
    times = [timed(target.copy_, source) for _ in range(6)][1:]
    del source, target
    n = 256 if run.quick else 8192
    a, b = (torch.randn(n, n, device=run.device, dtype=torch.bfloat16) for _ in range(2))
    products = [timed(torch.matmul, a, b) for _ in range(8)][3:]
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

    run_batch, run.batch = run.batch, 1
    cpu = [x.float().cpu() for x in inputs(run, 200 if run.quick else 700, 1)[0]]
    run.batch = run_batch
    found = {}
    for kind in OURS:
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

    options = OURS["hard"]
    n_bits, n_hashes = options["n_bits"], options["n_hashes"]
    n = 256 if run.quick else 16384
    found = {}

    def median(name, function):
        try:
            function()
            found[name] = statistics.median(timed(function) for _ in range(run.repeats))
            print(f"  {name}: {found[name]:.4f} ms", flush=True)
        except Exception as error:
            run.failed(name, error)
        run.save(pieces=found)

    query, key, value, _ = inputs(run, n, 1)[0]
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
    arguments = parser.parse_args()
    arguments.device = "cuda"
    if arguments.table:
        print(table(json.loads(pathlib.Path(arguments.table).read_text())))
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
            call(ours(kind, False), inputs(run, 1024 if run.quick else 16384, 1)[0], True)
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
            **{"codes": OURS, "gradient": "lower_bound", "quick": run.quick},
        },
    )
    for part in parts:
        if run.left() < 3:
            print(f"no time left for {part}")
            continue
        print(f"\n{part}:", flush=True)
        try:
            if part in OURS:
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
