"""What a build of the CUDA kernels printed, and whether they are still those of that build."""

import importlib.util
import re
import sys

import pytest
from cases.commands import ROOT

LOG = "".join(
    f"""
ptxas info    : Compiling entry function '_Z3addPf' for 'sm_{architecture}'
ptxas info    : Function properties for _Z3addPf
    {{stack}} bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers
"""
    for architecture in ("80", "90a")
)
INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)
FOLDERS = ("cuda/include", "cpp/include", "cpp/tests", "cuda/tests/emulation", "cuda/tests/ptx")


@pytest.fixture
def check(monkeypatch, tmp_path):
    """check(*arguments) runs the command on a record of its own."""
    spec = importlib.util.spec_from_file_location("check", ROOT / "cuda" / "check_compile.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RECORD", tmp_path / "checked.json")
    monkeypatch.setattr(module, "sources", lambda: {"nvcc": "13.0", "sources": module.digest})
    module.digest = "first"

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["check_compile.py", *map(str, arguments)])
        module.main()

    run.module = module
    return run


def test_all_that_is_included_counts(check):
    files = set(check.module.files())
    assert {ROOT / "cuda/src/attention.cu", ROOT / "cuda/tests/test_kernels.cpp"} <= files
    for file in files:
        for name in INCLUDE.findall(file.read_text()):
            places = [file.parent, *(ROOT / folder for folder in FOLDERS)]
            found = [place / name for place in places if (place / name).is_file()]
            assert found and found[0].resolve() in files, f"{file}: {name}"


def test_what_was_checked_need_not_be_again(check, tmp_path, capsys):
    log = tmp_path / "build.log"
    log.write_text(LOG.format(stack=0))
    check(log)
    assert not (tmp_path / "checked.json").exists()
    check(log, "--record")
    assert "12" in capsys.readouterr().out
    check()
    assert "1 CUDA kernels have been checked (nvcc 13.0)" in capsys.readouterr().out
    check.module.digest = "second"
    with pytest.raises(SystemExit, match="not those that were checked last"):
        check()


def test_a_kernel_with_registers_in_memory_is_not_recorded(check, tmp_path):
    log = tmp_path / "build.log"
    log.write_text(LOG.format(stack=16))
    with pytest.raises(SystemExit, match="sm_80.*registers in memory"):
        check(log, "--record")
    assert not (tmp_path / "checked.json").exists()


def test_a_build_for_one_architecture_is_not_recorded(check, tmp_path):
    log = tmp_path / "build.log"
    log.write_text(LOG.format(stack=0).split("sm_90a")[0])
    with pytest.raises(SystemExit, match="80-real and 90a-real"):
        check(log, "--record")
