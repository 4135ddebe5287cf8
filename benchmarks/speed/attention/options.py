"""What the options of attention cost: soft codes, 16-bit inputs, gradients, causal, GQA, packed."""

from dataclasses import replace
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.measurement import (
    BACKWARD,
    CAUSAL_BACKWARD,
    FORWARD,
    HEADS,
    N_HASHES,
    Section,
    figure,
    inputs,
    milliseconds,
    of_pass,
    ratio_table,
    table,
)
from benchmarks.speed.attention.sampled import AUTO_UP_TO, SAMPLED, auto, sampled
from lshkit.attention import Soft, yoso_attention

LENGTHS, QUICK_LENGTHS = (512, 1024, 4096, 16384), (128, 256)
SOFT_BITS, PROBES = 12, (4, 2)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
KEY_HEADS = 2
GROUPED_OTHERS = ("softmax", "repeated")
SOFTMAX = "softmax", "softmax, bfloat16"
QUADRATIC_UP_TO = 4096  # for softmax in bf16, which is slow beyond it

SOFT = Soft(n_bits=SOFT_BITS, n_hashes=N_HASHES)
soft = partial(yoso_attention, estimator=SOFT)
SIDES = {"sampled": sampled, "soft": soft}


def changed(**fields):
    """Sampled attention with other fields of its estimator."""
    return partial(yoso_attention, estimator=replace(SAMPLED, **fields))


def with_probes(n_probes):
    return partial(yoso_attention, estimator=replace(SOFT, n_probes=n_probes))


SOFT_GOALS = {  # forward + backward, by probes
    4: {"4096": 8, "16384": 30, "65536": 100},
    2: {"4096": 14, "16384": 50, "65536": 180},
}
SHORT_GOALS = {"512": 6.5, "1024": 13, "4096": 48, "16384": 180}
BF16_GOALS = {"lower_bound, bf16": 22}  # at 16384
PAIR_GOAL, CAUSAL_GOAL = 1.6, 1.3  # most times the lower bound (to 1024), the non-causal pass


def ratio(times, over, under):
    return times[over] / times[under]


# --- Soft codes and 16-bit inputs ---------------------------------------------------------------


def soft_codes(lengths, stopwatch):
    results = {}
    for n in lengths:
        tensors = inputs(n, requires_grad=True)
        results[n] = {
            name: stopwatch.against_softmax(
                n,
                name,
                {f"{t} probes": of_pass(with_probes(t), name, tensors) for t in PROBES},
            )
            for name in (FORWARD, BACKWARD)
        }
    return results


def soft_tables(results):
    yield ratio_table("Softmax attention's time / soft codes'", results, (FORWARD, BACKWARD))
    rows = [
        [n, *(milliseconds(times[p][f"{t} probes"]) for p in times for t in PROBES)]
        for n, times in results.items()
    ]
    header = ["n", *(f"{t} probes: {p}" for p in (FORWARD, BACKWARD) for t in PROBES)]
    yield table("Soft codes in ms", header, rows)


def soft_goals(results):
    for n, times in results.items():
        for t, goals in SOFT_GOALS.items():
            if n in goals:
                reached = ratio(times[BACKWARD], "softmax", f"{t} probes")
                yield f"soft codes, {t} probes, {BACKWARD} at {n}", reached, "at least", goals[n]


def short_floats(lengths, stopwatch):
    """Ours and softmax by the dtype of the inputs; "softmax" is float32."""
    results = {}
    for n in lengths:
        floats, shorts = (inputs(n, requires_grad=True, dtype=x) for x in DTYPES.values())
        sides = {
            "float32": (sampled, floats),
            "bfloat16": (sampled, shorts),
            "bfloat16, 12 bits": (changed(n_bits=SOFT_BITS), shorts),
            "bfloat16, soft codes": (soft, shorts),
            **({"bfloat16, auto": (auto, shorts)} if n <= AUTO_UP_TO else {}),
            "softmax, bfloat16": (scaled_dot_product_attention, shorts),
        }
        results[n] = {}
        for name in (FORWARD, BACKWARD):
            calls = {side: of_pass(call, name, given) for side, (call, given) in sides.items()}
            once = n > QUADRATIC_UP_TO and calls.pop("softmax, bfloat16")
            results[n][name] = stopwatch.against_softmax(n, name, calls)
            if once:
                seconds = stopwatch.softmax_once(n, name, torch.bfloat16)
                results[n][name]["softmax, bfloat16"] = seconds
    return results


def faster_softmax(times):
    """Of float32 and bfloat16, where both were measured."""
    return min((x for x in SOFTMAX if x in times), key=times.get)


