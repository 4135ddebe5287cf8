"""Kernels that end: where exactly, on rows of grids, many of which lie at one bandwidth."""

import os
import subprocess
import sys

import numpy as np
import pytest
from cases.kde import log_mean
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from sklearn.neighbors import KernelDensity

from lshkit import _C
from lshkit.kde import LSHKernelDensity

COMPACT = "tophat", "epanechnikov", "linear", "cosine"
ROOTS = np.sqrt(np.arange(1, 17))


def counts(rows, queries, bandwidth, weights=None, **options):
    """Weights, which are integers, of the rows within one bandwidth."""
    density = LSHKernelDensity("tophat", bandwidth, normalize=False, **options)
    total = len(rows) if weights is None else weights.sum()
    means = density.fit(rows, sample_weight=weights).kernel_mean(queries.astype(np.float64))
    return whole(means * total)


def whole(found):
    assert np.abs(found - np.rint(found)).max() < 1e-6
    return np.rint(found)


def counts_of_scikit_learn(rows, queries, bandwidth):
    theirs = KernelDensity(kernel="tophat", bandwidth=bandwidth).fit(rows)
    # A query from which nothing is farther than one bandwidth: the normaliser.
    norm = KernelDensity(kernel="tophat", bandwidth=bandwidth).fit(np.zeros((1, rows.shape[1])))
    norm = norm.score_samples(np.zeros((1, rows.shape[1])))
    return whole(len(rows) * np.exp(theirs.score_samples(queries) - norm))


