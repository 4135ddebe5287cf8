"""What attention learns in equal time: recall of many pairs in a long sequence.

Every method has the same CPU seconds of training on one core, so a faster one makes more steps.
The task is `benchmarks.quality.tasks.Recall` with one pair in 8 tokens; the model, its start and
its optimizer are those of `benchmarks.quality.tasks`. A run is of one length, method, schedule and
seed. "plain" trains at the full length alone, the other schedules begin with shorter sequences.

    python -m benchmarks.quality.equal_time
    python -m benchmarks.quality.equal_time --length 4096 --methods softmax --seeds 0 1

A run is written to --json as soon as it is done, and one that is there is not made again: stop and
start at will, also in several processes. With all runs done the command only reports.
"""

import argparse
import json
import os
import pathlib
import time
from typing import NamedTuple

import torch
from tqdm import tqdm

from benchmarks import IMAGES, RESULTS
from benchmarks.encoder import Encoder, Trainer, evaluate
from benchmarks.measurement import machine, updated
from benchmarks.quality.equal_time import report
from benchmarks.quality.equal_time.methods import METHODS, SCHEDULES
from benchmarks.quality.tasks import Recall

DIM, LAYERS, HEADS, N_VALUES, GAP = 64, 2, 2, 64, 96
TOKENS_PER_PAIR = 8
CURVE, TESTED = 15, 4  # evaluations in a run, each of one sequence; sequences at the end
SOONER = 1.5  # evaluation k is at (k / CURVE)^SOONER of the seconds
ENOUGH = 0.999  # accuracy at which a run ends


class Setting(NamedTuple):
    seconds: float  # of training
    lr: float = 3e-3


SETTINGS = {2048: Setting(10.0), 4096: Setting(20.0), 16384: Setting(150.0), 65536: Setting(600.0)}
QUICK_LENGTH = 4096


def recall(length: int, n_keys: int) -> Recall:
    n_pairs = length // TOKENS_PER_PAIR
    return Recall(length, n_pairs, n_pairs, n_keys=n_keys, n_values=N_VALUES, gap=GAP)


def train(length: int, method: str, schedule: str, seed: int, setting: Setting) -> dict:
    n_keys = 2 * length // TOKENS_PER_PAIR
    stages = SCHEDULES[schedule]
    tasks = [recall(int(stage.length * length), n_keys) for stage in stages]
    task = recall(length, n_keys)
    first, *held_out = task.held_out(1, 1 + TESTED)
    generator = torch.Generator().manual_seed(1 + seed)
    torch.manual_seed(seed)
    sizes = task.n_tokens, task.n_answers, length, DIM, 2 * DIM, HEADS, LAYERS
    model = Encoder(METHODS[method], *sizes, has_positions=False, keys_are_previous=True)
    trainer = Trainer(model, setting.lr)

    curve, seconds, steps = [], 0.0, 0
    label = f"{length}, {method}, {schedule}, seed {seed}"
    with tqdm(total=setting.seconds, desc=f"{label:<50}", disable=None, unit="s") as bar:
        while seconds < setting.seconds:
            done = seconds / setting.seconds
            stage = next(i for i, stage in enumerate(stages) if done < stage.until)
            batch = tasks[stage].training(stages[stage].batch_size, generator)
            start = time.process_time()
            trainer.step(batch, max(done, 1e-3))
            taken = time.process_time() - start
            seconds, steps = seconds + taken, steps + 1
            bar.update(taken)
            if CURVE * (seconds / setting.seconds) ** (1 / SOONER) >= len(curve) + 1:
                now = {"seconds": round(seconds, 2), "steps": steps} | evaluate(model, [first])
                curve.append(now)
                bar.set_postfix({key: f"{now[key]:.3f}" for key in ("loss", "accuracy")})
                if now["accuracy"] >= ENOUGH:
                    break
    run = {"length": length, "method": method, "schedule": schedule, "seed": seed}
    run |= evaluate(model, held_out) | {"seconds": round(seconds, 2), "steps": steps}
    run |= {"curve": curve, "date": time.strftime("%Y-%m-%d %H:%M")}
    return run | {"load": round(os.getloadavg()[0], 1)}


