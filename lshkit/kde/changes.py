"""Changes of what rows are added to: one after another, and none is used that did not end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class Changes:
    """The changes of one sketch.

    Rows are added in many steps, between which Ctrl-C raises KeyboardInterrupt. A sketch that was
    left so holds some of the rows: it is refused from then on.
    """

    def __init__(self) -> None:
        self._lock, self._open = threading.Lock(), False

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """For a change, which waits for those of other threads; RuntimeError after one left open.

        A TypeError or ValueError refuses the rows: it is raised before the first, or they are taken
        out again.
        """
        with self._lock:
            self._refuse_open()
            self._open = True
            try:
                yield
            except (TypeError, ValueError):
                self._open = False
                raise
            self._open = False

    def check(self) -> None:
        """Waits for the change of another thread; RuntimeError after one that was left open."""
        if self._open:
            with self._lock:
                self._refuse_open()

    def leave_open(self) -> None:
        """What belongs to a change beside the sketch was interrupted."""
        self._open = True

    def _refuse_open(self) -> None:
        if self._open:
            raise RuntimeError(
                "the sketch holds only some of the rows of a call that was interrupted "
                "(partial_fit, partial_unfit or merge): fit it again, or load it from a file"
            )

    def __reduce__(self) -> tuple[Callable[[], Changes], tuple[()]]:
        self.check()
        return Changes, ()