def counts_of_differences(rows, queries, bandwidth, weights=1.0):
    """The rule itself, in float64, with the features in order."""
    widths = np.asarray(bandwidth, np.float64)
    squares = np.zeros((len(queries), len(rows)))
    for c in range(rows.shape[1]):
        difference = queries[:, c, None].astype(np.float64) - rows[:, c].astype(np.float64)
        squares += (difference / widths[c] if widths.ndim else difference) ** 2
    return ((np.sqrt(squares) < (1.0 if widths.ndim else bandwidth)) * weights).sum(axis=1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("d", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("step, offset", [(1, 0), (0.1, 0), (1, 1e6), (0.1, -1e5), (1 / 3, 7)])
def test_counts_are_those_of_scikit_learn(step, offset, d, dtype):
    rng = np.random.default_rng(d)
    rows = (offset + step * rng.integers(0, 4, (700, d))).astype(dtype)
    queries = np.r_[rows[:30], (offset + step * rng.integers(-1, 6, (10, d))).astype(dtype)]
    for bandwidth in [*(step * ROOTS[: 2 * d + 3]), 3 * 0.1, 1.01 * step]:
        got = counts(rows, queries, bandwidth)
        assert np.array_equal(got, counts_of_scikit_learn(rows, queries, bandwidth))
        assert np.array_equal(got[:5], counts(rows, queries[:5], bandwidth))  # from blocks


def test_digits():
    rows = load_digits().data
    queries = rows[::30]
    squares = ((queries[:, None] - rows) ** 2).sum(-1)
    for square in np.unique(squares)[[1, 10, 100, 500, 1000, 2000, 3000]]:
        got = counts(rows, queries, np.sqrt(square))
        assert np.array_equal(got, (squares < square).sum(axis=1))
        assert np.array_equal(got, counts_of_scikit_learn(rows, queries, np.sqrt(square)))


@pytest.mark.parametrize("kernel", COMPACT)
def test_densities_are_zero_where_scikit_learns_are(kernel):
    """Also of the kernels that are continuous there, and with the accuracy of all densities."""
    rng = np.random.default_rng(0)
    for d, step in ((1, 0.1), (2, 1.0), (3, 0.1), (5, 1.0)):
        rows = step * rng.integers(0, 20, (40, d))
        queries = np.r_[rows[:4], step * rng.integers(0, 20, (200, d))]
        for bandwidth in step * np.array([1, np.sqrt(2), 2, 3, 5, np.sqrt(50)]):
            ours = LSHKernelDensity(kernel, bandwidth, normalize=False).fit(rows)
            wanted = log_mean(kernel, queries, rows, bandwidth)
            theirs = KernelDensity(kernel=kernel, bandwidth=bandwidth).fit(rows)
            theirs = theirs.score_samples(queries)
            got = ours.score_samples(queries)
            empty = np.isneginf(wanted)
            assert np.array_equal(np.isneginf(got), empty)
            assert np.array_equal(np.isneginf(theirs), empty)
            assert np.abs(got[~empty] - wanted[~empty]).max() < 3e-6


@pytest.mark.parametrize("kernel", COMPACT[1:])
def test_densities_of_rows_near_the_edge_alone_keep_their_accuracy(kernel):
    """Where the kernel is next to 0, a rounded distance would be all that is seen of it."""
    for gap in (1e-3, 1e-6, 1e-9, 1e-12):
        rows = np.array([[3.0, 4.0, 0.0], [100.0, 50.0, -70.0]])
        queries = np.array([[0.0, 0.0, 0.0], [3.0, 4.0, 1e-9]])
        bandwidth = 5 * (1 + gap)
        got = LSHKernelDensity(kernel, bandwidth, normalize=False).fit(rows).score_samples(queries)
        wanted = log_mean(kernel, queries, rows, bandwidth)
        assert np.abs(got - wanted).max() < 2e-6


def test_a_bandwidth_for_each_feature():
    rng = np.random.default_rng(0)
    for d in (1, 2, 3, 6):
        widths = np.array([3.0, 49.0, 0.1, 7.0, 1.0, 0.3])[:d]
        rows = widths * rng.integers(0, 3, (400, d))
        for part in (1.0, 0.5, 1 / 3, 2.0):
            got = counts(rows, rows[:50], part * widths)
            assert np.array_equal(got, counts_of_differences(rows, rows[:50], part * widths))
    for one in (3.0, 0.3, np.sqrt(5)):  # the same for all is one number
        rows = 0.1 * rng.integers(0, 40, (300, 2))
        got = counts(rows, rows, np.full(2, one))
        assert np.array_equal(got, counts(rows, rows, one))


def test_weights_and_repeated_rows():
    rng = np.random.default_rng(0)
    rows = np.repeat(rng.integers(0, 3, (20, 4)), 50, axis=0).astype(float)
    weights = rng.integers(0, 5, len(rows)).astype(float)
    for bandwidth in ROOTS[:8]:
        got = counts(rows, rows[::50], bandwidth, weights)
        wanted = counts_of_differences(rows, rows[::50], bandwidth, weights)
        assert np.array_equal(got, wanted)
        got = counts(rows, rows[::50], bandwidth)
        assert np.array_equal(got, counts_of_scikit_learn(rows, rows[::50], bandwidth))


@pytest.mark.parametrize("kernel", COMPACT)
def test_far_clusters_and_rows(kernel):
    """Where products lose all distances, differences do not."""
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 3, (300, 3)).astype(float)
    rows[100:200] += 1e9
    rows[200:] -= 1e12
    rows[-1] = 1e25
    for bandwidth in ROOTS[:6]:
        density = LSHKernelDensity(kernel, bandwidth, normalize=False).fit(rows)
        got, wanted = density.score_samples(rows), log_mean(kernel, rows, rows, bandwidth)
        assert np.abs(got - wanted).max() < 2e-6
        if kernel == "tophat":
            expected = counts_of_differences(rows, rows, bandwidth)
            assert np.array_equal(counts(rows, rows, bandwidth), expected)


@pytest.mark.parametrize("kernel", [*COMPACT, "gaussian", "exponential", "laplacian"])
def test_queries_beyond_float64_in_bandwidths(kernel):
    density = LSHKernelDensity(kernel, 0.1).fit(np.eye(3))
    assert np.isneginf(density.score_samples(np.full((2, 3), 1e308))).all()


@pytest.mark.parametrize("power", [-995, -480, 480, 995])
def test_squares_of_the_units_need_not_fit_float64(power):
    rows = np.random.default_rng(0).integers(0, 4, (200, 1)).astype(float)
    unit = 2.0**power
    for steps in (1, 2, 3):
        got = counts(unit * rows, unit * rows[:20], unit * steps)
        assert np.array_equal(got, counts(rows, rows[:20], steps))


def test_threads_batches_and_instruction_sets(tmp_path):
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 3, (9000, 6)).astype(float)
    for kernel in ("tophat", "epanechnikov"):
        density = LSHKernelDensity(kernel, 2.0, normalize=False).fit(rows)
        together = density.kernel_mean(rows[:200])
        for n_jobs, batch_size in ((2, 1024), (3, 7), (1, 64)):
            density.set_params(n_jobs=n_jobs, batch_size=batch_size)
            assert np.array_equal(density.kernel_mean(rows[:200]), together)
    np.save(tmp_path / "rows.npy", rows)
    program = """if True:
        import sys, numpy as np
        from lshkit import _C
        _C.instruction_set()  # one that is refused ends here
        from lshkit.kde import LSHKernelDensity
        rows = np.load(sys.argv[1])
        for of in (rows, 1e9 * rows, rows.astype(np.float32)):
            density = LSHKernelDensity("tophat", of.max(), normalize=False)  # 2
            print(*np.rint(9000 * density.fit(of).kernel_mean(of[:40].astype(float))))
        print(_C.instruction_set())
    """
    found = {}
    for name in {"base", "avx2", "avx512"} & set(_C.instruction_sets.split()):
        command = [sys.executable, "-c", program, str(tmp_path / "rows.npy")]
        env = os.environ | {"LSHKIT_ISA": name}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        if f"LSHKIT_ISA={name} does not run here" in done.stderr:
            continue
        assert done.returncode == 0, done.stderr
        *lines, used = done.stdout.split("\n")[:-1]
        found[used] = lines
    wanted = " ".join(str(float(x)) for x in counts_of_differences(rows, rows[:40], 2.0))
    assert "base" in found
    for lines in found.values():
        assert lines == [wanted] * 3


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_rows(data):
    d = data.draw(st.integers(1, 6))
    step = data.draw(st.sampled_from([1.0, 0.1, 0.3, 1e-3, 12345.678, 1 / 7]))
    offset = step * data.draw(st.sampled_from([0, 0.5, 1e3, -1e6, 1e9]))
    most = data.draw(st.integers(1, 9))
    size = data.draw(st.integers(2, 80))
    seed = data.draw(st.integers(0, 2**31))
    rng = np.random.default_rng(seed)
    steps = rng.integers(0, most, (size, d)) if data.draw(st.booleans()) else rng.random((size, d))
    rows = offset + step * steps
    pair = data.draw(st.integers(1, size - 1))
    one = np.sqrt(sum((rows[0] - rows[pair]) ** 2))  # a distance that there is, or next to it
    towards = data.draw(st.sampled_from([0, one, 1e300]))
    bandwidth = float(np.nextafter(one, towards)) if one > 0 else step
    got = counts(rows, rows, bandwidth)
    assert np.array_equal(got, counts_of_differences(rows, rows, bandwidth))


