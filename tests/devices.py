"""The suites that run on CUDA tensors too: which, how, and what of them cannot.

A test is written once, for CPU tensors. Where its device is a GPU, the tensors that its own file
makes (torch.randn, torch.from_numpy ...) are moved there, and those it turns into arrays come back:
by a mode of torch that looks who calls, so that nothing changes for what lshkit calls itself. In a
build with the emulated kernels a test runs on CPU tensors as it is, through these kernels.
"""

import functools
import inspect
import os
import pathlib
import random
import re
import sys
import time
from dataclasses import is_dataclass

import pytest

SUITES = {
    *("test_attention", "test_attention_gradients", "test_attention_module", "test_bf16_gradient"),
    *("test_buckets", "test_collision_probability", "test_collisions"),
    *("test_decoding", "test_decoding_module", "test_decoding_state"),
    *("test_gradient_hashes", "test_grouped_heads"),
    "test_hash_families",
    *("test_hashing", "test_learned_projections", "test_learned_projections_module"),
    *("test_non_finite_rows", "test_packed_sequences", "test_pair_gradients"),
    *("test_short_floats", "test_soft_attention", "test_soft_attention_edges", "test_soft_hash"),
    *("test_soft_hash_torch", "test_tiny_sums", "test_torch_ops", "test_unit_norm_lift"),
    "test_weighted_buckets",
}

# Tests of the CPU's own, by a part of "file::test[...]": why there are none of CUDA tensors.
CPU_ONLY = {
    r"compil": "torch.compile does not trace the mode that moves a test's tensors",
    r"a_trace_holds": "torch.jit.trace would hold the moves too",
    r"autocast": "autocast of the CPU",
    r"bad_input|not_implemented|meta\b": "its tensors are made on the CPU on purpose",
    r"forward_mode_is_refused.*colliding": "Colliding runs on the CPU only",
    r"gradients::test_dtypes|rounded_once": "16-bit gradients round twice",
    r"test_soft_hash_torch::test_torch_equals_numpy": "to the last bit, in sums of another order",
    r"test_decoding_state::test_(to|arguments_of_a_call)": "names the CPU",
    r"seeds_that_are_drawn|bad_tensors|refuses_codes_beyond": "values on a GPU are not looked at",
    r"wrong_starts|bad_sharpness_tensors": "values on a GPU are not looked at",
    r"other_masks_are_refused": "by an assertion of the device there",
    r"test_soft_attention::test_(errors_name|options_that_do_not)": "as those above",
    r"opcheck_hash_parameters": "to the last bit: test_cuda_parameters.py",
    r"errors_of_a_sharpness.*sharpness[012]|bad_scales.*scale2": "values there are not looked at",
    r"from_the_meta_device": "names the CPU",
    r"hands_over_dense_tensors": "the transformer makes no nested tensors under a mode of torch",
    r"test_collisions::test_tensors.*40_bits": "codes of more than 16 bits",
    r"soft_attention_edges::test_causal_queries_do_not_depend": "to the last bit; bf16 rounds more",
    r"rows_on_the_bound.*expected-dtype0": "cosines of 1: 30 eps in another order of sums, not 20",
}

# Refusals that end a test on CUDA tensors as a skip, with their message as its reason.
LIMITS = [
    r"has no CUDA kernels yet",
    r"^(lsh_attention|Colliding) runs on the CPU only",
    r"must be on the cpu.*, got (a tensor on )?cuda",
    r"n_bits: 1 to 16 is wanted, was (1[7-9]|[2-6]\d)",
    r"dtype float32 or bfloat16 or float16 is wanted, was float64",  # the expectation
]

# In emulation, where each CUDA thread is a fibre, this many of a test's parameter sets run, drawn
# from the second quarter by the size of their numbers; and none of these, which take seconds there.
# test_cuda*.py has small cases of each kernel.
EMULATED_SETS = 1
SLOW_IN_EMULATION = (
    r"unbiased|variance|division_into_calls|error_of_half_precision|soft_module_decodes",
    r"every_query_sees|long_rows|inside_transformer_encoder_layer|dense_formula|unequal_probes",
    r"nan_in_a_value|hashes_of_training|cross_attention_of_other_sizes",
    r"test_pair_gradients::test_equal_to_reference|inner_products_are_kept|padded_batch",
    r"learning_planes|sequences_alone|gradient_of_grouped_heads",
    r"within_rounding_of_float32|opcheck_attention",
    r"given_planes|one_probe_is|module_learns|module_uses_what|operators_keep_torch|rounds_to_nearest",
    r"collided_is_short|noise_falls|long_sequences\[cuda-1050",
    r"gradients_per_sample|once_differentiable|rows_that_take_no_part",
    r"without_the_planes|inside_transformer_decoder_layer|zero_rows_and_no_collisions",
    r"unit_norm_lift::test_transforms|checkpointing|every_number_survives",
)
# Of these, with many sets of parameters, half.
HALVED_IN_EMULATION = (
    r"test_cuda_gradient::test_lower_bound|test_cuda::test_sampled_attention"
    r"|test_cuda_graphs::test_module_reads_nothing"
)


def needs_gpu(device):
    """For tests of what the emulated kernels have not got."""
    if device.type != "cuda":
        pytest.skip("needs a GPU")


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
        if frame.f_code.co_name == "__init__" and frame.f_code.co_filename == __file__:
            return False  # a module's parameters are drawn on the CPU, and moved with it
        frame = frame.f_back
    return frame is not None and _own(frame.f_code.co_filename)


