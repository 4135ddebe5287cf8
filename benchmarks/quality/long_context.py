"""What a decoder loses at long contexts when a step reads few of the keys, and what it still finds.

A decoder that benchmarks.decoder trained at up to 4,096 bytes, with softmax, reads held-out source
code with pairs `$key=value` in it, exactly. Then it goes on with the text (loss, agreement with
softmax's likeliest byte), and is asked for pairs: a needle (one of 16 in the text) or recall (one
of many). Every layer's attention of the tokens that follow is replaced, of the question itself too
("sparse") or from its "=" on ("dense"). Without training. Lengths and methods can be measured one
at a time: the file keeps what others had measured before.

    python -m benchmarks.decoder --out DECODER
    python -m benchmarks.quality.long_context --decoder DECODER \
        --json benchmarks/results/long_context.json --figure docs/images/long_context.png
"""

import argparse
import datetime
import json
import pathlib
import sysconfig
import time

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, DynamicCache, LlamaForCausalLM

from benchmarks import pyplot, save_picture, write_json
from benchmarks.decoder import (
    HEADS,
    LETTERS,
    VALUE,
    new_decoder,
    new_pairs,
    sharpen,
    with_pairs,
)
from benchmarks.measurement import machine, table
from benchmarks.quality.sparse_steps import (
    Codes,
    Method,
    RandomKeys,
    Step,
    Tables,
    TopK,
    Window,
)
from benchmarks.source_text import read_text

LENGTHS = (8192, 16384, 32768, 65536)
NEEDLES, QUESTIONS = 16, 32
CHUNK = 64  # tokens that a call reads; each sees as many keys as if it came alone
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2)  # of the figure
EPSILON, DELTA = 0.1, 0.05
SOFTMAX, CACHE = "softmax", "cache of codes"
PRECISE = "cache of codes, half the epsilon"  # and max_share=0.3


# --- Reading with a method ------------------------------------------------------------------------


class Reader:
    """A decoder that has read a context exactly, and reads on with any method, again and again."""

    def __init__(self, model: LlamaForCausalLM, context: Tensor) -> None:
        self.model, self.length = model, len(context)
        self.method, self.is_exact, self.read = Method(), True, []
        AttentionInterface.register("benchmark", self._attend)
        model.set_attn_implementation("benchmark")
        self.past = DynamicCache()
        with torch.no_grad():
            model(context[None], cache=self.past, logits_to_keep=1)

    def _attend(self, module, query, key, value, attention_mask, scaling=None, **unused):
        tokens = query.shape[2]
        if tokens == key.shape[2]:
            out = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scaling, enable_gqa=True
            )
        else:
            new = (x[:, :, -tokens:] for x in (key, value))
            self.method.append(module.layer_idx, *new)
            step = Step(module.layer_idx, query, key, value, scaling)
            out, read = (Method() if self.is_exact else self.method).attend(step)
            self.observe(step)
            if not self.is_exact:
                self.read.append(read.expand(1, HEADS, -1).flatten())
        return out.transpose(1, 2).contiguous(), None

    def observe(self, step: Step) -> None:
        """Sees every step."""

    def use(self, method: Method) -> None:
        self.method, self.read = method, []
        for layer, kept in enumerate(self.past.layers):
            method.append(layer, kept.keys, kept.values)

    def logits(self, tokens: Tensor, exact: int = 0) -> Tensor:
        """(T, 256) of tokens after the context, the first `exact` of them read with softmax."""
        found = []
        for is_exact, part in ((True, tokens[:exact]), (False, tokens[exact:])):
            self.is_exact = is_exact
            for chunk in part.split(CHUNK) if len(part) else ():
                with torch.no_grad():
                    found.append(self.model(chunk[None], cache=self.past).logits[0])
        self.past.crop(-len(tokens))
        self.method.crop(self.length)
        return torch.cat(found)

    def found(self, lines: Tensor, exact: int) -> float:
        """Share of the lines whose value is the likeliest one, letter by letter."""
        right = 0
        for line in lines:
            likeliest = self.logits(line[: VALUE.stop - 1], exact).argmax(-1)[VALUE.start - 1 :]
            right += int((likeliest == line[VALUE]).all())
        return right / len(lines)


