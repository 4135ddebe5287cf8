"""The GPU benchmark's tables, from invented numbers, its parts on the CPU, and the script of a
first run on a GPU with stubs in the place of its tools."""

import json
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from cases.commands import ROOT, run, run_alone

GPU = "benchmarks.speed.gpu"


def row(n, causal, backward, **milliseconds):
    samples = {name.replace("_", ", "): [x] for name, x in milliseconds.items()}
    own = {"n": n, "causal": causal, "backward": backward}
    return own | {"milliseconds": samples, "peak_bytes": {"flash": 3e6, "hard": 2e6}}


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
            row(16384, False, False, flash=20.0, cudnn=10.0, hard=2.5, hard_clustered=5.0),
            row(4096, True, True, flash=1.0, hard=0.5),
            row(4096, False, True, flash=1.0, cudnn=0.5, hard=1250.0),
            row(4096, False, True, flash=1.25, soft=0.5) | {"late": {"soft": 2}},
            row(4096, False, False, flash=1.5, cudnn=1.0),  # lshkit failed
        ],
    }
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(result))
    done = run(GPU, "--table", path)
    assert done.returncode == 0, done.stderr
    title, rule, *shown = done.stdout.splitlines()
    assert title.count("|") == rule.count("|") and "| over FlashAttention-2 | wanted |" in title
    assert shown == [
        "| 16384 |  | forward | hard | 2.5 | 20 | 10 |  | 8.00 | 6 | 4.00 | 2 | 3 |",
        "| 16384 |  | forward | hard, clustered | 5 | 20 | 10 |  | 4.00 |  | 2.00 |  | 3 |",
        "| 4096 |  | forward + backward | hard | 1250 | 1 | 0.5 |  | 0.00 | 1.2 | 0.00 | 2 | 3 |",
        "| 4096 |  | forward + backward | soft | 0.5 | 1.25 |  |  | 2.50 | 0.6 | 2.50 |  | 3 |",
        "| 4096 | causal | forward + backward | hard | 0.5 | 1 |  |  | 2.00 |  | 2.00 | 2 | 3 |",
        "",
        "Invented, torch 9.9, CUDA 99.0; bf16, batch 8, 12 heads, d 64; hard: n_bits 8, "
        "n_hashes 32; soft: n_bits 12, n_probes 4, n_hashes 32",
        "2 samples hold time of the host",
    ]


def test_counters(tmp_path):
    log = tmp_path / "counters.log"
    log.write_text(
        "==> counters of hard\n"
        "  void lshkit::cuda::(anonymous)::bucket_linear_kernel<(lshkit::cuda::Element)2>"
        "(lshkit::cuda::MatrixGradient) (4096, 1, 1)x(128, 1, 1), Context 1, Stream 7, CC 9.0\n"
        "    Section: GPU Speed Of Light Throughput\n"
        "    DRAM Throughput                  %        12.50\n"
        "    Duration                        us       345.67\n"
    )
    done = run(GPU, "--counters", log)
    assert done.returncode == 0, done.stderr
    assert re.search(r"bucket_linear.*DRAM % 12.50, took us 345.67", done.stdout)


class FakeEvent:
    """Of a device that is busy with what it was given until something waits for it."""

    steps = []
    ahead = iter(())

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.steps.append("event")

    def query(self):
        self.steps.append("query")
        return next(self.ahead, False)

    def synchronize(self):
        self.steps.append("wait")

    def elapsed_time(self, other):
        return 1.5


