"""Markdown tables and a picture of the losses on text."""

import pathlib

import numpy as np

from benchmarks import pyplot, save_picture
from benchmarks.quality.runs import markdown

# Okabe and Ito's colours, told apart with any colour vision, by what a method's name begins with.
COLORS = {
    "near and colliding": "#009E73",
    "near and softmax": "#000000",
    "near (64) and colliding": "#009E73",
    "near (64) and softmax": "#000000",
    "near (64) and YOSO": "#D55E00",
    "softmax of colliding": "#009E73",
    "softmax of near and colliding": "#009E73",
    "softmax near": "#CC79A7",
    "softmax": "#000000",
    "kernel near": "#E69F00",
    "kernel": "#0072B2",
    "exponential": "#56B4E9",
    "YOSO": "#D55E00",
    "soft codes": "#D55E00",
    "values alone": "#888888",
}
SOFTMAX = "softmax, ALiBi, own value"  # the opponent
MEASURES = ("repeated_loss", "loss")


def groups(results: dict, budget: str) -> dict[str, dict[int, list[dict]]]:
    """Runs of a budget: method, length, seeds."""
    found: dict[str, dict[int, list[dict]]] = {}
    for run in results["runs"]:
        if run["budget"] == budget:
            found.setdefault(run["method"], {}).setdefault(run["length"], []).append(run)
    return found


def plus_minus(values: list[float]) -> str:
    """The mean and its standard error."""
    if len(values) < 2:
        return "".join(f"{value:.3f}" for value in values)
    return f"{np.mean(values):.3f} ± {np.std(values, ddof=1) / len(values) ** 0.5:.3f}"


def behind(runs: list[dict], softmax: list[dict], measure: str) -> str:
    """How much larger the loss is than softmax's, seed by seed: with the same batches."""
    of_seed = {run["seed"]: run[measure] for run in softmax}
    return plus_minus([r[measure] - of_seed[r["seed"]] for r in runs if r["seed"] in of_seed])


def first_of(setting: dict) -> str:
    parts = [f"{n:,} up to {until:.0%}" for n, _, until in setting.get("first", [])]
    return f", first texts of {', '.join(parts)}" if parts else ""


def title_of(length: int, setting: dict) -> str:
    steps, size = setting["steps"], setting["batch_size"] * length
    if "seconds" in setting:
        return f"{length:,} bytes, {setting['seconds']:,} CPU seconds{first_of(setting)}"
    first = first_of(setting)
    return f"{length:,} bytes, {steps:,} steps of {size:,} bytes{first}"


def tables(results: dict) -> str:
    """A table for each length and budget: means over the seeds with their standard errors.

    And each seed's loss of repeated bytes: a mean over seeds that have learned to look up what
    came before and seeds that have not is the loss of none of them.
    """
    header = ["method", "repeated bytes", f"behind {SOFTMAX}", "all bytes", "behind"]
    header += ["repeated bytes, each seed"]
    parts = []
    for budget, by_length in results["settings"].items():
        found = groups(results, budget)
        for length, setting in by_length.items():
            softmax = found.get(SOFTMAX, {}).get(int(length), [])
            rows = []
            for method, runs_of in found.items():
                runs = runs_of.get(int(length), [])
                if not runs:
                    continue
                cells = [method]
                for measure in MEASURES:
                    cells += [plus_minus([run[measure] for run in runs])]
                    cells += [behind(runs, softmax, measure)]
                each = sorted((run["seed"], run["repeated_loss"]) for run in runs)
                rows.append([*cells, ", ".join(f"{loss:.3f}" for _, loss in each)])
            title = title_of(int(length), setting)
            parts.append(f"\n{title}\n\n{markdown(header, rows)}\n")
    return "".join(parts)


def panels(results: dict) -> dict[str, dict[str, list[dict]]]:
    """Runs by title and method. Of schedules of lengths each method has its best, in all bytes."""
    found: dict[str, dict[str, list[dict]]] = {}
    settings = [(int(n), b, x) for b, of in results["settings"].items() for n, x in of.items()]
    for length, budget, setting in sorted(settings, key=lambda one: one[0]):
        others = [x for n, _, x in settings if n == length]
        alike = [x for x in others if x | {"first": 0} == setting | {"first": 0}]
        title = title_of(length, setting)
        if len(alike) > 1:
            title = title.removesuffix(first_of(setting)) + ", each method's best schedule"
        best = found.setdefault(title, {})
        for method, runs_of in groups(results, budget).items():
            runs = runs_of.get(length, [])
            if runs and (method not in best or mean(runs, "loss") < mean(best[method], "loss")):
                best[method] = runs
    return found


def mean(runs: list[dict], measure: str) -> float:
    return float(np.mean([run[measure] for run in runs]))


def draw(results: dict, path: pathlib.Path) -> None:
    """A panel a setting: losses of bytes whose context repeats and of all, seeds and means."""
    plt = pyplot()

    drawn = panels(results)
    if not drawn:
        return
    heights = [1 + 0.24 * len(methods) for methods in drawn.values()]
    figure, axes = plt.subplots(
        len(drawn), figsize=(7.5, 0.5 + sum(heights)), layout="constrained", squeeze=False,
        height_ratios=heights,
    )  # fmt: skip
    for axis, (title, runs_of) in zip(axes[:, 0], drawn.items(), strict=True):
        methods = sorted(runs_of, key=lambda method: mean(runs_of[method], "repeated_loss"))
        for row, method in enumerate(methods):
            color = next(c for start, c in COLORS.items() if method.startswith(start))
            for measure, face, width in (("repeated_loss", color, 2.5), ("loss", "white", 1)):
                values = [run[measure] for run in runs_of[method]]
                axis.plot([np.mean(values)] * 2, [row - 0.35, row + 0.35], color=color, lw=width)
                of_seeds = {"color": color, "markerfacecolor": face, "ms": 4, "alpha": 0.7}
                axis.plot(values, [row] * len(values), "o", **of_seeds)
        axis.set_yticks(range(len(methods)), methods, fontsize=8)
        axis.invert_yaxis()
        axis.set_xlabel("nats a byte")
        axis.set_title(title, fontsize=10)
        axis.grid(axis="x", color="#E5E5E5", lw=0.7)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Held-out loss: filled, of bytes whose context repeats; hollow, of all bytes")
    save_picture(figure, path)
