"""Functions as Dask tasks, whose arguments may have come through a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lshkit.distributed.dask._dask import Delayed, delayed


class Aligned:
    """A function that is called with its arguments' arrays aligned in memory.

    Dask reads a message into one buffer, and arrays that are unpickled from it begin wherever they
    lie there: the core takes only aligned ones.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = function.__name__  # what Dask calls the task

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*(aligned(x, {}) for x in arguments))


def task(function: Callable[..., Any]) -> Callable[..., Delayed]:
    """`dask.delayed` of a function."""
    return delayed(Aligned(function), pure=False)


def constant(x: Any) -> Delayed:
    """An argument of several tasks, sent once."""
    return delayed(x, traverse=False)


class Held:
    """An argument that keeps persisted tasks in memory for as long as there is a graph with it.

    The graph of what is computed from them does not: `dask.delayed` leaves their futures out. Those
    who get the argument get none of them.
    """

    def __init__(self, tasks: Sequence[Delayed] = ()) -> None:
        self.tasks = tasks

    def __reduce__(self) -> tuple[type[Held], tuple[()]]:
        return Held, ()


def aligned(x: Any, known: dict[int, Any]) -> Any:
    """x, with the arrays in it aligned: those in lshkit's objects are replaced there.

    known: what came of the objects that have been seen, by their id.
    """
    if isinstance(x, np.ndarray):
        if x.flags.aligned:
            return x
        if id(x) not in known:
            known[id(x)] = x.copy()
        return known[id(x)]
    if isinstance(x, (dict, list, tuple)):
        before = x.values() if isinstance(x, dict) else x
        items = [aligned(v, known) for v in before]
        if all(a is b for a, b in zip(items, before, strict=True)):
            return x
        if isinstance(x, dict):
            return dict(zip(x, items, strict=True))
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    if type(x).__module__.partition(".")[0] == "lshkit" and id(x) not in known:
        known[id(x)] = x
        for name in (*getattr(x, "__dict__", ()), *getattr(x, "__slots__", ())):
            value = getattr(x, name)
            if (other := aligned(value, known)) is not value:
                setattr(x, name, other)
    return x
