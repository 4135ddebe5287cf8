"""`two_sample_test`: whether two samples have one distribution, by the maximum mean discrepancy."""

import dataclasses

import numpy as np
from joblib import Parallel, delayed
from numpy.typing import ArrayLike
from scipy.spatial.distance import pdist
from sklearn.utils import check_array
from threadpoolctl import threadpool_limits

from lshkit import checks
from lshkit.buckets import BucketTable
from lshkit.kde import bandwidth as bandwidths
from lshkit.kde.arguments import check_n_jobs, core_threads, detached_rows, random_of
from lshkit.kde.geometry import Geometry, angles_of, has_zero_row, unit_rows, without_loss
from lshkit.kde.kernels import COLLISION
from lshkit.kde.sketch import SKETCH_BITS, Sketch
from lshkit.kde.value_sums import distances, log_kernels
from lshkit.typing import RandomState, Rows

KERNELS = "laplacian", "angular", "gaussian"
MAX_EXACT = 5000  # rows of both samples, up to which "auto" is "brute" for collision kernels
MEDIAN_OF = 1000  # rows of both, whose distances give the bandwidth
BLOCK = 1024  # rows of a block of the kernel matrix
TABLE_BITS = 8  # of a laplacian sketch: few pairs share 256 buckets by chance, beside those of 1/e
COLUMNS = 64  # permutations that are summed by bucket at once
TABLE_SIZE = 2**24  # numbers in memory at once where buckets are summed
MAX_COUNT = 2**24  # up to which float32 counts exactly
ROUNDING = 1e-12  # of a statistic, over the kernel's mean: as large are ties


@dataclasses.dataclass(frozen=True)
class TwoSampleTestResult:
    """What `two_sample_test` found.

    Attributes
    ----------
    statistic : float
        The unbiased estimate of the squared maximum mean discrepancy. It may be below 0.
    pvalue : float
        (1 + #{null >= statistic}) / (1 + n_permutations).
    null_distribution : array `(n_permutations,)`
        The statistic of each permutation; where rounding alone sets it apart from that of the
        samples, that.
    kernel : str
    bandwidth : float or array `(n_features,)`
        In use. 1.0 for the angular kernel.
    n_bits : int or None
        Width of the angular kernel, or of the tables of the laplacian sketch.
    algorithm : str
        "brute" or "bucket_sum".
    standard_error : float
        Of the statistic, as an estimate of the exact one of these samples: 0 for "brute". It does
        not contain what other samples would give.
    """

    statistic: float
    pvalue: float
    null_distribution: np.ndarray = dataclasses.field(repr=False, compare=False)
    kernel: str
    bandwidth: float | np.ndarray
    n_bits: int | None
    algorithm: str
    standard_error: float


