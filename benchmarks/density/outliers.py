"""Measures LSHOutlierDetector: areas under the curve (AUC), and time at 100,000 x 64.

Compared with IsolationForest, LOF, the KDE of PyOD, and xStream and RS-Hash of pysad (``pip install
pyod pysad``; what is missing is left out). LOF, PyOD's KDE and xStream get standardised rows.
Ten minutes. One thread; sides of a ratio run in turns in one process.
"""

import functools
import time

import numpy as np
from sklearn.ensemble import IsolationForest
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import KernelDensity, LocalOutlierFactor
from sklearn.preprocessing import StandardScaler
from tqdm import tqdm

from benchmarks import RESULTS
from benchmarks.density.kde import data
from benchmarks.density.outlier_tasks import tasks
from benchmarks.measurement import MISSING, figure, installed, table
from benchmarks.sections import parser_of, run
from lshkit.kde import LSHKernelDensity, LSHOutlierDetector

OUT = RESULTS / "outliers.json"
OURS, SKETCH = "lshkit", "lshkit, laplacian sketch"
ROWS, FEATURES = 100_000, 64
SLOW_QUERIES, SLOW_ROWS = 128, 500  # scored by what takes too long for all rows

# --- Detectors: (fitted rows, rows to score or None for the fitted ones, seed) -> scores ----------


def ours(rows, queries, seed, density=None):
    detector = LSHOutlierDetector(density, random_state=seed).fit(rows)
    return -detector.score_samples(rows if queries is None else queries)


def sketch(rows, queries, seed):
    density = LSHKernelDensity(
        "laplacian", bandwidth="neighbors", algorithm="bucket_sum", n_hashes=256
    )
    return ours(rows, queries, seed, density)


def isolation_forest(rows, queries, seed):
    forest = IsolationForest(random_state=seed).fit(rows)
    return -forest.score_samples(rows if queries is None else queries)


def standardised(detector):
    @functools.wraps(detector)
    def score(rows, queries, seed):
        scaler = StandardScaler().fit(rows)
        queries = None if queries is None else scaler.transform(queries)
        return detector(scaler.transform(rows), queries, seed)

    return score


@standardised
def lof(rows, queries, seed):
    if queries is None:
        return -LocalOutlierFactor().fit(rows).negative_outlier_factor_
    return -LocalOutlierFactor(novelty=True).fit(rows).score_samples(queries)


@standardised
def pyod_kde(rows, queries, seed):
    from pyod.models.kde import KDE

    detector = KDE().fit(rows)
    return detector.decision_scores_ if queries is None else detector.decision_function(queries)


def streamed(model, rows, queries):
    for row in rows:
        model.fit_partial(row)
    return np.array([model.score_partial(row) for row in (rows if queries is None else queries)])


@standardised
def xstream(rows, queries, seed):
    from pysad.models import xStream

    return streamed(xStream(window_size=len(rows), random_state=seed), rows, queries)


def rs_hash(rows, queries, seed):
    from pysad.models import RSHash

    # No decay within these few rows; the paper's sketch, as wide as so many counts need.
    options = {"decay": 1 / (10 * len(rows)), "num_hash_fns": 4, "hash_range": 100_000}
    model = RSHash(rows.min(axis=0), rows.max(axis=0), random_state=seed, **options)
    return streamed(model, rows, queries)


DETECTORS = {
    OURS: ours,
    SKETCH: sketch,
    "IsolationForest": isolation_forest,
    "LOF": lof,
    "PyOD KDE": pyod_kde,
    "xStream": xstream,
    "RS-Hash": rs_hash,
}
NEEDS = {"PyOD KDE": "pyod", "xStream": "pysad", "RS-Hash": "pysad"}


def there():
    return installed("scikit-learn", "pyod", "pysad")


# --- Areas under the curve ----------------------------------------------------------------------


