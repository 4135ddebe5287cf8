"""Sketches of streams: rows a second, memory, and how far windows are off.

"speed": a sketch that keeps everything, the exact window, windows of blocks, and a half-life, in
turns on one thread; the smallest time of each. "windows": windows of blocks and exponential
histograms (one for each bucket) against the exact window with the same hash functions, on streams
that stay, drift and come in bursts. Two minutes. `--sections` measures some of it into the same
file, `--quick` at small sizes.
"""

import time

import numpy as np
from tqdm import tqdm

from benchmarks import RESULTS
from benchmarks.baselines.exponential_histogram import ExponentialHistogram
from benchmarks.measurement import figure, table
from benchmarks.sections import parser_of, run
from lshkit.kde import LSHKernelDensity

OUT = RESULTS / "streams.json"
SKETCH = {"kernel": "angular", "n_bits": 8, "n_hashes": 32, "random_state": 0}
BATCH = 65_536
STREAMS = "stationary", "drift", "bursts"
N_QUERIES = 64


def sketch(**options):
    return LSHKernelDensity(algorithm="bucket_sum", **SKETCH, **options)


def speed(window, rounds):
    """Of 64 features."""
    rows = np.random.default_rng(0).standard_normal((BATCH, 64), np.float32)
    densities = {
        "all rows": sketch(),
        "half_life": sketch(half_life=window / 2),
        "exact window": sketch(sliding_window=window),
        "window, error 0.05": sketch(sliding_window=window, sliding_window_error=0.05),
        "window, error 0.01": sketch(sliding_window=window, sliding_window_error=0.01),
    }
    actions = {
        "rows": (len(rows), lambda x: x.partial_fit(rows)),
        "query": (1024, lambda x: x.kernel_mean(rows[:1024])),
        "query_std": (1024, lambda x: x.kernel_mean(rows[:1024], return_std=True)),
        "one_row": (1, lambda x: x.partial_fit(rows[:1])),
    }
    for density in densities.values():
        for _ in range(2 * window // BATCH + 1):  # until rows are forgotten
            density.partial_fit(rows)
    seconds = {action: dict.fromkeys(densities, np.inf) for action in actions}
    for _ in tqdm(range(rounds), desc="speed"):
        for action, (n, call) in actions.items():
            for name, density in densities.items():
                for _ in range(1 if n == BATCH else 2):  # small ones with a warm cache
                    begin = time.perf_counter()
                    call(density)
                    took = (time.perf_counter() - begin) / n
                    seconds[action][name] = min(seconds[action][name], took)
    sketches = {
        name: {
            "rows_per_second": 1 / seconds["rows"][name],
            "microseconds_query": 1e6 * seconds["query"][name],
            "microseconds_query_with_std": 1e6 * seconds["query_std"][name],
            "microseconds_partial_fit_of_one_row": 1e6 * seconds["one_row"][name],
            "bytes": density.extra_memory_,
        }
        for name, density in densities.items()
    }
    return {"window": window, "batch": BATCH, "sketch": SKETCH, "sketches": sketches}


def stream(kind, window, n_rows, batch):
    """Batches of rows of 20 clusters in 16 features, and after each some queries.

    stationary: clusters at random. drift: the clusters move by about their distance in a window.
    bursts: all rows of a 47th of a window are of one cluster.
    """
    rng = np.random.default_rng(0)
    centres, turn = rng.normal(size=(2, 20, 16))
    for first in range(0, n_rows, batch):
        passed, moved = first / window, centres
        which = rng.integers(20, size=batch)
        if kind == "drift":
            moved = np.cos(passed) * centres + np.sin(passed) * turn
        elif kind == "bursts":
            which[:] = 7 * int(47 * passed) % 20
        rows = moved[which] + 0.2 * rng.normal(size=(batch, 16))
        queries = moved[rng.integers(20, size=N_QUERIES)]
        yield rows, queries + 0.2 * rng.normal(size=queries.shape)


def windows(window, batches):
    batch, found = window // batches, {}
    for kind in STREAMS:
        sketches = {
            f"blocks, error {error:g}": sketch(sliding_window=window, sliding_window_error=error)
            for error in (0.1, 0.05, 0.02)
        }
        exact = sketch(sliding_window=window)
        histogram = ExponentialHistogram(SKETCH["n_hashes"], 2 ** SKETCH["n_bits"], window, 0.05)
        histograms = "exponential histograms, error 0.05"
        off, part = {name: [] for name in (*sketches, histograms)}, {name: [] for name in sketches}
        for step, (rows, queries) in enumerate(
            tqdm(stream(kind, window, 3 * window, batch), total=3 * batches, desc=kind)
        ):
            for density in (exact, *sketches.values()):
                density.partial_fit(rows)
            inner = exact._kde_sketch
            histogram.add(inner.codes(rows))
            if step < batches or step % 3:
                continue
            wanted = exact.kernel_mean(queries)
            for name, density in sketches.items():
                mean, error = density.kernel_mean(queries, return_std=True)
                each = density._kde_sketch.of_each_hash(queries)
                of_hashes = each.std(axis=1, ddof=1) / np.sqrt(SKETCH["n_hashes"])
                off[name].append(mean / wanted - 1)
                part[name].append((error**2 - of_hashes**2) / wanted**2)
            at = np.arange(SKETCH["n_hashes"]), inner.codes(queries).astype(int)
            off[histograms].append(histogram.table()[at].mean(axis=1) / window / wanted - 1)
        found[kind] = {"exact": {"bytes": exact.extra_memory_}}
        for name, errors in off.items():
            errors = np.abs(np.concatenate(errors))
            found[kind][name] = {
                "mean": float(errors.mean()),
                "99 %": float(np.quantile(errors, 0.99)),
                "max": float(errors.max()),
                "root mean square": float(np.sqrt(np.mean(errors**2))),
                "bytes": histogram.nbytes,
            }
            if name in sketches:
                stated = float(np.sqrt(np.mean(np.concatenate(part[name]))))
                found[kind][name]["stated, root mean square"] = stated
                found[kind][name]["bytes"] = sketches[name].extra_memory_
    return {"window": window, "sketch": SKETCH, "streams": found}


SECTIONS = {
    "speed": lambda args: speed(*((50_000, 2) if args.quick else (1_000_000, 100))),
    "windows": lambda args: windows(*((12_000, 30) if args.quick else (200_000, 200))),
}


def show(results):
    if r := results.get("speed"):
        rows = [
            [
                name,
                figure(x["rows_per_second"] / 1e6),
                f"{x['bytes'] / 1e6:.2f}",
                figure(x["microseconds_query"]),
                figure(x["microseconds_query_with_std"]),
                figure(x["microseconds_partial_fit_of_one_row"]),
            ]
            for name, x in r["sketches"].items()
        ]
        header = ["sketch", "million rows/s", "MB", "us/query", "with std", "us/call of one row"]
        print(table(f"Windows of {r['window']} rows, one thread", header, rows))
    if r := results.get("windows"):
        for kind, ways in r["streams"].items():
            keys = "mean", "99 %", "max", "root mean square", "stated, root mean square"
            rows = [
                [name, f"{x['bytes'] / 1e6:.2f}", *(f"{x[k]:.4f}" if k in x else "" for k in keys)]
                for name, x in ways.items()
            ]
            header = ["window", "MB", "mean", "99 %", "max", "rms", "rms stated"]
            title = f"Relative difference from the exact window of {r['window']} rows: {kind}"
            print(table(title, header, rows))


def main():
    run(parser_of(__doc__, SECTIONS, OUT).parse_args(), SECTIONS, show)


if __name__ == "__main__":
    main()
