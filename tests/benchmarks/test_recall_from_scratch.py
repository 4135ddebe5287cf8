"""Recall without a start that knows the task: the model, the runs and their table."""

import json

import pytest
from cases.commands import ROOT, rows_of, run

torch = pytest.importorskip("torch")
pytest.importorskip("tqdm")

from benchmarks import RESULTS  # noqa: E402
from benchmarks.encoder import Encoder  # noqa: E402
from benchmarks.quality import recall_from_scratch as command  # noqa: E402

MODULE = "benchmarks.quality.recall_from_scratch"


def model_of(method, task):
    torch.manual_seed(0)
    sizes = task.n_tokens, task.n_answers, task.length, 16, 32, 2, 2
    options = {"has_positions": False, "conv_width": command.CONV_WIDTH}
    return Encoder(command.METHODS[method], *sizes, **options).eval()


@pytest.mark.parametrize("method", ["softmax", "YOSO, 8 bits", "convolutions only"])
def test_the_convolutions_do_not_reach_the_pairs(method):
    """What stands before the gap is changed: answers change by attention alone."""
    task = command.STAGES[0].task()
    batch = task.training(2, torch.Generator().manual_seed(0))
    model = model_of(method, task)
    tokens = batch.tokens.clone()
    tokens[:, : 2 * task.n_pairs] = 1
    with torch.no_grad():
        before, after = model(batch), model(batch._replace(tokens=tokens))
    assert torch.equal(before, after) == (method == "convolutions only")


def test_a_convolution_sees_what_came_before_alone():
    task = command.STAGES[0].task()
    model = model_of("convolutions only", task)
    batch = task.training(1, torch.Generator().manual_seed(0))._replace(
        asked=torch.ones(1, task.length, dtype=torch.bool)
    )
    tokens = batch.tokens.clone()
    tokens[:, 20] = tokens[:, 20] % 3 + 1
    with torch.no_grad():
        changed = (model(batch) != model(batch._replace(tokens=tokens))).any(-1).nonzero()
    reach = command.LAYERS * (command.CONV_WIDTH - 1)
    assert changed.flatten().tolist() == list(range(20, 21 + reach))
    assert reach < command.GAP


def test_the_best_rate_is_the_most_accurate_or_the_first_to_end():
    def results(*runs):
        names = ("lr", "accuracy", "steps")
        return {
            "runs": [{"method": "a", "seed": 0} | dict(zip(names, r, strict=True)) for r in runs]
        }

    assert command.best_rate(results((1e-3, 0.5, 9), (1e-2, 0.9, 10)), "a") == 1e-2
    assert command.best_rate(results((1e-3, 0.9991, 9), (1e-2, 0.9993, 10)), "a") == 1e-3


def test_an_exact_gradient_has_no_noise(monkeypatch):
    exact = "YOSO-E, 8 bits"
    monkeypatch.setattr(command, "EXACT", {exact: exact, "YOSO, 12 bits": "YOSO-E, 12 bits"})
    made = command.noise(draws=2)["methods"]
    assert made[exact]["along"] == pytest.approx(1) and made[exact]["empty"] == 0
    assert made[exact]["deviation"] == pytest.approx(0, abs=1e-6)
    assert made["YOSO, 12 bits"]["deviation"] > 0.05 and made["YOSO, 12 bits"]["empty"] > 0.2


def test_the_best_rate_of_each_method_has_all_seeds(tmp_path):
    results = tmp_path / "runs.json"
    names = ["softmax", "YOSO, 8 bits, then 12"]
    options = ("--quick", "--json", results, "--rates", 1e-3, 1e-2, "--seeds", 2)
    done = run(MODULE, *options, "--methods", *names)
    assert done.returncode == 0, done.stderr
    rows = rows_of(done.stdout)[2:]
    assert [row[0] for row in rows] == names and all(row[4] == "2" for row in rows)
    runs = json.loads(results.read_text())["runs"]
    assert len(runs) == 2 * (2 + 1)
    assert all(made["steps"] == 4 and 0 <= made["accuracy"] < 0.5 for made in runs)


def test_the_results_are_of_this_setting():
    results = json.loads((RESULTS / "recall_from_scratch.json").read_text())
    assert results["setting"] == command.described(command.STEPS)
    assert results["noise"]["draws"] == command.DRAWS
    assert results["noise"]["methods"].keys() == command.EXACT.keys()
    for made in results["runs"]:
        assert made["method"] in command.METHODS
        assert made["accuracy"] >= command.ENOUGH or made["steps"] == command.STEPS


def test_documented_tables_are_those_of_the_results():
    results = json.loads((RESULTS / "recall_from_scratch.json").read_text())
    assert command.table(results) in (ROOT / "docs/quality.md").read_text()
    assert command.noise_table(results["noise"]) in (ROOT / "docs/research.md").read_text()
