"""Sums of kernels and of exponentials over rows."""

import numpy as np


def partition_sums(
    queries: np.ndarray,
    rows: np.ndarray,
    bias: np.ndarray | None,
    row_codes: np.ndarray,
    probes: np.ndarray,
    min_count: int,
    sample: np.ndarray,
) -> np.ndarray:
    """Sums of exp(query . row + bias) over near rows, and over sampled rows that are not near.

    A row is near when its codes `(n, n_hashes)` are among the query's probes
    `(n_q, n_hashes, n_probes)` in min_count hashes. Returns, `(n_q, 6)` in float64: the largest of
    these exponents, the two sums relative to it, the sum of the squares of the second's terms, and
    both numbers of rows.
    """
    logits = np.asarray(queries, np.float64) @ np.asarray(rows, np.float64).T
    logits = logits if bias is None else logits + bias
    met = [(row_codes[:, :, None] == p[None]).any(2).sum(1) >= min_count for p in probes]
    out = np.zeros((len(logits), 6))
    for i, (line, near) in enumerate(zip(logits, met, strict=True)):
        far = np.zeros(len(near), bool)
        far[sample] = True
        far &= ~near
        largest = line[near | far].max(initial=-np.inf)
        near_terms, far_terms = np.exp(line[near] - largest), np.exp(line[far] - largest)
        sums = near_terms.sum(), far_terms.sum(), (far_terms**2).sum()
        out[i] = largest, *sums, near.sum(), far.sum()
    return out


def log_kernel(
    kernel: str,
    queries: np.ndarray,
    rows: np.ndarray,
    bandwidth: float | np.ndarray = 1.0,
    n_bits: int = 8,
) -> np.ndarray:
    """log of the density kernels of lshkit.kde for all pairs `(n_q, n)`; -inf where one is 0."""
    queries, rows = (np.asarray(x, np.float64) for x in (queries, rows))
    difference = queries[:, None] - rows
    if kernel == "laplacian":
        return -np.abs(difference / bandwidth).sum(-1)
    if kernel == "angular":
        # At most 1 before they are squared: norms of 1e160 or 1e-200 are no exception.
        unit = [x / np.abs(x).max(axis=1, keepdims=True) for x in (queries, rows)]
        unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in unit]
        half = np.linalg.norm(unit[0][:, None] - unit[1], axis=-1) / 2
        angle = 2 * np.arcsin(np.minimum(half, 1))
        with np.errstate(divide="ignore"):
            return n_bits * np.log(np.maximum(1 - angle / np.pi, 0))
    # Nothing is divided by one bandwidth for all features, so that its distance is not rounded.
    edge = bandwidth if np.ndim(bandwidth) == 0 else 1.0
    difference = difference if np.ndim(bandwidth) == 0 else difference / bandwidth
    distance = np.sqrt(np.cumsum(difference**2, axis=-1)[..., -1])  # the features in order
    r = distance / edge
    if kernel == "gaussian":
        return -0.5 * r**2
    if kernel == "exponential":
        return -r
    values = {
        "tophat": np.ones_like(r),
        "epanechnikov": 1 - distance**2 / edge**2,
        "linear": 1 - r,
        "cosine": np.cos(np.pi / 2 * distance / edge),
    }[kernel]
    with np.errstate(divide="ignore", invalid="ignore"):
        inside = distance < edge
        return np.where(inside, np.log(np.where(inside, values, 1)), -np.inf)


def kernel_sums(
    kernel: str,
    queries: np.ndarray,
    rows: np.ndarray,
    bandwidth: float | np.ndarray = 1.0,
    n_bits: int = 8,
    weights: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Sums over the rows of weight * k, and of its square, for each query: two `(n_q,)` arrays."""
    values = np.exp(log_kernel(kernel, queries, rows, bandwidth, n_bits))
    terms = values if weights is None else values * weights
    return terms.sum(axis=1), (terms**2).sum(axis=1)


def leave_one_out(
    kernel: str,
    rows: np.ndarray,
    bandwidth: float | np.ndarray = 1.0,
    weights: np.ndarray | None = None,
) -> np.ndarray:
    """log of the mean of the other rows' kernels at every row, `(n,)`: -inf where none reaches it.

    log sum over j != i of w_j k(x_i, x_j) - log (W - w_i), where W is the sum of the weights. Rows
    equal to row i count among the others: `likelihood_curve` leaves those out too.
    """
    weights = np.ones(len(rows)) if weights is None else np.asarray(weights, np.float64)
    logs = log_kernel(kernel, rows, rows, bandwidth)
    np.fill_diagonal(logs, -np.inf)
    total = np.logaddexp.reduce(logs + np.log(weights), axis=1)
    return total - np.log(weights.sum() - weights)
