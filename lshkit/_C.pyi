"""The compiled core: takes arrays and tensors alike and writes into those given (cpp/bindings)."""

from typing import Any

instruction_sets: str
with_cuda: bool

def __getattr__(name: str) -> Any: ...
