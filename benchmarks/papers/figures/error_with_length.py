"""Figure 8, and figure 5 of the earlier version: the error of YOSO-m against the length."""

import math

import torch
from matplotlib import pyplot as plt
from torch.nn import functional as F

from benchmarks.measurement import table as markdown
from benchmarks.papers.figures import byte_model
from lshkit.attention import Expected, Sampled, yoso_attention

TITLE = "Error of YOSO-m against YOSO-E by length (ICML figure 8; ICLR version, figure 5)"
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
HASHES = (8, 16, 32, 64, 128)
STRETCHES = 3  # of as many tokens as the longest length has
TAUS = ("trained", "log2 n")


def errors(q, k, v, n_bits, hashes):
    """Mean radians between the rows of YOSO-m and YOSO-E; mean of |difference|_inf / |YOSO-E|_inf.

    Rows have unit length, as the model uses them.
    """
    expected = yoso_attention(q, k, v, estimator=Expected(n_bits=n_bits))
    found = {}
    for m in hashes:
        sampled = Sampled(n_bits=n_bits, n_hashes=m, expectation="never")
        out = yoso_attention(q, k, v, estimator=sampled, seed=m)
        # Exact at small angles too; a row of zeros (no collision) is at a right angle.
        apart, along = (out - expected).norm(dim=-1), (out + expected).norm(dim=-1)
        relative = (out - expected).abs().amax(-1) / expected.abs().amax(-1)
        found[m] = float((2 * torch.atan2(apart, along)).mean()), float(relative.mean())
    return found


def measure(settings):
    training = settings.training
    lengths = (64, 128) if settings.quick else LENGTHS
    hashes = (8, 16) if settings.quick else HASHES
    model = byte_model.trained("YOSO-E", training, settings.models)
    _, held_out = byte_model.texts(training)
    found = {tau: {"radians": {}, "relative": {}} for tau in TAUS}
    entropy = {}
    # The same tokens at each length, cut into as many sequences as they make.
    stretches = byte_model.batches(held_out, lengths[-1], STRETCHES, 1)[0].tokens
    for n in lengths:
        tokens = stretches.reshape(-1, n)
        layers = byte_model.heads_of_layers(model, tokens)
        for tau in TAUS:
            n_bits = byte_model.N_BITS if tau == "trained" else int(math.log2(n))
            of_layers = [errors(*qkv, n_bits, hashes) for qkv in layers]
            for i, kind in enumerate(("radians", "relative")):
                found[tau][kind][n] = {
                    m: sum(layer[m][i] for layer in of_layers) / len(of_layers) for m in hashes
                }
        entropy[n] = sum(mean_entropy(q[:1], k[:1]) for q, k, _ in layers) / len(layers)
    return {
        "tau_of_training": byte_model.N_BITS,
        "lengths": list(lengths),
        "hashes": list(hashes),
        "tokens": stretches.numel(),
        "errors": found,
        "growth": {
            tau: {m: growth(found[tau]["radians"], m) for m in hashes} for tau in TAUS
        },
        "perplexity_of_weights": entropy,
    }, None  # fmt: skip


def mean_entropy(q, k):
    """exp of the mean entropy of YOSO-E's rows: on how many keys a query spends its weight."""
    cosines = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-1, -2)
    weights = (1 - cosines.clamp(-1, 1).arccos() / math.pi) ** byte_model.N_BITS
    weights = weights / weights.sum(-1, keepdim=True)
    return float((-torch.special.xlogy(weights, weights).sum(-1)).mean().exp())


def growth(radians, m):
    """The error at the longest length by that at the shortest, and the power of n that this is."""
    lengths = list(radians)
    first, last = radians[lengths[0]][m], radians[lengths[-1]][m]
    return {
        "ratio": last / first,
        "of_log_n": math.log(lengths[-1]) / math.log(lengths[0]),
        "exponent": math.log(last / first) / math.log(lengths[-1] / lengths[0]),
    }


def table(results):
    parts = []
    n_bits = results["tau_of_training"]
    for tau in TAUS:
        named = f"tau {n_bits}, as trained" if tau == "trained" else "tau = log2 n"
        for kind, what in (("radians", "mean radians"), ("relative", "relative error")):
            errors = results["errors"][tau][kind]
            rows = [
                [f"YOSO-{m}", *(f"{errors[str(n)][str(m)]:.3f}" for n in results["lengths"])]
                + ([f"{results['growth'][tau][str(m)]['ratio']:.2f}",
                    f"{results['growth'][tau][str(m)]['exponent']:.2f}"]
                   if kind == "radians" else [])
                for m in results["hashes"]
            ]  # fmt: skip
            header = ["", *(f"n = {n}" for n in results["lengths"])]
            if kind == "radians":
                header += ["last / first", "power of n"]
            parts.append(markdown(f"{TITLE}: {what}, {named}", header, rows))
    ratio = next(iter(results["growth"]["trained"].values()))["of_log_n"]
    spent = ", ".join(f"{x:.0f} at {n}" for n, x in results["perplexity_of_weights"].items())
    parts.append(
        f"log n grows by {ratio:.2f} over these lengths. Keys on which a query of YOSO-E spends "
        f"its weight (exp of the entropy): {spent}.\n"
    )
    return "\n".join(parts)


COLORS = ("#56B4E9", "#0072B2", "#009E73", "#E69F00", "#D55E00")


def draw(results, arrays):
    picture, axes = plt.subplots(1, 3, figsize=(13.5, 4.5), layout="constrained")
    n_bits, lengths = results["tau_of_training"], results["lengths"]
    panels = (
        ("trained", "radians", f"mean angle to YOSO-E (radians), τ = {n_bits}"),
        ("log2 n", "radians", "mean angle to YOSO-E (radians), τ = log2 n"),
        ("trained", "relative", f"relative error, largest element, τ = {n_bits}"),
    )
    for axis, (tau, kind, title) in zip(axes, panels, strict=True):
        errors = results["errors"][tau][kind]
        for m, color in zip(results["hashes"], COLORS, strict=False):
            values = [errors[str(n)][str(m)] for n in lengths]
            axis.plot(lengths, values, marker="o", markersize=4, color=color, label=f"YOSO-{m}")
            if kind == "radians":
                as_log = [values[0] * math.log(n) / math.log(lengths[0]) for n in lengths]
                axis.plot(lengths, as_log, ":", color=color, linewidth=1)
        axis.set_xscale("log")
        axis.set_xticks(lengths, [str(n) for n in lengths])
        axis.minorticks_off()
        axis.set_ylim(0)
        axis.set_xlabel("sequence length")
        axis.set_title(title, fontsize=11)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].plot([], [], ":", color="black", linewidth=1, label="if it grew as log n")
    axes[0].legend(frameon=False, fontsize=9, ncols=2)
    return picture
