"""algorithm="random": a uniform sample without replacement, read in order from a permuted copy.

The queries of a call share the sample, so that its rows are multiplied with all of them at once:
per row it costs what brute force does, and no other simple method is faster (Karppa et al. 2022,
DEANN, call it RSP).
"""

import numpy as np

from lshkit.kde.exact import Estimate
from lshkit.kde.sums import Sums

N_PILOT = 256  # rows of the permutation's head: always summed exactly, and the pilot's queries
N_PILOT_QUERIES = 128
# Mean of |z| for a standard normal z: from a standard error to a mean error.
MEAN_ABSOLUTE = 0.7978845608
SAFETY = 0.95
SAMPLED = 1e-3  # error of a log kernel that float32 may bring to a sampled estimate


class PermutedRows:
    """A random permutation of the rows, scaled, in float32 where that is enough."""

    def __init__(self, training):
        self.training = training
        rng = np.random.default_rng([training.seed, 1])
        n = len(training.X)
        self.order = rng.permutation(n)
        geometry = training.geometry
        single = geometry.rounding(training.reach) <= SAMPLED
        self.rows = np.empty(training.X.shape, np.float32 if single else np.float64)
        for first in range(0, n, 4096):
            part = self.order[first : first + 4096]
            self.rows[first : first + 4096] = geometry.scale(training.X[part])
        weights = training.weights
        self.weights = None if weights is None else weights[self.order]

    def __len__(self):
        return len(self.rows)

    def sums(self, queries, first, last, threads, radial=None):
        weights = None if self.weights is None else self.weights[first:last]
        return self.training.geometry.sums(
            queries,
            self.rows[first:last],
            weights,
            scaled=True,
            tolerance=SAMPLED,
            reach=self.training.reach,
            threads=threads,
            radial=radial,
        )

    @property
    def nbytes(self):
        return self.rows.nbytes + self.order.nbytes


def expand(sums, sample, population):
    """Sums over a population from those of a uniform sample of it: (shift, total, variance)."""
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = sums.total / sample
        spread = np.maximum(sums.squares / sample - mean**2, 0) * (
            sample / np.maximum(sample - 1, 1)
        )
        variance = population**2 * (1 - sample / population) * spread / sample
    return population * mean, variance


def relative_spread(sums, count):
    """Standard deviation of a term over its mean; inf where nothing was seen."""
    with np.errstate(invalid="ignore", divide="ignore"):
        c = np.sqrt(np.maximum(count * sums.squares / sums.total**2 - 1, 0))
    return np.where(sums.total > 0, c, np.inf)


def mean_error(spread, sample, population):
    """Mean over the queries of the expected relative error at a sample size, and its error.

    spread: `relative_spread` of each query. The error of a query is taken for normal, and at most
    2: that of a positive estimate whose expectation is right.
    """
    rest = max(0.0, 1 - sample / population)
    errors = np.minimum(MEAN_ABSOLUTE * spread * np.sqrt(rest / sample), 2.0 * (rest > 0))
    return errors.mean(), errors.std() / np.sqrt(len(errors))


def sample_size(spread, population, rtol):
    """The smallest sample of mean relative error rtol, one standard error on the safe side.

    And a twentieth: queries share the sample, so that their errors do not average out as theirs do.
    """
    low, high = 1, population
    while low < high:
        middle = (low + high) // 2
        mean, error = mean_error(spread, middle, population)
        low, high = (low, middle) if mean + error <= SAFETY * rtol else (middle + 1, high)
    return low


def history_of(n_samples):
    """Rows that are summed exactly before a sample of this size, to tell whether it is enough."""
    return max(N_PILOT, n_samples // 16)


class RandomSampling:
    """Estimates from `history` rows that are summed exactly and a sample of the others.

    Which queries need a larger sample is read off the history alone; what was seen before the last
    sample counts as history. So the choice of the size depends on no row of the sample
    that is weighed up, and the estimate is unbiased.

    n_samples: of the first sample. limit: the relative error, as the history foretells it, from
    which on a query needs more.
    """

    name = "random"

    def __init__(self, permuted, n_samples, limit):
        self.permuted, self.n_samples, self.limit = permuted, n_samples, limit
        self.history = min(history_of(n_samples), len(permuted))
        self.training = permuted.training

    def estimate(self, X, threads):
        training = self.permuted.training
        queries = training.geometry.scale(X)
        n, n_queries = len(self.permuted), len(queries)
        shift, mean = np.full(n_queries, -np.inf), np.zeros(n_queries)
        error = np.zeros(n_queries)
        open_ = np.arange(n_queries)
        seen, size = self.history, self.n_samples
        history = self.permuted.sums(queries, 0, seen, threads)
        while len(open_):
            last = min(seen + size, n)
            if last > n // 2:
                last = n  # what is left costs about as much as the sample
            sample = self.permuted.sums(queries[open_], seen, last, threads)
            final = np.ones(len(open_), bool)
            if last < n:
                spread = relative_spread(history, seen)
                final = MEAN_ABSOLUTE * spread <= self.limit * np.sqrt(last - seen)
            done = open_[final]
            population = n - seen
            sampled = sample[final]
            total, variance = expand(sampled, max(last - seen, 1), max(population, 1))
            known = history[final]
            whole = known + Sums(sampled.shift, total, variance)
            # Of the history only the sum is wanted: its squares would add to the variance.
            scale = np.where(sampled.shift > -np.inf, np.exp(sampled.shift - whole.shift), 0)
            shift[done], mean[done] = whole.shift, whole.total
            error[done] = np.sqrt(variance) * scale
            history = (history + sample)[~final]
            open_ = open_[~final]
            seen, size = last, 4 * size
        return Estimate(shift, mean / training.total, error / training.total)

    @property
    def nbytes(self):
        return self.permuted.nbytes