class Errors(Reader):
    """Reads with softmax, and compares what all methods would have said at every step."""

    def compare(self, methods: dict[str, Method], tokens: Tensor) -> dict[str, dict[str, float]]:
        """Errors relative to sqrt(sum_j w_j |v_j|^2), as stated ones are, and keys read."""
        self.methods, self.errors = methods, {name: [] for name in methods}
        self.shares = {name: [] for name in methods}
        for method in methods.values():
            for layer, kept in enumerate(self.past.layers):
                method.append(layer, kept.keys, kept.values)
        self.logits(tokens)
        for method in methods.values():
            method.crop(self.length)
        result = {}
        for name, method in methods.items():
            error = torch.cat(self.errors[name])
            result[name] = {
                "keys": torch.cat(self.shares[name]).mean().item(),
                "error": error.mean().item(),
                "beyond epsilon": (error > EPSILON).float().mean().item(),
            }
            if isinstance(method, Codes):
                stated = torch.cat(method.stated)
                result[name]["stated"] = stated.mean().item()
                result[name]["beyond stated"] = (error > stated + 1e-4).float().mean().item()
        return result

    def observe(self, step):
        weights = step.scores.softmax(-1)
        exact = weights @ step.values
        spread = (weights @ step.values.square().sum(-1, keepdim=True)).sqrt()[..., 0]
        tokens = step.query.shape[2]
        for name, method in self.methods.items():
            method.append(step.layer, step.key[:, :, -tokens:], step.value[:, :, -tokens:])
            out, read = method.attend(step)
            self.errors[name].append(((out - exact).norm(dim=-1) / spread).flatten())
            self.shares[name].append(read.expand(1, HEADS, -1).flatten())


# --- The benchmark --------------------------------------------------------------------------------


def compared(share: float) -> dict[str, Method]:
    """Methods by name: at most this share of the keys in each step, but for PRECISE."""
    return {
        SOFTMAX: Method(),
        CACHE: Codes(HEADS, epsilon=EPSILON, delta=DELTA, max_share=share),
        PRECISE: Codes(HEADS, epsilon=EPSILON / 2, delta=DELTA, max_share=0.3),
        "lsh_attention, 12 bits, 32 hashes": Tables(12, 32, "horvitz_thompson"),
        "MagicPIG, 10 bits, 150 hashes": Tables(10, 150, "magicpig"),
        "top-k": TopK(share),
        "random keys": RandomKeys(share),
        "window and sinks": Window(share),
    }


def of_figure() -> dict[str, Method]:
    methods = {}
    for share in SHARES:
        name = f" {share}"
        methods[CACHE + name] = Codes(
            HEADS, epsilon=0.01, delta=DELTA, min_share=share, max_share=share
        )
        for kind, method in (("top-k", TopK), ("random keys", RandomKeys), ("window", Window)):
            methods[kind + name] = method(share)
    for epsilon in (0.05, 0.1, 0.2, 0.4):
        methods[f"{CACHE}, epsilon {epsilon}"] = Codes(
            HEADS, epsilon=epsilon, delta=DELTA, max_share=0.3
        )
    for n_bits, n_hashes in ((14, 32), (12, 32), (10, 32), (8, 32)):
        methods[f"tables {n_bits} {n_hashes}"] = Tables(n_bits, n_hashes, "horvitz_thompson")
    for n_bits, n_hashes in ((12, 150), (10, 75), (10, 150), (8, 75)):
        methods[f"MagicPIG {n_bits} {n_hashes}"] = Tables(n_bits, n_hashes, "magicpig")
    return methods


