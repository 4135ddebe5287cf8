"""Markdown tables and a picture of what was measured."""

import math
import pathlib

import numpy as np

from benchmarks import pyplot, save_picture
from benchmarks.quality.runs import markdown, mean_and_spread
from benchmarks.quality.tasks.listops import ListOps

# Okabe and Ito's colours: told apart with any colour vision. Controls are grey.
COLORS = {
    "softmax": "#000000",
    "YOSO-E": "#0072B2",
    "YOSO-32": "#D55E00",
    "*YOSO-32": "#56B4E9",
    "YOSO-32, unbiased": "#CC79A7",
    "YOSO-C-32": "#E69F00",
    "soft codes-32": "#009E73",
    "Linformer": "#7A5230",
    "Performer": "#6A3D9A",
}
GREY, MUTED = "#888888", "#56606A"


def accuracy(measured: dict) -> float:
    return 100 * measured["accuracy"]


def perplexity(measured: dict) -> float:
    return math.exp(measured["loss"])


# What each task is judged by: (name, of a measurement, decimals).
MEASURES = {
    "ListOps": ("accuracy, %", accuracy, 1),
    "short ListOps": ("accuracy, %", accuracy, 1),
    "recall": ("accuracy, %", accuracy, 1),
    "needle": ("accuracy, %", accuracy, 1),
    "masked words": ("perplexity", perplexity, 1),
}


def methods_of(results: dict, task: str) -> dict[str, list[dict]]:
    """Runs of each method, in the order of the file."""
    runs: dict[str, list[dict]] = {}
    for run in results["runs"]:
        if run["task"] == task:
            runs.setdefault(run["method"], []).append(run)
    return runs


def task_table(results: dict, task: str) -> str:
    """A row for each method: mean and range over the seeds."""
    name, measure, decimals = MEASURES[task]
    runs_of = methods_of(results, task)
    everything = [run for runs in runs_of.values() for run in runs]
    further = [part for part in ("64 hashes", "expectation") if any(part in r for r in everything)]
    lengths = list(dict.fromkeys(n for r in everything for n in r.get("at length", ())))
    header = ["method", name, *(f"tested with {part}" for part in further)]
    header += [f"at length {n}" for n in lengths] + ["loss, nats", "seeds"]
    rows = []
    for method, runs in runs_of.items():
        cells = [method, mean_and_spread([measure(run) for run in runs], decimals)]
        for part in further:
            found = [measure(run[part]) for run in runs if part in run]
            cells.append(mean_and_spread(found, decimals))
        for length in lengths:
            found = [measure(run["at length"][length]) for run in runs if "at length" in run]
            cells.append(mean_and_spread(found, decimals))
        cells += [mean_and_spread([run["loss"] for run in runs], 3), str(len(runs))]
        rows.append(cells)
    return markdown(header, rows)


def without_looking(results: dict, task: str) -> dict[str, float]:
    """Accuracies of guesses, in percent."""
    setting = results["tasks"][task]
    guesses = {"one guess": 100 * setting["guess"]}
    if task.endswith("ListOps"):
        sizes = {
            key: setting[key] for key in ("length", "min_length", "n_held_out") if key in setting
        }
        guesses["a guess by the first operator"] = 100 * ListOps(**sizes).guess_from_operator()
    return guesses


def title(results: dict, task: str) -> str:
    """The task with the sizes that matter for its figures."""
    setting = results["tasks"][task]
    steps = f"{setting['steps']} steps of {setting['batch_size']} sequences"
    guesses = (f"{name} {value:.1f} %" for name, value in without_looking(results, task).items())
    return f"{task}: n = {setting['length']}, {steps}; {', '.join(guesses)}"


def tables(results: dict) -> str:
    tasks = [task for task in MEASURES if task in results["tasks"]]
    return "".join(f"\n{title(results, t)}\n\n{task_table(results, t)}\n" for t in tasks)


def draw(results: dict, path: pathlib.Path) -> None:
    """Seeds as dots and their means as bars, a panel a task; and the needle against the hay."""
    plt = pyplot()

    tasks = [task for task in MEASURES if task in results["tasks"]]
    longer = {
        method: runs
        for method, runs in methods_of(results, "needle").items()
        if all("at length" in run for run in runs)
    }
    count = len(tasks) + bool(longer)
    figure, axes = plt.subplots(
        math.ceil(count / 2), 2, figsize=(11, 3.6 * math.ceil(count / 2)), layout="constrained"
    )
    axes = list(axes.flat)
    for axis in axes[count:]:
        axis.set_axis_off()
    for axis, task in zip(axes, tasks, strict=False):
        draw_task(axis, results, task)
    if longer:
        draw_lengths(axes[len(tasks)], results["tasks"]["needle"]["length"], longer)
    seeds = len({run["seed"] for run in results["runs"]})
    figure.suptitle(f"What a small encoder learns in equal steps: {seeds} seeds and their mean")
    save_picture(figure, path)


def draw_task(axis, results: dict, task: str) -> None:
    name, measure, decimals = MEASURES[task]
    runs_of = methods_of(results, task)
    for row, (method, runs) in enumerate(runs_of.items()):
        values = [measure(run) for run in runs]
        mean, color = np.mean(values), COLORS.get(method, GREY)
        axis.plot([mean, mean], [row - 0.32, row + 0.32], color=color, lw=3)
        axis.plot(values, [row] * len(values), "o", color=color, ms=5, alpha=0.7)
        axis.annotate(
            f"{mean:.{decimals}f}",
            (1.01, row),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=9,
            color=MUTED,
        )
    axis.set_yticks(range(len(runs_of)), list(runs_of))
    axis.invert_yaxis()
    setting = results["tasks"][task]
    better = "lower" if measure is perplexity else "higher"
    axis.set(xlabel=f"{name} ({better} is better)", title=f"{task}, n = {setting['length']}")
    if measure is accuracy:
        for guess in without_looking(results, task).values():
            axis.axvline(guess, color=GREY, lw=1, ls=":")
    axis.grid(axis="x", color="#E5E5E5", lw=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def draw_lengths(axis, trained_at: int, runs_of: dict[str, list[dict]]) -> None:
    for method, runs in runs_of.items():
        lengths = [trained_at, *map(int, runs[0]["at length"])]
        values = [
            [accuracy(run), *map(accuracy, run["at length"].values())] for run in runs
        ]  # (seeds, lengths)
        color = COLORS.get(method, GREY)
        line = {"window only": "--", "no attention": ":"}.get(method, "-")
        axis.plot(lengths, np.mean(values, 0), line, color=color, marker="o", ms=4, label=method)
        axis.fill_between(lengths, np.min(values, 0), np.max(values, 0), color=color, alpha=0.12)
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [str(n) for n in lengths])
    axis.set(
        xlabel=f"length tested at (trained at {trained_at})",
        ylabel="accuracy, %",
        title="needle, the same models in more hay",
    )
    axis.grid(color="#E5E5E5", lw=0.7)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 0.05), ncols=2)
