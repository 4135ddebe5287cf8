"""Sampled attention as it is by default: against softmax attention and plain torch, and memory."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from benchmarks.baselines.plain_torch import yoso_index_add
from benchmarks.measurement import (
    BACKWARD,
    CPUS,
    HEADS,
    N_BITS,
    N_HASHES,
    PASSES,
    PeakGrowth,
    Section,
    figure,
    in_new_process,
    inputs,
    milliseconds,
    of_pass,
    on_cpus,
    pin_to_one_cpu,
    table,
)
from lshkit.attention import Sampled, yoso_attention

LENGTHS, QUICK_LENGTHS = (128, 512, 1024, 4096, 16384), (128, 512, 1024)
# Ratios to reach on AVX-512 with one thread, by length, for each pass (None: no goal).
GOALS = {
    "512": (4, 4, 4, None),
    "1024": (8, 6.5, 5.5, None),
    "4096": (33, 19, 10, None),
    "16384": (130, 70, 12, None),
}
PLAIN_GOALS = {"gather": 20.0, "embedding_bag": None}  # by yoso_index_add's lookup
THREAD_GOAL = 1.8  # a second thread
PLAIN_FROM, AUTO_UP_TO = 1024, 128  # lengths for these two


SAMPLED = Sampled(n_bits=N_BITS, n_hashes=N_HASHES, expectation="never")
sampled = partial(yoso_attention, estimator=SAMPLED)
auto = partial(yoso_attention, estimator=Sampled(n_bits=N_BITS, n_hashes=N_HASHES))


# --- Against softmax attention ------------------------------------------------------------------


def against_softmax(lengths, stopwatch):
    results = {}
    for n in lengths:
        tensors = inputs(n, requires_grad=True)
        sides = {"yoso": sampled} | ({"auto": auto} if n <= AUTO_UP_TO else {})
        results[n] = {
            name: stopwatch.against_softmax(
                n, name, {side: of_pass(call, name, tensors) for side, call in sides.items()}
            )
            for name in PASSES
        }
    return results


def softmax_tables(results):
    header = ["n", *PASSES]
    rows = [[n, *(milliseconds(t["yoso"]) for t in times.values())] for n, times in results.items()]
    yield table('Ours in ms, expectation="never"', header, rows)
    for side, word in (("yoso", "never"), ("auto", "auto")):
        rows = [
            [n, *(figure(t["softmax"] / t[side]) for t in times.values())]
            for n, times in results.items()
            if all(side in t for t in times.values())
        ]
        if rows:
            yield table(f'Softmax attention\'s time / ours, expectation="{word}"', header, rows)


def softmax_goals(results):
    for n, times in results.items():
        for (name, t), goal in zip(times.items(), GOALS.get(n, (None,) * 4), strict=True):
            if goal is not None:
                yield f"{name} at {n}", t["softmax"] / t["yoso"], "at least", goal
            if "auto" in t:
                yield f"{name} at {n}, 'auto'", t["softmax"] / t["auto"], "at least", 1


# --- Against plain torch, and threads -----------------------------------------------------------


def against_plain_torch(lengths, stopwatch):
    results = {}
    for n in lengths:
        tensors = inputs(n)

        def plain(lookup, tensors=tensors):
            return lambda: yoso_index_add(*tensors, n_bits=N_BITS, n_hashes=N_HASHES, lookup=lookup)

        calls = {"yoso": of_pass(sampled, "forward", tensors)}
        calls |= {lookup: plain(lookup) for lookup in PLAIN_GOALS}
        with torch.no_grad():
            results[n] = stopwatch.in_turns(calls)
    return results


def plain_torch_tables(results):
    rows = [[n, *(figure(t[x] / t["yoso"]) for x in PLAIN_GOALS)] for n, t in results.items()]
    title = "Plain-torch YOSO's time / ours, forward: index_add_ and ..."
    yield table(title, ["n", *PLAIN_GOALS], rows)


def plain_torch_goals(results):
    for n, t in results.items():
        for lookup, goal in PLAIN_GOALS.items():
            if goal is not None:
                yield f"plain torch, {lookup}, at {n}", t[lookup] / t["yoso"], "at least", goal


def threads(lengths, stopwatch):
    """Seconds with the stopwatch's threads and with twice as many; {} where there are no CPUs."""
    counts = (stopwatch.threads, 2 * stopwatch.threads)
    results = {}
    if len(CPUS) < counts[1]:
        return results

    def with_threads(count, call):
        def run():
            torch.set_num_threads(count)
            call()

        return run

    on_cpus(CPUS)
    for n in lengths:
        tensors = inputs(n, requires_grad=True)
        results[n] = {}
        for name in PASSES:
            call = of_pass(sampled, name, tensors)
            calls = {str(count): with_threads(count, call) for count in counts}
            results[n][name] = stopwatch.in_turns(calls)
    torch.set_num_threads(stopwatch.threads)
    if stopwatch.threads == 1:
        pin_to_one_cpu()
    return results


