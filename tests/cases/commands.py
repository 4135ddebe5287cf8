"""Examples and benchmarks as commands, and what they leave."""

import contextlib
import io
import os
import pathlib
import runpy
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
MODULES = (  # of lshkit, with public names
    *("hashing", "buckets", "attention", "attention.huggingface", "kde", "sampling"),
    *("distributed", "torch_ops"),
)
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def run(command, *options, folder=ROOT):
    """What a script, a path, or a module, a name as `python -m` takes it, returns and prints.

    In this process, which is left as it was: a new one would import torch for seconds.
    """
    execute = runpy.run_path if str(command).endswith(".py") else runpy.run_module
    torch = sys.modules.get("torch")
    threads = torch and torch.get_num_threads()
    out, err, status = io.StringIO(), io.StringIO(), 0
    with (
        pytest.MonkeyPatch.context() as patch,
        mock.patch.dict(os.environ),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.chdir(folder)
        patch.setattr(sys, "argv", [str(command), *map(str, options)])
        try:
            execute(str(command), run_name="__main__")
        except SystemExit as stopped:
            status = stopped.code or 0
            if isinstance(status, str):
                status = print(status, file=err) or 1
        finally:
            if torch:
                torch.set_num_threads(threads)
    done = SimpleNamespace(returncode=status, stdout=out.getvalue(), stderr=err.getvalue())
    return fits_a_terminal(done, command, folder)


def fits_a_terminal(done, command, folder):
    """What an example prints has at most 100 columns, but for lines that name a file."""
    if pathlib.Path(command).parent.name == "python_examples":
        lines = [line for line in done.stdout.splitlines() if str(folder) not in line]
        assert [line for line in lines if len(line) > 100] == []
    return done


def run_alone(command, *options, folder=ROOT):
    """The same in a process of its own, as users start it; one command of a kind is enough."""
    module = [] if isinstance(command, pathlib.Path) else ["-m"]
    # Beside other work, threads that spin while they wait would take minutes.
    done = subprocess.run(
        [sys.executable, *module, *map(str, (command, *options))],
        cwd=folder,
        env=os.environ | {"OMP_WAIT_POLICY": "passive"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return fits_a_terminal(done, command, folder)


def run_by_instruction_set(file, name):
    """The file in a process of its own; skips the test where the machine lacks the instructions."""
    done = subprocess.run(
        [sys.executable, file],
        env=os.environ | {"LSHKIT_ISA": name, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    if f"LSHKIT_ISA={name} does not run here" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr


def rows_of(printed):
    """The cells of each line of the Markdown tables that were printed, stripped."""
    lines = [line.split("|")[1:-1] for line in printed.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in cells] for cells in lines]


def needs_packages_of(module):
    """A test of one of MODULES."""
    if module.startswith("attention") or module in ("distributed", "sampling", "torch_ops"):
        pytest.importorskip("torch")


def needs_example_packages():
    pytest.importorskip("matplotlib")
    pytest.importorskip("tabulate")
    pytest.importorskip("tqdm")
