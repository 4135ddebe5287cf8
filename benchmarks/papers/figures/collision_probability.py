"""Figure 2: the weight of a pair against that of softmax, their derivatives and the lower bound."""

import math

import numpy as np
import torch
from matplotlib import pyplot as plt

from benchmarks.measurement import table as markdown
from lshkit.attention import Expected, Sampled, yoso_attention

TITLE = "Weights and derivatives by cosine (ICML figure 2)"
N_BITS = 8
DIM = 64


def pairs(cosines):
    """A query and a key of each cosine, and the direction in which a query turns to its key."""
    generator = torch.Generator().manual_seed(0)
    shape = len(cosines), 2, DIM
    frame, _ = torch.linalg.qr(torch.randn(shape, generator=generator).transpose(-1, -2).double())
    key, across = (x.float() for x in frame.unbind(-1))
    cosine = torch.tensor(cosines, dtype=torch.float32)[:, None]
    sine = (1 - cosine**2).sqrt()
    return cosine * key + sine * across, key, sine * key - cosine * across, sine.squeeze(1)


def weights_and_slopes(cosines, estimator):
    """What `yoso_attention` gives one key of value 1, and by how much it grows with the cosine."""
    query, key, turn, sine = pairs(cosines)
    query.requires_grad_()
    # Every pair is a batch of its own with one head: weights are outputs.
    out = yoso_attention(
        query[:, None, None],
        key[:, None, None],
        torch.ones(len(cosines), 1, 1, 1),
        estimator=estimator,
        normalize=None,
        seed=0,
    ).flatten()
    (gradient,) = torch.autograd.grad(out.sum(), query)
    return out.detach(), (gradient * turn).sum(-1) / sine


def formulas(x):
    p = 1 - np.arccos(x) / math.pi
    tau = N_BITS
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "exp(tau (x - 1))": np.exp(tau * (x - 1)),
            "collision probability": p**tau,
            "derivative of exp": tau * np.exp(tau * (x - 1)),
            "derivative of collision": tau * p ** (tau - 1) / (math.pi * np.sqrt(1 - x**2)),
            "lower bound": tau / 2 * p**tau,
        }


def measure(settings):
    # As many pairs of each cosine as give the mean of samples a small error.
    cosines = [-0.8, -0.4, 0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97]
    n_hashes, copies = (64, 2) if settings.quick else (1024, 32)
    repeated = [c for c in cosines for _ in range(copies)]
    expected, exact_slope = weights_and_slopes(repeated, Expected(n_bits=N_BITS))
    estimator = Sampled(n_bits=N_BITS, n_hashes=n_hashes, expectation="never")
    sampled, bound = weights_and_slopes(repeated, estimator)
    means = {
        "collision probability": expected,
        "derivative of collision": exact_slope,
        "sampled weight": sampled,
        "lower bound": bound,
    }
    results = {name: x.view(-1, copies).mean(1).tolist() for name, x in means.items()}
    spread = sampled.view(-1, copies).std(1) / math.sqrt(copies)
    return {
        "tau": N_BITS,
        "cosines": cosines,
        "hashes": n_hashes * copies,
        "measured": results,
        "standard_error_of_sampled": spread.tolist(),
        "formula": {k: v.tolist() for k, v in formulas(np.array(cosines)).items()},
    }, None


def table(results):
    measured, formula = results["measured"], results["formula"]
    columns = (
        formula["exp(tau (x - 1))"],
        formula["collision probability"],
        measured["collision probability"],
        measured["sampled weight"],
        formula["derivative of collision"],
        measured["derivative of collision"],
        formula["lower bound"],
        measured["lower bound"],
    )
    header = ["cosine", "exp(tau (x - 1))", "p^tau", "lshkit, expected", "lshkit, sampled",
              "derivative", "lshkit, gradient exact", "lower bound",
              "lshkit, gradient lower_bound"]  # fmt: skip
    rows = [
        [f"{c:g}", *(f"{column[i]:.4f}" for column in columns)]
        for i, c in enumerate(results["cosines"])
    ]
    return markdown(f"{TITLE}; tau {results['tau']}, {results['hashes']} hashes", header, rows)


def draw(results, arrays):
    x = np.cos(np.linspace(math.pi, 0, 2000))  # dense where the slope is infinite
    curves, cosines, measured = formulas(x), results["cosines"], results["measured"]
    picture, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    left.plot(x, curves["exp(tau (x - 1))"], color="black", label="exp(τ (x − 1))")
    left.plot(x, curves["collision probability"], color="#D55E00", label="(1 − arccos(x) / π)^τ")
    left.plot(cosines, measured["sampled weight"], "o", color="#0072B2",
              label=f"lshkit, mean of {results['hashes']} hashes")  # fmt: skip
    left.set_title("weight of a pair", fontsize=11)
    right.plot(x, curves["derivative of exp"], color="black", label="of exp(τ (x − 1))")
    right.plot(x, curves["derivative of collision"], color="#D55E00",
               label="of the collision probability")  # fmt: skip
    right.plot(x, curves["lower bound"], "--", color="#D55E00",
               label="its lower bound τ / 2 (1 − arccos(x) / π)^τ")  # fmt: skip
    right.plot(cosines, measured["derivative of collision"], "s", color="#009E73",
               label='lshkit, gradient="exact"')  # fmt: skip
    right.plot(cosines, measured["lower bound"], "o", color="#0072B2",
               label='lshkit, gradient="lower_bound", sampled')  # fmt: skip
    right.set_ylim(-0.3, 9)
    right.set_title("derivative", fontsize=11)
    for axis in (left, right):
        axis.set_xlabel(f"x, cosine of query and key (τ = {results['tau']})")
        axis.legend(frameon=False, fontsize=9, loc="upper left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    return picture
