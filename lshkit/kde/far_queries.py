"""The base class of methods that measure single rows: queries too far off are summed exactly."""

import abc

import numpy as np

from lshkit.kde.method import Estimate, Method
from lshkit.kde.sums import Sums
from lshkit.kde.training import PermutedRows


class ExactFarQueries(Method):
    """A method that answers queries which the type of its `permuted` rows does not hold exactly.

    Distances from such a query would be wrong, or infinite; rows beside it there are none.
    """

    permuted: PermutedRows

    def sampled(
        self, queries: np.ndarray, threads: int, stop: int | None = None, with_error: bool = True
    ) -> Estimate:
        held = self.permuted.hold(queries)
        if held.all():
            return self._sampled(queries, threads, stop)
        last = len(self.permuted) if stop is None else stop
        out = Estimate.exact(Sums.zeros(len(queries)), self.training.total, last)
        if held.any():
            out[held] = self._sampled(queries[held], threads, stop)
        rest = queries[~held]
        if last == len(self.training.X):
            sums = self.training.sums(rest, threads, in_blocks=False)
        else:  # those before `stop`, or all but a block
            sums = self.permuted.sums(rest, 0, last, threads)
        out[~held] = Estimate.exact(sums, self.training.total, last)
        return out

    @abc.abstractmethod
    def _sampled(self, queries: np.ndarray, threads: int, stop: int | None) -> Estimate:
        """The same of queries that the rows' type holds."""
