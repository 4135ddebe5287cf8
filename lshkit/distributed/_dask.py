"""Imported before anything that needs Dask, to say how to get it where it is missing."""

try:
    import dask.array  # noqa: F401
    import distributed  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"this part of lshkit needs Dask: pip install 'lshkit[dask]' ({error})", name="dask"
    ) from error
