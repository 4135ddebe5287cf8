"""Imported before anything that needs PyTorch, to say how to get it where it is missing."""

try:
    import torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"this part of lshkit needs PyTorch: pip install torch ({error})", name="torch"
    ) from error
