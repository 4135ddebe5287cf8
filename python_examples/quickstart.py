"""Quickstart: training with softmax and with YOSO
===============================================

Train a small masked-language model on long byte sequences, with YOSO and with softmax attention.

The text is the source code of Python's own standard library; every tenth file is held out. In each
sequence 15 % of the bytes are hidden, and the model names them from all the others. Both models
start from the same parameters and see the same batches; they differ in one line. At the end there
is a table and a picture. Needs torch, matplotlib and tqdm.
"""

import argparse
import math
import multiprocessing
import os
import pathlib
import sysconfig
import time
from concurrent.futures import ProcessPoolExecutor

try:
    import matplotlib
    import numpy as np
    import torch
    from matplotlib import pyplot as plt
    from matplotlib.colors import LogNorm
    from torch import Tensor, nn
    from torch.nn import functional as F
    from tqdm import tqdm
except ImportError as error:
    raise SystemExit(f"{error}: pip install '.[dev]' has what the examples need") from None

from lshkit.attention import Sampled, YosoAttention, yoso_attention

MASK = 256  # the token that stands for a hidden byte
MASKED_PART = 0.15
CROP = 96  # rows and columns of the attention matrix in the picture
QUICK = {"steps": 60, "held_out": 8}  # options of --quick
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


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


def masked_batch(text: Tensor, batch_size: int, length: int, generator: torch.Generator):
    """Tokens with some bytes hidden, where they are hidden, and which bytes they were."""
    starts = torch.randint(len(text) - length + 1, (batch_size,), generator=generator)
    tokens = torch.stack([text[start : start + length] for start in starts]).long()
    hidden = torch.rand(tokens.shape, generator=generator) < MASKED_PART
    hidden[:, 0] = True  # never a batch without a target
    return tokens.masked_fill(hidden, MASK), hidden, tokens[hidden]


def byte_frequencies(text: Tensor) -> Tensor:
    counts = torch.bincount(text.long(), minlength=256) + 1.0
    return counts / counts.sum()


# --- Model --------------------------------------------------------------------------------------


