"""What a model trained with softmax loses under another attention, and regains by training on.

An encoder learns masked words of Python's standard library with softmax. Then its attention is
replaced, all weights kept, and it is trained on, with softmax too as a control. The loss is that of
held-out words, in nats, after so many further steps; 0: as it is replaced.

    python -m benchmarks.quality.conversion
    python -m benchmarks.quality.conversion --seeds 0 --methods softmax "soft codes, 16 bits, sum"

A run is written to --json as soon as it is done, and one that is there is not made again: stop and
start at will, also in several processes, of a seed each.
"""

import argparse
import copy
import pathlib
import time

import torch
from tqdm import tqdm

from benchmarks import IMAGES, RESULTS, command_line, pyplot, save_picture
from benchmarks.encoder import Encoder, Trainer, evaluate
from benchmarks.measurement import cpu_model, machine
from benchmarks.quality.runs import Runs, add_names, find, markdown, mean_and_spread, parsed
from benchmarks.quality.tasks import MaskedWords
from lshkit.attention import Colliding, Estimator, Expected, Sampled, Soft

DIM, LAYERS, HEADS, BATCH = 128, 4, 4, 16
LR, LR_AFTER = 3e-3, 1e-3
STEPS, AFTER = 1200, (0, 25, 100, 200)
QUICK_STEPS, QUICK_AFTER = 3, (0, 1, 2)
LENGTH, QUICK_LENGTH = 256, 64


def replaced(estimator: Estimator, normalize: str = "sum") -> tuple:
    return "YOSO", {"estimator": estimator, "normalize": normalize}


def hard(n_bits: int) -> Sampled:
    return Sampled(n_bits=n_bits, expectation="never")


METHODS = {
    "softmax": ("softmax", {}),
    "Colliding, 8 bits": replaced(Colliding(exact_up_to=0)),
    "expectation, 16 bits, sum": replaced(Expected(n_bits=16)),
    "soft codes, 16 bits, sum": replaced(Soft(n_bits=16)),
    "YOSO, 16 bits, sum": replaced(hard(16)),
    "YOSO, 12 bits, sum": replaced(hard(12)),
    "YOSO, 12 bits, l2": replaced(hard(12), "l2"),
}
ORDER = {"method": METHODS, "seed": ()}


# --- Runs -----------------------------------------------------------------------------------------


def encoder(task: MaskedWords, method: str) -> Encoder:
    sizes = task.n_tokens, task.n_answers, task.length, DIM, 2 * DIM, HEADS, LAYERS
    return Encoder(METHODS[method], *sizes, task.frequencies())


def batches(task: MaskedWords, seed: int, steps: int, label: str):
    """Each with the part of the run that is done."""
    generator = torch.Generator().manual_seed(seed)
    bar = tqdm(range(steps), desc=f"{label:<40}", disable=None, dynamic_ncols=True)
    for step in bar:
        yield task.training(BATCH, generator), (step + 0.5) / steps


def trained(task: MaskedWords, seed: int, steps: int) -> dict:
    """The weights of a model of softmax."""
    torch.manual_seed(seed)
    model = encoder(task, "softmax")
    trainer = Trainer(model, LR)
    for batch, done in batches(task, 2 * seed, steps, f"softmax from the start, seed {seed}"):
        trainer.step(batch, done)
    return model.state_dict()


def converted(task: MaskedWords, weights: dict, method: str, seed: int, after: tuple) -> dict:
    """Losses by further steps."""
    torch.manual_seed(seed)
    model = encoder(task, method)
    model.load_state_dict(copy.deepcopy(weights))
    trainer, held_out = Trainer(model, LR_AFTER), task.held_out(BATCH)
    losses, start = {"0": evaluate(model, held_out)}, time.process_time()
    label = f"{method}, seed {seed}"
    for step, (batch, done) in enumerate(batches(task, 2 * seed + 1, after[-1], label), 1):
        trainer.step(batch, done)
        if step in after:
            losses[str(step)] = evaluate(model, held_out)
    seconds = round(time.process_time() - start, 1)
    return {"method": method, "seed": seed, "after": losses, "seconds": seconds}


# --- Results --------------------------------------------------------------------------------------


def described(task: MaskedWords, steps: int, after: tuple) -> dict:
    """What the runs depend on, as it stands in the file."""
    return {
        "length": task.length,
        "n_words": task.n_words,
        "batch_size": BATCH,
        "dim": DIM,
        "layers": LAYERS,
        "heads": HEADS,
        "lr": [LR, LR_AFTER],
        "steps": steps,
        "after": list(after),
    }


def table(results: dict) -> str:
    """Loss by further steps, and how far it ends behind softmax that was trained on, by seed."""
    after = [str(n) for n in results["setting"]["after"]]
    end = {run["seed"]: run["after"][after[-1]]["loss"] for run in find(results, method="softmax")}
    header = ["attention", *(f"{n} steps" for n in after), "behind softmax", "seeds"]
    rows = []
    for method in METHODS:
        if not (own := find(results, method=method)):
            continue
        losses = [mean_and_spread([run["after"][n]["loss"] for run in own], 3) for n in after]
        behind = [
            run["after"][after[-1]]["loss"] - end[run["seed"]] for run in own if run["seed"] in end
        ]
        gap = "" if method == "softmax" or not behind else mean_and_spread(behind, 3)
        rows.append([method, *losses, gap, str(len(own))])
    return markdown(header, rows)


def draw(results: dict, path: pathlib.Path) -> None:
    figure, axes = pyplot().subplots(figsize=(7, 3.6))
    axes.spines[["top", "right"]].set_visible(False)
    for i, method in enumerate(METHODS):
        if not (own := find(results, method=method)):
            continue
        after = results["setting"]["after"]
        means = [sum(r["after"][str(n)]["loss"] for r in own) / len(own) for n in after]
        color = "0.4" if method == "softmax" else f"C{i - 1}"
        axes.plot(after, means, "o-", ms=4, color=color, label=method)
    axes.set(xlabel="further steps", ylabel="loss of held-out words, nats")
    axes.set_title("a model trained with softmax, its attention replaced", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    save_picture(figure, path, dpi=120)


# --- Command line ---------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = command_line(__doc__)
    add = parser.add_argument
    add_names(parser, "--methods", METHODS)
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--quick", action="store_true", help="a few steps: a test, no result")
    add("--tables", action="store_true", help="report the file, train nothing")
    add("--json", type=pathlib.Path, default=RESULTS / "conversion.json")
    add("--picture", type=pathlib.Path, default=IMAGES / "quality_conversion.png")
    return parsed(parser)


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    steps, after, length = STEPS, AFTER, LENGTH
    if args.quick:
        steps, after, length = QUICK_STEPS, QUICK_AFTER, QUICK_LENGTH
    task = MaskedWords(length=length)
    runs = Runs(args.json, ORDER, {"machine": machine(), "setting": None})
    given = {("setting",): described(task, steps, after)}
    runs.check(given)
    for seed in () if args.tables else args.seeds:
        wanted = [method for method in args.methods if not runs.has(method=method, seed=seed)]
        weights = trained(task, seed, steps) if wanted else {}
        for method in wanted:
            run = converted(task, weights, method, seed, after)
            run |= {"date": time.strftime("%Y-%m-%d %H:%M"), "cpu": cpu_model()}
            runs.add(run, given)
            print(f"{method}, seed {seed}: loss {run['after'][str(after[-1])]['loss']:.3f}")
    results = runs.load()
    print(table(results))
    draw(results, args.picture)


if __name__ == "__main__":
    main()
