"""The benchmarks of speed measure every section, and print what they measured."""

import json
import pathlib
import re

import pytest
from cases.commands import ROOT, run, run_alone

import lshkit
from benchmarks import RESULTS
from lshkit import _C

torch = pytest.importorskip("torch")

ATTENTION = "benchmarks.speed.attention"


def test_benchmark_writes_all_results(tmp_path):
    path = tmp_path / "new" / "attention.json"
    options = ("--lengths", 16, 1024, "--repeats", 1, "--seconds", 0, "--json", path)
    first = ("softmax", "plain_torch", "threads", "memory")
    done = run(ATTENTION, *options, "--sections", *first)
    assert done.returncode == 0, done.stderr
    results = json.loads(path.read_text())
    assert {"cpu", "instruction_set", "torch", "LSHKIT_ISA"} <= results["machine"].keys()
    settings = results["settings"]
    assert (settings["threads"], settings["n_bits"], settings["n_hashes"]) == (1, 8, 32)

    passes = {
        direction + name
        for direction in ("", "causal ")
        for name in ("forward", "forward + backward")
    }
    for length, sides in (("16", {"softmax", "yoso", "auto"}), ("1024", {"softmax", "yoso"})):
        assert results["softmax"][length].keys() == passes
        for name, times in results["softmax"][length].items():
            assert times.keys() == sides and min(times.values()) > 0
            ratio = times["softmax"] / times["yoso"]
            assert results["ratios"][length][name]["yoso"] == pytest.approx(ratio)
    assert results["plain_torch"].keys() == {"1024"}
    assert results["plain_torch"]["1024"].keys() == {"yoso", "gather", "embedding_bag"}
    # What autograd keeps besides inputs and result does not depend on the machine: a byte a token
    # and hash, and a number a query.
    for length, memory in results["memory"].items():
        n_tokens = int(length) * settings["heads"]
        assert memory["saved_inputs"] == 3 * n_tokens * settings["head_dim"] * 4
        assert memory["saved_besides_inputs"] == n_tokens * (2 * settings["n_hashes"] + 4)
    assert "Softmax attention's time / ours" in done.stdout

    # The other sections are added to the same file.
    others = (
        "bounds",
        "soft",
        "short_floats",
        "gradients",
        "causal",
        "grouped_heads",
        "packed",
    )
    options = ("--quick", "--json", path, "--sections", *others, "million", "decoding")
    done = run(ATTENTION, *options)
    assert done.returncode == 0, done.stderr
    added = json.loads(path.read_text())
    for name in (*first, "ratios"):
        assert added[name] == results[name]
    assert added["sections"].keys() == {*first, *others, "million", "decoding"}
    assert {"lower_bound, bf16", "collided", "unbiased"} <= added["gradients"]["128"][
        "forward + backward"
    ].keys()
    assert min(numbers(added, *others, "million", "decoding")) > 0
    assert min(added["bounds"]["times"]["128"]["sum, 8 bits"].values()) > 0
    for title in (
        "Time over the bound",
        "Forward of one head",
        "Decoding, 8 heads",
        "time of the others / packed",
    ):
        assert title in done.stdout
    # The tables of a file are those that were printed.
    tables = run(ATTENTION, "--tables", "--json", path)
    assert tables.returncode == 0 and tables.stdout.strip() in done.stdout

    added["machine"]["torch"] = "1.0"
    path.write_text(json.dumps(added))
    refused = run(ATTENTION, "--quick", "--sections", "soft", "--json", path)
    assert refused.returncode == 2 and "torch 1.0, now" in refused.stderr
    added["machine"]["cpu"] = "another"
    path.write_text(json.dumps(added))
    refused = run(ATTENTION, "--quick", "--json", path)  # not even by all sections
    assert refused.returncode == 2 and "results of another CPU (another)" in refused.stderr
    assert json.loads(path.read_text()) == added


def test_documented_tables_are_those_of_the_results():
    def shown(*options):  # {title: the table}
        done = run(ATTENTION, *options)
        assert done.returncode == 0, done.stderr
        return dict(re.findall(r"^(\w.*)\n\n((?:\|.*\n)+)", done.stdout, re.MULTILINE))

    readme, page = ((ROOT / name).read_text() for name in ("README.md", "docs/performance.md"))
    machines = shown("--machines")
    assert len(machines) == 7 and all(printed in page for printed in machines.values())
    for words in ("softmax over ours, float32", "faster softmax over ours, bfloat16"):
        (printed,) = (machines[title] for title in machines if words in title)
        assert printed in readme
    file = RESULTS / "attention_cpu/amd_epyc_family_25_model_17_avx512_bf16.json"
    options = shown("--tables", "--json", file)
    for words in (
        "by gradient (and",
        "for one input",
        "Causal",
        "query heads over",
        "16 sequences",
    ):
        (printed,) = (options[title] for title in options if words in title)
        assert printed in page


