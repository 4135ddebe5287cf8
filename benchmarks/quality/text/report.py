"""Markdown tables and a picture of the losses on text."""

import pathlib

import numpy as np

from benchmarks.quality.tasks.report import markdown, mean_and_spread

# Okabe and Ito's colours, told apart with any colour vision; controls are black and grey.
LOOKS = {  # (colour, line)
    "softmax, ALiBi": ("#000000", "-"),
    "softmax, rotary": ("#000000", "--"),
    "softmax of unit vectors": ("#000000", ":"),
    "values alone": ("#888888", "--"),
    "YOSO, 12 bits": ("#D55E00", "-"),
    "soft codes, 12 bits": ("#0072B2", "-"),
    "softmax, ALiBi, own value": ("#009E73", "-"),
    "YOSO, 12 bits, own value": ("#E69F00", "-"),
    "soft codes, 12 bits, own value": ("#56B4E9", "-"),
}
MEASURES = {"repeated_loss": "bytes whose context repeats", "loss": "all bytes"}
BUDGETS = {"steps": "equal steps", "time": "equal CPU time"}


def groups(results: dict, budget: str) -> dict[str, dict[int, list[dict]]]:
    """Runs of a budget: method, length, seeds."""
    found: dict[str, dict[int, list[dict]]] = {}
    for run in results["runs"]:
        if run["budget"] == budget:
            found.setdefault(run["method"], {}).setdefault(run["length"], []).append(run)
    return found


def tables(results: dict) -> str:
    """A table for each length and budget: means and ranges over the seeds."""
    header = ["method", "repeated bytes, nats", "all bytes, nats", "steps", "CPU seconds", "seeds"]
    columns = (("repeated_loss", 3), ("loss", 3), ("steps", 0), ("seconds", 0))
    parts = []
    for length, setting in results["settings"].items():
        for budget, name in BUDGETS.items():
            rows = [
                [
                    method,
                    *(mean_and_spread([run[key] for run in runs], n) for key, n in columns),
                    str(len(runs)),
                ]
                for method, by_length in groups(results, budget).items()
                if (runs := by_length.get(int(length)))
            ]
            if rows:
                amount = setting[{"steps": "steps", "time": "seconds"}[budget]]
                title = f"{length} bytes, {name} ({amount:g}), {setting['batch_size']} texts a step"
                parts.append(f"\n{title}\n\n{markdown(header, rows)}\n")
    return "".join(parts)


def draw(results: dict, path: pathlib.Path) -> None:
    """Loss against length, a row of panels for each budget that has runs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    budgets = [name for name in BUDGETS if groups(results, name)]
    if not budgets:
        return
    size = (10, 0.6 + 3.9 * len(budgets))
    figure, rows = plt.subplots(len(budgets), 2, figsize=size, layout="constrained", squeeze=False)
    for budget, axes in zip(budgets, rows, strict=True):
        for (measure, title), axis in zip(MEASURES.items(), axes, strict=True):
            for method, by_length in groups(results, budget).items():
                color, style = LOOKS[method]
                lengths = sorted(by_length)
                losses = [[run[measure] for run in by_length[length]] for length in lengths]
                means = [np.mean(of_seeds) for of_seeds in losses]
                axis.plot(lengths, means, style, color=color, marker="o", ms=4, label=method)
                low, high = map(min, losses), map(max, losses)
                axis.fill_between(lengths, [*low], [*high], color=color, alpha=0.15, lw=0)
            axis.set(xscale="log", title=f"{title}, {BUDGETS[budget]}", xlabel="bytes in a text")
            lengths = sorted({run["length"] for run in results["runs"]})
            axis.set_xticks(lengths, [f"{length:,}" for length in lengths], minor=False)
            axis.minorticks_off()
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].set_ylabel("held-out loss, nats a byte")
    rows[0, 0].legend(frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
