"""The example and the benchmark run from the command line and leave what they promise."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

ROOT = pathlib.Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "python_examples" / "quickstart.py"
BENCHMARK = ROOT / "benchmarks" / "attention_cpu.py"
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


@pytest.mark.parametrize("options", [(), ("--conv-window", 3, "--gradient", "expected")])
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
def test_quickstart_refuses_bad_options_by_name(tmp_path, text, options, message):
    needs_example_packages()
    done = run(QUICKSTART, *TINY, "--text", text, *options, folder=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_benchmark_writes_all_results(tmp_path):
    path = tmp_path / "new" / "attention.json"
    options = ("--lengths", 16, 1024, "--repeats", 1, "--seconds", 0, "--json", path)
    done = run(BENCHMARK, *options, folder=tmp_path)
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
