"""The papers' figures and tables are made from the command line and leave results."""

import json

import pytest
from cases.commands import PNG_SIGNATURE, needs_example_packages, rows_of, run

torch = pytest.importorskip("torch")


def test_figures_are_drawn_and_their_numbers_kept(tmp_path):
    needs_example_packages()
    path = tmp_path / "figures.json"
    files = ("--json", path, "--pictures", tmp_path, "--models", tmp_path / "models")
    done = run("benchmarks.papers.figures", "--quick", *files)
    assert done.returncode == 0, done.stderr
    results = json.loads(path.read_text())
    names = (
        "collision_probability",
        "sphere",
        "attention_matrices",
        "error_with_length",
        "hashes_at_inference",
    )
    assert results.keys() == set(names)
    for name in names:
        picture = tmp_path / f"figure_{name}.png"
        assert picture.read_bytes().startswith(PNG_SIGNATURE)
    assert done.stdout.count("written: ") == len(names)

    weights = results["collision_probability"]
    for name in ("collision probability", "derivative of collision"):
        assert weights["measured"][name] == pytest.approx(weights["formula"][name], rel=1e-3)
    errors = results["error_with_length"]["errors"]["trained"]["radians"]
    for of_length in errors.values():  # more hashes, less error
        assert 0 < of_length["16"] < of_length["8"] < 1.6
    losses = results["hashes_at_inference"]
    assert losses["losses"].keys() == {"YOSO-8", "YOSO-32", "YOSO-E"}
    assert losses["controls"].keys() == {"softmax", "convolution only", "no attention"}


def test_efficiency_gives_time_and_memory_of_each_method(tmp_path):
    needs_example_packages()
    path = tmp_path / "new" / "efficiency.json"
    picture = tmp_path / "new" / "efficiency.png"
    methods = ("softmax", "YOSO-32", "*YOSO-16", "no attention")
    options = ("--quick", "--threads", 1, "--processes", 1, "--methods", *methods)
    done = run("benchmarks.papers.efficiency", *options, "--json", path, "--picture", picture)
    assert done.returncode == 0, done.stderr
    results = json.loads(path.read_text())
    for of_length in results["times"]["1"].values():
        assert of_length["seconds"].keys() == set(methods)
        assert min(of_length["seconds"].values()) > 0
    for n, of_length in results["bytes"].items():
        assert of_length.keys() == set(methods)
        # At least the feed-forward layers' hidden activations of six layers, which all keep.
        assert min(of_length.values()) > 6 * int(n) * 1024 * 4
    assert "By YOSO-32 at n = 128" in done.stdout
    assert picture.read_bytes().startswith(PNG_SIGNATURE)


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        ("efficiency", ("--lengths", "10"), "--lengths must be at least 64"),
        ("figures", ("figure_2",), "NAME must be one of collision_probability"),
    ],
)
def test_bad_options_are_refused_by_name(script, options, message, refusal):
    needs_example_packages()
    assert message in refusal(f"benchmarks.papers.{script}", *options)


def test_bert_lsh_counts_as_the_paper(tmp_path):
    results = tmp_path / "results.json"
    options = ("--quick", "--seconds", 0.01, "--json", results)
    done = run("benchmarks.papers.bert_lsh", *options)
    assert done.returncode == 0, done.stderr
    rows = {name: cells for name, *cells in rows_of(done.stdout)}
    assert float(rows["softmax, scores alone"][0]) == 25.6
    assert float(rows["BERT-LSH, faithful"][0]) == 10.24
    flops = json.loads(results.read_text())["paper"]["flops"]
    assert flops["softmax"] == 25600 and flops["hashing"] == 10240
