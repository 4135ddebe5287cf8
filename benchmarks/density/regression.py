"""Kernel regression: LSHKernelRegressor, plain NumPy, scikit-learn's neighbors and statsmodels.

Times: the bandwidth is the one of least squared error on held-out rows (the sketch's bandwidth and
scikit-learn's number of neighbors likewise); microseconds a query in batches of 256, one thread,
all in turns in one process, the smallest of several. `error` is the mean absolute difference from
the exact regression, in standard deviations of the targets. Coverage: what samples and sketches
state, over seeds, against what is observed. Five minutes. statsmodels is compared where it is
installed.

    python -m benchmarks.density.regression
    python -m benchmarks.density.regression --sections coverage
    python -m benchmarks.density.regression --tables
"""

import importlib.util
import time

import numpy as np
from sklearn.datasets import make_friedman1
from sklearn.metrics import r2_score
from sklearn.neighbors import KNeighborsRegressor
from tqdm import tqdm

from benchmarks import RESULTS
from benchmarks.density.kde import data as density_data
from benchmarks.measurement import best_in_turns, figure, table
from benchmarks.sections import parser_of, run
from lshkit.kde import LSHKernelRegressor

OUT = RESULTS / "regression.json"
BATCH, N_QUERIES, PEER_QUERIES = 256, 512, 16
NEIGHBORS = 2, 5, 10, 20, 50
WIDTHS = 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.2  # times the median distance of two rows


# --- Data: rows, targets, and the same held out ---------------------------------------------------


def friedman(n):
    X, y = make_friedman1(n + 2 * N_QUERIES, n_features=10, noise=1.0, random_state=0)
    return X, y


def digits(n):
    """The mean ink of the lower half of a digit beside noise: smooth in 64 features."""
    rng = np.random.default_rng(0)
    X = density_data.digits(n + 2 * N_QUERIES, rng)
    y = X[:, 32:].mean(axis=1) * X[:, :32].mean(axis=1)
    return X, y + rng.normal(0, 0.3 * y.std(), len(y))


def clusters(n):
    """A number for each of 1,000 clusters, which overlap."""
    rng = np.random.default_rng(0)
    centres, level = rng.normal(size=(1000, 32)), rng.normal(size=1000)
    which = rng.integers(1000, size=n + 2 * N_QUERIES)
    X = centres[which] + 0.6 * rng.normal(size=(len(which), 32))
    return X, level[which] + 0.5 * rng.normal(size=len(which))


def waves(n):
    """Two features of eight count: many rows are near a query at the best bandwidth."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n + 2 * N_QUERIES, 8))
    return X, np.sin(X[:, 0]) + 0.3 * X[:, 1] + rng.normal(size=len(X))


DATA = {"friedman": friedman, "digits": digits, "clusters": clusters, "waves": waves}


# --- Methods --------------------------------------------------------------------------------------


class PlainNumpy:
    """The formula in blocks of a matrix product, in float32, with the largest term's shift."""

    def __init__(self, X, y, width):
        self.X, self.y = (X / width).astype(np.float32), y.astype(np.float32)
        self.squares, self.width = 0.5 * (self.X**2).sum(axis=1), np.float32(width)

    def predict(self, queries):
        queries = (queries / self.width).astype(np.float32)
        top, total = np.full((2, len(queries)), -np.inf), np.zeros((len(queries), 2))
        columns = np.stack([np.ones_like(self.y), self.y], axis=1)
        top = top[0].astype(np.float32)
        for first in range(0, len(self.X), 4096):
            part = slice(first, first + 4096)
            logs = queries @ self.X[part].T
            logs -= self.squares[part]
            shift = np.maximum(top, logs.max(axis=1))
            np.exp(logs - shift[:, None], out=logs)
            total = total * np.exp(top - shift)[:, None] + logs @ columns[part]
            top = shift
        return total[:, 1] / total[:, 0]


def best(make, settings, train, validation):
    """The setting of least squared error on held-out rows."""
    errors = [
        np.mean((make(x).fit(*train).predict(validation[0]) - validation[1]) ** 2) for x in settings
    ]
    return settings[int(np.argmin(errors))]