@pytest.fixture
def fake_device(monkeypatch):
    """What the benchmark calls of torch.cuda, for tensors on the CPU."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(FakeEvent, "steps", [])
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    slept = lambda cycles: FakeEvent.steps.append(("busy", cycles))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "_sleep", slept)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    return torch.device("cpu")


def test_the_gpu_is_busy_before_the_first_event(fake_device, monkeypatch):
    from benchmarks.speed.gpu import timing

    work = lambda: FakeEvent.steps.append("work")  # noqa: E731
    assert timing.timed(work, cycles=7) == (1.5, False)
    assert FakeEvent.steps == [("busy", 7), "event", "work", "event", "query", "wait"]

    side = timing.Side(lambda *_: None, [[None] * 4], backward=False)
    side.cycles = 100
    monkeypatch.setattr(FakeEvent, "ahead", iter([True, False]))
    side.sample(0)  # the host was late: taken again, the device busy for longer
    assert (side.cycles, side.samples, side.late) == (200, [1.5], 0)
    side.cycles = timing.MOST_CYCLES
    monkeypatch.setattr(FakeEvent, "ahead", iter([True]))
    side.sample(0)
    assert (side.samples, side.late) == ([1.5, 1.5], 1)


def test_every_part_runs(fake_device, tmp_path, monkeypatch):
    """On the CPU, with events that measure nothing: what is left to a GPU is the time."""
    from types import SimpleNamespace

    from benchmarks.speed.gpu import __main__ as gpu
    from benchmarks.speed.gpu import sides

    del sys.modules[gpu.__name__]  # which runpy would warn of in the next test
    for module in (gpu, sides):
        monkeypatch.setattr(module, "HEADS", 1)
        monkeypatch.setattr(module, "LENGTHS", (96,))
    monkeypatch.setattr(gpu, "kernels", lambda *_: [])
    given = {"out": tmp_path / "gpu.json", "device": fake_device, "seconds": 60, "quick": True}
    benchmark = gpu.Run(SimpleNamespace(more=False, **given))
    for name in ("errors", "hard", "soft", "pieces"):
        gpu.PARTS[name](benchmark)
    result = json.loads(given["out"].read_text())
    # Of the others, the CPU has no cuDNN and FlashAttention-3 is not installed.
    assert all("cudnn" in error for error in result.get("errors", [])), result["errors"]
    shown = [(r["causal"], r["backward"], tuple(r["milliseconds"])) for r in result["rows"]]
    subset, clustered = "hard, gradient of 16", "hard, clustered"
    assert shown[:4] == [
        (False, False, ("flash", "hard", clustered)),
        (False, True, ("flash", "hard", subset, clustered)),
        (True, False, ("flash", "hard")),
        (True, True, ("flash", "hard")),
    ]
    assert {names for _, _, names in shown[4:]} == {("flash", "soft")}
    errors = result["relative_errors"]
    assert errors["hard, float32"] == errors["hard, gradient of 16, float32"] == [0.0] * 4
    assert max(errors["soft, bfloat16"]) < 0.01


def test_clustered_inputs_crowd_their_buckets():
    torch = pytest.importorskip("torch")
    from benchmarks.speed.gpu.sides import inputs
    from lshkit import hashing

    hasher = hashing.FastHadamard(64, 8, 4, seed=0)
    largest = {}
    for clustered in (False, True):
        query, key, value, _ = inputs(1, 2000, 1, "cpu", clustered)[0]
        assert query.shape == value.shape == (1, 12, 2000, 64)
        codes = torch.as_tensor(hasher.hash(key[0, 0].float()))
        largest[clustered] = max(c.bincount().max().item() for c in codes.long().T)
    assert largest[False] < 60 and largest[True] > 100


def test_needs_a_gpu(tmp_path, monkeypatch, refusal):
    pytest.importorskip("torch")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run_alone(GPU, "--out", tmp_path / "gpu.json")
    assert done.returncode == 1 and "needs a GPU" in done.stderr
    assert not (tmp_path / "gpu.json").exists()
    assert "unknown fast" in refusal(GPU, "--parts", "hard,fast")


def of_script(name):
    """A variable of run_on_gpu.sh, made of one or more lines."""
    script = ROOT / "cuda" / "run_on_gpu.sh"
    if not script.exists():
        pytest.skip("needs the source tree")
    text = script.read_text()
    return " ".join(re.findall(rf"^{name}=[\"'](?:\${name} )?(.*)[\"']$", text, re.M))


def test_what_is_sanitized_is_there(request):
    """A part of a selection that no test matches any more would go unnoticed on the GPU."""
    few, graphs = of_script("few"), of_script("graphs")
    files = set((ROOT / "tests" / "cuda").glob("test_cuda*.py"))
    options, items = request.config.option, request.session.items
    if not files <= {item.path for item in items} or options.keyword or options.markexpr:
        pytest.skip("needs a run that collects all tests of CUDA kernels")
    of_gpu = [item for item in items if item.path in files and item.get_closest_marker("cuda")]
    for parts, of_graphs in ((few, False), (graphs, True)):
        assert parts.count(" or ") > 3
        tests = [x.nodeid.lower() for x in of_gpu if ("_graphs" in x.nodeid) == of_graphs]
        for part in parts.split(" or "):
            words = part.lower().split(" and ")
            assert any(all(word in test for word in words) for test in tests), part


def test_kernels_whose_counters_are_read_are_there():
    names = f"{of_script('hard_kernels')} {of_script('soft_kernels')}".split()
    assert len(names) > 10
    headers = (ROOT / "cuda" / "include" / "lshkit" / "cuda").glob("*.cuh")
    source = "".join(path.read_text() for path in headers)
    assert [name for name in names if not re.search(rf"\b{name}\w*\(", source)] == []


STUBS = {
    "nvidia-smi": 'case "$*" in *compute_cap*) echo 9.0;; *) echo a GPU;; esac',
    # Builds a module, once.
    "cmake": 'echo cmake "$*"; [ "$1" != --build ] || touch build/gpu/_C.so',
    "nvcc": "exit 0",
    # Finds what is planted if it is not told of kernels in a way that it does not know.
    "compute-sanitizer": """
        case "$*" in *--kernel-regex*) echo unknown option; exit 1;; esac
        case "$*" in *planted*) exit 9;; *) echo "ERROR SUMMARY: 0 errors"; exit 0;; esac""",
    "python": """
        case "$*" in
          *--help*) echo nothing;;
          *benchmarks.speed.gpu*hard*) echo fault in hard; exit 1;;
          *) echo ran "$CUDA_LAUNCH_BLOCKING" "$*";;
        esac""",
}


@pytest.fixture
def on_gpu(tmp_path):
    """run_on_gpu.sh STAGE in a copy of the tree whose tools are stubs, and what it left."""
    script = ROOT / "cuda" / "run_on_gpu.sh"
    if not script.exists() or not pathlib.Path("/bin/bash").exists():
        pytest.skip("needs the source tree and bash")
    tree, tools = tmp_path / "tree", tmp_path / "tools"
    for folder in ("cuda", "cpp", "lshkit", "tests/cuda"):
        (tree / folder).mkdir(parents=True)
    shutil.copy(script, tree / "cuda")
    (tree / "CMakeLists.txt").touch()
    for name in ("test_cuda.py", "test_cuda_graphs.py"):
        (tree / "tests" / "cuda" / name).touch()
    tools.mkdir()
    for name, text in STUBS.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)

    def stage(*arguments):
        done = subprocess.run(
            ["bash", "cuda/run_on_gpu.sh", *arguments],
            cwd=tree,
            env={"PATH": f"{tools}:/usr/bin:/bin", "PYTHON": str(tools / "python")},
            capture_output=True,
            text=True,
            timeout=60,
        )
        logs = (tree / "build" / "gpu" / "results").glob("*.log")
        return done, {log.stem: log.read_text() for log in logs}

    return stage


def test_stages_leave_what_came_before(on_gpu):
    done, _ = on_gpu("fast")
    assert done.returncode == 2 and "STAGE [seconds]" in done.stderr
    done, logs = on_gpu("build")
    assert done.returncode == 0, done.stdout
    assert logs["build"].count("cmake --build") == 1
    assert "ran 1 -m benchmarks.speed.gpu --quick" in logs["build"]  # waits for each kernel
    done, logs = on_gpu("speed")
    assert done.returncode == 1 and "hard: status 1" in done.stdout
    assert "fault in hard" in logs["speed"] and "soft: status 0" in done.stdout
    assert "cmake" not in logs["speed"] and "errors: status 0" in logs["build"]
    done, logs = on_gpu("tests")
    assert done.returncode == 0 and "ran 1 -m pytest" in logs["tests"]
    assert "speed" in logs and "no time left" in on_gpu("tests", "4")[0].stdout


def test_sanitizers_have_found_what_is_planted(on_gpu):
    done, logs = on_gpu("sanitizers")
    assert done.returncode == 0, done.stdout + logs["sanitizers"]
    # The first filter is not known there, the second is.
    assert (
        "memcheck finds what is planted, with '--kernel-name kernel_substring=lshkit'"
        in (logs["sanitizers"])
    )
    for name in ("memcheck test_cuda_graphs.py", "racecheck test_cuda.py"):
        assert f"{name}: status 0: ERROR SUMMARY: 0 errors" in logs["sanitizers"]
