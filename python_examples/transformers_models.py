"""Models of transformers
======================

Models of the package transformers with lshkit's attention: what works, and what it costs.

Small random models of four families (BERT, Llama-style with grouped heads, T5, T5Gemma) get each of
lshkit's attention functions by their name. The first table says what each of them does: forward,
backward, padding that changes no bit, and generation with a cache that equals generation without.
The second has the time of an encoder and of a decoder against `sdpa`, which the picture shows. The
weights are random: this is about interfaces and time, not about quality. Needs transformers,
matplotlib, tabulate and tqdm.
"""

import argparse
import pathlib
import textwrap
import time
import warnings

try:
    import matplotlib
    import torch
    from matplotlib import pyplot as plt
    from tabulate import tabulate
    from tqdm import tqdm
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        LlamaConfig,
        LlamaForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
        T5GemmaConfig,
        T5GemmaForConditionalGeneration,
        T5GemmaModuleConfig,
    )
    from transformers.utils import logging
except ImportError as error:
    raise SystemExit(f"{error}: pip install '.[dev]' has what the examples need") from None

from lshkit.attention.huggingface import register

IMPLEMENTATIONS = ("sdpa", "lshkit_yoso", "lshkit_lsh", "lshkit_bert_lsh")
VOCABULARY = 100
TABLE = {"tablefmt": "github", "disable_numparse": True, "colglobalalign": "right"}
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}


# --- Models -------------------------------------------------------------------------------------


def sizes(args: argparse.Namespace) -> dict:
    return {
        **TOKENS,
        "hidden_size": args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.hidden // 64,
        "intermediate_size": 2 * args.hidden,
        "max_position_embeddings": 2 * max(args.lengths) + 64,
    }


def bert(args, implementation):
    return BertForMaskedLM(BertConfig(**sizes(args), attn_implementation=implementation))


def llama(args, implementation):
    config = LlamaConfig(
        **sizes(args), num_key_value_heads=1, head_dim=64, attn_implementation=implementation
    )
    return LlamaForCausalLM(config)


def t5(args, implementation):
    config = T5Config(
        **TOKENS,
        decoder_start_token_id=1,
        d_model=args.hidden,
        d_kv=64,
        num_heads=args.hidden // 64,
        d_ff=2 * args.hidden,
        num_layers=args.layers,
        attn_implementation=implementation,
    )
    return T5ForConditionalGeneration(config)


def t5gemma(args, implementation):
    """Without the soft cap of its scores, which sdpa can't have either."""
    sides = {
        side: T5GemmaModuleConfig(
            **sizes(args),
            num_key_value_heads=1,
            head_dim=64,
            attn_logit_softcapping=None,
            layer_types=["full_attention"] * args.layers,
        )
        for side in ("encoder", "decoder")
    }
    implementation = "eager" if implementation == "sdpa" else implementation
    config = T5GemmaConfig(**sides, attn_implementation=implementation)
    for name, token in TOKENS.items():
        setattr(config, name, token)
    return T5GemmaForConditionalGeneration(config)


FAMILIES = {"BERT": bert, "Llama-style": llama, "T5": t5, "T5Gemma": t5gemma}


# --- What works -----------------------------------------------------------------------------------


def what_works(family: str, implementation: str, args: argparse.Namespace) -> dict[str, str]:
    """Each trial by its name: "yes", or what went wrong."""
    torch.manual_seed(0)
    # float64: rounding before a layer would flip a bit of a code now and then.
    model = FAMILIES[family](args, implementation).double().eval()
    ids = torch.randint(2, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :11] = 0  # left, where a decoder has it
    decodes, has_decoder = family != "BERT", family.startswith("T5")

    def forward():
        with torch.no_grad():
            return model(input_ids=ids, attention_mask=mask, labels=ids).logits.isfinite().all()

    def backward():
        model.train()
        model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
        model.eval()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return all(gradient.isfinite().all() for gradient in gradients)

    def padding():
        other = torch.where(mask == 1, ids, (ids + 1) % VOCABULARY)
        decoder = {"decoder_input_ids": ids} if has_decoder else {}
        with torch.no_grad():
            a, b = (model(x, attention_mask=mask, **decoder).logits for x in (ids, other))
        return torch.equal(a, b) if has_decoder else torch.equal(a[mask == 1], b[mask == 1])

    def generation():
        options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
        cached = model.generate(ids, **options)
        return torch.equal(cached, model.generate(ids, use_cache=False, **options))

    trials = {"forward": forward, "backward": backward, "padding": padding}
    results = {name: tried(trial) for name, trial in trials.items()}
    return results | {"generate": tried(generation) if decodes else "-"}


REASONS = set()


