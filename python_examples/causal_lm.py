"""A causal language model in constant memory
==========================================

Train a byte-level causal language model with softmax and with soft codes, then generate with it.

The text is the source code of Python's own standard library; every tenth file is held out. Both
models start from the same weights and see the same batches. To generate, softmax attention keeps
the keys and values of the whole context and reads them all for each new byte; soft codes keep a
YosoState, whose size and work for a byte do not depend on the context. At the end there are two
tables, a generated sample and a picture. Needs torch, matplotlib and tqdm.
"""

import argparse
import math
import pathlib
import sysconfig
import time

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

from lshkit.attention import Sampled, Soft, YosoState, yoso_attention

SIZES_AT = {"1k": 2**10, "16k": 2**14, "128k": 2**17}
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


def batch(text: Tensor, batch_size: int, length: int, generator: torch.Generator) -> Tensor:
    """Sequences of length + 1 bytes: each byte but the first is a target."""
    starts = torch.randint(len(text) - length, (batch_size,), generator=generator)
    return torch.stack([text[start : start + length + 1] for start in starts]).long()


# --- Attention, whole and one byte at a time ------------------------------------------------------


class Softmax:
    """Softmax attention, which keeps all keys and values for the bytes to come."""

    def __init__(self, args: argparse.Namespace, layer: int) -> None:
        self.shape = (1, args.heads, args.embed_dim // args.heads)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, training: bool) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def memory(self, longest: int) -> "KeyValueCache":
        return KeyValueCache(*self.shape, longest)


class KeyValueCache:
    """Room for the keys and values of a longest context, so that none are ever moved."""

    def __init__(self, batch_size: int, num_heads: int, head_dim: int, longest: int) -> None:
        self.keys, self.values = torch.zeros(2, batch_size, num_heads, longest, head_dim)
        self.length = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        before, self.length = self.length, self.length + k.shape[-2]
        self.keys[:, :, before : self.length] = k
        self.values[:, :, before : self.length] = v
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def prefill(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, *self.append(k, v), is_causal=True)

    def step(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, *self.append(k, v))


class SoftCodes:
    """Attention by soft codes: fresh hash functions in each training step, else a layer's own."""

    def __init__(self, args: argparse.Namespace, layer: int) -> None:
        self.shape, self.layer = (1, args.heads, args.embed_dim // args.heads), layer
        self.estimator = Soft(
            n_bits=args.n_bits,
            n_hashes=args.n_hashes,
            n_probes=args.n_probes,
            sharpness=args.sharpness,
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, training: bool) -> Tensor:
        seed = None if training else self.layer
        return yoso_attention(q, k, v, is_causal=True, estimator=self.estimator, seed=seed)

    def memory(self, longest: int) -> YosoState:
        return YosoState(*self.shape, estimator=self.estimator, seed=self.layer)


ATTENTION = {"softmax": Softmax, "soft codes": SoftCodes}


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions: each pair of features turned by an angle that grows with the position."""
    cos, sin = rotation
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


# --- Model --------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, args: argparse.Namespace, name: str, layer: int) -> None:
        super().__init__()
        dim = args.embed_dim
        self.heads = args.heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.project, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.attend = ATTENTION[name](args, layer)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], memory=None) -> Tensor:
        projected = self.project(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = projected.permute(2, 0, 3, 1, 4)  # (batch, heads, length, head_dim)
        q, k = rotate(q, rotation), rotate(k, rotation)
        if memory is None:
            out = self.attend(q, k, v, self.training)
        else:
            out = (memory.step if q.shape[-2] == 1 else memory.prefill)(q, k, v)
        x = x + self.out(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    """A causal transformer over bytes with rotary positions."""

    def __init__(self, args: argparse.Namespace, name: str) -> None:
        super().__init__()
        dim = args.embed_dim
        self.embedding = nn.Embedding(256, dim)
        self.blocks = nn.ModuleList(Block(args, name, i) for i in range(args.layers))
        self.norm, self.output = nn.LayerNorm(dim), nn.Linear(dim, 256)
        speed = 1000.0 ** -torch.linspace(0, 1, dim // args.heads // 2)
        self.register_buffer("speed", speed)
        self._look_back()

    @torch.no_grad()
    def _look_back(self) -> None:
        """Start at what a short run would spend its time on: each head looks some bytes back.

        The keys' bias is that of the queries, turned by as many positions. All of it is trained on.
        """
        lag = 0
        for block in self.blocks:
            query, key, _ = block.project.bias.unflatten(0, (3, block.heads, -1))
            for q, k in zip(query, key, strict=True):
                lag += 1
                angle = lag * self.speed
                q.copy_(torch.cat((self.speed.sqrt(), torch.zeros_like(self.speed))) * 3)
                k.copy_(rotate(q, (angle.cos(), angle.sin())))

    def forward(self, tokens: Tensor, memories: list | None = None, start: int = 0) -> Tensor:
        """Logits of the next byte. The tokens' first position is start; memories hold the rest."""
        angle = torch.arange(start, start + tokens.shape[1])[:, None] * self.speed
        rotation = (angle.cos(), angle.sin())
        x = self.embedding(tokens)
        for block, memory in zip(self.blocks, memories or [None] * len(self.blocks), strict=True):
            x = block(x, rotation, memory)
        return self.output(self.norm(x))

    def memories(self, longest: int) -> list:
        return [block.attend.memory(longest) for block in self.blocks]


# --- Training -----------------------------------------------------------------------------------


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up over the first twentieth, then half a cosine."""
    warmup = max(1, steps // 20)
    return min((step + 1) / warmup, 0.05 + 0.95 * math.cos(math.pi / 2 * step / steps) ** 2)


def train(name: str, text: Tensor, args: argparse.Namespace) -> tuple[LanguageModel, dict]:
    torch.manual_seed(args.seed)
    model = LanguageModel(args, name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: learning_rate(i, args.steps))
    generator = torch.Generator().manual_seed(args.seed)
    losses, seconds = [], []
    with tqdm(range(args.steps), desc=f"{name:<10}", unit="step", dynamic_ncols=True) as bar:
        for _ in bar:
            tokens = batch(text, args.batch_size, args.length, generator)
            start = time.perf_counter()
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            seconds.append(time.perf_counter() - start)
            losses.append(loss.item())
            bar.set_postfix(loss=f"{np.mean(losses[-20:]):.3f}")
    tokens_per_second = args.batch_size * args.length / np.median(seconds)
    return model.eval(), {"losses": np.array(losses), "tokens_per_second": tokens_per_second}


@torch.no_grad()
def evaluate(model: LanguageModel, text: Tensor, args: argparse.Namespace) -> float:
    """Loss in nats per byte of held-out text."""
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(args.held_out):
        tokens = batch(text, 1, args.length, generator)
        losses.append(F.cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:]).item())
    return float(np.mean(losses))


# --- Generation ---------------------------------------------------------------------------------


@torch.no_grad()
def generate(
    model: LanguageModel, prompt: Tensor, count: int, args: argparse.Namespace
) -> tuple[bytes, float]:
    """The next count bytes, and the median seconds of one."""
    generator = torch.Generator().manual_seed(args.seed)
    memories = model.memories(len(prompt) + count)
    logits = model(prompt[None], memories)[0, -1]
    made, seconds = [], []
    for position in range(len(prompt), len(prompt) + count):
        probabilities = (logits / args.temperature).softmax(-1)
        made.append(torch.multinomial(probabilities, 1, generator=generator))
        start = time.perf_counter()
        logits = model(made[-1][None], memories, position)[0, -1]
        seconds.append(time.perf_counter() - start)
    return bytes(torch.cat(made).tolist()), float(np.median(seconds))


def memory_sizes(args: argparse.Namespace) -> dict[str, list[int]]:
    """Bytes that all layers keep at each context of SIZES_AT."""
    soft = SoftCodes(args, 0)
    hard = YosoState(*soft.shape, estimator=Sampled(n_bits=8, n_hashes=args.n_hashes), seed=0)
    contexts = SIZES_AT.values()
    sizes = {
        "softmax: key-value cache": [8 * args.embed_dim * context for context in contexts],
        f"soft codes, n_bits={args.n_bits}": [soft.memory(0).nbytes] * len(contexts),
        "hard codes, n_bits=8 (not trained)": [hard.nbytes] * len(contexts),
    }
    return {name: [args.layers * size for size in row] for name, row in sizes.items()}


# --- What comes out -----------------------------------------------------------------------------


def print_tables(results: dict[str, dict], args: argparse.Namespace) -> None:
    print(
        f"\n{args.steps} steps of {args.batch_size} x {args.length} bytes, "
        f"threads: {args.threads}\nsoft codes with n_bits={args.n_bits}, n_hashes={args.n_hashes}, "
        f"n_probes={args.n_probes}, sharpness={args.sharpness:g}\n"
    )
    rows = {"held-out loss, nats a byte": [f"{r['held_out']:.3f}" for r in results.values()]}
    rows["training, bytes / s"] = [f"{r['tokens_per_second']:,.0f}" for r in results.values()]
    for context in args.contexts:
        rows[f"generating, bytes / s at {context:,}"] = [
            f"{1 / r['seconds'][context]:,.0f}" for r in results.values()
        ]
    print(f"{'':<38}" + "".join(f"{name:>14}" for name in results))
    for name, row in rows.items():
        print(f"{name:<38}" + "".join(f"{cell:>14}" for cell in row))

    print(f"\n{'memory of the context, MiB, at':<38}" + "".join(f"{x:>14}" for x in SIZES_AT))
    for name, row in memory_sizes(args).items():
        print(f"{name:<38}" + "".join(f"{size / 2**20:>14,.1f}" for size in row))
    soft, softmax = results["soft codes"]["seconds"], results["softmax"]["seconds"]
    print("\nsoft codes over softmax, generating:")
    for context in args.contexts:
        print(f"{softmax[context] / soft[context]:.2f} times as fast at {context:,} bytes")
    print()


def draw(results: dict[str, dict], args: argparse.Namespace) -> None:
    matplotlib.use("Agg")
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    width = max(1, min(25, args.steps // 4))
    for (name, result), color in zip(results.items(), ("#000000", "#0072B2"), strict=True):
        smooth = np.convolve(result["losses"], np.ones(width) / width, mode="valid")
        steps = np.arange(width, args.steps + 1)
        left.plot(steps, smooth, color=color, label=f"{name}, training (mean of {width} steps)")
        left.plot(args.steps, result["held_out"], "o", color=color, label=f"{name}, held out")
        contexts, seconds = zip(*result["seconds"].items(), strict=True)
        right.plot(contexts, 1e3 * np.array(seconds), "o-", color=color, label=name)
    left.set(title="training", xlabel="training steps", ylabel="loss (nats per byte)")
    right.set_title("generation")
    right.set(xscale="log", yscale="log", xlabel="context (bytes)")
    right.set(ylabel="time for a generated byte (ms)", xticks=args.contexts)
    right.set_xticks([], minor=True)
    for ticks in (right.yaxis.set_major_formatter, right.yaxis.set_minor_formatter):
        ticks("{x:.2g}")
    right.set_xticklabels(f"{context:,}" for context in args.contexts)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
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
    add("--length", type=positive, default=1024, help="bytes in a sequence")
    add("--batch-size", type=positive, default=4, help="sequences in a step")
    add("--n-bits", type=positive, default=12, help="bits of a code, 1 to 16: the sharpness")
    add("--n-hashes", type=positive, default=32, help="codes per byte: more make less noise")
    add("--n-probes", type=positive, default=4, help="buckets of a code that a byte belongs to")
    add("--sharpness", type=float, default=2.0, help="of the weights of these buckets")
    add("--layers", type=positive, default=2, help="transformer blocks")
    add("--embed-dim", type=positive, default=128, help="size of the model")
    add("--heads", type=positive, default=2, help="attention heads")
    add("--lr", type=float, default=4e-3, help="largest learning rate")
    add("--held-out", type=positive, default=32, help="held-out sequences in the evaluation")
    contexts = [256, 1024, 4096, 16384]
    add("--contexts", type=positive, nargs="+", default=contexts, help="lengths in bytes, to time")
    add("--temperature", type=float, default=0.7, help="of the generated bytes")
    add("--sample", type=positive, default=400, help="bytes to generate and print")
    add("--threads", type=positive, default=torch.get_num_threads(), help="CPU threads")
    add("--seed", type=int, default=0, help="of the weights, batches and generated bytes")
    add("--quick", action="store_true", help="a few small steps: does it run at all?")
    stdlib = pathlib.Path(sysconfig.get_path("stdlib"))
    add("--text", type=pathlib.Path, default=stdlib, help="folder with .py files to learn from")
    add("--out", type=pathlib.Path, default=pathlib.Path("causal_lm.png"), help="the picture")
    args = parser.parse_args()
    if args.quick:
        parser.set_defaults(steps=2, length=64, held_out=1, sample=16, contexts=[64, 256])
        args = parser.parse_args()

    # What would fail only after minutes is checked now.
    if args.out.suffix != ".png" or not args.out.absolute().parent.is_dir():
        parser.error(f"--out must be a .png file in a folder that exists: {args.out}")
    if args.embed_dim % (2 * args.heads):
        parser.error(f"--embed-dim must be a multiple of 2 * {args.heads} heads: {args.embed_dim}")
    if not 0 < args.lr < math.inf:
        parser.error(f"--lr must be a number > 0: {args.lr}")
    if not args.temperature > 0:
        parser.error(f"--temperature must be above 0: {args.temperature}")
    if min(args.contexts) < 2:
        parser.error(f"--contexts must be at least 2: {min(args.contexts)}")
    for part in read_text(args.text):
        if len(part) <= max(args.length, *args.contexts):
            parser.error(f"--text: {args.text} has too little text")
    try:
        SoftCodes(args, 0).memory(0)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    return args


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    training, held_out = read_text(args.text)
    print(f"{args.text}:\n{len(training):,} bytes to train on, {len(held_out):,} held out")
    results, samples = {}, {}
    prompt = held_out[: args.length // 2].long()
    for name in ATTENTION:
        model, results[name] = train(name, training, args)
        results[name]["held_out"] = evaluate(model, held_out, args)
        samples[name], _ = generate(model, prompt, args.sample, args)
        results[name]["seconds"] = {
            context: generate(model, held_out[:context].long(), 32, args)[1]
            for context in sorted(args.contexts)
        }
    print_tables(results, args)
    for name, sample in samples.items():
        print(f"--- generated with {name} ---\n{sample.decode(errors='replace')}\n")
    draw(results, args)
    print(f"Loss curves and the time for a generated byte: {args.out}")


if __name__ == "__main__":
    main()

# sphinx_gallery_thumbnail_path = "images/causal_lm.png"
