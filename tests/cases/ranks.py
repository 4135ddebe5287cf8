"""Processes of torch.distributed that run functions of a test together."""

import contextlib
import datetime
import multiprocessing
import pathlib
import traceback

import torch
import torch.distributed as dist


def _serve(rank, size, folder, timeout, pipe):
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=timeout)  # not of the beginning, whose imports take longer
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
    )
    groups = {n: dist.new_group(range(n), timeout) for n in range(1, size + 1)}
    while True:
        job = pipe.recv()
        if job is None:
            break
        function, ranks, args = job
        try:
            pipe.send((True, function(groups[ranks], *args)))
        except Exception as error:
            pipe.send((False, (type(error), str(error), traceback.format_exc())))
    dist.destroy_process_group()


class Failed(Exception):
    """What the ranks raised, by rank: (type, message, traceback), None where they did not."""

    def __init__(self, errors):
        self.errors = errors
        super().__init__("\n".join(f"rank {i}: {e[2]}" for i, e in enumerate(errors) if e))


class Ranks:
    """`size` processes; `run(n, function, *args)` calls function(group, *args) on the first n."""

    def __init__(self, size, folder, timeout=60):
        folder = pathlib.Path(folder)
        context = multiprocessing.get_context("forkserver")
        # Imported once for all, from where packages are installed: it has not pytest's sys.path.
        context.set_forkserver_preload(["lshkit.distributed.ranks.context_parallel"])
        self.processes, self.pipes = [], []
        for rank in range(size):
            pipe, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, folder, timeout, theirs), daemon=True
            )
            process.start()
            self.processes.append(process)
            self.pipes.append(pipe)

    def run(self, ranks, function, *args):
        """The results in the order of the ranks. Failed, if one has raised an error."""
        self.send(ranks, function, *args)
        answers = [self.answer(rank) for rank in range(ranks)]
        if not all(good for good, _ in answers):
            raise Failed([None if good else value for good, value in answers])
        return [value for _, value in answers]

    def send(self, ranks, function, *args):
        for pipe in self.pipes[:ranks]:
            pipe.send((function, ranks, args))

    def answer(self, rank, timeout=120):
        if not self.pipes[rank].poll(timeout):
            raise TimeoutError(f"rank {rank} has not answered in {timeout} seconds")
        return self.pipes[rank].recv()

    def close(self):
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            with contextlib.suppress(BrokenPipeError):  # one that a test ends may be ending
                if process.is_alive():
                    pipe.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
