"""How well attention continues text: a causal byte model, at equal steps and at equal time.

Losses in nats a byte on held-out source code: of all bytes, and of those whose last 8 bytes came
before, 64 bytes ago or more, which short convolutions cannot know. A run is of one length, budget,
method and seed; it is written to --json as soon as it is done, and one that is there is not made
again: stop and start at will, also in several processes.

    python -m benchmarks.quality.text --lengths 1024 --budgets steps --seeds 0
    python -m benchmarks.quality.text --tables
"""

import argparse
import json
import os
import pathlib
import sysconfig
import time
from typing import NamedTuple

import torch
from torch.nn import functional as F
from tqdm import tqdm

from benchmarks import IMAGES, RESULTS
from benchmarks.encoder import Batch, Trainer
from benchmarks.measurement import machine, updated
from benchmarks.quality.text import report
from benchmarks.quality.text.model import DIM, HEADS, LAYERS, METHODS, ByteModel
from benchmarks.source_text import causal_batch, frequencies, read_text, repeats

STDLIB = pathlib.Path(sysconfig.get_path("stdlib"))
BUDGETS = ("steps", "time")
LR = 3e-3


class Setting(NamedTuple):
    batch_size: int
    steps: int  # of the budget "steps"
    seconds: float  # of CPU time, of the budget "time"
    tested: int = 2**17  # held-out bytes


SETTINGS = {
    512: Setting(4, 1200, 120),
    1024: Setting(2, 1200, 120),
    2048: Setting(1, 1200, 120),
    4096: Setting(1, 1200, 300),
    8192: Setting(1, 600, 600),
    16384: Setting(1, 600, 600),
}
QUICK = {256: Setting(2, 3, 0.3, 2048)}


@torch.no_grad()
def evaluate(model: ByteModel, batches: list[Batch]) -> dict:
    """Nats a byte: of all, and of those whose context repeats."""
    model.eval()
    losses = [F.cross_entropy(model(batch), batch.answers, reduction="none") for batch in batches]
    model.train()
    loss = torch.cat(losses)
    again = torch.cat([repeats(batch.tokens).flatten() for batch in batches])
    return {"loss": loss.mean().item(), "repeated_loss": loss[again].mean().item()}


def train(length: int, budget: str, method: str, seed: int, setting: Setting) -> dict:
    training, held_out = read_text(STDLIB)
    generator = torch.Generator().manual_seed(2**40)
    size = min(8, setting.tested // length)
    tests = [
        causal_batch(held_out, length, size, generator)
        for _ in range(setting.tested // (size * length))
    ]
    generator = torch.Generator().manual_seed(1 + seed)
    torch.manual_seed(seed)
    model = ByteModel(method, frequencies(training))
    trainer = Trainer(model, LR)
    seconds, steps, done = 0.0, 0, 0.0
    label = f"{length}, {budget}, {method}, seed {seed}"
    with tqdm(total=1.0, desc=f"{label:<50}", disable=None) as bar:
        while done < 1:
            batch = causal_batch(training, length, setting.batch_size, generator)
            start = time.process_time()
            loss = trainer.step(batch, max(done, 1e-3))
            seconds, steps, before = seconds + time.process_time() - start, steps + 1, done
            done = steps / setting.steps if budget == "steps" else seconds / setting.seconds
            bar.update(min(done, 1) - before)
            bar.set_postfix(loss=f"{loss:.3f}")
    run = {"length": length, "budget": budget, "method": method, "seed": seed}
    run |= evaluate(model, tests) | {"seconds": round(seconds, 2), "steps": steps}
    return run | {"date": time.strftime("%Y-%m-%d %H:%M"), "load": round(os.getloadavg()[0], 1)}


# --- Results --------------------------------------------------------------------------------------


def described(setting: Setting) -> dict:
    """What the runs of a length depend on, as it stands in the file."""
    return setting._asdict() | {"lr": LR, "dim": DIM, "layers": LAYERS, "heads": HEADS}


def load(path: pathlib.Path) -> dict:
    if path.exists():
        return json.loads(path.read_text())
    return {"machine": machine(), "settings": {}, "runs": []}


def key_of(run: dict) -> tuple:
    return tuple(run[name] for name in ("length", "budget", "method", "seed"))


def place_of(run: dict) -> tuple:
    return run["length"], run["budget"], list(METHODS).index(run["method"]), run["seed"]


def add_run(path: pathlib.Path, run: dict, setting: dict) -> None:
    """Add a run to the file, which other processes may be adding to as well."""
    with updated(path, load) as results:
        if key_of(run) not in map(key_of, results["runs"]):
            results["settings"][str(run["length"])] = setting
            results["runs"] = sorted([*results["runs"], run], key=place_of)


# --- Command line ---------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", choices=SETTINGS, default=[1024, 4096, 16384])
    for name, known in (("budgets", BUDGETS), ("methods", list(METHODS))):
        options = dict(choices=known, default=known, metavar="NAME", help="; ".join(known))
        add(f"--{name}", nargs="+", **options)
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--quick", action="store_true", help="a few steps at 256 bytes: a test, no result")
    add("--tables", action="store_true", help="report the file, train nothing")
    add("--json", type=pathlib.Path, default=RESULTS / "text.json")
    add("--picture", type=pathlib.Path, default=IMAGES / "text.png")
    args = parser.parse_args()
    if min(args.seeds) < 0:
        parser.error(f"--seeds must be at least 0: {min(args.seeds)}")
    if args.quick and args.json == parser.get_default("json"):
        parser.error("--quick needs its own --json: its runs are no results")
    return args


def main() -> None:
    args = parse_arguments()
    settings = QUICK if args.quick else {length: SETTINGS[length] for length in args.lengths}
    torch.set_num_threads(1)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    made = load(args.json)["settings"]
    for length, setting in settings.items():
        if made.get(str(length), described(setting)) != described(setting):
            raise SystemExit(f"--json: the runs in {args.json} have other settings")
    wanted = [
        (length, budget, method, seed)
        for seed in args.seeds
        for length in settings
        for budget in args.budgets
        for method in args.methods
    ]
    for key in () if args.tables else wanted:
        if key in map(key_of, load(args.json)["runs"]):
            continue
        run = train(*key, settings[key[0]])
        add_run(args.json, run, described(settings[key[0]]))
        result = f"{run['loss']:.3f} and {run['repeated_loss']:.3f} nats, {run['steps']} steps"
        print(f"{', '.join(map(str, key))}: {result}, {run['seconds']:.0f} s", flush=True)
    results = load(args.json)
    print(report.tables(results))
    report.draw(results, args.picture)
    print(f"written to {args.json} and {args.picture}")


if __name__ == "__main__":
    main()
