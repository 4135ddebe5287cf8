"""Markdown tables and a picture of the losses on text."""

import pathlib

import numpy as np

from benchmarks.quality.tasks.report import markdown

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


def draw(results: dict, path: pathlib.Path) -> None:
    """Losses of bytes whose context repeats: a panel a setting, seeds as dots, means as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    settings = [(b, int(n)) for b, by_length in results["settings"].items() for n in by_length]
    if not settings:
        return
    panels = {}
    for budget, length in settings:
        runs_of = {m: by[length] for m, by in groups(results, budget).items() if length in by}
        losses = {m: [run["repeated_loss"] for run in runs] for m, runs in runs_of.items()}
        panels[budget, length] = sorted(losses.items(), key=lambda item: np.mean(item[1]))
    rows = max(map(len, panels.values()))
    size = (0.6 + 5.4 * len(panels), 1.2 + 0.22 * rows)
    figure, axes = plt.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for axis, ((budget, length), losses) in zip(axes[0], panels.items(), strict=True):
        for row, (method, values) in enumerate(losses):
            color = next(c for start, c in COLORS.items() if method.startswith(start))
            mean = np.mean(values)
            axis.plot([mean, mean], [row - 0.35, row + 0.35], color=color, lw=2.5)
            axis.plot(values, [row] * len(values), "o", color=color, ms=4, alpha=0.7)
        axis.set_yticks(range(len(losses)), [method for method, _ in losses], fontsize=8)
        axis.invert_yaxis()
        setting = results["settings"][budget][str(length)]
        axis.set(title=title_of(length, setting), xlabel="nats a byte")
        axis.grid(axis="x", color="#E5E5E5", lw=0.7)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Held-out loss of bytes whose context repeats, seeds and their mean")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
