"""Attention of a decoder's steps to few of the keys, by method: what long_context compares.

All but the cache of codes and the tables compute every score, which is what they do without here:
they show what reading so many keys gives, not what it costs. Queries are (1, H, T, D), keys and
values (1, H_k, n, D).
"""

import torch
from torch import Tensor

from lshkit.attention import CodeCache, lsh_attention

WINDOW, N_SINKS = 64, 4


class Step:
    """The last T queries of a layer, their scores, and softmax attention, to compare with."""

    def __init__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float):
        self.layer, self.query, self.key, self.value, self.scale = layer, query, key, value, scale
        heads, (tokens, n) = query.shape[1], (query.shape[2], key.shape[2])
        self.keys = self.grouped(key, heads)
        self.values = self.grouped(value, heads)
        self.own = torch.arange(n - tokens, n)[:, None]  # positions of the queries
        self.at = torch.arange(n)
        self.scores = (scale * query @ self.keys.mT).masked_fill_(self.at > self.own, -torch.inf)
        self.certain = (self.at < N_SINKS) | (self.own - self.at < WINDOW)

    @staticmethod
    def grouped(x: Tensor, heads: int) -> Tensor:
        return x.repeat_interleave(heads // x.shape[1], 1)

    def softmax(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Over those that are finite; and how many they are."""
        read = scores.isfinite().sum(-1).float() / (self.own[:, 0] + 1)
        return scores.softmax(-1) @ self.values, read


class Method:
    """attend(step) gives outputs and the share of the keys that each query read, (1, H, T)."""

    def __init__(self, share: float = 1.0):
        self.share = share

    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        """New keys and values of a layer; called before its attend."""

    def crop(self, positions: int) -> None:
        """Back to so many."""

    def attend(self, step: Step) -> tuple[Tensor, Tensor]:
        return step.softmax(step.scores)

    def count(self, step: Step) -> int:
        return max(round(self.share * len(step.at)), WINDOW + N_SINKS + 1)


class TopK(Method):
    def attend(self, step):
        least = step.scores.topk(self.count(step), -1).values[..., -1:]
        return step.softmax(step.scores.masked_fill(step.scores < least, -torch.inf))


class Window(Method):
    def attend(self, step):
        near = step.own - step.at < self.count(step) - N_SINKS
        return step.softmax(step.scores.masked_fill(~(near | (step.at < N_SINKS)), -torch.inf))


class RandomKeys(Method):
    """Sinks and window, and others with the same probability, by which they are divided."""

    def attend(self, step):
        sampled = self.count(step) - WINDOW - N_SINKS
        probability = torch.tensor(sampled / (len(step.at) - WINDOW - N_SINKS))
        generator = torch.Generator().manual_seed(step.layer)
        drawn = torch.rand(step.scores.shape, generator=generator) < probability
        scores = torch.where(step.certain, step.scores, step.scores - probability.log())
        return step.softmax(scores.masked_fill(~(drawn | step.certain), -torch.inf))


class Tables(Method):
    """lsh_attention with tables of codes: all keys are hashed again."""

    def __init__(self, n_bits: int, n_hashes: int, weighting: str):
        self.options = {"n_bits": n_bits, "n_hashes": n_hashes, "weighting": weighting}

    def attend(self, step):
        options = {"window": WINDOW, "n_sinks": N_SINKS, "is_causal": True, "enable_gqa": True}
        out, pairs = lsh_attention(
            *(step.query, step.key, step.value),
            **(self.options | options),
            scale=step.scale,
            seed=step.layer,
            return_pairs=True,
        )
        return out, pairs / (step.own[:, 0] + 1)


class Codes(Method):
    """The cache of codes, with its stated errors."""

    def __init__(self, heads: int, **options):
        self.heads, self.options, self.caches, self.stated = heads, options, {}, []

    def append(self, layer, key, value):
        if layer not in self.caches:
            self.caches[layer] = CodeCache(
                *(1, self.heads, key.shape[-1]),
                num_key_heads=key.shape[1],
                window=WINDOW,
                n_sinks=N_SINKS,
                seed=layer,
                **self.options,
            )
        self.caches[layer].append(key, value)

    def crop(self, positions):
        for cache in self.caches.values():
            cache.crop(positions)

    def attend(self, step):
        cache = self.caches[step.layer]
        cache.scale = step.scale
        out, report = cache.attend(step.query, return_report=True)
        self.stated.append(report.error.flatten())
        return out, report.keys / (step.own[:, 0] + 1)
