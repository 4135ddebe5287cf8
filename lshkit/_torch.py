"""Imported before anything that needs PyTorch, to say how to get it where it is missing."""

try:
    import torch
except ImportError as error:
    raise ImportError(
        f"this part of lshkit needs PyTorch: pip install 'torch>=2.11' ({error})", name="torch"
    ) from error

if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
    raise ImportError(
        f"this part of lshkit needs PyTorch 2.11 or newer, got {torch.__version__}", name="torch"
    )
