"""The GPU benchmark's table, from a JSON of invented numbers, and its refusal without a GPU."""

import json
import re

import pytest
from cases.commands import ROOT, run, run_alone

GPU = "benchmarks.speed.gpu"


def row(kind, n, causal, backward, **median):
    ratio = {"ratio": median["flash"] / median[kind]} if kind in median else {}
    return {"kind": kind, "n": n, "causal": causal, "backward": backward, "median": median} | ratio


def test_table(tmp_path):
    result = {
        **{"device": "Invented", "torch": "9.9", "cuda": "99.0"},
        "settings": {
            **{"batch": 8, "heads": 12, "d": 64},
            "codes": {
                "hard": {"estimator": "sampled", "n_bits": 8, "n_hashes": 32},
                "soft": {"estimator": "soft", "n_bits": 12, "n_probes": 4, "n_hashes": 32},
            },
        },
        "rows": [
            row("hard", 16384, False, False, flash=20.0, torch=10.0, hard=2.5),
            row("hard", 4096, True, True, flash=1.0, hard=0.5),
            row("hard", 4096, False, False, flash=1.25, torch=0.5, hard=1234.5),
            row("soft", 16384, False, False, flash=21.0, soft=7.0),
            row("soft", 4096, False, False, flash=1.5),  # what failed has no time
        ],
    }
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(result))
    done = run(GPU, "--table", path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "| n |  | pass | flash, ms | torch's pick, ms | lshkit, ms | ratio | soft codes, ms "
        "| ratio |",
        "|---:|---|---|---:|---:|---:|---:|---:|---:|",
        "| 4096 |  | forward | 1.25 | 0.5 | 1234 | 0.0 |  |  |",
        "| 16384 |  | forward | 20 | 10 | 2.5 | 8.0 | 7 | 3.0 |",
        "| 4096 | causal | forward + backward | 1 |  | 0.5 | 2.0 |  |  |",
        "",
        "Invented, torch 9.9, CUDA 99.0; bf16, batch 8, 12 heads, d 64; hard: n_bits 8, "
        "n_hashes 32; soft: n_bits 12, n_probes 4, n_hashes 32",
    ]


def test_needs_a_gpu(tmp_path, monkeypatch, refusal):
    pytest.importorskip("torch")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run_alone(GPU, "--out", tmp_path / "gpu.json")
    assert done.returncode == 1 and "needs a GPU" in done.stderr
    assert not (tmp_path / "gpu.json").exists()
    assert "unknown fast" in refusal(GPU, "--parts", "hard,fast")


def test_what_is_searched_for_races_is_there(request):
    """A part of the selection that no test matches any more would go unnoticed on the GPU."""
    script = ROOT / "cuda" / "run_on_gpu.sh"
    if not script.exists():
        pytest.skip("needs the source tree")
    files = set((ROOT / "tests" / "cuda").glob("test_cuda*.py"))
    options, items = request.config.option, request.session.items
    if not files <= {item.path for item in items} or options.keyword or options.markexpr:
        pytest.skip("needs a run that collects all tests of CUDA kernels")
    parts = " ".join(re.findall(r"^ *few=[\"'](?:\$few )?(.*)[\"']$", script.read_text(), re.M))
    assert parts.count(" or ") > 5
    of_gpu = [item for item in items if item.path in files and item.get_closest_marker("cuda")]
    tests = [item.nodeid.lower() for item in of_gpu if "_graphs" not in item.nodeid]
    for part in parts.split(" or "):
        words = part.lower().split(" and ")
        assert any(all(word in test for word in words) for test in tests), part
