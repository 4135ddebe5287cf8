"""A query's softmax attention from the few keys that their sign codes point to.

Key codes are the signs of L projections of the centred key; the query keeps its projections. Their
product with the signs estimates each score. A key is read with a probability that grows with the
estimate and with its value's distance from the mean value and is known exactly, given the codes, so
that sums over what is read, each term divided by its probability, are unbiased for the sums over
all keys (Horvitz and Thompson 1952).
"""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from lshkit.reference.buckets import random_words

BLOCK = 64  # keys of a block of codes
UNIT = 64  # estimates and thresholds are integers, in 1/64 nat
NOISE = 1 << 14  # entries of the table of exponential variates
SEGMENT = 1 << 12  # keys that read the table from the same place
SHARPNESS = 0.75  # of the sampling: the probability grows as (exp(estimate) size)^0.75
SIZE_UNIT = 32  # a value's size u is log u in 1/32 nat, in a byte
FLOOR = 0.1  # share of the pilot that is uniform
COUNTED = 4096  # most keys that are counted to find the threshold
BIN = 16  # units of a bin of that count
MOST_ESTIMATE = 16000  # and the least: without half of the variance and a value's size
MOST_HALF = 15000  # of the variance, at a norm of 256
SURE = 32000  # an estimate above every threshold
LEAST_NORM = 1e-30
LEAST_ERROR = 0.01  # stated of a sample, in epsilon
MEASURED = 64  # keys whose scores tell how far to trust estimates
TAILS = (0.01, 0.1), (0.003, 0.03)  # quantiles: the shares of keys that are above
ENOUGH = 1.02  # epsilons: what is expected of a sample as large as the pilot asks for is about 1
MOST_EXPECTED = 2.0  # error: about as far as two means of values can be apart
FARTHEST = 3.5  # deviations of an estimate's error, that are expected


@dataclass(frozen=True)
class StepOptions:
    """Of a step. z: the standard normal quantile of 1 - delta / 2; shares are of the keys."""

    scale: float
    n_sinks: int
    window: int
    epsilon: float
    z: float
    min_share: float
    max_share: float
    exact_up_to: int = 1024


@dataclass(frozen=True)
class Codes:
    """Of the n keys and values of a head: signs and bytes, and what they are relative to."""

    planes: np.ndarray  # (d, L)
    centre: np.ndarray  # (d,)
    norm: float
    value_centre: np.ndarray  # (d_v,)
    value_norm: float
    bits: np.ndarray  # (n, L), 0 and 1
    norms: np.ndarray  # (n,): see code_keys
    sizes: np.ndarray  # (n,): see code_values. Both are 0 of a key that is not finite.


@dataclass
class Step:
    """What a step gives: sums are numerator = out exp(log_sum) and denominator = exp(log_sum)."""

    out: np.ndarray
    log_sum: float
    error: float
    n_read: int


def noise_table() -> np.ndarray:
    """Exponential variates in units, one of each 1 / NOISE of the distribution, in random order."""
    order = np.argsort(random_words(0, [0], NOISE)[0], kind="stable")
    table = np.empty(NOISE, np.int64)
    ranks = (np.arange(NOISE) + 0.5) / NOISE
    table[order] = np.floor(-UNIT * np.log(ranks) + 0.5).astype(np.int64)
    return table


def survival(table: np.ndarray) -> np.ndarray:
    """survival[t] = share of the table's entries >= t."""
    counts = np.bincount(table)
    return np.cumsum(counts[::-1])[::-1] / len(table)


