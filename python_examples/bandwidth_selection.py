"""Bandwidth selection
===================

Bandwidths of a kernel density: Scott's rule, Silverman's rule and leave-one-out likelihood.

Rows are drawn from clusters in 2 to 512 features. For each number of features
`likelihood_curve` scores every bandwidth by the log-density of each row under all other rows, in
one pass over the distances. At the end there are a table with the log-density of rows that no
rule has seen, and a picture of the curves. Needs matplotlib, tabulate and tqdm.
"""

import argparse
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

from lshkit.kde import LikelihoodCurve, LSHKernelDensity, likelihood_curve

RULES = "scott", "silverman", "likelihood"
TABLE = {"tablefmt": "github", "disable_numparse": True, "colglobalalign": "right"}


def clusters(n: int, n_features: int) -> np.ndarray:
    """Rows of 50 gaussian clusters, of standard deviation 0.5 and centres of 1."""
    rng = np.random.default_rng(n_features)
    centres = rng.normal(size=(50, n_features))
    return centres[rng.integers(50, size=n)] + 0.5 * rng.normal(size=(n, n_features))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[1],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--rows", type=int, default=10_000, help="of each number of features")
    add("--quick", action="store_true", help="1,000 rows, two numbers of features")
    add("--out", type=pathlib.Path, default="bandwidth_selection.png", help="the picture")
    args = parser.parse_args()
    if args.quick:
        parser.set_defaults(rows=1000)
        args = parser.parse_args()
    if args.out.suffix != ".png" or not args.out.absolute().parent.is_dir():
        parser.error(f"--out must be a .png file in a folder that exists: {args.out}")
    if args.rows < 2:
        parser.error(f"--rows must be at least 2: {args.rows}")
    numbers = (2, 32) if args.quick else (2, 8, 32, 128, 512)
    matplotlib.use("Agg")
    curves, factors, seconds, table = {}, {}, [], []
    for d in tqdm(numbers, desc="features"):
        rows = clusters(args.rows + 1000, d)
        others, rows = rows[:1000], rows[1000:]
        start = time.perf_counter()
        curve = likelihood_curve(rows, scale="std", random_state=0)
        seconds.append(time.perf_counter() - start)
        scores = {}
        for rule in RULES:
            density = LSHKernelDensity(bandwidth=rule, rtol=0, random_state=0).fit(rows)
            scores[rule] = density.score(others) / len(others)
        curves[d], factors[d] = curve, args.rows ** (-1 / (d + 4))
        means = [f"{scores[rule]:.2f}" for rule in RULES]
        table.append((str(d), f"{factors[d]:.3f}", f"{curve.best:.3f}", *means))
    header = ["features", "by Scott", "best", *RULES]
    print(f"\n{tabulate(table, header, **TABLE)}\n")
    error = max(curve.best_standard_error for curve in curves.values())
    print("by Scott, best: factors of the features' deviations; the best ones have")
    print(f"standard errors of at most {error:.3f}. Then log-densities of 1,000 new rows.")
    print(f"A curve took {min(seconds):.2f} to {max(seconds):.2f} s.")
    draw(curves, factors, args.out)
    print(f"\npicture: {args.out}")


def draw(curves: dict[int, LikelihoodCurve], factors: dict[int, float], out: pathlib.Path) -> None:
    """A curve for each number of features, with the maximum and Scott's factor."""
    n_rows = -(-len(curves) // 3)
    size = {"figsize": (9, 2.8 * n_rows), "layout": "constrained"}
    figure, axes = plt.subplots(n_rows, -(-len(curves) // n_rows), **size)
    axes = axes.ravel()
    for axis in axes[len(curves) :]:
        axis.remove()
    for axis, (d, curve) in zip(axes, curves.items(), strict=False):
        curve.plot(axis)
        axis.axvline(factors[d], color="0.45", ls="--", lw=1, label="Scott's rule")
        axis.axvline(curve.best, color="C1", lw=1, label="maximum")
        # What is near the maximum: far from it the likelihood falls without bound.
        near = np.interp(factors[d], curve.bandwidths, curve.log_likelihood)
        depth = 1.6 * max(curve.best_log_likelihood - near, 0.05 * d)
        low, high = curve.best_log_likelihood - depth, curve.best_log_likelihood + 0.15 * depth
        axis.set(ylim=(low, high), title=f"{d} features", xlabel="factor of the deviations")
        shown = curve.bandwidths[curve.log_likelihood > low]
        axis.set_xlim(0.9 * min(shown[0], factors[d]), 1.1 * max(shown[-1], factors[d]))
        axis.set_xscale("linear")
        axis.set_ylabel("log-likelihood per row" if axis.get_subplotspec().is_first_col() else "")
    lines, names = axes[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=len(names), frameon=False)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main()

# sphinx_gallery_thumbnail_path = "images/bandwidth_selection.png"
