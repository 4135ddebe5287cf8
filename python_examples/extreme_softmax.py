"""An output layer of many classes
===============================

An output layer of 100,000 classes: trained with the full softmax and with SampledSoftmaxLoss.

The classes are the most frequent pairs of neighbouring words and signs in the source code of
Python's own standard library; a small network guesses the next pair from the eight words before it.
Every tenth file is held out, and there the loss is the exact one for all. The methods start from
the same weights and see the same batches. At the end there are a table and a picture. Needs torch,
matplotlib, tabulate and tqdm.
"""

import argparse
import collections
import math
import pathlib
import re
import sysconfig
import time

try:
    import matplotlib
    import numpy as np
    import torch
    from matplotlib import pyplot as plt
    from tabulate import tabulate
    from torch import Tensor, nn
    from torch.nn import functional as F
    from tqdm import tqdm
except ImportError as error:
    raise SystemExit(f"{error}: pip install '.[dev]' has what the examples need") from None

from lshkit.sampling import SampledSoftmaxLoss

CONTEXT = 8  # words that are seen
TABLE = {"tablefmt": "github", "disable_numparse": True, "colglobalalign": "right"}
VOCABULARY = 20_000  # different ones; the others are one
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
METHODS = {  # options of SampledSoftmaxLoss
    "full softmax": None,
    "near + uniform": {},
    "uniform only": {"max_bucket_size": 0},
}
COLORS = "#000000", "#0072B2", "#D55E00"


# --- Text ---------------------------------------------------------------------------------------


def read_words(folder: pathlib.Path) -> tuple[list[str], list[str]]:
    """The words and signs of all .py files below folder: for training, and every tenth held out."""
    files = sorted(
        path
        for path in folder.rglob("*.py")
        if not SKIPPED_FOLDERS.intersection(path.relative_to(folder).parts)
    )
    parts = [path.read_text(errors="replace") for path in files]
    split = ["\n".join(x for i, x in enumerate(parts) if (i % 10 == 0) == held) for held in (0, 1)]
    return tuple(re.findall(r"\w+|[^\w\s]", text) for text in split)


class Pairs:
    """Contexts (n, CONTEXT) and the classes (n,) of the pairs that follow them, if they are one."""

    def __init__(self, words: list[str], vocabulary: dict, classes: dict) -> None:
        numbers = torch.tensor([vocabulary.get(word, 0) for word in words])
        following = zip(words[CONTEXT:], words[CONTEXT + 1 :], strict=False)
        targets = torch.tensor([classes.get(pair, -1) for pair in following])
        self.places = torch.nonzero(targets >= 0)[:, 0]
        self.numbers, self.targets = numbers, targets

    def __len__(self) -> int:
        return len(self.places)

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = self.places[torch.randint(len(self), (size,), generator=generator)]
        return self.numbers[chosen[:, None] + torch.arange(CONTEXT)], self.targets[chosen]


def make_data(args: argparse.Namespace) -> tuple[Pairs, Pairs]:
    training, held_out = read_words(args.text)
    common = collections.Counter(training).most_common(VOCABULARY - 1)
    vocabulary = {word: i + 1 for i, (word, _) in enumerate(common)}
    pairs = collections.Counter(zip(training[:-1], training[1:], strict=True))
    classes = {pair: i for i, (pair, _) in enumerate(pairs.most_common(args.classes))}
    return tuple(Pairs(words, vocabulary, classes) for words in (training, held_out))


# --- Model --------------------------------------------------------------------------------------


class FullSoftmax(nn.Module):
    def __init__(self, output: nn.Linear) -> None:
        super().__init__()
        self.output = output

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.output(hidden), target)


class Model(nn.Module):
    def __init__(self, name: str, args: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32, sparse=True)
        self.hidden = nn.Sequential(
            nn.Linear(32 * CONTEXT, 256), nn.ReLU(), nn.Linear(256, args.features)
        )
        output = nn.Linear(args.features, args.classes)
        options = METHODS[name]
        if options is None:
            self.loss = FullSoftmax(output)
        else:
            options = {"n_samples": args.samples, "n_hashes": args.n_hashes, **options}
            self.loss = SampledSoftmaxLoss.from_linear(output, sparse=True, **options)

    def forward(self, contexts: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.hidden(self.embedding(contexts).flatten(1)), targets)


