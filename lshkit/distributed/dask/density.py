"""`DaskKernelDensity`: kernel densities of rows on the workers of a Dask cluster."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, DensityMixin, clone
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted

from lshkit import checks
from lshkit.distributed.dask import scores, shards, sketches, tuning
from lshkit.distributed.dask._dask import Client
from lshkit.distributed.dask.arguments import check_as_earlier, check_features, drawn
from lshkit.distributed.dask.blocks import (
    RowBlocks,
    array_of,
    client_of,
    lengths_of,
    mapped,
    results_of,
    row_blocks,
    tree,
)
from lshkit.distributed.dask.kept_rows import KeptRows, kept_rows, template_of
from lshkit.distributed.dask.tasks import Held, constant, task
from lshkit.distributed.dask.widths import SUPPORTED, widths_of
from lshkit.kde import LSHKernelDensity, kernels
from lshkit.kde import bandwidth as bandwidths
from lshkit.kde.arguments import check_parameters, keeps_rows
from lshkit.kde.fitted import restored_after_errors
from lshkit.kde.method import Accuracy
from lshkit.kde.methods import METHODS
from lshkit.kde.samples import N_PILOT
from lshkit.typing import RandomState

if TYPE_CHECKING:
    from typing_extensions import Self


class DaskKernelDensity(DensityMixin, BaseEstimator):
    """Kernel density estimation over rows on the workers of a Dask cluster.

    The parameters, kernels and algorithms are those of `LSHKernelDensity`, which see, but for
    sliding windows and half-lives; docs/dask.md has what is sent, and when it is worthwhile.

    "bucket_sum" makes a sketch of each block and adds the sketches up in a tree: no row is kept,
    and any chunking, on any number of workers, gives the same bits as `LSHKernelDensity.fit` of all
    rows. The other algorithms keep the rows where they are: each block is a shard, which answers
    with its part of the sum and the part's variance. rtol, atol and confidence are of the whole
    sum: the error that a shard may have follows from how much the pilot's queries get from each
    (docs/dask.md).

    Parameters
    ----------
    kernel, bandwidth, algorithm, rtol, atol, confidence, n_bits, n_hashes, normalize
        As of `LSHKernelDensity`. Of the rules for the bandwidth "scott" and "silverman" are
        supported, from at most 65,536 rows. With fewer than 1024 rows in all, sums are exact.
        With "auto", blocks of fewer than 1024 rows are also summed exactly.
    random_state : None, int or RandomState
        None and a RandomState are drawn from once in `fit`, for all blocks.
    n_jobs : int, optional
        Threads of each task on a worker, as in joblib.
    batch_size : int
        Queries per batch in a task.
    client : distributed.Client, optional
        By default the one made last. It is not a parameter that `get_params` lists.

    Attributes
    ----------
    algorithm_ : str
        The algorithm in use; where "auto" chose several, those of the shards, by commas.
    bandwidth_ : float or array `(n_features,)`
    n_samples_seen_, n_features_in_ : int
    n_shards_ : int
        Blocks of rows that are kept; 0 for "bucket_sum".
    report_ : dict
        Of the shards' pilot: "shrinkage", by how much the relative error of the sum is less than
        that of a shard, "rtol" of the shards, "error", the mean relative error of the sum on the
        pilot's queries, "least_error", a relative error which all state at least, and "shards": the
        algorithm and the reason of each.

    Notes
    -----
    The blocks may be lazy. A block of rows is computed once in `fit` (that of a dataframe twice,
    unless it is persisted: Dask does not know its length). What a lost worker held is computed
    again, with the same bits. Arguments are Dask arrays or dataframes, chunked by rows.

    Examples
    --------
    >>> import dask.array as da
    >>> from distributed import Client
    >>> from lshkit.distributed import DaskKernelDensity
    >>> client = Client(processes=False)  # doctest: +SKIP
    >>> X = da.random.default_rng(0).normal(size=(20_000, 8), chunks=(5_000, 8))
    >>> density = DaskKernelDensity(bandwidth=0.5, random_state=0).fit(X)  # doctest: +SKIP
    >>> density.score_samples(X[:100]).compute().shape  # doctest: +SKIP
    (100,)
    """

    # No parameters here, but `check_parameters` reads them: which rows a sketch forgets depends on
    # the order of all rows.
    sliding_window, sliding_window_error, half_life = None, 0.0, None

    n_features_in_: int
    n_samples_seen_: int
    feature_names_in_: np.ndarray
    _seed: int  # the random_state of all blocks
    _sketch: LSHKernelDensity | None = None
    _kept: KeptRows | None = None
    _shards: tuning.Shards | None  # None until the rows are tuned
    _kernel: str
    _n_bits: int
    _widths: np.ndarray

    def __init__(
        self,
        kernel: str = "gaussian",
        bandwidth: float | str | ArrayLike = 1.0,
        *,
        algorithm: str = "auto",
        rtol: float = 0.1,
        atol: float = 0.0,
        confidence: float | None = None,
        n_bits: int | None = None,
        n_hashes: int = 32,
        normalize: bool = True,
        random_state: RandomState = None,
        n_jobs: int | None = None,
        batch_size: int = 1024,
        client: Client | None = None,
    ) -> None:
        self.kernel = kernel
        self.bandwidth = bandwidth
        self.algorithm = algorithm
        self.rtol = rtol
        self.atol = atol
        self.confidence = confidence
        self.n_bits = n_bits
        self.n_hashes = n_hashes
        self.normalize = normalize
        self.random_state = random_state
        self.n_jobs = n_jobs
        self.batch_size = batch_size
        self.client = client

    # ---- fitting ----

    def fit(self, X: Any, y: object = None, sample_weight: Any = None) -> Self:
        """Fits the rows of a Dask array `(n, n_features)` or dataframe. Returns self.

        Computes: the sketch, or the shards and what the pilot finds out about them.
        sample_weight: a Dask array `(n,)`, for a dataframe a series; >= 0 and not all 0. After an
        error what was fitted before stays.
        """
        with restored_after_errors(self):
            for name in [x for x in vars(self) if x.endswith("_") or x.startswith("_")]:
                delattr(self, name)
            self._add(X, sample_weight)
            if self._sketch is None:
                self._prepare()
        return self

    def partial_fit(self, X: Any, y: object = None, sample_weight: Any = None) -> Self:
        """Adds blocks of rows; returns self.

        A sketch is then the one of all rows, bit for bit. Shards are tuned again at the first
        query, on other rows than `fit` of all would draw: as accurate, but not the same estimates.
        A rule's bandwidth is that of the first rows.
        """
        return self._add(X, sample_weight)

    def _add(self, X: Any, sample_weight: Any) -> Self:
        first = not hasattr(self, "n_samples_seen_")
        n_bits = check_parameters(self)
        client = client_of(self.client)
        blocks = row_blocks(X, sample_weight)
        if blocks.lengths is not None and sum(blocks.lengths) == 0:
            raise ValueError("X must have at least one row, got none")
        if first:
            seed = drawn(self.random_state)
            widths = bandwidths.check(self.bandwidth, blocks.n_features, self.kernel, SUPPORTED)
            if isinstance(widths, str):
                widths = widths_of(widths, blocks, lengths_of(blocks, client), seed, client)
        else:
            check_as_earlier(self, n_bits, blocks)
            seed, widths = self._seed, self._widths
        parameters = self.get_params(deep=False) | {"random_state": seed, "bandwidth": widths}
        kept, sketch = None, None
        if keeps_rows(self.algorithm):
            kept = self._kept_with(blocks, parameters, client)
            n_rows = kept.n_rows
        else:
            sketch = self._sketch_with(blocks, parameters, client)
            n_rows = sketch.n_samples_seen_
        # All that may fail has been done.
        if first and blocks.feature_names is not None:
            self.feature_names_in_ = blocks.feature_names
        self.n_features_in_, self.n_samples_seen_ = blocks.n_features, n_rows
        self._kernel, self._n_bits = self.kernel, n_bits
        self._seed, self._widths = seed, widths
        self._sketch, self._kept, self._shards = sketch, kept, None
        return self

    def _kept_with(self, blocks: RowBlocks, parameters: dict[str, Any], client: Client) -> KeptRows:
        """The rows kept so far and those of blocks."""
        lengths = lengths_of(blocks, client)
        earlier = 0 if self._kept is None else self._kept.n_rows
        n, seed = earlier + sum(lengths), parameters["random_state"] + earlier
        share = 0.0 if self._is_exact(n) else sum(lengths) / n
        template = template_of(parameters, blocks.n_features, blocks.feature_names)
        kept = kept_rows(client, blocks, lengths, template, seed, share)
        if self._kept is not None:
            kept = self._kept.joined(kept)
        if kept.largest_weight == 0:
            raise ValueError("sample_weight must not be all zero")
        return kept

    def _sketch_with(
        self, blocks: RowBlocks, parameters: dict[str, Any], client: Client
    ) -> LSHKernelDensity:
        """The sketch of the rows so far and of those of blocks."""
        parts = mapped(sketches.of_block, parameters, blocks)
        sketch = results_of(client, [tree(parts, sketches.merged)])[0]
        if sketch is None:
            raise ValueError("X must have at least one row, got none")
        if self._sketch is not None:
            sketch = copy.deepcopy(self._sketch).merge(sketch)
        elif not sketch._kde_sketch or sketch._kde_sketch.total == 0:
            raise ValueError("sample_weight must not be all zero")
        sketch.bandwidth = self.bandwidth
        return sketch

    def _is_exact(self, n_rows: int) -> bool:
        """Whether every shard is summed exactly, without a pilot."""
        method = METHODS.get(self.algorithm)
        exact = method is not None and method.exact
        return exact or self.kernel in kernels.COMPACT or self.rtol == 0 or n_rows < 4 * N_PILOT

    # ---- shards ----

    def _prepare(self) -> tuning.Shards:
        """The shards, made where there are none since rows came."""
        assert self._kept is not None
        if self._shards is None:
            check_parameters(self)  # which may have been set since
            confidence = None if self.confidence is None else float(self.confidence)
            accuracy = Accuracy(float(self.rtol), 0.0, confidence)
            negligible = -np.inf
            if self.atol > 0 and self.rtol > 0:
                norm = 0.0 if self._kernel == "angular" else self._log_normalizer()
                negligible = float(np.log(float(self.atol)) - np.log(accuracy.rtol) + norm)
            asked = tuning.Asked(self.algorithm, accuracy, negligible)
            of_kernel = self._kernel, self._n_bits, self._widths
            exact, client = self._is_exact(self._kept.n_rows), client_of(self.client)
            self._shards = tuning.shards_of(
                client, self._kept, of_kernel, None if exact else asked, self._seed, self.n_jobs
            )
        return self._shards

    def _log_normalizer(self) -> float:
        """log of the integral of the kernel at its bandwidth, or 0 with normalize=False."""
        if not self.normalize:
            return 0.0
        volume = float(np.log(self._widths).sum())
        return kernels.log_normalizer(self._kernel, self.n_features_in_) + volume

    # ---- what was fitted ----

    @property
    def algorithm_(self) -> str:
        """The algorithm in use."""
        check_is_fitted(self)
        if self._sketch is not None:
            return self._sketch.algorithm_
        return ", ".join(sorted({x["algorithm"] for x in self.report_["shards"]}))

    @property
    def bandwidth_(self) -> float | np.ndarray:
        """The bandwidth in use: one number where all features have the same."""
        check_is_fitted(self)
        widths = self._widths
        return float(widths[0]) if (widths == widths[0]).all() else widths

    @property
    def n_shards_(self) -> int:
        """Blocks of rows that are kept."""
        check_is_fitted(self)
        return 0 if self._kept is None else len(self._kept.blocks)

    @property
    def extra_memory_(self) -> int:
        """Bytes kept beside the rows on all workers, at most; of a sketch, all that is kept."""
        check_is_fitted(self)
        return self._prepare().nbytes if self._sketch is None else self._sketch.extra_memory_

    @property
    def report_(self) -> dict[str, Any]:
        """Results of the shards' pilot."""
        check_is_fitted(self)
        return self._prepare().report if self._sketch is None else self._sketch.report_

    def to_local(self) -> LSHKernelDensity:
        """An `LSHKernelDensity` of the same rows in this process.

        Of a sketch with the same bits; otherwise all rows come here, and the pilot runs anew at the
        first query.
        """
        check_is_fitted(self)
        if self._sketch is not None:
            return copy.deepcopy(self._sketch_as_set(self._sketch))
        assert self._kept is not None
        X, weights = self._kept.gathered(client_of(self.client))
        own = {"random_state": self._seed, "kernel": self._kernel}
        parameters = self.get_params(deep=False) | own
        if isinstance(self.bandwidth, str):
            parameters["bandwidth"] = self._widths
        local = LSHKernelDensity(**parameters).partial_fit(X, sample_weight=weights)
        if hasattr(self, "feature_names_in_"):
            local.feature_names_in_ = self.feature_names_in_
        return local

    def _sketch_as_set(self, sketch: LSHKernelDensity) -> LSHKernelDensity:
        """The sketch itself with the parameters of queries, which may have been set since."""
        names = "normalize", "n_jobs", "batch_size"
        same = LSHKernelDensity()
        same.__dict__.update(vars(sketch))  # copy.copy would copy the tables, as pickle does
        return same.set_params(**{x: getattr(self, x) for x in names})

    def merge(self, other: DaskKernelDensity | LSHKernelDensity) -> Self:
        """Adds the sketch of another estimator, fitted here or anywhere; returns self.

        ValueError unless both are sketches with the same hash functions (the same integer
        random_state, n_bits, n_hashes and bandwidth).
        """
        check_is_fitted(self)
        if not isinstance(other, (DaskKernelDensity, LSHKernelDensity)):
            got = type(other).__name__
            raise TypeError(f"other must be a DaskKernelDensity or LSHKernelDensity, got {got}")
        check_is_fitted(other)
        theirs = other._sketch if isinstance(other, DaskKernelDensity) else other
        if self._sketch is None or theirs is None:
            raise ValueError("merge needs algorithm='bucket_sum': pass other rows to partial_fit")
        self._sketch = copy.deepcopy(self._sketch).merge(theirs)
        self._shards, self.n_samples_seen_ = None, self._sketch.n_samples_seen_
        return self

    # ---- queries ----

    def score_samples(self, X: Any, return_std: bool = False) -> Any:
        """Log-density of each row of X, a Dask array `(n, n_features)` or dataframe.

        Returns
        -------
        log_density : Dask array `(n,)`
            Lazy, in the chunks of X; float32 for float32 rows, else float64. For a dataframe its
            chunk sizes are unknown. Computed with the client of the estimator: `.compute()` uses
            the default one.
        std : Dask array `(n,)`, with return_std=True
            Its standard error, as of `LSHKernelDensity`.
        """
        check_is_fitted(self)
        return self._scores(X, return_std, self._log_normalizer())

    def kernel_mean(self, X: Any, return_std: bool = False) -> Any:
        """Weighted mean of the kernel between each row of X and the rows fitted: unnormalised.

        Lazy, as `score_samples`.
        """
        check_is_fitted(self)
        return self._scores(X, return_std, None)

    def score(self, X: Any, y: object = None) -> float:
        """Total log-density of the rows of X; computed at once. y is ignored."""
        total = self.score_samples(X).astype(np.float64).sum()
        return float(client_of(self.client).compute(total).result())

    def _scores(self, X: Any, return_std: bool, log_norm: float | None) -> Any:
        """log_norm: None for kernel means."""
        blocks = row_blocks(X)
        check_features(self, blocks)
        return_std = checks.boolean("return_std", return_std)
        if self._sketch is not None:
            sketch = self._sketch_as_set(self._sketch)
            score, sent = task(scores.of_sketch), constant(sketch)
            is_mean = log_norm is None
            parts: list[Any] = [score(sent, x, return_std, is_mean) for x in blocks.rows]
        else:
            assert self._kept is not None
            client_of(self._kept.client)  # of a closed one the shards are gone
            made = self._prepare()
            batch_size = checks.integer("batch_size", self.batch_size, 1)
            scale = scores.Scale(made.log_weight, log_norm, made.least_error, return_std)
            check, answer = task(shards.checked_queries), task(shards.Shard.answer)
            names = getattr(self, "feature_names_in_", None)
            compared = template_of(self.get_params(deep=False), self.n_features_in_, names)
            template = constant(compared)
            score, held = task(scores.of_sums), constant(Held(made.shards))
            parts = []
            for rows in blocks.rows:
                queries = check(template, rows, self._kernel)
                answers = [answer(x, queries, batch_size) for x in made.shards]
                parts.append(score(tree(answers, shards.combined), queries, scale, held))
        dtype = np.dtype(np.float32 if blocks.dtype == np.float32 else np.float64)
        lengths = blocks.lengths
        if not return_std:
            return array_of(parts, lengths, dtype)
        return tuple(array_of([x[i] for x in parts], lengths, dtype) for i in range(2))

    # ---- scikit-learn's contract ----

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Parameters by name, without the client."""
        return {k: x for k, x in super().get_params(deep).items() if k != "client"}

    def __sklearn_clone__(self) -> Self:
        parameters = self.get_params(deep=False)
        same = {k: clone(x, safe=False) for k, x in parameters.items()}
        return type(self)(**same, client=self.client)

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "n_samples_seen_")

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = False
        return tags

    def __getstate__(self) -> dict[str, Any]:
        if hasattr(self, "n_samples_seen_"):
            raise TypeError(
                "a fitted DaskKernelDensity belongs to its client: pickle to_local(), or call "
                "to_local().save(path)"
            )
        return super().__getstate__() | {"client": None}
