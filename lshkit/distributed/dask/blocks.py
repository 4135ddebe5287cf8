"""Clients, and Dask arrays and dataframes as lists of blocks of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from lshkit.distributed.dask._dask import (
    ArrayChunkShapeDep,
    Client,
    Delayed,
    da,
    default_client,
    is_dask_collection,
)
from lshkit.distributed.dask.tasks import Aligned, aligned, constant, task
from lshkit.typing import FloatArray

FAN_IN = 8  # results that are combined in one task


def client_of(client: Any) -> Client:
    """The client given, or the default one: a ValueError where there is none, or no worker."""
    if client is None:
        try:
            client = default_client()
        except ValueError:
            raise ValueError(
                "client must be given, or a dask.distributed.Client must have been made before: "
                "there is none"
            ) from None
    if not isinstance(client, Client):
        got = type(client).__name__
        raise TypeError(f"client must be a dask.distributed.Client, got {got}")
    if client.asynchronous:
        raise ValueError("client must be a synchronous one, got Client(asynchronous=True)")
    if client.status != "running":
        raise ValueError(f"client must be connected to a scheduler, it is {client.status}")
    if not client.nthreads():  # scheduler_info may be replaced by one without workers meanwhile
        raise ValueError(
            "client must have workers, its scheduler knows of none: start some, or call "
            "client.wait_for_workers(1)"
        )
    return client


class RowBlocks(NamedTuple):
    """Blocks of rows as Delayed objects: arrays or dataframes of n_features, and their weights.

    lengths: rows of each block; None where only their computation would tell. arrays: the array
    and weights that the blocks are of; None for a dataframe.
    """

    rows: list[Delayed]
    weights: list[Delayed] | list[None]
    lengths: list[int] | None
    n_features: int
    dtype: np.dtype
    feature_names: np.ndarray | None
    arrays: tuple[da.Array, da.Array | None] | None


def row_blocks(X: Any, sample_weight: Any = None, weights_name: str = "sample_weight") -> RowBlocks:
    """The blocks of a Dask array `(n, n_features)` or dataframe, chunked by rows.

    sample_weight: a Dask array `(n,)`, or a series of as many partitions for a dataframe.
    TypeError, ValueError: anything else, chunks along features, an array's unknown chunk sizes.
    """
    if is_dataframe(X):
        return _frame_blocks(X, sample_weight, weights_name)
    X = check_array(X)
    rows = X.to_delayed().reshape(-1).tolist()
    weights = [None] * len(rows)
    if sample_weight is not None:
        if not isinstance(sample_weight, da.Array):
            raise TypeError(
                f"{weights_name} must be a Dask array like X, got "
                f"{type(sample_weight).__name__}: dask.array.from_array makes one"
            )
        if sample_weight.shape != X.shape[:1]:  # unknown sizes are not equal either
            raise ValueError(
                f"{weights_name} must have shape {X.shape[:1]}, one for each row, got "
                f"{sample_weight.shape}"
            )
        _check_weights(weights_name, sample_weight)
        sample_weight = sample_weight.rechunk(X.chunks[:1])
        weights = sample_weight.to_delayed().tolist()
    arrays = X, sample_weight
    return RowBlocks(rows, weights, list(X.chunks[0]), X.shape[1], X.dtype, None, arrays)


def check_array(X: Any) -> da.Array:
    """A Dask array of rows, or the TypeError or ValueError of `row_blocks`."""
    if not isinstance(X, da.Array):
        raise TypeError(
            f"X must be a Dask array or dataframe, got {type(X).__name__}: "
            "dask.array.from_array(x, chunks=(100_000, -1)) makes one"
        )
    if X.ndim != 2:
        raise ValueError(f"X must have shape (n_rows, n_features), got {X.shape}")
    if X.dtype.kind not in "fiub":
        raise TypeError(f"X must hold real numbers, got dtype {X.dtype}")
    if any(map(math.isnan, X.shape)):
        raise ValueError(
            f"X has unknown chunk sizes, {X.chunks}: call X.compute_chunk_sizes() first"
        )
    if len(X.chunks[1]) != 1:
        raise ValueError(
            f"X must be chunked by rows alone, its features are in chunks of {X.chunks[1]}: "
            "X.rechunk({1: -1}) joins them"
        )
    return X


def _check_weights(name: str, weights: Any) -> None:
    """TypeError for a dtype that holds no real numbers. A series of objects may hold some."""
    dtype = getattr(weights, "dtype", None)
    if dtype is not None and dtype.kind not in "fiubO":
        raise TypeError(f"{name} must hold real numbers, got dtype {dtype}")


def check_length(rows: Any, n: int) -> None:
    """ValueError unless a block has n rows: `map_blocks` does not ask what a function returns."""
    if len(rows) != n:
        raise ValueError(
            f"X must have the rows that its chunks say: {n} in this block, got {len(rows)} "
            "(X.compute_chunk_sizes() sets the chunks to what blocks have)"
        )


def is_dataframe(X: Any) -> bool:
    """Whether X is a Dask dataframe, no series. Imports nothing: where it is one, it has been."""
    has_columns = hasattr(X, "columns") and hasattr(X, "npartitions")
    return is_dask_collection(X) and has_columns and X.ndim == 2


def _frame_blocks(X: Any, sample_weight: Any, weights_name: str) -> RowBlocks:
    rows = X.to_delayed()
    weights = [None] * len(rows)
    if sample_weight is not None:
        if not (is_dask_collection(sample_weight) and hasattr(sample_weight, "npartitions")):
            raise TypeError(
                f"{weights_name} must be a Dask series like the dataframe X, got "
                f"{type(sample_weight).__name__}"
            )
        if sample_weight.npartitions != X.npartitions:
            raise ValueError(
                f"{weights_name} must have the {X.npartitions} partitions of X, got "
                f"{sample_weight.npartitions}"
            )
        _check_weights(weights_name, sample_weight)
        weights = list(np.ravel(sample_weight.to_delayed()))
    for column, column_dtype in X.dtypes.items():
        if column_dtype.kind not in "fiub" and column_dtype != np.dtype(object):
            got = f"column {column!r} of dtype {column_dtype}"
            raise TypeError(f"X must hold real numbers, got {got}")
    single = all(x == np.float32 for x in X.dtypes)
    dtype = np.dtype(np.float32 if single else np.float64)
    columns = list(X.columns)
    strings = all(isinstance(x, str) for x in columns)
    names = np.array(columns, object) if strings else None
    return RowBlocks(rows, weights, None, len(columns), dtype, names, None)


def lengths_of(blocks: RowBlocks, client: Client) -> list[int]:
    """Rows of each block; computes the blocks of a dataframe."""
    if blocks.lengths is not None:
        return blocks.lengths
    return results_of(client, [task(len)(x) for x in blocks.rows])


def mapped(function: Callable[..., Any], common: Any, blocks: RowBlocks) -> list[Delayed]:
    """`function(common, rows, weights)` of each block; of an array, 1 x 1 arrays of the results.

    Dask then makes one task of what makes a block and the function, whose overhead is that of one
    and whose rows stay on one worker.
    """
    name = function.__name__
    if blocks.arrays is None:
        make, sent = task(function), constant(common)
        pairs = zip(blocks.rows, blocks.weights, strict=True)
        return [make(sent, rows, weights) for rows, weights in pairs]
    X, weights = blocks.arrays
    boxed = da.blockwise(
        Boxed(function, common),
        "ij",
        *(X, "ij", ArrayChunkShapeDep(X.chunks), "ij"),
        *(() if weights is None else (weights, "i")),
        adjust_chunks={"i": 1, "j": 1},
        dtype=object,
        meta=np.empty((0, 0), object),
        align_arrays=False,
        token=name,
    )
    return boxed.to_delayed().reshape(-1).tolist()


class Boxed:
    """A function whose results become the elements of Dask arrays."""

    def __init__(self, function: Callable[..., Any], common: Any) -> None:
        self.function, self.common = Aligned(function), common

    def __call__(self, rows: Any, shape: tuple[int, ...], weights: Any = None) -> np.ndarray:
        check_length(rows, shape[0])
        box = np.empty((1, 1), object)
        box[0, 0] = self.function(self.common, rows, weights)
        return box


def results_of(client: Client, tasks: Sequence[Delayed]) -> list[Any]:
    """The results of tasks. An exception of one is raised as it was there."""
    found = client.gather(client.compute(list(tasks)))
    return [aligned(x, {}) for x in found]


def tree(parts: Sequence[Delayed], combine: Callable[[list[Any]], Any]) -> Delayed:
    """One result of all parts: `combine` of up to FAN_IN results in turn, in order."""
    joined = task(combine)
    while True:
        parts = [joined(list(parts[i : i + FAN_IN])) for i in range(0, len(parts), FAN_IN)]
        if len(parts) == 1:
            return parts[0]


def array_of(parts: Sequence[Delayed], lengths: Sequence[int] | None, dtype: np.dtype) -> da.Array:
    """A Dask array `(n,)` of a block for each part. lengths None: of unknown chunk sizes."""
    sizes = [math.nan] * len(parts) if lengths is None else lengths
    pairs = zip(parts, sizes, strict=True)
    meta: FloatArray = np.empty(0, dtype)
    arrays = [da.from_delayed(part, (size,), dtype, meta) for part, size in pairs]
    return da.concatenate(arrays, allow_unknown_chunksizes=lengths is None)
