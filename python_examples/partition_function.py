"""Normalising a softmax over many classes
=======================================

Estimate the normaliser of a softmax over many classes in five ways: error against cost.

Z(q) = sum_j exp(q . w_j) takes a pass over all classes. Its estimates take a part of them:
uniform sampling; one draw from each hash table (HBE); every row that collides, weighted by one over
its inclusion probability (Horvitz-Thompson); and the near classes exactly with a sample of the
others (`log_partition`). Two sets of classes are generated: in clusters, with queries from the same
clusters, so that a query's large terms are close to it; and spread in all directions, where
they are not, and where hashing does not pay. At the end there are a table and a picture.
Needs matplotlib, tabulate and tqdm; one thread.
"""

import argparse
import os
import pathlib
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy loads its BLAS
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

try:
    import matplotlib
    import numpy as np
    from matplotlib import pyplot as plt
    from tabulate import tabulate
    from tqdm import tqdm
except ImportError as error:
    raise SystemExit(f"{error}: pip install '.[dev]' has what the examples need") from None

from lshkit.hashing import FastHadamard  # noqa: E402
from lshkit.sampling import LSHSampler, PartitionSampler, log_partition  # noqa: E402

N_FEATURES = 64
GOOD = 0.01  # a mean relative error to look for
TABLE = {"tablefmt": "github", "disable_numparse": True, "colglobalalign": "right"}
BLOCK = 4096  # classes of which the exact sum keeps all logits of a batch
COLORS = {
    "exact": "#000000",
    "uniform": "#999999",
    "HBE": "#E69F00",
    "Horvitz-Thompson": "#D55E00",
    "near": "#0072B2",  # and so many far
}


# --- Data ---------------------------------------------------------------------------------------


