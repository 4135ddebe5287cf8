"""Drift on a stream
=================

Drift on a stream, seen with density sketches of fixed size that merge and forget.

A stream of rows changes: first its distribution stays, then it moves slowly, then a new cluster
appears. Four workers each keep an angular bucket-sum sketch of their share of the stream: 67 KB
whatever the number of rows. Merged, the four are bit for bit the sketch of the whole. Three other
sketches forget: an exact sliding window, a window of blocks in less memory, and a half-life. The
mean density that each gives to newly arrived rows tells when the stream has left its past behind.
Needs matplotlib, tabulate and tqdm.
"""

import argparse
import copy
import pathlib
import time

try:
    import matplotlib
    import numpy as np
    from matplotlib import pyplot as plt
    from tabulate import tabulate
    from tqdm import tqdm
except ImportError as error:
    raise SystemExit(f"{error}: pip install '.[dev]' has what the examples need") from None

from lshkit.kde import LSHKernelDensity

N_FEATURES, WORKERS = 64, 4
TABLE = {"tablefmt": "github", "disable_numparse": True, "colglobalalign": "right"}


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
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[1],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--batches", type=int, default=400, help="of the stream")
    add("--batch-rows", type=int, default=5000, help="rows of a batch")
    add("--window", type=int, default=200_000, help="rows of the sliding windows")
    add("--error", type=float, default=0.05, help="of the window of blocks")
    add("--quick", action="store_true", help="small sizes, to see it run")
    add("--out", type=pathlib.Path, default="streaming_density.png", help="the picture")
    args = parser.parse_args()
    if args.quick:
        parser.set_defaults(batches=40, batch_rows=1000, window=8000, error=0.1)
        args = parser.parse_args()
    if args.out.suffix != ".png" or not args.out.absolute().parent.is_dir():
        parser.error(f"--out must be a .png file in a folder that exists: {args.out}")
    # Every worker has rows after a quarter of the batches, the new cluster one row of a batch.
    for name, least in (("batches", 16), ("batch_rows", 20), ("window", 3)):
        if (number := getattr(args, name)) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}: {number}")
    before = (args.batches - 1) * args.batch_rows
    if args.window > before:
        parser.error(f"--window must be at most {before}, as the last batch begins: {args.window}")
    if not 0 < args.error <= 0.5:
        parser.error(f"--error must be above 0 and at most 0.5: {args.error}")
    matplotlib.use("Agg")
    rng = np.random.default_rng(0)
    workers = [sketch() for _ in range(WORKERS)]
    half_life = np.log(2) / 2 * args.window  # rows count as much at the same mean age
    names = "exact window", f"window, error {args.error:g}", f"half-life {half_life:,.0f}"
    forgetting = (
        sketch(sliding_window=args.window),
        sketch(sliding_window=args.window, sliding_window_error=args.error),
        sketch(half_life=half_life),
    )
    whole, history, reference = sketch(), [], None
    seconds = np.zeros(1 + len(forgetting))
    stream = batches(args.batches, args.batch_rows, rng)
    for step, rows in enumerate(tqdm(stream, total=args.batches, desc="stream")):
        if step == args.batches // 4:  # what is normal has been seen
            reference = sketch()
            for worker in workers:
                reference = merge(reference, worker)
        if reference is not None:
            means = [x.kernel_mean(rows[:500]).mean() for x in (reference, *forgetting)]
            history.append((step * args.batch_rows, *means))
        for i, density in enumerate((workers[step % WORKERS], *forgetting)):
            start = time.perf_counter()
            density.partial_fit(rows)
            seconds[i] += time.perf_counter() - start
        whole.partial_fit(rows)
    merged = workers[0]
    for worker in workers[1:]:
        merged.merge(worker)
    same = np.array_equal(merged.kernel_mean(rows), whole.kernel_mean(rows))
    total = args.batches * args.batch_rows
    at, past, *recent = np.array(history).T
    level = past[: max(2, len(past) // 4)]
    threshold = level.mean() - 6 * level.std()
    below = np.flatnonzero(past < threshold)
    alarm = f"{at[below[0]]:,.0f}" if len(below) else "none"
    off = np.abs(recent[1] / recent[0] - 1)[at >= args.window]
    table = [
        (name, f"{density.extra_memory_ / 1024:,.0f}", f"{total / took:,.0f}")
        for name, density, took in zip(
            ("all rows", *names), (merged, *forgetting), seconds, strict=True
        )
    ]
    print(f"\n{tabulate(table, ['sketch', 'KB', 'rows/s'], colalign=['left'], **TABLE)}\n")
    facts = {
        "rows streamed": f"{total:,} of {N_FEATURES} features, {total * 256 / 1e6:,.0f} MB",
        f"{WORKERS} sketches merged = one, bit for bit": str(same),
        f"window of error {args.error:g}: most off the exact": f"{off.max():.2%}",
        "drift begins at row": f"{total // 2:,}",
        "alarm at row": alarm,
    }
    print(tabulate(facts.items(), ["what", "found"], colalign=["left"], **TABLE))
    figure, axis = plt.subplots(figsize=(8, 4), layout="constrained")
    axis.plot(at, past, label="first quarter of the stream")
    for name, values, style in zip(names, recent, ("-", "--", "-."), strict=True):
        axis.plot(at, values, style, lw=2 if style == "--" else 1.2, label=name)
    axis.axhline(threshold, color="grey", lw=0.8, ls="--", label="alarm")
    axis.axvline(total / 2, color="black", lw=0.8, ls=":")
    axis.annotate("drift begins", (total / 2, past.min()), (4, -4), **OFFSET)
    axis.axvline(0.75 * total, color="black", lw=0.8, ls=":")
    axis.annotate("new cluster", (0.75 * total, past.min()), (4, -4), **OFFSET)
    axis.set_title("How arriving rows fit what a sketch remembers")
    axis.set(xlabel="rows streamed", ylabel="mean kernel of arriving rows", yscale="log")
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axis.legend(frameon=False, title="under", loc=(0.02, 0.1), fontsize=9, alignment="left")
    figure.savefig(args.out, dpi=120)
    print(f"\npicture: {args.out}")


OFFSET = {"textcoords": "offset points", "fontsize": 9}


def merge(into: LSHKernelDensity, other: LSHKernelDensity) -> LSHKernelDensity:
    """other's rows added to into, which may be without any."""
    if hasattr(into, "n_samples_seen_"):
        return into.merge(other)
    return copy.deepcopy(other)


if __name__ == "__main__":
    main()

# sphinx_gallery_thumbnail_path = "images/streaming_density.png"
