"""The examples and the benchmarks run from the command line and leave what they promise."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

ROOT = pathlib.Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "python_examples" / "quickstart.py"
LSH_SGD = ROOT / "python_examples" / "lsh_sgd.py"
CAUSAL_LM = ROOT / "python_examples" / "causal_lm.py"
BENCHMARK = ROOT / "benchmarks" / "attention_cpu.py"
QUALITY = ROOT / "benchmarks" / "quality_cost.py"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def run(script, *options, folder):
    command = [sys.executable, str(script), *map(str, options)]
    # Beside other work, threads that spin while they wait would take minutes.
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def text(tmp_path):
    """A folder of Python files, small enough to be read at once."""
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(11):  # files 0 and 10 are held out
        (folder / f"{i:02}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 20)
    return folder


TINY = ("--steps", 2, "--length", 256, "--held-out", 1, "--threads", 1)


def needs_example_packages():
    pytest.importorskip("matplotlib")
    pytest.importorskip("tqdm")


@pytest.mark.parametrize("options", [(), ("--conv-window", 3, "--gradient", "unbiased")])
def test_quickstart_ends_in_a_table_and_a_picture(tmp_path, text, options):
    needs_example_packages()
    picture = tmp_path / "curves.png"
    done = run(QUICKSTART, *TINY, *options, "--text", text, "--out", picture, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {line[:16].strip(): line[16:].split() for line in done.stdout.splitlines()}
    assert float(rows["byte frequencies"][0]) > 0
    for name in ("softmax", "YOSO"):
        loss, tokens_per_second, memory, unit = rows[name]
        assert 0 < float(loss) < 10
        assert float(tokens_per_second.replace(",", "")) > 0
        assert float(memory) > 0 and unit == "MiB"
        assert f"{name:<8}: 100%" in done.stderr  # its progress bar
    loss_ratio = float(rows["YOSO"][0]) / float(rows["softmax"][0])
    assert float(rows["YOSO / softmax"][0]) == pytest.approx(loss_ratio, abs=2e-3)  # as rounded
    assert picture.read_bytes().startswith(PNG_SIGNATURE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--n-bits", 17), "n_bits"),
        (("--conv-window", 4), "conv_window"),
        (("--gradient", "exact"), "gradient"),
        (("--steps", 0), "--steps"),
        (("--length", 10**9), "--length"),
        (("--embed-dim", 63), "--embed-dim"),
        (("--out", "missing/curves.png"), "missing"),
        (("--out", "curves.txt"), "--out"),
        (("--text", "missing"), "missing"),
    ],
)
def test_quickstart_refuses_bad_options_by_name(refusal, text, options, message):
    needs_example_packages()
    assert message in refusal(QUICKSTART, *TINY, "--text", text, *options)


def test_causal_lm_ends_in_tables_a_sample_and_a_picture(tmp_path, text):
    needs_example_packages()
    picture = tmp_path / "causal.png"
    options = ("--quick", "--threads", 1, "--text", text, "--out", picture)
    done = run(CAUSAL_LM, *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {line[:40].strip(): line[40:].split() for line in done.stdout.splitlines()}
    for name in (
        "held-out loss, nats a byte",
        "training, bytes / s",
        "generating, bytes / s at 64",
    ):
        softmax, soft = (float(cell.replace(",", "")) for cell in rows[name])
        assert softmax > 0 and soft > 0
    # Two layers of 128 keys and values in fp32, at 1k, 16k and 128k; a state has one size.
    assert rows["softmax: key-value cache"] == ["2.0", "32.0", "256.0"]
    assert len(set(rows["soft codes, n_bits=12"])) == 1
    for name in ("softmax", "soft codes"):
        assert f"--- generated with {name} ---" in done.stdout
        assert f"{name:<10}: 100%" in done.stderr  # its progress bar
    assert picture.read_bytes().startswith(PNG_SIGNATURE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--n-probes", 5000), "n_probes"),
        (("--sharpness", 0), "sharpness"),
        (("--temperature", 0), "--temperature"),
        (("--contexts", 1), "--contexts"),
        (("--contexts", 10**9), "--text"),
        (("--embed-dim", 6), "--embed-dim"),
        (("--out", "missing/causal.png"), "missing"),
    ],
)
def test_causal_lm_refuses_bad_options_by_name(refusal, text, options, message):
    needs_example_packages()
    small = ("--length", 64, "--contexts", 64, "--text", text)
    assert message in refusal(CAUSAL_LM, *small, *options)


def test_lsh_sgd_ends_in_tables_a_verdict_and_a_picture(tmp_path):
    needs_example_packages()
    picture = tmp_path / "sgd.png"
    done = run(LSH_SGD, "--quick", "--out", picture, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for method in ("uniform", "norms", "LSH", "LSH, norms", "LGD", "gradients' lengths"):
        rows = [line for line in done.stdout.splitlines() if line.startswith(f"| {method} |")]
        assert len(rows) == 5  # problems
        for row in rows:
            cells = row.split("|")[2:-1]
            *errors, gap, time = (float(cell.split("±")[0]) for cell in cells)
            assert min(errors) > 0 and gap > 0 and time > 0
            assert method != "uniform" or errors == [1, 1, 1]
    for problem in ("diabetes", "breast cancer", "digits", "heavy-tailed rows", "a rare odd group"):
        verdicts = [line for line in done.stdout.splitlines() if line.startswith(f"- {problem}")]
        assert len(verdicts) == 1 and "help" in verdicts[0]
    assert picture.read_bytes().startswith(PNG_SIGNATURE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--steps", 0), "--steps"),
        (("--rows", 10), "--rows"),
        (("--n-bits", 65), "--n-bits"),
        (("--uniform-share", 0), "--uniform-share"),
        (("--rates", -1), "--rates"),
        (("--out", "missing/sgd.png"), "--out"),
    ],
)
def test_lsh_sgd_refuses_bad_options_by_name(refusal, options, message):
    needs_example_packages()
    assert message in refusal(LSH_SGD, *options)


def run_quality(*options, folder, text):
    small = ("--length", 32, "--batch-size", 1, "--embed-dim", 16, "--heads", 2, "--layers", 1)
    few = ("--seeds", 0, "--evaluations", 2, "--eval-batches", 1, "--text", text)
    files = ("--json", folder / "new" / "quality.json", "--picture", folder / "new" / "quality.png")
    return run(QUALITY, *small, *few, *files, *options, folder=folder)


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
    assert other.returncode == 2 and "other settings" in other.stderr.splitlines()[-1]

    read = run_quality("--tables", folder=tmp_path, text=text)
    assert read.returncode == 0 and set(read.stdout.splitlines()) <= set(done.stdout.splitlines())

    timed = ("--methods", "softmax", "--seconds", 0.01, "--resume")
    done = run_quality(*timed, folder=tmp_path, text=text)
    assert done.returncode == 0, done.stderr
    added = json.loads(path.read_text())["runs"]
    assert len(added) == 12 and all(run in added for run in results["runs"])
    assert added[0]["budget"] == "0.01 s" and added[0]["seconds"][-1] >= 0.01
    assert "| loss after 0.01 s |" in done.stdout and "| loss after 2 steps |" in done.stdout


def test_benchmark_writes_all_results(tmp_path):
    path = tmp_path / "new" / "attention.json"
    options = ("--lengths", 16, 1024, "--repeats", 1, "--seconds", 0, "--json", path)
    first = ("softmax", "plain_torch", "threads", "memory")
    done = run(BENCHMARK, *options, "--sections", *first, folder=tmp_path)
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
    # What autograd keeps does not depend on the machine: inputs, and a byte a token and hash.
    for length, memory in results["memory"].items():
        n_tokens = int(length) * settings["heads"]
        assert memory["saved_inputs"] == 3 * n_tokens * settings["head_dim"] * 4
        assert memory["saved_besides_inputs"] == 2 * n_tokens * settings["n_hashes"]
    assert "Softmax attention's time / ours" in done.stdout

    # The other sections are added to the same file.
    others = ("soft", "fast", "gradients", "causal", "grouped_heads", "packed", "window")
    options = ("--quick", "--json", path, "--sections", *others, "million", "decoding")
    done = run(BENCHMARK, *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    added = json.loads(path.read_text())
    for name in (*first, "ratios"):
        assert added[name] == results[name]
    assert added["sections"].keys() == {*first, *others, "million", "decoding"}
    assert {"lower_bound, bf16", "collided", "unbiased"} <= added["gradients"]["128"][
        "forward + backward"
    ].keys()
    assert min(numbers(added, *others, "million", "decoding")) > 0
    for title in ("Forward of one head", "Decoding, 8 heads", "time of the others / packed"):
        assert title in done.stdout
    # The tables of a file are those that were printed.
    tables = run(BENCHMARK, "--tables", "--json", path, folder=tmp_path)
    assert tables.returncode == 0 and tables.stdout.strip() in done.stdout

    added["machine"]["torch"] = "1.0"
    path.write_text(json.dumps(added))
    refused = run(BENCHMARK, "--quick", "--sections", "fast", "--json", path, folder=tmp_path)
    assert refused.returncode == 2 and "torch 1.0, now" in refused.stderr


def numbers(tree, *keys):
    """All numbers of the tree below these keys."""
    for value in [tree[key] for key in keys] if keys else tree:
        if isinstance(value, (dict, list)):
            yield from numbers(value, *value) if isinstance(value, dict) else numbers(value)
        elif not isinstance(value, str):
            yield value


def test_plain_torch_baseline_is_an_estimate_of_the_expectation():
    from lshkit.attention import yoso_attention
    from lshkit.attention.baselines import yoso_index_add

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 16, generator=generator) for n in (20, 30, 30))
    expected = yoso_attention(q, k, v, n_bits=4, estimator="expected", normalize=None)
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
