"""How many pairs a trained model reads as its context grows: loss and time by bits and hashes.

A model is trained with softmax estimated from colliding pairs, for the budget "seconds" of
benchmarks.quality.text. The same weights then read held-out texts of several lengths, with all
pairs and with those that collide. Losses are in nats a byte, as there. Times are those of the last
layer's attention on the queries, keys and values of one text, on one thread, beside
`scaled_dot_product_attention` of the same unit rows. Linear cost shows in the pairs that a query
reads and in the nanoseconds a position.

    python -m benchmarks.quality.text.bits --seeds 1     # 10 minutes of training, then of reading
    python -m benchmarks.quality.text.bits --tables
"""

import argparse
import dataclasses
import pathlib
import time

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import RESULTS
from benchmarks.measurement import machine, updated
from benchmarks.quality.text.__main__ import QUICK, SETTINGS, STDLIB, described, load, text_of
from benchmarks.quality.text.at_once import exactly
from benchmarks.quality.text.model import ByteModel, Yoso
from benchmarks.quality.text.training import Setting, Text, Training, evaluate, tests
from lshkit.attention import lsh_attention, yoso_attention

METHOD = "softmax of colliding unit vectors, 10 bits, Horvitz-Thompson, beyond 256"
TESTED = 2**17  # held-out bytes of each length
# Bits and hashes by length. With two bits more for four times the keys, a query meets as many
# unrelated keys as before.
READ = {
    4096: ((10, 32), (10, 64), (10, 128)),
    16384: ((10, 64), (12, 64), (12, 128)),
    65536: ((10, 64), (14, 64), (14, 128), (14, 256)),
}
QUICK_READ = {512: ((6, 8),)}
PASSES = "forward", "forward + backward"


def trained(seed: int, length: int, setting: Setting, text: Text) -> ByteModel:
    training = Training(METHOD, length, seed, setting, text)
    while training.progress() < 1:
        training.step()
    return training.model


# --- Losses and times -----------------------------------------------------------------------------


def mixers(model: ByteModel) -> list[Yoso]:
    return [mixer for mixer in model.modules() if isinstance(mixer, Yoso)]


class Captured(Exception):
    """What the last layer's mixer was called with: queries, keys, values."""


def set_estimators(model: ByteModel, **sizes: int) -> None:
    for mixer in mixers(model):
        mixer.estimator = dataclasses.replace(mixer.estimator, **sizes)


def rows_of(model: ByteModel, text: Text, length: int) -> tuple[Tensor, ...]:
    """Those of the model with all pairs, whatever was read before."""
    set_estimators(model, exact_up_to=length)

    def stop(_: Yoso, called: tuple) -> None:
        raise Captured(*called[:3])

    hook = mixers(model)[-1].register_forward_pre_hook(stop)
    try:
        with torch.no_grad():
            model(tests(text.held_out, length, length)[0][0])
    except Captured as captured:
        return tuple(x[:1].contiguous() for x in captured.args)
    finally:
        hook.remove()
    raise AssertionError("the last layer was not called")


def seconds(attend, rows: tuple[Tensor, ...], name: str, repeats: int) -> float:
    """The least CPU time of a call."""
    rows = tuple(x.detach().requires_grad_(name != "forward") for x in rows)
    best = float("inf")
    for _ in range(repeats):
        begin = time.process_time()
        with torch.set_grad_enabled(name != "forward"):
            out = attend(*rows)
        if name != "forward":
            torch.autograd.grad(out, rows, out)
        best = min(best, time.process_time() - begin)
    return best


