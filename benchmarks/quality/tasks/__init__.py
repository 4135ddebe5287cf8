"""Tasks on which attention is compared, their data generated on the spot.

A task has `training(batch_size, generator)`, a batch from the generator's random numbers, and
`held_out(batch_size)`, the batches to test on, which are always the same.
"""

from benchmarks.quality.tasks.listops import ListOps
from benchmarks.quality.tasks.masked_words import MaskedWords
from benchmarks.quality.tasks.needle import Needle
from benchmarks.quality.tasks.recall import Recall

__all__ = ["ListOps", "MaskedWords", "Needle", "Recall"]
