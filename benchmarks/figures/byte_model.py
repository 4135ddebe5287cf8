"""Small encoders trained on the spot, for figures that need a trained model's Q, K and V.

The encoder of byte_encoder.py learns hidden bytes of Python's standard library. Its table of
positions has 4096 rows, of which a batch takes as many in a row as it is long, from a random one
on: trained at one length, it runs at every length up to there.
"""

import argparse
import functools
import hashlib
import json
import pathlib
import sysconfig
from dataclasses import asdict, dataclass

import torch
from byte_encoder import Encoder, masked_batch, read_text
from quality_cost import learning_rate
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from lshkit.attention import yoso_attention

N_BITS = 8
MODELS = pathlib.Path(__file__).parents[2] / "build" / "byte_models"


@dataclass(frozen=True)
class Training:
    steps: int = 400
    length: int = 512
    batch_size: int = 8
    positions: int = 4096
    embed_dim: int = 128
    heads: int = 4
    layers: int = 2
    lr: float = 3e-3
    text: str = sysconfig.get_path("stdlib")


QUICK = Training(
    steps=2, length=64, batch_size=2, positions=256, embed_dim=32, heads=2, layers=1
)  # fmt: skip


def yoso(q, k, v, layer, n_hashes=None, seed=None):
    """YOSO-m, or YOSO-E without a number of hashes. Trained as the paper's YOSO: equation 4."""
    if n_hashes is None:
        options = dict(estimator="expected", gradient="exact")
    else:
        options = dict(estimator="sampled", gradient="lower_bound", n_hashes=n_hashes, seed=seed)
    return yoso_attention(q, k, v, n_bits=N_BITS, **options)


CONTROLS = ("softmax", "convolution only", "no attention")


class ByteModel(Encoder):
    """`mix` of its layers can be replaced: mix(q, k, v, layer)."""

    def __init__(self, training: Training, method: str, frequencies: Tensor) -> None:
        sizes = argparse.Namespace(
            length=training.positions,
            embed_dim=training.embed_dim,
            heads=training.heads,
            layers=training.layers,
        )
        super().__init__(sizes, method if method in CONTROLS else "softmax", frequencies)
        if method not in CONTROLS:
            m = method.removeprefix("YOSO-")
            self.set_mix(functools.partial(yoso, n_hashes=None if m == "E" else int(m)))

    def set_mix(self, mix) -> None:
        for block in self.blocks:
            block.attention.mix = mix

    def forward(self, tokens: Tensor, hidden: Tensor, offset: int = 0) -> Tensor:
        positions = self.positions[offset : offset + tokens.shape[1]]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, positions)
        return self.output(self.norm(x[hidden]))


def loss(model: ByteModel, batches: list) -> float:
    """Nats per hidden byte."""
    model.eval()
    with torch.no_grad():
        total = sum(
            F.cross_entropy(model(tokens, hidden), targets, reduction="sum").item()
            for tokens, hidden, targets in batches
        )
    return total / sum(len(targets) for _, _, targets in batches)


def batches(text: Tensor, length: int, batch_size: int, count: int) -> list:
    """The same ones at every call."""
    sizes = argparse.Namespace(length=length, batch_size=batch_size)
    generator = torch.Generator().manual_seed(0)
    return [masked_batch(text, sizes, generator) for _ in range(count)]


def texts(training: Training) -> tuple[Tensor, Tensor]:
    return read_text(pathlib.Path(training.text))


def trained(method: str, training: Training, folder: pathlib.Path = MODELS) -> ByteModel:
    """The model of "YOSO-E", "YOSO-<m>" or a control; trained once, then read from the folder."""
    text, _ = texts(training)
    torch.manual_seed(0)
    counts = torch.bincount(text.long(), minlength=256) + 1.0
    model = ByteModel(training, method, counts / counts.sum())
    key = json.dumps([asdict(training), N_BITS, text.numel(), torch.__version__])
    name = method.replace(" ", "_") + "_" + hashlib.sha256(key.encode()).hexdigest()[:12]
    path = folder / f"{name}.pt"
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model.eval()

    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.lr, betas=(0.9, 0.98))
    with tqdm(range(training.steps), f"training {method}", disable=None) as bar:
        for step in bar:
            tokens, hidden, targets = masked_batch(text, training, generator)
            last = training.positions - training.length
            offset = int(torch.randint(last + 1, (), generator=generator))
            for group in optimizer.param_groups:
                done = (step + 0.5) / training.steps
                group["lr"] = training.lr * learning_rate(done)
            error = F.cross_entropy(model(tokens, hidden, offset), targets)
            optimizer.zero_grad()
            error.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % 20 == 19:
                bar.set_postfix(loss=f"{error.item():.3f}")
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    torch.save(model.state_dict(), new)
    new.replace(path)
    return model.eval()


@torch.no_grad()
def heads_of_layers(model: ByteModel, tokens: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Q, K and V of each layer, (batch, heads, n, head_dim), as the model with YOSO-E has them."""
    found = []

    def keep(q, k, v, layer):
        found.append((q, k, v))
        return yoso(q, k, v, layer)

    model.set_mix(keep)
    model(tokens, torch.zeros_like(tokens, dtype=torch.bool))
    model.set_mix(yoso)
    return found
