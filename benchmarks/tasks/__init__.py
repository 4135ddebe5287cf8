"""Tasks on which attention is compared, their data generated on the spot.

A task has `training(batch_size, generator)`, a batch from the generator's random numbers, and
`held_out(batch_size)`, the batches to test on, which are always the same.
"""

from tasks.batch import Batch
from tasks.listops import ListOps
from tasks.masked_words import MaskedWords
from tasks.needle import Needle
from tasks.recall import Recall

__all__ = ["Batch", "ListOps", "MaskedWords", "Needle", "Recall"]
