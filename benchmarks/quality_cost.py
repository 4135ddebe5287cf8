"""What an attention is worth: loss after equal steps and after equal seconds, on real text.

A small encoder learns to name hidden bytes (15 %) of the source code of Python's own standard
library; every tenth file is held out. Each method and seed is a run of its own. The methods differ
in what mixes the heads' values and in nothing else: for a seed they start from the same weights and
see the same batches. Three controls tell what attention adds: a convolution over the values (that
of YOSO-C), exact softmax over a near window, and no mixing at all.

Seconds are CPU time of the training steps, evaluation not counted: with one thread that is the time
on a quiet machine, also where other work runs. With --seconds a run lasts that long instead of
--steps, the learning rate's schedule stretched over it.

    python benchmarks/quality_cost.py
    python benchmarks/quality_cost.py --methods softmax "soft, 4 probes" --seeds 0 --resume

Several processes may add to one file of results with --resume; with all runs done it only reports.
"""

import argparse
import fcntl
import functools
import json
import math
import os
import pathlib
import platform
import sysconfig
import time

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import lshkit
from lshkit import _C
from lshkit.attention import yoso_attention

ROOT = pathlib.Path(__file__).resolve().parents[1]
MASK = 256  # the token that stands for a hidden byte
MASKED_PART = 0.15
NEAR = 16  # the controls see this many bytes to either side
N_HASHES = 32
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


# --- What mixes the values ------------------------------------------------------------------------


def softmax(q, k, v, layer):
    return F.scaled_dot_product_attention(q, k, v)


def window(q, k, v, layer):
    """Exact softmax over |i - j| <= NEAR, in blocks of 2 NEAR queries with 4 NEAR keys."""
    batch, heads, length, dim = q.shape
    block = 2 * NEAR
    k, v = (  # (batch * heads, blocks, keys, dim)
        F.pad(x, (0, 0, NEAR, NEAR)).unfold(2, 2 * block, block).transpose(-1, -2).flatten(0, 1)
        for x in (k, v)
    )
    q = q.reshape(batch * heads, -1, block, dim)
    key = torch.arange(2 * block) - NEAR
    near = (torch.arange(block)[:, None] - key).abs() <= NEAR
    position = torch.arange(0, length, block)[:, None, None] + key
    mask = near & (position >= 0) & (position < length)
    return F.scaled_dot_product_attention(q, k, v, mask).view(batch, heads, length, dim)


def convolution(q, k, v, layer):
    return layer.convolution(v)


def nothing(q, k, v, layer):
    return v


def yoso(q, k, v, layer, n_hashes=N_HASHES, **options):
    """Fresh hash functions in each training step, fixed ones in the evaluation."""
    n_hashes *= 1 if layer.training else layer.hashes_factor
    seed = None if layer.training else layer.eval_seed
    return yoso_attention(q, k, v, n_hashes=n_hashes, seed=seed, **options)


YOSO = {
    "YOSO-E": dict(n_bits=8, estimator="expected", gradient="expected"),
    "lower_bound": dict(n_bits=8, estimator="sampled", gradient="lower_bound"),
    "collided": dict(n_bits=8, estimator="sampled", gradient="collided"),
    "unbiased": dict(n_bits=8, estimator="sampled", gradient="unbiased"),
    "soft, 4 probes": dict(n_bits=12, estimator="soft", n_probes=4, sharpness=2.0),
    "soft, 2 probes": dict(n_bits=12, estimator="soft", n_probes=2, sharpness=2.0),
    # As in RACE Attention: few buckets, and every token belongs to all of them.
    "soft, all of 16": dict(n_bits=4, estimator="soft", n_probes=16, sharpness=2.0),
}
CONTROLS = {"convolution only": convolution, "window only": window, "no attention": nothing}
MIX = {
    "softmax": softmax,
    **{name: functools.partial(yoso, **options) for name, options in YOSO.items()},
    **CONTROLS,
}


# --- Text ---------------------------------------------------------------------------------------


