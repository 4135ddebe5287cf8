"""Codes as arguments. Sums have tables of all buckets; pairs and draws accept any width."""

from typing import Any

import numpy as np

from lshkit import checks
from lshkit.hash_functions import MAX_HASHES, code_dtype
from lshkit.typing import ArrayOrTensor

MAX_BUCKETS = 2**16
MAX_ROWS = 2**31 - 1
_TO_FOLD = "lshkit.buckets.fold maps wider codes to fewer buckets"


def fold(codes: ArrayOrTensor, n_buckets: int) -> ArrayOrTensor:
    """Maps codes of any width to 0 to n_buckets - 1; equal codes stay equal.

    For `bucket_sum` and `BucketTable`, which need a table of all buckets. Different codes share a
    bucket with a probability of about 1 / n_buckets, as if drawn at random: a pair of rows that
    shares a code with probability p shares a folded one with about p + (1 - p) / n_buckets.

    Parameters
    ----------
    codes : integer array or CPU tensor `(...)`
        Codes >= 0 of up to 64 bits.
    n_buckets : int, 1 to 65536

    Returns
    -------
    folded : uint8 (n_buckets <= 256) or uint16 array or tensor of the same shape

    Raises
    ------
    TypeError, ValueError
        codes are no integers >= 0, or n_buckets is out of range.

    Examples
    --------
    >>> fold(np.array([7, 2**40, 7]), 256).tolist()
    [18, 0, 18]
    """
    torch = checks.torch_of(codes=codes)
    n_buckets = checks.integer("n_buckets", n_buckets, 1, MAX_BUCKETS)
    words = _unsigned("codes", codes, torch).astype(np.uint64)
    # The finaliser of SplitMix64 (Steele et al. 2014), then its upper 32 bits times n_buckets.
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    words = (words >> np.uint64(32)) * np.uint64(n_buckets) >> np.uint64(32)
    return like(torch, np.asarray(words).astype(code_dtype(n_buckets)))[0]


def as_n_buckets(n_buckets: int) -> int:
    """n_buckets of a verb that keeps a table of all buckets."""
    try:
        return checks.integer("n_buckets", n_buckets, 1, MAX_BUCKETS)
    except ValueError as error:
        raise ValueError(f"{error}: {_TO_FOLD}") from None


def as_codes(name: str, codes: Any, n_buckets: int, torch: Any = None) -> Any:
    """Integer codes as contiguous uint8 (n_buckets <= 256) or uint16, each below n_buckets.

    The operators of torch_ops check the range themselves, so tensors of the right type pass.
    """
    codes = checks.array(name, codes, torch, kinds="iu", wanted="integer codes", cuda=True)
    if codes.ndim < 2 or codes.shape[-1] == 0:
        shape = tuple(codes.shape)
        raise ValueError(f"{name} must have shape (..., n, n_hashes), n_hashes >= 1, got {shape}")
    wanted = "uint8" if n_buckets <= 256 else "uint16"
    right = codes.dtype == getattr(torch or np, wanted)
    trusted = right and (torch is not None or n_buckets in (256, MAX_BUCKETS))
    if not trusted and 0 not in codes.shape:
        in_range = f"{name} must be from 0 to n_buckets - 1 = {n_buckets - 1}"
        if torch is not None and codes.is_cuda:  # to look would be to wait for the GPU
            from lshkit.torch_ops.assertions import require

            numbers = codes.to(torch.int64)
            require((numbers >= 0) & (numbers < n_buckets), in_range)
            return codes.to(getattr(torch, wanted))
        numbers = checks.to_numpy(codes, torch)
        low, high = int(numbers.min()), int(numbers.max())
        if low < 0:
            raise ValueError(f"{in_range}, got {low}")
        if high >= n_buckets:
            raise ValueError(f"{in_range}, got {high}: {_TO_FOLD}")
    if torch is None:
        return np.ascontiguousarray(codes, wanted)
    return codes.to(getattr(torch, wanted))


def wide_codes(name: str, codes: Any) -> tuple[np.ndarray, Any]:
    """Codes of any width as a contiguous unsigned array (n, n_hashes); torch if a tensor."""
    torch = checks.torch_of(**{name: codes})
    codes = _unsigned(name, codes, torch)
    if codes.ndim != 2 or not 1 <= codes.shape[1] <= MAX_HASHES or len(codes) > MAX_ROWS:
        wanted = f"(n, n_hashes), n_hashes 1 to {MAX_HASHES}"
        raise ValueError(f"{name} must have shape {wanted}, got {codes.shape}")
    return np.ascontiguousarray(codes, codes.dtype.newbyteorder("=")), torch


def _unsigned(name: str, codes: Any, torch: Any) -> np.ndarray:
    codes = checks.to_numpy(
        checks.array(name, codes, torch, kinds="iu", wanted="integer codes"), torch
    )
    if codes.dtype.kind == "i":
        low = int(codes.min(initial=0))
        if low < 0:
            raise ValueError(f"{name} must be >= 0, got {low}")
        codes = codes.astype(f"u{codes.dtype.itemsize}")
    return codes


def threads_of(torch: Any) -> int:
    """How many threads the core is to use: torch's for tensors, 0 for all there are."""
    return 0 if torch is None else torch.get_num_threads()


def like(torch: Any, *arrays: np.ndarray) -> tuple[Any, ...]:
    """The arrays, as tensors where the codes were."""
    return arrays if torch is None else tuple(torch.from_numpy(x) for x in arrays)
