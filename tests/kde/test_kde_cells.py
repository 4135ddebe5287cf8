"""Rows in cells: a partition by the nearest centre, and sums over some cells of some rows."""

import numpy as np
import pytest
from cases.kde import clustered

from lshkit.kde import pilot
from lshkit.kde.cells import MOST_CELLS, Cells, count_of
from lshkit.kde.geometry import Geometry
from lshkit.kde.method import Accuracy, Tuned
from lshkit.kde.training import PermutedRows, Training


def cells_of(kernel="gaussian", weighted=True, threads=1):
    rows, queries = clustered(1500, 6, 20, scale=0.3, seed=2, n_queries=9)
    weights = np.random.default_rng(1).uniform(size=len(rows)) if weighted else None
    geometry = Geometry(kernel, 5, rows.mean(axis=0), np.ones(6))
    training = Training(rows, weights, geometry, 3)
    return Cells(PermutedRows(training), threads), geometry.scale(queries)


def test_number_of_cells():
    assert [count_of(n) for n in (1, 3, 100, 1500, 10**5, 10**7)] == [1, 3, 32, 128, 1024, 2048]
    assert count_of(2**40) == MOST_CELLS


@pytest.mark.parametrize("kernel", ["gaussian", "angular"])
def test_each_row_is_in_the_cell_of_its_nearest_centre(kernel):
    cells, _ = cells_of(kernel)
    rows = cells.permuted.rows.astype(np.float64)
    assert np.array_equal(np.sort(cells.order), np.arange(len(rows)))
    centres = cells.centres.transpose(0, 2, 1).reshape(-1, 6)[: cells.n_cells]
    distances = np.linalg.norm(rows[:, None] - centres, axis=2)
    own = np.repeat(np.arange(cells.n_cells), cells.counts)
    assert (distances[cells.order, own] <= distances[cells.order].min(axis=1) + 1e-5).all()
    for cell in range(cells.n_cells):  # ascending, as the core searches them
        assert (np.diff(cells.order[cells.indptr[cell] : cells.indptr[cell + 1]]) > 0).all()


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("kernel", ["gaussian", "exponential", "laplacian", "angular"])
def test_sums_are_those_of_the_rows_in_the_cells(kernel, weighted):
    cells, queries = cells_of(kernel, weighted)
    permuted = cells.permuted
    for first, last in ((0, len(permuted)), (300, 1100), (7, 64), (0, 0)):
        probes = cells.nearest(queries, cells.n_cells, 1)
        wanted = permuted.sums(queries, first, last, 1)
        for sums_of in (cells.sums, cells.few_sums):
            found, count = sums_of(queries, probes, 1, first, last)
            assert (count == last - first).all()
            assert np.array_equal(np.isneginf(found.log()), np.full(len(queries), first == last))
            if first < last:
                np.testing.assert_allclose(found.log(), wanted.log(), atol=2e-3)
        some, n_some = cells.sums(queries, probes[:, :3], 1, first, last)
        few, n_few = cells.few_sums(queries, probes[:, :3], 1, first, last)
        assert np.array_equal(n_some, n_few)
        np.testing.assert_allclose(some.log(), few.log(), atol=2e-3)


def test_memory_counts_the_weights_too():
    weighted, _ = cells_of()
    uniform, _ = cells_of(weighted=False)
    kept = weighted.weights.nbytes + weighted.permuted.weights.nbytes
    assert weighted.nbytes - uniform.nbytes == kept > 0


@pytest.mark.parametrize(
    ("outcomes", "chosen", "kept"),
    [
        ([(True, 0.3, 1.0)], 0, True),
        ([(False, 0.1, 1.0), (True, 0.3, 1.0)], 1, True),
        ([(True, 0.3, 2.0), (True, 0.4, 1.0)], 1, True),  # accurate, but states too much
        ([(x != 0.1, x, 2.0) for x in (0.3, 0.1, 0.2, 0.3, 0.4)], 2, True),
        ([(False, x, 3.0) for x in (9.0, 7.0, 5.0, 6.0, 8.0)], 2, False),
        # Of densities below float64: their squares are infinite, and then all are as good.
        ([(False, x, 3.0) for x in (1e200, np.inf, 1e155, 1e100, 1e300)], 3, False),
    ],
)
def test_a_method_that_misses_is_tuned_again(monkeypatch, outcomes, chosen, kept):
    """Up to four times; outcomes: accurate, the median stated error, and over those observed."""
    asked, left, made = [], list(enumerate(outcomes)), [Tuned({"cost": 10.0}, object)]

    class Again:
        @staticmethod
        def tune(pilot, rtol):
            asked.append(rtol)
            made.append(Tuned({"cost": 10.0}, object))
            return made[-1]

    class Pilot:
        population = 1000

    def calibrate(trial, *_):
        i, outcome = left.pop(0)
        assert trial is made[i]
        return i, *outcome

    monkeypatch.setattr(pilot, "METHODS", {"again": Again})
    monkeypatch.setattr(pilot, "calibrate", calibrate)
    tuned = {"again": made[0]}
    method, found, _ = pilot._calibrated("again", tuned, Pilot(), None, Accuracy(0.1))
    assert found is kept and method == chosen and tuned["again"] is made[chosen] and not left
    assert np.allclose(asked, 0.1 * np.sqrt(0.5) ** np.arange(1, len(outcomes)))
