"""Stochastic gradients from LSH buckets, against uniform and norm-weighted sampling.

Logistic regression and least squares, on data that ships with scikit-learn and on two generated
sets: rows with heavy-tailed lengths, and a rare group of rows that the others do not explain. Two
things are measured: the squared error of a batch's gradient over that of uniform sampling, at the
start, half way and at the optimum; and how far the loss is from its optimum after the same number
of steps. Sampling by the gradients' true lengths, the least variance there is, is shown beside
them: it reads every row at every step. Needs scikit-learn, matplotlib and tqdm.

In a torch training loop the same sampler feeds a DataLoader:

    query = lambda: -model.weight[0]
    sampler = LSHBatchSampler(FastHadamard(d, 6, 32), y[:, None] * x, query, 16)
    dataset = WeightedDataset(TensorDataset(x, y))
    for x_batch, y_batch, weights in DataLoader(dataset, batch_sampler=sampler):
        loss = (weights * F.softplus(-y_batch * model(x_batch)[:, 0])).mean()
"""

import argparse
import pathlib
import textwrap
import time

try:
    import matplotlib
    import numpy as np
    from matplotlib import pyplot as plt
    from scipy.optimize import minimize
    from sklearn import datasets
    from tqdm import tqdm
except ImportError as error:
    raise SystemExit(f"{error}: pip install '.[dev]' has what the examples need") from None

from lshkit.hashing import FastHadamard
from lshkit.sampling import LSHBatchSampler

COLORS = {
    "uniform": "tab:gray",
    "norms": "tab:blue",
    "LSH": "tab:orange",
    "LSH, norms": "tab:red",
    "LGD": "tab:green",
    "gradients' lengths": "black",
}
POINTS = ("start", "half way", "at the optimum")


# --- Problems -----------------------------------------------------------------------------------


class LeastSquares:
    """Mean of (x . theta - y)^2 / 2: large gradients where (x, y) points along +-(theta, -1)."""

    def __init__(self, x, y):
        self.x, self.y = x, y
        self.rows = np.concatenate([x, y[:, None]], -1)

    def queries(self, theta):
        query = np.append(theta, -1.0)
        return np.stack([query, -query])

    def loss(self, theta):
        return ((self.x @ theta - self.y) ** 2).mean() / 2

    def slopes(self, theta, i=slice(None)):
        """The gradient of row i is this times x_i."""
        return self.x[i] @ theta - self.y[i]


class Logistic:
    """Mean of log(1 + exp(-y x . theta)) + |theta|^2 / 2e3: large where y x points along -theta."""

    def __init__(self, x, y):
        self.x, self.y = x, y
        self.rows = y[:, None] * x

    def queries(self, theta):
        return -theta[None]

    def loss(self, theta):
        return np.logaddexp(0, -self.rows @ theta).mean() + PENALTY / 2 * theta @ theta

    def slopes(self, theta, i=slice(None)):
        return -self.y[i] / (1 + np.exp(np.clip(self.rows[i] @ theta, -500, 500)))


PENALTY = 1e-3


def with_intercept(x):
    """Standardised columns and a column of ones."""
    spread = x.std(0)
    x = (x - x.mean(0))[:, spread > 0] / spread[spread > 0]
    return np.concatenate([x, np.ones((len(x), 1))], -1)


def problems(n, rng):
    """Name to problem; n rows in the generated ones."""
    x, y = datasets.load_diabetes(return_X_y=True)
    found = {"diabetes, least squares": LeastSquares(with_intercept(x), (y - y.mean()) / y.std())}
    x, y = datasets.load_breast_cancer(return_X_y=True)
    found["breast cancer, logistic"] = Logistic(with_intercept(x), np.where(y == 1, 1.0, -1.0))
    x, y = datasets.load_digits(return_X_y=True)
    found["digits (8 or not), logistic"] = Logistic(with_intercept(x), np.where(y == 8, 1.0, -1.0))
    d = 32
    truth = rng.standard_normal(d) / np.sqrt(d)
    x = rng.standard_normal((n, d)) * np.minimum(rng.pareto(1.5, (n, 1)) + 0.1, 100)
    x /= np.sqrt((x * x).sum(-1).mean() / d)
    y = x @ truth + 0.3 * rng.standard_normal(n)
    found["heavy-tailed rows, least squares"] = LeastSquares(x, y)
    x = rng.standard_normal((n, d))
    x *= np.sqrt(d) / np.linalg.norm(x, axis=-1, keepdims=True)
    y = x @ truth + 0.1 * rng.standard_normal(n)
    odd = rng.random(n) < 0.01
    direction = rng.standard_normal(d)
    x[odd] = x[odd] / 4 + direction * np.sqrt(d) / np.linalg.norm(direction)
    y[odd] = x[odd] @ truth + rng.choice([-6.0, 6.0], odd.sum())
    found["a rare odd group, least squares"] = LeastSquares(x, y)
    return found


