"""Bias and noise of each sampled gradient, against the exact derivative of YOSO-E.

    python benchmarks/gradient_variance.py [--json PATH] [--sets N]

Prints the Markdown tables of docs/gradients.md. The output is not normalised and the gradient that
comes down to it is fixed, so that the only noise is that of the hash functions.
"""

import argparse
import json
import math
import pathlib
import platform

import torch

import lshkit
from lshkit.attention import yoso_attention

D, N_HASHES = 64, 32
RESULTS = pathlib.Path(__file__).parent / "results" / "gradient_variance.json"

# Length, n_bits, and a row's name: options of yoso_attention. Soft codes have another kernel, hence
# another exact derivative: their noise is measured about their own mean.
TABLES = {
    "gradients": (
        256,
        8,
        {
            '`"lower_bound"`': {"gradient": "lower_bound"},
            '`"collided"`': {"gradient": "collided"},
            '`"unbiased"`': {"gradient": "unbiased"},
            "soft codes, 4 probes of 12 bits": {"estimator": "soft", "n_bits": 12},
        },
    ),
    # The sketch is for buckets of many rows: here 64.
    "sketch": (
        2048,
        5,
        {
            '`"lower_bound"`': {},
            "`gradient_rank=16`": {"gradient_rank": 16},
            "`gradient_rank=8`": {"gradient_rank": 8},
            "`gradient_rank=4`": {"gradient_rank": 4},
        },
    ),
}


def random_rows(n, generator):
    """Independent directions: cosines of 0 +- 1/8."""
    return torch.randn(2, n, D, generator=generator)


def clustered_rows(n, generator):
    """Rows about 16 shared centres, as trained queries and keys are: cosines of 0 and 0.7."""
    centres = torch.randn(16, D, generator=generator)
    which = torch.randint(16, (2, n), generator=generator)
    return centres[which] + 0.65 * torch.randn(2, n, D, generator=generator)


DATA = {"random": random_rows, "clustered": clustered_rows}


def gradients(query, key, value, grad_out, **options):
    """Of queries and keys, (2, heads, n, d)."""
    inputs = [x.requires_grad_() for x in (query.clone(), key.clone(), value)]
    out = yoso_attention(*inputs, n_hashes=N_HASHES, normalize=None, **options)
    grads = torch.autograd.grad(out, inputs[:2], grad_out)
    return torch.stack([g[0].double() for g in grads])


def measure(rows, n, n_bits, rows_of_table, sets):
    """Relative to the length of the exact gradient: the error of the mean and the spread."""
    generator = torch.Generator().manual_seed(0)
    query, key = rows(n, generator)
    value, grad_out = torch.randn(2, n, D, generator=generator)
    one = [x[None, None] for x in (query, key, value, grad_out)]
    exact = gradients(
        *(x.double() for x in one), n_bits=n_bits, estimator="expected", gradient="exact"
    )
    heads = 16  # a set of hash functions each
    many = [x.expand(1, heads, -1, -1) for x in one]
    results = {}
    for name, row in rows_of_table.items():
        options = {"estimator": "sampled", "n_bits": n_bits} | row
        total, squares = torch.zeros_like(exact), 0.0
        for seed in range(sets // heads):
            got = gradients(*many, seed=seed, **options)
            total += got.sum(1, keepdim=True)
            squares += float((got**2).sum())
        count = sets // heads * heads
        mean = total / count
        variance = (squares - count * float((mean**2).sum())) / (count - 1)
        if options["estimator"] == "soft":
            # The square of the true mean's length: that of the estimate less its own noise.
            length = math.sqrt(float((mean**2).sum()) - variance / count)
            results[name] = {"deviation": math.sqrt(variance) / length}
            continue
        length = float(exact.norm())
        bias = float(((mean - exact) ** 2).sum()) - variance / count  # the mean's own noise
        results[name] = {
            "bias": math.sqrt(max(0.0, bias)) / length,
            "deviation": math.sqrt(variance) / length,
            "scale": float((mean * exact).sum() / length**2),
        }
    return results


def markdown(results):
    lines = [
        "| gradient | " + " | ".join(f"{d}: bias | deviation | length" for d in results) + " |",
        "|---|" + "---|" * 3 * len(results),
    ]
    for name in next(iter(results.values())):
        cells = [
            f"{data[name][number]:.2f}" if number in data[name] else ""
            for data in results.values()
            for number in ("bias", "deviation", "scale")
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS, help="where results go")
    parser.add_argument("--sets", type=int, default=512, help="sets of hash functions")
    options = parser.parse_args()
    if options.sets < 32:
        parser.error(f"--sets must be at least 32, got {options.sets}")
    results = {
        table: {name: measure(rows, *settings, options.sets) for name, rows in DATA.items()}
        for table, settings in TABLES.items()
    }
    report = {
        "settings": {
            "d": D,
            "n_hashes": N_HASHES,
            "sets": options.sets,
            **{table: {"n": n, "n_bits": bits} for table, (n, bits, _) in TABLES.items()},
        },
        "versions": {
            "lshkit": lshkit.__version__,
            "torch": torch.__version__,
            "cpu": platform.machine(),
        },
        "results": results,
    }
    options.json.write_text(json.dumps(report, indent=2) + "\n")
    for table, (n, n_bits, _) in TABLES.items():
        print(f"\n{table}: n = {n}, n_bits {n_bits}\n\n{markdown(results[table])}")


if __name__ == "__main__":
    main()
