"""A small causal model of bytes that finds pairs again in long texts, and how it is trained.

A `LlamaForCausalLM` of 0.77 million weights, so that caches and `generate` are used as with any
other. It learns source code with lines `$key=value` between, random letters that come again later:
as recall they are most of the text, as needles there are few. Texts are of at most 4096 bytes;
their positions are cut at random places and drawn apart up to 65,536 (PoSE, Zhu et al. 2023), and
most of a head's rotations are slow (base 1e10), so that the model reads longer texts than it saw.

    python -m benchmarks.decoder --out DECODER
"""

import argparse
import functools
import math
import pathlib
import sysconfig
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.source_text import read_text

LAYERS, HEADS, KEY_HEADS, HEAD_DIM, DIM = 3, 4, 2, 64, 128
LONGEST = 65536  # position
BASE = 1e10  # of the rotary frequencies
LETTERS = 4  # of a key, and of a value
PAIR = 3 + 2 * LETTERS  # bytes of "$key=value\n"
VALUE = slice(PAIR - 1 - LETTERS, PAIR - 1)
NOT_ASKED = -100  # the label that cross_entropy leaves out
# Length of the texts, how many of them a step takes, and the part of the run.
CURRICULUM = ((128, 64, 0.2), (512, 16, 0.25), (1024, 8, 0.15), (2048, 4, 0.15), (4096, 2, 0.25))
LR = 2e-3


