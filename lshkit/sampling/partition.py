"""Log normalisers of a softmax over many classes: near classes exactly, a sample of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lshkit import _C, checks
from lshkit.buckets import HashTables
from lshkit.hash_functions import MAX_PROBE_BITS
from lshkit.hashing import FastHadamard
from lshkit.sampling.rows import as_numpy, check_rows
from lshkit.typing import ArrayOrTensor, Rows, Seed

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self


class LogPartition(NamedTuple):
    """An estimate of log sum_j exp(q . k_j), of the kind of the query.

    Attributes
    ----------
    value, standard_error : float64 arrays or tensors `(n_q,)`, or numbers for a single query
        The estimate, and the standard error that its draws tell of.
    """

    value: Any
    standard_error: Any


MAX_MIN_COUNT = 3  # what two bits of the core's counters hold
_CLASSES_A_BUCKET = 60
_SHARPNESS = 2.0  # of the probes; only their order matters here


class PartitionSampler:
    """Hash tables over the classes of an output layer, which find the classes near a query.

    A class is near if it shares at least `min_count` buckets with the query, which has its
    `n_probes` likeliest buckets in every table (`FastHadamard.soft_hash`). `log_partition` is
    unbiased with any tables, so they may be older than the weights; their age only affects its
    error.

    Parameters
    ----------
    weight_matrix : array or tensor `(n_classes, n_features)`
        Hashed in float32; not kept.
    n_bits : int, 1 to 16, optional
        2^n_bits buckets, at most twice the classes (or 1024). Default: about 60 classes each.
    n_hashes : int
        Tables, of 4 bytes per class each.
    n_probes : int
    min_count : int, 1 to 3 and at most n_hashes
        2 excludes unrelated classes that collide with a query once by chance.
    center : bool
        Subtracts the mean of the classes before hashing. It adds the same to all logits of a query,
        and would make the angles between classes small.
    seed : None, int from 0 to 2**128 - 1 or numpy.random.Generator

    Attributes
    ----------
    hasher : FastHadamard
    tables : lshkit.buckets.HashTables
    n_classes, nbytes : int

    Raises
    ------
    TypeError, ValueError
        weight_matrix has another shape, no class, or a class that is not finite in float32; another
        argument out of range.
    """

    n_classes: int
    n_probes: int
    min_count: int
    center: bool
    hasher: FastHadamard
    tables: HashTables

    def __init__(
        self,
        weight_matrix: Rows,
        *,
        n_bits: int | None = None,
        n_hashes: int = 24,
        n_probes: int = 8,
        min_count: int = 2,
        center: bool = True,
        seed: Seed = None,
    ) -> None:
        weights, _ = _float32("weight_matrix", weight_matrix, 2, "(n_classes, n_features)")
        self.n_classes, n_features = weights.shape
        if self.n_classes == 0:
            raise ValueError(
                f"weight_matrix must have at least one class, got shape {weights.shape}"
            )
        check_rows("weight_matrix in float32", weights)
        buckets = max(2 * self.n_classes, 1024)  # beyond, tables are not addressed by code
        most = min(MAX_PROBE_BITS, buckets.bit_length() - 1)
        if n_bits is None:
            n_bits = int(np.clip(round(np.log2(self.n_classes / _CLASSES_A_BUCKET)), 4, most))
        n_bits = checks.integer("n_bits", n_bits, 1, most)
        self.n_probes = checks.integer("n_probes", n_probes, 1, 2**n_bits)
        self.hasher = FastHadamard(n_features, n_bits, n_hashes, seed=seed)
        self.min_count = checks.integer("min_count", min_count, 1, min(n_hashes, MAX_MIN_COUNT))
        self.center = checks.boolean("center", center)
        self._build(weights)

    def refresh(self, weight_matrix: Rows) -> Self:
        """Rebuilds the tables for changed weights, with the same hash functions. Returns self.

        ValueError for weights of another shape, or that are not finite.
        """
        weights, _ = _float32("weight_matrix", weight_matrix, 2, "(n_classes, n_features)")
        self.check_shape(weights)
        check_rows("weight_matrix in float32", weights)
        self._build(weights)
        return self

    def check_shape(self, weight_matrix: np.ndarray | torch.Tensor) -> None:
        """ValueError if the weights have another shape than those of the tables."""
        wanted = self.n_classes, self.hasher.n_features
        if tuple(weight_matrix.shape) != wanted:
            got = tuple(weight_matrix.shape)
            raise ValueError(f"weight_matrix must have the sampler's shape {wanted}, got {got}")

    def _build(self, weights: np.ndarray) -> None:
        if self.center:
            weights = weights - weights.mean(0, dtype=np.float64).astype(np.float32)
        self.tables = HashTables(self.hasher.hash(weights))

    @property
    def nbytes(self) -> int:
        """Memory of the tables."""
        return self.tables.nbytes

    def probes(self, query: ArrayOrTensor) -> ArrayOrTensor:
        """The buckets that queries `(n_q, n_features)` read, by codes `(n_q, n_hashes, n_probes)`.

        TypeError or ValueError for queries of another shape, or that are not finite.
        """
        codes, _ = self.hasher.soft_hash(query, self.n_probes, _SHARPNESS)
        return codes

    def __repr__(self) -> str:
        names = "n_probes", "min_count", "center"
        options = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"PartitionSampler(n_classes={self.n_classes}, {self.hasher!r}, {options})"


def log_partition(
    query: Rows,
    weight_matrix: Rows,
    *,
    bias: Rows | None = None,
    sampler: PartitionSampler | None = None,
    n_samples: int = 8192,
    seed: Seed = None,
) -> LogPartition:
    """Estimates of the logarithms of a softmax's normalisers, with their standard errors.

    The normaliser of a query is Z = sum_j exp(query . weight_j + bias_j). It is estimated as the
    sum over the near classes (see `PartitionSampler`) of exp(logit), exactly, + (n / s) times the
    sum over s sampled classes that are not near. The sample is uniform, without replacement, and
    independent of the tables: Z is unbiased whatever the tables are. Its logarithm is below log Z
    by about half the squared standard error on average.

    Parameters
    ----------
    query : array or tensor `(n_q, n_features)` or `(n_features,)`
    weight_matrix : array or tensor `(n_classes, n_features)`
        Used without a copy if float32 and contiguous, otherwise converted in each call.
    bias : array or tensor `(n_classes,)`, optional
        -inf leaves a class out of Z. Near classes are found without it.
    sampler : PartitionSampler, optional
        For weights of this shape, current or older. If None it is built in the call, which takes as
        long as the exact normalisers of thousands of queries: build it once.
    n_samples : int >= 1
        s, at most the number of classes. All queries of a call share one sample: it is read
        once, and their errors are correlated.
    seed : None, int from 0 to 2**128 - 1 or numpy.random.Generator
        For the sample, and for the sampler if it is built here. The same integer always gives the
        same result, at any number of threads.

    Returns
    -------
    value, standard_error : float64 `(n_q,)`, or single numbers for a single query
        Like the query arrays or tensors. Computed in float32, relative to the largest logit. No
        gradient. The error is that of the sample, sqrt(var Z) / Z, for the tables as they are;
        NaN for a sample of one class of several.
        If the sample misses large terms that are not near, the standard error is too small.
        -inf and inf where no class is near and the bias leaves out all of the sample.

    Raises
    ------
    TypeError, ValueError
        Arguments of the wrong kind or shape; a query or class that is not finite (classes only if
        they were read), a bias that is NaN or inf, or -inf for all classes; logits that overflow
        float32.
    """
    query, torch = _float32("query", query, (1, 2), "(n_q, n_features) or (n_features,)")
    weights, _ = _float32("weight_matrix", weight_matrix, 2, "(n_classes, n_features)")
    single = query.ndim == 1
    queries = query[None] if single else query
    n = len(weights)
    if queries.shape[1] != weights.shape[1]:
        wanted = f"({n}, {queries.shape[1]}), as query has {queries.shape[1]} features"
        raise ValueError(f"weight_matrix must have shape {wanted}, got {weights.shape}")
    check_rows("query in float32", queries)
    if bias is not None:
        bias, _ = _float32("bias", bias, 1, f"({n},)")
        if bias.shape != (n,):
            raise ValueError(f"bias must have shape {(n,)}, got {bias.shape}")
        _check_bias(bias)
    n_samples = min(checks.integer("n_samples", n_samples, 1), n)
    random = np.random.default_rng(checks.seed(seed))
    if sampler is None:
        sampler = PartitionSampler(weights, seed=random)
    elif not isinstance(sampler, PartitionSampler):
        raise TypeError(f"sampler must be a PartitionSampler, got {type(sampler).__name__}")
    sampler.check_shape(weights)
    sample = np.sort(random.choice(n, n_samples, replace=False, shuffle=False)).astype(np.int32)
    order, bins = sampler.tables._tables[:2]
    sums = np.empty((len(queries), 6))
    if len(queries):
        _C.partition_sums(
            *(queries, weights, bias, order, bins, sampler.probes(queries), sampler.min_count),
            *(sample, sums, 0 if torch is None else torch.get_num_threads()),
        )
    value, error = _of_sums(sums, n, n_samples)
    known = np.isfinite(value)
    if bias is not None and np.isneginf(bias[sample]).all():
        known |= np.isneginf(value)  # an estimate of 0
    if not known.all():
        check_rows("weight_matrix in float32", weights)
        raise ValueError(f"the logits of query {np.argmin(known)} overflow float32")
    if single:
        value, error = value[0], error[0]
    if torch is not None:
        value, error = (torch.from_numpy(np.asarray(x)) for x in (value, error))
    return LogPartition(value, error)


def _of_sums(sums: np.ndarray, n: int, s: int) -> tuple[np.ndarray, np.ndarray]:
    """log Z and its standard error, from the columns of PartitionSums (partition_sums.hpp)."""
    largest, near, far, squares = sums.T[:4]
    scale = n / s
    with np.errstate(divide="ignore", invalid="ignore"):
        total = near + scale * far
        mean = far / s
        variance = (squares / s - mean**2) * s / max(s - 1, 1)  # of a term; 0 those of near rows
        if s == 1 < n:
            variance = np.full_like(variance, np.nan)
        # Without replacement: nothing is left to chance when all rows are sampled.
        error = n * np.sqrt(np.maximum(variance, 0) / s * (1 - s / n)) / total
        none = np.isneginf(largest)  # relative to which sums are NaN
        return np.where(none, -np.inf, largest + np.log(total)), np.where(none, np.inf, error)


def _check_bias(bias: np.ndarray) -> None:
    """ValueError for NaN, inf, or a bias that leaves out all classes."""
    largest = bias.max()  # NaN if there is one
    if not largest < np.inf:
        row = np.flatnonzero(~(bias < np.inf))[0]
        wanted = "finite, or -inf for classes to leave out"
        raise ValueError(f"bias must be {wanted}, row {row} has {bias[row]} in float32")
    if largest == -np.inf:
        raise ValueError("bias must leave in a class, got -inf for all")


def _float32(name: str, x: Any, dims: int | tuple[int, ...], wanted: str) -> tuple[np.ndarray, Any]:
    """A contiguous float32 numpy array of so many dimensions, and torch if it was a tensor."""
    x, torch = as_numpy(name, x)
    if x.ndim not in np.atleast_1d(dims):
        raise ValueError(f"{name} must have shape {wanted}, got {x.shape}")
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(x, np.float32), torch
