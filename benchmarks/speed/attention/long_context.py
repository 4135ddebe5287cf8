"""The long end: a million tokens in one call, and decoding against a key-value cache."""

import time
from functools import partial

import torch

from benchmarks.measurement import HEADS, PeakGrowth, Section, figure, in_new_process, inputs, table
from benchmarks.speed import decoding
from benchmarks.speed.attention.options import SIDES, SOFT_OPTIONS

MEMORY_COLUMNS = {"inputs": "inputs", "result": "result", "peak_growth": "result and all else"}
DECODING_ROUNDS = 30


def forward_alone(side, length):
    """Seconds of the forward pass of one head, and growth of the peak resident size meanwhile.

    The growth includes the result and the codes. Runs in a new process.
    """
    tensors = inputs(length, heads=1)
    seconds = []
    with torch.no_grad():
        SIDES[side](*inputs(1, heads=1))  # loads most of the code
        for first in (True, False):
            begin = time.perf_counter()
            if first:
                with PeakGrowth() as peak:
                    out = SIDES[side](*tensors)
            else:
                out = SIDES[side](*tensors)
            seconds.append(time.perf_counter() - begin)
    return {
        "seconds": min(seconds),
        "peak_growth": peak.bytes,
        "inputs": sum(x.nbytes for x in tensors),
        "result": out.nbytes,
    }


def million(lengths, stopwatch):
    return {n: {s: in_new_process(s, n, stopwatch.threads) for s in SIDES} for n in lengths}


def million_tables(results):
    rows = [
        [n, side, figure(r["seconds"]), *(f"{r[k] / 2**20:.0f}" for k in MEMORY_COLUMNS)]
        for n, sides in results.items()
        for side, r in sides.items()
    ]
    header = ["n", "estimator", "seconds", *(f"{k}, MiB" for k in MEMORY_COLUMNS.values())]
    yield table("Forward of one head", header, rows)


def decoding_section(contexts, stopwatch):
    return decoding.measure(contexts, DECODING_ROUNDS if len(contexts) > 2 else 2)


def decoding_tables(results):
    tokens = results["tokens"]
    contexts = list(tokens["softmax"])
    yield table(
        f"Decoding, {HEADS} heads, one token a step: tokens per second at a context of",
        ["", *contexts],
        [
            [side, *(f"{1 / t['seconds']:.0f}" for t in row.values())]
            for side, row in tokens.items()
        ],
    )
    yield table(
        "Memory of the state or the float32 key-value cache in MB at a context of",
        ["", *contexts],
        [[s, *(f"{t['bytes'] / 2**20:.1f}" for t in row.values())] for s, row in tokens.items()],
    )


def decoding_goals(results):
    reached, goals = results["comparison"], decoding.GOALS
    yield "a step at the longest context / the shortest", reached["flat"], "at most", goals["flat"]
    if "speed" in reached:
        context, goal = goals["speed"]
        yield f"softmax / one step at {context}", reached["speed"], "at least", goal
        for name, what in (("memory", "float32"), ("memory, float16", "float16")):
            yield f"cache / state, {what} tables", reached[name], "at least", goals[name]


ALONE = {side: partial(forward_alone, side) for side in SIDES}
SECTIONS = {
    "million": Section(
        million,
        million_tables,
        (1_000_000,),
        (20_000,),
        options=SOFT_OPTIONS | {"n_probes": 4, "heads": 1},
        own_lengths=True,
    ),
    "decoding": Section(
        decoding_section,
        decoding_tables,
        decoding.CONTEXTS,
        (256, 1024),
        options={"rounds": DECODING_ROUNDS, "times": "medians"},
        goals=decoding_goals,
        own_lengths=True,
    ),
}
