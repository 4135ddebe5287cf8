"""What lshkit.kde is meant to reach, measured directly: against scikit-learn, small calls, kernels
that end, and a stream."""

import json
import os
import subprocess
import sys
import time

import numpy as np
from sklearn.neighbors import KernelDensity
from sklearn.utils.validation import validate_data

from benchmarks.density.kde import methods as ways
from benchmarks.density.kde.data import bandwidth_for, digits, made, tasks
from benchmarks.measurement import CPUS, best_in_turns, on_cpus, pin_to_one_cpu, status_bytes
from lshkit.kde import LSHKernelDensity

THEIR_QUERIES, BATCHES = 8, (1024, 256, 1)
STREAM = {"d": 64, "n_bits": 8, "n_hashes": 32, "threads": 2, "block": 2**16}


def against_sklearn(n, n_queries, stopwatch):
    """Seconds a query of both, and how far apart they are: exactly, and at rtol 0.1."""
    rows, _, queries = made(digits, n, n_queries // 2)
    few = queries[:THEIR_QUERIES]
    results = {}
    for algorithm, rtol, wanted in (
        ("brute", 0.0, 1e-3),
        ("auto", 0.1, 1e-3),
        ("auto", 0.1, 1e-4),
    ):
        h = bandwidth_for("gaussian", rows, queries, wanted)
        ours = LSHKernelDensity(bandwidth=h, algorithm=algorithm, rtol=rtol, random_state=0)
        ours.fit(rows)
        theirs = KernelDensity(bandwidth=h, rtol=rtol).fit(rows)
        exact = LSHKernelDensity(bandwidth=h, algorithm="brute").fit(rows)
        exact = exact.score_samples(queries.astype(np.float64))
        got = ours.score_samples(queries)
        found = {
            "sklearn_difference": float(
                np.abs(theirs.score_samples(few) - exact[:THEIR_QUERIES]).max()
            ),
            "largest_difference": float(np.abs(got.astype(np.float64) - exact).max()),
            "mean_relative_error": float(np.abs(np.expm1(got - exact)).mean()),
            "algorithm": ours.algorithm_,
            "bandwidth": h,
        }
        batches = {min(size, len(queries)) for size in BATCHES}
        calls = {
            str(size): (lambda q=queries[:size], d=ours: d.score_samples(q)) for size in batches
        }
        calls["scikit-learn"] = lambda d=theirs: d.score_samples(few)
        seconds = stopwatch.in_turns(calls)
        found["scikit-learn"] = seconds.pop("scikit-learn") / len(few)
        found["lshkit"] = {size: s / int(size) for size, s in seconds.items()}
        results[f"{algorithm}, {wanted:g}"] = found
    return results


def small_calls(n, n_queries, seconds):
    """Seconds of auto for one query and for 256, where few rows are enough.

    Beside it what scikit-learn's validation of the one row takes, and two plain NumPy samples: the
    smallest whose error is below what is wanted, and the smallest whose error is ours, both on the
    validation queries. The query alone is the test's densest: it reads the first sample.
    """
    task = next(tasks(digits, n, n_queries, (1e-2,)))
    ours = task.ours("auto", rtol=0.1)
    plain, error = ways.Plain(task), ways.validated(ours.kernel_mean, task)
    smallest, as_exact = ways.permuted(plain, task), ways.permuted(plain, task, error)
    densest = int(np.argmax(task.exact_test))
    alone, batch = task.test[densest : densest + 1], task.test[:256]
    calls = {
        "validate_data": lambda: validate_data(
            ours, alone, reset=False, order="C", dtype=[np.float64, np.float32]
        ),
        "lshkit, one query": lambda: ours.score_samples(alone),
        "lshkit, batch": lambda: ours.score_samples(batch),
        "NumPy, smallest sample, batch": lambda: smallest.estimate(batch),
        "NumPy, sample of the same error, batch": lambda: as_exact.estimate(batch),
    }
    return {
        "algorithm": ours.algorithm_,
        "settings": ours.report_["methods"][ours.algorithm_],
        "error": error,
        "numpy_settings": {"smallest": smallest.settings, "same error": as_exact.settings},
        "batch": len(batch),
        "seconds": best_in_turns(calls, seconds),
    }


def compact_kernels(n, seconds):
    """Seconds of `brute` for 256 queries: rows of no pair at the edge, and rows of many."""
    rng = np.random.default_rng(0)
    results = {}
    for name, rows, bandwidths in (
        ("normal, 64 features", rng.standard_normal((n, 64)), {"": 9.0}),
        (
            "0 and 1, 64 features",
            rng.integers(0, 2, (n, 64)).astype(float),
            {"": np.sqrt(32.5), ", edge": np.sqrt(32)},
        ),
        (
            "0 to 4, 3 features",
            rng.integers(0, 5, (n, 3)).astype(float),
            {"": np.sqrt(3.5), ", edge": 2.0},
        ),
    ):
        calls = {}
        for kernel in ("gaussian", "tophat", "epanechnikov"):
            for where, h in bandwidths.items():
                density = LSHKernelDensity(kernel, float(h), algorithm="brute").fit(rows)
                calls[kernel + where] = lambda d=density, q=rows[:256]: d.score_samples(q)
        results[name] = {"seconds": best_in_turns(calls, seconds)}
        if ", edge" in bandwidths:
            squares = ((rows[:64, None] - rows[: 2**12]) ** 2).sum(-1)
            on_it = squares == np.rint(bandwidths[", edge"] ** 2)
            results[name]["share_at_the_edge"] = float(on_it.mean())
    return results


def stream(n):
    """Rows a second that a sketch takes in, and how the process grows: called in its own process.

    Rows are made block by block, outside the time.
    """
    rng = np.random.default_rng(0)
    sketch = LSHKernelDensity(
        "angular",
        algorithm="bucket_sum",
        n_bits=STREAM["n_bits"],
        n_hashes=STREAM["n_hashes"],
        random_state=0,
        n_jobs=STREAM["threads"],
    )
    seconds, best, warm = 0.0, np.inf, None
    for first in range(0, n, STREAM["block"]):
        shape = min(STREAM["block"], n - first), STREAM["d"]
        rows = rng.standard_normal(shape, dtype=np.float32)
        begin = time.perf_counter()
        sketch.partial_fit(rows)
        took = time.perf_counter() - begin
        seconds, best = seconds + took, min(best, took / shape[0])
        if warm is None and (first >= n // 10 or first + shape[0] >= n):
            warm, bytes_then = status_bytes("VmHWM"), sketch.extra_memory_
    return {
        "rows": int(sketch.n_samples_seen_),
        "rows_per_second": n / seconds,
        "rows_per_second_of_the_fastest_block": 1 / best,
        "peak_bytes_after_a_tenth": warm,
        "peak_bytes_at_the_end": status_bytes("VmHWM"),
        "sketch_bytes_after_a_tenth": bytes_then,
        "sketch_bytes": sketch.extra_memory_,
        **STREAM,
    }


def stream_alone(n):
    """`stream` in a process of its own, which may use two cores."""
    on_cpus(CPUS)
    try:
        environment = os.environ | {"OMP_NUM_THREADS": str(STREAM["threads"])}
        command = [sys.executable, "-m", "benchmarks.density.kde.goals", str(n)]
        done = subprocess.run(
            command, env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
    finally:
        pin_to_one_cpu()
    return json.loads(done.stdout)


if __name__ == "__main__":
    print(json.dumps(stream(int(sys.argv[1]))))
