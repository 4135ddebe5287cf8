"""The text that encoders learn: source code of Python, with some bytes hidden."""

import functools
import pathlib

import torch
from torch import Tensor

from benchmarks.encoder import Batch

MASK = 256  # the token that stands for a hidden byte
N_BYTES = 257
MASKED_PART = 0.15
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


@functools.lru_cache(maxsize=2)
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


def frequencies(text: Tensor) -> Tensor:
    """(256,) of the bytes, each counted once more than it occurs."""
    counts = torch.bincount(text.long(), minlength=256) + 1.0
    return counts / counts.sum()


def masked_batch(text: Tensor, length: int, batch_size: int, generator: torch.Generator) -> Batch:
    """Pieces of the text with some bytes hidden, all of which are asked for."""
    starts = torch.randint(len(text) - length + 1, (batch_size,), generator=generator)
    tokens = torch.stack([text[start : start + length] for start in starts]).long()
    hidden = torch.rand(tokens.shape, generator=generator) < MASKED_PART
    hidden[:, 0] = True  # never a batch without a target
    return Batch(tokens.masked_fill(hidden, MASK), None, hidden, tokens[hidden])


def repeats(tokens: Tensor) -> Tensor:
    """(B, n) bool: the last 8 bytes up to here came before, last 64 bytes ago or more."""
    found = torch.zeros(tokens.shape, dtype=torch.bool)
    if tokens.shape[1] < 8:
        return found
    # Eight bytes are one int64.
    contexts = tokens.to(torch.uint8).unfold(1, 8, 1).contiguous().view(torch.int64).squeeze(-1)
    contexts, order = contexts.sort(dim=1, stable=True)
    again = (contexts[:, 1:] == contexts[:, :-1]) & (order.diff(dim=1) >= 64)
    return found.scatter_(1, order[:, 1:] + 7, again)
