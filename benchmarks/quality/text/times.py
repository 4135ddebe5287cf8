"""Milliseconds of a training step alone on a GPU, as a CUDA graph, and whether it equals launches.

python -m benchmarks.quality.text.times --lengths 1024 16384 --json times.json
"""

import argparse
import pathlib
import time
import traceback

import torch

from benchmarks import write_json
from benchmarks.quality.text.__main__ import LENGTHS, SETTINGS, STDLIB, device_of, text_of
from benchmarks.quality.text.candidates import CANDIDATES
from benchmarks.quality.text.model import METHODS
from benchmarks.quality.text.training import Setting, Text, Training

STEPS = 5  # compared


def measure(method: str, length: int, setting: Setting, text: Text, seconds: float) -> dict:
    begin = time.perf_counter()
    torch.cuda.reset_peak_memory_stats()
    captured, launched = (Training(method, length, 0, setting, text) for _ in range(2))
    captured.capture()
    torch.cuda.synchronize()
    prepared = time.perf_counter() - begin
    losses = []
    for training in captured, launched:
        losses.append([])
        for _ in range(STEPS):
            training.step()
            losses[-1].append(training.loss.item())
    times = []
    for training in captured, launched:
        steps, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            training.step()
            torch.cuda.synchronize()
            steps += 1
        times.append(round(1e3 * (time.perf_counter() - begin) / steps, 3))
    return {
        "milliseconds": times[0],
        "milliseconds_by_launches": times[1],
        "loss": [round(loss, 4) for loss in losses[0]],
        "largest_difference": max(abs(a - b) for a, b in zip(*losses, strict=True)),
        "prepared_in": round(prepared, 2),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = [*METHODS, *CANDIDATES]
    parser.add_argument("--lengths", type=int, nargs="+", choices=LENGTHS, default=LENGTHS)
    parser.add_argument("--methods", nargs="+", choices=known, metavar="NAME", default=known)
    parser.add_argument("--budget", choices=["steps", "long"], default="steps")
    parser.add_argument("--seconds", type=float, default=0.2, help="of a measurement")
    parser.add_argument("--within", type=float, default=float("inf"), help="seconds of all")
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.set_defaults(device="cuda")
    args = parser.parse_args()
    until = time.monotonic() + args.within
    text, about = text_of(STDLIB, "cuda")
    results = {"text": about, "device": device_of(args), "times": []}
    print(results, flush=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        for length in args.lengths:
            for method in args.methods:
                if time.monotonic() > until:
                    break
                setting = SETTINGS[args.budget][length]
                try:
                    found = measure(method, length, setting, text, args.seconds)
                except RuntimeError as error:
                    traceback.print_exc()
                    found = {"error": str(error)[:200]}
                results["times"].append({"method": method, "length": length} | found)
                print(method, length, found, flush=True)
                write_json(args.json, results)


if __name__ == "__main__":
    main()
