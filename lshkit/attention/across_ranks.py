"""What attention asks of an object that computes it over ranks."""

import abc
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from lshkit.attention.call import Call
from lshkit.attention.estimators import Estimator

T = TypeVar("T")

CU_SEQLENS_OF_RANKS = (
    "cu_seqlens must be None with context_parallel: give those of the whole sequence to "
    "ContextParallel(cu_seqlens=...)"
)


class AcrossRanks(abc.ABC):
    """`context_parallel` of `yoso_attention` and `YosoAttention`: a base class, so that attention
    need not know `lshkit.distributed`, whose `ContextParallel` is the one there is."""

    cu_seqlens: list[int] | None

    @abc.abstractmethod
    def uncompiled(self, function: Callable[..., T], *args: Any) -> T:
        """What the function returns for this object and args, left out of compiled graphs."""

    @abc.abstractmethod
    def checked(self, check: Callable[..., T], *args: Any) -> T:
        """What check returns. An error that it raises is raised on the other ranks, too."""

    @abc.abstractmethod
    def agree(self, call: str, **options: Any) -> None:
        """ValueError on all ranks unless each makes this call, with the same options."""

    @abc.abstractmethod
    def attend(self, estimator: Estimator, call: Call, causal_offset: int | None) -> Tensor:
        """What `yoso_attention` returns for this rank's rows.

        The call is checked, and its causal offset not yet resolved.
        """

    @abc.abstractmethod
    def neighbours(self, x: Tensor, before: int, after: int) -> list[tuple[Tensor, int, int, int]]:
        """Each chunk of this rank's x `(B, H, n, D)` with the rows around it, for a convolution.

        Returns for each chunk its rows, `before` more in front and `after` more behind them, zeros
        outside the sequence, where it starts and stops among the rank's rows, and its first
        position among all. All ranks must call. Differentiable.
        """


def check_context_parallel(given: Any) -> None:
    """TypeError for what is given in its place; not called where that is None."""
    if not isinstance(given, AcrossRanks):
        got = type(given).__name__
        raise TypeError(f"context_parallel must be a ContextParallel or None, got {got}")


def check_values(name: str, x: Tensor) -> None:
    """ValueError for a tensor without values, which cannot be sent."""
    if x.is_meta:
        raise ValueError(f"{name} must hold values with context_parallel, got a tensor on meta")
