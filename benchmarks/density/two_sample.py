"""Two-sample tests by the maximum mean discrepancy: exact, by bucket sums, and plain NumPy.

Times: two samples of n rows, 64 features, 999 permutations, one thread; both sides in turns in one
process, the smallest of several. Plain NumPy holds the kernel matrix and sums it for each
permutation by one matrix product for all. Power: how often a shift of the mean is found at the
level 0.05, and how often an alarm is false, over seeds; the same samples for every algorithm. Three
minutes.

    python -m benchmarks.density.two_sample
    python -m benchmarks.density.two_sample --tables
"""

import numpy as np
from scipy.spatial.distance import cdist
from tqdm import tqdm

from benchmarks import RESULTS
from benchmarks.measurement import best_in_turns, figure, table
from benchmarks.sections import parser_of, run
from lshkit.kde import two_sample_test

OUT = RESULTS / "two_sample.json"
FEATURES, PERMUTATIONS, LEVEL = 64, 999, 0.05
SIZES, EXACT_UP_TO = (500, 1000, 2500, 10_000, 100_000), 2500
HASHES = 16, 64, 256
SHIFTS = 0.0, 0.1, 0.15, 0.2  # of the mean, in standard deviations, in all directions


def plain(X, Y, n_permutations, seed, kernel="laplacian"):
    """p-value and statistic by the kernel matrix of all rows."""
    rows, n, m = np.concatenate([X, Y]), len(X), len(Y)
    distances = cdist(rows, rows, "cityblock" if kernel == "laplacian" else "euclidean")
    width = np.median(distances[np.triu_indices(len(rows), 1)])
    matrix = np.exp(-((distances / width) ** (1 if kernel == "laplacian" else 2)))
    np.fill_diagonal(matrix, 0)
    rng = np.random.default_rng(seed)
    labels = np.zeros((len(rows), 1 + n_permutations))
    labels[:n, 0] = 1
    for column in labels.T[1:]:
        column[rng.permutation(len(rows))[:n]] = 1
    products = matrix @ labels
    inner, across = (products * labels).sum(axis=0), matrix.sum(axis=0) @ labels
    rest = matrix.sum() - 2 * across + inner
    values = inner / (n * (n - 1)) + rest / (m * (m - 1)) - 2 * (across - inner) / (n * m)
    return (1 + (values[1:] >= values[0]).sum()) / (1 + n_permutations), values[0]


def times(args):
    results = {}
    for n in tqdm((100, 200) if args.quick else SIZES, desc="times"):
        rng = np.random.default_rng(0)
        X, Y = rng.normal(size=(2, n, FEATURES))
        options = {"n_permutations": 99 if args.quick else PERMUTATIONS, "random_state": 0}
        calls = {
            "bucket_sum": lambda o=options, s=(X, Y): two_sample_test(
                *s, algorithm="bucket_sum", **o
            )
        }
        if n <= EXACT_UP_TO:
            calls["brute"] = lambda o=options, s=(X, Y): two_sample_test(*s, algorithm="brute", **o)
            calls["NumPy"] = lambda o=options, s=(X, Y): plain(*s, o["n_permutations"], 0)
        results[str(n)] = best_in_turns(calls, 0, 3)
    return {"permutations": options["n_permutations"], "features": FEATURES, "seconds": results}


def tests_of(X, Y, kernel, seed):
    options = {"kernel": kernel, "n_permutations": 99, "random_state": seed}
    yield "brute", two_sample_test(X, Y, algorithm="brute", **options)
    for m in HASHES if kernel != "gaussian" else ():
        yield f"{m} hashes", two_sample_test(X, Y, algorithm="bucket_sum", n_hashes=m, **options)


def power(args):
    n, d, seeds = 200, 8, 3 if args.quick else 150
    results = {}
    for kernel in tqdm(("laplacian", "angular", "gaussian"), desc="power"):
        for shift in SHIFTS:
            found = {}
            for seed in range(seeds):
                rng = np.random.default_rng(seed)
                X, Y = rng.normal(size=(n, d)), rng.normal(shift, size=(n, d))
                for name, result in tests_of(X + 0.5, Y + 0.5, kernel, seed):
                    found.setdefault(name, []).append(result.pvalue <= LEVEL)
            for name, alarms in found.items():
                results.setdefault(f"{kernel}, {name}", {})[str(shift)] = float(np.mean(alarms))
    return {"rows": n, "features": d, "seeds": seeds, "permutations": 99, "found": results}


SECTIONS = {"times": times, "power": power}


def show(results):
    if found := results.get("times"):
        rows = []
        for n, seconds in found["seconds"].items():
            ours = seconds["bucket_sum"]
            cells = [figure(seconds[x]) if x in seconds else "" for x in ("brute", "NumPy")]
            ratios = [figure(seconds[x] / ours) if x in seconds else "" for x in ("brute", "NumPy")]
            rows.append([n, figure(ours), *cells, *ratios])
        header = [
            "rows each",
            "bucket_sum, s",
            "brute, s",
            "NumPy, s",
            "brute / sum",
            "NumPy / sum",
        ]
        print(table(f"{found['permutations']} permutations", header, rows))
    if found := results.get("power"):
        rows = [[name, *(f"{x:.1%}" for x in v.values())] for name, v in found["found"].items()]
        title = f"Share of {found['seeds']} tests with p <= {LEVEL}, {found['rows']} rows each"
        print(table(title, ["shift", *map(str, SHIFTS)], rows))


def main():
    run(parser_of(__doc__, SECTIONS, OUT).parse_args(), SECTIONS, show)


if __name__ == "__main__":
    main()
