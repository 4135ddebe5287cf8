"""Measures bandwidths by leave-one-out likelihood: speed, accuracy of samples, rules compared.

Sides that are compared run in turns in one process, on one thread; the smallest CPU time of each
counts, except that scikit-learn's search, which takes minutes, runs once. Five minutes.
`--sections` measures some of it into the same file, `--quick` at small sizes.
"""

import time
import warnings

import numpy as np
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.model_selection import GridSearchCV, KFold
from sklearn.neighbors import KernelDensity
from tqdm import tqdm

from benchmarks import RESULTS
from benchmarks.density.kde import data
from benchmarks.measurement import figure, table
from benchmarks.sections import parser_of, run
from lshkit.kde import LSHKernelDensity, likelihood_curve

OUT = RESULTS / "bandwidths.json"
RULES = "scott", "silverman", "likelihood", "neighbors"


# --- Speed --------------------------------------------------------------------------------------


def speed(args):
    """The same grid by 5-fold GridSearchCV and by likelihood_curve, in seconds of CPU."""
    n, d, points = (1000, 32, 5) if args.quick else (20_000, 32, 15)
    X = data.mixture(d)(n, np.random.default_rng(0)).astype(np.float64)
    grid = np.geomspace(0.5, 2, points)
    folds = list(KFold(5).split(X))

    def search(density, folds=folds):
        found = GridSearchCV(density, {"bandwidth": grid}, cv=folds, refit=False).fit(X)
        return float(found.best_params_["bandwidth"])

    sides = {
        "likelihood_curve, 2,048 rows held out": lambda: likelihood_curve(X, grid).best,
        "likelihood_curve, all rows held out": lambda: (
            likelihood_curve(X, grid, n_held_out=None).best
        ),
        "GridSearchCV, LSHKernelDensity, rtol=0": lambda: search(LSHKernelDensity(rtol=0)),
        "GridSearchCV, LSHKernelDensity, rtol=0.1": lambda: search(
            LSHKernelDensity(random_state=0)
        ),
        # A fold takes minutes, and all take the same time.
        "GridSearchCV, scikit-learn": lambda: search(KernelDensity(), folds[:1]),
    }
    times = dict.fromkeys(sides, 1) | {"GridSearchCV, scikit-learn": 5}
    best, seconds = {}, dict.fromkeys(sides, np.inf)
    for turn in range(3):
        for name, call in sides.items():
            if turn and times[name] > 1:
                continue
            begin = time.process_time()
            best[name] = call()
            seconds[name] = min(seconds[name], times[name] * (time.process_time() - begin))
    return {
        "n": n,
        "d": d,
        "bandwidths": list(grid),
        "seconds": seconds,
        "best": best,
        "note": "CPU time; scikit-learn's is that of one of the five folds, times 5",
    }


# --- Accuracy -----------------------------------------------------------------------------------


def isolated(n, rng):
    """50 tight clusters on a sphere, and ten rows inside it, each far from all others."""
    centres = rng.normal(size=(50, 6))
    centres *= 5 / np.linalg.norm(centres, axis=1, keepdims=True)
    rows = centres[rng.integers(50, size=n)] + 0.05 * rng.normal(size=(n, 6))
    rows[:10] = 0.8 * rng.normal(size=(10, 6))
    return rows