def code_keys(
    key: np.ndarray, centre: np.ndarray, norm: float, planes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(signs as 0 and 1 `(n, L)`, norms `(n,)` in 64ths of `norm`, at most 255)."""
    x = np.asarray(key, np.float64) - centre
    bits = (x @ planes > 0).astype(np.int64)
    norms = np.floor(np.linalg.norm(x, axis=-1) * (64 / max(norm, LEAST_NORM)) + 0.5)
    return bits, np.minimum(norms, 255).astype(np.int64)


def code_values(value: np.ndarray, centre: np.ndarray, norm: float) -> np.ndarray:
    """log u in 1/32 nat, at most 255, of a value's size u = sqrt(1 + |v - centre|^2 / norm^2)."""
    x = (np.asarray(value, np.float64) - centre) / max(norm, LEAST_NORM)
    logs = 0.5 * np.log1p(np.square(x).sum(-1))
    return np.minimum(np.floor(SIZE_UNIT * logs + 0.5), 255).astype(np.int64)


def size_terms(sizes: np.ndarray, sharp: float) -> np.ndarray:
    """What they add to estimates: sharp log u."""
    return sizes * int(256 // SIZE_UNIT * sharp + 0.5) >> 8


def score_estimates(
    query: np.ndarray, codes: Codes, rows: np.ndarray, scale: float
) -> tuple[np.ndarray, float, float, float]:
    """Integers, sharp * (estimate of scale q . (k - centre) + half its variance + log u).

    sharp, the units in a nat, is SHARPNESS * UNIT, or less where scores are so wide that estimates
    would end. The variance, which grows with the key's norm, stands for scores above their
    estimate: without it rare keys of large norm would be missed. Returned are also sharp, that
    variance of a key of norm 1 / 64, and the part of it that is in the estimates: a half, or as
    much as fits. E[sign(w . k) w . q] over unit vectors w is sqrt(2 / (pi d)) q . k / |k|. The sum
    over bits goes through a table of 6-bit integers for each 4 of them.
    """
    d, n_bits = codes.planes.shape
    bits, norms, sizes = codes.bits[rows], codes.norms[rows], codes.sizes[rows]
    z = np.asarray(query, np.float64) @ codes.planes
    z = z.reshape(-1, 4)
    top = np.abs(z).sum(-1)
    step = 2 * top.max() / 63
    # A norm or a size that its byte does not hold is unknown: such a key is always read.
    sure = (norms == 255) | (sizes == 255)
    if not step > 0:
        return np.where(sure, SURE, size_terms(sizes, SHARPNESS * UNIT)), SHARPNESS * UNIT, 0.0, 0.0
    patterns = (np.arange(16)[:, None] >> np.arange(4)) & 1
    table = np.floor(((2 * patterns - 1) @ z.T + top) / step + 0.5).astype(np.int64)
    nibbles = bits.reshape(len(bits), -1, 4) @ (1 << np.arange(4))
    total = table[nibbles, np.arange(n_bits // 4)].sum(-1)
    total = total - int(np.floor(top.sum() / step + 0.5))
    squares, each = float((z * z).sum()) * d / n_bits, scale * codes.norm / 64
    # Estimates end at the score of a key of twice the usual norm, along the query.
    along = max(64 * each * math.sqrt(squares), 1e-300)
    sharp = min(SHARPNESS * UNIT, MOST_ESTIMATE / (2 * along))
    fixed = sharp * each * math.sqrt(math.pi * d / 2) / n_bits * step * 32 * 65536
    shift = 0
    while fixed > 32767:  # of peaked scores
        fixed, shift = fixed / 2, shift + 1
    means = (((total * 16) * (norms * 128) >> 16) * int(fixed + 0.5)) >> 16
    most = MOST_ESTIMATE >> shift
    estimates = np.clip(means, -most, most) << shift
    # The variance, of a key of norm 1 / 64. Half of it, as E exp(score) has with normal errors.
    variance = each**2 * squares * (math.pi / 2 - 1) / n_bits
    half = int(min(sharp * 0.5 * variance * 65536 + 0.5, MOST_HALF))
    estimates += (norms * norms * half) >> 16
    estimates += size_terms(sizes, sharp)
    part = half / (sharp * 65536 * variance) if variance > 0 else 0.0
    return np.where(sure, SURE, estimates), sharp, variance, part


def log_square_of_error(deviation: float) -> float:
    """log E exp(2 e) of a normal error e that is at most FARTHEST deviations, of few keys none is:
    2 s^2 + log P(a standard normal is more than x = 2 s - FARTHEST)."""
    x = 2 * deviation - FARTHEST
    if x < 10:
        return 2 * deviation**2 + math.log(0.5 * math.erfc(x * math.sqrt(0.5)))
    square = 1 / (x * x)  # 2 s^2 and the leading term, -x^2 / 2, cancel but for the first two here
    asymptotic = math.log1p((3 * square - 1) * square) - math.log(x) - 0.5 * math.log(2 * math.pi)
    return FARTHEST * (2 * deviation - FARTHEST / 2) + asymptotic


def in_bins(estimates: np.ndarray, *of_keys: np.ndarray) -> tuple[Any, Any, list[Any]]:
    """Middles of bins, their counts and means of what is known of their keys."""
    numbers = estimates // BIN - estimates.min() // BIN
    counts = np.bincount(numbers)
    means = [np.bincount(numbers, x) / np.maximum(counts, 1) for x in of_keys]
    return (np.arange(len(counts)) + estimates.min() // BIN) * BIN + BIN // 2, counts, means


class Estimated:
    """What the estimates of some of the keys tell of all that are not read anyway.

    Scores are their estimates but for normal errors of variance s^2, which grows with the key's
    norm. The estimates vary by that of the scores and these errors, so that a score is expected at
    mean + a (estimate - mean) with variance a s^2, where a = 1 - E s^2 / var(estimate). Mean and
    variance are those of all estimates, or of the normal distribution that has two of their upper
    quantiles: the largest squared weights of these count, times their values' squared sizes, which
    are known.

    Keys are in bins of what they are drawn by, the estimates with the sizes.

    sharp: units in a nat; unit: s^2 of a key of norm 1 / 64, of which estimates have `part` in
    them; offset: what all scores have besides, of the centre.
    """

    def __init__(
        self,
        estimates: np.ndarray,
        norms: np.ndarray,
        sizes: np.ndarray,
        sharp: float,
        unit: float,
        part: float,
        offset: float,
    ) -> None:
        stride = -(-len(estimates) // COUNTED) | 1  # odd: tokens may alternate
        some, squares, sizes = (x[::stride] for x in (estimates, norms**2, sizes))
        each = len(estimates) / len(some)
        some, squares, sizes = (x[some < SURE] for x in (some, squares, sizes))
        if not len(some):
            some, squares, sizes, each = *np.zeros((3, 1), np.int64), 0.0
        small = np.floor(255 * np.exp(-2 / SIZE_UNIT * sizes) + 0.5)
        self.bins, counts, means = in_bins(some, squares, sizes, small)
        self.counts, self.squares = each * counts, means[0]
        self.log_sizes, self.small = means[1] / SIZE_UNIT, means[2] / 255  # small: of u^-2
        self.sharp, self.bias = sharp, part * unit  # of a squared norm of 1
        scores = self.score(self.bins, self.squares, self.log_sizes)

        # Of all scores, whatever the sizes.
        at, counts, (of_squares,) = in_bins(some - size_terms(sizes, sharp), squares)
        of_scores, n = self.score(at, of_squares, 0.0), counts.sum()
        mean, error = counts @ of_scores / n, unit * (counts @ of_squares) / n
        from_top = np.cumsum(counts[::-1])

        def score_at(share: float) -> float:
            return float(of_scores[::-1][np.searchsorted(from_top, share * n)])

        normal = [(mean, float(counts @ (of_scores - mean) ** 2 / n))]
        # Where keys are in groups, those that matter may be of one whose scores vary more.
        for high, low in TAILS:
            of_high, of_low = NormalDist().inv_cdf(1 - high), NormalDist().inv_cdf(1 - low)
            deviation = (score_at(high) - score_at(low)) / (of_high - of_low)
            normal.append((score_at(low) - of_low * deviation, deviation**2))
        self.logs = np.full(len(self.bins), -np.inf)  # of E (w u)^2
        for mean, square in normal:
            shrink = max(0.0, 1 - error / max(square, 1e-300))
            self._expect(offset + mean + shrink * (scores - mean), shrink * unit * self.squares)

    def score(self, estimates: Any, squares: Any, log_sizes: Any) -> Any:
        """The unbiased estimate of a score, of a key or of keys of such squared norms and sizes."""
        return estimates / self.sharp - self.bias * squares - log_sizes

    def _expect(self, scores: np.ndarray, variances: np.ndarray) -> None:
        """If scores are expected there, with normal errors of such variances."""
        errors = np.array([log_square_of_error(x) for x in np.sqrt(variances)])
        self.logs = np.maximum(self.logs, 2 * (scores + self.log_sizes) + errors)

    def measure(
        self, estimates: np.ndarray, norms: np.ndarray, sizes: np.ndarray, scores: np.ndarray
    ) -> None:
        """Expected squares by the line through the exact scores of some keys, drawn uniformly, over
        their estimates, and by its errors, which grow with the norm, where they are more: keys of a
        group share most of their estimates' errors, which no variance of estimates shows.
        """
        known = (estimates < SURE) & np.isfinite(scores)
        if known.sum() < 3:
            return
        squares, y = norms[known] ** 2, scores[known]
        x = self.score(estimates[known], squares, sizes[known] / SIZE_UNIT)
        weights = 1 / np.maximum(squares, 1)
        x_mean, y_mean = np.average(x, weights=weights), np.average(y, weights=weights)
        x, y = x - x_mean, y - y_mean
        square = weights @ x**2
        slope = max(float(weights @ (x * y) / square), 0.0) if square > 0 else 0.0
        error = weights @ (y - slope * x) ** 2 / (len(x) - 2)
        of_bins = self.score(self.bins, self.squares, self.log_sizes)
        self._expect(y_mean + slope * (of_bins - x_mean), error * self.squares)

    def _probability(self, threshold: int, survive: np.ndarray, floor: int) -> np.ndarray:
        return survive[np.clip(np.minimum(threshold - self.bins, floor), 0, len(survive) - 1)]

    def threshold(self, wanted: float, survive: np.ndarray, floor: int) -> int:
        """At which about `wanted` keys are read, beside those that are at any threshold."""
        least, most = int(self.bins[0]) - BIN, int(self.bins[-1]) + BIN + len(survive)
        while most - least > 1:
            middle = (least + most) // 2
            if float(self.counts @ self._probability(middle, survive, floor)) > wanted:
                least = middle
            else:
                most = middle
        return most

    def most_shift(self, allowed: float, threshold: int, survive: np.ndarray, floor: int) -> int:
        """How much lower a threshold and a floor may be so that at most so many keys are read."""
        least, most = 0, max(threshold - int(self.bins[0]) + BIN, 1)  # then all are

        def within(shift: int) -> bool:
            p = self._probability(threshold - shift, survive, max(floor - shift, 0))
            return float(self.counts @ p) <= allowed

        if within(most):
            return most
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if within(middle) else (least, middle)
        return least

    def variance(
        self,
        threshold: int,
        survive: np.ndarray,
        floor: int,
        largest: float,
        unit: float,
        out: float,
    ) -> float:
        """Expected sum of w^2 (|v - c|^2 + |out - c|^2) (1 - p) / p over all keys, c the values'
        centre, in exp(2 largest). unit, out: the squares of what sizes are relative to and of
        |out - c|.
        """
        p = self._probability(threshold, survive, floor)
        terms = np.exp(np.minimum(self.logs - 2 * largest, 500))
        squares = unit * (1 - self.small) + out * self.small  # in u^2
        return float(self.counts @ (terms * squares * (1 - p) / p))


class Sums:
    """Sums of terms with their probabilities, and of what the error follows from."""

    def __init__(self, n_values: int) -> None:
        self.largest = -math.inf
        self.numerator = np.zeros(n_values)
        self.denominator = self.squares = 0.0
        self.clear()

    def clear(self) -> None:
        self.a0 = self.a2 = 0.0
        self.a1 = np.zeros_like(self.numerator)

    def add(self, scores: np.ndarray, value: np.ndarray, probability: np.ndarray) -> None:
        finite = np.isfinite(scores)  # of keys that are not, nothing is known
        scores, value, probability = scores[finite], value[finite], probability[finite]
        if not len(scores):
            return
        largest = max(self.largest, float(scores.max()))
        if self.largest > -math.inf:
            shrink = math.exp(self.largest - largest)
            self.numerator *= shrink
            self.denominator *= shrink
            self.squares *= shrink
            self.a0 *= shrink**2
            self.a1 *= shrink**2
            self.a2 *= shrink**2
        self.largest = largest
        exponential = np.exp(scores - largest)
        weight, square = exponential / probability, (value**2).sum(-1)
        self.numerator += weight @ value
        self.denominator += weight.sum()
        self.squares += weight @ square
        variance = weight**2 * (1 - probability)
        self.a0 += variance.sum()
        self.a1 += variance @ value
        self.a2 += variance @ square

    def errors(self, z: float) -> tuple[float, float]:
        """z standard errors of the ratio, in sqrt(sum_j w_j |v_j|^2 / sum_j w_j), by the sample,
        and of a variance sum_j w_j^2 |v_j - out|^2 (1 - p_j) / p_j of 1.

        What that sum may be by the estimates counts where it is more: where few keys matter and
        none of those that were missed does, the sample alone shows too little.
        """
        if not self.denominator > 0:
            return math.inf, 0.0  # nothing that was read says anything
        out = self.numerator / self.denominator
        variance = max(float(self.a2 - 2 * self.a1 @ out + self.a0 * (out @ out)), 0.0)
        unit = z / math.sqrt(max(self.denominator * self.squares, 1e-300))
        return unit * math.sqrt(variance), unit

    def from_centre(self, centre: np.ndarray) -> float:
        """|out - centre|^2"""
        if not self.denominator > 0:
            return 0.0
        return float(np.square(self.numerator / self.denominator - centre).sum())

    def step(self, error: float, n_read: int) -> Step:
        if not self.denominator > 0:
            return Step(np.zeros_like(self.numerator), -math.inf, error, n_read)
        log_sum = self.largest + math.log(self.denominator)
        return Step(self.numerator / self.denominator, log_sum, error, n_read)


def code_step(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    codes: Codes,
    options: StepOptions,
    seed: int,
    head: int,
) -> Step:
    """Attention of one query `(d,)` over the keys `(n, d)` that it sees, the last one its own.

    Read are the first n_sinks keys and the last `window` exactly; a pilot sample, whose keys count
    as exact too; and of the others a second sample, as much larger than the pilot as its variance
    asks for. A key enters a sample if its estimate plus an exponential variate reaches a threshold,
    or if the variate alone reaches the floor.
    """
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    n, o = len(key), options
    if not np.isfinite(query).all():
        return Step(np.full(value.shape[1], np.nan), np.nan, np.nan, 0)
    sums = Sums(value.shape[1])

    def read(rows: np.ndarray, probability: np.ndarray | None = None) -> int:
        one = np.ones(len(rows)) if probability is None else probability
        sums.add(o.scale * (key[rows] @ query), value[rows], one)
        return len(rows)

    first, last = min(o.n_sinks, n), max(n - o.window, min(o.n_sinks, n))
    if n <= o.exact_up_to or last == first:
        n_read = read(np.arange(n))
        return sums.step(0.0, n_read)
    n_read = read(np.r_[0:first, last:n])
    middle = np.arange(first, last)
    estimates, sharp, unit, part = score_estimates(query, codes, middle, o.scale)
    norms, sizes = codes.norms[middle], codes.sizes[middle]
    offset = o.scale * float(query @ codes.centre)
    estimated = Estimated(estimates, norms, sizes, sharp, unit, part, offset)
    table = noise_table()
    survive = survival(table)

    def sample(phase: int, threshold: int, floor: int) -> tuple[np.ndarray, np.ndarray]:
        words = random_words(seed, [(n << 20) + 2 * head + phase], n // SEGMENT + 1)[0]
        starts = (words % np.uint64(NOISE)).astype(np.int64)
        noise = table[(starts[middle // SEGMENT] + middle) % NOISE]
        chosen = (estimates + noise >= threshold) | (noise >= floor)
        at = np.clip(np.minimum(threshold - estimates, floor), 0, len(survive) - 1)
        return chosen, survive[at]

    wanted = max(o.min_share * n / 2, 64.0)
    floor = int(UNIT * math.log(len(middle) / (FLOOR * wanted)) + 0.5)
    floor = min(max(floor, 0), len(survive) - 1)
    threshold = estimated.threshold(wanted, survive, floor)
    pilot, probability = sample(0, threshold, floor)
    n_read += read(middle[pilot], probability[pilot])
    # A key of each of so many equal parts.
    parts = min(MEASURED, len(middle))
    words = random_words(seed, [(n << 20) + (1 << 19) + head], parts)[0]
    jitter = (words >> np.uint64(11)) * 2.0**-53
    at = ((np.arange(parts) + jitter) * (len(middle) / parts)).astype(np.int64)
    at = np.minimum(at, len(middle) - 1)
    if unit > 0:
        scores = o.scale * (key[middle[at]] @ query)
        estimated.measure(estimates[at], norms[at], sizes[at], scores)
    # How much lower the second sample's threshold is, for an error of epsilon, if so many keys may
    # be read.
    largest, (of_sample, of_expected) = sums.largest, sums.errors(o.z)
    value_square, from_centre = codes.value_norm**2, sums.from_centre(codes.value_centre)
    allowed = max(o.max_share * n - n_read, wanted)

    def expected_error(shift: int) -> float:
        lower = threshold - shift, survive, max(floor - shift, 0)
        variance = estimated.variance(*lower, largest, value_square, from_centre)
        return of_expected * math.sqrt(variance)

    def enough(shift: int) -> bool:
        return not expected_error(shift) > ENOUGH * o.epsilon

    predicted = max(of_sample, min(expected_error(0), MOST_EXPECTED))
    ratio = min(predicted / o.epsilon, 1e30)
    shift = int(UNIT * math.log(ratio**2) + 0.5) if ratio > 1 else 0

    # A probability times `times` at most reads no more than that.
    if not (max(ratio**2, 1) * wanted <= allowed and enough(shift)):
        most = estimated.most_shift(allowed, threshold, survive, floor)
        if shift >= most:
            shift = most
        elif not enough(shift):
            while most - shift > 1:
                halfway = (shift + most) // 2
                shift, most = (shift, halfway) if enough(halfway) else (halfway, most)
            shift = most
    # The pilot's keys, known now, count with probability 1.
    sums = Sums(value.shape[1])
    read(np.r_[0:first, last:n])
    read(middle[pilot])
    threshold, floor = threshold - shift, max(floor - shift, 0)
    chosen, probability = sample(1, threshold, floor)
    chosen &= ~pilot
    n_read += read(middle[chosen], probability[chosen])
    of_sample, of_expected = sums.errors(o.z)
    of_values = value_square, sums.from_centre(codes.value_centre)
    expected = estimated.variance(threshold, survive, floor, sums.largest, *of_values)
    of_expected = min(of_expected * math.sqrt(expected), MOST_EXPECTED)
    return sums.step(max(of_sample, of_expected, LEAST_ERROR * o.epsilon), n_read)
