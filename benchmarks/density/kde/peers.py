"""Kernel density of other packages, and a DEANN built on FAISS, for kde.py."""

import time

import numpy as np
from sklearn.neighbors import KernelDensity

from benchmarks.density.kde.methods import WANTED, Tuned, fastest, validated
from benchmarks.measurement import installed

PACKAGES = {
    "scikit-learn": "scikit-learn",
    "KDEpy": "kdepy",
    "torch-kde": "torch-kde",
    "KeOps": "pykeops",
    "FAISS": "faiss-cpu",
}


def versions():
    """Of the packages compared with; a note for those that are not there."""
    found = installed(*PACKAGES.values())
    return {name: found[package] for name, package in PACKAGES.items()}


def log_normalizer(task):
    """Of the gaussian kernel, with which the peers' densities become kernel means."""
    d = task.rows.shape[1]
    return d * (np.log(task.bandwidth) + 0.5 * np.log(2 * np.pi))


def sklearn_tree(task, algorithm):
    begin = time.perf_counter()
    density = KernelDensity(
        bandwidth=task.bandwidth, algorithm=algorithm, kernel=task.kernel, rtol=WANTED
    ).fit(task.rows)
    build = time.perf_counter() - begin
    # Its normaliser at this kernel and dimension, from one query whose mean is known.
    shift = log_normalizer(task) if task.kernel == "gaussian" else None
    if shift is None:
        one = density.score_samples(task.validation[:1])[0]
        shift = np.log(task.exact_validation[0]) - one

    def estimate(queries):
        return np.exp(density.score_samples(queries) + shift)

    kept = sum(np.asarray(x).nbytes for x in density.tree_.get_arrays())
    return Tuned(estimate, {"rtol": WANTED}, validated(estimate, task, 2), build, kept, 2)


def kdepy(task):
    """Its densities are right up to a factor at best: a constant is fitted to them."""
    from KDEpy import TreeKDE

    begin = time.perf_counter()
    density = TreeKDE(kernel="gaussian", bw=task.bandwidth, norm=2).fit(task.rows.astype(float))
    build = time.perf_counter() - begin

    def plain(queries):
        return np.asarray(density.evaluate(queries.astype(float)))

    with np.errstate(invalid="ignore", divide="ignore"):
        off = np.log(plain(task.validation[:4]) / task.exact_validation[:4]) + log_normalizer(task)
    shift = np.median(off)

    def estimate(queries):
        return np.exp(np.log(plain(queries)) + log_normalizer(task) - shift)

    notes = {"density_is_off_by_e_to_the": float(shift)}
    return Tuned(estimate, {}, validated(estimate, task, 4), build, 0, 4, notes)


def torch_kde(task):
    import torch
    import torchkde

    begin = time.perf_counter()
    rows = torch.from_numpy(task.rows.astype(np.float64))  # in float32 the normaliser underflows
    density = torchkde.KernelDensity(bandwidth=task.bandwidth).fit(rows)
    build = time.perf_counter() - begin

    def estimate(queries):
        log = density.score_samples(torch.from_numpy(queries.astype(np.float64)), batch_size=1)
        return np.exp(log.numpy() + log_normalizer(task))

    return Tuned(estimate, {}, validated(estimate, task, 2), build, 0, 2)


def keops(task):
    import pykeops
    from pykeops.numpy import LazyTensor

    pykeops.set_verbose(False)
    begin = time.perf_counter()
    h = np.float32(task.bandwidth)
    keys = LazyTensor(np.ascontiguousarray(task.rows[None] / h))

    def estimate(queries):
        squares = ((LazyTensor(np.ascontiguousarray(queries[:, None] / h)) - keys) ** 2).sum(-1)
        sums = (-squares / 2).exp().sum(1, backend="CPU")
        return sums[:, 0].astype(np.float64) / len(task.rows)

    estimate(task.validation[:2])
    build = time.perf_counter() - begin  # with compilation, where its cache is empty
    return Tuned(estimate, {}, validated(estimate, task, 32), build, 0, 32)


NEIGHBOURS, PROBES, LISTS = (16, 64, 256), (1, 4, 16), 256


class Deann:
    """Near rows exactly, by a FAISS index with inverted lists; the others by a shared sample.

    Karppa, Aumueller and Pagh 2022 (DEANN): with the rows permuted (their DEANNP), k neighbours of
    `n_probes` lists and n_samples of the other rows.
    """

    def __init__(self, plain):
        import faiss

        faiss.omp_set_num_threads(1)
        self.plain = plain
        begin = time.perf_counter()
        d = plain.X.shape[1]
        self.quantizer = faiss.IndexFlatL2(d)
        self.index = faiss.IndexIVFFlat(self.quantizer, d, min(LISTS, len(plain.X) // 40))
        self.index.cp.niter = 10
        self.index.train(plain.X)
        self.index.add(plain.X)
        self.build = time.perf_counter() - begin + plain.build
        self.bytes = plain.bytes + plain.X.nbytes + 8 * len(plain.X)

    def near(self, queries, k, n_probes):
        self.index.nprobe = n_probes
        squares, found = self.index.search(queries, k)
        terms = self.plain.kernel.of_squares(squares).astype(np.float64)
        terms[found < 0] = 0
        return terms, found

    def combined(self, terms, found, sums, size):
        n = len(self.plain.X)
        counted = found >= 0
        inside = counted & (found < size)
        others = np.maximum(size - inside.sum(axis=1), 1)
        far = np.maximum(sums - (terms * inside).sum(axis=1), 0) / others
        return (terms.sum(axis=1) + far * (n - counted.sum(axis=1))) / n

    def tuned(self, task):
        plain, found = self.plain, []
        queries = plain.kernel.rows(task.validation)
        for k in NEIGHBOURS:
            for n_probes in PROBES:
                terms, near = self.near(queries, k, n_probes)
                estimates = np.stack(
                    [
                        self.combined(terms, near, sums, size)
                        for sums, size in zip(plain.first_sums.T, plain.sizes, strict=True)
                    ],
                    axis=1,
                )
                size, error = plain.smallest(estimates, task)
                if size is not None:
                    found.append(self.setting(k, n_probes, size, error))
        return fastest(found, task)

    def setting(self, k, n_probes, size, error):
        def estimate(queries):
            queries = self.plain.kernel.rows(queries)
            terms, near = self.near(queries, k, n_probes)
            return self.combined(terms, near, self.plain.sums(queries, size), size)

        settings = {"n_neighbors": k, "n_probes": n_probes, "n_samples": size}
        return Tuned(estimate, settings, error, self.build, self.bytes)