# --- Results --------------------------------------------------------------------------------------


def described(length: int, setting: Setting) -> dict:
    """What the runs of a length depend on, as it stands in the file."""
    task = recall(length, 2 * length // TOKENS_PER_PAIR)
    return {
        "seconds": setting.seconds,
        "lr": setting.lr,
        **{name: getattr(task, name) for name in ("n_pairs", "n_questions", "n_keys", "n_values")},
        "gap": GAP,
        "dim": DIM,
        "layers": LAYERS,
        "heads": HEADS,
        "guess": task.guess(),
        "tested": TESTED,
        "enough": ENOUGH,
    }


def load(path: pathlib.Path) -> dict:
    if path.exists():
        return json.loads(path.read_text())
    return {"machine": machine(), "schedules": {}, "settings": {}, "runs": []}


def key_of(run: dict) -> tuple:
    return tuple(run[name] for name in ("length", "method", "schedule", "seed"))


def add_run(path: pathlib.Path, run: dict, setting: dict) -> None:
    """Add a run to the file, which other processes may be adding to as well."""
    with updated(path, load) as results:
        if key_of(run) in map(key_of, results["runs"]):
            return  # another process was as fast
        results["settings"][str(run["length"])] = setting
        results["schedules"] = {
            name: [(str(stage.length), stage.batch_size, stage.until) for stage in stages]
            for name, stages in SCHEDULES.items()
        }
        methods, schedules = list(METHODS), list(SCHEDULES)
        results["runs"] = sorted(
            [*results["runs"], run],
            key=lambda r: (
                *(r["length"], methods.index(r["method"])),
                *(schedules.index(r["schedule"]), r["seed"]),
            ),
        )


# --- Command line ---------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--length", type=int, choices=SETTINGS, default=16384)
    for name, known, default in (
        ("methods", METHODS, list(METHODS)),
        ("schedules", SCHEDULES, ["plain"]),
    ):
        options = dict(choices=known, default=default, metavar="NAME", help=", ".join(known))
        add(f"--{name}", nargs="+", **options)
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add(
        "--quick",
        action="store_true",
        help=f"a second each at {QUICK_LENGTH} tokens: a test, no result",
    )
    add("--tables", action="store_true", help="report the file, train nothing")
    add("--json", type=pathlib.Path, default=RESULTS / "equal_time.json")
    add("--picture", type=pathlib.Path, default=IMAGES / "equal_time.png")
    args = parser.parse_args()
    if min(args.seeds) < 0:
        parser.error(f"--seeds must be at least 0: {min(args.seeds)}")
    if args.quick and args.json == parser.get_default("json"):
        parser.error("--quick needs its own --json: its runs are no results")
    return args


def main() -> None:
    args = parse_arguments()
    length, setting = (
        (QUICK_LENGTH, Setting(1.0)) if args.quick else (args.length, SETTINGS[args.length])
    )
    torch.set_num_threads(1)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    description = described(length, setting)
    if load(args.json)["settings"].get(str(length), description) != description:
        raise SystemExit(f"--json: the runs in {args.json} have other settings")
    wanted = [
        (length, method, schedule, seed)
        for seed in args.seeds
        for schedule in args.schedules
        for method in args.methods
    ]
    for key in () if args.tables else wanted:
        if key in map(key_of, load(args.json)["runs"]):
            continue
        run = train(*key, setting)
        add_run(args.json, run, description)
        result = f"accuracy {run['accuracy']:.4f}, {run['steps']} steps, {run['seconds']:.0f} s"
        print(f"{', '.join(map(str, key))}: {result}", flush=True)
    results = load(args.json)
    print(report.tables(results))
    report.draw(results, args.picture, length)
    print(f"written to {args.json} and {args.picture}")


if __name__ == "__main__":
    main()
