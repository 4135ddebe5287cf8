"""Whether recall is learned without a start that knows the task.

After Zoology's protocol for multi-query associative recall (Arora et al., 2023), scaled down to one
core: a two-layer encoder with short causal convolutions on queries, keys and values, all weights
random; few pairs first, then more; equal steps; several learning rates, of which each method has
its own best one. The task is `benchmarks.quality.tasks.Recall` in short sequences.

    python -m benchmarks.quality.recall_from_scratch
    python -m benchmarks.quality.recall_from_scratch --methods softmax "YOSO, 8 bits"

Every learning rate has a run with seed 0, the best one of a method has further seeds. A run is
written to --json as soon as it is done, and one that is there is not made again.
"""

import argparse
import pathlib
import time
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from benchmarks import RESULTS, command_line, positive
from benchmarks.encoder import Batch, Encoder, Trainer, evaluate
from benchmarks.measurement import cpu_model, machine
from benchmarks.quality.runs import Runs, add_names, find, markdown, mean_and_spread, parsed
from benchmarks.quality.tasks import Recall
from lshkit.attention import Expected, Sampled, Soft

DIM, LAYERS, HEADS, CONV_WIDTH = 64, 2, 2, 4
N_KEYS, N_VALUES, GAP = 128, 64, 8  # two layers of convolutions reach 6 tokens back
TOKENS, STEPS, CURVE = 2048, 600, 20  # tokens of a step; steps and evaluations in a run at most
ENOUGH = 0.999  # accuracy at which a run ends
TESTED = 2**14  # tokens
RATES, SEEDS = (3e-3, 1e-2, 3e-2), 3
DRAWS = 64  # of hash functions, for the noise of a gradient


class Stage(NamedTuple):
    n_pairs: int
    length: int
    until: float  # the share of the steps at its end

    def task(self) -> Recall:
        sizes = self.length, self.n_pairs, self.length // 4
        return Recall(*sizes, n_keys=N_KEYS, n_values=N_VALUES, gap=GAP)


STAGES = (Stage(4, 64, 0.2), Stage(8, 64, 0.4), Stage(16, 128, 0.7), Stage(32, 256, 1.0))


def yoso(estimator, **options) -> tuple:
    return "YOSO", {"estimator": estimator} | options


def hard(n_bits: int, **options):
    return Sampled(n_bits=n_bits, expectation="never", **options)


METHODS = {
    "softmax": ("softmax", {}),
    "softmax of unit vectors": ("softmax of unit vectors", {}),
    "YOSO-E, 8 bits": yoso(Expected(n_bits=8)),
    "YOSO-E, 12 bits": yoso(Expected(n_bits=12)),
    "YOSO, 8 bits": yoso(hard(8)),
    "YOSO, 12 bits": yoso(hard(12)),
    "soft codes, 8 bits": yoso(Soft(n_bits=8)),
    "Performer": ("Performer", {"n_features": 256}),
    "delta rule": ("delta rule", {}),
    "convolutions only": ("no attention", {}),
    # What is in the way.
    "YOSO, 12 bits, unbiased": yoso(hard(12, gradient="unbiased")),
    "YOSO, 12 bits, 512 hashes": yoso(hard(12, n_hashes=512)),
    "YOSO, 12 bits, not normalised": yoso(hard(12), normalize=None),
    "YOSO-E, 12 bits, not normalised": yoso(Expected(n_bits=12), normalize=None),
    "YOSO, 8 bits, then 12": yoso(hard(8)),
    "YOSO, 12 bits, short by expectation": yoso(Sampled(n_bits=12)),
}
ORDER = {"method": METHODS, "lr": (), "seed": ()}
LAST = {"YOSO, 8 bits, then 12": hard(12)}  # estimators of the last stage, where they differ


def model_of(method: str, seed: int) -> Encoder:
    first, last = STAGES[0].task(), STAGES[-1]
    torch.manual_seed(seed)
    sizes = first.n_tokens, first.n_answers, last.length, DIM, 2 * DIM, HEADS, LAYERS
    return Encoder(METHODS[method], *sizes, has_positions=False, conv_width=CONV_WIDTH)


