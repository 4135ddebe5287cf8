"""Small encoders trained on the spot, for figures that need a trained model's Q, K and V.

The encoder learns hidden bytes of Python's standard library. Its table of
positions has 4096 rows, of which a batch takes as many in a row as it is long, from a random one
on: trained at one length, it runs at every length up to there.
"""

import functools
import hashlib
import json
import pathlib
import sysconfig
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.encoder import Batch, Encoder, Trainer
from benchmarks.source_text import N_BYTES, frequencies, masked_batch, read_text
from lshkit.attention import Expected, Sampled, yoso_attention

N_BITS = 8
MODELS = pathlib.Path(__file__).parents[3] / "build" / "byte_models"


@dataclass(frozen=True)
class Training:
    steps: int = 400
    length: int = 512
    batch_size: int = 8
    positions: int = 4096
    embed_dim: int = 128
    hidden: int = 512
    heads: int = 4
    layers: int = 2
    lr: float = 3e-3
    text: str = sysconfig.get_path("stdlib")


QUICK = Training(
    steps=2, length=64, batch_size=2, positions=256, embed_dim=32, hidden=128, heads=2, layers=1
)  # fmt: skip


def yoso(q, k, v, mask=None, n_hashes=None, seed=None):
    """YOSO-m, or YOSO-E without a number of hashes. Trained as the paper's YOSO: equation 4."""
    if n_hashes is None:
        estimator = Expected(n_bits=N_BITS)
    else:
        estimator = Sampled(n_bits=N_BITS, n_hashes=n_hashes, expectation="never")
    return yoso_attention(q, k, v, estimator=estimator, seed=seed)


CONTROLS = ("softmax", "convolution only", "no attention")


def set_mix(model: Encoder, mix) -> None:
    """Has its layers mix by mix(q, k, v, mask)."""
    for block in model.blocks:
        block.attention.mix = mix


def build(method: str, training: Training, text: Tensor) -> Encoder:
    model = Encoder(
        (method, {}) if method in CONTROLS else ("softmax", {}),
        *(N_BYTES, 256, training.positions),
        *(training.embed_dim, training.hidden, training.heads, training.layers),
        frequencies(text),
    )
    if method not in CONTROLS:
        m = method.removeprefix("YOSO-")
        set_mix(model, functools.partial(yoso, n_hashes=None if m == "E" else int(m)))
    return model


def batches(text: Tensor, length: int, batch_size: int, count: int) -> list[Batch]:
    """The same ones at every call."""
    generator = torch.Generator().manual_seed(0)
    return [masked_batch(text, length, batch_size, generator) for _ in range(count)]


def texts(training: Training) -> tuple[Tensor, Tensor]:
    return read_text(pathlib.Path(training.text))


def trained(method: str, training: Training, folder: pathlib.Path = MODELS) -> Encoder:
    """The model of "YOSO-E", "YOSO-<m>" or a control; trained once, then read from the folder."""
    text, _ = texts(training)
    torch.manual_seed(0)
    model = build(method, training, text)
    key = json.dumps([asdict(training), N_BITS, text.numel(), torch.__version__])
    name = method.replace(" ", "_") + "_" + hashlib.sha256(key.encode()).hexdigest()[:12]
    path = folder / f"{name}.pt"
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model.eval()

    generator = torch.Generator().manual_seed(1)
    trainer = Trainer(model, training.lr)
    with tqdm(range(training.steps), f"training {method}", disable=None) as bar:
        for step in bar:
            batch = masked_batch(text, training.length, training.batch_size, generator)
            last = training.positions - training.length
            offset = int(torch.randint(last + 1, (), generator=generator))
            error = trainer.step(batch, (step + 0.5) / training.steps, offset)
            if step % 20 == 19:
                bar.set_postfix(loss=f"{error:.3f}")
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    torch.save(model.state_dict(), new)
    new.replace(path)
    return model.eval()


@torch.no_grad()
def heads_of_layers(model: Encoder, tokens: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Q, K and V of each layer, (batch, heads, n, head_dim), as the model with YOSO-E has them."""
    found = []

    def keep(q, k, v, mask):
        found.append((q, k, v))
        return yoso(q, k, v)

    set_mix(model, keep)
    nothing = torch.zeros_like(tokens, dtype=torch.bool)
    model(Batch(tokens, None, nothing, tokens[nothing]))
    set_mix(model, yoso)
    return found