def short_float_tables(results):
    header, rows = ["n", "pass", "faster softmax", "ms"], []
    sides = dict.fromkeys(side for passes in results.values() for side in passes[FORWARD])
    header += [side for side in sides if side not in SOFTMAX]
    for n, passes in results.items():
        for name, times in passes.items():
            best = faster_softmax(times)
            dtype = "bfloat16" if best != "softmax" else "float32"
            row = [n, name, dtype, milliseconds(times[best])]
            reached = (figure(ratio(times, best, x)) if x in times else "" for x in header[4:])
            rows.append([*row, *reached])
    yield table("The faster of float32 and bfloat16 softmax / ours by dtype", header, rows)


def short_float_goals(results):
    for n, goal in SHORT_GOALS.items():
        if n in results:
            reached = ratio(results[n][FORWARD], "softmax", "bfloat16")
            yield f"bfloat16, forward at {n}", reached, "at least", goal
    for n, passes in results.items():
        for name, times in passes.items():
            if "bfloat16, auto" in times:
                reached = ratio(times, faster_softmax(times), "bfloat16, auto")
                yield f"bfloat16, {name} at {n}, 'auto', faster softmax", reached, "at least", 1


# --- Gradients ----------------------------------------------------------------------------------


def gradients(lengths, stopwatch):
    """Forward and backward; "softmax" is float32 throughout."""
    results = {}
    for n in lengths:
        floats = inputs(n, requires_grad=True)
        shorts = inputs(n, requires_grad=True, dtype=torch.bfloat16)
        sides = {
            "lower_bound": (sampled, floats),
            "lower_bound, bf16": (sampled, shorts),
            "collided": (changed(gradient="collided"), floats),
            "unbiased": (changed(gradient="unbiased"), floats),
        }
        if n <= QUADRATIC_UP_TO:
            sides["softmax, bf16"] = (scaled_dot_product_attention, shorts)
        calls = {side: of_pass(call, BACKWARD, tensors) for side, (call, tensors) in sides.items()}
        results[n] = {BACKWARD: stopwatch.against_softmax(n, BACKWARD, calls)}
    return results


def gradient_tables(results):
    title = "Softmax attention's time / ours, forward + backward, by gradient (and softmax in bf16)"
    yield ratio_table(title, results, (BACKWARD,))
    sides = list(dict.fromkeys(side for times in results.values() for side in times[BACKWARD]))
    rows = [
        [n, *(milliseconds(t[BACKWARD][s]) if s in t[BACKWARD] else "" for s in sides)]
        for n, t in results.items()
    ]
    yield table("Forward + backward in ms, by gradient", ["n", *sides], rows)


def gradient_goals(results):
    for n, times in results.items():
        t = times[BACKWARD]
        for side, goal in BF16_GOALS.items():
            if n == "16384":
                yield f"{side}, {BACKWARD} at {n}", ratio(t, "softmax", side), "at least", goal
        if int(n) <= 1024:
            for side in ("collided", "unbiased"):
                reached = ratio(t, side, "lower_bound")
                yield f"{side} / lower_bound at {n}", reached, "at most", PAIR_GOAL


# --- Causal -------------------------------------------------------------------------------------


def causal(lengths, stopwatch):
    """Forward and backward; "softmax" is causal too."""
    results = {}
    for n in lengths:
        tensors = inputs(n, requires_grad=True)
        calls = {
            side + suffix: of_pass(attention, name, tensors)
            for side, attention in SIDES.items()
            for suffix, name in (("", BACKWARD), (", causal", CAUSAL_BACKWARD))
        }
        results[n] = {CAUSAL_BACKWARD: stopwatch.against_softmax(n, CAUSAL_BACKWARD, calls)}
    return results


def causal_tables(results):
    rows = []
    for n, times in results.items():
        t = times[CAUSAL_BACKWARD]
        against = [figure(ratio(t, "softmax", f"{side}, causal")) for side in SIDES]
        rows.append([n, *against, *(figure(ratio(t, f"{side}, causal", side)) for side in SIDES)])
    names = [f"softmax / {side}" for side in SIDES]
    names += [f"{side}: causal / not" for side in SIDES]
    yield table("Causal forward + backward (softmax attention: causal)", ["n", *names], rows)


def causal_goals(results):
    for n, times in results.items():
        for side in SIDES:
            reached = ratio(times[CAUSAL_BACKWARD], f"{side}, causal", side)
            yield f"{side}, causal / not, {BACKWARD} at {n}", reached, "at most", CAUSAL_GOAL


# --- Grouped heads, packed sequences ------------------------------------------------------------