def project(attention: YosoAttention, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Queries, keys and values of all heads, (batch, heads, length, head_dim)."""
    weights, biases = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
    return [
        F.linear(x, weight, bias).unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
    ]


class SoftmaxAttention(YosoAttention):
    """The same parameters, with softmax in the place of collisions."""

    def forward(self, query, key, value):
        q, k, v = project(self, query, key, value)
        out = F.scaled_dot_product_attention(q, k, v)
        if self.conv is not None:  # YOSO-C's convolution, so that this model has it as well
            padding = self.conv_window // 2
            out = out + self.conv(F.pad(v, (0, 0, padding, padding)))
        return self.out_proj(out.transpose(1, 2).flatten(2)), None


ATTENTION = {"softmax": SoftmaxAttention, "YOSO": YosoAttention}


class Block(nn.Module):
    def __init__(self, args: argparse.Namespace, name: str) -> None:
        super().__init__()
        dim = args.embed_dim
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = ATTENTION[name](
            dim,
            args.heads,
            estimator=Sampled(
                n_bits=args.n_bits,
                n_hashes=args.n_hashes,
                gradient=args.gradient,
                expectation="never",
            ),
            conv_window=args.conv_window,
        )
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        content = self.norm1(x)
        where = content + positions
        x = x + self.attention(where, where, content)[0]
        return x + self.mlp(self.norm2(x))


class ByteModel(nn.Module):
    """A transformer encoder over bytes; queries and keys see the position, values do not."""

    def __init__(self, args: argparse.Namespace, name: str, frequencies: Tensor) -> None:
        super().__init__()
        dim = args.embed_dim
        self.embedding = nn.Embedding(257, dim)
        self.blocks = nn.ModuleList(Block(args, name) for _ in range(args.layers))
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, 256)

        # Sinusoids with wavelengths from 6 to 200 bytes, strong enough to set the first attention.
        speed = 30.0 ** -torch.linspace(0, 1, dim // 2)
        angle = torch.arange(args.length)[:, None] * speed
        self.register_buffer("positions", 8 * torch.cat((angle.sin(), angle.cos()), -1))
        self._start(speed, frequencies)

    @torch.no_grad()
    def _start(self, speed: Tensor, frequencies: Tensor) -> None:
        """Start at what a short run would spend its time on: frequencies, and who is nearby.

        Keys get the queries' projection, turned by a position, so that heads look one byte back
        and one byte ahead by turns. All of it is trained on.
        """
        self.output.weight.mul_(0.3)
        self.output.bias.copy_(frequencies.log())
        cos, sin = speed.cos(), speed.sin()
        for block in self.blocks:
            query, key, _ = block.attention.in_proj_weight.chunk(3)
            for head, (q, k) in enumerate(
                zip(*(w.chunk(block.attention.num_heads) for w in (query, key)), strict=True)
            ):
                q_sin, q_cos = q.chunk(2, -1)
                turn = sin if head % 2 else -sin
                k.copy_(torch.cat((q_sin * cos + q_cos * turn, q_cos * cos - q_sin * turn), -1))

    def forward(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.positions)
        return self.output(self.norm(x[hidden]))


# --- Training -----------------------------------------------------------------------------------


def learning_rate(step: int, steps: int) -> float:
    """Linear warmup over the first twentieth, then half a cosine."""
    warmup = max(1, steps // 20)
    return min((step + 1) / warmup, 0.05 + 0.95 * math.cos(math.pi / 2 * step / steps) ** 2)


def memory_in_use(device: str, most: bool = False) -> int:
    """Bytes, of the process or of its tensors on a GPU: now, or the most that was."""
    if device != "cpu":
        in_use = torch.cuda.max_memory_allocated if most else torch.cuda.memory_allocated
        return in_use(device)
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:" if most else "VmRSS:")[2].split()[0])


def count_memory_from_here(device: str) -> None:
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        pathlib.Path("/proc/self/clear_refs").write_text("5")


def train(name: str, args: argparse.Namespace) -> dict:
    """Train one model in a process of its own, whose peak memory is then that model's."""
    torch.set_num_threads(args.threads)
    text, held_out = read_text(args.text)
    torch.manual_seed(args.seed)
    model = ByteModel(args, name, byte_frequencies(text)).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: learning_rate(i, args.steps))
    generator = torch.Generator().manual_seed(args.seed)

    losses, seconds = [], []
    count_memory_from_here(args.device)
    before = memory_in_use(args.device)
    start = time.perf_counter()
    with tqdm(range(args.steps), desc=f"{name:<8}", unit="step", dynamic_ncols=True) as bar:
        for _ in bar:
            batch = masked_batch(text, args.batch_size, args.length, generator)
            tokens, hidden, targets = (x.to(args.device) for x in batch)
            loss = F.cross_entropy(model(tokens, hidden), targets)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - start)
            bar.set_postfix(loss=f"{np.mean(losses[-20:]):.3f}")
    memory = memory_in_use(args.device, most=True) - before

    return {
        "losses": np.array(losses),
        "seconds": np.array(seconds),
        "held_out": evaluate(model, held_out, args),
        "tokens_per_second": tokens.numel() / np.median(np.diff(seconds, prepend=0)),
        "memory": memory,
        "matrices": attention_matrices(model, held_out, args),
    }


def held_out_batches(text: Tensor, args: argparse.Namespace):
    generator = torch.Generator().manual_seed(0)
    for _ in range(args.held_out):
        yield [x.to(args.device) for x in masked_batch(text, 1, args.length, generator)]


@torch.no_grad()
def evaluate(model: ByteModel, text: Tensor, args: argparse.Namespace) -> float:
    """Loss in nats per hidden byte; YOSO with the fixed hash functions of eval mode."""
    model.eval()
    loss = count = 0
    for tokens, hidden, targets in held_out_batches(text, args):
        loss += F.cross_entropy(model(tokens, hidden), targets, reduction="sum").item()
        count += len(targets)
    return loss / count


