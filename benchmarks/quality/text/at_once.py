"""Many trainings at once on one GPU: each is a CUDA graph on a stream of its own.

The model is small: a training alone leaves most of a GPU idle, and its host would be busy with
launches alone. On a CPU trainings take turns, in steps.
"""

import contextlib
import time
import traceback
from collections.abc import Callable, Iterable, Iterator

import torch

from benchmarks.quality.text.model import HEADS, ByteModel, Yoso
from benchmarks.quality.text.training import Setting, Text, Training, evaluate, tests
from lshkit.attention import Colliding

Key = tuple[int, str, str, int]  # length, budget, method, seed

MEMORY = 45 * 10**9  # bytes that torch may keep
QUEUED = 0.5  # seconds of steps that a stream has ahead, about
MOST_QUEUED = 200  # steps, each of them a launch


class Slot:
    """A training under way."""

    def __init__(self, key: Key, setting: Setting, text: Text, graphs: bool) -> None:
        self.key, self.setting, self.text = key, setting, text
        self.steps, self.queued, self.chunk = setting.steps, 0, 1
        self.stream = torch.cuda.Stream() if text.training.is_cuda else None
        self.marks: list[tuple[torch.cuda.Event, torch.cuda.Event, int]] = []
        # Of the process on a CPU, where others may be running.
        self.clock = time.perf_counter if text.training.is_cuda else time.process_time
        self.begin = self.clock()
        with self.on_stream():
            length, _, method, seed = key
            self.training = Training(method, length, seed, setting, text)
            if graphs and not setting.first:  # a graph is of one length
                self.training.capture()
        if self.stream is not None:
            self.stream.synchronize()
        self.prepared = self.clock()

    def on_stream(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def advance(self) -> bool:
        """Queues steps if few are left, and tells whether it did."""
        while self.marks and self.marks[0][1].query():
            begin, end, steps = self.marks.pop(0)
            seconds = begin.elapsed_time(end) / 1e3 / steps
            self.chunk = max(1, min(2 * self.chunk, MOST_QUEUED, int(QUEUED / 2 / seconds)))
        if self.setting.seconds and self.training.progress() >= 1:
            self.steps = self.queued
        if self.queued == self.steps or len(self.marks) > 1:
            return False
        steps = min(self.chunk, self.steps - self.queued)
        with self.on_stream():
            if self.stream is None:
                self.training.step()
                steps = 1
            else:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                for _ in range(steps):
                    self.training.step()
                end.record()
                self.marks.append((begin, end, steps))
        self.queued += steps
        return True

    @property
    def done(self) -> bool:
        return self.queued == self.steps and all(end.query() for _, end, _ in self.marks)

    def result(self) -> dict:
        with self.on_stream():
            length, tested = self.training.length, self.setting.tested
            trained = self.clock()
            losses = evaluate(self.training.model, tests(self.text.held_out, length, tested))
            losses |= exactly(self.training.model, tests(self.text.held_out, length, tested))
            losses["training_loss"] = self.training.loss.item()
        return losses | {
            "learned": per_head(self.training.model),
            "steps": self.steps,
            "seconds": round(trained - self.prepared, 2),
            "prepared_in": round(self.prepared - self.begin, 2),
            "evaluated_in": round(self.clock() - trained, 2),
        }


def exactly(model: ByteModel, tests: list) -> dict[str, float]:
    """Losses of the same weights with all pairs, where the estimator takes those that collide."""
    mixers = [mixer for mixer in model.modules() if isinstance(mixer, Yoso)]
    mixers = [mixer for mixer in mixers if isinstance(mixer.estimator, Colliding)]
    if not mixers:
        return {}
    estimators = [mixer.estimator for mixer in mixers]
    for mixer in mixers:
        mixer.estimator = mixer.estimator.exact()
    losses = evaluate(model, tests)
    for mixer, estimator in zip(mixers, estimators, strict=True):
        mixer.estimator = estimator
    return {f"exact_{name}": loss for name, loss in losses.items()}


def per_head(model: ByteModel) -> dict[str, str]:
    """What the mixers learned that is a number per head."""
    return {
        f"{name.rpartition('.')[2]} of layer {i}": " ".join(
            f"{x:.3f}" for x in p.flatten().tolist()
        )
        for i, block in enumerate(model.blocks)
        for name, p in block.attention.mixer.named_parameters()
        if p.numel() in (HEADS, HEADS // 2)
    }


def train(
    keys: Iterable[Key],
    settings: Callable[[Key], Setting],
    text: Text,
    at_once: int,
    graphs: bool,
    until: float = float("inf"),
) -> Iterator[tuple[Key, dict]]:
    """The runs as they end, started in the order of the keys; none is started after `until`."""
    waiting, slots = list(keys), []
    while slots or waiting:
        if time.monotonic() > until:
            return
        while waiting and len(slots) < at_once:
            key = waiting.pop(0)
            try:
                slots.append(Slot(key, settings(key), text, graphs))
            except RuntimeError:
                if not graphs:
                    raise
                traceback.print_exc()
                print(f"{key}: no graph, left out", flush=True)
        moved = False
        for slot in slots:
            moved |= slot.advance()
        ended, slots = [s for s in slots if s.done], [s for s in slots if not s.done]
        for slot in ended:
            yield slot.key, slot.result()
        if ended and graphs and torch.cuda.memory_reserved() > MEMORY:
            del slot, ended
            torch.cuda.empty_cache()  # the pools of the graphs that are gone
        elif not moved and not ended:
            time.sleep(0.002)
