"""What a `CodeCache` keeps: keys, values and sign codes of the keys, in memory that grows."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lshkit import _C

BLOCK = 64  # keys of a block of codes
EXACT_UP_TO = 1024  # up to this length every key is read, and none has a code
BY_SEQUENCE = ("_keys", "_values", "codes", "centre", "norm", "value_centre", "value_norm")


class CodedKeys:
    """Keys and values of a batch of sequences, padded on the left.

    A key's code is the signs of n_bits projections of the key less a centre, and, in a byte each,
    its norm and its value's size, which follows from the value's distance from a centre: one block
    of BLOCK keys after the other, as the core reads them.

    Attributes:
        positions: of all sequences, padding included.
        starts: the first position of each sequence; those before are padding.
        planes: the projections, float32 `(H_k, D, n_bits)`.
        codes: uint8 `(B, H_k, blocks, (n_bits / 8 + 2) BLOCK)`.
        centre, norm: what keys are relative to, float32 `(B, H_k, D)` and `(B, H_k)`.
        value_centre, value_norm: the same of values, `(B, H_k, D_v)` and `(B, H_k)`.
    """

    positions: int
    starts: list[int]
    codes: Tensor
    centre: Tensor
    norm: Tensor
    value_centre: Tensor
    value_norm: Tensor
    _keys: Tensor  # with room for positions to come
    _values: Tensor
    _hashed: list[int]  # keys of each sequence that have their codes, ...
    _centred: list[int]  # ... by the mean of this many first ones

    def __init__(
        self,
        batch_size: int,
        num_heads: int,
        head_dim: int,
        value_dim: int,
        n_bits: int,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        self.sizes = batch_size, num_heads, head_dim, value_dim
        self.n_bits, self.dtype = n_bits, dtype
        self.planes = _orthogonal_planes(seed, num_heads, head_dim, n_bits)
        self.reset()

    @property
    def key(self) -> Tensor:
        """`(B, H_k, positions, D)`, a view."""
        return self._keys[:, :, : self.positions]

    @property
    def value(self) -> Tensor:
        """`(B, H_k, positions, D_v)`, a view."""
        return self._values[:, :, : self.positions]

    def coded(self, end: int) -> tuple[Tensor, ...]:
        """What the core is given of the positions up to `end`."""
        starts = torch.tensor(self.starts, dtype=torch.int64, device="cpu").clamp(max=end)
        key, value = self.key[:, :, :end], self.value[:, :, :end]
        of_keys, of_values = (self.centre, self.norm), (self.value_centre, self.value_norm)
        return key, value, self.codes, self.planes, *of_keys, *of_values, starts

    @property
    def nbytes(self) -> int:
        """Memory of all tensors, room for positions to come included."""
        return self.planes.nbytes + sum(getattr(self, name).nbytes for name in BY_SEQUENCE)

    def reset(self) -> None:
        """Removes all positions."""
        batch, heads, head_dim, value_dim = self.sizes
        self.positions = 0
        self.starts, self._hashed, self._centred = [0] * batch, [0] * batch, [0] * batch
        own: dict[str, Any] = {"dtype": self.dtype, "device": "cpu"}
        single: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
        with torch.inference_mode(False):
            self._keys = torch.empty((batch, heads, 0, head_dim), **own)
            self._values = torch.empty((batch, heads, 0, value_dim), **own)
            shape = batch, heads, 0, (self.n_bits // 8 + 2) * BLOCK
            self.codes = torch.empty(shape, dtype=torch.uint8, device="cpu")
            self.centre = torch.zeros((batch, heads, head_dim), **single)
            self.value_centre = torch.zeros((batch, heads, value_dim), **single)
            self.norm, self.value_norm = (torch.zeros((batch, heads), **single) for _ in range(2))

    def append(self, key: Tensor, value: Tensor) -> None:
        """Appends keys `(B, H_k, n, D)` and values `(B, H_k, n, D_v)`."""
        end = self.positions + key.shape[2]
        self._reserve(end)
        self._keys[:, :, self.positions : end] = key
        self._values[:, :, self.positions : end] = value
        self.positions = end

    def set_starts(self, starts: list[int]) -> None:
        """A sequence that starts elsewhere is hashed again."""
        for b, start in enumerate(starts):
            if start != self.starts[b]:
                self._hashed[b] = self._centred[b] = 0
        self.starts = starts

    def crop(self, positions: int) -> None:
        """Removes all but the first positions."""
        self.positions = positions
        self.starts = [min(start, positions) for start in self.starts]
        for b, start in enumerate(self.starts):
            length = positions - start
            if self._centred[b] > length:
                self._hashed[b] = self._centred[b] = 0
            self._hashed[b] = min(self._hashed[b], length)

    def selected(self, indices: Sequence[int]) -> "CodedKeys":
        """Others, whose sequence i is a copy of sequence indices[i]."""
        other = copy.copy(self)
        other.sizes = len(indices), *self.sizes[1:]
        at = torch.tensor(list(indices), dtype=torch.int64, device="cpu")
        with torch.inference_mode(False), torch.no_grad():
            for name in BY_SEQUENCE:
                setattr(other, name, getattr(self, name).index_select(0, at))
        for name in ("starts", "_hashed", "_centred"):
            values = getattr(self, name)
            setattr(other, name, [values[i] for i in indices])
        return other

    def ends(self, first: int) -> list[int]:
        """Where the positions from `first` on are cut, so that those of a part have one centre."""
        cuts = set()
        for start in self.starts:
            length = 1 << max(first + 1 - start, EXACT_UP_TO).bit_length()
            while start + length - 1 < self.positions:
                cuts.add(start + length - 1)  # the next position has another centre
                length *= 2
        return [first, *sorted(cuts), self.positions]

    def hash(self, end: int) -> None:
        """Codes of the keys up to position `end`, of sequences long enough for them to be used.

        Keys and values are centred by the mean of the first 2^k of them, the largest power of two
        up to the length; all are hashed again where it grows. So codes do not depend on how keys
        came.
        """
        for b, start in enumerate(self.starts):
            length = end - start
            if length <= EXACT_UP_TO:
                continue
            centred = 1 << (length.bit_length() - 1)
            if centred != self._centred[b]:
                first = slice(start, start + centred)
                self._centre_by(b, self._keys[b, :, first], self._values[b, :, first])
                self._centred[b], self._hashed[b] = centred, 0
            if self._hashed[b] < length:
                _C.code_keys(
                    *(*self.coded(self.positions), b, self._hashed[b], length),
                    torch.get_num_threads(),
                )
                self._hashed[b] = length

    def _centre_by(self, b: int, keys: Tensor, values: Tensor) -> None:
        """What keys `(H_k, n, D)` and values `(H_k, n, D_v)` are relative to."""
        for h in range(len(keys)):
            self.centre[b, h], self.norm[b, h], finite = _of_keys(keys[h].split(1024))
            of_values = _of_values(values[h].split(1024), finite)
            self.value_centre[b, h], self.value_norm[b, h] = of_values

    def _reserve(self, positions: int) -> None:
        """Room for as many, and for half as many again where there was too little."""
        if positions <= self._keys.shape[2]:
            return
        room = -(-max(positions, self.positions * 3 // 2) // BLOCK) * BLOCK
        for name in ("_keys", "_values"):
            old = getattr(self, name)
            with torch.inference_mode(False):
                new = old.new_empty((*old.shape[:2], room, old.shape[3]))
            _C.use_large_pages(new)  # a step touches rows all over it
            new[:, :, : self.positions] = old[:, :, : self.positions]
            setattr(self, name, new)
        old = self.codes
        with torch.inference_mode(False):
            codes = old.new_empty((*old.shape[:2], room // BLOCK, old.shape[3]))
        _C.use_large_pages(codes)
        codes[:, :, : old.shape[2]] = old
        codes[:, :, old.shape[2] :] = 0
        self.codes = codes


def _of_keys(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The mean of keys, the unit of their distances from it, and which are finite.

    A few keys far from all others have no say in either: they are in a byte's last value, and
    with them the others would be told apart no more.
    """
    every = torch.ones(sum(map(len, parts)), dtype=torch.bool, device="cpu")
    centre, distances, finite = _centred(parts, every, lambda distances: 4 * _unit(distances))
    return centre, _unit(distances[finite]), finite


