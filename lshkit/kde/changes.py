"""Changes of a sketch: one after another, and no use of a sketch that holds a part of one."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lshkit.kde.sketch import Sketch


class Changes:
    """Which thread may change a sketch, and whether a change of it has begun and not ended.

    Rows are added in many steps, between which Ctrl-C raises KeyboardInterrupt. A sketch that was
    left so holds some of the rows, and is refused from then on.
    """

    def __init__(self) -> None:
        self._open = False  # a change has begun and not ended
        self.count = 0  # begun and ended steps of changes so far
        self._renew()

    def _renew(self) -> None:
        self._lock, self._depth, self._process = threading.RLock(), 0, os.getpid()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While no other thread changes the sketch; RuntimeError where a change has not ended.

        May be entered again before the change begins. The change ends with the first of these
        blocks, unless by an exception.
        """
        if self._process != os.getpid():  # a fork, which took no thread along that has the lock
            self._renew()
        with self._lock:
            self._refuse_open()
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
            if self._depth == 0:
                self.end()

    def begin(self) -> None:
        """Before numbers are changed."""
        self._open = True
        self.count += 1

    def end(self) -> None:
        """All numbers are those of the same rows."""
        if self._open:
            self.count += 1  # what was computed since the change began is of neither table
        self._open = False

    def check(self) -> None:
        """Waits for another thread's change; RuntimeError where one has not ended."""
        if self._open:
            with self.alone():
                pass

    def _refuse_open(self) -> None:
        if self._open:
            raise RuntimeError(
                "the sketch holds only some of the rows of a call of partial_fit, partial_unfit or "
                "merge that was interrupted or has not ended: fit it again, or load it from a file"
            )


def alone(sketch: Sketch | None) -> contextlib.AbstractContextManager[None]:
    """`Changes.alone` of a sketch; nothing where there is none."""
    return contextlib.nullcontext() if sketch is None else sketch.changes.alone()