def context(text: Tensor, length: int, pairs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes with pairs between, the pairs, and how the text goes on: the same at all lengths."""
    generator = torch.Generator().manual_seed(length)
    lines, end = new_pairs(pairs, generator), len(text) // 2
    before = text[end - length + lines.numel() :].long()
    tokens, _ = with_pairs(before[:length], lines, generator)
    return tokens, lines, text[end:].long()


def measure(
    model, text, length: int, names: list[str], share: float, tokens: int, questions: int
) -> dict:
    """The losses and answers of these methods; softmax must be the first."""
    results = {}
    for task, pairs in (("needle", NEEDLES), ("recall", length // 128)):
        known, lines, rest = context(text, length, pairs)
        asked = lines[torch.linspace(0, pairs - 1, min(pairs, questions)).long()]
        reader, likeliest = Reader(model, known), None
        methods = compared(share)  # made anew: they keep what they know of a context
        for name in names:
            method = methods[name]
            begin = time.perf_counter()
            reader.use(method)
            result = results.setdefault(name, {})
            if task == "needle":
                logits = reader.logits(rest[:tokens])[:-1]
                likeliest = logits.argmax(-1) if likeliest is None else likeliest
                result["loss"] = F.cross_entropy(logits, rest[1:tokens]).item()
                result["agreement"] = (logits.argmax(-1) == likeliest).float().mean().item()
                result["keys"] = torch.cat(reader.read).mean().item()
            result[f"{task}, sparse"] = reader.found(asked, 0)
            result[f"{task}, dense"] = reader.found(asked, 1 + LETTERS)
            print(f"{length} {task} {name}: {time.perf_counter() - begin:.0f} s", flush=True)
    return results


def show(results: dict) -> None:
    percent = ("agreement", "needle, sparse", "needle, dense", "recall, sparse", "recall, dense")
    for length, of in results.items():
        rows = [
            [name, f"{100 * r['keys']:.3g} %", f"{r['loss']:.3f}"]
            + [f"{100 * r[key]:.1f}" for key in percent]
            for name, r in of.items()
        ]
        header = ["attention", "keys", "nats a byte", *percent]
        print(table(f"### {int(length):,} bytes", header, rows))


def draw(errors: dict, length: int, out: pathlib.Path) -> None:
    """Error against keys read, both logarithmic."""
    plt = pyplot()

    kinds = {  # by the start of their names
        f"{CACHE} ": (f"{CACHE}, a fixed share", "o-"),
        f"{CACHE}, epsilon": (f"{CACHE}, epsilon 0.05 to 0.4", "D--"),
        "top-k": ("top-k, which needs all scores", "s-"),
        "tables": ("lsh_attention, 8 to 14 bits", "^-"),
        "MagicPIG": ("MagicPIG's weighting", "v-"),
        "random keys": ("random keys, weighted", "x-"),
        "window": ("window and sinks", "+-"),
    }
    figure, axis = plt.subplots(figsize=(8.4, 4.2), layout="constrained")
    for start, (label, style) in kinds.items():
        points = sorted(
            (r["keys"], r["error"]) for name, r in errors.items() if name.startswith(start)
        )
        axis.loglog(*zip(*points, strict=True), style, label=label, markersize=4)
    axis.axhline(EPSILON, color="0.6", linewidth=0.8)
    axis.set_xlabel(f"share of {length:,} keys that a query reads")
    axis.set_ylabel("error of attention, mean over layers, heads, steps")
    axis.xaxis.set_major_formatter(lambda x, _: f"{100 * x:.3g} %")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    save_picture(figure, out, dpi=120)


def load(folder: pathlib.Path | None) -> LlamaForCausalLM:
    if folder is None:
        return new_decoder(0).eval()
    return LlamaForCausalLM.from_pretrained(folder).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--decoder", type=pathlib.Path, help="weights; none: those it starts with")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    order = list(compared(share := 0.05))
    help = "beside softmax; default: all"
    parser.add_argument("--methods", nargs="+", choices=order, default=order, help=help)
    parser.add_argument("--share", type=float, default=share, help="of the keys, at most")
    parser.add_argument("--tokens", type=int, default=512, help="of the text that goes on")
    parser.add_argument("--questions", type=int, default=QUESTIONS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="2,048 bytes, a few questions")
    parser.add_argument("--json", type=pathlib.Path, help="write the measurements there")
    parser.add_argument("--figure", type=pathlib.Path, help="draw the errors at the last length")
    args = parser.parse_args()
    if args.quick:
        args.lengths, args.tokens, args.questions = [2048], 64, 2
    torch.set_num_threads(args.threads)
    model = load(args.decoder)
    _, text = read_text(pathlib.Path(sysconfig.get_paths()["stdlib"]))
    names = [x for x in order if x in (SOFTMAX, *args.methods)]
    settings = {"share": args.share, "epsilon": EPSILON, "delta": DELTA, "tokens": args.tokens}
    results = {"lengths": {}, "errors": {}}
    if args.json and args.json.exists():
        results = json.loads(args.json.read_text())
        if any(results[name] != x for name, x in settings.items()):
            parser.error(f"{args.json} was measured with other settings than {settings}")
    results |= {"date": datetime.date.today().isoformat(), "machine": machine()} | settings
    for length in args.lengths:
        sharpen(model, length)
        found = measure(model, text, length, names, args.share, args.tokens, args.questions)
        merged = results["lengths"].get(str(length), {}) | found
        results["lengths"][str(length)] = {x: merged[x] for x in order if x in merged}
        if str(length) not in results["errors"]:
            known, _, rest = context(text, length, NEEDLES)
            errors = Errors(model, known).compare(of_figure(), rest[:CHUNK])
            results["errors"][str(length)] = errors
            for name, error in errors.items():
                print(name, {key: round(x, 4) for key, x in error.items()})
        show(results["lengths"])
        if args.json:
            write_json(args.json, results)
    if args.figure:
        draw(results["errors"][str(length)], length, args.figure)


if __name__ == "__main__":
    main()