def gradient(problem, theta):
    penalty = PENALTY if isinstance(problem, Logistic) else 0.0
    return problem.slopes(theta) @ problem.x / len(problem.x) + penalty * theta


def optimum(problem):
    start = np.zeros(problem.x.shape[1])
    jacobian = lambda theta: gradient(problem, theta)  # noqa: E731
    return minimize(problem.loss, start, jac=jacobian, method="L-BFGS-B", tol=1e-14).x


# --- Sampling -----------------------------------------------------------------------------------


class Drawer:
    """Batches of (indices, weights) at a theta, by one of the methods of COLORS."""

    def __init__(self, method, problem, args, seed):
        self.method, self.problem, self.size = method, problem, args.batch_size
        self.rng = np.random.default_rng(seed)
        self.theta = None
        n = len(problem.x)
        if method == "norms":
            norms = np.linalg.norm(problem.x, axis=-1)
            self.total, self.cumulative = n * norms / norms.sum(), np.cumsum(norms)
        elif method in ("LSH", "LSH, norms", "LGD"):
            options = {"weighting": "collision"} if method == "LGD" else {}
            if method == "LSH, norms":
                options["row_weights"] = np.linalg.norm(problem.x, axis=-1)
            rows = problem.rows
            n_bits = args.n_bits or max(3, int(np.log2(n)) - 7)
            hasher = FastHadamard(rows.shape[1], n_bits, args.n_hashes, seed=seed)
            query = lambda: problem.queries(self.theta)  # noqa: E731
            self.sampler = LSHBatchSampler(
                hasher,
                rows,
                query,
                self.size,
                seed=seed,
                uniform_share=args.uniform_share,
                **options,
            )

    def __call__(self, theta):
        n = len(self.problem.x)
        if self.method == "uniform":
            return self.rng.integers(n, size=self.size), np.ones(self.size)
        if self.method == "norms":
            at = self.rng.random(self.size) * self.cumulative[-1]
            i = np.searchsorted(self.cumulative, at, side="right")
            return i, 1 / self.total[i]
        if self.method == "gradients' lengths":
            sizes = np.abs(self.problem.slopes(theta)) * np.linalg.norm(self.problem.x, axis=-1)
            cumulative = np.cumsum(sizes)
            at = self.rng.random(self.size) * cumulative[-1]
            i = np.searchsorted(cumulative, at, side="right")
            return i, cumulative[-1] / (n * sizes[i])
        self.theta = theta
        return self.sampler.draw()


def starting_point(problem):
    # Not zero: a query of zeros has no direction.
    return np.full(problem.x.shape[1], 1e-6)


def squared_error(method, problem, theta, args):
    """Of a batch's gradient, over fresh hash functions and fresh draws."""
    exact = problem.slopes(theta) @ problem.x / len(problem.x)
    errors = []
    for seed in range(args.tables):
        draw = Drawer(method, problem, args, seed)
        for _ in range(args.batches):
            i, weights = draw(theta)
            estimate = (weights * problem.slopes(theta, i)) @ problem.x[i] / args.batch_size
            errors.append(((estimate - exact) ** 2).sum())
    return np.mean(errors)


