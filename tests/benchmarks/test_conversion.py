"""A model trained with softmax under another attention: the runs and their table."""

import json

import pytest
from cases.commands import ROOT, rows_of, run

torch = pytest.importorskip("torch")
pytest.importorskip("tqdm")

from benchmarks import RESULTS  # noqa: E402
from benchmarks.quality import conversion as command  # noqa: E402
from benchmarks.quality.tasks import MaskedWords  # noqa: E402

MODULE = "benchmarks.quality.conversion"


def test_all_weights_are_those_of_the_softmax_model():
    task = MaskedWords(length=32)
    torch.manual_seed(0)
    weights = command.encoder(task, "softmax").state_dict()
    batch = task.training(2, torch.Generator().manual_seed(0))
    outputs = {}
    for method in command.METHODS:
        torch.manual_seed(1)
        model = command.encoder(task, method).eval()
        assert not torch.equal(model.state_dict()["embedding.weight"], weights["embedding.weight"])
        model.load_state_dict(weights)
        with torch.no_grad():
            outputs[method] = model(batch)
    softmax = outputs.pop("softmax")
    assert all(not torch.equal(out, softmax) for out in outputs.values())


def test_every_run_is_kept_and_shown(tmp_path):
    results, picture = tmp_path / "runs.json", tmp_path / "picture.png"
    names = ["softmax", "YOSO, 12 bits, sum"]
    options = ("--quick", "--json", results, "--picture", picture, "--methods", *names)
    done = run(MODULE, *options, "--seeds", 0, 3)
    assert done.returncode == 0, done.stderr
    assert [row[0] for row in rows_of(done.stdout)[2:]] == names and picture.stat().st_size > 1000
    runs = json.loads(results.read_text())["runs"]
    assert [(made["method"], made["seed"]) for made in runs] == [
        (m, s) for m in names for s in (0, 3)
    ]
    assert all(list(one["after"]) == ["0", "1", "2"] for one in runs)


def test_documented_table_is_that_of_the_results():
    results = json.loads((RESULTS / "conversion.json").read_text())
    task = MaskedWords(length=command.LENGTH)
    assert results["setting"] == command.described(task, command.STEPS, command.AFTER)
    assert command.table(results) in (ROOT / "docs/quality.md").read_text()
