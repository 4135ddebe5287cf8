"""Files of runs: what is kept, in which order, and which settings are refused."""

import argparse
import importlib
import json
import pathlib

import pytest

from benchmarks import RESULTS
from benchmarks.quality.runs import Runs, parsed

ORDER = {"method": ["b", "a"], "seed": ()}
GIVEN = {("settings", "8", "x"): {"steps": (2, 3)}, ("text",): "Python"}


@pytest.fixture
def runs(tmp_path):
    made = Runs(tmp_path / "new" / "runs.json", ORDER, {"machine": "here", "settings": {}})
    made.check(GIVEN)
    return made


def test_runs_are_kept_in_their_order_and_once(runs):
    for method, seed in (("gone", 0), ("a", 1), ("a", 0), ("b", 10), ("b", 9)):
        assert not runs.has(method=method, seed=seed)
        runs.add({"method": method, "seed": seed, "loss": 1}, GIVEN)
    kept = runs.path.read_text()
    runs.add({"method": "a", "seed": 0, "loss": 2}, GIVEN)  # another process was as fast
    assert runs.has(method="a", seed=0) and runs.path.read_text() == kept
    results = json.loads(kept)
    assert results["machine"] == "here" and results["text"] == "Python"
    assert results["settings"] == {"8": {"x": {"steps": [2, 3]}}}
    shown = [(run["method"], run["seed"]) for run in results["runs"]]
    assert shown == [("b", 9), ("b", 10), ("a", 0), ("a", 1), ("gone", 0)]


def test_other_settings_are_refused(runs):
    runs.add({"method": "a", "seed": 0}, GIVEN)
    runs.check(GIVEN | {("settings", "9", "x"): 1})
    for place, value in ((("settings", "8", "x"), {"steps": [2]}), (("text",), "another")):
        with pytest.raises(SystemExit, match=f"have other settings: {' / '.join(place)}$"):
            runs.check(GIVEN | {place: value})


def test_quick_runs_are_no_results(monkeypatch, capsys):
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS / "some.json")
    monkeypatch.setattr("sys.argv", ["some", "--quick", "--json", "own.json"])
    assert parsed(parser).json.name == "own.json"
    monkeypatch.setattr("sys.argv", ["some", "--quick"])
    with pytest.raises(SystemExit):
        parsed(parser)
    assert "--quick needs its own --json" in capsys.readouterr().err


def test_results_are_in_order():
    for package in ("torch", "tqdm", "matplotlib"):
        pytest.importorskip(package)
    for command, *names in (
        ("conversion", "conversion"),
        ("recall_from_scratch", "recall_from_scratch"),
        ("equal_time.__main__", "equal_time", "equal_time_needle"),
        ("tasks.__main__", "quality_tasks"),
        ("cost.__main__", "quality_cost"),
        ("text.__main__", "text", "text_gpu"),
    ):
        order = importlib.import_module(f"benchmarks.quality.{command}").ORDER
        for name in names:
            made = Runs(RESULTS / f"{name}.json", order, {})
            places = [made.place_of(run) for run in made.load()["runs"]]
            assert places == sorted(set(places)), name