@pytest.mark.parametrize("kernel", COMPACT)
def test_of_tensors_with_a_gradient_too(kernel):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    for step, d in ((1.0, 3), (0.1, 2), (0.1, 12)):
        rows = step * rng.integers(0, 3, (200, d))
        for bandwidth in (step, step * np.sqrt(2), step * 2, np.linspace(1, 2, d) * step):
            density = LSHKernelDensity(kernel, bandwidth, normalize=False).fit(rows)
            queries = np.r_[rows[:40], rows[:9] + 1.5 * step]
            x = torch.tensor(queries, requires_grad=True)
            scores, plain = (
                density.score_samples(x).detach().numpy(),
                density.score_samples(queries),
            )
            empty = np.isneginf(plain)
            assert (scores[empty] < -1e290).all()
            assert np.abs(scores - plain)[~empty].max(initial=0) < 2e-6


@pytest.mark.parametrize("kernel", COMPACT)
@pytest.mark.parametrize("last_bit", [-1, 0, 1])
def test_of_tensors_a_last_bit_inside_the_edge(kernel, last_bit, monkeypatch):
    """Whichever way a root is rounded: torch's by MKL on Intel is not always the nearest one."""
    torch = pytest.importorskip("torch")
    from lshkit.kde import differentiable

    root = differentiable._root
    monkeypatch.setattr(
        differentiable, "_root", lambda *given: root(*given) * (1 + last_bit * 2.0**-52)
    )
    for square in np.random.default_rng(0).uniform(0.5, 2, 50):
        edge = np.nextafter(np.sqrt(square), 2)
        x = torch.full((1, 8), square, dtype=torch.float64, requires_grad=True)
        log = differentiable._log_compact(x, kernel, edge)
        (gradient,) = torch.autograd.grad(log.sum(), x)
        assert (log > -1e290).all() and log.isfinite().all() and gradient.isfinite().all()
