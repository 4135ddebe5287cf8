"""What is used of Dask, imported in one place, to say how to get it where it is missing."""

try:
    import dask.array as da
    from dask.base import is_dask_collection
    from dask.delayed import Delayed, delayed
    from dask.layers import ArrayChunkShapeDep
    from distributed import Client, default_client
except ImportError as error:
    raise ImportError(
        f"this part of lshkit needs Dask: pip install 'dask[array,distributed]>=2025.1' ({error})",
        name="dask",
    ) from error

__all__ = [
    "ArrayChunkShapeDep",
    "Client",
    "Delayed",
    "da",
    "default_client",
    "delayed",
    "is_dask_collection",
]
