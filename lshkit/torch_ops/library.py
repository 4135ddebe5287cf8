"""How operators are registered: the library, and rules for autograd, autocast and vmap."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

# Library.define and .impl cost less per call than the custom_op decorator. The object is kept
# alive: the registrations end with it.
LIBRARY = torch.library.Library("lshkit", "FRAGMENT")


Operator: TypeAlias = Callable[..., Any]


def define(*schemas: str) -> None:
    for schema in schemas:
        LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)


def fake(*names: str) -> Callable[..., Any]:
    """Decorator: the shapes and dtypes of these operators' results, without data."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            torch.library.register_fake(f"lshkit::{name}", function, lib=LIBRARY)
        return function

    return register


def register_kernel(name: str, kernel: Callable[..., Any]) -> None:
    """One function for CPU tensors and CUDA tensors."""
    LIBRARY.impl(name, kernel, "CPU")
    LIBRARY.impl(name, kernel, "CUDA")


def not_differentiable(name: str) -> None:
    """For an operator that is a step function of its input."""
    LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")


def differentiable(name: str, setup: Callable[..., Any], backward: Callable[..., Any]) -> Operator:
    """Registers what is kept for the backward pass and the backward pass; returns what to call.

    That is the operator, or an autograd.Function where torch.func or forward mode differentiates:
    the function that register_autograd makes of the same formulas refuses torch.func.grad, and
    forward mode would pass it by and give tangents of zero; this one refuses.
    """
    torch.library.register_autograd(f"lshkit::{name}", backward, setup_context=setup, lib=LIBRARY)
    op = getattr(torch.ops.lshkit, name).default
    schema = op._schema.arguments
    defaults = [argument.default_value for argument in schema]
    methods = {
        "forward": op,
        "setup_context": setup,
        "backward": backward,
        "jvp": _no_forward_mode,
    }
    function: Any = type(
        f"{name}_function",
        (torch.autograd.Function,),
        {key: staticmethod(method) for key, method in methods.items()}
        | {"generate_vmap_rule": True},
    )

    def forward(ctx: Any, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            out = op(*args)
        setup(ctx, args, out)
        return out

    # The same in one piece, for plain calls: the operator's own way through autograd costs another
    # 80 us, most of them to read its schema.
    methods = {"forward": forward, "backward": backward}
    plain: Any = type(
        f"plain_{name}",
        (torch.autograd.Function,),
        {key: staticmethod(method) for key, method in methods.items()},
    )

    def call(*args: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return op(*args, **named)
        if named:
            rest = schema[len(args) :]
            if named.keys() - {argument.name for argument in rest} or not all(
                argument.name in named or argument.has_default_value() for argument in rest
            ):
                return op(*args, **named)  # the operator says what is wrong
            args += tuple(named.get(argument.name, argument.default_value) for argument in rest)
        if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
            return function.apply(*args, *defaults[len(args) :])
        if not _differentiates(args):
            with torch._C._AutoDispatchBelowAutograd():
                return op(*args)
        # Autocast casts before autograd; a trace is to hold the operator.
        if torch._C._is_any_autocast_enabled() or torch._C._get_tracing_state() is not None:
            return op(*args)
        return plain.apply(*args, *defaults[len(args) :])

    call.__name__ = call.__qualname__ = name
    return call


def gradient_of(name: str) -> Operator:
    """Registers the operator that computes name's gradient, which has none; what to call."""
    return differentiable(f"{name}_backward", _nothing_to_save, _no_second_derivative)


def _nothing_to_save(ctx: Any, inputs: Any, output: Any) -> None:
    pass


def _no_forward_mode(ctx: Any, *tangents: Any) -> NoReturn:
    raise NotImplementedError(
        "lshkit's operators have no forward-mode derivative (torch.func.jvp, jacfwd): use reverse "
        "mode (torch.autograd.grad, torch.func.vjp, jacrev)"
    )


def _no_second_derivative(ctx: Any, *grads: Any) -> NoReturn:
    raise NotImplementedError(
        "lshkit's operators can be differentiated once: the gradient of a gradient "
        "(create_graph=True, torch.func.hessian) is not available"
    )


class _NotAgain(torch.autograd.Function):
    """A gradient, as the result of what it was computed from: its own gradient is refused."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *inputs: Tensor) -> Tensor:
        return grad.detach()

    backward = staticmethod(_no_second_derivative)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The `backward` of an autograd.Function that keeps its inputs, refused a second derivative.

    It is called as backward(ctx, saved, *grads): checkpointing lets saved tensors be unpacked once
    only. torch's decorator of this name refuses a second derivative only where the incoming
    gradient requires one, and else, as after a sum, gives zeros.
    """

    @functools.wraps(backward)
    def wrapped(ctx: Any, *grads: Any) -> Any:
        saved = ctx.saved_tensors
        with torch.no_grad():
            results = backward(ctx, saved, *grads)
        given = (*saved, *grads)
        inputs = [x for x in given if x is not None and x.requires_grad]
        if not torch.is_grad_enabled() or not inputs:
            return results
        return tuple(x if x is None else _NotAgain.apply(x, *inputs) for x in results)

    return wrapped


def _differentiates(args: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args)


def register_autocast(name: str) -> None:
    """Queries, keys and values in the autocast dtype, as scaled_dot_product_attention has them.

    torch.library.register_autocast would cast to one dtype fixed here, and the parameters too.
    """
    op = getattr(torch.ops.lshkit, name).default

    def kernel_of(device: str) -> Callable[..., Any]:
        def kernel(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
            dtype = torch.get_autocast_dtype(device)
            query, key, value = (
                x if x.dtype is torch.float64 else x.to(dtype) for x in (query, key, value)
            )
            with torch.autocast(device, enabled=False):
                return op(query, key, value, *rest)

        return kernel

    LIBRARY.impl(name, kernel_of("cpu"), "AutocastCPU")
    LIBRARY.impl(name, kernel_of("cuda"), "AutocastCUDA")


def register_vmap(
    name: str, with_batch: tuple[int, ...], only_without: tuple[int, ...] = ()
) -> None:
    """Fold the mapped dimension into the batch of the arguments in with_batch.

    Seeds and parameters have no batch: where these are mapped there is one call for each, as where
    an argument of only_without is given: a tensor, or True.
    """
    op = getattr(torch.ops.lshkit, name).default

    def fold(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
        if x is None:
            return None
        x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        return x.flatten(0, 1)

    def rule(info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        size = info.batch_size
        mapped = {i for i, dim in enumerate(in_dims) if isinstance(dim, int)}  # of a list: a list
        if mapped <= set(with_batch) and all(
            args[i] is None or args[i] is False for i in only_without
        ):
            args = [fold(x, in_dims[i], size) if i in with_batch else x for i, x in enumerate(args)]
            out = op(*args)
            if isinstance(out, Tensor):
                return out.unflatten(0, (size, -1)), 0
            return tuple(x.unflatten(0, (size, -1)) for x in out), (0,) * len(out)
        outs = [
            op(*(x.select(in_dims[i], j) if i in mapped else x for i, x in enumerate(args)))
            for j in range(size)
        ]
        if isinstance(outs[0], Tensor):
            return torch.stack(outs), 0
        return tuple(torch.stack(out) for out in zip(*outs, strict=True)), (0,) * len(outs[0])

    torch.library.register_vmap(f"lshkit::{name}", rule, lib=LIBRARY)
