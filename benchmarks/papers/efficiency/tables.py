"""Tables and the picture of what efficiency.py measured."""

from benchmarks import pyplot, save_picture
from benchmarks.measurement import figure, table

MIB = 2**20

# Okabe and Ito's colours, told apart with any colour vision; lines of one colour are one kind.
STYLE = {
    "softmax": ("#000000", "-"),
    "softmax, fused": ("#000000", "--"),
    "Nystromformer": ("#E69F00", "-"),
    "Longformer": ("#CC79A7", "-"),
    "Linformer": ("#009E73", "-"),
    "Reformer": ("#56B4E9", "-"),
    "Performer": ("#F0E442", "-"),
    "YOSO-32": ("#D55E00", "-"),
    "YOSO-16": ("#D55E00", "--"),
    "soft codes, 32 hashes": ("#0072B2", "-"),
    "no attention": ("#888888", ":"),
}


def escaped(name):
    return name.replace("*", r"\*")


def by_length(results, title, cells):
    """A row for each method; cells(n) are the figures of a length by method."""
    lengths = [n for n in results if cells(n)]
    fullest_first = sorted(lengths, key=lambda n: -len(cells(n)))
    names = dict.fromkeys(name for n in fullest_first for name in cells(n))
    rows = [
        [escaped(name), *(figure(cells(n)[name]) if name in cells(n) else "" for n in lengths)]
        for name in names
    ]
    return table(title, ["", *(f"n = {n}" for n in lengths)], rows)


def report(results):
    machine = results["machine"]
    yield (
        f"Forward and backward of a sequence: six layers of one set of weights, dim 256, 4 heads "
        f"of 64, float32. {machine['cpu']}, {machine['instruction_set']}, torch "
        f"{machine['torch']}, lshkit {machine['lshkit']}. Times are medians; load average "
        f"{machine['load_average_at_start']:.1f} at the start.\n"
    )
    for threads, times in results["times"].items():
        of = "one thread" if threads == "1" else f"{threads} threads"
        yield by_length(
            times,
            f"Milliseconds a sequence, {of}",
            lambda n, times=times: {k: 1e3 * s for k, s in times[n]["seconds"].items()},
        )
    yield by_length(
        results["bytes"],
        "MiB a sequence, peak of the step",
        lambda n: {k: b / MIB for k, b in results["bytes"][n].items()},
    )
    yield from against_yoso(results)


def against_yoso(results):
    """What the others take, by what YOSO-32 does, at the longest length that softmax has."""
    times, sizes = results["times"]["1"], results["bytes"]
    lengths = [
        n
        for n in times
        if "YOSO-32" in times[n]["seconds"]
        and {"softmax", "softmax, fused"} & times[n]["seconds"].keys()
    ]
    if not lengths:
        return
    n = lengths[-1]
    seconds = times[n]["seconds"]
    body = seconds.get("no attention")
    header = ["", "time", "time beyond no attention", "memory"]
    rows = []
    for name, taken in seconds.items():
        if name not in ("YOSO-32", "no attention"):
            beyond = ""
            if body is not None and seconds["YOSO-32"] > body:
                beyond = figure((taken - body) / (seconds["YOSO-32"] - body))
            ratio = sizes[n][name] / sizes[n]["YOSO-32"]
            rows.append(
                [escaped(name), figure(taken / seconds["YOSO-32"]), beyond,
                 figure(ratio)]
            )  # fmt: skip
    yield table(f"By YOSO-32 at n = {n}, one thread: above 1 is behind it", header, rows)
    ahead = [
        f"{name} in {' and '.join(what)}"
        for name in results["baselines"]
        if (
            what := [
                kind
                for kind, of in (("time", seconds), ("memory", sizes[n]))
                if name in of and of[name] < of["YOSO-32"]
            ]
        )
    ]
    yield f"Baselines ahead of YOSO-32 at n = {n}: {', '.join(ahead) or 'none'}.\n"


def draw(results, path):
    """Figure 7 of the paper, a token: time and memory by length."""
    plt = pyplot()

    seconds = {n: times["seconds"] for n, times in results["times"]["1"].items()}
    panels = (
        ("microseconds a token, one thread", seconds, 1e-6),
        ("KiB a token", results["bytes"], 1024),
    )
    picture, axes = plt.subplots(1, 2, figsize=(11, 5), layout="constrained")
    for axis, (label, values, unit) in zip(axes, panels, strict=True):
        for name, (color, line) in STYLE.items():
            points = [
                (int(n), of_n[name] / int(n) / unit) for n, of_n in values.items() if name in of_n
            ]
            if points:
                ours = "YOSO" in name or "soft codes" in name
                axis.loglog(*zip(*points, strict=True), line, color=color, marker="o",
                            markersize=3.5, linewidth=2.4 if ours else 1.4, label=name,
                            zorder=3 if ours else 2)  # fmt: skip
        lengths = [int(n) for n in values]
        axis.set_xticks(lengths, [str(n) for n in lengths])
        low, high = axis.get_ylim()
        ticks = [d * 10**e for e in range(4) for d in (1, 1.5, 2, 3, 5, 7)]
        ticks = [tick for tick in ticks if low <= tick <= high]
        axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.set_xlabel("sequence length")
        axis.set_title(label, fontsize=11)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=9)
    save_picture(picture, path, dpi=130)
