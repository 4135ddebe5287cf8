"""Kernel density: scikit-learn and lshkit
=======================================

Kernel density in many dimensions: scikit-learn's KernelDensity and LSHKernelDensity, compared.

Real data that ships with scikit-learn: the handwritten digits (64 pixels; shifted copies make more
rows) and patches of its two photographs (8 x 8 pixels in grey, 64 dimensions, or colour, 192). Both
estimators get the same rows and bandwidth, chosen for a median kernel mean of about 1e-3. At the
end there are tables, and a picture of how the densities agree. Needs scikit-learn,
matplotlib, tabulate and tqdm; the photographs also Pillow.
"""

import argparse
import pathlib
import time

try:
    import matplotlib
    import numpy as np
    from matplotlib import pyplot as plt
    from scipy.special import logsumexp
    from sklearn.datasets import load_digits, load_sample_images
    from sklearn.neighbors import KernelDensity
    from tabulate import tabulate
    from tqdm import tqdm
except ImportError as error:
    raise SystemExit(f"{error}: pip install '.[dev]' has what the examples need") from None

from lshkit.kde import LSHKernelDensity

TABLE = {"tablefmt": "github", "disable_numparse": True, "colglobalalign": "right"}


def digits(n: int, rng: np.random.Generator) -> np.ndarray:
    """Digits, shifted by up to a pixel and with a little noise."""
    images = load_digits().images[rng.integers(1797, size=n)]
    shifts = rng.integers(-1, 2, size=(n, 2))
    for shift in np.unique(shifts, axis=0):
        same = (shifts == shift).all(axis=1)
        images[same] = np.roll(images[same], shift, axis=(1, 2))
    return images.reshape(n, 64) + rng.normal(scale=0.5, size=(n, 64))


