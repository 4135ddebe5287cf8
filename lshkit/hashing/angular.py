"""The families of the angle: a bit of a code is the sign of a random projection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lshkit import _C, checks, reference
from lshkit.buckets.codes import like
from lshkit.buckets.pairs import pair_products
from lshkit.hash_functions import (
    ANGLE_ROWS,
    FAMILY,
    MAX_BITS,
    MAX_PROBE_BITS,
    code_dtype,
    make_parameters,
    parameter_shape,
)
from lshkit.hashing.family import SLACK, HashFamily, holds, integer_power, squared_norms
from lshkit.typing import ArrayOrTensor, Seed

if TYPE_CHECKING:
    import torch

_CLOSE = 0.99  # cosine beyond which float32 products would not give the angle


def _sharpness_tensor(sharpness: Any, torch: Any, device: Any) -> Any:
    """A number, or a tensor of one, as the operators take it: `(1,)`. They check its value."""
    if not isinstance(sharpness, torch.Tensor):
        sharpness = checks.positive("sharpness", sharpness)
        return torch.full((1,), sharpness, dtype=torch.float32, device=device)
    sharpness = checks.array(
        "sharpness", sharpness, torch, kinds="f", wanted="a real number", cuda=device.type == "cuda"
    )
    if sharpness.numel() != 1:
        shape = tuple(sharpness.shape)
        raise ValueError(f"sharpness must be one number, got a tensor of shape {shape}")
    return sharpness.reshape(1)


def _within_float32(x: Any, torch: Any) -> Any:
    """Rows of float64 with numbers of about 1, by powers of two; others as they are."""
    if x.dtype is not torch.float64:
        return x
    exponent = x.detach().abs().amax(-1, keepdim=True).frexp().exponent.clamp(-1000, 1000)
    return x * torch.exp2(-exponent.to(torch.float64))


class _AngularFamily(HashFamily):
    """What the families of the angle share: codes of n_bits signs of random projections."""

    family: str  # the key of FAMILY
    n_bits: int
    parameters: NDArray[np.float32]
    directional = True
    _farthest = np.pi

    def __init__(self, n_features: int, n_bits: int, n_hashes: int, *, seed: Seed = None) -> None:
        self._set_sizes(MAX_BITS, n_features=n_features, n_bits=n_bits, n_hashes=n_hashes)
        self.seed = checks.seed(seed)
        sizes = self.n_features, self.n_bits, self.n_hashes
        self.parameters = make_parameters(self.family, *sizes, 1, self.seed)

    def _restore(self, arrays: Mapping[str, Any]) -> None:
        self._restore_sizes(arrays, MAX_BITS)
        sizes = self.n_features, self.n_bits, self.n_hashes
        shapes: dict[str, tuple[int, ...]] = {
            "parameters": (1, *parameter_shape(self.family, *sizes))
        }
        self._restore_numbers(arrays, shapes, np.float32)

    def _parameters_beside(self, x: torch.Tensor) -> torch.Tensor:
        """As a tensor on the device of x, a tensor too. Copied to a GPU once: a copy from the CPU
        waits for all that is queued there, and cannot be captured in a CUDA graph."""
        import torch

        parameters = torch.from_numpy(self.parameters)
        if type(x) is not torch.Tensor or not x.is_cuda or torch.compiler.is_compiling():
            return parameters.to(x.device)
        copies = self.__dict__.setdefault("_copies", {})
        copied_from, copy = copies.get(x.device, (None, None))
        if copied_from is not self.parameters:
            with torch.inference_mode(False):  # else no use in a backward pass
                copy = parameters.to(x.device)
            copies[x.device] = self.parameters, copy
        return copy

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_copies"}

    @property
    def n_buckets(self) -> int:
        """Number of different codes, 2^n_bits."""
        return 2**self.n_bits

    def hash(self, x: ArrayOrTensor, *, check_finite: bool = True) -> ArrayOrTensor:
        """Codes of the rows of x.

        Parameters
        ----------
        x : array or tensor `(..., n_features)`
            Real numbers of any type, hashed in float32. Only a row's direction matters: a row and
            its multiples by powers of two have the same codes.
        check_finite : bool
            False accepts rows with a NaN or infinity. Tensors on CUDA and in compiled graphs are
            never validated, because that would synchronise with the device.

        Returns
        -------
        codes : array or tensor `(..., n_hashes)`, like x
            The smallest of uint8, uint16, uint32 and uint64 that holds n_bits. Bit b of a code (of
            weight 2^b) is 1 where its projection is > 0. A row of zeros, which has no direction,
            has code 0 in every hash, so that all such rows collide in all hashes. Without the
            check, the codes of a row with a NaN or infinity are undefined; other rows are not
            affected.

        Raises
        ------
        TypeError, ValueError
            x is no array of real numbers, its last dimension is not n_features, or, named by its
            number, a row has a NaN or infinity.
        """
        torch = checks.torch_of(x=x)
        given: Any = self._rows("x", x, torch, cuda=True)
        if torch is not None and given.is_cuda and self.n_bits > MAX_PROBE_BITS:
            raise ValueError(
                f"x must be on the cpu for codes of more than {MAX_PROBE_BITS} bits, got a tensor "
                f"on {given.device} and n_bits={self.n_bits}"
            )
        shape = tuple(given.shape[:-1]) + (self.n_hashes,)
        options = FAMILY[self.family], self.n_bits, self.n_hashes
        codes: Any
        if torch is not None:
            from lshkit import torch_ops

            rows = _within_float32(given, torch).reshape(1, 1, -1, self.n_features)
            try:
                codes = torch_ops.hash(rows, self._parameters_beside(rows), *options, check_finite)
            except ValueError:
                self._refuse_non_finite(given, torch)  # names the row
                raise
            return codes.reshape(shape)
        codes = np.empty(shape, code_dtype(self.n_buckets))
        if codes.size:
            rows = self._float32_rows(given)
            out = codes.reshape(1, 1, -1, self.n_hashes)
            finite = _C.hash(rows, self.parameters, *options, out, 0)
            if check_finite and not finite:
                self._refuse_non_finite(given, None)
        return codes

    def _float32_rows(self, x: np.ndarray) -> np.ndarray:
        """x as the core takes it: float32 `(1, 1, n, n_features)`."""
        if x.dtype.kind == "f" and x.itemsize > 4:
            x = self.within_float32(x)
        with np.errstate(over="ignore"):  # infinity is one in any type
            return np.ascontiguousarray(x, np.float32).reshape(1, 1, -1, self.n_features)

    def soft_hash(
        self,
        x: ArrayOrTensor,
        n_probes: int,
        sharpness: float | torch.Tensor,
        *,
        check_finite: bool = True,
    ) -> tuple[ArrayOrTensor, ArrayOrTensor]:
        """The n_probes most likely buckets of every row and hash, with weights that sum to 1.

        With z the projections of `x / |x|` at unit variance, bucket c has the likelihood
        prod_b sigmoid(2 sharpness z_b c_b), c_b = +-1 its bits (RACE's soft bucket). Probe 0 is the
        code of `hash`, but where rounding decides: at `|z|` of 1e-7, in fewer than 1 of 10^6 codes.
        Probe a has the k-th of the bits of smallest `|z|` flipped where bit k of a is set. For
        n_probes <= 3 these are the most likely buckets, for 2^n_bits all of them; in between, the
        likeliest of the choices that flip the same few bits in every way.

        Parameters
        ----------
        x : array or tensor `(..., n_features)`
            Real numbers of any type, used in float32. Only a row's direction matters.
        n_probes : int, 1 to 2^n_bits
            Of a family with n_bits <= 16.
        sharpness : float > 0, or in torch a tensor of one such number
            How fast the weight of a bucket falls with the margins `|z|`; 2 and more for few probes.
        check_finite : bool
            False accepts rows with a NaN or infinity. Tensors on CUDA and in compiled graphs are
            never validated, because that would synchronise with the device.

        Returns
        -------
        codes : array or tensor `(..., n_hashes, n_probes)`
            uint8 when n_bits <= 8, else uint16.
        weights : float32 array or tensor `(..., n_hashes, n_probes)`
            The softmax of the log-likelihoods over the probes; exactly 1 for n_probes=1. In torch
            differentiable in x and sharpness, exactly but for the choice of bits, which is
            piecewise constant. A row of zeros weights all its probes equally and has no gradient.
            Without the check, for n_probes > 1, a row with a NaN or infinity has weights and a
            gradient of NaN.

        Raises
        ------
        TypeError, ValueError
            n_bits is above 16, n_probes or sharpness is out of range, or x as in `hash`.
        """
        torch = checks.torch_of(x=x)
        given: Any = self._rows("x", x, torch, cuda=True)
        if self.n_bits > MAX_PROBE_BITS:
            raise ValueError(
                f"soft_hash needs a family with n_bits <= {MAX_PROBE_BITS}, got {self.n_bits}"
            )
        n_probes = checks.integer("n_probes", n_probes, 1, self.n_buckets)
        options = FAMILY[self.family], self.n_bits, self.n_hashes, n_probes
        shape = tuple(given.shape[:-1]) + (self.n_hashes, n_probes)
        probes: Any
        weights: Any
        if torch is not None:
            from lshkit import torch_ops

            scale = _sharpness_tensor(sharpness, torch, given.device)
            if check_finite:
                self._refuse_non_finite(given, torch)
            given = _within_float32(given, torch).reshape(1, 1, -1, self.n_features)
            parameters = self._parameters_beside(given)
            weights, probes, *_ = torch_ops.soft_hash(given, parameters, scale, *options)
            return probes.reshape(shape), weights.reshape(shape)
        scale = np.full(1, checks.positive("sharpness", sharpness), np.float32)
        probes = np.empty(shape, code_dtype(self.n_buckets))
        weights = np.empty(shape, np.float32)
        if probes.size:
            if check_finite:
                self._refuse_non_finite(given, None)
            given = self._float32_rows(given)
            n, n_selected = given.shape[2], self.n_hashes * (n_probes - 1).bit_length()
            _C.soft_hash(
                *(given, self.parameters, scale),
                *options,
                np.empty((1, 1, n, self.n_hashes), probes.dtype),
                np.empty((1, 1, n, n_selected), np.int32),
                probes.reshape(1, 1, n, -1),
                weights.reshape(1, 1, n, -1),
            )
        return probes, weights

    def _distance(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return reference.angle(x, y)

    def _probability(self, distance: np.ndarray) -> np.ndarray:
        """(1 - angle / pi)^n_bits (Charikar 2002): exactly 1 for a row and itself."""
        return integer_power(np.maximum(1 - distance / np.pi, 0), self.n_bits)

    def probability_of_cosine(self, cosine: ArrayOrTensor) -> ArrayOrTensor:
        """`probability_of_distance` of arccos(cosine): (arccos(-cosine) / pi)^n_bits.

        Parameters
        ----------
        cosine : array or tensor
            Real numbers from -1 to 1; those up to 0.01 beyond, from rounding, are clipped.
            ValueError for others.

        Returns
        -------
        probability : float64 array or tensor of the same shape
            NaN where the cosine is. Not differentiable.
        """
        torch = checks.torch_of(cosine=cosine)
        given = checks.to_numpy(checks.array("cosine", cosine, torch), torch)
        given = np.asarray(given, np.float64)
        beyond = np.abs(given) > 1 + SLACK
        if beyond.any():
            raise ValueError(f"cosine must be from -1 to 1, got {given[beyond][0]}")
        return like(torch, np.asarray(self._of_cosine(given)))[0]

    def _of_cosine(self, cosine: np.ndarray) -> np.ndarray:
        return integer_power(np.arccos(np.clip(-cosine, -1, 1)) / np.pi, self.n_bits)

    def _quick_pairs(
        self,
        x: np.ndarray,
        y: np.ndarray,
        indptr: np.ndarray,
        indices: np.ndarray,
        y_norms: np.ndarray | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        y_norms = self.row_norms(y) if y_norms is None else y_norms
        products = pair_products(x, y, indptr, indices)
        norms = np.repeat(self.row_norms(x), np.diff(indptr)) * y_norms[indices]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            cosine = products / norms
        left = np.flatnonzero(~(np.abs(cosine) <= _CLOSE))  # also where norms are NaN
        return self._of_cosine(cosine), left

    def row_norms(self, x: np.ndarray) -> np.ndarray:
        sums = squared_norms(x)  # NaN where the type of the rows does not hold norms or products
        return np.sqrt(np.where(holds(sums), sums, np.nan)).astype(np.float64)

    def within_float32(self, x: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            squares = np.einsum("...d,...d->...", x, x)
        beyond = ~((squares > 1e-30) & (squares < 1e30))
        if not beyond.any():
            return x
        x = x.copy()
        largest = np.abs(x[beyond]).max(-1, keepdims=True)
        x[beyond] = np.ldexp(x[beyond], -np.frexp(largest)[1])
        return x


class Hyperplane(_AngularFamily):
    """Signs of projections on random Gaussian directions (Charikar 2002).

    Exact for any vectors, in O(n_features n_bits n_hashes) per row; `FastHadamard` is faster.

    Parameters
    ----------
    n_features : int >= 1
        Dimension of the vectors.
    n_bits : int, 1 to 64
        Bits of a code (tau in the YOSO paper): more make a sharper kernel. Attention and bucket
        sums, which keep tables of all buckets, take up to 16.
    n_hashes : int, 1 to 65535
        Number of independent codes of a vector (m in the YOSO paper): more reduce the noise.
    seed : None, int from 0 to 2**128 - 1 or numpy.random.Generator
        The same integer always gives the same hash functions.

    Attributes
    ----------
    n_buckets : int
        2^n_bits.
    parameters : float32 array `(1, n_hashes * n_bits, n_features)`
        All random numbers, in the layout of the core.
    """

    family = "hyperplane"

    def __init__(self, n_features: int, n_bits: int, n_hashes: int, *, seed: Seed = None) -> None:
        super().__init__(n_features, n_bits, n_hashes, seed=seed)

    @property
    def planes(self) -> NDArray[np.float32]:
        """Normals of the hyperplanes, `(n_hashes, n_bits, n_features)`."""
        return self.parameters.reshape(self.n_hashes, self.n_bits, self.n_features)


class FastHadamard(_AngularFamily):
    """Signs of coordinates after pseudo-random rotations (Andoni et al. 2015): O(log D) per bit.

    Vectors are padded with zeros to D, a power of two >= 64, and rotated by H P S G2 H G1 H G0: H
    is the Hadamard matrix, P a permutation, S random signs and G rotations of coordinate pairs by
    random angles, without which sparse vectors would collide too often. Each of the n_bits bits of
    a code has its own S: rows of one rotation are orthogonal, and codes from them would collide too
    rarely. P is another in seven bits one after the other, without which sums over rows in all
    directions would have up to twice the variance of independent functions.

    Parameters
    ----------
    n_features : int >= 1
        Dimension of the vectors.
    n_bits : int, 1 to 64
        Bits of a code (tau in the YOSO paper): more make a sharper kernel. Attention and bucket
        sums, which keep tables of all buckets, take up to 16.
    n_hashes : int, 1 to 65535
        Number of independent codes of a vector (m in the YOSO paper): more reduce the noise.
    seed : None, int from 0 to 2**128 - 1 or numpy.random.Generator
        The same integer always gives the same hash functions.

    Attributes
    ----------
    n_buckets : int
        2^n_bits.
    parameters : float32 array `(1, 3 + n_bits * ceil(n_hashes / D), D)`
        All random numbers, in the layout of the core.
    """

    family = "hadamard"
    _first_format = 2  # the permutations came then

    def __init__(self, n_features: int, n_bits: int, n_hashes: int, *, seed: Seed = None) -> None:
        super().__init__(n_features, n_bits, n_hashes, seed=seed)

    def _restore(self, arrays: Mapping[str, Any]) -> None:
        super()._restore(arrays)
        if not (np.abs(self.signs) == 1).all():
            raise ValueError("parameters must hold signs of 1 and -1 from row 3 on")

    @property
    def angles(self) -> NDArray[np.float32]:
        """Angles `(3, D/2)` of G0, G1 and G2, which rotate the planes (i, i + D/2)."""
        cosines, sines = np.split(self.parameters[0, :ANGLE_ROWS], 2, axis=-1)
        return np.arctan2(sines, cosines)

    @property
    def signs(self) -> NDArray[np.float32]:
        """Diagonals of +1 and -1, `(ceil(n_hashes / D), n_bits, D)`, one for each rotation."""
        return self.parameters[0, ANGLE_ROWS:].reshape(-1, self.n_bits, self.parameters.shape[-1])