def tried(trial) -> str:
    try:
        return "yes" if trial() else "no"
    except NotImplementedError as error:
        REASONS.add(str(error))
        return "refused"


# --- Time -----------------------------------------------------------------------------------------


def seconds(run, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def timings(args: argparse.Namespace) -> dict:
    """Seconds by (what, implementation, length), all implementations in turn."""
    trials = (("BERT", True), ("BERT", False), ("Llama-style", True))
    result = {}
    for length in tqdm(args.lengths, desc="lengths"):
        ids = torch.randint(2, VOCABULARY, (1, length))
        for family, forward_only in trials:
            what = f"{family}, " + ("forward" if forward_only else "forward + backward")
            for implementation in IMPLEMENTATIONS:
                torch.manual_seed(0)
                model = FAMILIES[family](args, implementation)
                model.eval() if forward_only else model.train()

                def run(model=model, forward_only=forward_only, ids=ids):
                    with torch.set_grad_enabled(not forward_only):
                        out = model(ids, labels=None if forward_only else ids)
                    if not forward_only:
                        out.loss.backward()

                run()  # once for all that is made at first
                result[what, implementation, length] = seconds(run, args.repeats)
    return result


# --- Tables and picture ---------------------------------------------------------------------------


def draw(times: dict, lengths: list[int], out: pathlib.Path) -> None:
    titles = list(dict.fromkeys(what for what, _, _ in times))
    figure, axes = plt.subplots(1, len(titles), figsize=(3.3 * len(titles), 3.4), sharey=True)
    for axis, what in zip(axes, titles, strict=True):
        for implementation in IMPLEMENTATIONS:
            y = [1000 * times[what, implementation, n] for n in lengths]
            axis.loglog(lengths, y, marker="o", label=implementation)
        axis.set_title(what, fontsize=11)
        axis.set_xlabel("tokens")
        axis.set_xticks(lengths, [f"{n:,}" for n in lengths], rotation=30)
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("milliseconds")
    axes[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(out, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[1],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096], help="to time")
    add("--hidden", type=int, default=256, help="size of the models, 64 a head")
    add("--layers", type=int, default=2, help="of the models")
    add("--repeats", type=int, default=5, help="of a timing, the least counts")
    add("--threads", type=int, default=1, help="CPU threads")
    add("--quick", action="store_true", help="short lengths, one repeat")
    add("--out", type=pathlib.Path, default="transformers_models.png", help="the picture")
    args = parser.parse_args()
    if args.quick:
        parser.set_defaults(lengths=[64, 128], repeats=1, hidden=64, layers=1)
        args = parser.parse_args()
    if args.out.suffix != ".png" or not args.out.absolute().parent.is_dir():
        parser.error(f"--out must be a .png file in a folder that exists: {args.out}")
    for name in ("layers", "repeats", "threads"):
        if (number := getattr(args, name)) < 1:
            parser.error(f"--{name} must be at least 1: {number}")
    if min(args.lengths) < 1:
        parser.error(f"--lengths must be at least 1: {min(args.lengths)}")
    if args.hidden < 64 or args.hidden % 64:
        parser.error(f"--hidden must be a multiple of 64: {args.hidden}")
    matplotlib.use("Agg")
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning)

    register(lsh={"exact_steps": False})  # the estimate in generation too, to compare
    trials = [(family, name) for family in FAMILIES for name in IMPLEMENTATIONS]
    rows = []
    for family, name in tqdm(trials, desc="models"):
        shown = "eager" if (family, name) == ("T5Gemma", "sdpa") else name
        rows.append([family, shown, *what_works(family, name, args).values()])
    header = ["model", "attention", "runs", "trains", "padding", "generate"]
    print(f"\n{tabulate(rows, header, colalign=['left', 'left'], **TABLE)}")
    for reason in sorted(REASONS):
        print("\n" + textwrap.fill(f"refused: {reason}", 80))

    times = timings(args)
    rows = []
    for (what, name, n), mine in times.items():
        speed_up = times[what, "sdpa", n] / mine
        rows.append([what, name, f"{n:,}", f"{1000 * mine:.1f}", f"{speed_up:.2f}"])
    order = {name: i for i, name in enumerate(IMPLEMENTATIONS)}
    rows.sort(key=lambda row: (row[0], order[row[1]]))
    header = ["what", "attention", "tokens", "ms", "speed-up"]
    print(f"\n{tabulate(rows, header, colalign=['left', 'left'], **TABLE)}")
    print("\nspeed-up: over sdpa, of the whole model")
    draw(times, args.lengths, args.out)
    print(f"\npicture: {args.out}")


if __name__ == "__main__":
    main()

# sphinx_gallery_thumbnail_path = "images/transformers_models.png"
