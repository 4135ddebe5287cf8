"""Draws the figures of the README, the front page and docs/choosing.md into docs/images.

    python docs/figures.py

Curves of formulas, and what benchmarks measured (benchmarks/results).
"""

import json
import pathlib
import re

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

DOCS = pathlib.Path(__file__).resolve().parent
IMAGES = DOCS / "images"


def measured(name):
    return json.loads((DOCS.parent / "benchmarks" / "results" / f"{name}.json").read_text())


RESULTS = measured("choosing")
BITS = (1, 2, 4, 8, 12, 16)
COSINE = np.linspace(-1, 1, 401)
plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})


def probability(cosine, n_bits):
    return (1 - np.arccos(np.clip(cosine, -1, 1)) / np.pi) ** n_bits


# Methods of one row of the density benchmark, by what the figure calls them.
DENSITIES = {
    "scikit-learn, ball_tree": "scikit-learn, ball tree",
    "NumPy, all rows": "NumPy, all rows",
    "lshkit, brute": "lshkit, rtol=0",
    "NumPy, permuted sample": "NumPy, random sample",
    "DEANN on FAISS": "DEANN on FAISS",
    "lshkit, auto at rtol 0.1": "lshkit, rtol=0.1",
}


def probes(name):  # "t 4" of the results in words
    return re.sub(r"\bt (\d+)", r"\1 probes", name)


def number(x):
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def overview():
    """Attention by length, and a density by method with the error beside the time."""
    attention = measured("attention_cpu/amd_epyc_family_26_model_2_avx512")
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.6), width_ratios=(1, 1.15))
    passes = "forward + backward"
    sides = (("softmax", "softmax", "softmax (torch, float32)", "0.45", "o-"),)
    sides += (("softmax", "yoso", "YOSO, 8 bits", "C0", "o-"),)
    sides += (("soft", "4 probes", "soft codes, 12 bits", "C1", "s-"),)
    for section, side, label, color, style in sides:
        times = {int(n): of[passes][side] for n, of in attention[section].items()}
        times = {n: 1e3 * seconds for n, seconds in times.items() if 512 <= n <= 16384}
        left.loglog(list(times), list(times.values()), style, ms=4, color=color, label=label)
    left.set_xscale("log", base=2)
    left.set_xticks([512, 1024, 4096, 16384], ["512", "1,024", "4,096", "16,384"])
    left.set(xlabel="length", ylabel="ms, forward and backward")
    left.set_title("attention: 8 heads, d = 64, one CPU thread")
    left.legend(frameon=False, fontsize=8)

    (row,) = (row for row in measured("kde")["digits"] if row["wanted_median"] == 1e-4)
    found = [row["methods"][name] for name in DENSITIES]
    times = [method["microseconds"] for method in found]
    ours = ["C0" if label.startswith("lshkit") else "0.7" for label in DENSITIES.values()]
    right.barh(list(DENSITIES.values()), times, color=ours)
    for y, method in enumerate(found):
        error = method["test_error"]
        note = "exact" if error < 1e-4 else f"error {100 * error:.1f} %"
        right.text(1.15 * method["microseconds"], y, f"{number(method['microseconds'])}, {note}",
                   va="center", fontsize=8)  # fmt: skip
    right.set_xscale("log")
    right.set_xlim(1, 1e6)
    right.invert_yaxis()
    right.set_xlabel("microseconds a query")
    right.set_title("density of 100,000 rows of 64 features")
    save(figure, "overview")


def front_page():
    """Keys on a circle cut by random lines, the kernel that this makes, and the sum of buckets."""
    rng = np.random.default_rng(5)
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(10.5, 3.4))

    angles = np.sort(rng.uniform(0, 2 * np.pi, 40))
    keys = np.stack([np.cos(angles), np.sin(angles)], 1)
    normals = rng.normal(size=(3, 2))
    query = np.array([np.cos(1.1), np.sin(1.1)])
    codes, code = (keys @ normals.T > 0) @ [1, 2, 4], (query @ normals.T > 0) @ [1, 2, 4]
    for normal in normals:
        along = 1.3 * np.array([-normal[1], normal[0]]) / np.linalg.norm(normal)
        left.plot([-along[0], along[0]], [-along[1], along[1]], color="0.6", lw=1)
    left.scatter(*keys.T, c=codes, cmap="Set2", s=28, vmin=0, vmax=7)
    near = codes == code
    left.scatter(*keys[near].T, facecolors="none", edgecolors="black", s=60, linewidths=1)
    left.scatter(*query, marker="*", color="black", s=130, zorder=3)
    left.set_title("one hash of 3 bits: the query (star)\ncollides with the keys of its bucket")
    left.set_aspect("equal")
    left.axis("off")

    share = np.zeros(len(COSINE))
    n_hashes = 32
    for _ in range(n_hashes):
        planes = rng.normal(size=(8, 2))
        x = np.stack([COSINE, np.sqrt(1 - COSINE**2)], 1)
        share += ((x @ planes.T > 0) == (planes[:, 0] > 0)).all(1) / n_hashes
    middle.plot(COSINE, share, lw=1, label="share of 32 hashes")
    middle.plot(COSINE, probability(COSINE, 8), lw=2, label=r"$(1-\theta/\pi)^8$")
    softmax = np.exp(8 * (COSINE - 1))
    middle.plot(COSINE, softmax, "--", lw=1, color="0.4", label=r"$\exp(8(\cos\theta-1))$")
    middle.set(xlabel="cosine of query and key", xlim=(-0.2, 1))
    middle.set_title("how often they collide is a kernel")
    middle.legend(frameon=False, fontsize=8)

    turn = np.linspace(0, 2 * np.pi, 361)
    queries = np.stack([np.cos(turn), np.sin(turn)], 1)
    values = np.sin(3 * angles) + 0.3 * rng.normal(size=len(angles))
    weights = probability(queries @ keys.T, 8)
    right.plot(turn, weights @ values, lw=2, color="C1", label="the kernel's sum")
    for m, color in ((8, "0.75"), (128, "C0")):
        sums = np.zeros(len(turn))
        for _ in range(m):
            planes = rng.normal(size=(8, 2))
            code_of = [(x @ planes.T > 0) @ (1 << np.arange(8)) for x in (queries, keys)]
            sums += np.bincount(code_of[1], weights=values, minlength=256)[code_of[0]] / m
        right.plot(turn, sums, lw=1, color=color, label=f"buckets, {m} hashes", zorder=m)
    right.set(xlabel="angle of the query", xlim=(0, 2 * np.pi), ylim=(-4, 9))
    right.set_title("sums of values by bucket estimate\nits sum over all keys")
    right.legend(frameon=False, fontsize=8)
    save(figure, "collisions")