def read_text(folder: pathlib.Path) -> tuple[Tensor, Tensor]:
    """All .py files below folder as two byte strings: for training, and every tenth held out."""
    files = sorted(
        path
        for path in folder.rglob("*.py")
        if not SKIPPED_FOLDERS.intersection(path.relative_to(folder).parts)
    )
    held_out = [path.read_bytes() for path in files[::10]]
    training = [path.read_bytes() for i, path in enumerate(files) if i % 10]
    return tuple(
        torch.frombuffer(bytearray(b"".join(part) or b"\n"), dtype=torch.uint8)
        for part in (training, held_out)
    )


def masked_batch(text: Tensor, args: argparse.Namespace, generator: torch.Generator):
    """Tokens with some bytes hidden, where they are hidden, and which bytes they were."""
    starts = torch.randint(len(text) - args.length + 1, (args.batch_size,), generator=generator)
    tokens = torch.stack([text[start : start + args.length] for start in starts]).long()
    hidden = torch.rand(tokens.shape, generator=generator) < MASKED_PART
    hidden[:, 0] = True  # never a batch without a target
    return tokens.masked_fill(hidden, MASK), hidden, tokens[hidden]


# --- Model --------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Heads around a way to mix their values. All methods have the same weights at the start."""

    def __init__(self, dim: int, heads: int, method: str, eval_seed: int) -> None:
        super().__init__()
        self.heads, self.mix = heads, MIX[method]
        self.eval_seed, self.hashes_factor = eval_seed, 1
        self.project, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        if method == "convolution only":
            with torch.random.fork_rng():
                self.kernels = nn.Conv2d(
                    heads, heads, (2 * NEAR + 1, 1), padding=(NEAR, 0), groups=heads, bias=False
                )

    def convolution(self, v: Tensor) -> Tensor:
        return self.kernels(v)

    @torch.no_grad()
    def look_nearby(self, speed: Tensor) -> None:
        """Keys get the queries' projection, turned by as many positions as a head looks aside."""
        query, key, _ = self.project.weight.unflatten(0, (3, self.heads, -1))
        for head, (q, k) in enumerate(zip(query, key, strict=True)):
            angle = (head // 2 + 1) * (-1) ** head * speed  # a byte back, ahead, two back, ...
            sin, cos = q.chunk(2, -1)
            turned = (sin * angle.cos() - cos * angle.sin(), cos * angle.cos() + sin * angle.sin())
            k.copy_(torch.cat(turned, -1))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        dim = x.shape[-1]
        weight, bias = self.project.weight, self.project.bias
        q, k = F.linear(x + positions, weight[: 2 * dim], bias[: 2 * dim]).chunk(2, -1)
        v = F.linear(x, weight[2 * dim :], bias[2 * dim :])
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        return self.out(self.mix(q, k, v, self).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, method: str, eval_seed: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, method, eval_seed)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), positions)
        return x + self.mlp(self.norm2(x))


