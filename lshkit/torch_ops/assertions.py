"""What must hold of the values of tensors, where looking at them may not be free."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake


def has_values(x: Tensor) -> bool:
    """Whether there are any: not in a graph, nor in a meta or fake tensor."""
    return not (x.is_meta or torch.compiler.is_compiling() or is_fake(x))


def may_be_read(x: Tensor) -> bool:
    """Whether Python code may go by x's values: not where that is a wait for the GPU, which a CUDA
    graph does not allow either, and not where there are none."""
    return has_values(x) and not x.is_cuda


def require(
    condition: Tensor,
    message: str,
    details: Callable[[], str] | None = None,
    error: type[Exception] = ValueError,
) -> None:
    """Raises error(message + details()) unless all of condition holds.

    On CUDA, and in a compiled graph, which cannot branch on values, that is an assertion of the
    device, raised when the work is done.
    """
    condition = condition.detach().all()
    if condition.is_meta:
        return
    if torch.compiler.is_compiling():
        torch._assert_async(condition, message)
        return
    if torch._C._functorch.is_functorch_wrapped_tensor(condition):  # all of what vmap maps over
        details = None
        while torch._C._functorch.is_functorch_wrapped_tensor(condition):
            condition = torch._C._functorch.get_unwrapped(condition)
        condition = condition.all()
    if not may_be_read(condition):
        torch._assert_async(condition, message)
    elif not condition:
        raise error(message + (details() if details else ""))