def two_sample_test(
    X: Rows,
    Y: Rows,
    *,
    kernel: str = "laplacian",
    bandwidth: float | str | ArrayLike = "median",
    n_permutations: int = 999,
    algorithm: str = "auto",
    n_bits: int | None = None,
    n_hashes: int = 64,
    random_state: RandomState = None,
    n_jobs: int | None = None,
) -> TwoSampleTestResult:
    """Tests whether the rows of X and of Y come from one distribution.

    The statistic is the squared maximum mean discrepancy, as the unbiased U-statistic (Gretton et
    al. 2012, equation 3), ::

        mean of k(x, x') over pairs of X + mean of k(y, y') over pairs of Y - 2 mean of k(x, y)

    and its null distribution that of random permutations of all rows: the level holds for any
    number of rows, algorithm and number of hashes.

    Parameters
    ----------
    X : array or tensor `(n, n_features)`, n >= 2
    Y : array or tensor `(m, n_features)`, m >= 2
    kernel : {"laplacian", "angular", "gaussian"}
        As in `LSHKernelDensity`.
    bandwidth : float, array `(n_features,)` or "median"
        "median": that of the distances between (up to 1,000) rows of both (where more than half
        are 0, of the others, and 1 where all are); for the angular kernel
        the n_bits with which the kernel of the median angle is nearest to 1/e. A number other than
        1.0 is refused for the angular kernel, whose width is n_bits.
    n_permutations : int >= 1
        The smallest p-value is 1 / (1 + n_permutations).
    algorithm : {"auto", "brute", "bucket_sum"}
        "brute": all pairs of rows, exactly. "bucket_sum": hash codes estimate the kernel, in time
        linear in the rows; for the kernels "laplacian" and "angular". "auto": "brute" up to 5,000
        rows together and for the gaussian kernel. Both take memory linear in the rows, a byte for
        each row and permutation.
    n_bits : int, optional
        Width of the angular kernel, 1 to 16; tables of a laplacian sketch have 2^n_bits buckets
        (1 to 16, default 8). None for the gaussian kernel.
    n_hashes : int
        Of "bucket_sum": its standard error is proportional to 1 / sqrt(n_hashes).
    random_state : None, int or RandomState
        An int makes results reproducible, at any n_jobs.
    n_jobs : int, optional
        Threads, as in joblib: None is 1, -1 all.

    Returns
    -------
    result : TwoSampleTestResult
        With the fields statistic, pvalue, null_distribution, kernel, bandwidth, n_bits,
        algorithm, standard_error.

    Raises
    ------
    TypeError, ValueError
        Arguments of the wrong type, shape or range; rows that are not finite, or for the angular
        kernel 0; frames whose columns differ in name or order.

    Examples
    --------
    >>> import numpy as np
    >>> from lshkit.kde import two_sample_test
    >>> rng = np.random.default_rng(0)
    >>> X, Y = rng.normal(size=(200, 8)), rng.normal(0.3, size=(300, 8))
    >>> two_sample_test(X, Y, random_state=0).pvalue
    0.001
    """
    rows, n = _pooled(X, Y, kernel)
    most = checks.MOST_BYTES // len(rows) - 1
    n_permutations = checks.integer("n_permutations", n_permutations, 1, most)
    n_hashes = checks.integer("n_hashes", n_hashes, 1, 65535)
    check_n_jobs(n_jobs)
    if algorithm not in ("auto", "brute", "bucket_sum"):
        raise ValueError(f"algorithm must be 'auto', 'brute' or 'bucket_sum', got {algorithm!r}")
    if algorithm == "bucket_sum" and kernel not in COLLISION:
        raise ValueError(
            f"kernel must be one of {list(COLLISION)} for algorithm='bucket_sum', got {kernel!r}"
        )
    if algorithm == "auto":
        exact = kernel not in COLLISION or len(rows) <= MAX_EXACT
        algorithm = "brute" if exact else "bucket_sum"
    rng = random_of(random_state)
    geometry = _geometry(rows, kernel, bandwidth, n_bits, rng)
    seed = rng.randint(2**31 - 1)
    labels = _labels(len(rows), n, n_permutations, np.random.default_rng(seed))
    # BLAS has one thread in each of ours, so that bits are equal.
    with core_threads(n_jobs) as threads, threadpool_limits(1, user_api="blas"):
        if algorithm == "brute":
            sums = _exact_sums(geometry, rows, labels, threads)
        else:
            sums = _bucket_sums(Sketch(geometry, geometry.n_bits, n_hashes, seed), rows, labels)
    values, mean_kernel = _statistics(*sums, n, len(rows) - n)
    if algorithm == "bucket_sum" and kernel == "laplacian":
        values /= 1 - 2.0**-geometry.n_bits  # what folding adds to all pairs has cancelled
    statistic, *null = values.mean(axis=1)
    null = np.array(null)
    null[np.abs(null - statistic) <= ROUNDING * mean_kernel] = statistic
    count = np.count_nonzero(null >= statistic)
    error = 0.0
    if algorithm == "bucket_sum":
        error = values[0].std(ddof=1) / np.sqrt(n_hashes) if n_hashes > 1 else np.inf
    widths = geometry.bandwidth
    return TwoSampleTestResult(
        statistic=float(statistic),
        pvalue=float((1 + count) / (1 + n_permutations)),
        null_distribution=null,
        kernel=kernel,
        bandwidth=float(widths[0]) if (widths == widths[0]).all() else widths,
        n_bits=geometry.n_bits if kernel == "angular" or algorithm == "bucket_sum" else None,
        algorithm=algorithm,
        standard_error=float(error),
    )


# --- Arguments ----------------------------------------------------------------------------------


