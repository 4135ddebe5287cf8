"""Changes of a sketch: one after another, and no use of a sketch that holds a part of one."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator


class Changes:
    """Which thread may change a sketch, and whether a change of it has begun and not ended.

    Rows are added in many steps, between which Ctrl-C raises KeyboardInterrupt. A sketch that was
    left so holds some of the rows, and is refused from then on.
    """

    def __init__(self) -> None:
        self._lock, self._depth = threading.RLock(), 0
        self._open = 0  # the process that has begun a change: a fork takes no threads along

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While no other thread changes the sketch; RuntimeError where a change has not ended.

        May be entered again before the change begins. The change ends with the first of these
        blocks, unless by an exception.
        """
        self._refuse(self._open not in (0, os.getpid()))
        with self._lock:
            self._refuse(self._open != 0)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
            if self._depth == 0:
                self.end()

    def begin(self) -> None:
        """Before the first number is changed."""
        self._open = os.getpid()

    def end(self) -> None:
        """All numbers are those of the same rows."""
        self._open = 0

    def check(self) -> None:
        """Waits for another thread's change; RuntimeError where one has not ended."""
        if self._open:
            with self.alone():
                pass

    @staticmethod
    def _refuse(refused: bool) -> None:
        if refused:
            raise RuntimeError(
                "the sketch holds only some of the rows of a call of partial_fit, partial_unfit or "
                "merge that was interrupted or has not ended: fit it again, or load it from a file"
            )
