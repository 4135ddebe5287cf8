"""Drift on a stream, seen with a density sketch of fixed size that is merged from parts.

A stream of rows changes: first its distribution stays, then it moves slowly, then a new cluster
appears. Four workers each keep an angular bucket-sum sketch of their share of the stream: 64 KB
whatever the number of rows. Merged, the four are bit for bit the sketch of the whole. A second
sketch describes the last rows only (a sliding window); the mean density that each gives to newly
arrived rows tells when the stream has left its past behind. Needs matplotlib and tqdm.
"""

import argparse
import pathlib
import time

try:
    import matplotlib
    import numpy as np
    from matplotlib import pyplot as plt
    from tqdm import tqdm
except ImportError as error:
    raise SystemExit(f"{error}: pip install '.[dev]' has what the examples need") from None

from lshkit.kde import LSHKernelDensity

N_FEATURES, WORKERS = 64, 4


def batches(count: int, size: int, rng: np.random.Generator):
    """Rows around 20 directions that turn from one half on; a new one from three quarters on."""
    centres = rng.normal(size=(20, N_FEATURES))
    turn = rng.normal(size=centres.shape)
    new = 1.5 * rng.normal(size=N_FEATURES)
    for step in range(count):
        share = max(0.0, step / count - 0.5)
        moved = np.cos(2 * share) * centres + np.sin(2 * share) * turn
        rows = moved[rng.integers(20, size=size)]
        if step >= 0.75 * count:
            rows[: size // 20] = new
        yield (rows + 0.4 * rng.normal(size=rows.shape)).astype(np.float32)


def sketch(**options) -> LSHKernelDensity:
    # The same seed everywhere: sketches merge when their hash functions are equal.
    return LSHKernelDensity(
        "angular", algorithm="bucket_sum", n_bits=8, n_hashes=32, random_state=0, **options
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--batch-rows", type=int, default=5000)
    parser.add_argument("--window", type=int, default=50_000, help="rows the second sketch keeps")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see it run")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("streaming_density.png"))
    args = parser.parse_args()
    if args.quick:
        args.batches, args.batch_rows, args.window = 24, 200, 1000
    matplotlib.use("Agg")
    rng = np.random.default_rng(0)
    workers = [sketch() for _ in range(WORKERS)]
    recent, whole, history = sketch(sliding_window=args.window), sketch(), []
    seconds, reference = 0.0, None
    stream = batches(args.batches, args.batch_rows, rng)
    for step, rows in enumerate(tqdm(stream, total=args.batches, desc="stream")):
        if step == args.batches // 4:  # what is normal has been seen
            reference = sketch()
            for worker in workers:
                reference = merge(reference, worker)
        if reference is not None:
            probe = rows[:500]
            past, last = reference.kernel_mean(probe), recent.kernel_mean(probe)
            history.append((step * args.batch_rows, past.mean(), last.mean()))
        start = time.perf_counter()
        workers[step % WORKERS].partial_fit(rows)
        seconds += time.perf_counter() - start
        recent.partial_fit(rows)
        whole.partial_fit(rows)
    merged = workers[0]
    for worker in workers[1:]:
        merged.merge(worker)
    same = np.array_equal(merged.kernel_mean(rows), whole.kernel_mean(rows))
    total = args.batches * args.batch_rows
    at, past, last = np.array(history).T
    level = past[: max(2, len(past) // 4)]
    threshold = level.mean() - 6 * level.std()
    below = np.flatnonzero(past < threshold)
    alarm = f"{at[below[0]]:,.0f}" if len(below) else "none"
    size = merged.extra_memory_
    print("\n| | |\n|---|---|")
    print(f"| rows streamed | {total:,} of {N_FEATURES} features |")
    print(f"| rows a second into a sketch | {total / seconds:,.0f} |")
    print(f"| memory of a sketch | {size / 1024:,.0f} KB (the rows: {total * 256 / 1e6:,.0f} MB) |")
    print(f"| memory of the one with a sliding window | {recent.extra_memory_ / 1024:,.0f} KB |")
    print(f"| {WORKERS} sketches merged = one sketch, bit for bit | {same} |")
    print(f"| drift begins at row | {total // 2:,} |")
    print(f"| alarm at row | {alarm} |")
    figure, axis = plt.subplots(figsize=(8, 4), layout="constrained")
    axis.plot(at, past, label="under the first quarter of the stream")
    axis.plot(at, last, label=f"under the last {args.window:,} rows")
    axis.axhline(threshold, color="grey", lw=0.8, ls="--", label="alarm")
    axis.axvline(total / 2, color="black", lw=0.8, ls=":")
    axis.annotate("drift begins", (total / 2, past.min()), (4, -4), **OFFSET)
    axis.axvline(0.75 * total, color="black", lw=0.8, ls=":")
    axis.annotate("new cluster", (0.75 * total, past.min()), (4, -4), **OFFSET)
    axis.set(xlabel="rows streamed", ylabel="mean kernel of arriving rows", yscale="log")
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axis.legend(frameon=False)
    figure.savefig(args.out, dpi=120)
    print(f"\npicture: {args.out}")


OFFSET = {"textcoords": "offset points", "fontsize": 9}


def merge(into: LSHKernelDensity, other: LSHKernelDensity) -> LSHKernelDensity:
    """other's rows added to into, which may be without any."""
    if hasattr(into, "n_samples_seen_"):
        return into.merge(other)
    import copy

    return copy.deepcopy(other)


if __name__ == "__main__":
    main()
