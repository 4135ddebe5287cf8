"""Times of what a GPU does, by CUDA events, without those of the host that queues it."""

import time

from benchmarks.speed.gpu.sides import call
from benchmarks.speed.gpu.table import PASSES

CYCLES_A_SECOND = 2e9  # a little above what GPUs clock at
MOST_CYCLES = int(0.1 * CYCLES_A_SECOND)


def timed(function, *arguments, cycles=2_000_000):
    """Milliseconds between two events around a call, and whether the GPU was ahead of the host.

    The GPU first spins for `cycles`, while the host queues the call: else the first kernels would
    wait for the ones behind them, and the time would be the host's. It was ahead where it has
    passed the first event by the time all is queued: then more cycles are needed.
    """
    import torch

    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles)
    start.record()
    function(*arguments)
    stop.record()
    ahead = start.query()
    stop.synchronize()
    return start.elapsed_time(stop), ahead


class Side:
    """One function with its inputs: its samples, and what they were taken with."""

    def __init__(self, function, sets, backward):
        self.function, self.sets, self.backward = function, sets, backward
        self.samples, self.late = [], 0
        self.cycles = self.memory = None

    def warm_up(self):
        """Two calls: modules are loaded, memory is there; its peak, and the time to queue one."""
        import torch

        call(self.function, self.sets[0], self.backward)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        call(self.function, self.sets[-1], self.backward)
        seconds = time.perf_counter() - start
        torch.cuda.synchronize()
        self.memory = torch.cuda.max_memory_allocated() - before
        self.cycles = min(int(2 * seconds * CYCLES_A_SECOND) + 200_000, MOST_CYCLES)

    def sample(self, i):
        arrays = self.sets[i % len(self.sets)]
        took, ahead = timed(call, self.function, arrays, self.backward, cycles=self.cycles)
        if ahead and self.cycles < MOST_CYCLES:  # the host's time is in it: once more
            self.cycles = min(2 * self.cycles, MOST_CYCLES)
            took, ahead = timed(call, self.function, arrays, self.backward, cycles=self.cycles)
        self.late += ahead
        self.samples.append(took)


def measure(run, functions, backward, seconds):
    """The sides by name, whose samples are taken in turn with the others'.

    functions: by name, the function and its sets of inputs. One that raises is left out, and its
    error noted.
    """
    sides = {}
    for name, (function, sets) in functions.items():
        side = Side(function, sets, backward)
        try:
            side.warm_up()
            sides[name] = side
        except Exception as error:
            run.failed(f"{name}, n={sets[0][0].shape[2]}, {PASSES[backward]}", error)
    end = time.monotonic() + seconds
    for i in range(run.repeats):
        for side in sides.values():
            side.sample(i)
        if time.monotonic() > end and i >= 2:
            break
    return sides