def _pooled(X: Rows, Y: Rows, kernel: str) -> tuple[np.ndarray, int]:
    """The rows of both, float64, and how many are X's."""
    checks.choice("kernel", kernel, KERNELS)
    samples = []
    for name, rows in (("X", X), ("Y", Y)):
        rows = detached_rows(name, rows)
        rows = check_array(rows, dtype=np.float64, ensure_min_samples=0, input_name=name)
        if len(rows) < 2:
            raise ValueError(f"{name} must have at least 2 rows, got {len(rows)}")
        if kernel == "angular" and has_zero_row(rows):
            raise ValueError(f"{name} has a row of zeros, which has no angle")
        samples.append(rows)
    if samples[0].shape[1] != samples[1].shape[1]:
        features = " and ".join(str(x.shape[1]) for x in samples)
        raise ValueError(f"X and Y must have the same number of features, got {features}")
    names = (rows.columns if hasattr(rows, "columns") else () for rows in (X, Y))
    for i, (mine, other) in enumerate(zip(*names, strict=False)):
        if mine != other:
            got = f"{mine!r} and {other!r} as column {i}"
            raise ValueError(f"X and Y must have the same columns in the same order, got {got}")
    return np.concatenate(samples), len(samples[0])


def _geometry(
    rows: np.ndarray,
    kernel: str,
    bandwidth: float | str | ArrayLike,
    n_bits: int | None,
    rng: np.random.RandomState,
) -> Geometry:
    """The kernel with its width, which depends on the rows of both alike."""
    d = rows.shape[1]
    median = isinstance(bandwidth, str)
    if median and bandwidth != "median":
        wanted = "a number > 0, one for each feature or 'median'"
        raise ValueError(f"bandwidth must be {wanted}, got {bandwidth!r}")
    if n_bits is not None:
        n_bits = checks.integer("n_bits", n_bits, 1, SKETCH_BITS)
        if kernel == "gaussian":
            raise ValueError(f"n_bits must be None with kernel='gaussian', got {n_bits}")
    widths = np.ones(d) if median else bandwidths.check_widths(bandwidth, d, kernel)
    centre = np.quantile(rows, 0.5, axis=0, method="nearest")  # which no few far rows move
    if kernel == "angular" and n_bits is None:
        n_bits = _bits_of_median(unit_rows(rows), rng) if median else 8
    elif median and kernel != "angular":
        widths = np.full(d, _median_distance(rows, kernel, rng))
    centre = without_loss(rows, centre, widths)
    geometry = Geometry(kernel, n_bits or TABLE_BITS, centre, widths)
    with np.errstate(over="ignore"):
        finite = all(np.isfinite(geometry.scale(part)).all() for part in np.array_split(rows, 16))
    if not finite:
        raise ValueError("X and Y must lie within 1e308 bandwidths of each other")
    return geometry


def _median_distance(rows: np.ndarray, kernel: str, rng: np.random.RandomState) -> float:
    """Of distinct rows, where more than half of the pairs are equal; 1 if all are."""
    rows = _some(rows, rng)
    info = np.finfo(np.float64)
    metric = "cityblock" if kernel == "laplacian" else "euclidean"
    # In units in which squares neither overflow nor underflow: of the spread of most rows, to
    # which few far ones may be inf, and of all where those are the half.
    with np.errstate(over="ignore"):
        spread = np.abs(rows - np.quantile(rows, 0.5, axis=0, method="nearest")).max(axis=1)
    if not spread.any():
        return 1.0
    for size in (np.median(spread[spread > 0]), np.abs(rows).max()):
        unit = np.frexp(np.minimum(size, info.max))[1]
        with np.errstate(over="ignore"):
            scaled = np.clip(np.ldexp(rows, -unit), info.min / 4, info.max / 4)
            distances = pdist(scaled, metric)
            median = np.median(distances) or np.median(distances[distances > 0])
            median = np.ldexp(median, unit)
        if np.isfinite(median):
            break
    return np.clip(median, info.tiny, info.max)


def _bits_of_median(rows: np.ndarray, rng: np.random.RandomState) -> int:
    """The width at which the kernel of the median angle is nearest to 1/e."""
    angle = np.median(angles_of(pdist(_some(rows, rng))))
    kernels = np.maximum(1 - angle / np.pi, 0) ** np.arange(1, SKETCH_BITS + 1)
    return 1 + int(np.argmin(np.abs(kernels - np.exp(-1))))


def _some(rows: np.ndarray, rng: np.random.RandomState) -> np.ndarray:
    if len(rows) <= MEDIAN_OF:
        return rows
    return rows[rng.choice(len(rows), MEDIAN_OF, replace=False)]


# --- Sums ---------------------------------------------------------------------------------------
#
# With s the 0 or 1 of a row, for being X's, and K the kernel matrix without its diagonal, all three
# means follow from s'Ks, s'K1 and 1'K1: a permutation changes s alone.


