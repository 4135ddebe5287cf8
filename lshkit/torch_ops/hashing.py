"""Hash functions from a seed, and codes."""

import torch
from torch import Tensor

from lshkit import _C
from lshkit.hash_functions import FAMILY, fill_parameters, parameter_shape
from lshkit.torch_ops import library
from lshkit.torch_ops.tensors import new_codes, rows

_FAMILY_NAME = {number: name for name, number in FAMILY.items()}

library.define(
    "hash_parameters(Tensor seed, int n_sets, SymInt n_features, int n_bits, int n_hashes, "
    "int family) -> Tensor",
    "hash(Tensor x, Tensor parameters, int family, int n_bits, int n_hashes, "
    "bool check_finite=False) -> Tensor",
)


def _hash_parameters(
    seed: Tensor, n_sets: int, n_features: int, n_bits: int, n_hashes: int, family: int
) -> Tensor:
    """The seed is not read on CUDA, where any 64 bits are one."""
    name = _FAMILY_NAME[family]
    shape = parameter_shape(name, n_features, n_bits, n_hashes)
    parameters = seed.new_empty((n_sets, *shape), dtype=torch.float32)
    fill_parameters(name, seed, parameters)
    return parameters


def drawn(parameters: Tensor, *sizes: int) -> Tensor:
    """For an operator whose parameters may be the seed that they are drawn from."""
    if parameters.dtype is torch.int64:
        return _hash_parameters(parameters, *sizes)
    return parameters.contiguous()


def _hash(
    x: Tensor,
    parameters: Tensor,
    family: int,
    n_bits: int,
    n_hashes: int,
    check_finite: bool = False,
) -> Tensor:
    codes = new_codes(x, n_bits, n_hashes)
    if x.numel() == 0:
        return codes.zero_()
    short = x.dtype in (torch.bfloat16, torch.float16)  # the core reads them as they are
    x = rows(x, x.dtype if short else torch.float32)
    parameters = parameters.contiguous()
    finite = _C.hash(x, parameters, family, n_bits, n_hashes, codes, torch.get_num_threads())
    if check_finite and not finite:  # the core saw every number; on CUDA none is looked at
        raise ValueError("x must be finite, a row has a NaN or infinity")
    return codes


library.register_kernel("hash_parameters", _hash_parameters)
library.register_kernel("hash", _hash)


@library.fake("hash_parameters")
def _(
    seed: Tensor, n_sets: int, n_features: int, n_bits: int, n_hashes: int, family: int
) -> Tensor:
    if family == FAMILY["hadamard"]:
        n_features = int(n_features)  # padded to a power of two, which no symbol can be
    shape = parameter_shape(_FAMILY_NAME[family], n_features, n_bits, n_hashes)
    return seed.new_empty((n_sets, *shape), dtype=torch.float32)


@library.fake("hash")
def _(
    x: Tensor,
    parameters: Tensor,
    family: int,
    n_bits: int,
    n_hashes: int,
    check_finite: bool = False,
) -> Tensor:
    return new_codes(x, n_bits, n_hashes)


library.not_differentiable("hash_parameters")
library.not_differentiable("hash")
library.register_vmap("hash_parameters", ())
library.register_vmap("hash", (0,))

hash_parameters: library.Operator = torch.ops.lshkit.hash_parameters.default
hash: library.Operator = torch.ops.lshkit.hash.default
