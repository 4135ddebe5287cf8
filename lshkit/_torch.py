"""Imported before anything that needs PyTorch, to say how to get it where it is missing."""

import re

try:
    import torch
except ImportError as error:
    raise ImportError(
        f"this part of lshkit needs PyTorch: pip install 'torch>=2.11' ({error})", name="torch"
    ) from error

_version = re.match(r"(\d+)\.(\d+)", torch.__version__)
if _version and tuple(map(int, _version.groups())) < (2, 11):
    raise ImportError(
        f"this part of lshkit needs PyTorch 2.11 or newer, got {torch.__version__}", name="torch"
    )
