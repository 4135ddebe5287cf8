"""Counts over a sliding window by exponential histograms, one a bucket.

Datar, Gionis, Indyk and Motwani (2002), "Maintaining stream statistics over sliding windows"; of
the buckets of a sketch it is the SW-AKDE of arXiv 2510.23039. Plain Python: for errors and memory,
not for times.
"""

import numpy as np


class ExponentialHistogram:
    """Rows of the last `window` ones by bucket, each count to a relative error of `error`."""

    def __init__(self, n_hashes, n_buckets, window, error):
        self.shape, self.window, self.now = (n_hashes, n_buckets), window, 0
        k = int(np.ceil(1 / error))
        self.most = k + 1, k // 2 + 1  # groups of 1 row, of 2^i rows (section 3 of the paper)
        # Of each bucket and i: when the last row of each group of 2^i rows came, oldest first.
        self.groups = [[[[]] for _ in range(n_buckets)] for _ in range(n_hashes)]

    def add(self, codes):
        for row in codes.tolist():
            self.now += 1
            for groups, code in zip(self.groups, row, strict=True):
                self._add(groups[code])

    def _add(self, groups):
        groups[0].append(self.now)
        for i, times in enumerate(groups):
            if len(times) <= self.most[i > 0]:
                break
            if i + 1 == len(groups):
                groups.append([])
            groups[i + 1].append(times[1])  # of the two oldest, merged
            del times[:2]

    def table(self):
        """Estimates `(n_hashes, n_buckets)`: of the oldest group half of the rows."""
        out = np.zeros(self.shape)
        for h, of_hash in enumerate(self.groups):
            for code, groups in enumerate(of_hash):
                self._expire(groups)
                sizes = [2**i * len(times) for i, times in enumerate(groups)]
                half = 2 ** (len(groups) - 1) / 2 if len(groups) > 1 else 0
                out[h, code] = sum(sizes) - half
        return out

    def _expire(self, groups):
        while groups[-1] and groups[-1][0] <= self.now - self.window:
            del groups[-1][0]
        while len(groups) > 1 and not groups[-1]:
            groups.pop()
            self._expire(groups)

    @property
    def nbytes(self):
        """Of the times alone, 4 bytes each."""
        return 4 * sum(len(times) for of_hash in self.groups for g in of_hash for times in g)
