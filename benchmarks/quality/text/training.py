"""Training of one model, in steps that ask nothing of the host: on a GPU they are a CUDA graph."""

import functools
import math
import time
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.encoder import Batch
from benchmarks.quality.text.candidates import CANDIDATES
from benchmarks.quality.text.model import METHODS, ByteModel
from benchmarks.source_text import frequencies, repeats


class Setting(NamedTuple):
    """Of a length and budget."""

    batch_size: int
    steps: int  # with seconds: at most so many
    tested: int = 2**17  # held-out bytes
    lr: float = 3e-3
    # Shorter texts at first: their length, how many a step has, until which part of the run.
    first: tuple[tuple[int, int, float], ...] = ()
    seconds: float = 0  # of CPU time, after which a run ends, instead of steps
    look_up: bool = False  # see model.Attention


class Text(NamedTuple):
    """Bytes on a device, uint8."""

    training: Tensor
    held_out: Tensor


TESTED_AT_ONCE = 2**14  # bytes
WARM_UP = 2  # steps before the capture


class Training:
    """A model, its optimizer and the bytes of all steps. Equal seeds have equal batches.

    AdamW with clipped gradients; the learning rate rises linearly, then falls as half a cosine.
    """

    def __init__(self, method: str, length: int, seed: int, setting: Setting, text: Text) -> None:
        self.length, self.setting, self.text = length, setting, text
        device = text.training.device
        torch.manual_seed(seed)
        make_mixer = (METHODS | CANDIDATES)[method]
        of_bytes = frequencies(text.training.cpu())
        self.model = ByteModel(make_mixer, of_bytes, setting.look_up).to(device)
        steps = setting.steps
        shape = steps, setting.batch_size
        self.starts = starts(text.training, length, shape, 1 + seed).to(device)
        self.first_starts = [
            starts(text.training, short, (steps, size), 1 + seed)
            for short, size, _ in setting.first
        ]
        self.rates = torch.tensor([self.rate((i + 1) / steps) for i in range(steps)], device=device)
        self.rate_now = torch.zeros((), device=device)
        self.loss = torch.zeros((), device=device)
        self.done = torch.zeros(1, dtype=torch.int64, device=device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=self.rate_now,
            betas=(0.9, 0.98),
            fused=True,
            capturable=device.type == "cuda",
        )
        self.graph: torch.cuda.CUDAGraph | None = None
        self.began = time.process_time()

    def progress(self) -> float:
        """The part of the run that is done, on a CPU."""
        if self.setting.seconds:
            return (time.process_time() - self.began) / self.setting.seconds
        return int(self.done) / self.setting.steps

    def rate(self, done: float) -> float:
        """With that part of the run done."""
        done = max(done, 1e-3)
        return self.setting.lr * min(1, done / 0.05, math.cos(math.pi / 2 * done) ** 2)

    def eager_step(self) -> None:
        if self.setting.seconds:
            self.rate_now.fill_(self.rate(min(self.progress(), 1.0)))
        else:
            self.rate_now.copy_(self.rates.gather(0, self.done)[0])
        batch = self.batch()
        loss = F.cross_entropy(self.model(batch), batch.answers)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.loss.copy_(loss.detach())
        self.done.add_(1)

    def batch(self) -> Batch:
        """Of the next step."""
        text, first = self.text.training, self.setting.first
        if first:
            done, step = self.progress(), int(self.done)
            for (length, _, until), of_steps in zip(first, self.first_starts, strict=True):
                if done < until:
                    return batch_at(text, of_steps[step].to(text.device), length)
        return batch_at(text, self.starts.index_select(0, self.done)[0], self.length)

    def step(self) -> None:
        """Queued on the current stream, nothing waits for it."""
        if self.graph is None:
            self.eager_step()
        else:
            self.graph.replay()

    def capture(self) -> None:
        """The step as a CUDA graph; the current stream must not be the default one."""
        before = {name: x.clone() for name, x in self.model.state_dict().items()}
        for _ in range(WARM_UP):
            self.eager_step()
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad()
        # Not `with torch.cuda.graph(...)`, which waits for the other streams first.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            self.eager_step()
        finally:
            graph.capture_end()
        with torch.no_grad():
            for name, x in self.model.state_dict().items():
                x.copy_(before[name])
            for state in self.optimizer.state.values():
                for x in state.values():
                    x.zero_()
        self.done.zero_()
        self.graph = graph


def starts(text: Tensor, length: int, shape: tuple[int, int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(len(text) - length, shape, generator=generator)


def batch_at(text: Tensor, first: Tensor, length: int) -> Batch:
    """The texts of `length` bytes that start there; the answers are the next bytes."""
    pieces = text[first[:, None] + torch.arange(length + 1, device=text.device)].long()
    return Batch(pieces[:, :-1], None, None, pieces[:, 1:].flatten())


@functools.lru_cache
def tests(held_out: Tensor, length: int, tested: int) -> list[tuple[Batch, Tensor]]:
    """Held-out batches, the same for all methods and seeds, and which bytes of them repeat."""
    size = max(1, min(tested, TESTED_AT_ONCE) // length)
    first = starts(held_out, length, (tested // (size * length), size), 2**40).to(held_out.device)
    batches = [batch_at(held_out, of_batch, length) for of_batch in first]
    return [(batch, repeats(batch.tokens.cpu()).flatten().to(first.device)) for batch in batches]


@torch.no_grad()
def evaluate(model: ByteModel, tests: list[tuple[Batch, Tensor]]) -> dict:
    """Nats a byte: of all, and of those whose context repeats."""
    model.eval()
    losses = [F.cross_entropy(model(b), b.answers, reduction="none") for b, _ in tests]
    model.train()
    loss, again = torch.cat(losses), torch.cat([repeated for _, repeated in tests])
    return {"loss": loss.mean().item(), "repeated_loss": loss[again].mean().item()}