def train(method: str, lr: float, seed: int, steps: int) -> dict:
    tasks = [stage.task() for stage in STAGES]
    held_out = tasks[-1].held_out(TOKENS // tasks[-1].length, TESTED // tasks[-1].length)
    generator = torch.Generator().manual_seed(1 + seed)
    model = model_of(method, seed)
    trainer = Trainer(model, lr)

    seconds = 0.0
    label = f"{method}, {lr:g}, seed {seed}"
    with tqdm(range(steps), desc=f"{label:<50}", disable=None, dynamic_ncols=True) as bar:
        for step in bar:
            done = (step + 0.5) / steps
            task = next(t for t, s in zip(tasks, STAGES, strict=True) if done < s.until)
            if task is tasks[-1] and method in LAST:
                for block in model.blocks:
                    block.attention.mixer.estimator = LAST[method]
            batch = task.training(TOKENS // task.length, generator)
            start = time.process_time()
            trainer.step(batch, done)
            seconds += time.process_time() - start
            if (step + 1) * CURVE // steps > step * CURVE // steps:
                now = evaluate(model, held_out)
                bar.set_postfix({key: f"{now[key]:.3f}" for key in ("loss", "accuracy")})
                if now["accuracy"] >= ENOUGH and (method not in LAST or task is tasks[-1]):
                    break
    run = {"method": method, "lr": lr, "seed": seed} | evaluate(model, held_out)
    run |= {"steps": step + 1, "seconds": round(seconds, 1)}
    return run | {"date": time.strftime("%Y-%m-%d %H:%M"), "cpu": cpu_model()}


# --- Noise of the gradient ------------------------------------------------------------------------

EXACT = {  # by expectation, of each method whose hashes make noise
    "YOSO, 8 bits": "YOSO-E, 8 bits",
    "YOSO, 12 bits": "YOSO-E, 12 bits",
    "YOSO, 12 bits, unbiased": "YOSO-E, 12 bits",
    "YOSO, 12 bits, 512 hashes": "YOSO-E, 12 bits",
    "YOSO, 12 bits, not normalised": "YOSO-E, 12 bits, not normalised",
}


def gradient(model: Encoder, batch: Batch) -> Tensor:
    """Of all queries' and keys' projections."""
    model.zero_grad()
    F.cross_entropy(model(batch), batch.answers).backward()
    return torch.cat([b.attention.project.weight.grad[: 2 * DIM].flatten() for b in model.blocks])


def share_of_empty_rows(model: Encoder, batch: Batch, draws: int) -> float:
    """Outputs of the first layer's attention whose query collides with no key."""
    attention, empty = model.blocks[0].attention, []

    def mix(*args) -> Tensor:
        rows = attention.mixer.mix(*args)
        empty.append((rows == 0).all(-1).double().mean().item())
        return rows

    attention.mix = mix
    with torch.no_grad():
        for _ in range(draws):
            model(batch)
    attention.mix = attention.mixer.mix
    return sum(empty) / draws


def noise(draws: int) -> dict:
    """Gradients of one batch at random weights, over hash functions, in units of the exact one."""
    task, made = STAGES[0].task(), {}
    batch = task.training(TOKENS // task.length, torch.Generator().manual_seed(0))
    for method, exact in EXACT.items():
        model = model_of(method, 0)
        target = gradient(model_of(exact, 0), batch)
        sample = torch.stack([gradient(model, batch) for _ in range(draws)])
        along = sample @ target / target.square().sum()
        deviation = sample.var(0).sum().sqrt() / target.norm()
        made[method] = {
            "empty": share_of_empty_rows(model, batch, draws),
            "along": along.mean().item(),
            "along, standard error": (along.std() / draws**0.5).item(),
            "deviation": deviation.item(),
        }
    return {"draws": draws, "methods": made}


def noise_table(made: dict) -> str:
    header = ["attention", "rows without a collision", "along the exact gradient", "deviation"]
    rows = [
        [
            method,
            f"{100 * row['empty']:.0f} %",
            f"{row['along']:.2f} ± {row['along, standard error']:.2f}",
            f"{row['deviation']:.1f}",
        ]
        for method, row in made["methods"].items()
    ]
    return markdown(header, rows)


# --- Results --------------------------------------------------------------------------------------


def described(steps: int) -> dict:
    """What the runs depend on, as it stands in the file."""
    return {
        "stages": [list(stage) for stage in STAGES],
        "n_keys": N_KEYS,
        "n_values": N_VALUES,
        "gap": GAP,
        "tokens": TOKENS,
        "steps": steps,
        "enough": ENOUGH,
        "dim": DIM,
        "layers": LAYERS,
        "heads": HEADS,
        "conv_width": CONV_WIDTH,
        "guess": STAGES[0].task().guess(),
        "tested": TESTED,
    }


def best_rate(results: dict, method: str) -> float:
    """The most accurate with the first seed in tenths of a percent; of equal ones the soonest."""
    own = find(results, method=method, seed=0)
    return max(own, key=lambda run: (round(run["accuracy"], 3), -run["steps"]))["lr"]


def table(results: dict) -> str:
    """A row for each method: its best learning rate over the seeds, each rate with the first."""
    rates = sorted({run["lr"] for run in results["runs"]})
    header = ["method", "accuracy, %", "steps", "rate", "seeds"]
    header += [f"seed 0 at {rate:g}" for rate in rates]
    rows = []
    for method in METHODS:
        if not find(results, method=method):
            continue
        best = best_rate(results, method)
        own = find(results, method=method, lr=best)
        cells = [
            mean_and_spread([100 * run["accuracy"] for run in own], 1),
            mean_and_spread([run["steps"] for run in own], 0),
            *(f"{best:g}", str(len(own))),
        ]
        for rate in rates:
            first = find(results, method=method, lr=rate, seed=0)
            cells.append("".join(f"{100 * run['accuracy']:.1f}" for run in first))
        rows.append([method, *cells])
    return markdown(header, rows)


# --- Command line ---------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = command_line(__doc__)
    add = parser.add_argument
    add_names(parser, "--methods", METHODS)
    add("--rates", type=float, nargs="+", default=list(RATES), help="learning rates")
    add("--seeds", type=positive, default=SEEDS, help="of the best learning rate")
    add("--noise", action="store_true", help="measure the gradients' noise, train nothing")
    add("--quick", action="store_true", help="four steps each: a test, no result")
    add("--tables", action="store_true", help="print the file, train nothing")
    add("--json", type=pathlib.Path, default=RESULTS / "recall_from_scratch.json")
    return parsed(parser)


def main() -> None:
    args = parse_arguments()
    steps = 4 if args.quick else STEPS
    torch.set_num_threads(1)
    runs = Runs(args.json, ORDER, {"machine": machine(), "setting": None})
    given = {("setting",): described(steps)}
    runs.check(given)

    def make(method: str, lr: float, seed: int) -> None:
        if runs.has(method=method, lr=lr, seed=seed):
            return
        run = train(method, lr, seed, steps)
        runs.add(run, given)
        told = f"accuracy {run['accuracy']:.3f}, loss {run['loss']:.3f}, {run['seconds']:.0f} s"
        print(f"{method}, {lr:g}, seed {seed}: {told}", flush=True)

    if args.noise:
        made = noise(2 if args.quick else DRAWS)
        with runs.updated() as results:
            results["noise"] = made
    for method in () if args.tables or args.noise else args.methods:
        for lr in args.rates:
            make(method, lr, 0)
        for seed in range(1, args.seeds):
            make(method, best_rate(runs.load(), method), seed)
    results = runs.load()
    print(table(results))
    if "noise" in results:
        print(f"\n{noise_table(results['noise'])}")


if __name__ == "__main__":
    main()