def _of_values(parts: Sequence[Tensor], known: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of values and that of their distances from it, without the farthest 1 in 256.

    known: of which keys are finite.
    """
    centre, distances, known = _centred(parts, known, _farthest)
    near = distances[known & (distances <= _farthest(distances[known]))]
    sums = [part.sum() for part in near.split(1024)]  # as on any number of threads
    return centre, torch.stack(sums).sum() / max(len(near), 1)


def _centred(
    parts: Sequence[Tensor], known: Tensor, limit: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The mean of rows, the distances of all from it, and which are known and finite.

    parts: of the rows, as copies of all would be large. Rows have a say that are within a limit,
    which follows from all distances, of the median of the first part.
    """
    first = parts[0][known[: len(parts[0])] & parts[0].isfinite().all(-1)].double()
    rough = first.median(0).values if len(first) else first.new_zeros(parts[0].shape[1])
    distances = _distances(parts, rough)
    finite = known & distances.isfinite()
    centre = _mean(parts, finite & (distances <= limit(distances[finite])))
    return centre, _distances(parts, centre), finite


def _farthest(distances: Tensor) -> Tensor:
    """Of all but 1 in 256."""
    n = len(distances)
    return distances.kthvalue(n - n // 256).values if n else distances.sum()


def _mean(parts: Sequence[Tensor], chosen: Tensor) -> Tensor:
    total = parts[0].new_zeros(parts[0].shape[1], dtype=torch.float64)
    for part, mask in zip(parts, chosen.split(1024), strict=True):
        total += part[mask].double().sum(0)
    return total / chosen.sum().clamp_min(1)


def _distances(parts: Sequence[Tensor], centre: Tensor) -> Tensor:
    """Of rows from a centre, float64; not finite of those that are not."""
    return torch.cat([(part.double() - centre).norm(dim=-1) for part in parts])


def _unit(distances: Tensor) -> Tensor:
    """Of which a byte holds four: the median, or more where 1 in 256 would be beyond."""
    if len(distances) == 0:
        return distances.sum()
    return torch.maximum(distances.median(), _farthest(distances) * (64 / 254))


def _orthogonal_planes(seed: int, heads: int, d: int, n_bits: int) -> Tensor:
    """`(heads, d, n_bits)`: d unit vectors after d others, each d of them orthogonal."""
    generator = torch.Generator("cpu").manual_seed(seed)
    own: dict[str, Any] = {"generator": generator, "dtype": torch.float64, "device": "cpu"}
    parts = []
    for _ in range(-(-n_bits // d)):
        gaussian = torch.randn((heads, d, d), **own)
        q, r = torch.linalg.qr(gaussian)
        parts.append(q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None])
    return torch.cat(parts, -1)[..., :n_bits].float().contiguous()
