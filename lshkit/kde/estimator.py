"""`LSHKernelDensity`: the estimator, which knows scikit-learn's contract and no method."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from joblib import effective_n_jobs
from numpy.typing import ArrayLike
from sklearn.base import DensityMixin
from sklearn.utils.validation import check_is_fitted

from lshkit import checks
from lshkit.archive import InBytes
from lshkit.kde import bandwidth as bandwidths
from lshkit.kde import kernels, persistence, pilot
from lshkit.kde.arguments import (
    as_queries,
    as_rows,
    as_weights,
    check_as_earlier,
    check_mergeable,
    check_parameters,
    core_threads,
    keeps_rows,
    of_unit_size,
    random_of,
)
from lshkit.kde.fitted import FittedEstimator, restored_after_errors
from lshkit.kde.forgetting import forgetting_of
from lshkit.kde.geometry import Geometry
from lshkit.kde.method import Accuracy, Estimate
from lshkit.kde.methods import METHODS
from lshkit.kde.sketch import Sketch
from lshkit.kde.training import Training, training_of
from lshkit.typing import File, FloatArray, RandomState, Rows

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

    from lshkit.kde.method import Method


class LSHKernelDensity(InBytes, DensityMixin, FittedEstimator):
    """Kernel density estimation in many dimensions, exact or to a stated error.

    Replaces `sklearn.neighbors.KernelDensity`. See docs/kde.md for what each algorithm does and
    when to use it.

    Parameters
    ----------
    kernel : str
        With r the distance over the bandwidth: "gaussian" exp(-r^2 / 2), "exponential" exp(-r),
        "laplacian" exp(-r) with the L1 distance, "angular" (1 - angle / pi)^n_bits, and those that
        are 0 from r = 1 on: "tophat", "epanechnikov", "linear", "cosine".
    bandwidth : float, array `(n_features,)`, "scott", "silverman", "likelihood" or "neighbors"
        The first two rules take each feature's standard deviation times scipy's factor.
        "likelihood" maximises the leave-one-out likelihood (`likelihood_curve`, docs/bandwidths.md)
        over one number for all features and one number times the standard deviations. "neighbors"
        multiplies these by the width at which a median row has effectively 5 neighbors, (sum k)^2 /
        sum k^2 (of a sketch, at which the median kernel mean is 0.05). 1.0 for the
        angular kernel.
    algorithm : str
        "brute": every row, exactly (the only one for kernels that are 0 from r = 1 on). "random": a
        random sample, as large as rtol requires. "near_far": the rows of the cells around the query
        exactly, a sample of the others. "hbe": rows drawn from hash buckets. "bucket_sum": a sketch
        of constant size that keeps no rows, for the kernels "angular" and "laplacian"; n_hashes
        sets its error, not rtol. "auto": the cheapest of all, chosen by a pilot; rows are kept, and
        a sketch has as many hashes as rtol requires.
    rtol : float >= 0
        Target for the relative error of a density, averaged over queries like the rows. 0: exact.
    confidence : float in (0, 1), optional
        rtol is then a bound: the relative error of a query like the rows is at most rtol with this
        probability. Queries are read on, up to all rows, as far as held-out queries show that to
        be necessary; where nothing else keeps it, "auto" computes exactly, and an algorithm asked
        for by name warns.
    atol : float >= 0
        Of densities below atol / rtol an absolute error of atol is enough: what is stated of them
        may be many times the density. In the units of what `score_samples` returns the log of. 0
        for "bucket_sum", whose n_hashes set its error.
    n_bits : int, optional
        Width of the angular kernel (1 to 64, default 8; at most 16 for "bucket_sum"), and of the
        laplacian sketch's tables (1 to 16, default 12): 2^n_bits buckets per hash.
    n_hashes : int
        Hashes of a sketch: its standard error is proportional to 1 / sqrt(n_hashes).
    normalize : bool
        False: `score_samples` returns the log of `kernel_mean`, not divided by the kernel's
        integral.
    sliding_window : int, optional
        The sketch then contains only the last `sliding_window` rows.
    sliding_window_error : float, 0 to 0.5
        Sums lie between those of exact windows that are shorter and longer by this share; memory is
        then some 1 / sliding_window_error small tables, whatever the window. 0: exact.
    half_life : float >= 1, optional
        The sketch forgets gradually: a row followed by n others counts 2^(-n / half_life).
    random_state : None, int or RandomState
        An int makes results reproducible; sketches to be merged require one.
    n_jobs : int, optional
        Threads, as in joblib: None is 1, -1 all.
    batch_size : int
        Queries per batch; memory grows with it. Results do not depend on it, except that the rows
        "hbe" draws for a query depend on its position in the batch.

    Attributes
    ----------
    algorithm_ : str
        The algorithm in use.
    bandwidth_ : float or array `(n_features,)`
    n_samples_seen_ : int
        Rows in the estimator: at most `sliding_window`; with half_life all rows so far.
    n_features_in_ : int
    extra_memory_ : int
        Bytes kept beside the rows, at most; of a sketch, all that is kept.
    report_ : dict
        Results of the pilot: for each method its cost (in rows that brute force would read) and
        expected mean relative error, the reason for the choice, and under "queries" whether rows of
        the data were the pilot's queries ("rows") or those of `tune` ("given").

    Notes
    -----
    Queries do not change the estimator: several threads may query it and get the same results.
    Changes of a sketch wait for each other (from its second rows on); other algorithms take rows
    from one thread at a time. After a `partial_fit`, `partial_unfit` or `merge` of a sketch that
    was interrupted, every call but `fit` raises RuntimeError.

    Examples
    --------
    >>> import numpy as np
    >>> from lshkit.kde import LSHKernelDensity
    >>> X = np.random.default_rng(0).normal(size=(2000, 8))
    >>> density = LSHKernelDensity(bandwidth=0.5, random_state=0).fit(X)
    >>> density.score_samples(X[:3]).shape
    (3,)
    """

    _prefix = "_kde"
    _kde_seed: int
    _kde_rows: list[np.ndarray]
    _kde_weights: list[np.ndarray | None]
    _kde_sketch: Sketch | None
    _kde_method: Method | None
    _kde_picked: dict[str, Any] | None  # the report
    # Kernel, n_bits and widths of the pick: parameters may be set.
    _kde_fitted: tuple[str, int, np.ndarray] | None

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
        sliding_window: int | None = None,
        sliding_window_error: float = 0.0,
        half_life: float | None = None,
        random_state: RandomState = None,
        n_jobs: int | None = None,
        batch_size: int = 1024,
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
        self.sliding_window = sliding_window
        self.sliding_window_error = sliding_window_error
        self.half_life = half_life
        self.random_state = random_state
        self.n_jobs = n_jobs
        self.batch_size = batch_size

    # ---- fitting ----

    def fit(self, X: Rows, y: object = None, sample_weight: Rows | None = None) -> Self:
        """Fits the rows X `(n_samples, n_features)`; float32 stays float32. Returns self.

        sample_weight: `(n_samples,)`, >= 0 and not all 0. y is ignored. TypeError or ValueError,
        which names it, for an argument of the estimator, rows or weights that are not as wanted:
        rows must be finite real numbers. What was fitted before stays then.
        """
        with restored_after_errors(self):
            for name in [x for x in vars(self) if x.endswith("_") or x.startswith("_kde")]:
                delattr(self, name)
            return self._add(X, sample_weight, all_rows=True)._prepare()

    def partial_fit(self, X: Rows, y: object = None, sample_weight: Rows | None = None) -> Self:
        """Adds rows, as if all rows had been passed to `fit`; returns self.

        A rule for the bandwidth is applied to all rows at the first query, which raises what `fit`
        would, also of rows that are 1e150 bandwidths apart; "bucket_sum" keeps the bandwidth of its
        first rows. X and sample_weight as in `fit`, with as many features as the rows before; rows
        that are refused change nothing. After the first rows, the weights of a call may all be 0.
        ValueError for a sketch whose kernel, n_bits, n_hashes, sliding_window or half_life was set
        to another value since; sliding_window_error stays that of the first rows.
        """
        return self._add(X, sample_weight)

    def _add(
        self, X: Rows, sample_weight: Rows | None, all_rows: bool = False, part: bool = False
    ) -> Self:
        """Adds rows; self.

        all_rows: no others are to come, so that a rule must suit them. part: the result is merged
        with others, so that weights may all be 0.
        """
        first = not hasattr(self, "n_samples_seen_")
        n_bits = check_parameters(self)
        streams = not keeps_rows(self.algorithm)
        if not first:
            check_as_earlier(self, self._kde_sketch, n_bits)
        X = as_rows(self, X, first, self.kernel)
        weights = as_weights(sample_weight, len(X), part or not first)
        widths = bandwidths.check(self.bandwidth, X.shape[1], self.kernel)
        if first:
            if isinstance(widths, str) and (streams or all_rows):  # before anything is kept
                bandwidths.check_rows(widths, X, of_unit_size(weights))
            self._begin(random_of(self.random_state).randint(2**31 - 1))
        if streams:
            with core_threads(self.n_jobs):
                self._add_to_sketch(X, weights, widths, n_bits)
        else:
            # Copies: a stream's buffer will be filled again.
            self._kde_rows.append(X.copy())
            self._kde_weights.append(None if weights is None else weights.copy())
            self.n_samples_seen_ = len(X) + (0 if first else self.n_samples_seen_)
            self._kde_method = self._kde_picked = None
        return self

    def _begin(self, seed: int) -> None:
        """As before the first rows."""
        self._kde_seed, self._kde_rows, self._kde_weights = seed, [], []
        self._kde_sketch = self._kde_method = None
        self._kde_picked = self._kde_fitted = None
        self._kde_lock = threading.RLock()  # of the method, which queries may make anew

    def _add_to_sketch(
        self, X: np.ndarray, weights: np.ndarray | None, widths: str | np.ndarray, n_bits: int
    ) -> None:
        sketch = self._kde_sketch
        if sketch is None:
            if isinstance(widths, str):
                widths = self._by_rule(widths, X, of_unit_size(weights), sketch=True)
            centre = np.zeros(X.shape[1])  # the rows to come are not known
            geometry = Geometry(self.kernel, n_bits, centre, widths)
            window = self.sliding_window, self.sliding_window_error
            forgetting = forgetting_of(*window, self.half_life, self.n_hashes, 2**n_bits)
            sketch = Sketch(geometry, n_bits, self.n_hashes, self._kde_seed, forgetting)
        with sketch.changes.alone():
            sketch.add(X, weights)  # first rows that are refused leave nothing behind
            self._kde_sketch = sketch
            self.n_samples_seen_ = sketch.n_rows

    def _by_rule(
        self, rule: str, X: np.ndarray, weights: np.ndarray | None, sketch: bool = False
    ) -> np.ndarray:
        threads = effective_n_jobs(self.n_jobs)
        return bandwidths.rule(rule, self.kernel, X, weights, self._kde_seed, threads, sketch)

    def partial_unfit(self, X: Rows, sample_weight: Rows | None = None) -> Self:
        """Removes rows that were fitted, with their weights; "bucket_sum" only.

        The result is bit for bit the same as if they had never been added. Returns self. X and its
        errors as in `partial_fit`, whatever parameters were set since; ValueError for more rows or
        weight than the sketch holds, in all or in a bucket.
        """
        check_is_fitted(self)
        if self._kde_sketch is None:
            raise ValueError(f"partial_unfit needs algorithm='bucket_sum', got {self.algorithm!r}")
        if self._kde_sketch.forgetting is not None:
            raise ValueError(
                "partial_unfit needs sliding_window=None and half_life=None: a sketch that forgets "
                "removes rows itself"
            )
        X = as_rows(self, X, False, self._kde_sketch.geometry.kernel)
        weights = as_weights(sample_weight, len(X), all_zero=True)
        with core_threads(self.n_jobs), self._kde_sketch.changes.alone():
            self._kde_sketch.add(X, weights, -1)
            self.n_samples_seen_ = self._kde_sketch.n_rows
        return self

    def merge(self, other: LSHKernelDensity) -> Self:
        """Adds other's rows to this estimator's, as if fitted after them; returns self.

        Both must have the same kernel, bandwidth and kind of algorithm; sketches also the same
        integer random_state, because their hash functions must be equal, and the same half_life.
        No thread may change other meanwhile. ValueError for sketches with a sliding window.
        """
        check_is_fitted(self)
        check_mergeable(self, other)
        if self._kde_sketch is not None:
            assert other._kde_sketch is not None
            with self._kde_sketch.changes.alone():
                self._kde_sketch.merge(other._kde_sketch)
                self.n_samples_seen_ = self._kde_sketch.n_rows
            return self
        self._kde_rows = self._kde_rows + other._kde_rows
        self._kde_weights = self._kde_weights + other._kde_weights
        self.n_samples_seen_ += other.n_samples_seen_
        self._kde_method = self._kde_picked = None
        return self

    def tune(self, queries: Rows) -> Self:
        """Selects the method and its settings for queries like these, `(n_queries, n_features)`.

        The pilot runs with 128 of them, evenly spaced, instead of rows of the data. Worthwhile if
        queries differ from the rows; a few hundred are enough. The choice is kept until rows are
        added or `tune` is called again. Nothing else is learnt from them. After `partial_fit` the
        pilot runs only once, for the queries; `fit` would run it for rows first.

        Returns self. ValueError for "bucket_sum", which stores no rows.
        """
        check_is_fitted(self)
        if self._kde_sketch is not None:
            raise ValueError("tune needs the rows, which algorithm='bucket_sum' does not keep")
        with self._kde_lock:
            fitted = None if self._kde_picked is None else self._kde_fitted
            kernel = self.kernel if fitted is None else fitted[0]
            self._make_method(as_queries(self, queries, kernel))
        return self

    def _prepare(self) -> Self:
        """Makes the method that answers queries where there is none since rows came; self."""
        if self._kde_sketch is None and self._kde_method is None:
            with self._kde_lock:
                if self._kde_method is None:  # still
                    self._make_method()
        return self

    def _make_method(self, queries: np.ndarray | None = None) -> None:
        picked, method = self._kde_picked, self._kde_method
        training = self._training() if method is None else method.training
        if picked is None:
            asked, accuracy = self.algorithm, self._accuracy(training.geometry)
        else:
            own = {name: picked[name] for name in Accuracy._fields if name in picked}
            asked, accuracy = picked["asked"], Accuracy(**own)
        with core_threads(self.n_jobs) as threads:
            if picked is None or queries is not None:
                permuted = None if method is None else method.permuted
                options = asked, accuracy, threads, queries, permuted
                method, self._kde_picked = pilot.choose(training, *options)
            else:  # as it was before it was saved
                name = picked["algorithm"]
                method = METHODS[name].restored(picked["methods"][name], training)
        self._kde_method = method  # the last: other threads go on when they see it

    def _training(self) -> Training:
        X, weights = self._training_rows()
        weights = of_unit_size(weights)
        if self._kde_picked is None:
            widths = bandwidths.check(self.bandwidth, X.shape[1], self.kernel)
            if isinstance(widths, str):
                widths = self._by_rule(widths, X, weights)
            self._kde_fitted = self.kernel, check_parameters(self), widths
        assert self._kde_fitted is not None
        return training_of(*self._kde_fitted, X, weights, self._kde_seed)

    @property
    def _method(self) -> Sketch | Method:
        """What answers queries."""
        if "n_samples_seen_" not in vars(self):  # check_is_fitted alone takes longer than a sketch
            check_is_fitted(self)
        if self._kde_sketch is not None:
            self._kde_sketch.changes.check()
            return self._kde_sketch
        self._prepare()
        assert self._kde_method is not None
        return self._kde_method

    def _training_rows(self) -> tuple[np.ndarray, np.ndarray | None]:
        if len(self._kde_rows) > 1:
            given = [w is not None for w in self._kde_weights]
            if any(given):
                parts = zip(self._kde_weights, self._kde_rows, strict=True)
                filled = [np.ones(len(x)) if w is None else w for w, x in parts]
                self._kde_weights = [np.concatenate(filled)]
            else:
                self._kde_weights = [None]
            self._kde_rows = [np.concatenate(self._kde_rows)]
        return self._kde_rows[0], self._kde_weights[0]

    @property
    def report_(self) -> dict[str, Any]:
        """Results of the pilot, and the reason for the choice."""
        name = self.algorithm_
        return self._kde_picked or {"algorithm": name, "reason": "asked for", "methods": {}}

    # ---- queries ----

    @overload
    def score_samples(self, X: torch.Tensor, return_std: Literal[False] = ...) -> torch.Tensor: ...
    @overload
    def score_samples(
        self, X: torch.Tensor, return_std: Literal[True]
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def score_samples(self, X: ArrayLike, return_std: Literal[False] = ...) -> FloatArray: ...
    @overload
    def score_samples(
        self, X: ArrayLike, return_std: Literal[True]
    ) -> tuple[FloatArray, FloatArray]: ...
    @overload
    def score_samples(self, X: Rows, return_std: bool) -> Any: ...
    def score_samples(self, X: Any, return_std: bool = False) -> Any:
        """Log-density of each row of X `(n_samples, n_features)`.

        Returns
        -------
        log_density : array or tensor `(n_samples,)`
            float32 for X of float32 and tensors of 16 bits, else float64. -inf where the estimate
            is <= 0.
        std : array or tensor `(n_samples,)`, with return_std=True
            Standard error of log_density (the relative standard error of the density): 0 where it
            is exact, inf where a sampled log_density is -inf or its density is less than e^-350
            (in float32 e^-88) of the standard error.

        Notes
        -----
        Errors as in `kernel_mean`, and ValueError for the angular kernel unless normalize=False:
        it has no density in R^d. For a torch tensor the results are tensors. With exact algorithms
        ("brute", or rtol=0) the log-density is differentiable in it.
        """
        return_std = checks.boolean("return_std", return_std)
        log_norm = self._log_normalizer(self._method.geometry)
        torch = checks.torch_of(X=X)
        log = self._with_gradient(torch, X, return_std)
        if log is not None:
            return (log - log_norm).to(torch.promote_types(X.dtype, torch.float32))
        estimate, dtype, exact = self._estimate(X, return_std)
        positive = np.maximum(estimate.mean, 0.0)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            results = [np.log(positive) + (estimate.shift - log_norm)]
            if return_std:
                unknown = 0 if exact else np.inf
                results.append(np.where(positive > 0, estimate.stated / positive, unknown))
            results = [x.astype(dtype, copy=False) for x in results]  # below float32: -inf
        return _like(torch, results)

    def score(self, X: Rows, y: object = None) -> float:
        """Total log-density of the rows of X, as in scikit-learn. y is ignored.

        X and errors as in `score_samples`.
        """
        rows: Any = X
        if checks.torch_of(X=X) is not None:
            rows = rows.detach()
        return float(np.sum(np.asarray(self.score_samples(rows)), dtype=np.float64))

    @overload
    def kernel_mean(self, X: torch.Tensor, return_std: Literal[False] = ...) -> torch.Tensor: ...
    @overload
    def kernel_mean(
        self, X: torch.Tensor, return_std: Literal[True]
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def kernel_mean(self, X: ArrayLike, return_std: Literal[False] = ...) -> FloatArray: ...
    @overload
    def kernel_mean(
        self, X: ArrayLike, return_std: Literal[True]
    ) -> tuple[FloatArray, FloatArray]: ...
    @overload
    def kernel_mean(self, X: Rows, return_std: bool) -> Any: ...
    def kernel_mean(self, X: Any, return_std: bool = False) -> Any:
        """Weighted mean of the kernel between each row of X and the rows fitted: unnormalised.

        Returns
        -------
        mean : array or tensor `(n_samples,)`, of the type of `score_samples`
            An unbiased estimate for an algorithm that is asked for by name, but for "hbe", whose
            number of tables is raised until the errors of these tables are small enough: up to 5 %
            too large at an rtol of 0.5, less than 0.5 % at 0.2 (measured). "auto" chooses among
            them by their errors on this sample of the rows, which may bias it by some hundredths of
            its standard error. A sketch of the laplacian kernel may fall below 0. 0 below the least
            number of its type. With exact algorithms it is differentiable in a tensor.
        std : its standard error, with return_std=True
            0 where it is below the least number, too.

        Raises
        ------
        NotFittedError, TypeError, ValueError
            No rows yet; X is not `(n_samples, n_features)` of finite real numbers, with the
            features of the rows fitted; X requires a gradient where there is none: of sampled
            results, and with return_std=True.
        """
        return_std = checks.boolean("return_std", return_std)
        torch = checks.torch_of(X=X)
        log = self._with_gradient(torch, X, return_std)
        if log is not None:
            return log.exp().to(torch.promote_types(X.dtype, torch.float32))
        estimate, dtype, _ = self._estimate(X, return_std)
        results = [np.exp(estimate.shift) * estimate.mean]
        if return_std:
            results.append(estimate.stated_of_means)
        return _like(torch, [x.astype(dtype, copy=False) for x in results])

    def _with_gradient(self, torch: Any, X: Any, return_std: bool) -> Any:
        """log of the kernel mean, a float64 tensor; None where no gradient is asked for."""
        if torch is None or not (X.requires_grad and torch.is_grad_enabled()):
            return None
        if return_std:
            raise ValueError("return_std=True has no gradient: use X.detach()")
        from lshkit.kde import differentiable

        return differentiable.log_mean(self, X)

    def _estimate(self, X: Rows, with_error: bool) -> tuple[Estimate, np.dtype, bool]:
        """An `Estimate`, the dtype that is wanted of it, and whether the method is exact."""
        method = self._method
        X = as_queries(self, X, method.geometry.kernel)
        size = checks.integer("batch_size", self.batch_size, 1)
        firsts = range(0, len(X), size)
        with core_threads(self.n_jobs) as threads:
            parts = [method.estimate(X[i : i + size], threads, with_error) for i in firsts]
        estimate = parts[0] if len(parts) == 1 else Estimate.joined(parts)
        return estimate, X.dtype, method.exact

    def _accuracy(self, geometry: Geometry) -> Accuracy:
        """`Accuracy`; atol is one of the kernel mean there."""
        negligible = 0.0
        if self.atol > 0 and self.rtol > 0:
            angular = geometry.kernel == "angular"  # which has no normaliser
            norm = 0.0 if angular else self._log_normalizer(geometry)
            log = np.log(float(self.atol)) - np.log(float(self.rtol)) + norm
            negligible = float(np.exp(min(log, 690)))
        confidence = None if self.confidence is None else float(self.confidence)
        return Accuracy(float(self.rtol), negligible, confidence, at_risk=negligible)

    def _log_normalizer(self, geometry: Geometry) -> float:
        """log of the integral of the kernel at its bandwidth, or 0 with normalize=False."""
        if not self.normalize:
            return 0.0
        norm = kernels.log_normalizer(geometry.kernel, self.n_features_in_)
        return norm + geometry.log_volume

    def sample(self, n_samples: int = 1, random_state: RandomState = None) -> FloatArray:
        """Random rows `(n_samples, n_features)` from the fitted density, for every kernel.

        ValueError for the angular kernel, which has no density, and for "bucket_sum", which keeps
        no rows.
        """
        check_is_fitted(self)
        most = checks.MOST_BYTES // (8 * self.n_features_in_)
        n_samples = checks.integer("n_samples", n_samples, 1, most)
        if self._kde_sketch is not None:
            raise ValueError("sample needs the rows: algorithm='bucket_sum' does not keep them")
        geometry = self._method.geometry
        if geometry.kernel == "angular":
            raise ValueError("the angular kernel has no density in R^d to sample from")
        X, weights = self._training_rows()
        rng = random_of(random_state)
        u = rng.uniform(size=n_samples)
        if weights is None:
            rows = (u * len(X)).astype(np.int64)
        else:
            steps = np.cumsum(of_unit_size(weights))
            rows = np.searchsorted(steps, u * steps[-1], side="right")
        noise = kernels.draw(geometry.kernel, n_samples, X.shape[1], rng) * geometry.bandwidth
        return (X[rows] + noise).astype(X.dtype)

    # ---- persistence ----

    def save(self, file: File) -> None:
        """Writes the estimator to an .npz file, without pickle.

        file: a path, to which .npz is appended if it has another ending, or a binary file object.
        An existing file is replaced only once the new one is complete, which gets its permissions.
        A RandomState in random_state is saved as None: results stay, another fit would differ.
        """
        check_is_fitted(self)
        persistence.save(self, file)

    @classmethod
    def load(cls, file: File) -> Self:
        """Reads an estimator written by `save`, from the same path or a file object.

        ValueError for a file that is truncated, damaged, of another kind, or of a newer version of
        lshkit: its header is compared with its size before anything else is read.
        """
        return persistence.load(cls, file)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.__sklearn_is_fitted__():
            self._kde_lock = threading.RLock()


def _like(torch: ModuleType | None, results: list[np.ndarray]) -> Any:
    """Arrays, as tensors where torch is given; one alone not in a tuple."""
    if torch is not None:
        results = [torch.from_numpy(x) for x in results]
    return tuple(results) if len(results) > 1 else results[0]
