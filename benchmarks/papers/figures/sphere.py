"""Figure 1: outputs of YOSO-m, YOSO-E and softmax for all queries of the sphere."""

import numpy as np
import torch
from matplotlib import pyplot as plt

from benchmarks.measurement import table as markdown
from lshkit.attention import Expected, Sampled, yoso_attention

TITLE = "Outputs on the sphere (ICML figure 1)"
N_BITS = 8
N_KEYS = 32


def measure(settings):
    size, hashes = (20, (1, 4)) if settings.quick else (300, (1, 4, 16, 64, 256))
    generator = torch.Generator().manual_seed(3)
    key = torch.randn(N_KEYS, 3, generator=generator)
    value = torch.randn(N_KEYS, 1, generator=generator)
    y, x = torch.meshgrid(torch.linspace(1, -1, size), torch.linspace(-1, 1, size), indexing="ij")
    seen = x**2 + y**2 <= 1
    half = torch.stack([x[seen], y[seen], (1 - x[seen] ** 2 - y[seen] ** 2).sqrt()], -1)
    query = torch.cat([half, -half])  # both halves count, the front one is shown

    def yoso(estimator):
        tensors = (z[None, None] for z in (query, key, value))
        return yoso_attention(*tensors, estimator=estimator, normalize=None, seed=0).flatten()

    def sampled(n_hashes):
        sizes = {"n_bits": N_BITS, "n_hashes": n_hashes}
        return Sampled(**sizes, hasher="hyperplane", expectation="never")

    cosines = query @ torch.nn.functional.normalize(key, dim=-1).T
    outputs = {f"YOSO-{m}": yoso(sampled(m)) for m in hashes}
    outputs["YOSO-E"] = yoso(Expected(n_bits=N_BITS))
    outputs["softmax"] = ((N_BITS * (cosines - 1)).exp() @ value).flatten()

    def correlation(a, b):
        return float(np.corrcoef(outputs[a], outputs[b])[0, 1])

    expected = outputs["YOSO-E"]
    error = {k: float((o - expected).norm() / expected.norm()) for k, o in outputs.items()}
    pictures = {}
    for name, out in outputs.items():
        pictures[name] = np.full((size, size), np.nan)
        pictures[name][seen.numpy()] = out[: len(half)]
    return {
        "tau": N_BITS,
        "keys": N_KEYS,
        "queries": len(query),
        "correlation_with_expected": {k: correlation(k, "YOSO-E") for k in outputs},
        "relative_error_to_expected": error,
    }, pictures


def table(results):
    correlation = results["correlation_with_expected"]
    error = results["relative_error_to_expected"]
    rows = [[k, f"{correlation[k]:.3f}", f"{error[k]:.3f}"] for k in correlation if k != "YOSO-E"]
    title = f"{TITLE}; tau {results['tau']}, {results['keys']} keys, {results['queries']} queries"
    return markdown(title, ["", "correlation with YOSO-E", "difference / YOSO-E"], rows)


def draw(results, pictures):
    bound = max(np.nanmax(np.abs(pictures[name])) for name in ("YOSO-E", "softmax"))
    picture, axes = plt.subplots(1, len(pictures), figsize=(2.1 * len(pictures), 2.6))
    correlation = results["correlation_with_expected"]
    for axis, (name, values) in zip(axes, pictures.items(), strict=True):
        axis.imshow(values, cmap="RdBu_r", vmin=-bound, vmax=bound, extent=(-1, 1, -1, 1))
        axis.add_patch(plt.Circle((0, 0), 1, fill=False, color="#888888", linewidth=0.6))
        axis.set_title(name, fontsize=11)
        if name != "YOSO-E":
            axis.text(0, -1.25, f"correlation {correlation[name]:.2f}", ha="center", fontsize=8.5)
        axis.set_xlim(-1.05, 1.05)
        axis.axis("off")
    picture.subplots_adjust(left=0.01, right=0.99, wspace=0.06, bottom=0.1, top=0.88)
    return picture
