"""Checks at the door: what public functions accept, in numpy and torch alike."""

import math
import numbers
import operator
import sys
from collections.abc import Collection
from typing import Any

import numpy as np

from lshkit import _C

HOW_TO_BUILD = (
    "install it from source where there is nvcc, with pip install -C cmake.define.LSHKIT_CUDA=ON"
)

INSIDE = "lshkit.", "torch.nn.modules.", "torch._dynamo."  # whose lines no warning names
MOST_BYTES = 2**63 - 1  # of an array: NumPy's errors for larger ones name no argument


def outside() -> int:
    """The `stacklevel` with which a warning names the first line outside lshkit.

    Nor is it one of torch.nn's own, which calls modules, or of torch's around what no graph holds.
    To be called by the function that warns. Counted, since each public method has a depth of its
    own.
    """
    level, frame = 1, sys._getframe(1)
    while frame.f_back and f"{frame.f_globals.get('__name__')}.".startswith(INSIDE):
        level, frame = level + 1, frame.f_back
    return level


def shown(value: Any) -> str:
    """repr of a value that is refused; of an integer that no float holds, its size.

    Python refuses to write integers of more than 4300 digits.
    """
    if isinstance(value, int) and value.bit_length() > 1024:
        return f"an integer of {value.bit_length()} bits, more than float64 holds"
    return repr(value)


def real(value: Any) -> float:
    """value as a float: NaN, which is in no range, unless it is a real number that float64 holds.

    A bool is none.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """value as an int in low..high. TypeError for anything but an integer (a bool is none)."""
    wanted = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        got = f"{value!r} ({type(value).__name__})"
        raise TypeError(f"{name} must be {wanted}, got {got}") from None
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name} must be {wanted}, got {shown(number)}")
    return number


def seed(value: Any) -> int | np.random.Generator | None:
    """value as a seed: None, a Generator or an int that fits the key of a counter, 128 bits."""
    if value is None or isinstance(value, np.random.Generator):
        return value
    number = integer("seed", value, 0)
    if number >= 2**128:
        raise ValueError(f"seed must be below 2**128, got {shown(number)}")
    return number


def positive(name: str, value: Any) -> float:
    """value as a float > 0 that float32 holds. TypeError for what is no real number."""
    wanted = f"{name} must be a finite number > 0"
    kinds = int, float, np.integer, np.floating
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise TypeError(f"{wanted}, got {value!r} ({type(value).__name__})")
    number = real(value)  # NaN for integers beyond float64
    if not 1e-37 <= number <= 3.4e38:
        held = ": float32 holds 1e-37 to 3.4e38" if 0 < value < math.inf else ""
        raise ValueError(f"{wanted}, got {shown(value)} ({type(value).__name__}){held}")
    return number


def choice(name: str, value: Any, known: Collection[str | None]) -> None:
    """ValueError unless it is one of these words, or of None among them."""
    if not (value is None or isinstance(value, str)) or value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")


def boolean(name: str, value: Any) -> bool:
    """value as a bool. TypeError for anything but a bool, Python's or numpy's."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be a bool, got {value!r} ({type(value).__name__})")
    return bool(value)


def refuse_words(name: str, value: Any, objects: np.ndarray) -> None:
    """TypeError where objects, those of a value, hold what NumPy would make numbers of by itself:
    strings of digits, dates, times."""
    wrong = str, bytes, np.datetime64, np.timedelta64
    if objects.dtype == object and any(isinstance(x, wrong) for x in objects.flat):
        got = f"a {type(value).__name__} of strings or dates"
        raise TypeError(f"{name} must hold real numbers, got {got}")


def torch_of(**arguments: Any) -> Any:
    """The torch module when the arguments are torch tensors, None when none is.

    Never imports torch. Arguments that are None count for neither side; a mixture is a TypeError.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    given = {name: value for name, value in arguments.items() if value is not None}
    tensors = {name: isinstance(value, torch.Tensor) for name, value in given.items()}
    if not any(tensors.values()):
        return None
    for name, is_tensor in tensors.items():
        if not is_tensor:
            tensor = next(other for other, yes in tensors.items() if yes)
            kind = type(given[name]).__name__
            raise TypeError(f"{name} is a {kind} but {tensor} is a torch tensor: give one kind")
    return torch


def array(
    name: str,
    value: Any,
    torch: Any = None,
    *,
    kinds: str = "fiub",
    wanted: str = "real numbers",
    cuda: bool = False,
) -> Any:
    """value as a numpy array, or with torch as the dense CPU tensor that it is.

    cuda: a CUDA tensor is taken too, in a build with kernels for it.

    kinds: letters of the accepted kinds of numbers, as in numpy's dtype.kind. TypeError for other
    kinds, masked and sparse arrays; ValueError for a tensor on another device.
    """
    if torch is not None:
        return _tensor(name, value, torch, kinds, wanted, cuda)
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, its mask would be ignored: fill it first")
    try:
        converted = np.asarray(value)
    except ValueError as error:  # ragged lists
        raise TypeError(f"{name} must be an array of {wanted}: {error}") from None
    if converted.dtype.kind not in kinds:
        got = f"{type(value).__name__} of dtype {converted.dtype}"
        raise TypeError(f"{name} must hold {wanted}, got a {got}")
    # A field of packed records may not be aligned, and the core refuses that.
    return converted if converted.flags.aligned else converted.copy()


def to_numpy(x: Any, torch: Any) -> np.ndarray:
    """What `array` gave, as a numpy array: a tensor's own memory, to be read within the call.

    Floats that numpy does not have, such as bfloat16, are copied to float32.
    """
    if torch is None:
        return x
    x = x.detach()
    known = not x.is_floating_point() or x.dtype in (torch.float16, torch.float32, torch.float64)
    x = x if known else x.float()
    # After numpy() FSDP could not take back the memory of a parameter. Subclasses may have none.
    shared = x.is_floating_point() and type(x) is torch.Tensor and not x._is_zerotensor()
    return np.from_dlpack(x) if shared and not torch.compiler.is_compiling() else x.numpy()


def as_floats(x: np.ndarray) -> np.ndarray:
    """float32 and float64 as they are, shorter floats as float32, all others as float64."""
    if x.dtype in (np.float32, np.float64):
        return x
    return x.astype(np.float32 if x.dtype == np.float16 else np.float64)


def _tensor(name: str, tensor: Any, torch: Any, kinds: str, wanted: str, cuda: bool) -> Any:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor of {wanted}, got {type(tensor).__name__}")
    if tensor.is_nested:
        raise TypeError(f"{name} must be a dense tensor, got a nested one")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {tensor.layout}")
    if tensor.device.type != "cpu" and not (cuda and tensor.is_cuda and _C.with_cuda):
        hint = f": this build of lshkit has no kernels for it ({HOW_TO_BUILD})"
        hint = hint if cuda and tensor.is_cuda else ""
        raise ValueError(f"{name} must be on the cpu, got a tensor on {tensor.device}{hint}")
    dtype = tensor.dtype
    if dtype == torch.bool:
        kind = "b"
    else:
        kind = "f" if dtype.is_floating_point else "c" if dtype.is_complex else "i"
    if kind not in kinds:
        raise TypeError(f"{name} must hold {wanted}, got a tensor of dtype {dtype}")
    return tensor.resolve_neg()  # the imaginary part of a conjugate, which numpy() refuses
