"""Compares the thread backends: two builds of lshkit, a process of each, which measure in turns.

Build the second one apart, and name the folder that holds its package:

    pip install . -C cmake.define.LSHKIT_THREAD_BACKEND=std --no-deps --target build/std-package
    python -m benchmarks.speed.threads --other build/std-package

A ratio is the other build's time divided by this one's: the median over the turns, in each of which
a process takes the smallest time of a few calls. "after torch" is a call directly after torch has
multiplied matrices on its own threads, which is not timed.
"""

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import time

LENGTHS = (1024, 4096, 16384)
HEADS, HEAD_DIM, N_BITS, N_HASHES = 8, 64, 8, 32
CASES = ("hash", "bucket sum", "YOSO forward", "YOSO forward after torch")
FOLDER = pathlib.Path(__file__).resolve().parents[2]


# ---- one build's process ----
def of_case(case, n):
    """What is timed, and what runs before each call and is not."""
    import numpy as np

    rng = np.random.default_rng(0)
    if case == "hash":
        from lshkit.hashing import FastHadamard

        x = rng.standard_normal((HEADS, n, HEAD_DIM), np.float32)
        family = FastHadamard(HEAD_DIM, N_BITS, N_HASHES, seed=0)
        return lambda: family.hash(x), None
    if case == "bucket sum":
        from lshkit.buckets import bucket_sum

        codes = rng.integers(0, 1 << N_BITS, (2, HEADS, n, N_HASHES), np.uint8)
        values = rng.standard_normal((HEADS, n, HEAD_DIM), np.float32)
        return lambda: bucket_sum(*codes, values, 1 << N_BITS), None
    import torch

    from lshkit.attention import Sampled, yoso_attention

    q, k, v = torch.randn(3, 1, HEADS, n, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    matrix = torch.randn(700, 700)
    estimator = Sampled(n_bits=N_BITS, n_hashes=N_HASHES, expectation="never")
    return (
        lambda: yoso_attention(q, k, v, estimator=estimator),
        (lambda: matrix @ matrix) if case.endswith("torch") else None,
    )


def serve():
    """Answers lines `length calls case` with the smallest seconds of so many calls."""
    from lshkit import _C

    print(_C.thread_backend(), flush=True)
    cases = {}
    for line in sys.stdin:
        n, calls, case = line.strip().split(" ", 2)
        if (n, case) not in cases:
            cases = {(n, case): of_case(case, int(n))}  # one at a time in memory
            cases[n, case][0]()
        call, before = cases[n, case]
        best = float("inf")
        for _ in range(int(calls)):
            if before:
                before()
            begin = time.perf_counter()
            call()
            best = min(best, time.perf_counter() - begin)
        print(best, flush=True)


# ---- both ----
class Build:
    def __init__(self, folder, threads):
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            env=os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.backend = self.process.stdout.readline().strip()

    def seconds(self, case, n, calls):
        time.sleep(0.03)  # the other process's threads spin on after their turn
        print(n, calls, case, file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--this", type=pathlib.Path, default=FOLDER, help="folder of a package")
    parser.add_argument("--other", type=pathlib.Path, required=True, help="folder of the other")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="one length, two turns")
    parser.add_argument("--json", type=pathlib.Path, help="results file")
    options = parser.parse_args()

    sys.path.insert(0, str(FOLDER))
    from tqdm import tqdm

    from benchmarks import write_json
    from benchmarks.measurement import figure, machine, table

    this, other = Build(options.this, options.threads), Build(options.other, options.threads)
    lengths, turns = ((1024,), 2) if options.quick else (LENGTHS, options.turns)
    results, rows = {}, []
    for case, n in tqdm([(case, n) for case in CASES for n in lengths], desc="cases"):
        calls = 3 if options.quick else max(3, 3 * 16384 // n)
        seconds = {"this": [], "other": []}
        for turn in range(turns + 1):
            order = ("this", this), ("other", other)
            for name, build in order if turn % 2 else order[::-1]:
                took = build.seconds(case, n, calls)
                if turn:  # the first warms up
                    seconds[name].append(took)
        ratios = [b / a for a, b in zip(*seconds.values(), strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        ratio = statistics.median(ratios)
        best = min(seconds["this"])
        results.setdefault(case, {})[n] = {
            "ratio": ratio,
            "quartiles": [low, high],
            "smallest_seconds": {name: min(times) for name, times in seconds.items()},
        }
        rows.append((case, n, figure(1e3 * best), f"{ratio:.3f}", f"{low:.3f} to {high:.3f}"))
    title = f"{other.backend} / {this.backend}, {options.threads} threads"
    print(table(title, ("call", "rows", f"ms, {this.backend}", "ratio", "quartiles"), rows))
    if options.json:
        settings = {"threads": options.threads, "turns": turns, "this": this.backend}
        settings |= {"other": other.backend, "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY")}
        content = {"machine": machine(), "settings": settings, "results": results}
        write_json(options.json, content)


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["--serve"] else main()