def task(name, n, args):
    X, y = (x.astype(np.float32) for x in DATA[name](n))
    train, validation, test = (
        (X[part], y[part])
        for part in (slice(n), slice(n, n + N_QUERIES), slice(n + N_QUERIES, n + 2 * N_QUERIES))
    )
    typical = float(np.median(np.linalg.norm(X[:512] - X[512:1024], axis=1)))
    widths = [typical * x for x in WIDTHS]
    width = best(
        lambda h: LSHKernelRegressor(bandwidth=h, algorithm="brute"), widths, train, validation
    )
    apart = float(np.median(np.abs(X[:512] - X[512:1024]).sum(axis=1)))
    sketch = {"kernel": "laplacian", "algorithm": "bucket_sum", "n_hashes": 256, "random_state": 0}
    sketch["bandwidth"] = best(
        lambda h: LSHKernelRegressor(**sketch | {"bandwidth": h}),
        [apart * x / 2 for x in WIDTHS],
        train,
        validation,
    )
    k = best(lambda k: KNeighborsRegressor(k), NEIGHBORS, train, validation)
    models = {
        "lshkit, brute": LSHKernelRegressor(bandwidth=width, algorithm="brute"),
        "lshkit, auto": LSHKernelRegressor(bandwidth=width, random_state=0),
        "lshkit, sketch of 256": LSHKernelRegressor(**sketch),
        "scikit-learn, neighbors": KNeighborsRegressor(k),
    }
    fitted, fit_seconds = {}, {}
    for label, model in models.items():
        begin = time.perf_counter()
        fitted[label] = model.fit(*train)
        fit_seconds[label] = time.perf_counter() - begin
    fitted["NumPy"] = PlainNumpy(*train, width)
    calls = {label: lambda m=m: m.predict(test[0][:BATCH]) for label, m in fitted.items()}
    seconds = best_in_turns(calls, 0, args.repeats)
    exact = fitted["lshkit, brute"].predict(test[0])
    exact_of_sketch = LSHKernelRegressor("laplacian", sketch["bandwidth"], algorithm="brute")
    exact_of_sketch = exact_of_sketch.fit(*train).predict(test[0])
    methods = {}
    for label, model in fitted.items():
        got = model.predict(test[0])
        found = {"microseconds": 1e6 * seconds[label] / BATCH, "r2": r2_score(test[1], got)}
        if label in fit_seconds:
            found["fit_seconds"] = fit_seconds[label]
        if "neighbors" not in label:
            wanted = exact_of_sketch if "sketch" in label else exact
            found["error"] = float(np.abs(got - wanted).mean() / train[1].std())
        if label == "lshkit, auto":
            _, std = model.predict(test[0], return_std=True)
            found |= {"algorithm": model.algorithm_, "exact_share": float((std == 0).mean())}
        if label.startswith("lshkit"):
            found["bytes"] = int(model.extra_memory_)
        methods[label] = found
    if importlib.util.find_spec("statsmodels"):
        methods["statsmodels"] = of_statsmodels(train, test, width, exact)
    return {
        "n": n, "d": X.shape[1], "bandwidth": width, "bandwidth of the sketch": sketch["bandwidth"],
        "neighbors": k, "methods": methods,
    }  # fmt: skip


def of_statsmodels(train, test, width, exact):
    from statsmodels.nonparametric.kernel_regression import KernelReg

    X, y = (x.astype(np.float64) for x in train)
    peer = KernelReg(y, X, "c" * X.shape[1], reg_type="lc", bw=[width] * X.shape[1])
    begin = time.perf_counter()
    got = peer.fit(test[0][:PEER_QUERIES].astype(np.float64))[0]
    seconds = time.perf_counter() - begin
    with np.errstate(invalid="ignore"):
        error = np.abs(got - exact[:PEER_QUERIES]).mean() / y.std()
    return {
        "microseconds": 1e6 * seconds / PEER_QUERIES,
        "queries": PEER_QUERIES,
        "error": float(error),
    }


def times(args):
    n = 1500 if args.quick else args.rows
    return {name: task(name, n, args) for name in tqdm(DATA, desc="times")}


# --- Coverage -------------------------------------------------------------------------------------


