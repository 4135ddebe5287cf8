"""What attention learns in equal time: look-ups in a long sequence.

Every method has the same CPU seconds of training on one core, so a faster one makes more steps.
Two of the tasks of `benchmarks.quality.tasks`, with the model, its start and its optimizer: recall
of one pair in 8 tokens, and needles in hay. A run is of one length, method, schedule and seed.
"plain" trains at the full length alone, the other schedules begin with shorter sequences.

    python -m benchmarks.quality.equal_time
    python -m benchmarks.quality.equal_time --length 4096 --methods softmax --seeds 0 1
    python -m benchmarks.quality.equal_time --task needle

A run is written to --json as soon as it is done, and one that is there is not made again: stop and
start at will, also in several processes. With all runs done the command only reports.
"""

import argparse
import os
import pathlib
import time
from typing import NamedTuple

import torch
from tqdm import tqdm

from benchmarks import IMAGES, RESULTS, command_line
from benchmarks.encoder import Encoder, Trainer, evaluate
from benchmarks.measurement import cpu_model, machine
from benchmarks.quality.equal_time import report
from benchmarks.quality.equal_time.methods import METHODS, SCHEDULES
from benchmarks.quality.runs import Runs, add_names, parsed
from benchmarks.quality.tasks import Needle, Recall

DIM, LAYERS, HEADS, N_VALUES, GAP = 64, 2, 2, 64, 96
TOKENS_PER_PAIR, N_NEEDLES = 8, 64
CURVE = 15  # evaluations in a run, each of one sequence
SOONER = 1.5  # evaluation k is at (k / CURVE)^SOONER of the seconds
ENOUGH = 0.999  # accuracy at which a run ends


class Setting(NamedTuple):
    seconds: float  # of training
    tested: int = 4  # sequences at the end
    lr: float = 3e-3


SETTINGS = {
    "recall": {
        2048: Setting(10.0),
        4096: Setting(20.0),
        16384: Setting(150.0),
        65536: Setting(600.0),
    },
    "needle": {4096: Setting(20.0, tested=8), 16384: Setting(100.0, tested=8)},
}
LENGTHS = sorted({length for lengths in SETTINGS.values() for length in lengths})
QUICK_LENGTH = 4096
ORDER = {"length": (), "method": METHODS, "schedule": SCHEDULES, "seed": ()}
FILES = {"recall": "equal_time", "needle": "equal_time_needle"}


def task_of(name: str, length: int, full_length: int) -> Recall | Needle:
    """The task at a length of the schedule, with the tokens that it has at the full length."""
    if name == "needle":
        return Needle(length, N_NEEDLES, 2 * N_NEEDLES, gap=GAP)
    n_pairs, n_keys = length // TOKENS_PER_PAIR, 2 * full_length // TOKENS_PER_PAIR
    return Recall(length, n_pairs, n_pairs, n_keys=n_keys, n_values=N_VALUES, gap=GAP)


def train(name: str, length: int, method: str, schedule: str, seed: int, setting: Setting) -> dict:
    stages = SCHEDULES[schedule]
    tasks = [task_of(name, int(stage.length * length), length) for stage in stages]
    task = task_of(name, length, length)
    first, *held_out = task.held_out(1, 1 + setting.tested)
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
    return run | {"cpu": cpu_model(), "load": round(os.getloadavg()[0], 1)}


# --- Results --------------------------------------------------------------------------------------


SIZES = {
    "recall": ("n_pairs", "n_questions", "n_keys", "n_values", "gap"),
    "needle": ("n_needles", "n_keys", "n_values", "n_hay", "gap"),
}


def described(name: str, length: int, setting: Setting) -> dict:
    """What the runs of a task and length depend on, as it stands in the file."""
    task = task_of(name, length, length)
    return {
        "seconds": setting.seconds,
        "lr": setting.lr,
        **{size: getattr(task, size) for size in SIZES[name]},
        "dim": DIM,
        "layers": LAYERS,
        "heads": HEADS,
        "guess": task.guess(),
        "tested": setting.tested,
        "enough": ENOUGH,
    }


# --- Command line ---------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--task", choices=SETTINGS, default="recall")
    add("--length", type=int, choices=LENGTHS, default=16384)
    add_names(parser, "--methods", METHODS)
    add_names(parser, "--schedules", SCHEDULES, default=["plain"])
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add(
        "--quick",
        action="store_true",
        help=f"a second each at {QUICK_LENGTH} tokens: a test, no result",
    )
    add("--tables", action="store_true", help="report the file, train nothing")
    add("--json", type=pathlib.Path, help="equal_time.json or equal_time_needle.json")
    add("--picture", type=pathlib.Path, help="of recall: equal_time.png; else none")
    args = parsed(parser)
    if args.length not in SETTINGS[args.task]:
        parser.error(f"--length: {args.task} has {', '.join(map(str, SETTINGS[args.task]))}")
    if args.json is None:
        args.json = RESULTS / f"{FILES[args.task]}.json"
    if args.picture is None and args.task == "recall":
        args.picture = IMAGES / f"{FILES[args.task]}.png"
    return args


def main() -> None:
    args = parse_arguments()
    length, setting = (
        (QUICK_LENGTH, Setting(1.0))
        if args.quick
        else (args.length, SETTINGS[args.task][args.length])
    )
    torch.set_num_threads(1)
    runs = Runs(args.json, ORDER, {"machine": machine(), "schedules": {}, "settings": {}})
    given = {("settings", str(length)): described(args.task, length, setting)}
    runs.check(given)
    schedules = {
        name: [(str(stage.length), stage.batch_size, stage.until) for stage in stages]
        for name, stages in SCHEDULES.items()
    }
    wanted = [
        (length, method, schedule, seed)
        for seed in args.seeds
        for schedule in args.schedules
        for method in args.methods
    ]
    for key in () if args.tables else wanted:
        if runs.has(**dict(zip(ORDER, key, strict=True))):
            continue
        run = train(args.task, *key, setting)
        runs.add(run, given, schedules=schedules)
        result = f"accuracy {run['accuracy']:.4f}, {run['steps']} steps, {run['seconds']:.0f} s"
        print(f"{', '.join(map(str, key))}: {result}", flush=True)
    results = runs.load()
    print(report.tables(results))
    if args.picture is not None:
        report.draw(results, args.picture, length)
    print(f"written to {' and '.join(str(x) for x in (args.json, args.picture) if x)}")


if __name__ == "__main__":
    main()