SETS = {
    "normal": lambda n, rng: rng.normal(size=(n, 8)),
    "mixture of 2": lambda n, rng: data.mixture(2)(n, rng),
    "mixture of 32": lambda n, rng: data.mixture(32)(n, rng),
    "scales": data.scales,
    "grey patches": data.grey_patches,
    "Student's t, 2 degrees": lambda n, rng: rng.standard_t(2, size=(n, 4)),
    "half of the rows twice": lambda n, rng: np.repeat(
        rng.normal(size=(-(-2 * n // 3), 8)), 1 + np.arange(-(-2 * n // 3)) % 2, axis=0
    )[:n],
    "ten isolated rows": isolated,
}


def accuracy(args):
    """The bandwidth by samples of the rows held out, and of all rows, against all by all."""
    n, seeds = (1500, 5) if args.quick else (20_000, 20)
    held_out = (256,) if args.quick else (512, 2048)
    results = {}
    for name, make in tqdm(SETS.items(), desc="accuracy"):
        X = make(n, np.random.default_rng(0))
        exact = likelihood_curve(X, n_held_out=None)
        samples = {}
        for count in held_out:
            curves = [likelihood_curve(X, n_held_out=count, random_state=s) for s in range(seeds)]
            off = np.array([c.best / exact.best - 1 for c in curves])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the largest may be at an end
                exactly = likelihood_curve(X, [c.best for c in curves], n_held_out=None)
            lost = exact.best_log_likelihood - exactly.log_likelihood
            samples[str(count)] = {
                "root mean square": float(np.sqrt(np.mean(off**2))),
                "stated": float(np.median([c.best_standard_error / c.best for c in curves])),
                "mean": float(off.mean()),
                "largest loss of log-likelihood per row": float(lost.max()),
            }
        tenth = likelihood_curve(X[:: 10 if len(X) >= 10_000 else 3], n_held_out=None)
        results[name] = {
            "n": len(X),
            "d": X.shape[1],
            "best": exact.best,
            "best_standard_error": exact.best_standard_error,
            "held out": samples,
            "of a tenth of all rows": tenth.best / exact.best,
        }
    return {"seeds": seeds, "data": results}


# --- Rules --------------------------------------------------------------------------------------


def rule_sets(args):
    """Of each set: rows, and others that they are to predict."""
    n, n_test = (600, 200) if args.quick else (10_000, 2_000)
    makers = {f"mixture of {d}": data.mixture(d) for d in (2, 8, 32, 128, 512)}
    makers |= {x.__name__.replace("_", " "): x for x in (data.scales, data.grey_patches)}
    makers["shifted digits"] = data.digits
    makers["Student's t, 2 degrees"] = SETS["Student's t, 2 degrees"]
    makers["features of 4 units"] = lambda n, rng: rng.normal(size=(n, 4)) * [0.01, 1, 100, 1e4]
    for name, make in makers.items():
        X = np.asarray(make(n + n_test, np.random.default_rng(0)), np.float64)
        yield name, X[:n], X[n:]
    for name, load in {"digits": load_digits, "breast cancer": load_breast_cancer}.items():
        X = np.random.default_rng(0).permutation(load().data)
        yield name, X[: len(X) * 3 // 4], X[len(X) * 3 // 4 :]


def rules(args):
    """Mean log-density of other rows under each rule."""
    results = {}
    for name, X, others in tqdm(list(rule_sets(args)), desc="rules"):
        found = {}
        for kernel in ("gaussian", "exponential"):
            for rule in RULES:
                if kernel == "exponential" and rule != "likelihood":
                    continue  # the others are compared with the gaussian kernel alone
                density = LSHKernelDensity(kernel, rule, rtol=0, random_state=0)
                begin = time.perf_counter()
                try:
                    density.fit(X)
                except ValueError as error:
                    found[f"{rule}, {kernel}"] = {"refused": str(error)}
                    continue
                took = time.perf_counter() - begin
                scores = density.score_samples(others)
                found[f"{rule}, {kernel}"] = {
                    "log_likelihood": float(scores.mean()),
                    "std": float(scores.std() / np.sqrt(len(scores))),
                    "scaled": np.ndim(density.bandwidth_) > 0,
                    "seconds of fit": took,
                }
        results[name] = {"n": len(X), "d": X.shape[1], "rules": found}
    return {"data": results}


# --- Results ------------------------------------------------------------------------------------

SECTIONS = {"speed": speed, "accuracy": accuracy, "rules": rules}


def show(results):
    if r := results.get("speed"):
        slowest = r["seconds"]["GridSearchCV, scikit-learn"]
        rows = [
            [name, figure(seconds), figure(slowest / seconds), figure(r["best"][name])]
            for name, seconds in r["seconds"].items()
        ]
        size = f"{r['n']} x {r['d']} rows, {len(r['bandwidths'])} bandwidths"
        header = ["", "seconds", "scikit-learn's over it", "best"]
        print(table(f"Speed, {size} (goal: 50 times)", header, rows))
    if r := results.get("accuracy"):
        rows = [
            [
                f"{name}, {count} held out",
                figure(v["best"]),
                f"{s['root mean square']:.2%}",
                f"{s['stated']:.2%}",
                f"{s['largest loss of log-likelihood per row']:.2g}",
                f"{v['of a tenth of all rows']:.3f}",
            ]
            for name, v in r["data"].items()
            for count, s in v["held out"].items()
        ]
        header = ["data", "exact", "off, rms", "stated", "largest loss", "tenth of rows over exact"]
        print(table("Bandwidths by samples", header, rows))
    if r := results.get("rules"):
        names = [f"{rule}, gaussian" for rule in RULES] + ["likelihood, exponential"]
        rows = [
            [f"{name}, {v['d']}", *(likelihood(v["rules"].get(rule, {})) for rule in names)]
            for name, v in r["data"].items()
        ]
        print(table("Mean log-density of other rows", ["data, features", *names], rows))


def likelihood(found):
    return f"{found['log_likelihood']:.2f}" if "log_likelihood" in found else "refused"


def main():
    run(parser_of(__doc__, SECTIONS, OUT).parse_args(), SECTIONS, show)


if __name__ == "__main__":
    main()
