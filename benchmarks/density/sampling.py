"""Measures the draw verb and its clients: tables, draws, variances, normalisers, sampled softmax.

Both sides of a ratio run in turns in one process, on one thread; the smallest time of each counts.
Five minutes. `--sections` measures some of it into the same file, `--quick` at small sizes.
"""

import time

import numpy as np
import torch

from benchmarks import RESULTS
from benchmarks.measurement import best_in_turns, figure, table
from benchmarks.sections import parser_of, run
from lshkit.buckets import HashTables
from lshkit.hashing import FastHadamard
from lshkit.sampling import LSHSampler, PartitionSampler, log_partition

OUT = RESULTS / "sampling.json"
FEATURES = 64
VARIANCE = {"n_bits": 8, "n_hashes": 32}
# Of classes and queries: how far around the centers (0.4: cosine 0.86 between two of a cluster),
# the length of the queries, and probes. "all directions" has no clusters.
DATA = {
    "clusters, noise 0.4, |q| = 10": (0.4, 10.0, 8),
    "clusters, noise 0.4, |q| = 5": (0.4, 5.0, 8),
    "clusters, noise 0.4, |q| = 15": (0.4, 15.0, 8),
    "clusters, noise 0.6, |q| = 10": (0.6, 10.0, 8),
    "the same, 32 probes": (0.6, 10.0, 32),
    "all directions, |q| = 5": (None, 5.0, 8),
    "all directions, |q| = 10": (None, 10.0, 8),
    "all directions, |q| = 15": (None, 15.0, 8),
}