def descend(method, problem, rate, args, seed):
    """Losses at args.marks, their mean over args.last, and microseconds of a step's sampling."""
    theta, losses, last, times = starting_point(problem), [], [], []
    draw = Drawer(method, problem, args, seed)
    penalty = PENALTY if isinstance(problem, Logistic) else 0.0
    for step in range(args.steps + 1):
        if step in args.marks:
            losses.append(problem.loss(theta))
        if step in args.last:
            last.append(problem.loss(theta))
        begin = time.perf_counter()
        i, weights = draw(theta)
        times.append(time.perf_counter() - begin)
        slope = (weights * problem.slopes(theta, i)) @ problem.x[i] / args.batch_size
        theta = theta - rate / (1 + 4 * step / args.steps) * (slope + penalty * theta)
        if not np.abs(theta).max() < 1e6:
            return np.full(len(args.marks), np.inf), np.inf, np.inf  # too large a step size
    return np.array(losses), np.mean(last), np.median(times) * 1e6


def converge(method, problem, lowest, args, bar):
    """Of the best step size: the last gap, its standard error, gaps at args.marks, time."""
    curvature = np.linalg.eigvalsh(problem.x.T @ problem.x / len(problem.x))[-1]
    curvature *= 0.25 if isinstance(problem, Logistic) else 1.0
    runs = []
    for rate in args.rates:
        results = []
        for seed in range(args.seeds):
            results.append(descend(method, problem, rate / curvature, args, seed))
            bar.update()
        losses, last, times = zip(*results, strict=True)
        with np.errstate(invalid="ignore"):  # infinite where a step size was too large
            error = np.std(last) / np.sqrt(len(last) - 1) if len(last) > 1 else np.nan
        runs.append((np.mean(last) - lowest, error, np.mean(losses, 0) - lowest, np.min(times)))
    return min(runs, key=lambda run: run[0])


# --- What comes out -----------------------------------------------------------------------------


def measure(args):
    """Name of the problem to method to its results."""
    results = {}
    problems_by_name = problems(args.rows, np.random.default_rng(args.seed))
    total = len(problems_by_name) * len(COLORS) * (len(args.rates) * args.seeds + len(POINTS))
    with tqdm(total=total, unit="run", dynamic_ncols=True) as bar:
        for name, problem in problems_by_name.items():
            bar.set_description(name)
            best, start = optimum(problem), starting_point(problem)
            lowest = problem.loss(best)
            places = (start, (start + best) / 2, best)
            rows = {}
            for method in COLORS:
                errors = []
                for theta in places:
                    errors.append(squared_error(method, problem, theta, args))
                    bar.update()
                last, error, gaps, spent = converge(method, problem, lowest, args, bar)
                row = {"errors": errors, "gaps": gaps, "last": last, "last_error": error}
                rows[method] = row | {"spent": spent}
            for row in rows.values():
                row["ratios"] = np.divide(row["errors"], rows["uniform"]["errors"])
            results[name] = {"methods": rows, "first": problem.loss(start) - lowest}
    return results


def print_tables(results, args):
    print(
        f"\nBatches of {args.batch_size}, {args.n_hashes} hashes. Error: mean squared error of a "
        "batch's gradient over\nthat of uniform sampling. Gap: loss above the optimum in the last "
        f"fifth of {args.steps} steps, over that\nbefore the first, at the best of "
        f"{len(args.rates)} step sizes, mean and standard error of {args.seeds} runs. us: "
        "sampling, a step.\n"
    )
    for name, result in results.items():
        print(f"| {name} | " + " | ".join(f"error, {point}" for point in POINTS) + " | gap | us |")
        print("|---|" + "---|" * (len(POINTS) + 2))
        for method, row in result["methods"].items():
            cells = [f"{ratio:.2g}" for ratio in row["ratios"]]
            gap, error = (row[key] / result["first"] for key in ("last", "last_error"))
            cells += [f"{gap:.1e} ± {error:.0e}", f"{row['spent']:.0f}"]
            print(f"| {method} | " + " | ".join(cells) + " |")
        print()
    print(verdict(results))


