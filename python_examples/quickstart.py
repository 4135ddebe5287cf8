"""Quickstart: training with softmax and with YOSO
===============================================

Train two small models on long sequences, with YOSO and with softmax attention, for the same time.

Recall: 2,048 pairs of a key and a value, then keys again, each of which is to answer with its
value, in 16,384 tokens. Text: the source code of Python's own standard library, of which every
tenth file is held out; 15 % of the bytes in a sequence of 4,096 are hidden, and the model names
them from all the others. Both start from the same parameters, see the same sequences as far as they
get, and differ in one line. (Softmax learns recall too, if it begins with shorter sequences: see
docs/equal_time.md.) At the end there is a table and a picture. Needs torch, matplotlib and tqdm.
"""

import argparse
import math
import os
import pathlib
import sysconfig
import time

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # beside other work, spinning threads cost most

try:
    import matplotlib
    import numpy as np
    import torch
    from matplotlib import pyplot as plt
    from torch import Tensor, nn
    from torch.nn import functional as F
    from tqdm import tqdm
except ImportError as error:
    raise SystemExit(f"{error}: pip install '.[dev]' has what the examples need") from None

from lshkit.attention import Sampled, YosoAttention

MASK = 256  # the token that stands for a hidden byte
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
COLORS = {"softmax": "#56606A", "YOSO": "#D55E00"}


# --- Tasks: tokens (batch, length), which of them to answer, and the answers --------------------


class Recall:
    """Key, value, key, value, ...; blanks; then keys in random places among blanks."""

    title, measure, unit = "recall", "accuracy", "% of answers"
    has_positions, n_answers, batch_size = False, 64, 1

    def __init__(self, length: int) -> None:
        self.length, self.n_pairs = length, length // 8
        self.n_keys = 2 * self.n_pairs
        self.n_tokens = 1 + self.n_keys + self.n_answers  # 0 is the blank

    def draw(self, generator: torch.Generator, held_out: bool = False):
        pairs, n = self.n_pairs, self.length
        keys = 1 + torch.randperm(self.n_keys, generator=generator)[:pairs]
        values = torch.randint(self.n_answers, (pairs,), generator=generator)
        tokens = torch.zeros(1, n, dtype=torch.int64)
        tokens[0, 0 : 2 * pairs : 2] = keys
        tokens[0, 1 : 2 * pairs : 2] = 1 + self.n_keys + values
        first = n // 2
        places = first + torch.randperm(n - first, generator=generator)[:pairs].sort().values
        which = torch.randint(pairs, (pairs,), generator=generator)
        tokens[0, places] = keys[which]
        asked = torch.zeros(1, n, dtype=torch.bool).index_fill_(1, places, True)
        return tokens, asked, values[which]


class Text:
    """Bytes of .py files, 15 % of them hidden."""

    title, measure, unit = "hidden bytes", "loss", "nats a byte"
    has_positions, n_answers, n_tokens, batch_size = True, 256, 257, 1

    def __init__(self, length: int, folder: pathlib.Path) -> None:
        self.length = length
        files = sorted(
            path
            for path in folder.rglob("*.py")
            if not SKIPPED_FOLDERS.intersection(path.relative_to(folder).parts)
        )
        parts = [files[i::10] for i in range(10)]
        self.parts = self._bytes(sum(parts[1:], [])), self._bytes(parts[0])

    @staticmethod
    def _bytes(files: list[pathlib.Path]) -> Tensor:
        text = b"".join(path.read_bytes() for path in files)
        return torch.frombuffer(bytearray(text or b"\n"), dtype=torch.uint8)

    def draw(self, generator: torch.Generator, held_out: bool = False):
        text = self.parts[held_out]
        start = int(torch.randint(len(text) - self.length + 1, (), generator=generator))
        tokens = text[None, start : start + self.length].long()
        hidden = torch.rand(tokens.shape, generator=generator) < 0.15
        hidden[:, 0] = True  # never a batch without a target
        return tokens.masked_fill(hidden, MASK), hidden, tokens[hidden]


# --- Model --------------------------------------------------------------------------------------


class SoftmaxAttention(YosoAttention):
    """The same parameters, with softmax in the place of collisions."""

    dtype = torch.float32  # or what is faster, see fastest_dtype

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, None]:
        weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
        q, k, v = (
            F.linear(x, w, b).unflatten(-1, (self.num_heads, -1)).transpose(1, 2).to(self.dtype)
            for x, w, b in zip((query, key, value), weights, biases, strict=True)
        )
        out = F.scaled_dot_product_attention(q, k, v).to(query.dtype)
        return self.out_proj(out.transpose(1, 2).flatten(2)), None


