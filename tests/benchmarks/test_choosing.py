"""The benchmark and the figures behind docs/choosing.md."""

import importlib.util
import json

import pytest
from cases.commands import ROOT, run


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    pytest.importorskip("torch")
    path = tmp_path_factory.mktemp("choosing") / "choosing.json"
    done = run("benchmarks.quality.choosing", "--quick", "--json", path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("|--") >= 4
    return json.loads(path.read_text())


def test_error_is_the_formula(results):
    for data, found in results["errors"].items():
        for of in found["hard"]["8"].values():
            # The formula is of independent values and a ratio of expectations.
            assert of["measured"] == pytest.approx(of["formula"], rel=0.1), data


def test_soft_kernels_fall_with_the_angle(results):
    for curve in results["kernels"]["curves"].values():
        assert 0 <= curve[0] < curve[12] < curve[-1] <= 1


def test_figures_are_drawn(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("figures", ROOT / "docs" / "figures.py")
    figures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figures)
    monkeypatch.setattr(figures, "IMAGES", tmp_path)
    for draw in (figures.front_page, figures.kernels, figures.errors, figures.soft):
        draw()
    drawn = {path.name for path in tmp_path.iterdir()}
    names = "collisions", "choosing_kernels", "choosing_errors", "choosing_soft"
    assert drawn == {f"{name}.png" for name in names}
