"""The examples run from the command line and leave what they promise."""

import re
import runpy
import sys

import pytest
from cases.commands import PNG_SIGNATURE, ROOT, needs_example_packages, run, run_alone

torch = pytest.importorskip("torch")

EXAMPLES = ROOT / "python_examples"
QUICKSTART = EXAMPLES / "quickstart.py"
CAUSAL_LM = EXAMPLES / "causal_lm.py"
CONTEXT_PARALLEL = EXAMPLES / "context_parallel.py"
SHORT = ("--length", 256, "--threads", 1)


def needs_packages_of(example):
    needs_example_packages()
    for package in ("dask", "transformers"):
        if re.search(rf"^ +(from|import) {package}\b", example.read_text(), re.MULTILINE):
            pytest.importorskip(package)


@pytest.mark.parametrize("out", ["missing/curves.png", "curves.txt", "."])
@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_refuse_a_picture_that_they_could_not_write(
    monkeypatch, capsys, tmp_path, example, out
):
    needs_packages_of(example)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(example), "--out", out])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(example), run_name="__main__")
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert f"--out must be a .png file in a folder that exists: {out}" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("example", "options", "message"),
    [
        ("bandwidth_selection", "--rows 1", "--rows must be at least 2: 1"),
        ("causal_lm", "--contexts 1", "--contexts must be at least 2: 1"),
        ("causal_lm", "--lr 0", "--lr must be a number > 0: 0.0"),
        ("causal_lm", "--n-probes 5000", "n_probes"),
        ("causal_lm", "--sharpness 0", "sharpness"),
        ("causal_lm", "--temperature 0", "--temperature"),
        ("causal_lm", "--contexts 999999999", "--text"),
        ("causal_lm", "--embed-dim 6", "--embed-dim"),
        ("context_parallel", "--n-bits 17", "n_bits"),
        ("context_parallel", "--memory 0", "--memory"),
        ("context_parallel", "--heads 3", "--embed-dim"),
        ("context_parallel", "--longest 999999999", "--longest"),
        ("context_parallel", "--length 1 --longest 64 --shortest 64", "--processes"),
        ("context_parallel", "--shortest 1024", "--shortest must be at most --longest 512: 1024"),
        ("context_parallel", "--processes 17", "--processes must be at most 16: 17"),
        ("density_on_dask", "--rows 15000", "--rows must be a multiple of 10,000: 15000"),
        ("density_on_dask", "--block-rows 0", "--block-rows must be a multiple of 10,000: 0"),
        ("density_on_dask", "--workers 0", "--workers must be at least 1: 0"),
        ("extreme_softmax", "--lr 0", "--lr"),
        ("extreme_softmax", "--classes 0", "--classes"),
        ("extreme_softmax", "--text missing", "--text"),
        ("kde_vs_sklearn", "--rows 0", "--rows must be at least 1: 0"),
        ("kde_vs_sklearn", "--queries 4", "--sklearn-queries must be at most --queries 4: 5"),
        ("kde_vs_sklearn", "--mean nan", "--mean must be between 0 and 1: nan"),
        ("kernel_regression", "--rows 19999", "--rows must be at least 20000: 19999"),
        ("kernel_regression", "--queries 0", "--queries must be at least 20: 0"),
        ("long_document", "--lengths 9 0", "--lengths must be at least 1: 0"),
        ("long_document", "--lengths 999999999", "--lengths must leave --tokens of the document"),
        ("long_document", "--tokens 0", "--tokens must be at least 1: 0"),
        ("long_document", "--epsilon 1", "--epsilon must be between 0 and 1: 1.0"),
        ("long_document", "--max-share 0", "--max-share must be 0.01 to 1: 0.0"),
        ("long_document", "--seconds inf", "--seconds must be a number > 0: inf"),
        ("long_document", "--model missing", "--model must be a folder that exists: missing"),
        ("partition_function", "--samples 5000", "--samples must be at most --classes 4000: 5000"),
        ("partition_function", "--scale 0", "--scale"),
        ("partition_function", "--classes 0", "--classes"),
        ("pretrained_encoder", "--texts 0", "--texts must be at least 1: 0"),
        ("pretrained_encoder", "--length 1", "--length must be 2 to 512: 1"),
        ("pretrained_encoder", "--n-bits 17", "--n-bits must be 1 to 16: 17"),
        ("quickstart", "--recall-length 8", "--recall-length must be at least 16: 8"),
        ("quickstart", "--seconds 0", "--seconds"),
        ("quickstart", "--seconds nan", "--seconds"),
        ("quickstart", "--threads 0", "--threads"),
        ("quickstart", "--text-length 999999999", "--text"),
        ("quickstart", "--text missing", "missing"),
        ("quickstart", "--lr 0", "--lr must be a number > 0: 0.0"),
        ("streaming_density", "--batches 15", "--batches must be at least 16: 15"),
        ("streaming_density", "--window 39001", "--window must be at most 39000"),
        ("streaming_density", "--error 0.6", "--error must be above 0 and at most 0.5: 0.6"),
        ("transformers_models", "--hidden 0", "--hidden must be a multiple of 64: 0"),
        ("transformers_models", "--hidden 100", "--hidden must be a multiple of 64"),
        ("transformers_models", "--lengths 9 0", "--lengths must be at least 1: 0"),
        ("transformers_models", "--repeats 0", "--repeats must be at least 1: 0"),
        ("two_sample_test", "--rows 500", "--rows must be below --many 500: 500"),
        ("two_sample_test", "--permutations 18", "--permutations must be at least 19: 18"),
    ],
)
def test_examples_refuse_options_by_name_and_quick_keeps_them(
    refusal, text, example, options, message
):
    example, options = EXAMPLES / f"{example}.py", options.split()
    needs_packages_of(example)
    if '"--text"' in example.read_text():
        options = ["--text", text, *options]
    assert message in refusal(example, "--quick", *options)