def areas(args):
    """For every data set and detector the areas with each seed: outliers among the rows, and not.

    "outliers": all rows are fitted and scored. "novelties": half of the inliers is fitted, the
    other half and the outliers are scored.
    """
    missing = [name for name, version in there().items() if version == MISSING]
    detectors = [k for k in DETECTORS if NEEDS.get(k) not in missing]
    results = {}
    for seed in tqdm(range(args.seeds), desc="seeds"):
        for name, (rows, truth) in tqdm(tasks(seed).items(), desc="data", leave=False):
            half = np.random.default_rng(seed).random(len(rows)) < 0.5
            fitted = half & ~truth
            for mode, train, test in (
                ("outliers", rows, None),
                ("novelties", rows[fitted], rows[~fitted]),
            ):
                found = results.setdefault(mode, {}).setdefault(name, {})
                for detector in detectors:
                    scores = DETECTORS[detector](train, test, seed)
                    area = roc_auc_score(truth if test is None else truth[~fitted], scores)
                    found.setdefault(detector, []).append(float(area))
    return results


def areas_tables(results):
    for mode, found in results.items():
        names = list(next(iter(found.values())))
        rows = [
            [name, *(f"{np.mean(x):.3f} ({np.std(x):.3f})" for x in of.values())]
            for name, of in found.items()
        ]
        means = {k: [np.mean(of[k]) for of in found.values()] for k in names}
        seeds = {k: np.mean([of[k] for of in found.values()], axis=0) for k in names}
        rows.append(
            ["mean of all", *(f"{np.mean(x):.3f} ({np.std(x):.3f})" for x in seeds.values())]
        )
        rows.append(["worst", *(f"{np.min(means[k]):.3f}" for k in names)])
        yield table(f"AUC, {mode}: mean (standard deviation over seeds)", ["data", *names], rows)


# --- Against exact densities --------------------------------------------------------------------