def rows_of(kind, n, d, rng):
    if kind == "heavy-tailed":
        return rng.standard_t(2, size=(n, d))
    if kind == "100 clusters":
        return rng.normal(size=(100, d))[rng.integers(100, size=n)] + 0.1 * rng.normal(size=(n, d))
    if kind == "600 rows, repeated":
        return rng.normal(size=(600, d))[rng.integers(600, size=n)]
    return rng.normal(size=(n, d))


SETTINGS = (4, 0.5), (16, 1.5), (16, 4.0)  # features, bandwidth
KINDS = "normal", "100 clusters", "600 rows, repeated", "heavy-tailed"


def coverage(args):
    n, runs = (9000, 2) if args.quick else (30_000, 8)
    results = []
    for kind in tqdm(KINDS, desc="coverage"):
        for d, h in SETTINGS[: 1 if args.quick else None]:
            rng = np.random.default_rng(1)
            X = rows_of(kind, n + 400, d, rng)
            y = np.sin(X[:, 0]) + 0.2 * X[:, 1] ** 2
            y += (
                rng.standard_t(2, size=len(y))
                if kind == "heavy-tailed"
                else 0.3 * rng.normal(size=len(y))
            )
            X, queries, y = X[:n], X[n:], y[:n]
            for method, kernel, options in (
                ("random", "gaussian", {"algorithm": "random"}),
                ("bucket_sum", "laplacian", {"algorithm": "bucket_sum", "n_hashes": 128}),
            ):
                width = h if kernel == "gaussian" else h * d**0.5
                exact = (
                    LSHKernelRegressor(kernel, width, algorithm="brute").fit(X, y).predict(queries)
                )
                got = [
                    LSHKernelRegressor(kernel, width, random_state=seed, **options)
                    .fit(X, y)
                    .predict(queries, return_std=True)
                    for seed in range(runs)
                ]
                mean, std = np.array(got).transpose(1, 0, 2)
                error, stated = mean - exact, (std > 0) & np.isfinite(std)
                error, known = error[stated] / y.std(), std[stated] / y.std()
                results.append(
                    {
                        "data": kind,
                        "d": d, "bandwidth": width, "method": method, "n": n,
                        "runs": runs,
                        "exact_share": float((std == 0).mean()),
                        "nowhere_share": float(np.isinf(std).mean()),
                        "observed": float(np.sqrt((error**2).mean())),
                        "stated": float(np.sqrt((known**2).mean())),
                        "median_stated": float(np.median(known)),
                        "beyond_3": float((np.abs(error) > 3 * known).mean()),
                    }
                )  # fmt: skip
    return {"queries": 400, "results": results}


SECTIONS = {"times": times, "coverage": coverage}


# --- Results --------------------------------------------------------------------------------------


def show(results):
    for name, found in results.get("times", {}).items():
        if not isinstance(found, dict) or "methods" not in found:
            continue
        theirs = found["methods"]["lshkit, auto"]["microseconds"]
        rows = [
            [
                label,
                figure(x["microseconds"]),
                figure(x["microseconds"] / theirs),
                f"{x['r2']:.3f}" if "r2" in x else "",
                f"{x['error']:.2g}" if "error" in x else "",
                f"{x['exact_share']:.0%}" if "exact_share" in x else "",
            ]
            for label, x in found["methods"].items()
        ]
        title = (
            f"{name}: {found['n']} rows, {found['d']} features, bandwidth {found['bandwidth']:.3g}"
        )
        print(table(title, ["method", "us a query", "over auto", "R^2", "error", "exact"], rows))
    if found := results.get("coverage"):
        rows = [
            [
                f"{x['data']}, d = {x['d']}, h = {x['bandwidth']:.2g}",
                x["method"],
                *(f"{x[key]:.1%}" for key in ("exact_share", "nowhere_share", "beyond_3")),
                *(f"{x[key]:.3f}" for key in ("observed", "stated")),
            ]
            for x in found["results"]
        ]
        header = ["data", "method", "exact", "nowhere", "beyond 3", "observed", "stated"]
        print(table("Root mean square of errors, in standard deviations of y", header, rows))


def main():
    parser = parser_of(__doc__, SECTIONS, OUT)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if args.quick:
        args.repeats = 2
    run(args, SECTIONS, show)


if __name__ == "__main__":
    main()
