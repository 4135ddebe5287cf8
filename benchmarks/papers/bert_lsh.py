"""BERT-LSH's table of computational efficiency, beside the paper's figures and up to n = 4096.

The paper (section 3.1) takes one random sequence of 10 tokens, 2 heads of 64, 2 bits, a table of 64
and 1 hash, and counts the floating-point operations of the matrix products, the dot products of
queries and keys (mean of 100 executions) and the time of the scores (mean of 1000). Operations of
hashing are 2 per weight of a hash function, query and key; the paper's profiler saw only these, not
the dot products of the pairs that collide, so both sums are shown. Times are of a whole attention
where not said otherwise, the smallest of many, both sides in turns in one process.

    python -m benchmarks.papers.bert_lsh --json benchmarks/results/bert_lsh.json
"""

import argparse
import datetime
import pathlib
import statistics
import time

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import write_json
from benchmarks.measurement import best_in_turns, figure, machine, pin_to_one_cpu, table
from lshkit.attention import bert_lsh_attention

HEADS, HEAD_DIM = 2, 64
PAPER = {
    "kflops": {"softmax": 25.60, "BERT-LSH": 10.24},
    "dot products": {"softmax": 200, "BERT-LSH": 28.5},
    "seconds": {"softmax": 1.22e-5, "BERT-LSH": 3.37e-4},
}
SETTINGS = {"2 bits, 1 hash": (2, 1), "8 bits, 1 hash": (8, 1), "8 bits, 8 hashes": (8, 8)}
LENGTHS = (10, 64, 256, 1024, 4096)
DENSE_UP_TO = 4096  # faithful: (heads, n, n) scores and a few copies of them


def inputs(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 1, HEADS, n, HEAD_DIM, generator=generator).unbind()


def hash_flops(n, n_bits, n_hashes):
    return 2 * HEADS * 2 * n * HEAD_DIM * n_bits * n_hashes


def mean_dot_products(n, executions, **options):
    """Over random sequences and hash functions, of all heads."""
    counts = []
    for seed in range(executions):
        options |= {"seed": seed, "return_counts": True}
        _, count = bert_lsh_attention(*inputs(n, seed), **options)
        counts.append(int(count.sum()))
    return statistics.fmean(counts)


def papers_table(executions, runs):
    query, key, value = inputs(10)
    with FlopCounterMode(display=False) as counter:
        query @ key.mT
    exact = counter.get_total_flops()
    hashing = hash_flops(10, 2, 1)
    dots = {
        "faithful": mean_dot_products(10, executions, faithful=True),
        "corrected": mean_dot_products(10, executions),
    }
    calls = {
        "scores alone": lambda: query @ key.mT,
        "softmax": lambda: scaled_dot_product_attention(query, key, value),
        "faithful": lambda: bert_lsh_attention(query, key, value, faithful=True, seed=0),
        "corrected": lambda: bert_lsh_attention(query, key, value, seed=0),
    }
    means = {}
    for name, call in calls.items():
        call()
        begin = time.perf_counter()
        for _ in range(runs):
            call()
        means[name] = (time.perf_counter() - begin) / runs
    flops = {"softmax": exact, "hashing": hashing}
    flops |= {name: hashing + 2 * HEAD_DIM * count for name, count in dots.items()}
    return {"flops": flops, "dot products": {"softmax": HEADS * 100, **dots}, "mean seconds": means}


def extended(lengths, seconds):
    results = {}
    for n in lengths:
        query, key, value = inputs(n)
        calls = {"softmax": lambda q=query, k=key, v=value: scaled_dot_product_attention(q, k, v)}
        dots, flops = {}, {"softmax": 2 * HEADS * n * n * HEAD_DIM}
        for name, (n_bits, n_hashes) in SETTINGS.items():
            options = {"n_bits": n_bits, "n_hashes": n_hashes}
            sides = {name: options}
            if (n_bits, n_hashes) == (2, 1) and n <= DENSE_UP_TO:
                sides[f"{name}, faithful"] = options | {"faithful": True}
            for side, arguments in sides.items():
                dots[side] = mean_dot_products(n, 2 if n > 1000 else 10, **arguments)
                flops[side] = hash_flops(n, n_bits, n_hashes) + 2 * HEAD_DIM * dots[side]
                calls[side] = lambda q=query, k=key, v=value, o=arguments: bert_lsh_attention(
                    q, k, v, seed=0, **o
                )
        results[n] = {
            "dot products": dots,
            "flops": flops,
            "seconds": best_in_turns(calls, seconds, rounds=3),
        }
    return results


def show(results):
    paper = results["paper"]
    flops, dots, seconds = paper["flops"], paper["dot products"], paper["mean seconds"]
    thousand = lambda x: f"{x / 1e3:.2f}"  # noqa: E731
    scientific = lambda x: f"{x:.2e}"  # noqa: E731

    def papers(name):
        flops, dots, seconds = (PAPER[column][name] for column in PAPER)
        return [f"{name}, paper", f"{flops:.2f}", "", dots, scientific(seconds)]

    rows = [
        papers("softmax"),
        ["softmax, scores alone", thousand(flops["softmax"]), "", dots["softmax"],
         scientific(seconds["scores alone"])],
        ["softmax, whole attention", "", "", "", scientific(seconds["softmax"])],
        papers("BERT-LSH"),
    ]  # fmt: skip
    for side in ("faithful", "corrected"):
        rows.append(
            [f"BERT-LSH, {side}", thousand(flops["hashing"]), thousand(flops[side])]
            + [f"{dots[side]:.1f}", scientific(seconds[side])]
        )
    header = ["n = 10", "kFLOP", "with the pairs", "dot products", "seconds"]
    print(table("### The paper's table", header, rows))
    rows = []
    for n, r in results["lengths"].items():
        pairs = HEADS * int(n) ** 2
        base = r["seconds"]["softmax"]
        rows.append([n, "softmax", "100 %", thousand(r["flops"]["softmax"]), figure(1e3 * base), 1])
        for side, count in r["dot products"].items():
            time_of = r["seconds"][side]
            rows.append(
                [n, side, f"{100 * count / pairs:.3g} %", thousand(r["flops"][side])]
                + [figure(1e3 * time_of), figure(base / time_of)]
            )
    header = ["n", "attention", "dot products", "kFLOP", "ms", "softmax / this"]
    print(table("### Beyond it", header, rows))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few executions, n up to 64")
    parser.add_argument("--seconds", type=float, default=2.0, help="of timing for each length")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path, help="write the measurements there")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.threads == 1:
        pin_to_one_cpu()
    settings = {"date": datetime.date.today().isoformat(), "machine": machine()}
    settings |= {"threads": args.threads, "heads": HEADS, "head_dim": HEAD_DIM}
    settings |= {"settings": SETTINGS, "table_size": 64, "the paper's": PAPER}
    with torch.no_grad():
        results = {
            "paper": papers_table(5 if args.quick else 100, 20 if args.quick else 1000),
            "lengths": extended(LENGTHS[:2] if args.quick else LENGTHS, args.seconds),
        }
    show(results)
    if args.json:
        write_json(args.json, settings | results)


if __name__ == "__main__":
    main()
