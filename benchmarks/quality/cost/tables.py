"""What is shown of the runs: a table in Markdown and a picture."""

import pathlib

import numpy as np

from benchmarks import pyplot, save_picture
from benchmarks.encoder import CONTROLS
from benchmarks.quality.cost.methods import METHODS, N_HASHES
from benchmarks.quality.runs import find, markdown, mean_and_spread


def table(results: dict) -> str:
    """Markdown: a row for each method, columns for each budget.

    Without runs of a budget in seconds the losses at equal seconds are read off the others' curves,
    at the time when the first method with attention is done.
    """
    budgets = list(dict.fromkeys(run["budget"] for run in results["runs"]))
    found = {m: [find(results, method=m, budget=b) for b in budgets] for m in METHODS}
    found = {method: runs for method, runs in found.items() if any(runs)}
    ends = [
        np.mean([run["seconds"][-1] for run in runs[0]])
        for method, runs in found.items()
        if method not in CONTROLS and runs[0]
    ]
    read_at = min(ends) if ends and all("steps" in b for b in budgets) else None

    header = ["method", *(name for b in budgets for name in (f"loss after {b}", "steps/s"))]
    if read_at is not None:
        header.append(f"on the way, at {read_at:.0f} s")
    header += [f"with {2 * N_HASHES} hashes", "seeds"]
    rows = []
    for method, by_budget in found.items():
        cells = [method]
        for runs in by_budget:
            cells.append(mean_and_spread([run["losses"][-1] for run in runs], 3))
            speed = [run["steps"][-1] / run["seconds"][-1] for run in runs]
            cells.append(f"{np.median(speed):.1f}" if runs else "")
        first = by_budget[0]
        if read_at is not None:
            losses = [np.interp(read_at, run["seconds"], run["losses"]) for run in first]
            cells.append(mean_and_spread(losses, 3))
        finer = [run.get("loss_with_twice_the_hashes") for run in first]
        cells.append("" if None in finer else mean_and_spread(finer, 3))
        cells.append(str(len({run["seed"] for runs in by_budget for run in runs})))
        rows.append(cells)
    return markdown(header, rows)


# Okabe and Ito's colours: told apart with any colour vision. Controls are grey.
STYLE = {
    "softmax": ("#000000", "-"),
    "YOSO-E": ("#000000", "--"),
    "lower_bound": ("#D55E00", "-"),
    "lower_bound, 12 bits": ("#D55E00", "--"),
    "collided": ("#E69F00", "-"),
    "unbiased": ("#CC79A7", "-"),
    "soft, 4 probes": ("#0072B2", "-"),
    "soft, all of 16": ("#009E73", "-"),
    "convolution only": ("#888888", "-"),
    "window only": ("#888888", "--"),
    "no attention": ("#888888", ":"),
}


def draw(results: dict, path: pathlib.Path) -> None:
    plt = pyplot()

    by_steps = [run["budget"] for run in results["runs"] if "steps" in run["budget"]]
    by_seconds = [run["budget"] for run in results["runs"] if "steps" not in run["budget"]]
    panels = (
        ("steps", "training steps", (by_steps or by_seconds)[-1]),
        ("seconds", "training seconds (CPU time)", (by_seconds or by_steps)[-1]),
    )
    figure, axes = plt.subplots(1, 2, figsize=(11, 5), sharey=True, layout="constrained")
    for axis, (x, label, shown) in zip(axes, panels, strict=True):
        ends = []
        for method, (color, line) in STYLE.items():
            runs = find(results, method=method, budget=shown)
            if not runs:
                continue
            # Runs of a budget in seconds take different steps: a common number of evaluations.
            count = min(len(run["losses"]) for run in runs)
            losses = np.array([run["losses"][:count] for run in runs])[:, 1:]
            xs = np.mean([run[x][:count] for run in runs], axis=0)[1:]
            axis.plot(xs, losses.mean(0), color=color, ls=line, lw=1.6)
            axis.fill_between(xs, losses.min(0), losses.max(0), color=color, alpha=0.12, lw=0)
            ends.append([losses.mean(0)[-1], xs[-1], method, color])
        axis.set(xlabel=label, title=f"runs of {shown}")
        axis.spines[["top", "right"]].set_visible(False)
        label_ends(axis, sorted(ends))
    axes[0].set_ylabel("held-out loss (nats per hidden byte)")
    seeds = len({run["seed"] for run in results["runs"]})
    length = results["settings"]["length"]
    figure.suptitle(f"Hidden bytes at length {length}: mean and range of {seeds} seeds")
    save_picture(figure, path)


def label_ends(axis, ends: list) -> None:
    """Names beside the last points, pushed apart where they would overlap."""
    low, high = axis.get_ylim()
    right, gap = max(x for _, x, _, _ in ends), (high - low) / 28
    heights = [end[0] for end in ends]
    for _ in range(200):  # neighbours that are too close move apart by halves
        for i in range(1, len(heights)):
            overlap = gap - (heights[i] - heights[i - 1])
            if overlap > 0:
                heights[i - 1] -= overlap / 2
                heights[i] += overlap / 2
    for height, (y, x, name, color) in zip(heights, ends, strict=True):
        axis.plot([x, 1.05 * right], [y, height], color=color, lw=0.5)
        axis.text(1.06 * right, height, name, color=color, va="center", fontsize=9)
    axis.set_xlim(0, 1.4 * right)
    axis.set_xticks([tick for tick in axis.get_xticks() if 0 <= tick <= 1.02 * right])
