"""algorithm="near_far": rows that collide often exactly, the others by a random sample.

Which rows are near depends on the hash functions alone, so the rows that are not near are a uniform
sample of their kind wherever the permutation put them: the estimate is unbiased (DEANN, Karppa et
al. 2022, with collisions for the neighbours and no row counted twice). Buckets of more than
max_bucket_size rows are passed over: where rows lie so densely, a sample does.
"""

import numpy as np

from lshkit import _C
from lshkit.kde import kernels
from lshkit.kde.exact import Estimate
from lshkit.kde.random_sampling import MEAN_ABSOLUTE, expand, history_of, stages
from lshkit.kde.sums import Sums


class NearFar:
    """`RandomSampling` with the near rows taken out of history and samples.

    buckets: hash tables of all rows. min_count: of collisions that make a row near. n_samples: of
    the first sample. limit: the relative error, as history and near rows foretell it, from which on
    a query needs more. unseen: relative standard deviation of the far rows' sum for a sample of one
    row, beyond what histories foretell, as the pilot found it: a sample that holds none of the near
    rows that no bucket showed knows nothing of them, and alone would state too small an error.
    """

    name = "near_far"

    def __init__(self, buckets, min_count, max_bucket_size, n_samples, limit, unseen=0.0):
        self.buckets, self.min_count, self.max_bucket_size = buckets, min_count, max_bucket_size
        self.unseen = unseen
        self.training = buckets.permuted.training
        self.n_samples, self.limit = min(n_samples, len(buckets)), limit
        n = len(buckets)
        self.stops = stages(history_of(n_samples), self.n_samples, n)

    @property
    def permuted(self):
        return self.buckets.permuted

    def near(self, queries, threads):
        """Sums over the near rows up to each stop from the one before, and their numbers."""
        buckets, tables = self.buckets, self.buckets.tables
        geometry = self.training.geometry
        out = np.empty((len(queries), len(self.stops), 4))
        _C.near_kernel_sums(
            kernels.CODES[geometry.kernel],
            geometry.n_bits,
            np.ascontiguousarray(queries, buckets.rows.dtype),
            buckets.rows,
            buckets.weights,
            *tables.look_up(buckets.codes(queries)),
            self.min_count,
            self.max_bucket_size,
            np.array(self.stops),
            out,
            threads,
        )
        return [Sums(*(out[:, k, i].copy() for i in range(3))) for k in range(len(self.stops))], (
            out[:, :, 3]
        )

    def estimate(self, X, threads, with_error=True):
        return self.estimate_scaled(self.training.geometry.scale(X), threads)

    def estimate_scaled(self, queries, threads):
        permuted = self.buckets.permuted
        n, n_queries = len(permuted), len(queries)
        near, counts = self.near(queries, threads)
        whole_near = near[0]
        for part in near[1:]:
            whole_near = whole_near + part
        open_ = np.arange(n_queries)
        history = permuted.sums(queries, 0, self.stops[0], threads).without(near[0])
        known = whole_near + history  # of few rows it is all
        shift, mean, error = known.shift, known.total, np.zeros(n_queries)
        for k in range(1, len(self.stops)):
            seen, last = self.stops[k - 1 : k + 1]
            sample = permuted.sums(queries[open_], seen, last, threads).without(near[k][open_])
            n_sampled = last - seen - counts[open_, k]
            population = n - seen - counts[open_, k:].sum(axis=1)
            n_history = seen - counts[open_, :k].sum(axis=1)
            close = whole_near[open_]
            final = np.ones(len(open_), bool)
            if last < n:
                foretold = far_error(history, n_history, close, population)
                final = MEAN_ABSOLUTE * foretold <= self.limit * np.sqrt(np.maximum(n_sampled, 1))
            done, sampled = open_[final], sample[final]
            n_sampled = np.maximum(n_sampled[final], 1)
            population = np.maximum(population[final], 1)
            total, variance = expand(sampled, n_sampled, population)
            # Of near rows and history only the sums are wanted.
            whole = close[final] + history[final] + Sums(sampled.shift, total, variance)
            shift[done], mean[done] = whole.shift, whole.total
            unseen = self.unseen * np.sqrt(np.maximum(1 / n_sampled - 1 / population, 0))
            seen = np.sqrt(variance) * relative(sampled.shift, whole.shift)
            error[done] = np.maximum(seen, unseen * whole.total)
            history = (history + sample)[~final]
            open_ = open_[~final]
            if len(open_) == 0:
                break
        weight = self.training.total
        return Estimate(shift, mean / weight, error / weight)

    @property
    def nbytes(self):
        return self.buckets.nbytes


def relative(shift, to):
    """exp(shift - to), 0 where there is nothing; of a part to the whole, no more than 1."""
    with np.errstate(invalid="ignore"):
        return np.where(shift > -np.inf, np.exp(np.minimum(shift - to, 0)), 0)


def far_error(history, n_history, near, population):
    """Standard deviation of the far rows' sum over the whole, for a sample of one row.

    As a history of far rows foretells it, `n_history` of them, with `population` still to come.
    """
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        n_history = np.maximum(n_history, 1)
        mean = history.total / n_history
        spread = np.sqrt(np.maximum(history.squares / n_history - mean**2, 0))
        close = near.total * np.exp(near.shift - history.shift)
        whole = np.where(near.shift > -np.inf, close, 0) + history.total + population * mean
        foretold = np.where(history.total > 0, population * spread / whole, 0)
    return np.where((history.total > 0) | (near.total > 0), foretold, np.inf)
