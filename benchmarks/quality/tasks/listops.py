"""ListOps (Nangia and Bowman, 2018): the value of a nested expression of operators on digits.

    [MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8 9 2 ] ]  ->  5

The grammar is the public one, with the parameters of the Long Range Arena (Tay et al., 2021): a
node above depth 10 is an operator with probability 1/4, else a digit; an operator has 2 to 10
arguments; expressions outside of the bounds on the length are drawn again. Only these bounds are
scaled down: the Long Range Arena takes 500 to 2000 tokens.
"""

import functools
import random
from statistics import median

import torch

from benchmarks.encoder import Batch

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
SYMBOLS = ("<pad>", "]", *OPERATORS, *map(str, range(10)))
PAD, CLOSE, FIRST_OPERATOR, FIRST_DIGIT = 0, 1, 2, 6
OPERATOR_PART, MAX_DEPTH, MAX_ARGUMENTS = 0.25, 10, 10


# Of the two values in the middle the mean, rounded down.
MEANING = (min, max, lambda values: int(median(values)), lambda values: sum(values) % 10)


def expression(rng: random.Random, max_length: int) -> tuple[list[int], int] | None:
    """Tokens and value of a random expression, or None where it gets longer than max_length."""
    tokens: list[int] = []

    def operator(depth: int) -> int | None:
        which = rng.randrange(len(OPERATORS))
        tokens.append(FIRST_OPERATOR + which)
        values = []
        for _ in range(rng.randint(2, MAX_ARGUMENTS)):
            if depth + 1 < MAX_DEPTH and rng.random() < OPERATOR_PART:
                value = operator(depth + 1)
            else:
                value = rng.randrange(10)
                tokens.append(FIRST_DIGIT + value)
            if value is None or len(tokens) >= max_length:
                return None
            values.append(value)
        tokens.append(CLOSE)
        return MEANING[which](values)

    value = operator(1)
    return None if value is None else (tokens, value)


@functools.lru_cache(maxsize=4)
def expressions(count: int, min_length: int, max_length: int, seed: int):
    """`count` expressions: tokens (count, max_length) int8, padded, and values (count,)."""
    rng = random.Random(seed)
    tokens = torch.zeros(count, max_length, dtype=torch.int8)
    values = torch.empty(count, dtype=torch.int64)
    found = 0
    while found < count:
        drawn = expression(rng, max_length)
        if drawn is None or len(drawn[0]) < min_length:
            continue
        tokens[found, : len(drawn[0])] = torch.tensor(drawn[0], dtype=torch.int8)
        values[found] = drawn[1]
        found += 1
    return tokens, values


class ListOps:
    """Batches of a fixed set of training expressions, and held-out ones for the evaluation."""

    n_tokens, n_answers = len(SYMBOLS), 10
    has_positions, keys_are_previous = True, False

    def __init__(self, length=128, min_length=48, n_training=16384, n_held_out=1024):
        self.length, self.min_length = length, min_length
        self.n_training, self.n_held_out = n_training, n_held_out

    def _batch(self, tokens, values) -> Batch:
        tokens = tokens.long()
        tokens = tokens[:, : int((tokens != PAD).sum(1).max())]
        return Batch(tokens, tokens != PAD, None, values)

    def training(self, batch_size: int, generator: torch.Generator) -> Batch:
        tokens, values = expressions(self.n_training, self.min_length, self.length, 0)
        rows = torch.randint(len(values), (batch_size,), generator=generator)
        return self._batch(tokens[rows], values[rows])

    def held_out(self, batch_size: int) -> list[Batch]:
        tokens, values = expressions(self.n_held_out, self.min_length, self.length, 1)
        return [
            self._batch(t, v)
            for t, v in zip(tokens.split(batch_size), values.split(batch_size), strict=True)
        ]

    def guess(self) -> float:
        """Accuracy of the commonest answer, the best that sees no token."""
        values = torch.cat([batch.answers for batch in self.held_out(1024)])
        return torch.bincount(values).max().item() / len(values)

    def guess_from_operator(self) -> float:
        """Accuracy of the commonest answer of each first operator, the best that sees one token."""
        tokens, values = expressions(self.n_held_out, self.min_length, self.length, 1)
        counts = torch.zeros(len(OPERATORS), 10, dtype=torch.int64)
        counts.index_put_((tokens[:, 0].long() - FIRST_OPERATOR, values), torch.tensor(1), True)
        return counts.max(1).values.sum().item() / len(values)