def large(n, seed):
    """Data sets of n rows of 64 or 100 features, a hundredth of them outliers."""
    rng = np.random.default_rng(seed)
    n_out = n // 100
    digits = data.digits(n, rng)
    noisy = digits[:n_out] + rng.normal(scale=3, size=(n_out, 64)).astype(np.float32)
    yield "shifted digits, noise", digits[n_out:], noisy
    mixed = data.mixture(64)(n, rng)
    yield "mixture, noise", mixed[n_out:], mixed[:n_out] + 0.6 * rng.normal(size=(n_out, 64))
    scales = data.scales(n, rng)
    yield (
        "clusters of many widths",
        scales[n_out:],
        scales[:n_out] + 0.6 * rng.normal(size=(n_out, 100)),
    )
    rows = np.repeat(rng.normal(size=(n // 50, 64)), 50, axis=0)
    yield "rows repeated 50 times", rows, 1.2 * rng.normal(size=(n_out, 64))
    tails = rng.standard_t(2, (n, 64))
    far = rng.standard_t(2, (n_out, 64))
    yield "heavy tails", tails, far + np.sign(far)


def against_exact(args):
    """Areas of sampled and of exact densities of one bandwidth, each row without itself."""
    results = {}
    for seed in tqdm(range(args.seeds), desc="exact"):
        for name, inliers, outliers in large(args.rows // 5, seed):
            rows = np.concatenate([inliers, outliers]).astype(np.float32)
            truth = np.r_[np.zeros(len(inliers)), np.ones(len(outliers))]
            found = results.setdefault(name, {})
            exact = LSHKernelDensity(bandwidth="neighbors", algorithm="brute")
            for way, density in (("brute", exact), ("auto", None)):
                detector = LSHOutlierDetector(density, random_state=seed).fit(rows)
                area = roc_auc_score(truth, -detector.score_samples(rows))
                found.setdefault(way, []).append(float(area))
                found[f"{way} is"] = detector.density_.algorithm_
    return results


def exact_table(results):
    rows = [
        [
            name,
            found["auto is"],
            *(f"{np.mean(found[k]):.4f}" for k in ("brute", "auto")),
            f"{np.abs(np.subtract(found['auto'], found['brute'])).max():.4f}",
        ]
        for name, found in results.items()
    ]
    yield table("AUC, exact and sampled", ["data", "method", "exact", "auto", "largest gap"], rows)


# --- Time ---------------------------------------------------------------------------------------


def timed(call):
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def times(args):
    """Seconds to fit and to score all rows; of what takes too long, from some of them."""
    rng = np.random.default_rng(0)
    rows = data.digits(args.rows, rng).astype(np.float64)
    n, seconds, notes = len(rows), {}, {}

    def add(name, value, note="all rows"):
        seconds[name] = min(value, seconds.get(name, np.inf))
        notes[name] = note

    def measure(name, density):
        detector = LSHOutlierDetector(density, random_state=0)
        fitting, detector = timed(lambda: detector.fit(rows))
        add(name, fitting + timed(lambda: detector.score_samples(rows))[0])
        add(f"{name}: other rows alone", timed(lambda: detector.score_samples(rows + 1e-3))[0])
        return detector.density_

    def theirs(tree, rtol, width):
        density = KernelDensity(algorithm=tree, rtol=rtol)
        fitting, _ = timed(lambda: density.fit(rows / width))
        some = rows[rng.permutation(n)[:SLOW_QUERIES]] / width
        spent, _ = timed(lambda: density.score_samples(some))
        name = f"sklearn KernelDensity, {tree}, rtol={rtol}"
        add(name, fitting + spent * n / SLOW_QUERIES, f"{SLOW_QUERIES} queries, scaled")

    for _ in tqdm(range(args.repeats), desc="times"):
        width = measure(OURS, None).bandwidth_
        exact = LSHKernelDensity(bandwidth="neighbors", algorithm="brute")
        measure(f"{OURS}, brute", exact)
        add(SKETCH, timed(lambda: sketch(rows, None, 0))[0])
        add("IsolationForest", timed(lambda: isolation_forest(rows, None, 0))[0])
        for tree in ("kd_tree", "ball_tree"):
            for rtol in (0, 0.1):
                theirs(tree, rtol, width)
    few = rows[: n // 10]
    add("LOF", timed(lambda: lof(few, None, 0))[0] * 100, f"{len(few)} rows, times 100")
    for name, detector in (("xStream", xstream), ("RS-Hash", rs_hash)):
        if there()["pysad"] != MISSING:
            spent = timed(lambda d=detector: d(rows[:SLOW_ROWS], None, 0))[0]
            add(name, spent * n / SLOW_ROWS, f"{SLOW_ROWS} rows, scaled")
    exact = min(v for k, v in seconds.items() if "rtol=0" in k and "rtol=0.1" not in k)
    loose = min(v for k, v in seconds.items() if "rtol=0.1" in k)
    ratios = {"exact": exact / seconds[OURS], "rtol=0.1": loose / seconds[OURS]}
    return {"rows": n, "seconds": seconds, "measured on": notes, "over sklearn": ratios}


def times_table(results):
    base = results["seconds"][OURS]
    rows = [
        [name, figure(s), figure(s / base), results["measured on"][name]]
        for name, s in results["seconds"].items()
    ]
    title = f"Fit and score, {results['rows']} x {FEATURES}"
    yield table(title, ["detector", "seconds", "of lshkit", "measured on"], rows)


def recorded(measure):
    """A section: with what it was measured of and beside."""

    def section(args):
        settings = {k: getattr(args, k) for k in ("seeds", "rows", "repeats")}
        return {"settings": settings, "packages": there(), "results": measure(args)}

    return section


SECTIONS = {"areas": recorded(areas), "exact": recorded(against_exact), "times": recorded(times)}
TABLES = {"areas": areas_tables, "exact": exact_table, "times": times_table}


def show(results):
    for name, tables in TABLES.items():
        if name in results:
            print("\n".join(tables(results[name]["results"])))


def main():
    parser = parser_of(__doc__, SECTIONS, OUT)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.rows, args.repeats = 1, 3000, 1
    run(args, SECTIONS, show)


if __name__ == "__main__":
    main()
