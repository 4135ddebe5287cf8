"""Calls from several threads at once, and threads that are there when Python exits."""

import subprocess
import sys
import threading

import numpy as np
import pytest
from cases.hashing import hash_rows, rows_and_planes

from lshkit import _C


@pytest.fixture(scope="module")
def arrays():
    return rows_and_planes(600)


def in_threads(number, call):
    """What `call` returns, of each thread; all start together."""
    together, results = threading.Barrier(number), [None] * number

    def run(i):
        together.wait()
        results[i] = call(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return results


@pytest.mark.parametrize("threads", [2, 3, 16])
def test_same_bits_at_any_number_of_threads(arrays, threads):
    wanted = hash_rows(*arrays, threads=1)
    assert np.array_equal(hash_rows(*arrays, threads=threads), wanted)


def test_callers_at_once_get_their_own_results(arrays):
    x, planes = arrays
    inputs = [x * (1 if i % 2 else -1) + np.float32(i) for i in range(6)]
    wanted = [hash_rows(mine, planes, threads=1) for mine in inputs]

    def call(i):
        return all(
            np.array_equal(hash_rows(inputs[i], planes, threads=1 + i % 3), wanted[i])
            for _ in range(20)
        )

    assert in_threads(6, call) == [True] * 6


def test_number_of_threads_is_the_calling_thread_s():
    before = _C.max_threads()

    def call(i):
        _C.set_max_threads(i + 2)
        return _C.max_threads()

    assert in_threads(3, call) == [2, 3, 4]
    assert _C.max_threads() == before


EXIT = """
import threading, numpy as np
from lshkit import _C
x, planes = np.ones((1, 4, 500, 64), np.float32), np.ones((1, 128, 64), np.float32)
started = threading.Event()
def work():
    codes = np.empty((1, 4, 500, 16), np.uint8)
    while True:
        _C.hash(x, planes, 0, 8, 16, codes, 3)
        started.set()
{start}
assert started.wait(60)
"""


@pytest.mark.parametrize(
    "start",
    [
        "threading.Thread(target=work, daemon=True).start()",
        "codes = np.empty((1, 4, 500, 16), np.uint8)\n"
        "_C.hash(x, planes, 0, 8, 16, codes, 3); started.set()",
    ],
    ids=["in a daemon thread", "and done"],
)
def test_python_exits_with_threads_at_work(start):
    done = subprocess.run(
        [sys.executable, "-c", EXIT.format(start=start)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("asked, threads", [("3", 3), ("3,2", 3)])
def test_environment_sets_the_default(asked, threads):
    program = "from lshkit import _C; print(_C.max_threads())"
    done = subprocess.run(
        ["env", f"OMP_NUM_THREADS={asked}", sys.executable, "-c", program],
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [str(threads)], done.stderr


def test_show_versions_names_the_backend(capsys):
    from lshkit import show_versions

    name = {"openmp": "OpenMP", "std": "std::thread"}[_C.thread_backend()]
    show_versions()
    assert f"{_C.max_threads()} ({name})" in capsys.readouterr().out
