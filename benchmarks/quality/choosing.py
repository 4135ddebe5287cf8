"""What n_bits, n_hashes and soft codes do to the error, the kernel and the cost of attention.

    python -m benchmarks.quality.choosing [--sections ...] [--json PATH] [--tables] [--quick]

Prints the Markdown tables of docs/choosing.md and writes what its figures are drawn from
(docs/figures.py). One thread; a minute. --quick: a few settings, and no file unless --json names
one. --sections: some of it, into the same file. --tables: the tables of the file, unmeasured.
"""

import argparse
import json
import pathlib
from functools import partial

import numpy as np
import torch

from benchmarks import RESULTS, write_json
from benchmarks.measurement import (
    Stopwatch,
    figure,
    inputs,
    machine,
    of_pass,
    pin_to_one_cpu,
    table,
)
from lshkit.attention import Expected, Sampled, Soft, yoso_attention
from lshkit.hashing import FastHadamard

OUT = RESULTS / "choosing.json"
N, D = 1024, 64
BITS, HASHES = (4, 6, 8, 10, 12, 16), (8, 16, 32, 64, 128, 256)
SOFT = {"t 2": 2, "t 4": 4, "t 8": 8}  # of 12 bits, sharpness 2
COSINES = np.linspace(-0.2, 1, 25)
KERNELS = {  # curves of the soft kernel: n_bits, n_probes, sharpness
    "12 bits, t 4, sharpness 1": (12, 4, 1.0),
    "12 bits, t 4, sharpness 2": (12, 4, 2.0),
    "12 bits, t 4, sharpness 4": (12, 4, 4.0),
    "12 bits, t 2, sharpness 2": (12, 2, 2.0),
    "12 bits, t 16, sharpness 2": (12, 16, 2.0),
}
SECTIONS = ("errors", "kernels", "costs", "crossover")
LENGTHS = (64, 128, 192, 256, 512, 1024)


def rows(data, generator):
    """Queries and keys: independent directions, or about 16 shared centres, as trained ones are."""
    noise = torch.randn(2, 1, 1, N, D, generator=generator)
    if data == "random":
        return noise
    centres = torch.randn(16, D, generator=generator)
    return centres[torch.randint(16, (2, 1, 1, N), generator=generator)] + 0.65 * noise


def angle(x, y):
    return torch.acos((x * y).sum(-1).clamp(-1, 1)).mean().item()


def errors(bits, hashes, sets, n_many):
    """Mean angle of YOSO-m to YOSO-E in radians, measured and by the formula.

    That of soft codes is to the mean of 4 n_many hashes of their own.
    """
    found = {}
    for data in ("random", "clustered"):
        generator = torch.Generator().manual_seed(0)
        query, key = rows(data, generator)
        value = torch.randn(1, 1, N, D, generator=generator)
        unit = (torch.nn.functional.normalize(x[0, 0].double(), dim=-1) for x in (query, key))
        cosine = next(unit) @ next(unit).T
        of_bits = {}
        for n_bits in bits:
            exact = yoso_attention(query, key, value, estimator=Expected(n_bits=n_bits))
            p = (1 - torch.acos(cosine.clamp(-1, 1)) / torch.pi) ** n_bits
            ratio = (p * (1 - p)).sum(-1) / (p * p).sum(-1)
            of_bits[n_bits] = {
                m: {
                    "measured": np.mean(
                        [angle(sampled(query, key, value, n_bits, m, s), exact) for s in sets]
                    ),
                    "formula": torch.atan(torch.sqrt(ratio / m)).mean().item(),
                }
                for m in hashes
            }
        of_probes = {}
        for name, n_probes in SOFT.items():
            soft = Soft(n_probes=n_probes)
            many = [
                yoso_attention(
                    *(query, key, value),
                    estimator=soft.for_inference(n_many),
                    normalize=None,
                    seed=s,
                )
                for s in range(100, 104)
            ]
            mean = torch.nn.functional.normalize(sum(many), dim=-1)
            of_probes[name] = {}
            for m in hashes:
                outs = [
                    yoso_attention(query, key, value, estimator=soft.for_inference(m), seed=seed)
                    for seed in sets
                ]
                of_probes[name][m] = np.mean([angle(out, mean) for out in outs])
        found[data] = {"hard": of_bits, "soft": of_probes}
    return found


def sampled(query, key, value, n_bits, n_hashes, seed):
    estimator = Sampled(n_bits=n_bits, n_hashes=n_hashes, expectation="never")
    return yoso_attention(query, key, value, estimator=estimator, seed=seed)


