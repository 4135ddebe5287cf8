"""Bias and noise of each sampled gradient, against the exact derivative of YOSO-E.

    python -m benchmarks.quality.gradient_variance [--json PATH] [--sets N]

Prints the Markdown tables of docs/gradients.md. The output is not normalised and the gradient that
comes down to it is fixed, so that the only noise is that of the hash functions.
"""

import argparse
import math
import pathlib
import platform

import torch

import lshkit
from benchmarks import RESULTS, write_json
from benchmarks.quality.runs import markdown
from lshkit.attention import Expected, Sampled, Soft, yoso_attention

D, N_HASHES = 64, 32

# Length, n_bits, and a row's name: its estimator. Soft codes have another kernel, hence
# another exact derivative: their noise is measured about their own mean.
TABLES = {
    "gradients": (
        256,
        8,
        {
            '`"lower_bound"`': Sampled(n_bits=8, expectation="never"),
            '`"collided"`': Sampled(n_bits=8, gradient="collided", expectation="never"),
            '`"unbiased"`': Sampled(n_bits=8, gradient="unbiased", expectation="never"),
            "soft codes, 4 probes of 12 bits": Soft(),
        },
    ),
    "subset": (
        256,
        8,
        {
            f"`{gradient!r}`, `gradient_hashes={count}`".replace("'", '"'): Sampled(
                n_bits=8, gradient=gradient, gradient_hashes=count, expectation="never"
            )
            for gradient in ("lower_bound", "unbiased")
            for count in (32, 16, 8)
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


def gradients(query, key, value, grad_out, estimator, seed=None):
    """Of queries and keys, (2, heads, n, d)."""
    inputs = [x.requires_grad_() for x in (query.clone(), key.clone(), value)]
    out = yoso_attention(*inputs, estimator=estimator, normalize=None, seed=seed)
    grads = torch.autograd.grad(out, inputs[:2], grad_out)
    return torch.stack([g[0].double() for g in grads])


def measure(rows, n, n_bits, rows_of_table, sets):
    """Relative to the norm of the exact gradient: the error of the mean and the spread."""
    generator = torch.Generator().manual_seed(0)
    query, key = rows(n, generator)
    value, grad_out = torch.randn(2, n, D, generator=generator)
    one = [x[None, None] for x in (query, key, value, grad_out)]
    exact = gradients(*(x.double() for x in one), Expected(n_bits=n_bits))
    heads = 16  # a set of hash functions each
    many = [x.expand(1, heads, -1, -1) for x in one]
    results = {}
    for name, estimator in rows_of_table.items():
        total, squares = torch.zeros_like(exact), 0.0
        for seed in range(sets // heads):
            got = gradients(*many, estimator, seed)
            total += got.sum(1, keepdim=True)
            squares += float((got**2).sum())
        count = sets // heads * heads
        mean = total / count
        variance = (squares - count * float((mean**2).sum())) / (count - 1)
        if estimator.mean is None:
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


def table_of(results):
    header = ["gradient"]
    for data in results:
        header += [f"{data}: bias", "deviation", "along"]
    rows = []
    for name in next(iter(results.values())):
        found = [
            data[name].get(number)
            for data in results.values()
            for number in ("bias", "deviation", "scale")
        ]
        rows.append([name, *("" if x is None else f"{x:.2f}" for x in found)])
    return markdown(header, rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    out = RESULTS / "gradient_variance.json"
    parser.add_argument("--json", type=pathlib.Path, default=out, help="where results go")
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
    write_json(options.json, report)
    for table, (n, n_bits, _) in TABLES.items():
        print(f"\n{table}: n = {n}, n_bits {n_bits}\n\n{table_of(results[table])}")


if __name__ == "__main__":
    main()