def test_quickstart_ends_in_a_table_and_a_picture(tmp_path, text):
    needs_example_packages()
    picture = tmp_path / "curves.png"
    options = ("--quick", "--seconds", 0.5, "--text-length", 256, "--threads", 1)
    options += ("--recall-length", 256, "--text", text, "--out", picture)
    done = run_alone(QUICKSTART, *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "\n0.5 seconds of training each, threads: 1\n" in done.stdout
    rows = {line[:36].strip(): line[36:].split() for line in done.stdout.splitlines()}
    for name, least, most in (
        ("recall in 256 tokens, steps", 5, 1e5),
        ("held-out accuracy, % of answers", 0, 100),
        ("hidden bytes in 256 tokens, steps", 5, 1e5),
        ("held-out loss, nats a byte", 0, 5),  # log(256) = 5.5 without training
    ):
        softmax, yoso = map(float, rows[name])
        assert least <= softmax <= most and least <= yoso <= most
    for label in ("recall, softmax", "recall, YOSO", "hidden bytes, YOSO"):
        assert label in done.stderr  # its progress bar
    assert picture.read_bytes().startswith(PNG_SIGNATURE)


def test_the_recall_of_the_quickstart_has_its_answers_in_its_tokens():
    needs_example_packages()
    task = runpy.run_path(str(QUICKSTART))["Recall"](128)
    tokens, asked, answers = task.draw(torch.Generator().manual_seed(0))
    pairs = dict(tokens[0, :32].view(16, 2).tolist())
    assert len(pairs) == 16 and asked.sum() == len(answers) == 16 and not asked[0, :32].any()
    found = [pairs[key] - 1 - task.n_keys for key in tokens[asked].tolist()]
    assert found == answers.tolist() and 0 <= min(found) and max(found) < 64


def test_causal_lm_ends_in_tables_a_sample_and_a_picture(tmp_path, text):
    needs_example_packages()
    picture = tmp_path / "causal.png"
    options = ("--quick", "--threads", 1, "--text", text, "--out", picture)
    done = run(CAUSAL_LM, *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {line[:38].strip(): line[38:].split() for line in done.stdout.splitlines()}
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


def test_context_parallel_ends_in_a_table_and_a_picture(tmp_path, text):
    needs_example_packages()
    picture = tmp_path / "ranks.png"
    options = ("--quick", "--n-bits", 4, "--text", text, "--out", picture)
    # Its own process: those that it starts look for their function in the main module.
    done = run_alone(CONTEXT_PARALLEL, *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {line[:38].strip(): line[38:].split() for line in done.stdout.splitlines()}
    assert rows["processes"] == ["1", "2"]
    alone, both = map(float, rows["loss of the last step, nats a byte"])
    assert alone == pytest.approx(both, abs=2e-4) and 0 < alone < 10
    assert rows["exchange"][0] == "none" and rows["exchange"][1] in ("tables", "keys", "heads")
    assert float(rows["MB sent by a rank in a step"][1]) > 0
    assert rows["longest sequence within the limit"] == ["512", "512"]
    assert float(done.stdout.split("difference of the losses: ")[1].split()[0]) < 1e-5
    assert picture.read_bytes().startswith(PNG_SIGNATURE)


@pytest.mark.parametrize("script", sorted(QUICKSTART.parent.glob("*.py")), ids=lambda x: x.stem)
def test_a_missing_package_says_how_to_install_it(monkeypatch, script):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r"matplotlib.*: pip install '\.\[dev\]'"):
        runpy.run_path(str(script), run_name="__main__")
