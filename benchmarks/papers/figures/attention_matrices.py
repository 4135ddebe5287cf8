"""Figure 6: attention matrices of softmax, YOSO-E and YOSO-m for the same queries and keys."""

import numpy as np
import torch
from matplotlib import pyplot as plt
from torch.nn import functional as F

from benchmarks.measurement import table as markdown
from benchmarks.papers.figures import byte_model
from lshkit.attention import Expected, Sampled, yoso_attention

TITLE = "Attention matrices (ICML figure 6)"
SHOWN = 64
HASHES = (8, 32, 128)


def by_row(weights):
    return weights / weights.sum(-1, keepdim=True).clamp_min(1e-12)


def matrices(query, key):
    """Rows that sum to 1, (heads, n, n): weights are the outputs for values that are unit rows."""
    n_bits = byte_model.N_BITS
    eye = torch.eye(key.shape[-2]).expand(*key.shape[:2], -1, -1)
    cosines = F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).transpose(-1, -2)
    found = {"softmax": (n_bits * cosines).softmax(-1)}
    options = {"normalize": None, "seed": 0}
    expected = yoso_attention(query, key, eye, estimator=Expected(n_bits=n_bits), **options)
    found["YOSO-E"] = by_row(expected)
    for m in HASHES[::-1]:
        sampled = Sampled(n_bits=n_bits, n_hashes=m, expectation="never")
        out = yoso_attention(query, key, eye, estimator=sampled, **options)
        found[f"YOSO-{m}"] = by_row(out)
    return found


def measure(settings):
    training = settings.training
    model = byte_model.trained("YOSO-E", training, settings.models)
    _, held_out = byte_model.texts(training)
    batch = byte_model.batches(
        held_out, min(training.length, SHOWN), 1 if settings.quick else 16, 1
    )
    tokens = batch[0].tokens
    found = {}
    for q, k, _ in byte_model.heads_of_layers(model, tokens):
        for name, weights in matrices(q, k).items():
            found.setdefault(name, []).append(weights)
    found = {name: torch.stack(layers, 1).flatten(1, 2) for name, layers in found.items()}

    def likeness(a, b):
        return float(F.cosine_similarity(found[a].double(), found[b].double(), dim=-1).mean())

    names = [name for name in found if name != "YOSO-E"]
    results = {
        "tau": byte_model.N_BITS,
        "tokens": tokens.shape[1],
        "sequences": tokens.shape[0],
        "heads": training.heads,
        "row_cosine_with_expected": {name: likeness(name, "YOSO-E") for name in names},
        "row_cosine_with_softmax": {n: likeness(n, "softmax") for n in found if n != "softmax"},
        "share_of_largest_tenth": {
            name: float(w.topk(max(1, w.shape[-1] // 10), -1).values.sum(-1).mean())
            for name, w in found.items()
        },
    }
    return results, {name: weights[0].numpy() for name, weights in found.items()}


def table(results):
    expected, softmax = results["row_cosine_with_expected"], results["row_cosine_with_softmax"]
    rows = [
        [name, f"{expected[name]:.3f}" if name in expected else "",
         f"{softmax[name]:.3f}" if name in softmax else "", f"{share:.3f}"]
        for name, share in results["share_of_largest_tenth"].items()
    ]  # fmt: skip
    header = ["", "row's cosine with YOSO-E", "with softmax", "weight of a row's largest tenth"]
    title = f"{TITLE}; {results['sequences']} sequences of {results['tokens']} tokens"
    return markdown(title, header, rows)


def furthest_heads(weights, heads):
    """Of each layer the head with the most weight on other than the nearest tokens."""
    position = np.arange(weights.shape[-1])
    far = (weights * (abs(position[:, None] - position) > 4)).sum((1, 2)).reshape(-1, heads)
    return [int(layer * heads + head) for layer, head in enumerate(far.argmax(1))]


def draw(results, arrays):
    heads = furthest_heads(arrays["YOSO-E"], results["heads"])
    picture, axes = plt.subplots(
        len(heads), len(arrays), figsize=(2.3 * len(arrays), 2.45 * len(heads)),
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for row, head in zip(axes, heads, strict=True):
        first = head == heads[0]
        bound = arrays["YOSO-E"][head].max()
        for axis, (name, weights) in zip(row, arrays.items(), strict=True):
            axis.imshow(weights[head], cmap="magma", vmin=0, vmax=bound, interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
            if first:
                axis.set_title(name, fontsize=11)
        layer, of_layer = divmod(head, results["heads"])
        row[0].set_ylabel(f"layer {layer + 1}, head {of_layer + 1}", fontsize=10)
    return picture