def test_tables_of_machines_show_what_was_measured(tmp_path):
    from benchmarks.speed.attention.machines import read, tables

    machine = {"cpu": "a CPU, family 1, model 2", "instruction_set": "sse", "torch": "2.0"}
    times = {
        "forward": {"softmax": 3.0, "yoso": 2.0},
        "forward + backward": {"softmax": 1, "yoso": 2},
    }
    results = {"machine": machine, "sections": {}, "softmax": {"64": times, "512": {}}}
    (tmp_path / "a.json").write_text(json.dumps(results))
    first, *others, measured = tables(tmp_path)
    assert "1.5 / 0.5" in first and "512" not in first
    assert not any("64" in printed for printed in others)
    assert "a CPU, family 1, model 2" in measured
    assert read(tmp_path) == {"a CPU, family 1, model 2, sse": results}

    (tmp_path / "b.json").write_text(json.dumps(results))
    with pytest.raises(ValueError, match="b.json: another file has results of a CPU"):
        read(tmp_path)


def numbers(tree, *keys):
    """All numbers of the tree below these keys."""
    for value in [tree[key] for key in keys] if keys else tree:
        if isinstance(value, (dict, list)):
            yield from numbers(value, *value) if isinstance(value, dict) else numbers(value)
        elif not isinstance(value, str):
            yield value


def test_plain_torch_baseline_is_an_estimate_of_the_expectation():
    from benchmarks.baselines.plain_torch import yoso_index_add
    from lshkit.attention import Expected, yoso_attention

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 16, generator=generator) for n in (20, 30, 30))
    expected = yoso_attention(q, k, v, estimator=Expected(n_bits=4), normalize=None)
    # 30 values of variance 1, each with the variance p (1 - p) / n_hashes <= 1 / (4 n_hashes) of
    # its weight: a standard error of at most 0.05, here for 2000 outputs at once.
    tolerance = 6 * (30 / 4 / 3000) ** 0.5
    for lookup in ("gather", "embedding_bag"):
        out = yoso_index_add(
            q,
            k,
            v,
            n_bits=4,
            n_hashes=3000,
            normalize=None,
            lookup=lookup,
            generator=generator,
        )
        torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)


def test_benchmark_of_times(tmp_path):
    results = tmp_path / "results.json"
    done = run("benchmarks.speed.lsh_attention", "--quick", "--json", results)
    assert done.returncode == 0, done.stderr
    of_128 = json.loads(results.read_text())["lengths"]["128"]
    assert of_128["forward"].keys() == of_128["pairs"].keys() >= {"softmax", "8, 32"}
    assert 0 < of_128["pairs"]["12, 32"] < of_128["pairs"]["8, 32"] < 0.5


def test_thread_backends_are_compared_in_a_process_each(tmp_path):
    results = tmp_path / "threads.json"
    folder = pathlib.Path(lshkit.__file__).parents[1]  # the same build twice
    options = ("--quick", "--this", folder, "--other", folder, "--json", results)
    done = run("benchmarks.speed.threads", *options)
    assert done.returncode == 0, done.stderr
    measured = json.loads(results.read_text())
    assert measured["settings"]["this"] == measured["settings"]["other"] == _C.thread_backend()
    for name in ("hash", "bucket sum", "YOSO forward", "YOSO forward after torch"):
        assert measured["results"][name]["1024"]["ratio"] > 0
        assert f"| {name} " in done.stdout


def test_bytes_of_many_ranks_are_those_foretold():
    pytest.importorskip("torch")
    from benchmarks.speed.context_parallel import simulate

    counted = simulate([8, 64, 1024], 8192, 4)
    assert len(counted) == 12
    for row in counted:
        assert row["bytes"] == row["foretold"] > 0, row


def test_context_parallel_benchmark_writes_its_results(tmp_path):
    path = tmp_path / "ranks.json"
    options = ("--quick", "--lengths", 256, "--heads", 2, "--json", path)
    # Its own process: those that it starts look for their function in the main module.
    done = run_alone("benchmarks.speed.context_parallel", *options)
    assert done.returncode == 0, done.stderr
    written = json.loads(path.read_text())
    assert written["settings"]["backend"] == "gloo"
    alone, both = (written["results"][size]["seconds"] for size in ("1", "2"))
    assert min(row["seconds"] for row in (*alone, *both)) > 0
    assert {row["exchange"] for row in both} == {None, "computing alone", "tables", "keys", "heads"}
    assert written["results"]["2"]["torch"]  # torch's own does not run here, and says why
    for row in (*written["results"]["2"]["bytes"], *written["simulated"]):
        assert row["foretold"] in (None, row["bytes"])
    assert "efficiency" in done.stdout
