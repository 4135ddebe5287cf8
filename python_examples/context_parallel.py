"""One sequence over several processes
====================================

Train a causal byte model on sequences of 65,536 bytes, each spread over two processes.

The script starts its own processes, as torchrun would. Each has half of the rows of a sequence; the
bucket tables of soft codes (or keys, or heads: ContextParallel takes what sends the fewest bytes)
and the halos of the convolutions are all that goes between them. The same model is trained by one
process: its losses are the same but for rounding. Before that each doubles the length until a
training step takes more than a limit of memory. At the end there are a table and a picture. Needs
torch, matplotlib and tqdm.
"""

import argparse
import math
import pathlib
import sysconfig
import tempfile
import time

try:
    import matplotlib
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from matplotlib import pyplot as plt
    from torch import Tensor, nn
    from torch.nn import functional as F
    from torch.nn.parallel import DistributedDataParallel
    from tqdm import tqdm
except ImportError as error:
    raise SystemExit(f"{error}: pip install '.[dev]' has what the examples need") from None

from lshkit.attention import Soft, YosoAttention
from lshkit.distributed import ContextParallel

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


# --- Text and model -------------------------------------------------------------------------------


def read_text(folder: pathlib.Path) -> Tensor:
    """All .py files below folder as one byte string."""
    files = sorted(
        path
        for path in folder.rglob("*.py")
        if not SKIPPED_FOLDERS.intersection(path.relative_to(folder).parts)
    )
    text = b"".join(path.read_bytes() for path in files) or b"\n"
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class Model(nn.Module):
    """Embedding, blocks of attention (with a short convolution) and an MLP, and logits."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        dim = args.embed_dim
        estimator = Soft(n_bits=args.n_bits, n_hashes=args.n_hashes, n_probes=2)
        self.embedding = nn.Embedding(256, dim)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(dim),
                    "attention": YosoAttention(
                        dim, args.heads, estimator=estimator, conv_window=5, seed=0
                    ),
                    "mlp": nn.Sequential(
                        nn.LayerNorm(dim),
                        nn.Linear(dim, 2 * dim),
                        nn.GELU(),
                        nn.Linear(2 * dim, dim),
                    ),
                }
            )
            for _ in range(args.layers)
        )
        self.output = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 256))

    def forward(self, tokens: Tensor, context_parallel: ContextParallel) -> Tensor:
        """Logits of this rank's rows."""
        x = self.embedding(tokens)
        for block in self.blocks:
            y = block["norm"](x)
            y, _ = block["attention"](y, y, y, is_causal=True, context_parallel=context_parallel)
            x = x + y
            x = x + block["mlp"](x)
        return self.output(x)


# --- What every process does ----------------------------------------------------------------------


def run(rank: int, size: int, folder: str, args: argparse.Namespace, answers) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=size)
    # The model is gone before the group: one that outlives it can wait for it for ever at its end.
    result = train(rank, size, args)
    if rank == 0:
        answers.put(result)
    dist.barrier()
    dist.destroy_process_group()


