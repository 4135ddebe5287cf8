"""A Markdown table and a picture of the runs at equal time."""

import pathlib

import numpy as np

from benchmarks import pyplot, save_picture
from benchmarks.quality.equal_time.methods import METHODS, SCHEDULES
from benchmarks.quality.runs import markdown, mean_and_spread

# Okabe and Ito's colours, told apart with any colour vision; controls are grey.
LOOKS = {  # (colour, line)
    "softmax": ("#000000", "-"),
    "YOSO, 8 bits": ("#E69F00", "-"),
    "YOSO, 12 bits": ("#D55E00", "-"),
    "soft codes, 4 probes": ("#56B4E9", "-"),
    "soft codes, 2 probes": ("#0072B2", "-"),
    "Performer": ("#CC79A7", "-"),
    "delta rule": ("#009E73", "-"),
    "window only": ("#888888", "--"),
    "convolution only": ("#888888", ":"),
}
MUTED = "#56606A"


def cpu_of(results: dict, run: dict) -> str:
    return run.get("cpu", results["machine"]["cpu"])


def cpus(results: dict, length: int) -> list[str]:
    """The CPUs on which runs of a length were made: times of one are not those of another."""
    runs = [run for run in results["runs"] if run["length"] == length]
    return list(dict.fromkeys(cpu_of(results, run) for run in runs))


def groups(results: dict, length: int, cpu: str) -> dict[str, dict[str, list[dict]]]:
    """Runs of a length on a CPU: method, schedule, seeds."""
    runs = [r for r in results["runs"] if (r["length"], cpu_of(results, r)) == (length, cpu)]
    found: dict[str, dict[str, list[dict]]] = {}
    for method in METHODS:
        for schedule in SCHEDULES:
            if own := [r for r in runs if (r["method"], r["schedule"]) == (method, schedule)]:
                found.setdefault(method, {})[schedule] = own
    return found


def accuracies(runs: list[dict]) -> list[float]:
    return [100 * run["accuracy"] for run in runs]


def best_schedule(schedules: dict[str, list[dict]]) -> str:
    """The highest accuracy in whole percent; of equal ones the soonest end."""

    def rank(name: str) -> tuple[float, float]:
        runs = schedules[name]
        return round(np.mean(accuracies(runs))), -np.mean([run["seconds"] for run in runs])

    return max(schedules, key=rank)


def table(results: dict, length: int, cpu: str) -> str:
    """A row for each method and schedule: means and ranges over the seeds."""
    header = ["method", "schedule", "accuracy, %", "CPU seconds", "steps", "seeds"]
    rows = []
    for method, schedules in groups(results, length, cpu).items():
        best = best_schedule(schedules)
        for schedule, runs in schedules.items():
            name = f"{schedule} (best)" if schedule == best and len(schedules) > 1 else schedule
            cells = [
                mean_and_spread(values, decimals)
                for values, decimals in (
                    (accuracies(runs), 1),
                    ([run["seconds"] for run in runs], 0),
                    ([run["steps"] for run in runs], 0),
                )
            ]
            rows.append([method, name, *cells, str(len(runs))])
    return markdown(header, rows)


def asked(setting: dict) -> str:
    if "n_needles" in setting:
        return f"{setting['n_needles']:,} needles"
    return f"{setting['n_pairs']:,} pairs"


def tables(results: dict) -> str:
    """A table for each length and CPU."""
    return "".join(
        f"\n{length} tokens, {asked(setting)}, {setting['seconds']:g} CPU seconds of training on "
        f"{cpu}; one guess {100 * setting['guess']:.1f} %\n\n{table(results, int(length), cpu)}\n"
        for length, setting in results["settings"].items()
        for cpu in cpus(results, int(length))
    )


def curves(runs: list[dict], guess: float, seconds: np.ndarray) -> np.ndarray:
    """(seeds, seconds): accuracy in percent, from one guess on; of ended runs the last."""
    rows = []
    for run in runs:
        at = [0.0] + [point["seconds"] for point in run["curve"]]
        values = [guess] + [point["accuracy"] for point in run["curve"]]
        rows.append(100 * np.interp(seconds, at, values))
    return np.array(rows)


def draw(results: dict, path: pathlib.Path, length: int) -> None:
    """Accuracy against seconds: all at the full length, and each with its best schedule.

    Of the CPU that is first in the file.
    """
    plt = pyplot()

    found = groups(results, length, cpus(results, length)[0])
    setting = results["settings"][str(length)]
    figure, axes = plt.subplots(1, 2, figsize=(11.5, 4.9), sharey=True, layout="constrained")
    titles = ("All steps at the full length", "With the best schedule of lengths found")
    for axis, title in zip(axes, titles, strict=True):
        lines = {}
        for method, schedules in found.items():
            if axis is axes[0]:
                own = schedules.get("plain")
            else:  # those for which others than the plain one were tried
                own = schedules[best_schedule(schedules)] if len(schedules) > 1 else None
            if own and method in LOOKS:
                lines[method] = own
        draw_lines(axis, lines, setting)
        axis.set_title(title, fontsize=11)
    axes[0].set_ylabel("held-out accuracy, %")
    figure.suptitle(f"Recall of {asked(setting)} in {length:,} tokens, one CPU core", fontsize=13)
    save_picture(figure, path)


def draw_lines(axis, lines: dict[str, list[dict]], setting: dict) -> None:
    end = setting["seconds"]
    seconds = np.linspace(0, end, 301)
    last = {}
    for method, runs in lines.items():
        color, style = LOOKS[method]
        values = curves(runs, setting["guess"], seconds)
        axis.plot(seconds, values.mean(0), style, color=color, lw=2)
        axis.fill_between(seconds, values.min(0), values.max(0), color=color, alpha=0.15, lw=0)
        last[method] = values.mean(0)[-1]
    place = label_places(last)
    for method, value in last.items():
        color = LOOKS[method][0]
        axis.plot([end, 1.03 * end], [value, place[method]], color=color, lw=0.7, clip_on=False)
        label = f"{method}  {np.mean(accuracies(lines[method])):.1f}"
        axis.text(1.04 * end, place[method], label, color=color, va="center", fontsize=9)
    axis.set(xlim=(0, end), ylim=(0, 102), xlabel="CPU seconds of training")
    axis.grid(color="#E5E5E5", lw=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def label_places(values: dict[str, float]) -> dict[str, float]:
    """Heights of the labels: those of the lines' ends, so far apart that none hides another."""
    apart = 5.2
    names = sorted(values, key=values.get)
    heights = [values[name] for name in names]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + apart)
    top = 101.0
    for i in reversed(range(len(heights))):
        heights[i] = min(heights[i], top)
        top = heights[i] - apart
    return dict(zip(names, heights, strict=True))
