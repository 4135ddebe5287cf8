"""The NEON kernels, compiled by a cross compiler and run by qemu, where both are installed."""

import importlib.util

import pytest
from cases.commands import ROOT

TESTS = ("bucket_sum", "kernel_sums", "soft_hash")
spec = importlib.util.spec_from_file_location("tools", ROOT / "tools" / "test_aarch64.py")
tools = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tools)


def test_cpp_tests_under_qemu():
    """Some of them: tools/test_aarch64.py runs all, for minutes."""
    if missing := tools.missing():
        pytest.skip(f"not on PATH: {', '.join(missing)}")
    tools.test_cpp(ROOT / "build" / "aarch64" / "cpp", TESTS)
