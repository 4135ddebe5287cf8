"""Decoding with YosoState against softmax attention over a cache of keys and values.

A token of softmax attention is `torch.nn.functional.scaled_dot_product_attention` of one query over
the float32 cache of the context, without the time to append to it; one of ours is
`YosoState.step`, which adds the key and value and attends. All contexts and both sides run in one
process in turns, and medians are compared. The two figures of accuracy are the difference of
float16 tables from float32 ones after the longest context, as a share of the output's length.

    python -m benchmarks.speed.attention --sections decoding
"""

import statistics
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

from lshkit.attention import Sampled, Soft, YosoState

HEADS, HEAD_DIM, N_BITS, N_HASHES = 8, 64, 8, 32
HARD = Sampled(n_bits=N_BITS, n_hashes=N_HASHES)
CONTEXTS = (1024, 16384, 131072)
SIDES = {
    "hard": {"estimator": HARD},
    "hard, float16 tables": {"estimator": HARD, "table_dtype": torch.float16},
    "soft, 4 probes": {"estimator": Soft(n_bits=N_BITS, n_hashes=N_HASHES)},
}
STEPS_A_TURN = 40  # of ours, for one of softmax attention
GOALS = {"flat": 1.1, "speed": (16384, 50.0), "memory": 30.0, "memory, float16": 60.0}


def tokens(n, generator, mean=0.0):
    """A query, key and value of n positions, `(1, heads, n, head_dim)` each."""
    shape = (3, 1, HEADS, n, HEAD_DIM)
    query, key, value = torch.randn(shape, generator=generator)
    return query, key, value + mean


def state_at(context, generator, **options):
    state = YosoState(1, HEADS, HEAD_DIM, seed=0, **options)
    for first in range(0, context, 8192):
        _, key, value = tokens(min(8192, context - first), generator)
        state.append(key, value)
    return state


def time_tokens(contexts, rounds):
    """Median seconds of a token for each side and context, and bytes of what it keeps."""
    generator = torch.Generator().manual_seed(0)
    states = {(s, n): state_at(n, generator, **o) for s, o in SIDES.items() for n in contexts}
    caches = {n: torch.randn(2, 1, HEADS, n, HEAD_DIM, generator=generator) for n in contexts}
    times = {key: [] for key in [*states, *(("softmax", n) for n in contexts)]}
    for _ in range(rounds):
        for n, (keys, values) in caches.items():
            query, _, _ = tokens(1, generator)
            begin = time.perf_counter()
            scaled_dot_product_attention(query, keys, values)
            times["softmax", n].append(time.perf_counter() - begin)
        steps = [tokens(1, generator) for _ in range(STEPS_A_TURN)]
        for side in SIDES:
            # Contexts in turns, token by token: whatever else the machine does meets all of them.
            for qkv in steps:
                for n in contexts:
                    begin = time.perf_counter()
                    states[side, n].step(*qkv)
                    times[side, n].append(time.perf_counter() - begin)
    rows = {}
    for (side, n), seconds in times.items():
        kept = caches[n].nbytes if side == "softmax" else states[side, n].nbytes
        rows.setdefault(side, {})[n] = {
            "seconds": statistics.median(seconds),
            "fastest": min(seconds),
            "bytes": kept,
        }
    return rows


def half_precision_error(context):
    """Root mean square difference of float16 tables from float32 ones, by the mean of the values.

    A mean other than 0 makes sums grow with the number of tokens rather than with its root.
    """
    errors = {}
    for mean in (0.0, 1.0):
        outs = []
        for dtype in (torch.float32, torch.float16):
            generator = torch.Generator().manual_seed(1)
            state = YosoState(1, HEADS, HEAD_DIM, seed=0, table_dtype=dtype)
            for first in range(0, context, 8192):
                _, key, value = tokens(min(8192, context - first), generator, mean)
                state.append(key, value)
            query, _, _ = tokens(256, generator)
            outs.append(state.attend(query))
        full, half = outs
        errors[f"mean {mean:g}"] = float((half - full).norm() / full.norm())
    return errors


def compare(rows, contexts):
    """What the goals are about."""
    first, last = contexts[0], contexts[-1]
    at, _ = GOALS["speed"]
    hard, softmax = rows["hard"], rows["softmax"]
    result = {
        "flat": hard[last]["seconds"] / hard[first]["seconds"],
        "memory": softmax[last]["bytes"] / hard[last]["bytes"],
        "memory, float16": softmax[last]["bytes"] / rows["hard, float16 tables"][last]["bytes"],
    }
    if at in contexts:
        for name, figure in (("speed", "seconds"), ("speed, fastest", "fastest")):
            result[name] = softmax[at][figure] / hard[at][figure]
    return result


def measure(contexts, rounds):
    with torch.inference_mode():
        rows = time_tokens(contexts, rounds)
        errors = half_precision_error(contexts[-1])
    return {
        "tokens": rows,
        "comparison": compare(rows, contexts),
        "goals": GOALS,
        "float16 difference": errors,
    }