def train(rank: int, size: int, args: argparse.Namespace) -> dict:
    """Peaks of memory by length, and losses, seconds and bytes of the steps."""
    cp = ContextParallel()
    text = read_text(args.text)

    def new_model() -> tuple[nn.Module, torch.optim.Optimizer, torch.Generator]:
        torch.manual_seed(args.seed)
        # The gradients of all ranks are averaged: each has the mean over its rows as its loss.
        model = DistributedDataParallel(Model(args))
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        return model, optimizer, torch.Generator().manual_seed(args.seed)

    def step(length: int) -> float:
        start = int(torch.randint(len(text) - length, (1,), generator=generator))
        tokens = text[start : start + length + 1].long()[None]
        own = cp.shard(tokens[:, :-1], 1), cp.shard(tokens[:, 1:], 1)
        loss = F.cross_entropy(model(own[0], cp).flatten(0, 1), own[1].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / size

    # Peaks only grow with the length, so that one process measures all of them; the first step
    # makes what every step needs.
    model, optimizer, generator = new_model()
    peaks, length = {}, args.shortest
    while length <= args.longest:
        step(length)
        peak = torch.tensor(peak_memory())
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        peaks[length] = int(peak)
        if peak > args.memory * 2**30:
            break
        length *= 2

    model, optimizer, generator = new_model()
    losses, before = [], cp.bytes_sent
    begin = time.perf_counter()
    with tqdm(range(args.steps), desc=f"{size} processes", unit="step", disable=rank > 0) as bar:
        for _ in bar:
            losses.append(step(args.length))
            bar.set_postfix(loss=f"{losses[-1]:.3f}")
    seconds = (time.perf_counter() - begin) / args.steps
    sent = (cp.bytes_sent - before) / args.steps
    exchange = cp.last_exchange or "none"
    result = {"losses": losses, "seconds": seconds, "sent": sent, "exchange": exchange}
    return result | {"peaks": peaks}


def peak_memory() -> int:
    """Bytes that this process has had resident at most."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def start(size: int, args: argparse.Namespace) -> dict:
    """The results of as many processes."""
    context = mp.get_context("forkserver")  # imports these once for all
    context.set_forkserver_preload(["lshkit.distributed.ranks.context_parallel"])
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes = mp.start_processes(
            run, (size, folder, args, answers), size, join=False, start_method="forkserver"
        )
        while not processes.join():  # raises what a process has raised
            pass
    return answers.get()


# --- What comes out -------------------------------------------------------------------------------


def print_table(results: dict[int, dict], args: argparse.Namespace) -> None:
    print(f"\n{args.steps} steps of {args.length:,} bytes, limit of memory: {args.memory:g} GiB\n")

    def longest(result: dict) -> int:
        within = [n for n, peak in result["peaks"].items() if peak <= args.memory * 2**30]
        return max(within, default=0)

    rows = {
        "loss of the last step, nats a byte": lambda r: f"{r['losses'][-1]:.4f}",
        "bytes of text / s": lambda r: f"{args.length / r['seconds']:,.0f}",
        "exchange": lambda r: r["exchange"],
        "MB sent by a rank in a step": lambda r: f"{r['sent'] / 1e6:,.1f}",
        "longest sequence within the limit": lambda r: f"{longest(r):,}",
    }
    print(f"{'processes':<38}" + "".join(f"{size:>12}" for size in results))
    for name, cell in rows.items():
        print(f"{name:<38}" + "".join(f"{cell(result):>12}" for result in results.values()))
    if len(results) > 1:
        first, *_, last = (result["losses"] for result in results.values())
        off = [abs(a - b) for a, b in zip(first, last, strict=True)]
        print(
            f"\ndifference of the losses: {off[0]:.1e} in the first step, at most {max(off):.1e}"
            "\n(training amplifies what rounding leaves)"
        )


def draw(results: dict[int, dict], args: argparse.Namespace) -> None:
    matplotlib.use("Agg")
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    styles = {"color": "#000000", "linewidth": 3, "alpha": 0.4}, {"color": "#0072B2"}
    for (size, result), style in zip(results.items(), styles, strict=False):
        name = "1 process" if size == 1 else f"{size} processes"
        left.plot(range(1, args.steps + 1), result["losses"], **style, label=name)
        lengths = list(result["peaks"])
        peaks = [peak / 2**30 for peak in result["peaks"].values()]
        right.plot(lengths, peaks, "o-", **style, label=name)
    right.axhline(args.memory, color="#D55E00", linestyle=":", label="limit")
    left.set(title=f"{args.length:,} bytes a step", xlabel="steps", ylabel="loss (nats per byte)")
    right.set(title="memory", xlabel="length (bytes)", ylabel="peak of a process (GiB)")
    right.set_xscale("log", base=2)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    figure.savefig(args.out, dpi=100)


# --- Command line ---------------------------------------------------------------------------------


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


positive.__name__ = "positive integer"  # the name in argparse's message


def parse_arguments() -> argparse.Namespace:
    summary = "Train a byte model on sequences that are spread over processes."
    parser = argparse.ArgumentParser(
        description=summary,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--processes", type=positive, default=2, help="that a sequence is spread over")
    add("--steps", type=positive, default=60, help="training steps of each run")
    add("--length", type=positive, default=65536, help="bytes in a sequence, one a step")
    add("--memory", type=float, default=1.75, help="GiB that a process may take")
    add("--shortest", type=positive, default=16384, help="the first length of the search")
    add("--longest", type=positive, default=2**20, help="the last length of the search")
    add("--n-bits", type=positive, default=8, help="bits of a code, 1 to 16")
    add("--n-hashes", type=positive, default=16, help="codes per byte")
    add("--layers", type=positive, default=2, help="blocks")
    add("--embed-dim", type=positive, default=64, help="size of the model")
    add("--heads", type=positive, default=2, help="attention heads")
    add("--lr", type=float, default=3e-3, help="learning rate")
    add("--seed", type=int, default=0, help="of the weights, sequences and hash functions")
    add("--quick", action="store_true", help="two short steps: does it run at all?")
    stdlib = pathlib.Path(sysconfig.get_path("stdlib"))
    add("--text", type=pathlib.Path, default=stdlib, help="folder with .py files to learn from")
    add("--out", type=pathlib.Path, default="context_parallel.png", help="the picture")
    args = parser.parse_args()
    if args.quick:
        parser.set_defaults(steps=2, length=512, shortest=256, longest=512)
        args = parser.parse_args()

    # What would fail only after minutes is checked now.
    if args.out.suffix != ".png" or not args.out.absolute().parent.is_dir():
        parser.error(f"--out must be a .png file in a folder that exists: {args.out}")
    if args.embed_dim % args.heads:
        parser.error(f"--embed-dim must be a multiple of {args.heads} heads: {args.embed_dim}")
    if args.processes > 16:
        parser.error(f"--processes must be at most 16: {args.processes}")
    if args.shortest > args.longest:
        parser.error(f"--shortest must be at most --longest {args.longest}: {args.shortest}")
    for name in ("length", "shortest"):
        if (number := getattr(args, name)) < args.processes:
            parser.error(f"--{name} must be at least --processes {args.processes}: {number}")
    if not 0 < args.lr < math.inf:
        parser.error(f"--lr must be a number > 0: {args.lr}")
    if not args.memory > 0:
        parser.error(f"--memory must be above 0: {args.memory}")
    if len(read_text(args.text)) <= max(args.length, args.longest):
        parser.error(f"--text: {args.text} has too little text for --length and --longest")
    try:
        Soft(n_bits=args.n_bits, n_hashes=args.n_hashes)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    return args


def main() -> None:
    args = parse_arguments()
    results = {size: start(size, args) for size in sorted({1, args.processes})}
    print_table(results, args)
    draw(results, args)
    print(f"Loss curves and memory: {args.out}")


if __name__ == "__main__":
    main()

# sphinx_gallery_thumbnail_path = "images/context_parallel.png"
