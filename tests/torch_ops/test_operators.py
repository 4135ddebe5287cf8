"""Whoever listens to PyTorch's operators hears those of `lshkit.torch_ops`."""

import pytest

torch = pytest.importorskip("torch", minversion="2.11")
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from lshkit import torch_ops  # noqa: E402

NAMES = ["expected_attention", "expected_attention_backward"]


def rows(requires_grad=False):
    generator = torch.Generator().manual_seed(0)
    shape = (1, 2, 5, 8)
    return [torch.randn(shape, generator=generator, requires_grad=requires_grad) for _ in range(3)]


def attend(query, key, value):
    return torch_ops.expected_attention(query, key, value, None, None, None, 4, False, 2, 0)[0]


def forward_and_backward(query, key, value):
    attend(query, key, value).sum().backward()


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "lshkit":
            self.names.append(function.__name__.removesuffix(".default"))
        return function(*args, **(kwargs or {}))


class SeenFunctions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "namespace", None) == "lshkit":
            self.names.append(function.__name__.removesuffix(".default"))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Seen, SeenFunctions])
def test_modes_see_operators(mode):
    with mode() as seen:
        attend(*rows())
    assert seen.names == NAMES[:1]


def test_a_mode_sees_the_backward_operator():
    with Seen() as seen:
        forward_and_backward(*rows(requires_grad=True))
    assert seen.names == NAMES


def test_a_profile_names_operators():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        attend(*rows())
    assert "lshkit::expected_attention" in {event.key for event in profile.key_averages()}


def test_batched_gradients():
    """By a vmap whose tensors have torch's own type and no memory."""
    query, key, value = rows()
    jacobian = torch.autograd.functional.jacobian
    batched = jacobian(lambda x: attend(x, key, value), query, vectorize=True)
    assert torch.equal(batched, jacobian(lambda x: attend(x, key, value), query))


def test_a_gradient_of_zeros_without_memory():
    query, key, value = rows(requires_grad=True)
    out = attend(query, key, value)
    out.backward(torch._efficientzerotensor(out.shape))
    assert query.grad.count_nonzero() == 0


class Scaled(torch.Tensor):
    """A subclass whose operators have their own meaning."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)

    def __init__(self, data):
        self.data_ = data

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        plain = [2 * x.data_ if isinstance(x, Scaled) else x for x in args]
        return function(*plain, **(kwargs or {}))


def test_a_subclass_has_its_say():
    query, key, value = rows()
    query[..., 4:], key[..., 4:] = 0, 0
    assert torch.allclose(
        torch_ops.expected_attention(query, key, Scaled(value), None, None, None, 4, False, 0, 0)[
            0
        ],
        2 * torch_ops.expected_attention(query, key, value, None, None, None, 4, False, 0, 0)[0],
    )


def test_lazily_negated_views_are_resolved():
    query, key, value = rows()
    negated = torch._neg_view(-value)
    assert negated.is_neg()
    assert torch.equal(attend(query, key, negated), attend(query, key, value))