@torch.no_grad()
def attention_matrices(model: ByteModel, held_out: Tensor, args: argparse.Namespace) -> dict:
    """Softmax, YOSO-E and YOSO-m of a trained head on held-out text, cropped; rows sum to 1.

    Attention to the identity as values is the attention matrix. The softmax is of the cosines, at
    the temperature where it falls off as the collision probability does at right angles.
    """
    attention, inputs = model.blocks[-1].attention, []
    hook = attention.register_forward_pre_hook(lambda module, args: inputs.extend(args))
    tokens, hidden, _ = next(held_out_batches(held_out, args))
    model(tokens, hidden)
    hook.remove()

    query, key, _ = (x[:, :1] for x in project(attention, *inputs))
    crop = slice(args.length // 2, args.length // 2 + CROP)
    values = torch.eye(args.length, device=args.device)[None, None, :, crop]
    temperature = math.pi / (2 * args.n_bits)
    softmax = F.scaled_dot_product_attention(
        F.normalize(query, dim=-1), F.normalize(key, dim=-1), values, scale=1 / temperature
    )
    estimator = Sampled(n_bits=args.n_bits, n_hashes=args.n_hashes, expectation="never")
    expected = yoso_attention(query, key, values, estimator=estimator.mean, normalize="sum")
    sampled = yoso_attention(query, key, values, estimator=estimator, normalize="sum", seed=0)
    matrices = {
        f"softmax of cosine / {temperature:.3f}": softmax,
        "YOSO-E (expected collisions)": expected,
        f"YOSO-{args.n_hashes} ({args.n_hashes} hashes)": sampled,
    }
    return {name: matrix[0, 0, crop].cpu().numpy() for name, matrix in matrices.items()}


# --- What comes out -----------------------------------------------------------------------------


def hardware(args: argparse.Namespace) -> str:
    return f"threads: {args.threads}" if args.device == "cpu" else args.device


def print_table(results: dict[str, dict], unigram: float, args: argparse.Namespace) -> None:
    yoso, softmax = results["YOSO"], results["softmax"]
    print(
        f"\n{args.steps} steps of {args.batch_size} x {args.length} bytes, {hardware(args)}; "
        f"YOSO with n_bits={args.n_bits}, n_hashes={args.n_hashes}\n\n"
        f"{'':<16}{'held-out loss':>16}{'tokens / s':>14}{'peak memory':>14}\n"
        f"{'byte frequencies':<16}{unigram:>16.3f}"
    )
    for name, result in results.items():
        print(
            f"{name:<16}{result['held_out']:>16.3f}{result['tokens_per_second']:>14,.0f}"
            f"{result['memory'] / 2**20:>10.0f} MiB"
        )
    print(
        f"{'YOSO / softmax':<16}{yoso['held_out'] / softmax['held_out']:>16.3f}"
        f"{yoso['tokens_per_second'] / softmax['tokens_per_second']:>14.2f}"
        f"{yoso['memory'] / softmax['memory']:>14.2f}\n\n"
        "held-out loss: nats per masked byte, the same bytes for all\n"
        "'byte frequencies': knows no context\n"
        "tokens / s: of the median training step\n"
        "peak memory: the most in use while training, above that with model and text\n"
        "    loaded; a process each\n"
    )
    difference = yoso["held_out"] - softmax["held_out"]
    print(
        f"After the same steps YOSO's loss is {abs(difference):.3f} nats "
        f"{'above' if difference > 0 else 'below'} softmax's.\nTraining took "
        f"{yoso['seconds'][-1]:.0f} s with YOSO, {softmax['seconds'][-1]:.0f} s with softmax."
    )


def draw(results: dict[str, dict], unigram: float, args: argparse.Namespace) -> None:
    matplotlib.use("Agg")
    figure = plt.figure(figsize=(10, 8), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[1, 1.1], hspace=0.04)

    axes = above.subplots(1, 2, sharey=True)
    width = max(1, min(25, args.steps // 4))
    for name, color in (("softmax", "tab:gray"), ("YOSO", "tab:red")):
        result = results[name]
        smooth = np.convolve(result["losses"], np.ones(width) / width, mode="valid")
        for axis, x in zip(axes, (np.arange(1, args.steps + 1), result["seconds"]), strict=True):
            axis.plot(x[width - 1 :], smooth, color=color, label=f"{name}, training")
            axis.plot(x[-1], result["held_out"], "o", color=color, label=f"{name}, held out")
    for axis in axes:
        axis.axhline(unigram, color="black", ls=":", lw=1, label="byte frequencies, held out")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set(xlabel="training steps", ylabel="loss (nats per masked byte)")
    axes[1].set_xlabel(f"training seconds ({hardware(args)})")
    above.suptitle(f"Loss at length {args.length}, mean of {width} steps")
    above.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)

    axes, matrices = below.subplots(1, 3, sharey=True), results["YOSO"]["matrices"]
    norm = LogNorm(1e-4, max(matrix.max() for matrix in matrices.values()), clip=True)
    for axis, (title, matrix) in zip(axes, matrices.items(), strict=True):
        picture = axis.imshow(matrix, norm=norm, cmap="magma", interpolation="nearest")
        axis.set_title(title, fontsize=11)
        axis.set_xlabel(f"key, from position {args.length // 2} on")
    axes[0].set_ylabel(f"query, from position {args.length // 2} on")
    below.suptitle("A head of the trained YOSO model on held-out text: attention weights")
    below.colorbar(picture, ax=axes, label="weight (a row's sum is 1)", extend="min", shrink=0.8)
    figure.savefig(args.out, dpi=100)


# --- Command line -------------------------------------------------------------------------------


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


positive.__name__ = "positive integer"  # the name in argparse's message


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[1],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=positive, default=400, help="training steps of each model")
    add("--length", type=positive, default=4096, help="bytes in a sequence")
    add("--batch-size", type=positive, default=1, help="sequences in a step")
    add("--n-bits", type=positive, default=16, help="bits of a code, 1 to 16: YOSO's sharpness")
    add("--n-hashes", type=positive, default=32, help="codes per token: more make less noise")
    add("--gradient", default="lower_bound", help="'lower_bound', or 'collided' in quadratic time")
    add("--conv-window", type=positive, help="odd width of YOSO-C's convolution, for both models")
    add("--layers", type=positive, default=2, help="transformer blocks")
    add("--embed-dim", type=positive, default=64, help="size of the model")
    add("--heads", type=positive, default=2, help="attention heads")
    add("--lr", type=float, default=5e-3, help="largest learning rate")
    add("--held-out", type=positive, default=16, help="held-out sequences in the evaluation")
    add("--device", default="cpu", help="'cuda': a GPU, in a build of lshkit with CUDA kernels")
    add("--threads", type=positive, default=torch.get_num_threads(), help="CPU threads")
    add("--seed", type=int, default=0, help="of the parameters, batches and hash functions")
    stdlib = pathlib.Path(sysconfig.get_path("stdlib"))
    add("--text", type=pathlib.Path, default=stdlib, help="folder with .py files to learn from")
    add("--out", type=pathlib.Path, default=pathlib.Path("quickstart.png"), help="the picture")
    add("--quick", action="store_true", help="a minute in all: 60 steps, 8 held-out sequences")
    args = parser.parse_args()
    if args.quick:
        parser.set_defaults(**QUICK)
        args = parser.parse_args()

    # What would fail only after minutes, or in another process, is checked now.
    if args.out.suffix != ".png" or not args.out.absolute().parent.is_dir():
        parser.error(f"--out must be a .png file in a folder that exists: {args.out}")
    if args.embed_dim % (2 * args.heads):
        parser.error(f"--embed-dim must be a multiple of 2 * {args.heads} heads: {args.embed_dim}")
    for part in read_text(args.text):
        if len(part) < args.length:
            parser.error(f"--text: {args.text} has too little text for --length {args.length}")
    try:
        Block(args, "YOSO")
        x = torch.zeros(1, 1, 1, 8, device=args.device)
        yoso_attention(x, x, x)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        parser.error(str(error))
    return args


def main() -> None:
    args = parse_arguments()
    training, held_out = read_text(args.text)
    print(f"{args.text}:\n{len(training):,} bytes to train on, {len(held_out):,} held out")
    targets = torch.cat([targets for _, _, targets in held_out_batches(held_out, args)])
    unigram = -byte_frequencies(training).log()[targets.cpu()].mean().item()

    # Threads that wait sleep: on a machine with other work, spinning would cost most of the time.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    results = {}
    for name in ATTENTION:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            results[name] = process.submit(train, name, args).result()

    print_table(results, unigram, args)
    draw(results, unigram, args)
    print(f"Loss curves and an attention matrix: {args.out}")


if __name__ == "__main__":
    main()

# sphinx_gallery_thumbnail_path = "images/quickstart.png"