def kernels(n_pairs):
    """Mean weight of pairs of unit rows by their cosine: soft codes of KERNELS."""
    rng = np.random.default_rng(0)
    x, other = rng.normal(size=(2, n_pairs, D))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    other -= (other * x).sum(1, keepdims=True) * x
    other /= np.linalg.norm(other, axis=1, keepdims=True)
    curves = {}
    for name, (n_bits, n_probes, sharpness) in KERNELS.items():
        hasher = FastHadamard(D, n_bits, 256, seed=0)
        codes, weights = hasher.soft_hash(x, n_probes, sharpness)
        curve = []
        for c in COSINES:
            y_codes, y_weights = hasher.soft_hash(
                c * x + np.sqrt(1 - c * c) * other, n_probes, sharpness
            )
            same = codes[..., :, None] == y_codes[..., None, :]
            weight = np.einsum("nha,nhab,nhb->nh", weights, same, y_weights, optimize=True)
            curve.append(float(weight.mean()))
        curves[name] = curve
    return {"cosines": COSINES.tolist(), "curves": curves}


def costs(stopwatch, bits, hashes):
    """Milliseconds of forward, and of forward and backward, at n = 4096: one head."""
    tensors = inputs(4096, requires_grad=True, heads=1)

    def call(name, estimator):
        return of_pass(partial(yoso_attention, estimator=estimator), name, tensors)

    settings = {f"n_bits {b}": Sampled(n_bits=b) for b in bits}
    settings |= {f"n_hashes {m}": Sampled(n_bits=8, n_hashes=m) for m in hashes}
    settings |= {f"12 bits, {name}": Soft(n_probes=t) for name, t in SOFT.items()}
    found = {}
    for name in ("forward", "forward + backward"):
        calls = {key: call(name, estimator) for key, estimator in settings.items()}
        found[name] = {key: 1e3 * x for key, x in stopwatch.in_turns(calls).items()}
    return found


def crossover(stopwatch, lengths):
    """Milliseconds of the expectation and of 32 hashes by length, one head, forward."""
    found = {}
    for n in lengths:
        tensors = inputs(n, heads=1)
        calls = {
            name: of_pass(partial(yoso_attention, estimator=estimator), "forward", tensors)
            for name, estimator in (
                ("expected", Expected(n_bits=8)),
                ("sampled", Sampled(n_bits=8, expectation="never")),
            )
        }
        found[n] = {key: 1e3 * x for key, x in stopwatch.in_turns(calls).items()}
    return found


def measure(sections, quick):
    torch.set_num_threads(1)
    pin_to_one_cpu()
    stopwatch = Stopwatch(repeats=3, seconds=0.5 if quick else 5.0, threads=1, long=False)
    short = Stopwatch(repeats=3, seconds=0.1 if quick else 1.0, threads=1, long=False)
    bits, hashes = ((8,), (8, 32)) if quick else (BITS, HASHES)
    measured = {
        "errors": lambda: errors(bits, hashes, range(2 if quick else 8), 64 if quick else 1024),
        "kernels": lambda: kernels(20 if quick else 200),
        "costs": lambda: costs(stopwatch, bits, hashes),
        "crossover": lambda: crossover(short, LENGTHS[:2] if quick else LENGTHS),
    }
    settings = {"n": N, "d": D, "lengths": LENGTHS, "cost at n": 4096, "sharpness": 2.0}
    results = {"machine": machine(), "settings": settings}
    return results | {name: measured[name]() for name in sections}


def tables(results):
    for data, found in results.get("errors", {}).items():
        hard = found["hard"]
        hashes = list(next(iter(hard.values())))
        lines = [
            [f"{b} bits", *(f"{of[m]['measured']:.2f} ({of[m]['formula']:.2f})" for m in hashes)]
            for b, of in hard.items()
        ]
        lines += [
            [f"12 bits, soft, {name}", *(f"{of[m]:.2f}" for m in hashes)]
            for name, of in found["soft"].items()
        ]
        title = f"Angle to the expectation, {data} rows (the formula's), by n_hashes:"
        yield table(title, ["", *hashes], lines)
    if costs := results.get("costs"):
        names = list(costs["forward"])
        lines = [[name, *(figure(of[name]) for of in costs.values())] for name in names]
        yield table("Milliseconds, one head, n = 4096:", ["", *costs], lines)
    if found := results.get("crossover"):
        lines = [[n, figure(of["expected"]), figure(of["sampled"])] for n, of in found.items()]
        yield table("Milliseconds, forward:", ["n", "expected", "32 hashes"], lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    path = options.json or (None if options.quick else OUT)
    if options.tables:
        results = json.loads((path or OUT).read_text())
    else:
        results = json.loads(json.dumps(measure(options.sections, options.quick)))
        if path:
            if len(options.sections) < len(SECTIONS) and path.exists():
                results = json.loads(path.read_text()) | results
            write_json(path, results)
    print("\n".join(tables(results)))


if __name__ == "__main__":
    main()
