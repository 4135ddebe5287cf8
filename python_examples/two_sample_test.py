"""Two-sample tests
================

Two-sample tests: has a stream of handwritten digits changed?

Reference rows are pictures of the digits 0 to 8. New batches are such pictures too, of which a
growing share is the 9. The maximum mean discrepancy with permutations tells from what share on the
batch differs: exactly, from all pairs of rows, and by sums over hash buckets, which take time
linear in the rows and so can test many more. At the end there are a table of how often an alarm
is raised, and a picture of that beside a null distribution. Needs matplotlib, tabulate and tqdm.
"""

import argparse
import pathlib
import time

try:
    import matplotlib
    import numpy as np
    from matplotlib import pyplot as plt
    from sklearn.datasets import load_digits
    from tabulate import tabulate
    from tqdm import tqdm
except ImportError as error:
    raise SystemExit(f"{error}: pip install '.[dev]' has what the examples need") from None

from lshkit.kde import two_sample_test

SHARES = 0.0, 0.02, 0.05, 0.1, 0.2
TABLE = {"tablefmt": "github", "disable_numparse": True, "colglobalalign": "right"}


def pictures(n: int, share: float, rng: np.random.Generator) -> np.ndarray:
    """Digits shifted by up to a pixel with noise, a share of them the 9."""
    images, labels = load_digits().images, load_digits().target
    known, new = (np.flatnonzero(same) for same in (labels < 9, labels == 9))
    which = rng.choice(known, n)
    count = round(share * n)
    which[:count] = rng.choice(new, count)
    rolled = [np.roll(images[i], rng.integers(-1, 2, size=2), axis=(0, 1)) for i in which]
    return np.array(rolled).reshape(n, 64) + rng.normal(size=(n, 64))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[1],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--rows", type=int, default=1000, help="of both samples of an exact test")
    add("--many", type=int, default=10_000, help="rows of a test by bucket sums")
    add("--batches", type=int, default=20, help="that are tested at each share")
    add("--permutations", type=int, default=199, help="of a test")
    add("--quick", action="store_true", help="small sizes, to see it run")
    add("--out", type=pathlib.Path, default="two_sample_test.png", help="the picture")
    args = parser.parse_args()
    if args.quick:
        parser.set_defaults(rows=200, many=500, batches=2, permutations=39)
        args = parser.parse_args()
    if args.out.suffix != ".png" or not args.out.absolute().parent.is_dir():
        parser.error(f"--out must be a .png file in a folder that exists: {args.out}")
    # With fewer permutations no p-value reaches the level.
    for name, least in (("rows", 2), ("batches", 1), ("permutations", 19)):
        if (number := getattr(args, name)) < least:
            parser.error(f"--{name} must be at least {least}: {number}")
    if args.rows >= args.many:
        parser.error(f"--rows must be below --many {args.many}: {args.rows}")
    matplotlib.use("Agg")
    rng = np.random.default_rng(0)
    cases = {
        f"exact, {args.rows:,} rows": ("brute", args.rows),
        f"bucket sums, {args.rows:,} rows": ("bucket_sum", args.rows),
        f"bucket sums, {args.many:,} rows": ("bucket_sum", args.many),
    }
    pvalues = {name: {share: [] for share in SHARES} for name in cases}
    seconds, last = dict.fromkeys(cases, 0.0), {}
    batches = [(share, seed) for share in SHARES for seed in range(args.batches)]
    for share, seed in tqdm(batches, desc="batches"):
        reference, batch = (pictures(args.many, of, rng) for of in (0.0, share))
        few = rng.permutation(args.many)[: args.rows]
        for name, (algorithm, n) in cases.items():
            rows = (reference, batch) if n == args.many else (reference[few], batch[few])
            options = {"n_permutations": args.permutations, "random_state": seed}
            start = time.perf_counter()
            result = two_sample_test(*rows, algorithm=algorithm, **options)
            seconds[name] += time.perf_counter() - start
            pvalues[name][share].append(result.pvalue)
            last[name, share] = result
    alarms = {
        name: [np.mean(np.array(found[share]) <= 0.05) for share in SHARES]
        for name, found in pvalues.items()
    }
    print(f"\nAlarms at the level 0.05, of {args.batches} batches of each share\n")
    table = [
        (name, *(f"{x:.0%}" for x in found), f"{seconds[name] / len(batches):.2f}")
        for name, found in alarms.items()
    ]
    header = ["share of 9s", *(f"{x:.0%}" for x in SHARES), "s a test"]
    print(tabulate(table, header, colalign=["left"], **TABLE))
    draw(alarms, last, args.batches, args.out)
    print(f"\npicture: {args.out}")


def draw(alarms: dict, last: dict, batches: int, out: pathlib.Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    name = list(alarms)[-1]
    left.hist(last[name, 0.0].null_distribution, 30, color="grey", alpha=0.6, label="permuted")
    for i, share in enumerate(SHARES):
        colour = plt.cm.viridis(i / len(SHARES))
        left.axvline(last[name, share].statistic, color=colour, label=f"{share:.0%} are 9s")
    left.set(title=f"one batch: {name}", yticks=[], xlabel="squared discrepancy")
    left.ticklabel_format(axis="x", style="sci", scilimits=(0, 0))
    left.legend(frameon=False, fontsize=8, loc=(0.62, 0.5))
    for (name, found), style in zip(alarms.items(), ("o-", "s--", "^-"), strict=True):
        right.plot(100 * np.array(SHARES), found, style, label=name, ms=5)
    right.axhline(0.05, color="black", lw=0.8, ls=":", label="level")
    right.set_title(f"alarms, {batches} batches of each share")
    right.set(xlabel="share of 9s, %", ylabel="share of alarms", ylim=(-0.03, 1.03))
    lines = right.get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower right", ncols=4, fontsize=8, frameon=False)
    for axis in (left, right):
        axis.title.set_fontsize(10)
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    main()

# sphinx_gallery_thumbnail_path = "images/two_sample_test.png"
