"""A decoding step from a CodeCache against softmax attention over a cache of keys and values.

One query, 8 heads of 64 features, one thread. Softmax is the faster of
`scaled_dot_product_attention` and of matrix products with `softmax`, both over a cache of the same
dtype, without the time to append to it; ours is `CodeCache.attend`. Sides take turns, and the
fastest step of each is compared. Keys and queries are drawn so that scores are spread (standard
deviation 1.5), peaked (queries near a key) or clustered. Errors are relative to the root mean
square norm of the values under the attention weights; "beyond" are steps and heads with an error
above epsilon.

    python -m benchmarks.speed.code_cache --json benchmarks/results/code_cache.json
"""

import argparse
import datetime
import pathlib
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import write_json
from benchmarks.measurement import machine
from lshkit.attention import CodeCache

HEADS, HEAD_DIM = 8, 64
CONTEXTS = (8192, 16384, 32768, 65536)
SIDES = ((torch.float32, HEADS), (torch.bfloat16, HEADS), (torch.float32, 2), (torch.bfloat16, 2))
KINDS = ("spread", "peaked", "clustered")
EPSILON, DELTA = 0.1, 0.05
# At the longest context: ratios of times without grouped heads, share of keys read, steps beyond.
GOALS = {"float32": 8.0, "bfloat16": 4.0, "read": 0.05, "beyond": 1.5 * DELTA}


def draw(kind, context, key_heads, steps, generator):
    """Keys and values of the context, and the queries of each step."""

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    key = normal(1, key_heads, context, HEAD_DIM)
    query = 1.5 * normal(steps, 1, HEADS, 1, HEAD_DIM)
    if kind == "peaked":
        near = key[0, :, torch.randint(context, (steps,), generator=generator)]
        near = near.transpose(0, 1).repeat_interleave(HEADS // key_heads, 1)
        query = query + 1.5 * near[:, None, :, None]
    if kind == "clustered":
        centre = normal(256, HEAD_DIM)
        number = torch.randint(256, key.shape[:3], generator=generator)
        key = centre[number] + 0.5 * key
        number = torch.randint(256, query.shape[:4], generator=generator)
        query = centre[number] + query / 2
    value = normal(1, key_heads, context, HEAD_DIM) + 0.5 * key + 0.3
    return query, key, value


def products(query, key, value):
    """Softmax attention of one query by matrix products."""
    batch, heads, _, d = query.shape
    query = query.reshape(batch, key.shape[1], -1, d)
    out = (query @ key.mT * d**-0.5).softmax(-1) @ value
    return out.reshape(batch, heads, 1, -1)


def fused(query, key, value):
    return scaled_dot_product_attention(
        query, key, value, enable_gqa=query.shape[1] != key.shape[1]
    )


def measure(kind, context, dtype, key_heads, steps):
    generator = torch.Generator().manual_seed(context)
    query, key, value = (x.to(dtype) for x in draw(kind, context, key_heads, steps, generator))
    cache = CodeCache(
        *(1, HEADS, HEAD_DIM),
        num_key_heads=key_heads,
        seed=0,
        dtype=dtype,
        epsilon=EPSILON,
        delta=DELTA,
    )
    cache.append(key, value)
    begin = time.perf_counter()
    cache.attend(query[0])
    hashing = time.perf_counter() - begin
    # A column more: its attention is the mean square of the values' norms.
    square = value.float().square().sum(-1, keepdim=True)
    whole = key.float(), torch.cat((value.float(), square), -1)
    times = {"cache": [], "fused": [], "products": []}
    errors, stated, read = [], [], []
    for i, q in enumerate(query):
        for name, side in (("fused", fused), ("products", products)):
            if i < 10:
                begin = time.perf_counter()
                side(q, key, value)
                times[name].append(time.perf_counter() - begin)
        begin = time.perf_counter()
        out, report = cache.attend(q, return_report=True)
        times["cache"].append(time.perf_counter() - begin)
        exact, norm = products(q.float(), *whole).split(HEAD_DIM, -1)
        errors.append((out.float() - exact).norm(dim=-1) / norm[..., 0].sqrt())
        stated.append(report.error)
        read.append(report.keys / context)
    errors, stated, read = (torch.cat(x).flatten() for x in (errors, stated, read))
    fastest = {name: min(x) for name, x in times.items()}
    row = {
        "scores": kind,
        "context": context,
        "dtype": str(dtype).removeprefix("torch."),
        "key_heads": key_heads,
        "seconds": fastest,
        "hashing": hashing,
        "read": float(read.mean()),
        "error": float(errors.square().mean().sqrt()),
        "stated": float(stated.mean()),
        "beyond": float((errors > EPSILON).double().mean()),
        "beyond stated": float((errors > stated).double().mean()),
        "bytes": cache.nbytes / (key.nbytes + value.nbytes),
    }
    row["ratio"] = min(fastest["fused"], fastest["products"]) / fastest["cache"]
    return row


def show(rows):
    print("| scores | context | dtype | key heads | faster | ms a step | read | error | stated |")
    print("|---|---|---|---|---|---|---|---|---|")
    for r in rows:
        print(
            f"| {r['scores']} | {r['context']:,} | {r['dtype']} | {r['key_heads']} | "
            f"{r['ratio']:.1f} | {1e3 * r['seconds']['cache']:.2f} | {r['read']:.1%} | "
            f"{r['error']:.3f} | {r['stated']:.3f} |"
        )


def compare(rows):
    """What the goals are about."""
    longest = max(r["context"] for r in rows)
    last = [r for r in rows if r["context"] == longest]
    result = {
        name: min(r["ratio"] for r in last if r["dtype"] == name and r["key_heads"] == HEADS)
        for name in ("float32", "bfloat16")
    }
    result["read"] = max(r["read"] for r in last)
    result["beyond"] = max(r["beyond"] for r in rows)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two contexts, fewer steps")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    contexts, steps = (CONTEXTS[::3], 12) if args.quick else (CONTEXTS, 30)
    with torch.inference_mode():
        rows = [
            measure(kind, context, dtype, key_heads, steps)
            for context in contexts
            for kind in KINDS
            for dtype, key_heads in SIDES
        ]
    show(rows)
    found = compare(rows)
    for name, goal in GOALS.items():
        at = "at least" if name in ("float32", "bfloat16") else "at most"
        print(f"{name}: {found[name]:.3g}, wanted {at} {goal:.3g}")
    if args.json:
        result = {
            "date": datetime.date.today().isoformat(),
            "machine": machine(),
            "rows": rows,
            "comparison": found,
            "goals": GOALS,
        }
        write_json(args.json, result)


if __name__ == "__main__":
    main()
