"""Multi-query associative recall (Arora et al., 2023): many pairs, then many questions.

A sequence starts with pairs of a key and a value, k1 v1 k2 v2 ..., all keys different. After a gap
keys come again at random positions among blanks, and each is to answer with its value. The gap is
longer than what a near window or a convolution reaches: a model that only sees nearby tokens can do
no better than one guess in `n_values`.
"""

import torch

from benchmarks.encoder import Batch

BLANK = 0


def different(batch_size: int, generator: torch.Generator):
    """some_of(count, wanted): in each row so many different numbers below count."""

    def some_of(count, wanted):
        return torch.rand(batch_size, count, generator=generator).argsort(1)[:, :wanted]

    return some_of


class ValuesOfKeys:
    """Batches of what `_draw` makes, where keys are to answer with one of `n_values`."""

    has_positions, keys_are_previous = False, True

    def training(self, batch_size: int, generator: torch.Generator) -> Batch:
        return self._draw(batch_size, generator)

    def held_out(self, batch_size: int, n_sequences: int = 128) -> list[Batch]:
        generator = torch.Generator().manual_seed(2**40)
        return [
            self._draw(min(batch_size, n_sequences - start), generator)
            for start in range(0, n_sequences, batch_size)
        ]

    def guess(self) -> float:
        return 1 / self.n_values


class Recall(ValuesOfKeys):
    def __init__(self, length=256, n_pairs=32, n_questions=32, n_keys=64, n_values=64, gap=96):
        self.length, self.n_pairs, self.n_questions, self.gap = length, n_pairs, n_questions, gap
        self.n_keys, self.n_values = n_keys, n_values
        self.n_tokens, self.n_answers = 1 + n_keys + n_values, n_values
        self.first_question = 2 * n_pairs + gap
        if n_pairs > n_keys:
            raise ValueError(f"n_pairs must be at most n_keys={n_keys}: {n_pairs}")
        if self.first_question + n_questions > length:
            raise ValueError(
                f"length must be at least {self.first_question + n_questions}: {length}"
            )

    def _draw(self, batch_size: int, generator: torch.Generator) -> Batch:
        some_of = different(batch_size, generator)
        keys = some_of(self.n_keys, self.n_pairs)
        values = torch.randint(
            self.n_values, (batch_size, self.n_pairs), generator=generator, dtype=torch.int64
        )
        tokens = torch.full((batch_size, self.length), BLANK)
        tokens[:, 0 : 2 * self.n_pairs : 2] = 1 + keys
        tokens[:, 1 : 2 * self.n_pairs : 2] = 1 + self.n_keys + values

        places = some_of(self.length - self.first_question, self.n_questions).sort(1).values
        places += self.first_question
        which = torch.randint(
            self.n_pairs, (batch_size, self.n_questions), generator=generator, dtype=torch.int64
        )
        tokens.scatter_(1, places, 1 + keys.gather(1, which))
        asked = torch.zeros(batch_size, self.length, dtype=torch.bool).scatter_(1, places, True)
        return Batch(tokens, None, asked, values.gather(1, which).flatten())