ATTENTION = {"softmax": SoftmaxAttention, "YOSO": YosoAttention}


class Block(nn.Module):
    def __init__(self, name: str, length: int, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        estimator = Sampled(max_length=length)
        self.attention = ATTENTION[name](dim, heads, estimator=estimator, n_hashes_eval=None)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, positions: Tensor | None) -> Tensor:
        content = self.norm1(x)
        if positions is None:  # the key of a token is made of the token before it
            query, key = content, F.pad(content[:, :-1], (0, 0, 1, 0))
        else:
            query = key = content + positions
        x = x + self.attention(query, key, content)[0]
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """A transformer encoder that starts at what a short run would spend its time on.

    Text has positions, and heads that look one byte back or ahead. In recall queries look for what
    they are themselves.
    """

    def __init__(self, name: str, task: Recall | Text, dim: int = 64, heads: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(task.n_tokens, dim)
        self.blocks = nn.ModuleList(Block(name, task.length, dim, heads) for _ in range(2))
        self.norm, self.output = nn.LayerNorm(dim), nn.Linear(dim, task.n_answers)
        self.output.weight.data.mul_(0.3)
        speed = 30.0 ** -torch.linspace(0, 1, dim // 2)  # wavelengths from 6 to 200 bytes
        angle = torch.arange(task.length)[:, None] * speed
        positions = 8 * torch.cat((angle.sin(), angle.cos()), -1) if task.has_positions else None
        self.register_buffer("positions", positions)
        for block in self.blocks:
            query, key, _ = block.attention.in_proj_weight.data.unflatten(0, (3, heads, -1))
            if positions is None:
                key.copy_(2 * query)
            else:
                for head in range(heads):  # the queries' projection, turned by a position
                    sin, cos = query[head].chunk(2, -1)
                    turn = (-1) ** head * speed
                    parts = sin * turn.cos() - cos * turn.sin(), cos * turn.cos() + sin * turn.sin()
                    key[head].copy_(torch.cat(parts, -1))

    def forward(self, tokens: Tensor, asked: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.positions)
        return self.output(self.norm(x[asked]))


# --- Training -----------------------------------------------------------------------------------


def fastest_dtype() -> torch.dtype:
    """Of softmax attention on this CPU: some multiply bfloat16 faster than float32."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(1, 2, 2048, 32, dtype=dtype)
        F.scaled_dot_product_attention(x, x, x)
        start = time.perf_counter()
        F.scaled_dot_product_attention(x, x, x)
        seconds[dtype] = time.perf_counter() - start
    return min(seconds, key=seconds.get)


def measured(task: Recall | Text, logits: Tensor, answers: Tensor, loss: Tensor) -> float:
    right = (logits.argmax(1) == answers).float().mean()
    return 100 * right.item() if task.measure == "accuracy" else loss.item()


def train(name: str, task: Recall | Text, args: argparse.Namespace) -> dict:
    """Steps for args.seconds; each is measured on its sequence before it learns from it."""
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    model = Model(name, task)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98))
    curve, seconds = [], 0.0
    shown = "{l_bar}{bar}| {n:.0f} of {total:g} s{postfix}"
    with tqdm(total=args.seconds, desc=f"{task.title}, {name}", bar_format=shown) as bar:
        while seconds < args.seconds:
            tokens, asked, answers = task.draw(generator)
            start, done = time.perf_counter(), seconds / args.seconds
            for group in optimizer.param_groups:  # linear warm-up, then half a cosine
                group["lr"] = args.lr * min(1, 0.02 + 20 * done, math.cos(math.pi / 2 * done) ** 2)
            logits = model(tokens, asked)
            loss = F.cross_entropy(logits, answers)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            taken = time.perf_counter() - start
            seconds += taken
            curve.append((seconds, measured(task, logits.detach(), answers, loss)))
            bar.update(min(taken, args.seconds - bar.n))  # the last step goes beyond
            bar.set_postfix({task.measure: f"{np.mean([y for _, y in curve[-10:]]):.2f}"})
    model.eval()
    generator = torch.Generator().manual_seed(2**40)
    found = []
    with torch.no_grad():
        for _ in range(max(1, args.held_out // task.length)):
            tokens, asked, answers = task.draw(generator, held_out=True)
            logits = model(tokens, asked)
            found.append(measured(task, logits, answers, F.cross_entropy(logits, answers)))
    return {"held_out": float(np.mean(found)), "curve": np.array(curve)}


# --- What comes out -----------------------------------------------------------------------------


def print_table(results: dict, args: argparse.Namespace) -> None:
    print(f"\n{args.seconds:g} seconds of training each, threads: {torch.get_num_threads()}\n")
    print(f"{'':<36}{'softmax':>10}{'YOSO':>10}")
    for task in args.tasks:
        found = [results[task.title, name] for name in ATTENTION]
        print(f"{f'{task.title} in {task.length} tokens, steps':<36}", end="")
        print("".join(f"{len(result['curve']):>10}" for result in found))
        print(f"{f'held-out {task.measure}, {task.unit}':<36}", end="")
        print("".join(f"{result['held_out']:>10.2f}" for result in found))


def draw(results: dict, args: argparse.Namespace) -> None:
    matplotlib.use("Agg")
    figure, axes = plt.subplots(
        1, 2, figsize=(10, 4.4), width_ratios=(1.35, 1), layout="constrained"
    )
    for axis, task in zip(axes, args.tasks, strict=True):
        for name, color in COLORS.items():
            result = results[task.title, name]
            x, y = result["curve"].T
            width = max(1, len(y) // 12)
            smooth = np.convolve(y, np.ones(width) / width, mode="valid")
            axis.plot(x[width - 1 :], smooth, color=color, lw=2)
            label = f"{name}: {result['held_out']:.{1 if task.measure == 'accuracy' else 2}f}"
            axis.plot(x[-1], result["held_out"], "o", color=color, label=label, clip_on=False)
        axis.set(xlabel="seconds of training", ylabel=f"{task.measure}, {task.unit}")
        axis.set_title(f"{task.title} in {task.length:,} tokens", fontsize=11)
        axis.legend(title="held out", frameon=False, loc="best")
        axis.grid(color="#E5E5E5", lw=0.7)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylim(0, 102)
    figure.savefig(args.out, dpi=110)
    plt.close(figure)


# --- Command line -------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[1],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--seconds", type=float, default=45, help="training of each of the four models")
    add("--recall-length", type=int, default=16384, help="tokens of a sequence, a pair in 8")
    add("--text-length", type=int, default=4096, help="bytes of a sequence")
    add("--held-out", type=int, default=65536, help="tokens of the evaluation")
    add("--lr", type=float, default=3e-3, help="largest learning rate")
    add("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    add("--seed", type=int, default=0, help="of the parameters, sequences and hash functions")
    stdlib = pathlib.Path(sysconfig.get_path("stdlib"))
    add("--text", type=pathlib.Path, default=stdlib, help="folder with .py files to learn from")
    add("--out", type=pathlib.Path, default=pathlib.Path("quickstart.png"), help="the picture")
    add("--quick", action="store_true", help="one to two minutes: 10 seconds each, short texts")
    args = parser.parse_args()
    if args.quick:
        parser.set_defaults(seconds=10, recall_length=4096, text_length=1024)
        args = parser.parse_args()
    for name, least in (("recall_length", 16), ("text_length", 1), ("held_out", 1), ("threads", 1)):
        if (number := getattr(args, name)) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}: {number}")
    if not 0 < args.seconds < math.inf:
        parser.error(f"--seconds must be a number > 0: {args.seconds}")
    if not 0 < args.lr < math.inf:
        parser.error(f"--lr must be a number > 0: {args.lr}")
    if args.out.suffix != ".png" or not args.out.absolute().parent.is_dir():
        parser.error(f"--out must be a .png file in a folder that exists: {args.out}")
    args.tasks = [Recall(args.recall_length), Text(args.text_length, args.text)]
    if min(map(len, args.tasks[1].parts)) < args.text_length:
        parser.error(f"--text: {args.text} has too little text for {args.text_length} bytes")
    return args


def main() -> None:
    args = parse_arguments()
    training, held_out = map(len, args.tasks[1].parts)
    print(f"{args.text}:\n{training:,} bytes to train on, {held_out:,} held out")
    torch.set_num_threads(args.threads)
    SoftmaxAttention.dtype = fastest_dtype()
    results = {
        (task.title, name): train(name, task, args) for task in args.tasks for name in ATTENTION
    }
    print_table(results, args)
    draw(results, args)
    print(f"\nBoth against seconds of training: {args.out}")


if __name__ == "__main__":
    main()

# sphinx_gallery_thumbnail_path = "images/quickstart.png"