class Encoder(nn.Module):
    """A transformer encoder over bytes; queries and keys see learned positions, values do not.

    It starts at what a short run would spend its time on: how often each byte occurs, positions
    that are sinusoids, and heads that look nearby. All of it is trained on.
    """

    def __init__(self, args: argparse.Namespace, method: str, frequencies: Tensor) -> None:
        super().__init__()
        dim = args.embed_dim
        self.embedding = nn.Embedding(257, dim)
        speed = 30.0 ** -torch.linspace(0, 1, dim // 2)  # wavelengths from 6 to 200 bytes
        angle = torch.arange(args.length)[:, None] * speed
        self.positions = nn.Parameter(4 * torch.cat((angle.sin(), angle.cos()), -1))
        self.blocks = nn.ModuleList(Block(dim, args.heads, method, i) for i in range(args.layers))
        self.norm, self.output = nn.LayerNorm(dim), nn.Linear(dim, 256)
        for block in self.blocks:
            block.attention.look_nearby(speed)
        with torch.no_grad():
            self.output.weight.mul_(0.3)
            self.output.bias.copy_(frequencies.log())

    def forward(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.positions)
        return self.output(self.norm(x[hidden]))


# --- One run --------------------------------------------------------------------------------------


def learning_rate(done: float) -> float:
    """Of the largest rate, at a part done of the run: linear warm-up, then half a cosine."""
    return min(1, done / 0.05, math.cos(math.pi / 2 * done) ** 2)


@torch.no_grad()
def evaluate(model: Encoder, batches: list, hashes_factor: int = 1) -> float:
    """Loss in nats per hidden byte."""
    model.eval()
    for block in model.blocks:
        block.attention.hashes_factor = hashes_factor
    loss = sum(
        F.cross_entropy(model(tokens, hidden), targets, reduction="sum").item()
        for tokens, hidden, targets in batches
    )
    model.train()
    return loss / sum(len(targets) for _, _, targets in batches)


def train(method: str, seed: int, args: argparse.Namespace) -> dict:
    text, held_out = read_text(args.text)
    generator = torch.Generator().manual_seed(0)
    batches = [masked_batch(held_out, args, generator) for _ in range(args.eval_batches)]
    generator.manual_seed(1 + seed)
    torch.manual_seed(seed)
    counts = torch.bincount(text.long(), minlength=256) + 1.0
    model = Encoder(args, method, counts / counts.sum())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98))

    points = []  # (steps, seconds, loss) of each evaluation
    step = part = 0
    seconds = done = 0.0
    total = args.seconds or args.steps
    label = f"{method}, seed {seed}"
    with tqdm(total=total, desc=f"{label:<24}", disable=None, dynamic_ncols=True) as bar:
        while True:
            if done >= part / args.evaluations:
                points.append((step, seconds, evaluate(model, batches)))
                part = int(done * args.evaluations) + 1
                bar.set_postfix(loss=f"{points[-1][2]:.3f}")
            if done >= 1:
                break
            tokens, hidden, targets = masked_batch(text, args, generator)
            start = time.process_time()
            for group in optimizer.param_groups:
                group["lr"] = args.lr * learning_rate(done + 1 / (2 * args.steps))
            loss = F.cross_entropy(model(tokens, hidden), targets)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            seconds += time.process_time() - start
            done = min(1.0, seconds / args.seconds if args.seconds else step / args.steps)
            bar.update(done * total - bar.n)

    run = {"method": method, "seed": seed, "budget": budget(args)}
    for i, name in enumerate(("steps", "seconds", "losses")):
        run[name] = [point[i] for point in points]
    if method in YOSO and method != "YOSO-E":
        run["loss_with_twice_the_hashes"] = evaluate(model, batches, hashes_factor=2)
    return run | {"date": time.strftime("%Y-%m-%d %H:%M"), "load_average": os.getloadavg()[0]}


# --- Results --------------------------------------------------------------------------------------


def budget(args: argparse.Namespace) -> str:
    return f"{args.seconds:g} s" if args.seconds else f"{args.steps} steps"


