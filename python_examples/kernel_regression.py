"""Kernel regression
=================

Kernel regression on many rows: exact, from a sample and from a sketch, each with its error.

A response of three features is learnt from noisy rows. A grid search in a scikit-learn pipeline
picks the bandwidth on some of them; then the same regression is computed from all rows, from as
many as an error of 0.05 standard deviations of the targets needs, and from a sketch of constant
size through which the rows only streamed. At the end there are a table, and a picture of a cut
through the predictions beside one of the errors, stated and observed. Needs
matplotlib, tabulate and tqdm.
"""

import argparse
import pathlib
import time

try:
    import matplotlib
    import numpy as np
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator
    from sklearn.metrics import r2_score
    from sklearn.model_selection import GridSearchCV
    from sklearn.neighbors import KNeighborsRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from tabulate import tabulate
    from tqdm import tqdm
except ImportError as error:
    raise SystemExit(f"{error}: pip install '.[dev]' has what the examples need") from None

from lshkit.kde import LSHKernelRegressor

NOISE = 0.5
TABLE = {"tablefmt": "github", "disable_numparse": True, "colglobalalign": "right"}


def response(X: np.ndarray) -> np.ndarray:
    return np.sin(2 * X[:, 0]) + 0.3 * X[:, 1] * X[:, 2]


def rows_and_targets(n: int, rng: np.random.Generator):
    X = rng.normal(size=(n, 3))
    return X, response(X) + NOISE * rng.normal(size=n)


def searched(model, name: str, values, X: np.ndarray, y: np.ndarray) -> dict:
    """The best value of a parameter by cross-validation in a pipeline."""
    pipeline = make_pipeline(StandardScaler(), model)
    step = type(model).__name__.lower()
    search = GridSearchCV(pipeline, {f"{step}__{name}": values}, cv=3).fit(X, y)
    return {name: search.best_params_[f"{step}__{name}"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[1],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--rows", type=int, default=200_000, help="that are learnt from")
    add("--queries", type=int, default=2000, help="new rows, to predict")
    add("--quick", action="store_true", help="small sizes, to see it run")
    add("--out", type=pathlib.Path, default="kernel_regression.png", help="the picture")
    args = parser.parse_args()
    if args.quick:
        parser.set_defaults(rows=20_000, queries=200)
        args = parser.parse_args()
    if args.out.suffix != ".png" or not args.out.absolute().parent.is_dir():
        parser.error(f"--out must be a .png file in a folder that exists: {args.out}")
    # Of fewer rows the sample has all, without an error to show.
    for name, least in (("rows", 20_000), ("queries", 20)):
        if (number := getattr(args, name)) < least:
            parser.error(f"--{name} must be at least {least}: {number}")
    matplotlib.use("Agg")
    rng = np.random.default_rng(0)
    X, y = rows_and_targets(args.rows, rng)
    queries, held_out = rows_and_targets(args.queries, rng)
    few = slice(min(5000, args.rows // 4))
    width = searched(LSHKernelRegressor(), "bandwidth", np.geomspace(0.1, 1, 8), X[few], y[few])
    k = searched(KNeighborsRegressor(), "n_neighbors", [5, 10, 20, 40], X[few], y[few])
    sketch = {"kernel": "laplacian", "algorithm": "bucket_sum", "n_hashes": 512, "bandwidth": 0.3}
    models = {
        "exact": LSHKernelRegressor(algorithm="brute", **width),
        "sample": LSHKernelRegressor(algorithm="random", rtol=0.05, random_state=0, **width),
        "sketch": LSHKernelRegressor(random_state=0, **sketch),
        "k neighbors": KNeighborsRegressor(**k),
    }
    laplacian = LSHKernelRegressor("laplacian", sketch["bandwidth"], algorithm="brute").fit(X, y)
    exact = {"sketch": laplacian.predict(queries)}
    table, errors = [], {}
    for name, model in tqdm(models.items(), desc="models"):
        if name == "sketch":
            for part in np.array_split(np.arange(len(X)), 20):  # a stream
                model.partial_fit(X[part], y[part])
        else:
            model.fit(X, y)
        start = time.perf_counter()
        predicted = model.predict(queries)
        seconds = time.perf_counter() - start
        cells = [f"{1e6 * seconds / len(queries):,.0f}", f"{r2_score(held_out, predicted):.3f}"]
        if name == "exact":
            exact["sample"] = predicted
        if name in exact:
            predicted, std = model.predict(queries, return_std=True)
            error = np.abs(predicted - exact[name])
            known = np.isfinite(std) & (std > 0)
            errors[name] = std[known], error[known]
            cells += [f"{np.sqrt((x[known] ** 2).mean()):.3f}" for x in (error, std)]
            cells += [f"{(error[known] > 3 * std[known]).mean():.1%}"]
        else:
            cells += ["", "", ""]
        size = f"{model.extra_memory_ / 1e6:,.1f}" if hasattr(model, "extra_memory_") else ""
        table.append((name, *cells, size))
    print(f"\n{args.rows:,} rows, bandwidth {width['bandwidth']:.2f}\n")
    header = ["model", "us a query", "R^2", "error", "stated", "beyond 3", "MB"]
    print(tabulate(table, header, colalign=["left"], **TABLE))
    print("\nerror: root mean square over the queries, against the same kernel's exact sums")
    print("stated: the same of the standard errors; beyond 3: errors above three of them")
    print("MB: beside the rows; k neighbors: scikit-learn's KNeighborsRegressor")
    draw(models, errors, args.out)
    print(f"\npicture: {args.out}")


def draw(models: dict, errors: dict, out: pathlib.Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    cut = np.zeros((200, 3))
    cut[:, 0], cut[:, 1:] = np.linspace(-3, 3, 200), 1.0
    left.plot(cut[:, 0], response(cut), color="black", lw=1, ls="--", label="response")
    for name, colour, width in (("exact", "C0", 3.5), ("sample", "C1", 1.2), ("sketch", "C2", 1.2)):
        mean, std = models[name].predict(cut, return_std=True)
        std = np.where(np.isfinite(std), std, 0)
        left.plot(cut[:, 0], mean, color=colour, lw=width, label=name)
        left.fill_between(cut[:, 0], mean - 2 * std, mean + 2 * std, color=colour, alpha=0.25, lw=0)
    left.set(title="a cut through the predictions", xlabel="first feature, the others 1")
    left.set_ylabel("prediction, 2 stated errors")
    left.legend(frameon=False, fontsize=8)
    for name, colour in (("sample", "C1"), ("sketch", "C2")):
        std, error = errors[name]
        right.plot(std, error, ".", ms=2, alpha=0.4, color=colour, label=name)
    ends = np.array(
        [min(s.min() for s, _ in errors.values()), max(s.max() for s, _ in errors.values())]
    )
    for factor, style in ((1, "-"), (3, ":")):
        right.plot(ends, factor * ends, color="black", lw=0.8, ls=style, label=f"{factor} stated")
    right.set(xscale="log", yscale="log", xlabel="stated error", ylabel="observed error")
    right.set_title("each query's error")
    right.set_ylim(bottom=ends[0] / 30)
    right.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    right.xaxis.set_major_formatter("{x:g}")
    right.xaxis.set_minor_formatter("")
    right.legend(frameon=False, fontsize=8)
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    main()

# sphinx_gallery_thumbnail_path = "images/kernel_regression.png"