def kernels():
    figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.2))
    for n_bits in BITS:
        axes[0].plot(
            COSINE, probability(COSINE, n_bits), label="1 bit" if n_bits == 1 else f"{n_bits} bits"
        )
        axes[1].semilogy(COSINE, np.maximum(probability(COSINE, n_bits), 1e-9))
    for n_bits in (4, 8, 16):
        axes[1].semilogy(
            COSINE,
            2.0**-n_bits * np.exp(2 * n_bits / np.pi * COSINE),
            ":",
            color="0.3",
            lw=1,
            label="softmax of the same slope at 0" if n_bits == 4 else None,
        )
    axes[0].set(xlabel="cosine", title="collision probability")
    axes[1].set(xlabel="cosine", ylim=(1e-6, 1.5), title="the same, logarithmic")
    for n_bits, n_hashes in ((4, 8), (8, 32), (12, 32), (12, 128), (16, 64)):
        p = probability(COSINE, n_bits)
        axes[2].plot(COSINE, 1 - (1 - p) ** n_hashes, label=f"{n_bits} bits, {n_hashes} hashes")
    axes[2].set(xlabel="cosine", title="probability of a collision in any hash")
    for ax in axes:
        ax.legend(frameon=False, fontsize=7, loc="upper left")
    axes[1].set_ylim(1e-6, 8)
    save(figure, "choosing_kernels")


def errors():
    figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.4))
    for ax, data in zip(axes, ("clustered", "random"), strict=False):
        for n_bits, of in RESULTS["errors"][data]["hard"].items():
            hashes = [int(m) for m in of]
            measured = [x["measured"] for x in of.values()]
            line = ax.plot(hashes, measured, "o", ms=3, label=f"{n_bits} bits")[0]
            ax.plot(hashes, [x["formula"] for x in of.values()], lw=1, color=line.get_color())
        for (name, of), marker in zip(RESULTS["errors"][data]["soft"].items(), "sv^", strict=True):
            label = f"12 bits, soft, {probes(name)}"
            hashes = [int(m) for m in of]
            ax.plot(hashes, list(of.values()), f"k--{marker}", lw=0.7, ms=3, label=label)
        ax.set_xscale("log", base=2)
        ax.set(xlabel="n_hashes", ylim=(0, np.pi / 2), title=f"{data} rows")
        ax.set_ylabel("angle to the expectation, rad")
    axes[0].legend(frameon=False, fontsize=7, ncol=2, loc="upper right")
    for ax in axes[:2]:
        ax.set_ylim(0, 1.85)
    forward = RESULTS["costs"]["forward"]
    both = RESULTS["costs"]["forward + backward"]
    for costs, name in ((forward, "forward"), (both, "forward + backward")):
        hashes = [key for key in costs if key.startswith("n_hashes")]
        counts = [int(key.split()[1]) for key in hashes]
        axes[2].loglog(counts, [costs[key] for key in hashes], "o-", ms=3, label=name)
    axes[2].set_xscale("log", base=2)
    axes[2].set(xlabel="n_hashes", title="one head, n = 4096, 8 bits")
    axes[2].set_ylabel("time of a call, ms")
    axes[2].legend(frameon=False, fontsize=8)
    save(figure, "choosing_errors")


def soft():
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2))
    cosines = np.array(RESULTS["kernels"]["cosines"])
    for name, curve in RESULTS["kernels"]["curves"].items():
        for ax in axes:
            ax.plot(cosines, np.array(curve) / curve[-1], lw=1.2, label=probes(name))
    for ax in axes:
        for n_bits, style in ((8, "k-"), (12, "k--")):
            label = f"hard, {n_bits} bits"
            ax.plot(COSINE, probability(COSINE, n_bits), style, lw=0.8, label=label)
        ax.set(xlabel="cosine", xlim=(-0.2, 1))
    axes[1].set_yscale("log")
    axes[1].set_ylim(1e-4, 1.2)
    axes[0].set_title("mean weight, over that at cosine 1")
    axes[1].set_title("the same, logarithmic")
    axes[0].legend(frameon=False, fontsize=7)
    save(figure, "choosing_soft")


def save(figure, name):
    figure.tight_layout()
    figure.savefig(IMAGES / f"{name}.png", dpi=110, metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    overview()
    front_page()
    kernels()
    errors()
    soft()
