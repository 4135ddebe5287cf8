"""The benchmark of loss by steps and seconds trains every method, resumes and reports."""

import json

import pytest
from cases.commands import PNG_SIGNATURE, needs_example_packages, run

pytest.importorskip("torch")


def run_quality(*options, folder, text):
    small = ("--length", 32, "--batch-size", 1, "--embed-dim", 16, "--heads", 2, "--layers", 1)
    few = ("--seeds", 0, "--evaluations", 2, "--eval-batches", 1, "--text", text)
    files = ("--json", folder / "new" / "quality.json", "--picture", folder / "new" / "quality.png")
    return run("benchmarks.quality.cost", *small, *few, *files, *options)


def test_quality_benchmark_runs_every_method_and_resumes(tmp_path, text):
    needs_example_packages()
    done = run_quality("--steps", 2, folder=tmp_path, text=text)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "new" / "quality.json"
    results = json.loads(path.read_text())
    methods = [run["method"] for run in results["runs"]]
    assert len(methods) == len(set(methods)) == 11
    assert {"softmax", "YOSO-E", "lower_bound", "no attention"} <= set(methods)
    for result in results["runs"]:
        assert result["steps"] == [0, 1, 2]
        assert result["seconds"] == sorted(result["seconds"])
        assert all(0 < loss < 10 for loss in result["losses"])
        assert f"| {result['method']} | {result['losses'][-1]:.3f} |" in done.stdout
    assert path.with_name("quality.png").read_bytes().startswith(PNG_SIGNATURE)

    refused = run_quality("--steps", 2, folder=tmp_path, text=text)
    assert refused.returncode == 2 and "--resume" in refused.stderr.splitlines()[-1]
    other = run_quality("--steps", 2, "--resume", "--lr", 1, folder=tmp_path, text=text)
    assert other.returncode != 0 and "other settings" in other.stderr.splitlines()[-1]

    read = run_quality("--tables", folder=tmp_path, text=text)
    assert read.returncode == 0 and set(read.stdout.splitlines()) <= set(done.stdout.splitlines())

    timed = ("--methods", "softmax", "--seconds", 0.01, "--resume")
    done = run_quality(*timed, folder=tmp_path, text=text)
    assert done.returncode == 0, done.stderr
    added = json.loads(path.read_text())["runs"]
    assert len(added) == 12 and all(run in added for run in results["runs"])
    assert added[0]["budget"] == "0.01 s" and added[0]["seconds"][-1] >= 0.01
    assert "| loss after 0.01 s |" in done.stdout and "| loss after 2 steps |" in done.stdout
