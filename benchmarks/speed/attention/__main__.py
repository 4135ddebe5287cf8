"""YOSO attention against softmax attention and plain-torch YOSO on a CPU: time and memory.

Both sides run in one process in turns, and each keeps the smallest of its times: what is printed
are ratios. Ours is always the public call, `lshkit.attention.yoso_attention`, with seed=None: fresh
hash functions at every call, whose drawing is part of the time. Softmax attention is
`torch.nn.functional.scaled_dot_product_attention` in float32; at 16384 it runs once, and its times
at 65536 are 16 times those unless --long measures them on one head (a minute). Forward passes run
under no_grad. Memory is measured in processes of its own.

Sections can be measured one at a time: the file keeps what the others had measured before, and each
CPU model has a file of its own. "bounds" is the time of kernels over bounds that the machine gives
in the same run. Tables are Markdown. All of it takes some ten minutes on a quiet machine.

    python -m benchmarks.speed.attention
    python -m benchmarks.speed.attention --sections soft --long
    python -m benchmarks.speed.attention --tables
    python -m benchmarks.speed.attention --machines
    python -m benchmarks.speed.attention --quick
    LSHKIT_ISA=avx2 python -m benchmarks.speed.attention  # into a file of its own
"""

import argparse
import datetime
import json
import os
import pathlib
import re
import sys

import torch

from benchmarks import RESULTS, command_line, positive, write_json
from benchmarks.measurement import (
    HEAD_DIM,
    HEADS,
    N_BITS,
    N_HASHES,
    Stopwatch,
    figure,
    pin_to_one_cpu,
    table,
)
from benchmarks.measurement import machine as this_machine
from benchmarks.speed.attention import (
    bounds,
    long_context,
    machines,
    one_gradient,
    options,
    sampled,
)

SECTIONS = (
    bounds.SECTIONS
    | sampled.SECTIONS
    | options.SECTIONS
    | one_gradient.SECTIONS
    | long_context.SECTIONS
)
ALONE = sampled.ALONE | long_context.ALONE
FOLDER = RESULTS / "attention_cpu"  # a file for each CPU model and instruction set
SAME = ("cpu", "instruction_set", "compiler", "lshkit", "torch")  # of all sections of one file


def report(results):
    """The tables of all sections that are there, then goals and what was reached."""
    goals = []
    for name, section in SECTIONS.items():
        if name in results:
            yield from section.tables(results[name])
            goals += section.goals(results[name])
    notes = [
        f"{name} at {n}: {note}"
        for name, record in results["sections"].items()
        for n, note in record["softmax"].items()
        if note != "in turns with ours"
    ]
    if notes:
        yield "Softmax attention's times: " + "; ".join(notes) + ".\n"
    rows = []
    for what, reached, bound, goal in goals:
        met = reached >= goal if bound == "at least" else reached <= goal
        rows.append([what, f"{bound} {goal:g}", figure(reached), "yes" if met else "no"])
    yield table("Goals (AVX-512, one thread)", ["", "goal", "reached", "met"], rows)


def measure(names, args, results):
    """Adds each section to the results, written as soon as it is there."""
    stopwatch = Stopwatch(args.repeats, args.seconds, args.threads, args.long)
    for name in names:
        section = SECTIONS[name]
        lengths = section.quick if args.quick else section.lengths
        if args.lengths and not section.own_lengths:
            lengths = [n for n in sorted(set(args.lengths)) if n >= section.shortest]
        print(f"{name} ...", end=" ", file=sys.stderr, flush=True)
        stopwatch.notes = {}
        load, begin = os.getloadavg()[0], datetime.datetime.now(datetime.timezone.utc)
        measured = section.measure(lengths, stopwatch)
        took = (datetime.datetime.now(datetime.timezone.utc) - begin).total_seconds()
        print(f"{took:.0f} s", file=sys.stderr, flush=True)
        results[name] = json.loads(json.dumps(measured))  # keys as they will be in the file
        results["sections"][name] = {
            "date": begin.isoformat(timespec="seconds"),
            "took": round(took, 1),
            "load_average_at_start": load,
            "repeats": args.repeats,
            "seconds": args.seconds,
            "softmax": stopwatch.notes,
            "options": section.options,
        }
        if name == "softmax":
            results["ratios"] = {
                n: {
                    p: {side: t["softmax"] / t[side] for side in t if side != "softmax"}
                    for p, t in times.items()
                }
                for n, times in results["softmax"].items()
            }
        if args.json:
            write_json(args.json, results)