def directions(rng, n):
    x = rng.standard_normal((n, FEATURES), np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


# --- Tables and draws ---------------------------------------------------------------------------


def tables(args):
    n, m, n_bits = args.rows, 32, 16
    x = directions(np.random.default_rng(0), n)
    hasher = FastHadamard(FEATURES, n_bits, m, seed=0)
    codes = hasher.hash(x)
    calls = {
        "hash": lambda: hasher.hash(x),
        "hash and tables": lambda: HashTables(hasher.hash(x)),
        "LSHSampler.fit and tables": lambda: LSHSampler(hasher).fit(x).tables,
        "tables, weighted": lambda: HashTables(codes, weights=np.ones(n)),
    }
    best = best_in_turns(calls, 0, 3)
    return {
        "rows": n,
        "n_hashes": m,
        "n_bits": n_bits,
        "seconds": best,
        "over hashing": best["hash and tables"] / best["hash"],
        "bytes": HashTables(codes).nbytes,
    }


def draws(args):
    n, m, n_bits, n_q = args.rows, 32, 16, 512 if args.quick else 4096
    rng = np.random.default_rng(0)
    x = directions(rng, n)
    queries = x[rng.integers(n, size=n_q)]
    hasher = FastHadamard(FEATURES, n_bits, m, seed=0)
    codes = hasher.hash(x)
    query_codes = hasher.hash(queries)
    uniform, weighted = HashTables(codes), HashTables(codes, weights=rng.random(n))
    sampler = LSHSampler(hasher).fit(x)
    sampler.tables  # noqa: B018  builds them
    calls = {
        "uniform": lambda: uniform.draw(query_codes, seed=0),
        "weighted": lambda: weighted.draw(query_codes, seed=0),
        "LSHSampler.sample, hashing and probabilities": lambda: sampler.sample(queries, m),
    }
    best = best_in_turns(calls, 0, 10)
    each = {name: 1e9 * seconds / (n_q * m) for name, seconds in best.items()}
    return {"rows": n, "n_hashes": m, "queries": n_q, "nanoseconds a query and table": each}


# --- Variance -----------------------------------------------------------------------------------


def variance_at(scale, x, queries, runs):
    terms = np.exp(scale * (queries @ x.T - 1))
    exact = terms.sum(1)
    results = {}
    for method in ("horvitz_thompson", "full_bucket", "hbe"):
        values, errors = [], []
        for seed in range(runs):
            hasher = FastHadamard(FEATURES, VARIANCE["n_bits"], VARIANCE["n_hashes"], seed=seed)
            sampler = LSHSampler(hasher, seed=seed).fit(x)
            value, error = sampler.estimate(queries, lambda i, j: terms[i, j], method)
            values.append(value / exact)
            errors.append(error / exact)
        results[method] = {
            "relative variance": float(((np.array(values) - 1) ** 2).mean()),
            "stated": float(np.square(errors).mean()),
            "relative bias": float(np.mean(values) - 1),
        }
    ratio = results["hbe"]["relative variance"] / results["horvitz_thompson"]["relative variance"]
    return {"methods": results, "hbe over horvitz_thompson": ratio}


def variance(args):
    """Of the softmax's mean over scikit-learn's digits: the mean of exp(s (cos(q, x_j) - 1))."""
    from sklearn.datasets import load_digits

    x = load_digits().data
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    queries = x[:: 72 if args.quick else 18]
    runs = 8 if args.quick else 100
    scales = {str(scale): variance_at(scale, x, queries, runs) for scale in (8, 24)}
    sizes = {"rows": len(x), "queries": len(queries), "runs": runs}
    return {**sizes, **VARIANCE, "scales": scales}


# --- Normalisers --------------------------------------------------------------------------------


def log_exact(queries, classes):
    """The normalisers by blocked BLAS: one pass over the classes for the whole batch."""
    block = 4096
    largest = np.full(len(queries), -np.inf, np.float32)
    total = np.zeros(len(queries))
    buffer = np.empty((len(queries), block), np.float32)
    for first in range(0, len(classes), block):
        part = classes[first : first + block]
        logits = np.matmul(queries, part.T, out=buffer[:, : len(part)])
        before, largest = largest, np.maximum(largest, logits.max(1))
        np.subtract(logits, largest[:, None], out=logits)
        np.exp(logits, out=logits)
        total = total * np.exp(before - largest) + logits.sum(1)
    return largest + np.log(total)


def classes_and_queries(noise, scale, n, n_queries):
    rng = np.random.default_rng(0)
    if noise is None:
        return directions(rng, n), np.float32(scale) * directions(rng, n_queries)
    centers = directions(rng, max(2, n // 1000))

    def around(count):
        x = centers[rng.integers(len(centers), size=count)]
        x += np.float32(noise) * directions(rng, count)
        return x / np.linalg.norm(x, axis=1, keepdims=True)

    return around(n), np.float32(scale) * around(n_queries)


def normaliser_of(noise, scale, n_probes, args):
    n_queries = 256
    classes, queries = classes_and_queries(noise, scale, args.rows, n_queries)
    begin = time.perf_counter()
    sampler = PartitionSampler(classes, n_probes=n_probes, seed=0)
    setup = time.perf_counter() - begin
    exact = log_exact(queries, classes)
    estimates = []

    def estimate():
        seed = len(estimates)
        estimates.append(log_partition(queries, classes, sampler=sampler, seed=seed))

    calls = {"exact": lambda: log_exact(queries, classes), "log_partition": estimate}
    best = best_in_turns(calls, 0, 2 if args.quick else 5, most=3)
    values, errors = np.array(estimates).swapaxes(0, 1)
    relative = np.expm1(values - exact)
    sample = np.random.default_rng(0).choice(len(classes), min(8192, len(classes)))
    alone = log_exact(queries, classes[sample]) + np.log(len(classes) / len(sample)) - exact
    options = {"n_bits": sampler.hasher.n_bits, "n_hashes": sampler.hasher.n_hashes}
    options |= {"n_probes": sampler.n_probes, "min_count": sampler.min_count, "n_samples": 8192}
    return {
        "options": options,
        "microseconds a query": {k: 1e6 * s / n_queries for k, s in best.items()},
        "faster": best["exact"] / best["log_partition"],
        "mean relative error": float(np.abs(relative).mean()),
        "relative standard deviation": float(np.sqrt((relative**2).mean())),
        "stated": float(np.sqrt((errors**2).mean())),
        "mean relative error of 8192 uniform samples": float(np.abs(np.expm1(alone)).mean()),
        "tables, seconds": setup,
    }


def normaliser(args):
    data = {name: normaliser_of(*of, args) for name, of in DATA.items()}
    return {"rows": args.rows, "features": FEATURES, "data": data}


# --- Sampled softmax ----------------------------------------------------------------------------


def step_of(n, batch, rounds):
    """A step of an output layer: loss, gradients of batch and weights, SGD."""
    from lshkit.sampling import SampledSoftmaxLoss

    torch.manual_seed(0)
    classes, hidden = classes_and_queries(0.4, 10.0, n, batch)
    weight = torch.nn.Parameter(torch.from_numpy(classes).clone())
    target = torch.from_numpy((hidden @ classes.T).argmax(1))
    hidden = torch.from_numpy(hidden).requires_grad_()
    loss = SampledSoftmaxLoss(FEATURES, n, weight=weight, bias=False, sparse=True)
    sides = {
        "full": lambda: torch.nn.functional.cross_entropy(hidden @ weight.T, target),
        "sampled": lambda: loss(hidden, target),
    }
    losses = {name: [] for name in sides}

    def step(name):
        optimizer = torch.optim.SGD([weight, hidden], lr=1e-6)
        optimizer.zero_grad()
        value = sides[name]()
        value.backward()
        optimizer.step()
        losses[name].append(value.item())

    step("sampled")  # builds the tables
    calls = {"full": lambda: step("full"), "sampled": lambda: step("sampled")}
    best = best_in_turns(calls, 0, rounds)
    return {
        "milliseconds": {name: 1e3 * seconds for name, seconds in best.items()},
        "faster": best["full"] / best["sampled"],
        "losses": {name: float(np.mean(values)) for name, values in losses.items()},
    }


def sampled_softmax(args):
    batch, rounds = 64, 3 if args.quick else 5
    classes = {str(n): step_of(n, batch, rounds) for n in (args.rows // 10, args.rows)}
    return {"batch": batch, "features": FEATURES, "classes": classes}


# --- Results ------------------------------------------------------------------------------------

SECTIONS = {
    "tables": tables,
    "draws": draws,
    "variance": variance,
    "normaliser": normaliser,
    "sampled_softmax": sampled_softmax,
}


def show(results):
    if r := results.get("tables"):
        rows = [[name, figure(seconds)] for name, seconds in r["seconds"].items()]
        title = f"Tables of {r['rows']} rows: {r['over hashing']:.2f} times hashing (goal: 3)"
        print(table(title, ["", "seconds"], rows))
    if r := results.get("draws"):
        rows = [[name, figure(ns)] for name, ns in r["nanoseconds a query and table"].items()]
        print(table("Draws (goal: 150)", ["", "ns a query and table"], rows))
    for scale, r in results.get("variance", {}).get("scales", {}).items():
        rows = [[k, *(f"{x:.2g}" for x in v.values())] for k, v in r["methods"].items()]
        ratio = r["hbe over horvitz_thompson"]
        title = f"Digits, s = {scale}: variance of HBE over Horvitz-Thompson {ratio:.1f} (goal: 5)"
        print(table(title, ["method", "relative variance", "stated", "bias"], rows))
    if r := results.get("normaliser"):
        header = ["data", "exact, us", "log_partition, us", "ratio", "error", "stated", "uniform"]
        rows = [
            [
                name,
                *(figure(us) for us in v["microseconds a query"].values()),
                figure(v["faster"]),
                f"{v['mean relative error']:.2%}",
                f"{v['stated']:.2%}",
                f"{v['mean relative error of 8192 uniform samples']:.2%}",
            ]
            for name, v in r["data"].items()
        ]
        title = f"Normaliser of {r['rows']} classes (goal: 10 times as fast at 1 %)"
        print(table(title, header, rows))
    if r := results.get("sampled_softmax"):
        rows = [
            [n, *(figure(ms) for ms in v["milliseconds"].values()), figure(v["faster"])]
            for n, v in r["classes"].items()
        ]
        header = ["classes", "full, ms", "sampled, ms", "ratio"]
        print(table("A step of an output layer (goal: 5 at 1e6)", header, rows))


def main():
    parser = parser_of(__doc__, SECTIONS, OUT)
    parser.add_argument("--rows", type=int, help="of tables, and classes; default 1,000,000")
    args = parser.parse_args()
    args.rows = args.rows or (20_000 if args.quick else 1_000_000)
    torch.set_num_threads(1)
    run(args, SECTIONS, show)


if __name__ == "__main__":
    main()