def _labels(n_rows: int, n: int, n_permutations: int, rng: np.random.Generator) -> np.ndarray:
    """s of the samples and of random permutations of it, bool `(n_rows, 1 + n_permutations)`."""
    labels = np.zeros((1 + n_permutations, n_rows), bool)
    labels[0, :n] = True
    for row in labels[1:]:
        row[rng.choice(n_rows, n, replace=False, shuffle=False)] = True
    return labels.T


def _exact_sums(
    geometry: Geometry, rows: np.ndarray, labels: np.ndarray, threads: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """s'Ks, s'K1 `(n_labels, 1)` and 1'K1 `(1,)`: K in blocks, on one side of its diagonal."""
    # Scaled by a power of 2 where that will do: less a centre, far rows would be rounded to one
    # another.
    width, exponent = np.frexp(geometry.bandwidth[0])
    with np.errstate(over="ignore"):
        scaled = np.ldexp(rows, -exponent)
    one = geometry.kernel != "angular" and (geometry.bandwidth == geometry.bandwidth[0]).all()
    if one and np.isfinite(scaled).all():
        rows = scaled
    else:
        width, rows = 1.0, geometry.scale(rows)
    firsts = range(0, len(rows), BLOCK)

    def of_block(first: int) -> tuple[np.ndarray, np.ndarray]:
        part = slice(first, first + BLOCK)
        products, row_sums = np.zeros((len(rows[part]), labels.shape[1])), np.zeros(len(rows))
        for other in range(first, len(rows), BLOCK):
            columns = slice(other, other + BLOCK)
            r = distances(geometry, rows[part], rows[columns], width)
            kernel = np.exp(log_kernels(geometry, r))
            if other == first:
                np.fill_diagonal(kernel, 0)
                kernel *= 0.5  # of which both sides are here
            products += kernel @ labels[columns].astype(np.float64)
            row_sums[part] += kernel.sum(axis=1)
            row_sums[columns] += kernel.sum(axis=0)
        return 2 * np.einsum("ij,ij->j", products, labels[part]), row_sums

    inner, row_sums, some = np.zeros(labels.shape[1]), np.zeros(len(rows)), 4 * threads
    with Parallel(threads, prefer="threads") as parallel:
        for i in range(0, len(firsts), some):  # sums of all blocks would be quadratic in the rows
            for part in parallel(delayed(of_block)(x) for x in firsts[i : i + some]):
                inner += part[0]
                row_sums += part[1]
    return inner[:, None], (row_sums @ labels)[:, None], row_sums.sum()[None]


def _bucket_sums(
    sketch: Sketch, rows: np.ndarray, labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same for the kernel "share a bucket of hash h", `(n_labels, n_hashes)`.

    With x_b and t_b the rows of X and of both in bucket b: s'Ks = sum x_b^2 - n, s'K1 = sum x_b t_b
    - n, 1'K1 = sum t_b^2 - n_rows.
    """
    if sketch.geometry.kernel == "angular":
        rows = sketch.geometry.scale(rows)
    codes = np.concatenate([codes for _, codes in sketch.codes_by_chunk(rows)])
    n_hashes, n_buckets = sketch.n_hashes, 2**sketch.n_bits
    both = np.stack([np.bincount(c, minlength=n_buckets) for c in codes.T]).astype(np.float64)
    total = (both**2).sum(axis=1) - len(rows)
    inner, across = np.empty((2, labels.shape[1], n_hashes))
    n = np.count_nonzero(labels[:, 0])
    dtype = np.float32 if len(rows) < MAX_COUNT else np.float64
    step = max(1, TABLE_SIZE // (n_buckets * COLUMNS))  # hashes
    for first in range(0, labels.shape[1], COLUMNS):
        part = slice(first, first + COLUMNS)
        some = labels[:, part].astype(dtype)
        for i in range(0, n_hashes, step):
            of_hashes = codes[:, i : i + step]
            table = BucketTable(of_hashes.shape[1], n_buckets, some.shape[1], dtype=dtype)
            for h, counts in enumerate(table.add(of_hashes, some).table, i):
                counts = counts.astype(np.float64)
                inner[part, h] = np.einsum("ij,ij->j", counts, counts) - n
                across[part, h] = both[h] @ counts - n
    return inner, across, total


def _statistics(
    inner: np.ndarray, across: np.ndarray, total: np.ndarray, n: int, m: int
) -> tuple[np.ndarray, float]:
    """The U-statistics of the sums, and the mean kernel between two rows."""
    cross = across - inner
    rest = total - 2 * across + inner
    values = inner / (n * (n - 1)) + rest / (m * (m - 1)) - 2 * cross / (n * m)
    return values, total.mean() / ((n + m) * (n + m - 1))
