"""A long document and a cache of codes
====================================

Opens a long document and goes on with it, with softmax and with a cache that reads few keys.

The document is the source code of Python's standard library. A decoder of transformers reads the
first n tokens of it, exactly; then it reads on token by token, with softmax attention over all keys
of a DynamicCache and with `code_cache`, which keeps sign codes beside the keys and reads those that
matter. Compared are the time of a step, memory, the likeliest next tokens and the loss; then both
generate. The model is any causal language model of transformers in a folder, `--model`; without one
the small model of bytes of benchmarks/decoder.py is trained for two minutes (start the example in
the repository). At the end there are a table, generated text and a picture. Needs transformers,
matplotlib, tabulate and tqdm.
"""

import argparse
import math
import pathlib
import statistics
import sys
import sysconfig
import time

try:
    import matplotlib
    import torch
    from matplotlib import pyplot as plt
    from tabulate import tabulate
    from torch.nn import functional as F
    from tqdm import tqdm
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
    from transformers.utils import logging
except ImportError as error:
    raise SystemExit(f"{error}: pip install '.[dev]' has what the examples need") from None

from lshkit.attention.huggingface import code_cache, register

SOFTMAX, CODES = "softmax", "cache of codes"
ATTENTION = {SOFTMAX: "sdpa", CODES: "lshkit_cache"}
TABLE = {"tablefmt": "github", "disable_numparse": True, "colglobalalign": "right"}


# --- Document and model --------------------------------------------------------------------------


def read_document() -> str:
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    return "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("*.py")))


def load_tokenizer(args: argparse.Namespace):
    """The functions from text to ids `(n,)` and back."""
    if args.model is None or not (args.model / "tokenizer_config.json").exists():
        encode = lambda text: torch.tensor(list(text.encode()))  # noqa: E731
        return encode, lambda ids: bytes(ids.tolist()).decode(errors="replace")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    return lambda text: tokenizer(text, return_tensors="pt").input_ids[0], tokenizer.decode


def load_model(args: argparse.Namespace):
    if args.model is None:
        sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
        from benchmarks.decoder import new_decoder, train

        model = new_decoder(0) if args.quick else train(args.seconds, 0, tqdm.write)
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model)
    return model.eval().to(getattr(torch, args.dtype))


# --- Reading on -----------------------------------------------------------------------------------


def open_document(model, ids: torch.Tensor, options: dict) -> dict:
    """Caches that hold the same keys and values, and the seconds that reading them took."""
    model.set_attn_implementation(ATTENTION[CODES])
    codes, exact = code_cache(model, **options), DynamicCache()
    start = time.perf_counter()
    with torch.no_grad():
        model(ids[None], cache=codes, logits_to_keep=1)
    seconds = time.perf_counter() - start
    for i, layer in enumerate(codes.layers):
        exact.update(layer.keys.clone(), layer.values.clone(), i)
    return {SOFTMAX: exact, CODES: codes, "seconds": seconds}


