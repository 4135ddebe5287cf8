"""A masked language model on real text: the words of the source of Python's standard library.

Names are split at underscores and case is dropped; numbers are digits, punctuation signs and line
ends are words of their own. The commonest words are the vocabulary, all others are one unknown word
that is never asked for. As in BERT, 15 % of the words are asked for; all of these are hidden.
"""

import collections
import functools
import pathlib
import re
import sysconfig

import torch

from benchmarks.encoder import Batch
from benchmarks.source_text import read_text

WORD = re.compile(r"[A-Za-z]+|[0-9]|[^\sA-Za-z0-9_]|\n")
HIDDEN_PART = 0.15
MASK, UNKNOWN = 0, 1
STDLIB = pathlib.Path(sysconfig.get_path("stdlib"))


@functools.lru_cache(maxsize=2)
def read_words(folder: pathlib.Path, n_words: int):
    """Words as numbers, of the training files and of the held-out ones, and their counts.

    The vocabulary and the counts are those of the training files.
    """
    training, held_out = (
        WORD.findall(bytes(part.numpy()).decode("utf-8", "replace").lower())
        for part in read_text(folder)
    )
    common = [word for word, _ in collections.Counter(training).most_common(n_words - 2)]
    number = {word: i for i, word in enumerate(common, 2)}
    training, held_out = (
        torch.tensor([number.get(word, UNKNOWN) for word in words])
        for words in (training, held_out)
    )
    return training, held_out, torch.bincount(training, minlength=n_words)


class MaskedWords:
    has_positions, keys_are_previous = True, False

    def __init__(self, length=256, n_words=2048, folder: str | pathlib.Path = STDLIB):
        self.length, self.n_words, self.folder = length, n_words, pathlib.Path(folder)
        self.n_tokens = self.n_answers = n_words
        for part in self._words()[:2]:
            if len(part) < length:
                raise ValueError(f"{folder} has too few words for sequences of {length}")

    def _words(self):
        return read_words(self.folder, self.n_words)

    def _batch(self, words, batch_size: int, generator: torch.Generator) -> Batch:
        starts = torch.randint(len(words) - self.length + 1, (batch_size,), generator=generator)
        tokens = torch.stack([words[start : start + self.length] for start in starts])
        asked = torch.rand(tokens.shape, generator=generator) < HIDDEN_PART
        asked &= tokens != UNKNOWN
        return Batch(tokens.masked_fill(asked, MASK), None, asked, tokens[asked])

    def training(self, batch_size: int, generator: torch.Generator) -> Batch:
        return self._batch(self._words()[0], batch_size, generator)

    def held_out(self, batch_size: int, n_sequences: int = 128) -> list[Batch]:
        generator = torch.Generator().manual_seed(2**40)
        words = self._words()[1]
        return [
            self._batch(words, min(batch_size, n_sequences - start), generator)
            for start in range(0, n_sequences, batch_size)
        ]

    def frequencies(self) -> torch.Tensor:
        """(n_words,) of the training files, each counted once more than it occurs."""
        counts = self._words()[2] + 1.0
        return counts / counts.sum()

    def guess(self) -> float:
        """Accuracy of the commonest word."""
        answers = torch.cat([batch.answers for batch in self.held_out(128)])
        return torch.bincount(answers).max().item() / len(answers)
