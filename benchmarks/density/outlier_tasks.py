"""Rows with known outliers: of scikit-learn's bundled data, and made. Features keep their units."""

import numpy as np
from sklearn import datasets


def tasks(seed):
    """Rows `(n, d)` and whether each is an outlier, by name of the data; other rows by seed."""
    rng = np.random.default_rng(seed)
    return dict([*bundled(rng), *made(rng)])


def bundled(rng):
    X, y = datasets.load_breast_cancer(return_X_y=True)
    yield "breast cancer", of_classes(X, y == 1, rng)
    for name, load in (("wine", datasets.load_wine), ("iris", datasets.load_iris)):
        X, y = load(return_X_y=True)
        for k in range(3):
            yield f"{name}, class {k}", of_classes(X, y == k, rng)
    X, y = datasets.load_digits(return_X_y=True)
    for k in range(10):
        yield f"digits, {k} alone", of_classes(X, y == k, rng)
    for k in range(0, 10, 3):
        yield f"digits, all but {k}", of_classes(X, y != k, rng)


def of_classes(X, normal, rng):
    """At most 400 normal rows, and of the others a tenth as many."""
    inliers, outliers = X[normal], X[~normal]
    inliers = inliers[rng.permutation(len(inliers))[:400]]
    count = max(3, len(inliers) // 10)
    return together(inliers, outliers[rng.permutation(len(outliers))[:count]])


def together(inliers, outliers):
    truth = np.r_[np.zeros(len(inliers), bool), np.ones(len(outliers), bool)]
    return np.concatenate([inliers, outliers]).astype(np.float64), truth


def made(rng, n=400, n_out=30):
    widths = rng.uniform(0.3, 2, 6)
    centres, which = rng.uniform(-10, 10, (6, 8)), rng.integers(6, size=n)
    rows = centres[which] + widths[which, None] * rng.normal(size=(n, 8))
    clusters = together(rows, rng.uniform(rows.min(axis=0), rows.max(axis=0), (n_out, 8)))
    yield "clusters, 8", clusters
    yield (
        "clusters in units of 1e-3 to 1e4",
        (clusters[0] * np.geomspace(1e-3, 1e4, 8), clusters[1]),
    )
    far = rng.standard_t(2, (n_out, 6))
    yield "heavy tails, 6", together(rng.standard_t(2, (n, 6)), far + 4 * np.sign(far))
    logs = rng.normal(size=(n, 5)), rng.normal(size=(n_out, 5)) + rng.choice([-3, 3], (n_out, 5))
    yield "lognormal, 5", together(*(np.exp(1.5 * x) for x in logs))
    rows = np.repeat(rng.normal(size=(n // 5, 5)), 5, axis=0)
    yield "rows repeated 5 times, 5", together(rows, 2.0 * rng.normal(size=(n_out, 5)))
    rows = np.round(rng.gamma(2, 3, (n, 10)))
    yield "counts, 10", together(rows, np.round(rng.gamma(2, 6, (n_out, 10))))
    rows = (rng.random((n, 100)) < rng.uniform(0.01, 0.1, 100)).astype(float)
    yield "sparse binary, 100", together(rows, rng.random((n_out, 100)) < 0.12)
    moons, _ = datasets.make_moons(n, noise=0.05, random_state=int(rng.integers(2**31)))
    low, high = moons.min(axis=0) - 0.3, moons.max(axis=0) + 0.3
    yield "moons, 2", together(moons, rng.uniform(low, high, (n_out, 2)))
    rows, outliers = rng.normal(size=(n, 20)), rng.normal(size=(n_out, 20))
    outliers[:, :3] += 3 * rng.choice([-1, 1], (n_out, 3))
    yield "3 of 20 features", together(rows, outliers)
    yield (
        "a tight group, 12",
        together(rng.normal(size=(n, 12)), 5 + 0.3 * rng.normal(size=(20, 12))),
    )
    plane = rng.normal(size=(10, 500))
    rows, outliers = (
        rng.normal(size=(count, 10)) @ plane + noise * rng.normal(size=(count, 500))
        for count, noise in ((n, 0.3), (n_out, 2.0))
    )
    yield "off a plane, 500", together(rows, outliers)
