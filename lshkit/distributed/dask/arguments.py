"""What `DaskKernelDensity` checks beside the parameters that it shares with `LSHKernelDensity`."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING

from lshkit.distributed.dask.blocks import RowBlocks
from lshkit.kde.arguments import keeps_rows, random_of
from lshkit.typing import RandomState

if TYPE_CHECKING:
    from lshkit.distributed.dask.density import DaskKernelDensity


def drawn(random_state: RandomState) -> int:
    """An int for all blocks: the one given, or one that is drawn."""
    random = random_of(random_state)
    if isinstance(random_state, numbers.Integral):
        return int(random_state)
    return int(random.randint(2**31 - 1))


def check_as_earlier(estimator: DaskKernelDensity, n_bits: int, blocks: RowBlocks) -> None:
    """ValueError unless blocks and parameters go with the rows that the estimator has."""
    if keeps_rows(estimator.algorithm) != (estimator._sketch is None):
        wanted = "be" if estimator._sketch is not None else "not be"
        raise ValueError(
            f"algorithm must {wanted} 'bucket_sum', as for the earlier rows, got "
            f"{estimator.algorithm!r}: use fit"
        )
    if (estimator.kernel, n_bits) != (estimator._kernel, estimator._n_bits):
        raise ValueError(
            f"kernel and n_bits must be {estimator._kernel!r} and {estimator._n_bits}, as for the "
            f"earlier rows, got {estimator.kernel!r} and {n_bits}: use fit"
        )
    check_features(estimator, blocks)
    names = blocks.feature_names
    if names is not None and hasattr(estimator, "feature_names_in_"):
        if list(names) != list(estimator.feature_names_in_):
            raise ValueError(
                f"X must have the feature names of the earlier rows, "
                f"{list(estimator.feature_names_in_)}, got {list(names)}"
            )


def check_features(estimator: DaskKernelDensity, blocks: RowBlocks) -> None:
    """ValueError unless the rows have as many features as those that were fitted."""
    if blocks.n_features != estimator.n_features_in_:
        raise ValueError(
            f"X has {blocks.n_features} features, but DaskKernelDensity is expecting "
            f"{estimator.n_features_in_} features as input"
        )
