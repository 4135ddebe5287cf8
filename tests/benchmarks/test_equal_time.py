"""Recall at equal time: schedules, the command, and what it reports."""

import json

import pytest
from cases.commands import PNG_SIGNATURE, ROOT, rows_of, run

torch = pytest.importorskip("torch")
pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

from benchmarks import RESULTS  # noqa: E402
from benchmarks.quality.equal_time import __main__ as command  # noqa: E402
from benchmarks.quality.equal_time import report  # noqa: E402
from benchmarks.quality.equal_time.methods import METHODS, SCHEDULES  # noqa: E402

MODULE = "benchmarks.quality.equal_time"
ALL = {(task, length) for task, lengths in command.SETTINGS.items() for length in lengths}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_last_to_the_end_and_have_a_task_at_each_length(name):
    ends = [stage.until for stage in SCHEDULES[name]]
    assert ends == sorted(ends) and ends[-1] == 1
    for kind, length in ALL - {("recall", 2048), ("needle", 4096)}:
        whole = command.task_of(kind, length, length)
        for stage in SCHEDULES[name]:
            task = command.task_of(kind, int(stage.length * length), length)
            assert task.n_tokens == whole.n_tokens
            batch = task.training(stage.batch_size, torch.Generator().manual_seed(0))
            assert batch.tokens.shape == (stage.batch_size, int(stage.length * length))
            answers = task.n_needles if kind == "needle" else task.n_pairs
            assert len(batch.answers) == stage.batch_size * answers


@pytest.mark.parametrize("task", command.SETTINGS)
def test_every_run_is_kept_and_shown(tmp_path, task):
    picture, results = tmp_path / "curves.png", tmp_path / "runs.json"
    options = ("--task", task, "--quick", "--json", results, "--picture", picture, "--seeds", 0)
    names = ("YOSO, 12 bits", "window only")
    schedules = ("plain", "1/8, then full") if task == "recall" else ("plain",)
    done = run(MODULE, *options, "--methods", *names, "--schedules", *schedules)
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(PNG_SIGNATURE)
    shown = [(row[0], row[1].removesuffix(" (best)")) for row in rows_of(done.stdout)[2:]]
    assert shown == [(name, s) for name in names for s in schedules]
    runs = json.loads(results.read_text())["runs"]
    assert len(runs) == len(shown)
    for made in runs:
        assert made["seconds"] >= 1 and made["steps"] >= 1 and 0 <= made["accuracy"] < 0.5
        assert 1 <= len(made["curve"]) <= command.CURVE
        assert made["curve"] == sorted(made["curve"], key=lambda point: point["seconds"])


def test_the_best_schedule_is_the_most_accurate_or_the_first_to_end():
    def runs(accuracy, seconds):
        return [{"accuracy": accuracy, "seconds": seconds}]

    assert report.best_schedule({"a": runs(0.5, 9), "b": runs(0.9, 10)}) == "b"
    assert report.best_schedule({"a": runs(0.998, 9), "b": runs(0.999, 10)}) == "a"


def test_labels_do_not_hide_each_other():
    places = report.label_places({"a": 99.9, "b": 99.8, "c": 99.7, "d": 3.0, "e": 2.0})
    heights = [places[name] for name in "abcde"]
    assert heights == sorted(heights, reverse=True) and max(heights) <= 101
    assert min(x - y for x, y in zip(heights, heights[1:], strict=False)) > 5


def test_times_of_one_cpu_are_not_mixed_with_those_of_another():
    results = json.loads((RESULTS / "equal_time.json").read_text())
    own = [run for run in results["runs"] if run["length"] == 65536]
    assert own
    by_cpu = [report.groups(results, 65536, cpu) for cpu in report.cpus(results, 65536)]
    groups = [runs for found in by_cpu for of in found.values() for runs in of.values()]
    assert sum(map(len, groups)) == len(own)
    assert report.tables(results).count("65536 tokens") == len(by_cpu)


def test_a_task_has_its_lengths():
    done = run(MODULE, "--task", "needle", "--length", 65536, "--tables")
    assert done.returncode == 2 and "--length: needle has" in done.stderr


@pytest.mark.parametrize("task", command.SETTINGS)
def test_the_results_are_of_these_settings(task):
    results = json.loads((RESULTS / f"{command.FILES[task]}.json").read_text())
    settings = command.SETTINGS[task]
    for length, setting in results["settings"].items():
        assert setting == command.described(task, int(length), settings[int(length)])
    for made in results["runs"]:
        assert made["method"] in METHODS and made["schedule"] in SCHEDULES
        stopped = made["curve"][-1]["accuracy"] >= command.ENOUGH
        assert stopped or made["seconds"] >= settings[made["length"]].seconds


def test_the_documented_needles_are_those_of_the_results():
    results = json.loads((RESULTS / "equal_time_needle.json").read_text())
    page = (ROOT / "docs/equal_time.md").read_text()
    assert all(report.table(results, 16384, cpu) in page for cpu in report.cpus(results, 16384))