def train(name: str, training: Pairs, held_out: Pairs, args: argparse.Namespace) -> dict:
    """Losses on the same held-out pairs after numbers of steps and seconds of training."""
    torch.manual_seed(args.seed)
    model = Model(name, args)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=args.lr)
    generator = torch.Generator().manual_seed(args.seed)
    test = held_out.batch(args.held_out, torch.Generator().manual_seed(0))
    seconds, curve = [], []

    @torch.no_grad()
    def evaluate() -> None:
        model.eval()
        curve.append((len(seconds), sum(seconds), model(*test).item()))
        model.train()

    evaluate()
    with tqdm(range(args.steps), desc=f"{name:<14}", unit="step", dynamic_ncols=True) as bar:
        for step in bar:
            batch = training.batch(args.batch_size, generator)
            start = time.perf_counter()
            optimizer.zero_grad()
            model(*batch).backward()
            optimizer.step()
            seconds.append(time.perf_counter() - start)
            if (step + 1) % max(1, args.steps // 12) == 0 or step + 1 == args.steps:
                evaluate()
                bar.set_postfix(held_out=f"{curve[-1][2]:.3f}")
    return {"curve": np.array(curve), "step": float(np.median(seconds))}


# --- What comes out -----------------------------------------------------------------------------


def print_table(results: dict[str, dict], training: Pairs, args: argparse.Namespace) -> None:
    print(
        f"\n{args.classes:,} classes, {args.features} features; steps: {args.steps} of "
        f"{args.batch_size} pairs;\nsampled classes: {args.samples}, hash tables: "
        f"{args.n_hashes}, threads: {args.threads}\n"
    )
    full = results["full softmax"]["step"]
    few = max(1, args.steps // 10)
    table = []
    for name, result in results.items():
        _, seconds, losses = result["curve"].T
        in_equal_time = np.interp(few * full, seconds, losses)
        speed = f"{full / result['step']:.1f}"
        cells = f"{1e3 * result['step']:.1f}", speed, f"{losses[-1]:.3f}", f"{in_equal_time:.3f}"
        table.append((name, *cells))
    header = ["method", "a step, ms", "speed", "end loss", "equal time"]
    print(tabulate(table, header, colalign=["left"], **TABLE))
    print(
        "\nend loss: after all steps; equal time: after the time of the first tenth of the\n"
        f"steps with the full softmax, {few * full:.1f} s, or at the end if that is earlier.\n"
        "Both are exact, on held-out text, in nats a pair.\n"
    )


def draw(results: dict[str, dict], args: argparse.Namespace) -> None:
    matplotlib.use("Agg")
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained", sharey=True)
    for (name, result), color in zip(results.items(), COLORS, strict=True):
        steps, seconds, losses = result["curve"].T
        axes[0].plot(steps, losses, "o-", markersize=3, color=color, label=name)
        axes[1].plot(seconds[1:], losses[1:], "o-", markersize=3, color=color, label=name)
    axes[0].set(
        title="by steps", xlabel="training steps", ylabel="held-out loss, exact (nats a pair)"
    )
    axes[1].set(title="by time", xlabel="seconds of training", xscale="log")
    axes[1].xaxis.set_minor_formatter("")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    figure.savefig(args.out, dpi=100)


# --- Command line -------------------------------------------------------------------------------


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


positive.__name__ = "positive integer"  # the name in argparse's message


def parse_arguments() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[1],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--classes", type=positive, default=100_000, help="of the output layer")
    add("--features", type=positive, default=64, help="that it sees")
    add("--steps", type=positive, default=150, help="training steps of each method")
    add("--batch-size", type=positive, default=256, help="pairs in a step")
    add("--samples", type=positive, default=4096, help="classes in the uniform sample of a step")
    add("--n-hashes", type=positive, default=16, help="hash tables over the classes")
    add("--lr", type=float, default=0.05, help="learning rate of Adagrad")
    add("--held-out", type=positive, default=1024, help="held-out pairs in an evaluation")
    add("--threads", type=positive, default=torch.get_num_threads(), help="CPU threads")
    add("--seed", type=int, default=0, help="of the weights and batches")
    add("--quick", action="store_true", help="a few small steps: does it run at all?")
    stdlib = pathlib.Path(sysconfig.get_path("stdlib"))
    add("--text", type=pathlib.Path, default=stdlib, help="folder with .py files to learn from")
    add("--out", type=pathlib.Path, default=pathlib.Path("extreme_softmax.png"), help="picture")
    args = parser.parse_args()
    if args.quick:
        parser.set_defaults(classes=2000, steps=3, batch_size=16, held_out=64, samples=256)
        args = parser.parse_args()
    # What would fail only after minutes is checked now.
    if args.out.suffix != ".png" or not args.out.absolute().parent.is_dir():
        parser.error(f"--out must be a .png file in a folder that exists: {args.out}")
    if not 0 < args.lr < math.inf:
        parser.error(f"--lr must be a number > 0: {args.lr}")
    return parser, args


def main() -> None:
    parser, args = parse_arguments()
    training, held_out = make_data(args)
    if min(len(training), len(held_out)) == 0:
        parser.error(f"--text: {args.text} has too little text")
    torch.set_num_threads(args.threads)
    torch.sparse.check_sparse_tensor_invariants.disable()  # or Adagrad makes torch warn of them
    print(f"{args.text}:\n{len(training):,} pairs to train on, {len(held_out):,} held out")
    results = {name: train(name, training, held_out, args) for name in METHODS}
    print_table(results, training, args)
    draw(results, args)
    print(f"Held-out loss against steps and time: {args.out}")


if __name__ == "__main__":
    main()

# sphinx_gallery_thumbnail_path = "images/extreme_softmax.png"