def thread_ratios(results):
    for n, times in results.items():
        yield n, {name: t[min(t, key=int)] / t[max(t, key=int)] for name, t in times.items()}


def thread_tables(results):
    rows = [[n, *map(figure, ratios.values())] for n, ratios in thread_ratios(results)]
    if rows:
        yield table("Time with the threads / time with twice as many", ["n", *PASSES], rows)


def thread_goals(results):
    for n, ratios in thread_ratios(results):
        for name, ratio in ratios.items():
            yield f"a second thread, {name} at {n}", ratio, "at least", THREAD_GOAL


# --- Memory -------------------------------------------------------------------------------------


def memory_alone(length):
    """Bytes of scratch of forward and backward, and what autograd keeps. Runs in a new process.

    Saved: neither inputs nor the result.

    Scratch: growth of the peak resident size over the size before the call, less the results.
    A call on a single token before, in a thread that takes its scratch with it, loads most of the
    code, so that it is not counted as scratch. Resident pages are counted to some 0.1 MiB, and the
    backward reuses what the forward keeps.
    """
    first = inputs(1, requires_grad=True)
    with ThreadPoolExecutor(1) as before:
        before.submit(lambda: of_pass(sampled, BACKWARD, first)()).result()
    tensors = inputs(length, requires_grad=True)
    grad_out = torch.ones_like(tensors[0])
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with PeakGrowth() as forward, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = sampled(*tensors)
    kept_inputs = sum(kept.pop(x.untyped_storage().data_ptr(), 0) for x in tensors)
    kept.pop(out.untyped_storage().data_ptr(), None)  # the result, which what follows keeps too

    with PeakGrowth() as backward:
        gradients = torch.autograd.grad(out, tensors, grad_out)

    codes = 2 * HEADS * length * N_HASHES  # of queries and keys, a byte each
    return {
        "threads": torch.get_num_threads(),
        "forward_scratch": forward.bytes - out.nbytes - codes,
        "backward_scratch": backward.bytes - sum(x.nbytes for x in gradients),
        "saved_inputs": kept_inputs,
        "saved_besides_inputs": sum(kept.values()),
        "codes": codes,
    }


def memory(lengths, stopwatch):
    return {n: in_new_process("memory", n, stopwatch.threads) for n in lengths}


def memory_figures(results):
    """MiB of scratch a thread, bytes a token and head in flight, and bytes saved a code."""
    for n, m in results.items():
        threads = m.get("threads", 1)  # older files lack it
        in_flight = int(n) * min(threads, HEADS)
        yield (
            n,
            (
                m["forward_scratch"] / threads / 2**20,
                max(m["backward_scratch"], 0) / in_flight,
                m["saved_besides_inputs"] / m["codes"],
            ),
        )


def memory_tables(results):
    yield table(
        "Memory beyond inputs and results: forward scratch a thread, backward scratch a token and "
        "head in flight, saved for the backward",
        ["n", "forward, MiB", "backward, bytes", "saved, bytes / (token hash)"],
        [
            [n, f"{forward:.2f}", f"{backward:.0f}", f"{saved:.2f}"]
            for n, (forward, backward, saved) in memory_figures(results)
        ],
    )


def memory_goals(results):
    for n, reached in memory_figures(results):
        for what, x, goal in zip(
            ("forward scratch in MiB", "backward scratch in bytes", "saved bytes a token and hash"),
            reached,
            (2, 600, 1),
            strict=True,
        ):
            yield f"{what} at {n}", x, "at most", goal


ALONE = {"memory": memory_alone}
SECTIONS = {
    "softmax": Section(
        against_softmax, softmax_tables, LENGTHS, QUICK_LENGTHS, goals=softmax_goals
    ),
    "plain_torch": Section(
        against_plain_torch,
        plain_torch_tables,
        LENGTHS[2:],
        QUICK_LENGTHS[2:],
        goals=plain_torch_goals,
        shortest=PLAIN_FROM,
    ),
    "threads": Section(
        threads,
        thread_tables,
        LENGTHS[2:],
        QUICK_LENGTHS[2:],
        goals=thread_goals,
        shortest=PLAIN_FROM,
    ),
    "memory": Section(memory, memory_tables, LENGTHS, QUICK_LENGTHS, goals=memory_goals),
}
