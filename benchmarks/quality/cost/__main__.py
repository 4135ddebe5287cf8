"""What an attention is worth: loss after equal steps and after equal seconds, on real text.

A small encoder learns to name hidden bytes (15 %) of the source code of Python's own standard
library; every tenth file is held out. Each method and seed is a run of its own. The methods differ
in what mixes the heads' values and in nothing else: for a seed they start from the same weights and
see the same batches. Three controls tell what attention adds: a convolution over the values (that
of YOSO-C), exact softmax over a near window, and no mixing at all.

Seconds are CPU time of the training steps, evaluation not counted: with one thread that is the time
on a quiet machine, also where other work runs. With --seconds a run lasts that long instead of
--steps, the learning rate's schedule stretched over it.

    python -m benchmarks.quality.cost
    python -m benchmarks.quality.cost --methods softmax "soft, 4 probes" --seeds 0 --resume

Several processes may add to one file of results with --resume; with all runs done it only reports.
"""

import argparse
import os
import pathlib
import sysconfig
import time

import torch
from tqdm import tqdm

from benchmarks import IMAGES, RESULTS, command_line, positive
from benchmarks.encoder import NEAR, Encoder, Trainer, evaluate
from benchmarks.measurement import machine
from benchmarks.quality.cost.methods import METHODS, N_HASHES, YOSO
from benchmarks.quality.cost.tables import draw, table
from benchmarks.quality.runs import Runs, add_names
from benchmarks.source_text import N_BYTES, frequencies, masked_batch, read_text

ORDER = {"budget": (), "method": METHODS, "seed": ()}

# --- One run --------------------------------------------------------------------------------------


def train(method: str, seed: int, args: argparse.Namespace) -> dict:
    text, held_out = read_text(args.text)
    generator = torch.Generator().manual_seed(0)
    batches = [
        masked_batch(held_out, args.length, args.batch_size, generator)
        for _ in range(args.eval_batches)
    ]
    generator.manual_seed(1 + seed)
    torch.manual_seed(seed)
    model = Encoder(
        METHODS[method],
        *(N_BYTES, 256, args.length),
        *(args.embed_dim, 4 * args.embed_dim, args.heads, args.layers),
        frequencies(text),
    )
    trainer = Trainer(model, args.lr)

    points = []  # (steps, seconds, loss) of each evaluation
    step = part = 0
    seconds = done = 0.0
    total = args.seconds or args.steps
    label = f"{method}, seed {seed}"
    with tqdm(total=total, desc=f"{label:<24}", disable=None, dynamic_ncols=True) as bar:
        while True:
            if done >= part / args.evaluations:
                points.append((step, seconds, evaluate(model, batches)["loss"]))
                part = int(done * args.evaluations) + 1
                bar.set_postfix(loss=f"{points[-1][2]:.3f}")
            if done >= 1:
                break
            batch = masked_batch(text, args.length, args.batch_size, generator)
            start = time.process_time()
            trainer.step(batch, done + 1 / (2 * args.steps))
            step += 1
            seconds += time.process_time() - start
            done = min(1.0, seconds / args.seconds if args.seconds else step / args.steps)
            bar.update(done * total - bar.n)

    run = {"method": method, "seed": seed, "budget": budget(args)}
    for i, name in enumerate(("steps", "seconds", "losses")):
        run[name] = [point[i] for point in points]
    if method in YOSO and method != "YOSO-E":
        finer = evaluate(model, batches, YOSO[method].for_inference(2 * N_HASHES))
        run["loss_with_twice_the_hashes"] = finer["loss"]
    return run | {"date": time.strftime("%Y-%m-%d %H:%M"), "load_average": os.getloadavg()[0]}


# --- Results --------------------------------------------------------------------------------------


def budget(args: argparse.Namespace) -> str:
    return f"{args.seconds:g} s" if args.seconds else f"{args.steps} steps"


def settings(args: argparse.Namespace) -> dict:
    names = "length batch_size embed_dim heads layers lr eval_batches evaluations threads"
    return {name: getattr(args, name) for name in names.split()} | {
        "n_hashes": N_HASHES,
        "methods": {name: estimator.to_dict() for name, estimator in YOSO.items()},
        "controls": f"window and convolution reach {NEAR} bytes to either side",
        "data": "source code of Python's standard library, every tenth file held out",
        "losses": "nats per hidden byte of held-out text",
        "seconds": "CPU time of the training steps",
        "machine": {
            name: value
            for name, value in machine().items()
            if name in ("cpu", "instruction_set", "lshkit", "torch", "python")
        },
    }


# --- Command line -------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = command_line(__doc__)
    add = parser.add_argument
    add_names(parser, "--methods", METHODS)
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--steps", type=positive, default=600, help="training steps of a run (600)")
    add("--seconds", type=float, help="train for this CPU time instead")
    add("--resume", action="store_true", help="add to --json, skip the runs that are in it")
    add("--tables", action="store_true", help="table and picture of the file, train nothing")
    add("--threads", type=positive, default=1, help="CPU threads (1)")
    add("--length", type=positive, default=512, help="bytes in a sequence (512)")
    add("--batch-size", type=positive, default=8, help="sequences in a step (8)")
    add("--embed-dim", type=positive, default=128, help="size of the model (128)")
    add("--heads", type=positive, default=4, help="attention heads (4)")
    add("--layers", type=positive, default=2, help="transformer blocks (2)")
    add("--lr", type=float, default=3e-3, help="largest learning rate (3e-3)")
    add("--evaluations", type=positive, default=12, help="in a run (12)")
    add("--eval-batches", type=positive, default=12, help="held-out batches of each (12)")
    stdlib = pathlib.Path(sysconfig.get_path("stdlib"))
    add("--text", type=pathlib.Path, default=stdlib, help="folder with .py files to learn from")
    add("--json", type=pathlib.Path, default=RESULTS / "quality_cost.json")
    add("--picture", type=pathlib.Path, default=IMAGES / "quality_cost.png")
    args = parser.parse_args()

    if args.tables:
        if not args.json.exists():
            parser.error(f"--tables needs a file with results, got --json {args.json}")
        return args
    # What would fail only after minutes is checked now.
    if args.seconds is not None and not args.seconds > 0:
        parser.error(f"--seconds must be above 0: {args.seconds}")
    if args.embed_dim % (2 * args.heads):
        parser.error(f"--embed-dim must be a multiple of 2 * {args.heads} heads: {args.embed_dim}")
    for part in read_text(args.text):
        if len(part) < args.length:
            parser.error(f"--text: {args.text} has too little text for --length {args.length}")
    if args.json.exists() and not args.resume:
        parser.error(f"--json: {args.json} exists; --resume adds to it")
    return args


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    runs = Runs(args.json, ORDER, {"settings": None})
    given = {("settings",): settings(args)}
    if not args.tables:
        runs.check(given)
    for seed in () if args.tables else args.seeds:
        for method in args.methods:
            if runs.has(method=method, budget=budget(args), seed=seed):
                continue
            run = train(method, seed, args)
            runs.add(run, given)
            loss, steps, seconds = (run[name][-1] for name in ("losses", "steps", "seconds"))
            text = f"{method}, seed {seed}: loss {loss:.3f} after {steps} steps, {seconds:.0f} s"
            print(text, flush=True)
    results = runs.load()
    print(table(results))
    draw(results, args.picture)
    print(f"\nruns: {args.json}, picture: {args.picture}")


if __name__ == "__main__":
    main()