def read(model: ByteModel, text: Text, length: int, settings: tuple, tested: int) -> dict:
    """Losses, pairs and times of one length, by "bits, hashes" and "all pairs"."""
    batches, rows = tests(text.held_out, length, tested), rows_of(model, text, length)
    scale = mixers(model)[-1].log_scale.detach().exp()
    q, k, v = F.normalize(rows[0], dim=-1), F.normalize(rows[1], dim=-1), rows[2]
    repeats = 3 if length < 16384 else 1

    def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q * scale[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)

    found = {
        "all pairs": {name.removeprefix("exact_"): x for name, x in exactly(model, batches).items()}
        | {"pairs_a_query": (length + 1) / 2}
        | {name: seconds(softmax, (q, k, v), name, repeats) for name in PASSES}
    }
    for n_bits, n_hashes in settings:
        set_estimators(model, n_bits=n_bits, n_hashes=n_hashes, exact_up_to=256)
        options = {"estimator": mixers(model)[-1].estimator, "parameters": {"scale": scale}}

        def estimate(q: Tensor, k: Tensor, v: Tensor, options: dict = options) -> Tensor:
            return yoso_attention(q, k, v, is_causal=True, normalize=None, seed=0, **options)

        _, pairs = lsh_attention(
            *(q, k, v),
            **{"n_bits": n_bits, "n_hashes": n_hashes, "seed": 0, "is_causal": True},
            **{"window": 1, "n_sinks": 0, "center": False, "return_pairs": True},
        )
        found[f"{n_bits}, {n_hashes}"] = (
            evaluate(model, batches)
            | {"pairs_a_query": int(pairs.sum()) / (q.shape[1] * length)}
            | {name: seconds(estimate, (q, k, v), name, repeats) for name in PASSES}
        )
    return found


# --- Tables ---------------------------------------------------------------------------------------


def table(results: dict) -> str:
    lines = [
        "| seed | bytes | bits, hashes | repeated / all | pairs a query | ns a position: forward "
        "| forward + backward | softmax's time over these |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in results["runs"]:
        for length, found in run["read"].items():
            exact = found["all pairs"]
            for name, x in found.items():
                forward, both = (f"{1e9 * x[p] / int(length):,.0f}" for p in PASSES)
                ratios = ", ".join(f"{exact[p] / x[p]:.1f}" for p in PASSES)
                lines.append(
                    f"| {run['seed']} | {int(length):,} | {name} | {x['repeated_loss']:.3f} / "
                    f"{x['loss']:.3f} | {x['pairs_a_query']:,.0f} | {forward} | {both} | {ratios} |"
                )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[1])
    add("--lengths", type=int, nargs="+", choices=READ, default=[*READ])
    add("--text", type=pathlib.Path, default=STDLIB, help="a folder with .py files")
    add("--quick", action="store_true", help="a few steps at 512 bytes: a test, no result")
    add("--tables", action="store_true", help="report the file, train nothing")
    add("--json", type=pathlib.Path, default=RESULTS / "text_bits.json")
    add("--weights", type=pathlib.Path, help="a folder where trained models are kept")
    args = parser.parse_args()
    if args.tables:
        print(table(load(args.json)))
        return
    if args.quick and args.json == parser.get_default("json"):
        parser.error("--json: a file for --quick, which is no result")
    torch.set_num_threads(1)
    text, about = text_of(args.text, "cpu")
    length, setting = next(iter((QUICK if args.quick else SETTINGS)["seconds"].items()))
    by_length = QUICK_READ if args.quick else {n: READ[n] for n in args.lengths}
    for seed in args.seeds:
        kept = args.weights and args.weights / f"{'quick' if args.quick else 'model'}_{seed}.pt"
        if kept and kept.exists():
            model = Training(METHOD, length, seed, setting, text).model
            model.load_state_dict(torch.load(kept))
        else:
            model = trained(seed, length, setting, text)
            if kept:
                kept.parent.mkdir(parents=True, exist_ok=True)
                torch.save(model.state_dict(), kept)
        for n, settings in by_length.items():
            found = read(model, text, n, settings, max(n, 2048 if args.quick else TESTED))
            with updated(args.json, load) as results:
                results |= {"machine": machine(), "device": "CPU", "text": about}
                results["settings"] = {"seconds": {str(length): described(setting)}}
                others = [run for run in results["runs"] if run["seed"] != seed]
                mine = [run for run in results["runs"] if run["seed"] == seed]
                before = mine[0]["read"] if mine else {}
                run = {"seed": seed, "method": METHOD, "read": before | {str(n): found}}
                results["runs"] = sorted([*others, run], key=lambda run: run["seed"])
            print(table({"runs": [run | {"read": {str(n): found}}]}), flush=True)


if __name__ == "__main__":
    main()