def verdict(results):
    """Where LSH helps and where not, from the figures."""
    lines = []
    for name, result in results.items():
        methods = result["methods"]
        last = {method: row["last"] for method, row in methods.items()}
        lsh = min(("LSH", "LSH, norms", "LGD"), key=last.get)
        plain = min(("uniform", "norms"), key=last.get)
        factor = last[plain] / last[lsh]
        noise = np.hypot(methods[plain]["last_error"], methods[lsh]["last_error"])
        clear = abs(last[plain] - last[lsh]) > 3 * noise
        if clear and factor > 1:
            said = f"helps: {lsh} ends {factor:.1f}x nearer to the optimum than {plain}"
        elif not clear:
            said = f"does not help: {lsh} ends as near to the optimum as {plain}, within the noise"
        else:
            said = (
                f"does not help: {lsh} ends {1 / factor:.1f}x farther from the optimum than {plain}"
            )
        lines.append(f"- {name}: LSH {said}.")
    lines.append(
        "- The time is that of drawing alone: where a row's gradient costs less than the buckets "
        "do, as in\n  these linear models, uniform or norm-weighted steps afford larger batches."
    )
    return "\n".join(lines)


def draw_figure(results, args):
    matplotlib.use("Agg")
    figure, axes = plt.subplots(2, 3, figsize=(13, 7.2), layout="constrained")
    axes = axes.ravel()
    for axis, (name, result) in zip(axes, results.items(), strict=False):
        for method, row in result["methods"].items():
            style = {"ls": ":"} if method == "gradients' lengths" else {}
            axis.plot(
                args.marks + 1,
                np.maximum(row["gaps"] / result["first"], 1e-9),
                color=COLORS[method],
                **style,
            )
        axis.set(xscale="log", yscale="log", title=name)
        axis.set(xlabel=f"steps of {args.batch_size} rows", ylabel="loss above the optimum, share")
        axis.spines[["top", "right"]].set_visible(False)
    bars, width = axes[-1], 0.8 / len(COLORS)
    for k, (method, color) in enumerate(COLORS.items()):
        heights = [result["methods"][method]["ratios"][-1] for result in results.values()]
        at = np.arange(len(heights)) + (k - len(COLORS) / 2 + 0.5) * width
        bars.bar(at, heights, width, color=color, label=method)
    bars.axhline(1, color="black", lw=0.8)
    short = [name.split(",")[0].replace(" (8 or not)", "") for name in results]
    bars.set_xticks(range(len(short)), [textwrap.fill(text, 11) for text in short], fontsize=8)
    bars.set(yscale="log", title="squared error at the optimum, uniform = 1")
    bars.spines[["top", "right"]].set_visible(False)
    figure.legend(*bars.get_legend_handles_labels(), loc="outside lower center", ncols=len(COLORS))
    figure.savefig(args.out, dpi=100)


# --- Command line -------------------------------------------------------------------------------


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rows", type=int, default=10000, help="of the generated sets")
    parser.add_argument("--n-bits", type=int, help="default: about 128 rows a bucket, 3 at least")
    parser.add_argument("--n-hashes", type=int, default=32)
    parser.add_argument("--uniform-share", type=float, default=0.5)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each method")
    parser.add_argument("--tables", type=int, default=20, help="sets of hash functions for errors")
    parser.add_argument("--batches", type=int, default=40, help="of each set, for errors")
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 0.3, 0.1, 0.03])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a minimum of everything")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("lsh_sgd.png"))
    args = parser.parse_args()
    if args.quick:
        args.steps, args.rows, args.seeds, args.rates = 30, 1000, 1, [0.3]
        args.tables, args.batches = 2, 5
    for name in ("steps", "batch_size", "rows", "n_hashes", "seeds", "tables", "batches"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.rows < 100:
        parser.error("--rows must be at least 100")
    if args.n_bits is not None and not 1 <= args.n_bits <= 64:
        parser.error("--n-bits must be 1 to 64")
    if not 0 < args.uniform_share <= 1:
        parser.error("--uniform-share must be above 0 and at most 1")
    if not all(rate > 0 for rate in args.rates):
        parser.error("--rates must be above 0")
    if args.out.suffix != ".png" or not args.out.absolute().parent.is_dir():
        parser.error(f"--out must be a .png file in an existing folder, got {args.out}")
    args.last = set(np.linspace(0.8 * args.steps, args.steps, 20).astype(int))
    args.marks = np.unique(np.geomspace(1, args.steps + 1, 40).astype(int)) - 1
    return args


def main():
    args = parse_args()
    results = measure(args)
    print_tables(results, args)
    draw_figure(results, args)
    print(f"\nFigure: {args.out}")


if __name__ == "__main__":
    main()