def new_decoder(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=DIM,
        intermediate_size=3 * DIM,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        head_dim=HEAD_DIM,
        attention_bias=True,
        max_position_embeddings=LONGEST + 4096,
        rope_parameters={"rope_type": "default", "rope_theta": BASE},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    start_with_lookups(model)
    return model


@torch.no_grad()
def start_with_lookups(model: LlamaForCausalLM) -> None:
    """What a short run would spend its time on: heads that look back, and one pair that looks up.

    Head h of the first layer looks h + 1 tokens back and writes what it finds into a subspace of
    its own; in the second layer the last four tokens look for where the same four came before and
    copy the token that follows (Olsson et al. 2022, "In-context learning and induction heads").
    """
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    embedding = model.get_input_embeddings().weight
    embedding.copy_(torch.randn_like(embedding) / DIM**0.5)
    speed = BASE ** -torch.linspace(0, 1, HEAD_DIM // 2 + 1)[:-1]

    amplitude = 7.0 * (speed > 1e-3)
    first.k_proj.bias.copy_(torch.cat((amplitude, 0 * speed)).repeat(KEY_HEADS))
    back = torch.arange(1, HEADS + 1)[:, None] * speed
    first.q_proj.bias.copy_(
        torch.cat((amplitude * back.cos(), -amplitude * back.sin()), -1).flatten()
    )
    basis = torch.linalg.qr(torch.randn(DIM, DIM)).Q
    room = 24  # dimensions of a token that are handed on
    own, *earlier = basis[:, : (HEADS + 1) * room].split(room, 1)
    for value in first.v_proj.weight.unflatten(0, (KEY_HEADS, -1)):
        value[:room] = own.T
    for out, to in zip(first.o_proj.weight.split(HEAD_DIM, 1), earlier, strict=True):
        out[:, :room] = 0.2 * to

    slow = (speed < 2e-5).nonzero().flatten()
    slow = torch.cat((slow, slow + HEAD_DIM // 2)).view(HEADS, -1)
    tokens = 2.3 * own, *earlier  # a position's own token, and the ones before
    query = second.q_proj.weight.unflatten(0, (HEADS, -1))
    key = second.k_proj.weight.unflatten(0, (KEY_HEADS, -1))
    value = second.v_proj.weight.unflatten(0, (KEY_HEADS, -1))
    for k in range(KEY_HEADS):
        h = k * HEADS // KEY_HEADS
        for i, at in enumerate(slow):
            part = 2 * torch.linalg.qr(torch.randn(room, len(at))).Q
            query[h, at], key[k, at] = (tokens[i] @ part).T, (tokens[i + 1] @ part).T
        half = basis[:, k * HEAD_DIM : (k + 1) * HEAD_DIM]
        value[k] = half.T
        second.o_proj.weight[:, h * HEAD_DIM : (h + 1) * HEAD_DIM] = 0.6 * half


def sharpen(model: LlamaForCausalLM, length: int) -> None:
    """Scales scores by 1 + 0.2 log2(length / 4096) for contexts longer than it was trained with.

    So many more keys share a softmax (as YaRN's temperature, Peng et al. 2023, and log-length
    scaling, Chiang and Cholak 2022).
    """
    factor = 1 + 0.2 * max(math.log2(length / CURRICULUM[-1][0]), 0)
    for layer in model.model.layers:
        layer.self_attn.scaling = factor * HEAD_DIM**-0.5


# --- Texts with pairs ----------------------------------------------------------------------------


def new_pairs(count: int, generator: torch.Generator) -> Tensor:
    """(count, PAIR) lines "$key=value" of random letters."""
    lines = torch.randint(ord("a"), ord("z") + 1, (count, PAIR), generator=generator)
    lines[:, 0], lines[:, LETTERS + 1], lines[:, -1] = ord("$"), ord("="), ord("\n")
    return lines


def with_pairs(text: Tensor, lines: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The text with the lines put in at random places, and where each one starts."""
    room = len(text) - lines.numel()
    cuts = torch.randint(room + 1, (len(lines),), generator=generator).sort().values
    starts = cuts + PAIR * torch.arange(len(lines))
    out = text[: room + lines.numel()].clone()
    is_text = torch.ones(len(out), dtype=torch.bool)
    at = starts[:, None] + torch.arange(PAIR)
    is_text[at.flatten()] = False
    out[is_text] = text[:room]
    out[at] = lines
    return out, starts


def sample(text: Tensor, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """A training text, its labels without random letters, and those of letters that come again."""
    share = torch.rand((), generator=generator).item() ** 2  # of the text that is pairs
    lines = max(int(share * length / PAIR), 4)
    pairs = new_pairs(lines // 2, generator)
    again = torch.randint(len(pairs), (lines - len(pairs),), generator=generator)
    order = torch.cat((torch.arange(len(pairs)), again))
    order = order[torch.randperm(lines, generator=generator)]
    start = torch.randint(len(text) - length, (), generator=generator)
    tokens, starts = with_pairs(text[start : start + length].long(), pairs[order], generator)
    labels, answers = tokens.clone(), torch.full_like(tokens, NOT_ASKED)
    came = torch.zeros(len(pairs), dtype=torch.bool)
    for number, at in zip(order.tolist(), starts.tolist(), strict=True):
        key, value = slice(at + 1, at + 1 + LETTERS), slice(at + VALUE.start, at + VALUE.stop)
        if came[number]:
            answers[value] = tokens[value]
        labels[key] = labels[value] = NOT_ASKED
        came[number] = True
    return tokens, labels, answers


def drawn_positions(length: int, generator: torch.Generator) -> Tensor:
    """Positions that go on by one but for a few jumps, the last one below LONGEST."""
    jumps = torch.zeros(length, dtype=torch.long)
    count = int(torch.randint(4, (), generator=generator))
    at = torch.randint(length, (count,), generator=generator)
    parts = torch.rand(count + 1, generator=generator).sort().values.diff()
    jumps[at] = (parts * (LONGEST - length)).long()
    return torch.arange(length) + jumps.cumsum(0)


# --- Training ------------------------------------------------------------------------------------


def lookups(model: LlamaForCausalLM, text: Tensor, length: int, pairs: int, seed: int) -> float:
    """Share of the values' letters that are the likeliest ones, in questions at the text's end."""
    generator = torch.Generator().manual_seed(seed)
    asked = min(pairs, 16)
    lines = new_pairs(pairs, generator)
    tokens, _ = with_pairs(text[: length - asked * PAIR].long(), lines, generator)
    questions = lines[torch.randperm(pairs, generator=generator)[:asked]]
    tokens = torch.cat((tokens, questions.flatten()))[None]
    with torch.no_grad():
        logits = model(tokens, logits_to_keep=asked * PAIR + 1).logits[0, :-1]
    found = logits.argmax(-1).view(asked, PAIR)[:, VALUE] == questions[:, VALUE]
    return found.float().mean().item()


def stage(done: float) -> tuple[int, int]:
    """Length and number of texts when this part of the run is over."""
    for length, count, part in CURRICULUM:
        done -= part
        if done < 0:
            return length, count
    return CURRICULUM[-1][:2]


def train(seconds: float, seed: int, log: Callable[[str], None]) -> LlamaForCausalLM:
    """AdamW by the clock: lengths and learning rate follow the part of the time that is over."""
    text, held_out = read_text(pathlib.Path(sysconfig.get_paths()["stdlib"]))
    model = new_decoder(seed)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.98), weight_decay=0.01)
    begin, steps, shown = time.process_time(), 0, 0.0
    while (done := (time.process_time() - begin) / seconds) < 1:
        length, count = stage(done)
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1, (steps + 1) / 100, math.cos(math.pi / 2 * done) ** 2 + 0.02)
        samples = [sample(text, length, generator) for _ in range(count)]
        tokens, *labels = map(torch.stack, zip(*samples, strict=True))
        positions = torch.stack([drawn_positions(length, generator) for _ in range(count)])
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens, position_ids=positions, use_cache=False).logits[:, :-1]
        # As much weight for all letters that can be looked up as for all other bytes.
        logits = logits.flatten(0, 1).float()
        loss = sum(F.cross_entropy(logits, of[:, 1:].flatten()) for of in labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps += 1
        if done > shown:
            shown += 0.02
            recall = lookups(model, held_out, 4096, 64, steps)
            log(
                f"{done:4.0%}, step {steps} of {count} texts of {length}: {loss.item():.3f} nats, "
                f"recall of 64 pairs in 4,096 bytes {recall:.0%}"
            )
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of the weights")
    parser.add_argument("--seconds", type=float, default=600, help="of CPU time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    log = functools.partial(print, flush=True)
    train(args.seconds, args.seed, log).save_pretrained(args.out)


if __name__ == "__main__":
    main()