def read_on(model, name: str, past, ids: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Logits after each of the ids, read one by one, and the median seconds of a step."""
    model.set_attn_implementation(ATTENTION[name])
    logits, times = [], []
    with torch.no_grad():
        for token in ids:
            start = time.perf_counter()
            logits.append(model(token[None, None], cache=past).logits[0, -1].float())
            times.append(time.perf_counter() - start)
    past.crop(-len(ids))
    return torch.stack(logits), statistics.median(times)


def generate(model, name: str, past, ids: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """The ids that `generate` adds to the document, of which the cache lacks the last one."""
    model.set_attn_implementation(ATTENTION[name])
    past.crop(-1)
    options = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids[None], cache=past, **options)[0, len(ids) :]


def nbytes(name: str, past) -> int:
    if name == CODES:
        return past.nbytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in past.layers)


def compare(model, ids: torch.Tensor, n: int, args: argparse.Namespace) -> dict:
    """Of the document's first n tokens, by cache."""
    options = {"epsilon": args.epsilon, "max_share": args.max_share}
    if args.model is None:
        from benchmarks.decoder import sharpen

        sharpen(model, n)
    pasts = open_document(model, ids[:n], options)
    rest, result = ids[n : n + args.tokens + 1], {"prompt": pasts["seconds"]}
    for name in ATTENTION:
        logits, seconds = read_on(model, name, pasts[name], rest[:-1])
        result[name] = {
            "seconds": seconds,
            "bytes": nbytes(name, pasts[name]),
            "loss": F.cross_entropy(logits, rest[1:]).item(),
            "likeliest": logits.argmax(-1),
            "keys": pasts[name].share_read if name == CODES else 1.0,
        }
    for name in ATTENTION:
        result[name]["text"] = generate(model, name, pasts[name], ids[:n], args.tokens)
    return result


# --- Table and picture ----------------------------------------------------------------------------


def draw(results: dict, out: pathlib.Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.4))
    lengths = list(results)
    quantities = (lambda r: 1e3 * r["seconds"], lambda r: r["bytes"] / 2**20)
    for axis, quantity in zip(axes, quantities, strict=True):
        found = {name: [quantity(results[n][name]) for n in lengths] for name in ATTENTION}
        upper = max(ATTENTION, key=lambda name: found[name][-1])
        for name, values in found.items():
            axis.loglog(lengths, values, "o-")
            side = 1 if name == upper else -1  # of its line
            for n, value in zip(lengths, values, strict=True):
                axis.annotate(
                    f"{value:.3g}",
                    (n, value),
                    (0, 10 * side),
                    textcoords="offset points",
                    ha="center",
                    va="center",
                )
    for axis, title in zip(
        axes, ("milliseconds a token, whole model", "MiB of cache"), strict=True
    ):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("tokens of the document")
        axis.set_xticks(lengths, [f"{n:,}" for n in lengths])
        axis.minorticks_off()
        axis.set_yticks([])
        axis.margins(0.12, 0.15)
        axis.grid(alpha=0.3)
    axes[0].legend(ATTENTION, frameon=False)
    figure.tight_layout()
    figure.savefig(out, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[1],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=pathlib.Path, help="folder of a causal language model; else one is trained")
    add("--lengths", type=int, nargs="+", default=[4096, 16384, 65536], help="tokens, the first n")
    add("--tokens", type=int, default=128, help="to read on, and to generate")
    add("--epsilon", type=float, default=0.1, help="error that a step may have")
    add("--max-share", type=float, default=0.05, help="of the keys, at most; at least 0.01")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the model")
    add("--seconds", type=float, default=120, help="of CPU time, for training")
    add("--threads", type=int, default=1, help="CPU threads")
    add("--quick", action="store_true", help="untrained, short, few tokens")
    add("--out", type=pathlib.Path, default="long_document.png", help="the picture")
    args = parser.parse_args()
    if args.quick:
        parser.set_defaults(lengths=[1500, 3000], tokens=8)
        args = parser.parse_args()
    if args.out.suffix != ".png" or not args.out.absolute().parent.is_dir():
        parser.error(f"--out must be a .png file in a folder that exists: {args.out}")
    for name in ("tokens", "threads"):
        if (number := getattr(args, name)) < 1:
            parser.error(f"--{name} must be at least 1: {number}")
    if min(args.lengths) < 1:
        parser.error(f"--lengths must be at least 1: {min(args.lengths)}")
    if not 0 < args.epsilon < 1:
        parser.error(f"--epsilon must be between 0 and 1: {args.epsilon}")
    if not 0.01 <= args.max_share <= 1:
        parser.error(f"--max-share must be 0.01 to 1: {args.max_share}")
    if not 0 < args.seconds < math.inf:
        parser.error(f"--seconds must be a number > 0: {args.seconds}")
    if args.model is not None and not args.model.is_dir():
        parser.error(f"--model must be a folder that exists: {args.model}")
    matplotlib.use("Agg")
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    register()

    encode, decode = load_tokenizer(args)
    # Some characters of text make a token: no more is encoded than is needed.
    ids = encode(read_document()[: 8 * (max(args.lengths) + args.tokens)])
    if len(ids) <= max(args.lengths) + args.tokens:
        parser.error(f"--lengths must leave --tokens of the document, which has {len(ids):,}")
    model = load_model(args)
    results = {n: compare(model, ids, n, args) for n in tqdm(args.lengths, desc="lengths")}

    rows = []
    for n, of in results.items():
        for name in ATTENTION:
            mine, exact = of[name], of[SOFTMAX]
            agreement = (mine["likeliest"] == exact["likeliest"]).float().mean()
            rows.append(
                [f"{n:,}", name, f"{1e3 * mine['seconds']:.2f}", f"{mine['bytes'] / 2**20:.0f}"]
                + [f"{100 * mine['keys']:.3g} %", f"{100 * agreement:.1f} %", f"{mine['loss']:.3f}"]
            )
    header = ["tokens", "attention", "ms a token", "MiB", "keys read", "agreement", "nats a token"]
    print(f"\n{tabulate(rows, header, **TABLE)}")
    print("\nms a token: of the whole model; agreement: of the likeliest tokens, with softmax's")
    longest = max(args.lengths)
    print(f"the prompt of {longest:,} tokens took {results[longest]['prompt']:.1f} s, exactly")
    for name in ATTENTION:
        print(f"\n--- {name} generates:\n{decode(results[longest][name]['text'])}")
    draw(results, args.out)
    print(f"\npicture: {args.out}")


if __name__ == "__main__":
    main()

# sphinx_gallery_thumbnail_path = "images/long_document.png"