@functools.cache
def _mode():
    import torch
    from torch.overrides import TorchFunctionMode

    makes = {
        *(torch.arange, torch.as_tensor, torch.empty, torch.eye, torch.full),
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
        if _called_by_a_test() and not any(x.is_meta for x in self.parameters()):
            self.to(device)

    return __init__


def _made_there(initialize, device):
    @functools.wraps(initialize)
    def __init__(self, *args, **kwargs):
        if _called_by_a_test():
            kwargs.setdefault("device", device)
        initialize(self, *args, **kwargs)

    return __init__


def _arrays_moved_there(from_numpy, device):
    def moved(array):  # no mode sees this function
        return from_numpy(array).to(device) if _called_by_a_test() else from_numpy(array)

    return moved


class DeviceAssertion(Exception):
    """In the place of an assertion of the device that fails: nothing could use the GPU after it."""


def _asserted(condition, message=""):
    if not condition:
        raise DeviceAssertion(message)


def _not_compiled(*args, **kwargs):
    pytest.skip("torch.compile does not trace the mode that moves a test's tensors")


class on_cuda:
    """Context: a test's tensors and modules are on the GPU."""

    def __init__(self, device):
        self.device, self.patch = device, pytest.MonkeyPatch()
        self.calls = 0  # of the core with tensors on the GPU

    def _counted(self, function):
        import torch

        def call(*args, **kwargs):
            given = *args, *kwargs.values()
            self.calls += any(isinstance(x, torch.Tensor) and x.is_cuda for x in given)
            return function(*args, **kwargs)

        return call

    def __enter__(self):
        import torch

        from lshkit import _C, attention

        for name, function in list(vars(_C).items()):
            if inspect.isbuiltin(function) and name != "random_numbers":  # made for CPU calls too
                self.patch.setattr(_C, name, self._counted(function))
        self.patch.setattr(torch, "_assert_async", _asserted)
        self.patch.setattr(torch, "compile", _not_compiled)
        modules = [torch.nn.Linear, torch.nn.MultiheadAttention, torch.nn.LayerNorm]
        for module in *modules, attention.YosoAttention:
            moved = _moved_there(module.__init__, self.device)
            self.patch.setattr(module, "__init__", moved)
        made = _made_there(attention.YosoState.__init__, self.device)
        self.patch.setattr(attention.YosoState, "__init__", made)
        moved = _arrays_moved_there(torch.from_numpy, self.device)
        self.patch.setattr(torch, "from_numpy", moved)
        self.patch.setitem(torch.testing.assert_close.__kwdefaults__, "check_device", False)
        self.mode = _mode()(self.device).__enter__()
        return self

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


def _name(item):
    return f"{item.module.__name__}::{item.name}"


def _on_cuda(item):
    callspec = getattr(item, "callspec", None)
    return callspec is not None and callspec.params.get("device") == "cuda"


def left_out(items, kernels):
    """Of the tests on CUDA tensors those that do not run here, which is most of them without a GPU.

    kernels: None, "emulated" or "GPU", where those with no form on CUDA tensors say so as skips.
    """
    tests, out = {}, []
    for item in filter(_on_cuda, items):
        name = _name(item)
        reasons = [reason for part, reason in CPU_ONLY.items() if re.search(part, name)]
        if kernels == "GPU" and reasons:
            item.add_marker(pytest.mark.skip(reason=reasons[0]))
        elif kernels is None or reasons:
            out.append(item)
        elif kernels == "emulated":
            if any(re.search(part, name) for part in SLOW_IN_EMULATION):
                out.append(item)
            else:
                tests.setdefault((item.module.__name__, item.originalname), []).append(item)
    for group in tests.values():
        group.sort(key=_size)
        some = group[len(group) // 4 : len(group) // 2 + 1]
        chosen = random.Random(_name(group[0])).sample(some, min(EMULATED_SETS, len(some)))
        out += [item for item in group if item not in chosen]
    if kernels == "emulated":
        many = [item for item in items if re.search(HALVED_IN_EMULATION, _name(item))]
        out += random.Random(0).sample(many, len(many) // 2)
    return out


def _size(item):
    """The largest number among a test's parameters; a bit of a code counts twofold."""
    found, todo = [0], list(item.callspec.params.items())
    while todo:
        name, value = todo.pop()
        if isinstance(value, dict):
            todo += value.items()
        elif is_dataclass(value):  # an estimator
            todo += vars(value).items()
        elif isinstance(value, (list, tuple)):
            todo += [(name, x) for x in value]
        elif isinstance(value, int):
            found.append(2**value if name == "n_bits" and value < 20 else value)
    return max(found)


def limit(item, error):
    """The message of a refusal that is a known limit of CUDA tensors, else None.

    So is an assertion of the device where a test wants an error.
    """
    message = str(error)
    if isinstance(error, DeviceAssertion):
        wants = "raises" in inspect.unwrap(item.function).__code__.co_names
        return f"an assertion of the device: {message}" if wants else None
    known = _on_cuda(item) and not isinstance(error, AssertionError)
    return message if known and any(re.search(part, message) for part in LIMITS) else None


# After one of these nothing of the process can use the GPU, and the rest would fail with it.
_STICKY = re.compile(
    "illegal memory access|misaligned address|launch failure|illegal instruction|device-side assert"
    "|invalid program counter|launch timed out|hardware stack error|uncorrectable"
)
_broken = []


def note(error):
    if _STICKY.search(str(error)):
        _broken.append(str(error))


def stop_if_broken():
    if not _broken:
        return
    if "PYTEST_XDIST_WORKER" in os.environ:  # another takes over its other tests
        time.sleep(1)  # the report is on its way
        os._exit(3)
    pytest.exit(f"nothing can use the GPU after: {_broken[0].splitlines()[0]}", returncode=3)
