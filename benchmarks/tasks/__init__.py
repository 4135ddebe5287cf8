"""Tasks on which attention is compared, their data generated on the spot.

Each task draws batches: `tokens` (B, n), `mask` (B, n) of the positions that hold a token (None: all
do), `asked` (B, n) of the positions that are to answer (None: the mean over the sequence answers)
and `answers`, one for each question. The same seed gives the same batches.
"""

from tasks.batch import Batch
from tasks.listops import ListOps
from tasks.masked_words import MaskedWords
from tasks.needle import Needle
from tasks.recall import Recall

__all__ = ["Batch", "ListOps", "MaskedWords", "Needle", "Recall"]
