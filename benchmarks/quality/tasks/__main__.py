"""What attention can learn: five tasks, from the same weights, in the same steps, beside controls.

- ListOps (Nangia and Bowman, 2018; table 3 of the ICML paper): the value of a nested expression,
  of up to 128 tokens, and of up to 32, where a small model gets beyond the first operator;
- recall: 96 pairs of a key and a value, then 96 questions, out of reach of anything local;
- needle: 8 pairs in a long haystack, asked at the end; also tested in more hay than trained in;
- masked words: a masked language model on real text (table 2 of the ICML paper).

Each task, method and seed is a run of its own of a small encoder; the methods differ in what mixes
the heads' values and in nothing else. Three controls tell what attention adds: a convolution over
the values (that of YOSO-C), exact softmax over a near window, and no mixing at all.

    python -m benchmarks.quality.tasks
    python -m benchmarks.quality.tasks --tasks recall --methods softmax YOSO-32 --seeds 0 1

A run is written to --json as soon as it is done, and one that is there is not made again: stop and
start at will, also in several processes. With all runs done the command only reports.
"""

import argparse
import math
import os
import pathlib
import time
from typing import NamedTuple

import torch
from tqdm import tqdm

from benchmarks import IMAGES, RESULTS, command_line, positive
from benchmarks.encoder import NEAR, Encoder, Trainer, evaluate
from benchmarks.measurement import machine
from benchmarks.quality.runs import Runs, add_names, parsed
from benchmarks.quality.tasks import ListOps, MaskedWords, Needle, Recall, report
from benchmarks.quality.tasks.methods import ESTIMATORS, METHODS, ONE_LENGTH, SAMPLED

DIM, LAYERS, LR, CURVE = 64, 2, 3e-3, 10  # CURVE: evaluations in a run


class Setting(NamedTuple):
    task: type
    sizes: dict  # arguments of the task
    steps: int
    batch_size: int
    heads: int
    lengths: tuple = ()  # further ones to test at


SETTINGS = {
    "ListOps": Setting(ListOps, dict(length=128, min_length=48), 400, 16, 2),
    "short ListOps": Setting(ListOps, dict(length=32, min_length=8, n_training=32768), 600, 32, 2),
    "recall": Setting(
        Recall,
        dict(length=512, n_pairs=96, n_questions=96, n_keys=128, n_values=64, gap=96),
        *(150, 8, 2),
    ),
    "needle": Setting(
        Needle,
        dict(length=512, n_needles=8, n_keys=16, n_values=32, n_hay=64, gap=96),
        *(100, 8, 2),
        lengths=(1024, 2048, 4096),
    ),
    "masked words": Setting(MaskedWords, dict(length=256, n_words=2048), 200, 16, 4),
}
QUICK = {
    "ListOps": Setting(
        ListOps, dict(length=48, min_length=8, n_training=64, n_held_out=16), 2, 4, 2
    ),
    "short ListOps": Setting(
        ListOps, dict(length=24, min_length=4, n_training=64, n_held_out=16), 2, 4, 2
    ),
    "recall": Setting(
        Recall, dict(length=96, n_pairs=8, n_questions=8, n_keys=16, n_values=8, gap=64), 2, 2, 2
    ),
    "needle": Setting(
        Needle,
        dict(length=96, n_needles=4, n_keys=8, n_values=8, n_hay=8, gap=64),
        *(2, 2, 2),
        lengths=(128,),
    ),
    "masked words": Setting(MaskedWords, dict(length=64, n_words=256), 2, 2, 4),
}
ORDER = {"task": SETTINGS, "method": METHODS, "seed": ()}


# --- One run --------------------------------------------------------------------------------------


def model_of(task, method: tuple, dim: int, heads: int, layers: int) -> Encoder:
    return Encoder(
        method,
        *(task.n_tokens, task.n_answers, task.length),
        *(dim, 2 * dim, heads, layers),
        task.frequencies() if hasattr(task, "frequencies") else None,
        task.has_positions,
        task.keys_are_previous,
    )