# --- Command line -------------------------------------------------------------------------------


def parse_arguments():
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="NAME",
        help=f"what to measure, all by default: {', '.join(SECTIONS)}")  # fmt: skip
    add("--lengths", type=positive, nargs="+", metavar="N",
        help="in the place of the sections' own; not of packed, million, decoding")  # fmt: skip
    add("--quick", action="store_true", help="small lengths and one round: works, says little")
    add("--long", action="store_true", help="measure softmax attention beyond 16384, on one head")
    add("--repeats", type=positive, help="least rounds of a measurement (3; 2 if they take 20 s)")
    add("--seconds", type=float, help="short calls are repeated for as long as this (2)")
    add("--threads", type=positive, default=1, help="CPU threads (1)")
    add("--json", type=pathlib.Path,
        help="where the results go (this CPU's own file; with --quick nowhere)")  # fmt: skip
    add("--tables", action="store_true", help="print the tables of the file, measure nothing")
    add("--machines", action="store_true", help="print tables of all machines' own files")
    add("--alone", nargs=2, help=argparse.SUPPRESS)  # a function of ALONE and a length
    args = parser.parse_args()
    if args.repeats is None:
        args.repeats = 1 if args.quick else 3
    if args.seconds is None:
        args.seconds = 0.0 if args.quick else 2.0
    if args.json is None and not args.quick:
        args.json = own_file(this_machine())
    return parser, args


def own_file(machine):
    """Where results of this CPU go. A virtual machine may lack instructions that its CPU has."""
    words = [machine["cpu"], machine["instruction_set"]]
    return FOLDER / f"{'_'.join(re.findall('[a-z0-9]+', ' '.join(words).lower()))}.json"


def results_before(parser, args, machine):
    """What the file has, if sections may be added to it."""
    if args.json is None or not args.json.exists():
        return {}
    before = json.loads(args.json.read_text())
    if (cpu := before["machine"]["cpu"]) != machine["cpu"]:
        parser.error(f"--json {args.json} has results of another CPU ({cpu}): name another file")
    kept = [name for name in SECTIONS if name in before and name not in args.sections]
    if not kept:
        return before
    now = {key: machine[key] for key in SAME} | {"threads": args.threads}
    then = before["machine"] | {"threads": before["settings"]["threads"]}
    if changed := [
        f"{key} {then.get(key)}, now {now[key]}" for key in now if then.get(key) != now[key]
    ]:
        parser.error(
            f"--json {args.json} has {', '.join(kept)} from another setup ({'; '.join(changed)}): "
            f"measure all sections or name another file"
        )
    return before


def main():
    parser, args = parse_arguments()
    torch.set_num_threads(args.threads)
    if args.alone:
        name, length = args.alone
        print(json.dumps(ALONE[name](int(length))))
        return
    if args.machines:
        print("\n".join(machines.tables(FOLDER)))
        return
    if args.tables:
        print("\n".join(report(json.loads(args.json.read_text()))))
        return
    machine = this_machine()
    results = results_before(parser, args, machine)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)  # now, not after minutes
    if args.threads == 1:
        pin_to_one_cpu()
    results["machine"] = machine
    results["settings"] = {
        "batch": 1,
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "n_bits": N_BITS,
        "n_hashes": N_HASHES,
        "dtype": "float32",
        "seed": "None: fresh hash functions at every call",
        "threads": args.threads,
        "repeats": args.repeats,
        "seconds": args.seconds,
        "times": "seconds, the smallest of all rounds",
    }
    results.setdefault("sections", {})
    if machine["load_average_at_start"] > 0.5:
        load = machine["load_average_at_start"]
        print(f"note: other work is running here (load {load:.1f}), times will be off\n")
    measure([name for name in SECTIONS if name in args.sections], args, results)
    print(
        f"{machine['cpu']}, {machine['instruction_set']}, torch {torch.__version__}, "
        f"{args.threads} thread(s): {HEADS} heads, d = {HEAD_DIM}, n_bits {N_BITS} (soft codes: "
        f"{options.SOFT_BITS}), n_hashes {N_HASHES}\n"
    )
    print("\n".join(report(results)))
    if args.json:
        print(f"written to {args.json}")


if __name__ == "__main__":
    main()