def settings(args: argparse.Namespace) -> dict:
    names = "length batch_size embed_dim heads layers lr eval_batches evaluations threads"
    return {name: getattr(args, name) for name in names.split()} | {
        "n_hashes": N_HASHES,
        "methods": YOSO,
        "controls": f"window and convolution reach {NEAR} bytes to either side",
        "data": "source code of Python's standard library, every tenth file held out",
        "losses": "nats per hidden byte of held-out text",
        "seconds": "CPU time of the training steps",
        "machine": {
            "cpu": cpu_model(),
            "instruction_set": _C.instruction_set(),
            "lshkit": lshkit.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def cpu_model() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def find(results: dict, method: str, budget: str, seed: int | None = None) -> list[dict]:
    return [
        run
        for run in results["runs"]
        if (run["method"], run["budget"]) == (method, budget) and seed in (None, run["seed"])
    ]


def load(path: pathlib.Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {"settings": None, "runs": []}


def add_run(path: pathlib.Path, run: dict, args: argparse.Namespace) -> None:
    """Add a run to the file, which other processes may be adding to as well."""
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = load(path)
        if find(results, run["method"], run["budget"], run["seed"]):
            return  # another process was as fast
        results["settings"] = settings(args)
        results["runs"] = sorted(
            [*results["runs"], run],
            key=lambda run: (run["budget"], list(MIX).index(run["method"]), run["seed"]),
        )
        new = path.with_suffix(".new")
        new.write_text(json.dumps(results, indent=1) + "\n")
        new.replace(path)


def mean_and_spread(values: list[float]) -> str:
    if not values:
        return ""
    spread = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
    return f"{np.mean(values):.3f}{spread}"


def table(results: dict) -> str:
    """Markdown: a row for each method, columns for each budget.

    Without runs of a budget in seconds the losses at equal seconds are read off the others' curves,
    at the time when the first method with attention is done.
    """
    budgets = list(dict.fromkeys(run["budget"] for run in results["runs"]))
    found = {method: [find(results, method, b) for b in budgets] for method in MIX}
    found = {method: runs for method, runs in found.items() if any(runs)}
    ends = [
        np.mean([run["seconds"][-1] for run in runs[0]])
        for method, runs in found.items()
        if method not in CONTROLS and runs[0]
    ]
    read_at = min(ends) if ends and all("steps" in b for b in budgets) else None

    header = [f"loss after {b} | steps/s" for b in budgets]
    if read_at is not None:
        header.append(f"on the way, at {read_at:.0f} s")
    header += [f"with {2 * N_HASHES} hashes", "seeds"]
    lines = [f"| method | {' | '.join(header)} |"]
    lines.append("|---" * (lines[0].count("|") - 1) + "|")
    for method, by_budget in found.items():
        cells = []
        for runs in by_budget:
            cells.append(mean_and_spread([run["losses"][-1] for run in runs]))
            speed = [run["steps"][-1] / run["seconds"][-1] for run in runs]
            cells.append(f"{np.median(speed):.1f}" if runs else "")
        first = by_budget[0]
        if read_at is not None:
            losses = [np.interp(read_at, run["seconds"], run["losses"]) for run in first]
            cells.append(mean_and_spread(losses))
        finer = [run.get("loss_with_twice_the_hashes") for run in first]
        cells.append("" if None in finer else mean_and_spread(finer))
        cells.append(str(len({run["seed"] for runs in by_budget for run in runs})))
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


# Okabe and Ito's colours: told apart with any colour vision. Controls are grey.
STYLE = {
    "softmax": ("#000000", "-"),
    "YOSO-E": ("#000000", "--"),
    "lower_bound": ("#D55E00", "-"),
    "collided": ("#E69F00", "-"),
    "unbiased": ("#CC79A7", "-"),
    "soft, 4 probes": ("#0072B2", "-"),
    "soft, 2 probes": ("#56B4E9", "-"),
    "soft, all of 16": ("#009E73", "-"),
    "convolution only": ("#888888", "-"),
    "window only": ("#888888", "--"),
    "no attention": ("#888888", ":"),
}


def draw(results: dict, path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    by_steps = [run["budget"] for run in results["runs"] if "steps" in run["budget"]]
    by_seconds = [run["budget"] for run in results["runs"] if "steps" not in run["budget"]]
    panels = (
        ("steps", "training steps", (by_steps or by_seconds)[-1]),
        ("seconds", "training seconds (CPU time)", (by_seconds or by_steps)[-1]),
    )
    figure, axes = plt.subplots(1, 2, figsize=(11, 5), sharey=True, layout="constrained")
    for axis, (x, label, shown) in zip(axes, panels, strict=True):
        ends = []
        for method, (color, line) in STYLE.items():
            runs = find(results, method, shown)
            if not runs:
                continue
            # Runs of a budget in seconds take different steps: a common number of evaluations.
            count = min(len(run["losses"]) for run in runs)
            losses = np.array([run["losses"][:count] for run in runs])[:, 1:]
            xs = np.mean([run[x][:count] for run in runs], axis=0)[1:]
            axis.plot(xs, losses.mean(0), color=color, ls=line, lw=1.6)
            axis.fill_between(xs, losses.min(0), losses.max(0), color=color, alpha=0.12, lw=0)
            ends.append([losses.mean(0)[-1], xs[-1], method, color])
        axis.set(xlabel=label, title=f"runs of {shown}")
        axis.spines[["top", "right"]].set_visible(False)
        label_ends(axis, sorted(ends))
    axes[0].set_ylabel("held-out loss (nats per hidden byte)")
    seeds = len({run["seed"] for run in results["runs"]})
    length = results["settings"]["length"]
    figure.suptitle(f"Masked bytes at length {length}: mean and range of {seeds} seed(s)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def label_ends(axis, ends: list) -> None:
    """Names beside the last points, pushed apart where they would overlap."""
    low, high = axis.get_ylim()
    right, gap = max(x for _, x, _, _ in ends), (high - low) / 28
    heights = [end[0] for end in ends]
    for _ in range(200):  # neighbours that are too close move apart by halves
        for i in range(1, len(heights)):
            overlap = gap - (heights[i] - heights[i - 1])
            if overlap > 0:
                heights[i - 1] -= overlap / 2
                heights[i] += overlap / 2
    for height, (y, x, name, color) in zip(heights, ends, strict=True):
        axis.plot([x, 1.05 * right], [y, height], color=color, lw=0.5)
        axis.text(1.06 * right, height, name, color=color, va="center", fontsize=9)
    axis.set_xlim(0, 1.4 * right)
    axis.set_xticks([tick for tick in axis.get_xticks() if 0 <= tick <= 1.02 * right])


# --- Command line -------------------------------------------------------------------------------


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


positive.__name__ = "positive integer"  # the name in argparse's message


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--methods", nargs="+", choices=MIX, default=list(MIX), metavar="M", help=", ".join(MIX))
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--steps", type=positive, default=600, help="training steps of a run (600)")
    add("--seconds", type=float, help="train for this CPU time instead")
    add("--resume", action="store_true", help="add to --out, skip the runs that are in it")
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
    add("--out", type=pathlib.Path, default=ROOT / "benchmarks/results/quality_cost.json")
    add("--figure", type=pathlib.Path, default=ROOT / "docs/images/quality_cost.png")
    args = parser.parse_args()

    # What would fail only after minutes is checked now.
    if args.seconds is not None and not args.seconds > 0:
        parser.error(f"--seconds must be above 0: {args.seconds}")
    if args.embed_dim % (2 * args.heads):
        parser.error(f"--embed-dim must be a multiple of 2 * {args.heads} heads: {args.embed_dim}")
    if args.length % (2 * NEAR):
        parser.error(f"--length must be a multiple of {2 * NEAR}: {args.length}")
    for part in read_text(args.text):
        if len(part) < args.length:
            parser.error(f"--text: {args.text} has too little text for --length {args.length}")
    if args.out.exists() and not args.resume:
        parser.error(f"--out: {args.out} exists; --resume adds to it")
    made_with = load(args.out)["settings"]
    if made_with not in (None, json.loads(json.dumps(settings(args)))):
        parser.error(f"--resume: {args.out} was made with other settings or versions")
    return args


def main() -> None:
    args = parse_arguments()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    for seed in args.seeds:
        for method in args.methods:
            if find(load(args.out), method, budget(args), seed):
                continue
            run = train(method, seed, args)
            add_run(args.out, run, args)
            loss, steps, seconds = (run[name][-1] for name in ("losses", "steps", "seconds"))
            text = f"{method}, seed {seed}: loss {loss:.3f} after {steps} steps, {seconds:.0f} s"
            print(text, flush=True)
    results = load(args.out)
    print(table(results))
    draw(results, args.figure)
    print(f"\nwritten to {args.out} and {args.figure}")


if __name__ == "__main__":
    main()