def train(name: str, method: str, seed: int, setting: Setting) -> dict:
    task = setting.task(**setting.sizes)
    held_out = task.held_out(setting.batch_size)
    generator = torch.Generator().manual_seed(1 + seed)
    torch.manual_seed(seed)
    model = model_of(task, METHODS[method], DIM, setting.heads, LAYERS)
    trainer = Trainer(model, LR)

    seconds = 0.0
    label = f"{name}, {method}, seed {seed}"
    with tqdm(range(setting.steps), desc=f"{label:<36}", disable=None, dynamic_ncols=True) as steps:
        for step in steps:
            batch = task.training(setting.batch_size, generator)
            start = time.process_time()
            trainer.step(batch, (step + 0.5) / setting.steps)
            seconds += time.process_time() - start
            if (step + 1) * CURVE // setting.steps > step * CURVE // setting.steps:
                some = held_out[: math.ceil(len(held_out) / 4)]
                now = evaluate(model, some)
                steps.set_postfix({key: f"{now[key]:.3f}" for key in ("loss", "accuracy")})

    run = {"task": name, "method": method, "seed": seed} | evaluate(model, held_out)
    run |= {"steps": setting.steps, "seconds": round(seconds, 2)}
    if method in SAMPLED:
        estimator = ESTIMATORS[method]
        run["64 hashes"] = evaluate(model, held_out, estimator.for_inference(64))
        if estimator.mean is not None:
            run["expectation"] = evaluate(model, held_out, estimator.mean)
    for length in () if method in ONE_LENGTH else setting.lengths:
        longer = task.at_length(length).held_out(4, max(16, 32768 // length))
        run.setdefault("at length", {})[str(length)] = evaluate(model, longer)
    return run | {"date": time.strftime("%Y-%m-%d %H:%M"), "load": round(os.getloadavg()[0], 1)}


# --- Results --------------------------------------------------------------------------------------


def described(setting: Setting) -> dict:
    """What the results of a task depend on, as it stands in the file."""
    task = setting.task(**setting.sizes)
    return setting.sizes | {
        "steps": setting.steps,
        "batch_size": setting.batch_size,
        "heads": setting.heads,
        "dim": DIM,
        "layers": LAYERS,
        "lr": LR,
        "near": NEAR,
        "guess": task.guess(),
    }


# --- Command line -------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = command_line(__doc__)
    add = parser.add_argument
    add_names(parser, "--tasks", SETTINGS)
    add_names(parser, "--methods", METHODS)
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--threads", type=positive, default=1, help="CPU threads (1)")
    add("--text", type=pathlib.Path, help="folder with .py files, in the place of the library's")
    add("--quick", action="store_true", help="two steps of tiny models: a test, no result")
    add("--json", type=pathlib.Path, default=RESULTS / "quality_tasks.json")
    add("--picture", type=pathlib.Path, default=IMAGES / "quality_tasks.png")
    return parsed(parser)


def main() -> None:
    args = parse_arguments()
    settings = dict(QUICK if args.quick else SETTINGS)
    if args.text is not None:
        words = settings["masked words"]
        sizes = words.sizes | {"folder": str(args.text.resolve())}
        settings["masked words"] = words._replace(sizes=sizes)
    torch.set_num_threads(args.threads)
    methods = {name: estimator.to_dict() for name, estimator in ESTIMATORS.items()}
    runs = Runs(args.json, ORDER, {"machine": machine(), "methods": methods, "tasks": {}})
    given = {("tasks", name): described(settings[name]) for name in args.tasks}
    runs.check(given)
    for seed in args.seeds:
        for name in args.tasks:
            for method in args.methods:
                if runs.has(task=name, method=method, seed=seed):
                    continue
                run = train(name, method, seed, settings[name])
                runs.add(run, {("tasks", name): given["tasks", name]})
                result = f"accuracy {run['accuracy']:.3f}, loss {run['loss']:.3f}"
                label = f"{name}, {method}, seed {seed}"
                print(f"{label}: {result}, {run['seconds']:.0f} s", flush=True)
    results = runs.load()
    print(report.tables(results))
    report.draw(results, args.picture)
    print(f"written to {args.json} and {args.picture}")


if __name__ == "__main__":
    main()