def directions(rng, n):
    x = rng.standard_normal((n, N_FEATURES), np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def clustered(rng, args):
    """Classes around a hundredth as many centers, and queries around the same."""
    centers = directions(rng, max(2, args.classes // 1000))

    def around(n):
        x = centers[rng.integers(len(centers), size=n)] + 0.4 * directions(rng, n)
        return x / np.linalg.norm(x, axis=1, keepdims=True)

    return around(args.classes), args.scale * around(args.queries)


def spread(rng, args):
    return directions(rng, args.classes), args.scale * directions(rng, args.queries)


DATA = {"classes in clusters": clustered, "classes in all directions": spread}


# --- Methods ------------------------------------------------------------------------------------


def log_exact(queries, classes):
    largest = np.full(len(queries), -np.inf, np.float32)
    total = np.zeros(len(queries))
    for first in range(0, len(classes), BLOCK):
        logits = queries @ classes[first : first + BLOCK].T
        before, largest = largest, np.maximum(largest, logits.max(1))
        logits -= largest[:, None]
        np.exp(logits, out=logits)
        total = total * np.exp(before - largest) + logits.sum(1)
    return largest + np.log(total)


def log_uniform(queries, classes, n_samples, seed):
    rng = np.random.default_rng(seed)
    sample = rng.choice(len(classes), n_samples, replace=False, shuffle=False)
    return log_exact(queries, classes[sample]) + np.log(len(classes) / n_samples)


def log_of_tables(queries, classes, sampler, method, seed):
    """Terms are relative to exp(|q|), the largest that a unit vector can have."""
    norms = np.linalg.norm(queries, axis=1)

    def f(i, j):
        return np.exp(np.einsum("pd,pd->p", queries[i], classes[j]) - norms[i])

    value, error = sampler.estimate(queries, f, method, seed=seed)
    with np.errstate(divide="ignore", invalid="ignore"):
        return norms + np.log(value), error / value


def settings(classes, args):
    """(method, its setting, function of queries and a seed) for a set of classes.

    What the tables of a setting cost to build is not counted: they serve all queries to come.
    """
    yield "exact", "all classes", lambda q, seed: log_exact(q, classes)
    for n in args.samples:
        yield "uniform", f"{n} classes", lambda q, seed, n=n: log_uniform(q, classes, n, seed)
    n_bits = max(4, round(np.log2(len(classes) / 100)))
    for m in args.hashes:
        hashers = [FastHadamard(N_FEATURES, n_bits, m, seed=s) for s in range(args.repeats)]
        tables = [LSHSampler(hasher).fit(classes) for hasher in hashers]
        for sampler in tables:
            sampler.tables  # noqa: B018  builds them
        for name, method in (("HBE", "hbe"), ("Horvitz-Thompson", "horvitz_thompson")):

            def of_tables(q, seed, method=method, tables=tables):
                return log_of_tables(q, classes, tables[seed], method, seed)

            yield name, f"{m} tables of 2^{n_bits}", of_tables
    seeds = range(args.repeats)
    near = [PartitionSampler(classes, seed=s) for s in seeds]
    for n in args.samples[1:3]:
        for n_probes in args.probes:

            def near_far(q, seed, n_probes=n_probes, n=n):
                near[seed].n_probes = n_probes
                return log_partition(q, classes, sampler=near[seed], n_samples=n, seed=seed)

            yield f"near + {n} far", f"probes: {n_probes}", near_far


def measure(classes, queries, args, name):
    """Rows: method, setting, microseconds a query, mean relative error, and the stated one."""
    exact = log_exact(queries, classes)
    rows = []
    for method, setting, estimate in tqdm(list(settings(classes, args)), desc=name):
        seconds, errors, stated = [], [], []
        for seed in range(args.repeats):
            begin = time.perf_counter()
            value = estimate(queries, seed)
            seconds.append(time.perf_counter() - begin)
            value, error = value if isinstance(value, tuple) else (value, None)
            errors.append(np.abs(np.expm1(value - exact)))
            if error is not None:
                stated.append(error)
        microseconds = 1e6 * min(seconds) / len(queries)
        mean_stated = np.nanmean(stated) if stated else None
        rows.append((method, setting, microseconds, float(np.mean(errors)), mean_stated))
    return rows


# --- Results ------------------------------------------------------------------------------------


def show(results):
    header = ["method", "setting", "us a query", "mean error", "stated"]
    for name, rows in results.items():
        cells = [
            (
                method,
                setting,
                f"{microseconds:.3g}",
                "" if method == "exact" else f"{error:.2g}",
                "" if stated is None else f"{stated:.2g}",
            )
            for method, setting, microseconds, error, stated in rows
        ]
        print(f"\n{name}\n\n{tabulate(cells, header, colalign=['left', 'left'], **TABLE)}")
        exact, *others = rows
        good = [row for row in others if row[3] <= GOOD and row[2] < exact[2]]
        if good:
            method, setting, microseconds, *_ = min(good, key=lambda row: row[2])
            ratio = f"{exact[2] / microseconds:.1f} times as fast as exact"
            print(f"\nfastest with an error of at most {GOOD}: {method}, {setting}, {ratio}")
        else:
            print(f"\nnothing with an error of at most {GOOD} is faster than exact")


def draw(results, args):
    figure, axes = plt.subplots(
        1, len(results), figsize=(10, 4.4), sharey=True, layout="constrained"
    )
    for axis, (name, rows) in zip(axes, results.items(), strict=True):
        methods = list(dict.fromkeys(row[0] for row in rows))
        for method in methods:
            color = COLORS[method if method in COLORS else method.split(" + ")[0]]
            points = np.array([row[2:4] for row in rows if row[0] == method])
            if method == "exact":
                axis.axvline(points[0, 0], color=color, ls=":", label="exact: cost alone")
                continue
            last = method == methods[-1]
            axis.plot(*points.T, "s--" if last else "o-", color=color, label=method, ms=5)
        axis.axhline(GOOD, color="black", lw=0.6, alpha=0.5)
        axis.set(xscale="log", yscale="log", title=name, xlabel="microseconds a query")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("mean relative error of the normaliser")
    axes[0].legend(fontsize=8, loc="lower left")
    title = f"{args.classes:,} classes, {N_FEATURES} features, |q| = {args.scale:g}, one thread"
    figure.suptitle(title, fontsize=11)
    figure.savefig(args.out, dpi=100)


def positive(text):
    number = int(text)
    if number < 1:
        raise ValueError
    return number


positive.__name__ = "positive integer"  # the name in argparse's message


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[1],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--classes", type=positive, default=200_000, help="rows of the weight matrix")
    add("--queries", type=positive, default=128, help="in a batch")
    add("--scale", type=float, default=10.0, help="length of the queries; classes have length 1")
    add("--repeats", type=positive, default=3, help="seeds of tables and draws")
    add("--samples", type=positive, nargs="+", default=[1024, 4096, 16384, 65536], help="classes")
    add("--hashes", type=positive, nargs="+", default=[8, 16, 32, 64], help="tables")
    add("--probes", type=positive, nargs="+", default=[1, 2, 4, 8, 16], help="buckets of a table")
    add("--seed", type=int, default=0, help="of the data")
    add("--quick", action="store_true", help="few classes and settings: a few seconds")
    add("--out", type=pathlib.Path, default="partition_function.png", help="the picture")
    args = parser.parse_args()
    if args.quick:
        parser.set_defaults(classes=4000, queries=16, repeats=2, probes=[1, 4])
        parser.set_defaults(samples=[64, 256, 1024], hashes=[4, 16])
        args = parser.parse_args()
    if args.out.suffix != ".png" or not args.out.absolute().parent.is_dir():
        parser.error(f"--out must be a .png file in a folder that exists: {args.out}")
    if max(args.samples) > args.classes:
        parser.error(f"--samples must be at most --classes {args.classes}: {max(args.samples)}")
    if not 0 < args.scale <= 50:
        parser.error(f"--scale must be above 0 and at most 50: {args.scale}")
    return args


def main():
    args = parse_arguments()
    matplotlib.use("Agg")
    rng = np.random.default_rng(args.seed)
    results = {}
    for name, make in DATA.items():
        classes, queries = make(rng, args)
        results[name] = measure(classes, queries, args, name)
    show(results)
    draw(results, args)
    print(f"Error against cost: {args.out}")


if __name__ == "__main__":
    main()

# sphinx_gallery_thumbnail_path = "images/partition_function.png"
