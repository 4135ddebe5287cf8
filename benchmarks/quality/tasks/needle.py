"""Needles in hay: a few pairs of a key and a value anywhere in a long sequence of other tokens.

The hay has values too, each behind a token of hay, so that only the key before a value tells that
it is meant. At the end all keys come again, in random order, and each is to answer with its value.
No needle is within `gap` positions of the questions. Without positions a model that was trained at
one length can be asked at any other.
"""

import torch

from benchmarks.encoder import Batch
from benchmarks.quality.tasks.recall import ValuesOfKeys, different


class Needle(ValuesOfKeys):
    def __init__(self, length=512, n_needles=8, n_keys=16, n_values=32, n_hay=64, gap=96):
        self.length, self.n_needles, self.gap = length, n_needles, gap
        self.n_keys, self.n_values, self.n_hay = n_keys, n_values, n_hay
        self.n_tokens, self.n_answers = n_keys + n_values + n_hay, n_values
        self.last_needle = length - n_needles - gap  # all needles end before
        if n_needles > n_keys:
            raise ValueError(f"n_needles must be at most n_keys={n_keys}: {n_needles}")
        if self.last_needle < 2 * n_needles:
            raise ValueError(f"length must be at least {3 * n_needles + gap}: {length}")

    def _draw(self, batch_size: int, generator: torch.Generator) -> Batch:
        def numbers(high, *shape):
            return torch.randint(high, (batch_size, *shape), generator=generator)

        some_of = different(batch_size, generator)
        tokens = self.n_keys + self.n_values + numbers(self.n_hay, self.length)
        tokens[:, 1::2] = self.n_keys + numbers(self.n_values, self.length // 2)
        keys, values = some_of(self.n_keys, self.n_needles), numbers(self.n_values, self.n_needles)
        places = 2 * some_of(self.last_needle // 2, self.n_needles)
        tokens.scatter_(1, places, keys)
        tokens.scatter_(1, places + 1, self.n_keys + values)
        order = some_of(self.n_needles, self.n_needles)
        tokens[:, -self.n_needles :] = keys.gather(1, order)
        asked = torch.zeros(batch_size, self.length, dtype=torch.bool)
        asked[:, -self.n_needles :] = True
        return Batch(tokens, None, asked, values.gather(1, order).flatten())

    def at_length(self, length: int) -> "Needle":
        """The same task in more or less hay."""
        sizes = ("n_needles", "n_keys", "n_values", "n_hay", "gap")
        return Needle(length, **{name: getattr(self, name) for name in sizes})
