"""What a task gives to a model: sequences, and questions about them."""

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    tokens: Tensor  # (B, n) int64
    mask: Tensor | None  # (B, n) bool: positions that hold a token; None: all
    asked: Tensor | None  # (B, n) bool: positions that answer; None: one answer a sequence
    answers: Tensor  # int64, one for each question, in the order of tokens[asked]
