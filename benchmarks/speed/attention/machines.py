"""Tables of all machines that have been measured, a column for each."""

import json
import re

from benchmarks.measurement import BACKWARD, CAUSAL, CAUSAL_BACKWARD, FORWARD, figure, table
from benchmarks.speed.attention.bounds import GOALS, over_bounds
from benchmarks.speed.attention.options import faster_softmax, ratio

# What the numbers in cpu_model() stand for.
CPUS = {
    (26, 2): "Zen 5",
    (25, 17): "Zen 4",
    (25, 1): "Zen 3",
    (6, 207): "Emerald Rapids",
    (6, 167): "Intel 167",
}
SETS = {"amx": "AMX", "avx512_bf16": "AVX-512 BF16", "avx512": "AVX-512", "avx2": "AVX2"}


def name_of(results):
    """The CPU and the instruction set that was used: "Zen 4, AVX-512 BF16"."""
    cpu, used = results["machine"]["cpu"], results["machine"]["instruction_set"]
    numbers = re.search(r"family (\d+), model (\d+)", cpu)
    cpu = CPUS.get(tuple(map(int, numbers.groups())), cpu) if numbers else cpu
    return f"{cpu}, {SETS.get(used, used)}"


def read(folder):
    """{name: the results} of the files of a folder, in reverse alphabetical order of the names."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        results = json.loads(path.read_text())
        name = name_of(results)
        if name in found:
            raise ValueError(f"{path}: another file has results of {name}, too")
        found[name] = results
    return dict(sorted(found.items(), reverse=True))


def two_ratios(times, passes, over, under):
    """ "a / b" of a forward pass and one with backward, "" where they were not measured."""
    times = [times.get(name, {}) for name in passes]
    if not all(under in t and "softmax" in t for t in times):
        return ""
    return " / ".join(figure(ratio(t, over(t), under)) for t in times)


def float_softmax(times):
    return "softmax"


# Title: section, passes, softmax, and the sides with their first column.
TABLES = {
    "Time of softmax over ours, float32, forward / forward + backward": (
        "softmax",
        (FORWARD, BACKWARD),
        float_softmax,
        {"auto": "{}, `auto`", "yoso": "{}"},
    ),
    "Time of softmax over ours under a causal mask, float32": (
        "softmax",
        (CAUSAL, CAUSAL_BACKWARD),
        float_softmax,
        {"auto": "{}, `auto`", "yoso": "{}"},
    ),
    "Time of softmax over soft codes, float32": (
        "soft",
        (FORWARD, BACKWARD),
        float_softmax,
        {"4 probes": "{}", "2 probes": "{}, 2 probes"},
    ),
    "Time of the faster softmax over ours, bfloat16 inputs": (
        "short_floats",
        (FORWARD, BACKWARD),
        faster_softmax,
        {"bfloat16, auto": "{}, `auto`", "bfloat16": "{}", "bfloat16, 12 bits": "{}, 12 bits"},
    ),
    "Time of the faster softmax over soft codes, bfloat16 inputs": (
        "short_floats",
        (FORWARD, BACKWARD),
        faster_softmax,
        {"bfloat16, soft codes": "{}"},
    ),
}


def tables(folder):
    found = read(folder)
    for title, (section, passes, over, sides) in TABLES.items():
        sections = [results.get(section, {}) for results in found.values()]
        rows = []
        for side, label in sides.items():
            for n in numbers(sections):
                cells = [two_ratios(x.get(n, {}), passes, over, side) for x in sections]
                if any(cells):
                    rows.append([label.format(n), *cells])
        yield table(title, ["n", *found], rows)
    bounds = [results.get("bounds", {"times": {}}) for results in found.values()]
    rows = [
        [name, n, *(figure(over_bounds(n, x)[name]) if n in x["times"] else "" for x in bounds)]
        for name in GOALS
        for n in numbers(x["times"] for x in bounds)
    ]
    yield table("Time over the bound", ["", "n", *found], rows)
    rows = []
    for name, results in found.items():
        days = sorted(record["date"][:10] for record in results["sections"].values()) or [""]
        m = results["machine"]
        rows.append([name, m["cpu"], m["instruction_set"], m["torch"], days[0], days[-1]])
    header = ["", "CPU", "`LSHKIT_ISA`", "torch", "first section", "last section"]
    yield table("Measured", header, rows)


def numbers(sections):
    """The lengths of any of them, as they are written there."""
    return sorted({n for x in sections for n in x}, key=int)