def grouped_heads(lengths, stopwatch):
    """Keys and values of KEY_HEADS heads: as they are, and repeated to all heads before."""

    def repeated(query, key, value, is_causal):
        key, value = (x.repeat_interleave(HEADS // KEY_HEADS, dim=1) for x in (key, value))
        return sampled(query, key, value, is_causal=is_causal)

    sides = {
        "softmax": partial(scaled_dot_product_attention, enable_gqa=True),
        "grouped": partial(sampled, enable_gqa=True),
        "repeated": repeated,
    }
    results = {}
    for n in lengths:
        query, *others = inputs(n)
        tensors = [query, *(x[:, :KEY_HEADS].clone() for x in others)]
        tensors = [x.requires_grad_() for x in tensors]
        results[n] = {
            name: stopwatch.in_turns({s: of_pass(call, name, tensors) for s, call in sides.items()})
            for name in (FORWARD, BACKWARD)
        }
    return results


def grouped_heads_tables(results):
    title = f"{HEADS} query heads over {KEY_HEADS} of keys: time of the others / grouped"
    rows = [
        [n, *(figure(ratio(t, s, "grouped")) for t in times.values() for s in GROUPED_OTHERS)]
        for n, times in results.items()
    ]
    header = ["n", *(f"{side}: {p}" for p in (FORWARD, BACKWARD) for side in GROUPED_OTHERS)]
    yield table(title, header, rows)


def packed(lengths, stopwatch):
    """Sequences of these lengths, packed, padded to the longest, and one by one."""
    longest, total = max(lengths), sum(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    flat = inputs(total, requires_grad=True)
    generator = torch.Generator().manual_seed(0)
    shape = (len(lengths), HEADS, longest, flat[0].shape[-1])
    padded = [torch.randn(shape, generator=generator).requires_grad_() for _ in range(3)]

    def softmax_one_by_one(*tensors, is_causal):
        pieces = zip(*(x.split(lengths, dim=-2) for x in tensors), strict=True)
        outs = [scaled_dot_product_attention(*qkv, is_causal=is_causal) for qkv in pieces]
        return torch.cat(outs, dim=-2)

    sides = {
        "packed": (partial(sampled, cu_seqlens=starts), flat),
        "padded": (partial(sampled, attn_mask=mask), padded),
        "softmax, padded": (
            partial(scaled_dot_product_attention, attn_mask=mask[:, None, None]),
            padded,
        ),
        "softmax, one by one": (softmax_one_by_one, flat),
    }
    times = {
        name: stopwatch.in_turns(
            {side: of_pass(call, name, tensors) for side, (call, tensors) in sides.items()}
        )
        for name in (FORWARD, BACKWARD)
    }
    return {"lengths": list(lengths), "passes": times}


def packed_tables(results):
    lengths = results["lengths"]
    share = 1 - sum(lengths) / (len(lengths) * max(lengths))
    others = list(results["passes"][FORWARD])[1:]
    yield table(
        f"{len(lengths)} sequences of {min(lengths)} to {max(lengths)} tokens (padding: "
        f"{100 * share:.0f} % of a padded batch): time of the others / packed",
        ["pass", "packed, ms", *others],
        [
            [name, milliseconds(t["packed"]), *(figure(ratio(t, s, "packed")) for s in others)]
            for name, t in results["passes"].items()
        ],
    )


SOFT_OPTIONS = {"n_bits": SOFT_BITS, "n_probes": PROBES, "sharpness": 2.0}
SECTIONS = {
    "soft": Section(
        soft_codes,
        soft_tables,
        (*LENGTHS, 65536),
        QUICK_LENGTHS,
        options=SOFT_OPTIONS,
        goals=soft_goals,
    ),
    "short_floats": Section(
        short_floats,
        short_float_tables,
        (AUTO_UP_TO, *LENGTHS),
        QUICK_LENGTHS,
        goals=short_float_goals,
    ),
    "gradients": Section(gradients, gradient_tables, LENGTHS, QUICK_LENGTHS, goals=gradient_goals),
    "causal": Section(
        causal,
        causal_tables,
        LENGTHS,
        QUICK_LENGTHS,
        options=SOFT_OPTIONS | {"n_probes": 4},
        goals=causal_goals,
    ),
    "grouped_heads": Section(
        grouped_heads,
        grouped_heads_tables,
        (1024, 4096),
        QUICK_LENGTHS,
        options={"key_heads": KEY_HEADS},
    ),
    "packed": Section(
        packed, packed_tables, tuple(range(64, 1025, 64)), (16, 64, 128), own_lengths=True
    ),
}
