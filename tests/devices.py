"""The suites that run on CUDA tensors too: which, how, and what of them cannot.

A test is written once, for CPU tensors. Where its device is a GPU, the tensors that its own file
makes (torch.randn, torch.from_numpy ...) are moved there, and those it turns into arrays come back:
by a mode of torch that looks who calls, so that nothing changes for what lshkit calls itself. In a
build with the emulated kernels a test runs on CPU tensors as it is, through these kernels.
"""

import functools
import inspect
import pathlib
import re
import sys

import pytest

SUITES = {
    *("test_attention", "test_attention_gradients", "test_attention_module", "test_bf16_gradient"),
    *("test_bucket_table", "test_buckets", "test_collision_probability", "test_collisions"),
    *("test_decoding", "test_decoding_module", "test_decoding_state", "test_dense_soft_attention"),
    *("test_fast_precision", "test_gradient_rank", "test_grouped_heads", "test_hash_families"),
    *("test_hashing", "test_learned_projections", "test_packed_sequences", "test_pair_gradients"),
    *("test_short_floats", "test_soft_attention", "test_soft_attention_edges", "test_soft_hash"),
    *("test_soft_hash_torch", "test_torch_ops", "test_unit_norm_lift", "test_weighted_buckets"),
    "test_window",
}

# Tests of the CPU's own, by a part of "file::test": why there is no CUDA tensor for them.
CPU_ONLY = {}

# Refusals that end a test as a skip on CUDA: what has no kernels, and checks that would read there.
LIMITS = [
    r"has no CUDA kernels yet",
    r"must be on the cpu, got cuda",
]

# Run on a GPU only: in emulation a thread is a fibre, and these take seconds.
SLOW_IN_EMULATION = ()

_TESTS = str(pathlib.Path(__file__).resolve().parent)
_PASSED_BY = "/torch/", "/numpy/", "/functools", "/contextlib", str(pathlib.Path(__file__))


def uses_torch(function, seen=None):
    """Whether a test, or what it calls of the tests' own functions, names torch."""
    seen = set() if seen is None else seen
    function = getattr(function, "hypothesis", None) or function
    function = inspect.unwrap(getattr(function, "inner_test", function))
    if not inspect.isfunction(function) or function in seen:
        return False
    seen.add(function)
    names, constants, codes = set(), set(), [function.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        constants.update(c for c in code.co_consts if isinstance(c, str))
        codes += [c for c in code.co_consts if inspect.iscode(c)]
    if "torch" in constants and "importorskip" in names:
        return True
    found = [function.__globals__[name] for name in names if name in function.__globals__]
    found += [getattr(x, n) for x in found if inspect.ismodule(x) for n in names if hasattr(x, n)]
    return any(
        getattr(x, "__name__", "").split(".")[0] == "torch"
        if inspect.ismodule(x)
        else inspect.isfunction(x) and _own(x.__code__.co_filename) and uses_torch(x, seen)
        for x in found
    )


def _own(filename):
    return filename.startswith(_TESTS)


def _called_by_a_test():
    frame = sys._getframe(2)
    while frame and any(part in frame.f_code.co_filename for part in _PASSED_BY):
        frame = frame.f_back
    return frame is not None and _own(frame.f_code.co_filename)


@functools.cache
def _mode():
    import torch
    from torch.overrides import TorchFunctionMode

    makes = {
        *(torch.arange, torch.as_tensor, torch.empty, torch.eye, torch.from_numpy, torch.full),
        *(torch.linspace, torch.ones, torch.rand, torch.randint, torch.randn, torch.randperm),
        *(torch.tensor, torch.zeros),
    }
    reads = {torch.Tensor.numpy, torch.Tensor.__array__}

    class OnDevice(TorchFunctionMode):
        def __init__(self, device):
            super().__init__()
            self.device = device

        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if function in makes and kwargs.get("device") is None and _called_by_a_test():
                leaf = kwargs.pop("requires_grad", False)
                out = function(*args, **kwargs).to(self.device)
                return out.requires_grad_() if leaf else out
            if function in reads and args[0].is_cuda and _called_by_a_test():
                args = args[0].detach().cpu() if args[0].requires_grad else args[0].cpu(), *args[1:]
            return function(*args, **kwargs)

    return OnDevice


def _moved_there(initialize, device):
    @functools.wraps(initialize)
    def __init__(self, *args, **kwargs):
        initialize(self, *args, **kwargs)
        if _called_by_a_test():
            self.to(device)

    return __init__


class on_cuda:
    """Context: a test's tensors and modules are on the GPU."""

    def __init__(self, device):
        self.device, self.patch = device, pytest.MonkeyPatch()

    def __enter__(self):
        import torch

        from lshkit import attention

        modules = [torch.nn.Linear, torch.nn.MultiheadAttention, torch.nn.LayerNorm]
        for module in *modules, attention.YosoAttention:
            moved = _moved_there(module.__init__, self.device)
            self.patch.setattr(module, "__init__", moved)
        # Tensors made by operators of lshkit from seeds are on the CPU.
        self.patch.setitem(torch.testing.assert_close.__kwdefaults__, "check_device", False)
        self.mode = _mode()(self.device).__enter__()

    def __exit__(self, kind, error, where):
        self.mode.__exit__(kind, error, where)
        self.patch.undo()


def parametrize(metafunc):
    """pytest_generate_tests: the tests of these suites on each device."""
    module = metafunc.module.__name__
    if module not in SUITES or not uses_torch(metafunc.function):
        return
    cuda = pytest.param("cuda", marks=pytest.mark.cuda)
    if "device" not in metafunc.fixturenames:
        metafunc.fixturenames.append("device")
    metafunc.parametrize("device", ["cpu", cuda], indirect=True)


def reason_to_skip(node, emulated):
    """Why this test has no form on CUDA tensors; None where it has."""
    name = f"{node.module.__name__}::{node.name}"
    for part, reason in CPU_ONLY.items():
        if re.search(part, name):
            return reason
    if emulated and any(re.search(part, name) for part in SLOW_IN_EMULATION):
        return "slow in emulation"
    return None


def limit(error):
    """The message of a refusal that is a known limit of CUDA tensors, else None."""
    message = str(error)
    known = isinstance(error, (NotImplementedError, ValueError, TypeError))
    return message if known and any(re.search(part, message) for part in LIMITS) else None