def patches(n: int, colour: bool, rng: np.random.Generator) -> np.ndarray:
    """Patches of 8 x 8 pixels from scikit-learn's two photographs."""
    rows = []
    for image in load_sample_images().images:
        image = image.astype(np.float64) if colour else image.mean(axis=2, keepdims=True)
        windows = np.lib.stride_tricks.sliding_window_view(image, (8, 8), axis=(0, 1))
        y, x = (rng.integers(size, size=n // 2) for size in windows.shape[:2])
        rows.append(windows[y, x].reshape(n // 2, -1))
    rows = np.concatenate(rows) + rng.uniform(size=(n // 2 * 2, rows[0].shape[1]))
    return rng.permutation(rows)


def bandwidth_for(rows: np.ndarray, queries: np.ndarray, wanted: float) -> float:
    """The bandwidth at which the median over the queries of the mean gaussian kernel is wanted."""
    rows = rows[:20_000].astype(np.float64)
    squares = (queries**2).sum(1)[:, None] + (rows**2).sum(1) - 2 * queries @ rows.T
    low, high = 1e-3, 1e5
    for _ in range(60):
        h = np.sqrt(low * high)
        logs = logsumexp(-np.maximum(squares, 0) / (2 * h**2), axis=1) - np.log(len(rows))
        low, high = (h, high) if np.median(logs) < np.log(wanted) else (low, h)
    return float(high)


def timed(call, repeats: int) -> tuple[np.ndarray, float]:
    best = np.inf
    for _ in range(repeats):
        start = time.perf_counter()
        result = call()
        best = min(best, time.perf_counter() - start)
    return result, best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[1],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--rows", type=int, default=100_000, help="rows of each data set")
    add("--queries", type=int, default=1000, help="rows whose density is asked")
    add("--sklearn-queries", type=int, default=20, help="of them for scikit-learn, which is slow")
    add("--mean", type=float, default=1e-3, help="median kernel mean wanted")
    add("--quick", action="store_true", help="small sizes, to see it run")
    add("--out", type=pathlib.Path, default="kde_vs_sklearn.png", help="the picture")
    args = parser.parse_args()
    if args.quick:
        parser.set_defaults(rows=2000, queries=50, sklearn_queries=5)
        args = parser.parse_args()
    if args.out.suffix != ".png" or not args.out.absolute().parent.is_dir():
        parser.error(f"--out must be a .png file in a folder that exists: {args.out}")
    for name in ("rows", "queries", "sklearn_queries"):
        if (number := getattr(args, name)) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1: {number}")
    if args.sklearn_queries > args.queries:
        most = f"--sklearn-queries must be at most --queries {args.queries}"
        parser.error(f"{most}: {args.sklearn_queries}")
    if not 0 < args.mean < 1:
        parser.error(f"--mean must be between 0 and 1: {args.mean}")
    matplotlib.use("Agg")
    rng = np.random.default_rng(0)
    total = args.rows + args.queries
    sets = {
        "digits, 64": lambda: digits(total, rng),
        "grey patches, 64": lambda: patches(total + 1, False, rng)[:total],
        "colour patches, 192": lambda: patches(total + 1, True, rng)[:total],
    }
    found = {}
    for name, make in sets.items():
        data = make()
        rows, queries = data[: args.rows], data[args.rows :]
        h = bandwidth_for(rows, queries[:200], args.mean)
        densities = {
            "lshkit, brute": LSHKernelDensity(bandwidth=h, algorithm="brute"),
            "lshkit, auto": LSHKernelDensity(bandwidth=h, random_state=0),
            "scikit-learn": KernelDensity(bandwidth=h, rtol=0.1),
        }
        measured, cells = {}, []
        for method, density in tqdm(densities.items(), desc=name):
            theirs = isinstance(density, KernelDensity)
            some, repeats = (queries[: args.sklearn_queries], 1) if theirs else (queries, 3)
            start = time.perf_counter()
            density.fit(rows)
            fit = time.perf_counter() - start
            scores, seconds = timed(lambda d=density, q=some: d.score_samples(q), repeats)
            found[name, method] = scores
            measured[method] = fit, 1e6 * seconds / len(some)
        for method, (fit, each) in measured.items():
            scores = found[name, method]
            off = scores - found[name, "lshkit, brute"][: len(scores)]
            error = np.abs(np.expm1(np.minimum(off, 99))).mean()
            speed_up = f"{measured['scikit-learn'][1] / each:,.0f}"
            errors = f"{error:.2g}" if error < 100 else "> 100", f"{np.abs(off).max():.2g}"
            cells.append((method, f"{fit:.2f}", f"{each:,.1f}", speed_up, *errors))
        header = ["method", "fit, s", "us a query", "speed-up", "error", "nats off"]
        print(f"\n{name} features, bandwidth {h:.3g}; auto: {densities['lshkit, auto'].algorithm_}")
        print(f"\n{tabulate(cells, header, colalign=['left'], **TABLE)}")
    print(
        "\nspeed-up: over scikit-learn with rtol=0.1\n"
        "error: mean relative error of the densities; nats off: largest of a log-density;\n"
        f"both against brute, which is exact. scikit-learn: of {args.sklearn_queries} queries."
    )
    draw(found, list(sets), args.out)
    print(f"\npicture: {args.out}")


def draw(found: dict, names: list, out: pathlib.Path) -> None:
    figure, axes = plt.subplots(
        1, len(names), figsize=(3.2 * len(names), 3.4), layout="constrained"
    )
    for axis, name in zip(np.atleast_1d(axes), names, strict=True):
        exact = found[name, "lshkit, brute"]
        theirs = found[name, "scikit-learn"]
        axis.plot(exact, found[name, "lshkit, auto"], ".", ms=4, alpha=0.5, label="lshkit, auto")
        axis.plot(exact[: len(theirs)], theirs, "x", ms=6, color="black", label="scikit-learn")
        ends = [exact.min(), exact.max()]
        axis.plot(ends, ends, lw=0.8, color="grey", zorder=0)
        axis.set(title=f"{name} features", xlabel="exact log-density")
    np.atleast_1d(axes)[0].set_ylabel("log-density")
    np.atleast_1d(axes)[0].legend(frameon=False)
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    main()

# sphinx_gallery_thumbnail_path = "images/kde_vs_sklearn.png"
