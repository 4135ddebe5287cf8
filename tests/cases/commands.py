"""Examples and benchmarks as commands, and what they leave."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def run(command, *options, folder=ROOT):
    """The finished process of a script, a path, or of a module, a name as `python -m` takes it."""
    module = [] if isinstance(command, pathlib.Path) else ["-m"]
    # Beside other work, threads that spin while they wait would take minutes.
    return subprocess.run(
        [sys.executable, *module, *map(str, (command, *options))],
        cwd=folder,
        env=os.environ | {"OMP_WAIT_POLICY": "passive"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def rows_of(printed):
    """The cells of each line of the Markdown tables that were printed, stripped."""
    lines = [line.split("|")[1:-1] for line in printed.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in cells] for cells in lines]


def needs_example_packages():
    pytest.importorskip("matplotlib")
    pytest.importorskip("tqdm")
