"""Tables of what the GPU benchmark and its hardware counters measured."""

import re
from statistics import median

# Of all hashes of hard codes over FlashAttention-2: forward, forward + backward. Soft codes: half.
GOALS = {4096: (1.5, 1.2), 16384: (6, 4), 65536: (24, 16)}
PASSES = "forward", "forward + backward"
OPPONENTS = {"flash": "FlashAttention-2", "cudnn": "cuDNN", "flash3": "FlashAttention-3"}
TITLES = (
    "n | | pass | codes | lshkit, ms | FlashAttention-2, ms | cuDNN, ms | FlashAttention-3, ms "
    "| over FlashAttention-2 | wanted | over the fastest | lshkit, MB | FlashAttention-2, MB"
)
HEADER = f"| {TITLES} |\n|---:|---|---|---|" + "---:|" * 9


def lines(row):
    """Of one length and pass: a line for each of lshkit's sides, its time under the others'."""
    times = {name: median(samples) for name, samples in row["milliseconds"].items() if samples}
    theirs = {name: times[name] for name in OPPONENTS if name in times}
    found = []
    for name in (name for name in row["milliseconds"] if name not in OPPONENTS):
        own = times.get(name)
        cells = [str(row["n"]), "causal" if row["causal"] else "", PASSES[row["backward"]], name]
        cells += [_number(x) for x in (own, *(theirs.get(other) for other in OPPONENTS))]
        cells.append(_ratio(theirs.get("flash"), own))
        cells.append(_goal(row, name))
        cells.append(_ratio(min(theirs.values(), default=None), own))
        cells += [_megabytes(row["peak_bytes"].get(side)) for side in (name, "flash")]
        found.append(f"| {' | '.join(cells)} |")
    return found


def _goal(row, name):
    """A goal is met by all hashes on even buckets: other lines have none."""
    goal = GOALS.get(row["n"], (None, None))[row["backward"]]
    if goal is None or row["causal"] or name not in ("hard", "soft"):
        return ""
    if name == "soft":
        return f"{goal / 2:g}" if row["backward"] else ""
    return f"{goal:g}"


def _number(x):
    return "" if x is None else f"{x:.3g}" if x < 1000 else f"{x:.0f}"


def _ratio(theirs, own):
    return "" if theirs is None or own is None else f"{theirs / own:.2f}"


def _megabytes(size):
    return f"{size / 1e6:.0f}" if size else ""


def table(result):
    """All rows, hard codes beside soft ones, and the settings."""
    rows = sorted(result["rows"], key=lambda row: (row["causal"], row["backward"], row["n"]))
    settings = result["settings"]
    late = sum(sum(row.get("late", {}).values()) for row in rows)
    described = "; ".join(f"{name}: {describe(x)}" for name, x in settings["codes"].items())
    return "\n".join(
        [HEADER, *(line for row in rows for line in lines(row)), ""]
        + [
            f"{result['device']}, torch {result['torch']}, CUDA {result['cuda']}; bf16, batch "
            f"{settings['batch']}, {settings['heads']} heads, d {settings['d']}; {described}"
        ]
        + [f"{late} samples hold time of the host"] * (late > 0)
    )


def describe(options):
    sizes = ("n_bits", "n_probes", "n_hashes", "gradient_hashes")
    return ", ".join(f"{name} {options[name]}" for name in sizes if name in options)


# Of Nsight Compute's sections, and what they are called here.
COUNTERS = {
    **{"Duration": "took", "Compute (SM) Throughput": "SM %", "DRAM Throughput": "DRAM %"},
    **{"L2 Cache Throughput": "L2 %", "Issue Slots Busy": "issue %"},
    **{"Achieved Occupancy": "occupancy %", "Registers Per Thread": "registers"},
}


def counters(text):
    """A line a kernel of what Nsight Compute printed."""
    found = []
    for kernel in re.split(r"\n(?=  \S.*Context \d)", text)[1:]:
        name = re.sub(r"void |\([\w:]+\)|lshkit::(cuda::)?", "", kernel.splitlines()[0])
        numbers = [name.split("(")[0].strip()[:40]]
        for line in kernel.splitlines():
            words = re.split(r"  +", line.strip())
            if words[0] in COUNTERS and words[-1] != words[0]:
                unit = words[1] + " " if words[0] == "Duration" else ""
                numbers.append(f"{COUNTERS[words[0]]} {unit}{words[-1]}")
        found.append(", ".join(numbers)[:170])
    return "\n".join(found)
