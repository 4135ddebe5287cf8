"""Files of runs: what is kept, in which order, and which settings are refused."""

import argparse
import importlib
import json
import pathlib
import shutil

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
        with pytest.raises(SystemExit, match="have other settings"):  # another process was first
            runs.add({"method": "b", "seed": 0}, GIVEN | {place: value})
    assert not runs.has(method="b")


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


COMMANDS = {
    "conversion": ["conversion"],
    "recall_from_scratch": ["recall_from_scratch"],
    "equal_time.__main__": ["equal_time", "equal_time_needle"],
    "tasks.__main__": ["quality_tasks"],
    "cost.__main__": ["quality_cost"],
    "text.__main__": ["text", "text_gpu"],
}


def module_of(command):
    for package in ("torch", "tqdm", "matplotlib"):
        pytest.importorskip(package)
    return importlib.import_module(f"benchmarks.quality.{command}")


@pytest.mark.parametrize("command", COMMANDS)
def test_results_are_in_order(command):
    for name in COMMANDS[command]:
        made = Runs(RESULTS / f"{name}.json", module_of(command).ORDER, {})
        places = [made.place_of(run) for run in made.load()["runs"]]
        assert places == sorted(set(places)), name


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_check_their_file_and_make_no_run_again(command, monkeypatch, tmp_path):
    module, checked = module_of(command), []
    path = tmp_path / "runs.json"
    shutil.copy(RESULTS / f"{COMMANDS[command][0]}.json", path)
    options = [] if command.startswith("recall") else ["--picture", str(tmp_path / "runs.png")]
    options += ["--resume"] if command.startswith("cost") else []
    monkeypatch.setattr(Runs, "check", lambda self, given: checked.append(given))
    monkeypatch.setattr(Runs, "has", lambda self, **wanted: True)
    monkeypatch.setattr(Runs, "add", lambda self, run, *_, **__: pytest.fail(f"made again: {run}"))
    monkeypatch.setattr("sys.argv", [command, "--json", str(path), *options])
    module.main()
    assert checked


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "cost.__main__"])
def test_commands_write_quick_runs_elsewhere(command, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [command, "--quick"])
    with pytest.raises(SystemExit):
        module_of(command).main()
    assert "--quick" in capsys.readouterr().err
