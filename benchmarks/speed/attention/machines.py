"""Tables of all machines that have been measured, a column for each."""

import json
import re

from benchmarks.measurement import BACKWARD, CAUSAL, CAUSAL_BACKWARD, FORWARD, figure, table
from benchmarks.speed.attention.bounds import KERNELS
from benchmarks.speed.attention.options import ratio

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
    """{name: the results} of the files of a folder, by name from the last to the first."""
    files = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return dict(sorted(((name_of(x), x) for x in files), reverse=True))


def both(passes, forward, backward, over, under):
    """ "a / b": the ratios of a forward pass and of one with backward; empty: not measured."""
    if not passes or under not in passes[forward]:
        return ""
    return " / ".join(figure(ratio(passes[p], over(passes[p]), under)) for p in (forward, backward))


def softmax(times):  # of float32 and bfloat16, the faster one that was measured
    return min((x for x in times if x.startswith("softmax")), key=times.get)


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
    "The same under a causal mask": (
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
        softmax,
        {"bfloat16, auto": "{}, `auto`", "bfloat16": "{}"},
    ),
    "The same with 12 bits, and over soft codes": (
        "short_floats",
        (FORWARD, BACKWARD),
        softmax,
        {"bfloat16, 12 bits": "{}, 12 bits", "bfloat16, soft codes": "{}, soft codes"},
    ),
}


def tables(folder):
    machines = read(folder)
    for title, (section, (forward, backward), over, sides) in TABLES.items():
        found = [x.get(section, {}) for x in machines.values()]
        lengths = sorted({int(n) for x in found for n in x})
        rows = []
        for side, label in sides.items():
            for n in lengths:
                cells = [both(x.get(str(n)), forward, backward, over, side) for x in found]
                if any(cells):
                    rows.append([label.format(n), *cells])
        yield table(title, ["n", *machines], rows)
    times = {name: x["bounds"]["times"] for name, x in machines.items() if "bounds" in x}
    rows = [
        [kernel, n, *(figure(x[n][kernel]["ns"] / x[n][kernel]["bound"]) for x in times.values())]
        for kernel in KERNELS
        for n in dict.fromkeys(n for x in times.values() for n in x)
    ]
    yield table("Time over the bound", ["", "n", *times], rows)
    rows = []
    for name, x in machines.items():
        days = sorted(record["date"][:10] for record in x["sections"].values())
        m = x["machine"]
        rows.append([name, m["cpu"], m["instruction_set"], m["torch"], days[0], days[-1]])
    yield table(
        "Measured", ["", "CPU", "`LSHKIT_ISA`", "torch", "first section", "last section"], rows
    )
