"""Time of lsh_attention against softmax attention, by length and share of the pairs.

Standard normal queries, keys and values of 64 columns, float32, default window and first key; new
hash functions are drawn and all rows hashed in every call. Smallest times of many, all calls of a
length in turns in one process.

    python -m benchmarks.speed.lsh_attention --json benchmarks/results/lsh_attention.json

Softmax attention of 65,536 positions takes 13 seconds forward and a minute with backward; all of it
about ten minutes.
"""

import argparse
import datetime
import functools
import pathlib

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import write_json
from benchmarks.measurement import (
    BACKWARD,
    CAUSAL,
    FORWARD,
    best_in_turns,
    figure,
    machine,
    milliseconds,
    of_pass,
    pin_to_one_cpu,
    table,
)
from lshkit.attention import lsh_attention

HEAD_DIM = 64
HEADS = {128: 4, 512: 4, 2048: 2, 8192: 1, 65536: 1}  # of each length
SETTINGS = ((8, 32), (10, 32), (11, 32), (12, 32), (12, 64))
SOFTMAX = "softmax"


def attentions():
    named = {SOFTMAX: scaled_dot_product_attention}
    for n_bits, n_hashes in SETTINGS:
        options = {"n_bits": n_bits, "n_hashes": n_hashes, "seed": 0}
        named[f"{n_bits}, {n_hashes}"] = functools.partial(lsh_attention, **options)
    return named


def measure(n, seconds):
    generator = torch.Generator().manual_seed(0)
    tensors = torch.randn(3, 1, HEADS[n], n, HEAD_DIM, generator=generator).unbind()
    leaves = [x.clone().requires_grad_() for x in tensors]
    grad_out = torch.ones_like(tensors[0])

    named = attentions()
    results = {}
    for name, which in (("forward", FORWARD), ("causal", CAUSAL), ("forward + backward", BACKWARD)):
        calls = {side: of_pass(attend, which, leaves, grad_out) for side, attend in named.items()}
        results[name] = best_in_turns(calls, seconds)
    results["pairs"] = {SOFTMAX: 1.0}
    for n_bits, n_hashes in SETTINGS:
        options = {"n_bits": n_bits, "n_hashes": n_hashes, "seed": 0, "return_pairs": True}
        _, pairs = lsh_attention(*tensors, **options)
        results["pairs"][f"{n_bits}, {n_hashes}"] = pairs.float().mean().item() / n
    return results


def show(results):
    rows = []
    for n, r in results.items():
        for side, share in r["pairs"].items():
            row = [n, side, f"{100 * share:.3g} %"]
            for name in ("forward", "causal", "forward + backward"):
                times = r[name]
                row += [milliseconds(times[side]), figure(times[SOFTMAX] / times[side])]
            rows.append(row)
    header = ["n", "bits, hashes", "pairs"]
    for name in ("forward", "causal forward", "forward + backward"):
        header += [f"{name} ms", "softmax / this"]
    print(table("### lsh_attention", header, rows))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="n = 128 alone, a moment")
    parser.add_argument("--lengths", type=int, nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--seconds", type=float, default=2.0, help="for each length and pass")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path, help="write the measurements there")
    args = parser.parse_args()
    lengths, seconds = ([128], 0.05) if args.quick else (args.lengths, args.seconds)
    torch.set_num_threads(args.threads)
    if args.threads == 1:
        pin_to_one_cpu()
    settings = {"date": datetime.date.today().isoformat(), "machine": machine()}
    settings |= {"threads": args.threads, "head_dim": HEAD_DIM, "heads": HEADS}
    results = {n: measure(n, seconds) for n in lengths}
    show(results)
    if args.json:
        write_json(args.json, settings | {"lengths": results})


if __name__ == "__main__":
    main()
