"""YOSO attention on a GPU against flash attention: time and memory, forward and forward + backward.

    python benchmarks/gpu.py [--quick] [--seconds 200] [--out benchmarks/results/gpu.json]

Both sides in one process, interleaved, by CUDA events after a warm-up, medians; inputs rotate among
several sets, so that a result does not come from the cache. Prints a table of ratios (the time of
`scaled_dot_product_attention` over ours) and writes one JSON with the settings and every sample.
Sizes are taken from short to long until the seconds are over. Needs a GPU.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

import lshkit
from lshkit import _C, torch_ops
from lshkit.attention import yoso_attention

BATCH, HEADS, D, N_BITS, N_HASHES = 8, 12, 64, 8, 32
LENGTHS = 1024, 4096, 16384, 65536
GOALS = {4096: (1.5, 1.2), 16384: (6, 4), 65536: (24, 16)}  # forward, forward + backward


def inputs(batch, n, dtype, sets):
    generator = torch.Generator("cuda").manual_seed(n)
    shape = batch, HEADS, n, D
    return [
        [
            torch.randn(shape, generator=generator, device="cuda", dtype=dtype)
            for _ in ("query", "key", "value", "grad")
        ]
        for _ in range(sets)
    ]


def call(function, arrays, backward):
    query, key, value, grad = arrays
    if not backward:
        with torch.no_grad():
            return function(query, key, value)
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    return torch.autograd.grad(function(*leaves), leaves, grad)


def measure(functions, sets, backward, seconds, repeats):
    """Milliseconds of each function, its samples taken in turn with the others'."""
    samples = {name: [] for name in functions}
    memory = {}
    for name, function in functions.items():
        call(function, sets[0], backward)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call(function, sets[-1], backward)
        torch.cuda.synchronize()
        memory[name] = torch.cuda.max_memory_allocated() - before
    end = time.monotonic() + seconds
    for i in range(repeats):
        for name, function in functions.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call(function, sets[i % len(sets)], backward)
            stop.record()
            stop.synchronize()
            samples[name].append(start.elapsed_time(stop))
        if time.monotonic() > end and i >= 2:
            break
    return samples, memory


def parts(arrays):
    """Milliseconds of each kernel of a forward and backward pass, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call(sampled(False), arrays, True)
        torch.cuda.synchronize()
    events = [e for e in profiler.key_averages() if e.device_time_total]
    return {e.key: e.device_time_total / 1e3 for e in events}


def sampled(causal):
    def attend(query, key, value):
        return yoso_attention(
            *(query, key, value, None, causal),
            **{"n_bits": N_BITS, "n_hashes": N_HASHES, "estimator": "sampled", "seed": 0},
        )

    return attend


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one short length, few samples")
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--out", default="benchmarks/results/gpu.json")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or not _C.with_cuda:
        sys.exit("benchmarks/gpu.py needs a GPU and a build with CUDA kernels")
    began = time.monotonic()
    batch = 1 if arguments.quick else BATCH
    lengths = LENGTHS[:1] if arguments.quick else LENGTHS
    result = {
        "device": torch.cuda.get_device_name(),
        "capability": torch.cuda.get_device_capability(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "lshkit": lshkit.__version__,
        "architectures": _C.cuda_architectures(),
        "settings": {
            **{"batch": batch, "heads": HEADS, "d": D, "n_bits": N_BITS, "n_hashes": N_HASHES},
            **{"dtype": "bfloat16", "gradient": "lower_bound", "estimator": "sampled"},
        },
        "rows": [],
    }
    print(
        "| n | causal | pass | flash, ms | lshkit, ms | ratio | wanted | flash, MB | lshkit, MB |"
    )
    print("|---:|---|---|---:|---:|---:|---:|---:|---:|")
    for n in lengths:
        sets = inputs(batch, n, torch.bfloat16, 2 if n > 20000 else 4)
        for causal in (False, True):
            for backward in (False, True):
                left = arguments.seconds - (time.monotonic() - began)
                if left < 5:
                    result["stopped_before"] = n
                    break
                functions = {
                    "flash": lambda q, k, v, causal=causal: scaled_dot_product_attention(
                        q, k, v, is_causal=causal
                    ),
                    "lshkit": sampled(causal),
                }
                samples, memory = measure(
                    functions, sets, backward, min(15, left / 4), 5 if arguments.quick else 30
                )
                flash, ours = (statistics.median(samples[name]) for name in functions)
                row = {
                    **{"n": n, "causal": causal, "backward": backward, "ratio": flash / ours},
                    **{"milliseconds": samples, "peak_bytes": memory},
                }
                result["rows"].append(row)
                goal = GOALS[n][backward] if n in GOALS and not causal else ""
                mb = " | ".join(f"{memory[name] / 1e6:.0f}" for name in functions)
                name = "forward + backward" if backward else "forward"
                print(
                    f"| {n} | {causal} | {name} | {flash:.3f} | {ours:.3f} | {flash / ours:.2f} | "
                    f"{goal} | {mb} |",
                    flush=True,
                )
        if "stopped_before" not in result:
            result.setdefault("kernels", {})[n] = parts(sets[0])
    q = inputs(batch, lengths[0], torch.bfloat16, 1)[0][0]
    planes = torch_ops.hash_parameters(torch.tensor(0), HEADS, D, N_BITS, N_HASHES, 1).cuda()
    times, _ = measure(
        {"hash": lambda q, k, v: torch_ops.hash(q, planes, 1, N_BITS, N_HASHES)},
        [[q] * 4],
        False,
        5,
        20,
    )
    result["hash_milliseconds"] = times["hash"]
    out = pathlib.Path(arguments.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{result['device']}, torch {torch.__version__}; samples in {out}")


if __name__ == "__main__":
    main()
