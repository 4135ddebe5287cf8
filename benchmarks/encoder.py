"""A small transformer encoder whose heads' values any method mixes, and how it is trained.

For a seed all methods start from the same weights, but for those that only one of them has.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import baselines
from lshkit.attention import Estimator, yoso_attention

NEAR = 16  # convolution and window see so many tokens to either side
CONTROLS = {  # kinds of mixers and their options
    "convolution only": ("convolution only", {"conv_window": 2 * NEAR + 1}),
    "window only": ("window only", {"reach": NEAR}),
    "no attention": ("no attention", {}),
}


class Batch(NamedTuple):
    """Sequences, and questions about them."""

    tokens: Tensor  # (B, n) int64
    mask: Tensor | None  # (B, n) bool: positions that hold a token; None: all
    asked: Tensor | None  # (B, n) bool: positions that answer; None: one answer a sequence
    answers: Tensor  # int64, one for each question, in the order of tokens[asked]


# --- What mixes the values: mix(q, k, v, mask), all (B, heads, n, head_dim) -----------------------


class Yoso(nn.Module):
    """Fresh hash functions in each training step, fixed ones in the evaluation."""

    def __init__(self, seed: int, estimator: Estimator, normalize: str | None = "l2") -> None:
        super().__init__()
        self.seed, self.estimator, self.eval_estimator = seed, estimator, estimator
        self.normalize = normalize

    def mix(self, q, k, v, mask):
        estimator = self.estimator if self.training else self.eval_estimator
        seed = None if self.training else self.seed
        options = {"estimator": estimator, "normalize": self.normalize, "seed": seed}
        return yoso_attention(q, k, v, mask, **options)


class YosoC(Yoso):
    """With the convolution over the values added."""

    def __init__(self, seed: int, estimator: Estimator, convolution: nn.Module) -> None:
        super().__init__(seed, estimator)
        self.convolution = convolution

    def mix(self, q, k, v, mask):
        return super().mix(q, k, v, mask) + self.convolution.mix(q, k, v, mask)


def mixer(method: tuple, dim: int, heads: int, length: int, seed: int) -> nn.Module:
    """What mixes in one layer, of a kind, "YOSO", "YOSO-C" or one of the baselines, and options."""
    kind, options = method
    if kind == "YOSO":
        return Yoso(seed, **options)
    if kind == "YOSO-C":
        convolution = mixer(CONTROLS["convolution only"], dim, heads, length, seed)
        return YosoC(seed, convolution=convolution, **options)
    made = baselines.build(kind, dim, heads, length, **options)
    del made.project, made.out  # the encoder has its own
    return made


# --- Model ----------------------------------------------------------------------------------------


class Attention(nn.Module):
    """conv_width: of short causal depthwise convolutions over queries, keys and values; 0: none."""

    def __init__(
        self, method: tuple, dim: int, heads: int, length: int, seed: int, conv_width: int = 0
    ) -> None:
        super().__init__()
        self.heads, self.keys_are_previous = heads, False
        self.project, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        with torch.random.fork_rng():
            self.mixer = mixer(method, dim, heads, length, seed)
        self.mix = self.mixer.mix
        self.conv = None
        if conv_width:
            options = {"groups": 3 * dim, "padding": conv_width - 1}
            self.conv = nn.Conv1d(3 * dim, 3 * dim, conv_width, **options)

    @torch.no_grad()
    def look_for_the_same(self) -> None:
        """Keys get the queries' projection: a query looks for keys that are made of what it is.

        Twice the usual weights, so that softmax starts about as sharp as 8 bits do, which do not
        depend on the length of a query: scores near 8 of a key that fits, else around 0.
        """
        query, key, _ = self.project.weight.chunk(3)
        key.copy_(query.mul_(2))

    @torch.no_grad()
    def look_nearby(self, speed: Tensor) -> None:
        """Keys get the queries' projection, turned by as many positions as a head looks aside."""
        query, key, _ = self.project.weight.unflatten(0, (3, self.heads, -1))
        for head, (q, k) in enumerate(zip(query, key, strict=True)):
            angle = (head // 2 + 1) * (-1) ** head * speed  # a token back, ahead, two back, ...
            sin, cos = q.chunk(2, -1)
            turned = (sin * angle.cos() - cos * angle.sin(), cos * angle.cos() + sin * angle.sin())
            k.copy_(torch.cat(turned, -1))

    def forward(self, x: Tensor, positions: Tensor | None, mask: Tensor | None) -> Tensor:
        weight, bias = self.project.weight.chunk(3), self.project.bias.chunk(3)
        of_query = of_key = x
        if positions is not None:
            of_query = of_key = x + positions
        if self.keys_are_previous:
            of_key = F.pad(x[:, :-1], (0, 0, 1, 0))
        q, k, v = map(F.linear, (of_query, of_key, x), weight, bias)
        if self.conv is not None:
            y = torch.cat((q, k, v), -1).mT
            q, k, v = self.conv(y)[..., : x.shape[1]].mT.chunk(3, -1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        return self.out(self.mix(q, k, v, mask).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attention: Attention, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = attention
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x: Tensor, positions: Tensor | None, mask: Tensor | None) -> Tensor:
        x = x + self.attention(self.norm1(x), positions, mask)
        return x + self.mlp(self.norm2(x))


class Encoder(nn.Module):
    """Transformer blocks between a task's tokens and its answers.

    It starts at what a short run would spend its time on, the same for all methods: answers with
    their `frequencies`; with positions, queries and keys see learned ones, which start as sinusoids
    and with heads that look nearby. A task of look-ups, `keys_are_previous`: the key of a token is
    made of the token before it, and queries start with looking for what they are themselves.
    Values see no positions. `length` is that of the table of positions. With neither, and with
    `conv_width`, nothing of the task is known at the start.
    """

    def __init__(
        self,
        method: tuple,
        n_tokens: int,
        n_answers: int,
        length: int,
        dim: int,
        hidden: int,
        heads: int,
        layers: int,
        frequencies: Tensor | None = None,
        has_positions: bool = True,
        keys_are_previous: bool = False,
        conv_width: int = 0,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(n_tokens, dim)
        self.positions = None
        self.blocks = nn.ModuleList(
            Block(Attention(method, dim, heads, length, i, conv_width), dim, hidden)
            for i in range(layers)
        )
        self.norm, self.output = nn.LayerNorm(dim), nn.Linear(dim, n_answers)
        with torch.no_grad():
            self.output.weight.mul_(0.3)
            if frequencies is not None:
                self.output.bias.copy_(frequencies.log())
        if has_positions:
            speed = 30.0 ** -torch.linspace(0, 1, dim // 2)  # wavelengths from 6 to 200 tokens
            angle = torch.arange(length)[:, None] * speed
            self.positions = nn.Parameter(4 * torch.cat((angle.sin(), angle.cos()), -1))
        for block in self.blocks:
            if has_positions:
                block.attention.look_nearby(speed)
            if keys_are_previous:
                block.attention.keys_are_previous = True
                block.attention.look_for_the_same()

    def forward(self, batch: Batch, offset: int = 0) -> Tensor:
        """(answers, n_answers): logits of every question; offset is the first token's position."""
        tokens, mask = batch.tokens, batch.mask
        x, positions = self.embedding(tokens), self.positions
        if positions is not None:
            positions = positions[offset : offset + tokens.shape[1]]
        for block in self.blocks:
            x = block(x, positions, mask)
        x = self.norm(x)
        if batch.asked is not None:
            return self.output(x[batch.asked])
        if mask is None:
            return self.output(x.mean(1))
        return self.output((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


# --- Training -------------------------------------------------------------------------------------


class Trainer:
    """AdamW with linear warm-up, then half a cosine, and clipped gradients."""

    def __init__(self, model: Encoder, lr: float) -> None:
        self.model, self.lr = model, lr
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98))

    def step(self, batch: Batch, done: float, offset: int = 0) -> float:
        """Loss of the batch before a step, with that part of the run done."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * min(1, done / 0.05, math.cos(math.pi / 2 * done) ** 2)
        loss = F.cross_entropy(self.model(batch, offset), batch.answers)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()


@torch.no_grad()
def evaluate(model: Encoder, batches: list[Batch], estimator: Estimator | None = None) -> dict:
    """Accuracy, and loss in nats an answer; estimator: another than the one of the training."""
    model.eval()
    for block in model.blocks:
        mixer = block.attention.mixer
        if isinstance(mixer, Yoso):
            mixer.eval_estimator = mixer.estimator if estimator is None else estimator
    loss = right = count = 0
    for batch in batches:
        logits = model(batch)
        loss += F.cross_entropy(logits, batch.answers, reduction="sum").item()
        right += (logits.argmax(1) == batch.answers).sum().item()
        count += len(batch.answers)
    model.train()
    return {"loss": loss / count, "accuracy": right / count}
