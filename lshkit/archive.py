"""Files of lshkit: .npz archives that numpy opens, checked before an array is allocated.

Members are stored uncompressed: "header.json" (the kind of object, the version of its contents, the
type and shape of every array, and the object's own settings), then one .npy member for each array.
Together they may be no larger than the file, and every array has the size, type and shape that the
header gives it: a small file cannot exhaust the memory (a directory of very many members, before it
is refused, takes ten times the size of the file). zipfile compares the checksums.
"""

from __future__ import annotations

import abc
import contextlib
import io
import json
import math
import os
import secrets
import zipfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

import numpy as np
from numpy.lib import format as npy

from lshkit import hashing
from lshkit.hashing.family import FAMILIES, HashFamily
from lshkit.typing import File

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_HEADER = 2**20  # bytes: what JSON makes of them is some 30 times as large
FLOATS, UNSIGNED = ("<f4", "<f8"), ("|u1", "<u2", "<u4", "<u8")
# The types that an array may have and its shape (None: any), by its name.
Expected: TypeAlias = dict[str, tuple[tuple[str, ...], tuple[int, ...] | None]]

TYPES = (*FLOATS, *UNSIGNED, "<i8")
_HEADER = "header.json"
_MAX_DIMENSIONS = 8
_MAX_NPY_HEADER = 2**10
_CHUNK = 2**20


# --- Writing ------------------------------------------------------------------------------------


def write(
    file: File, kind: str, version: int, header: dict[str, Any], arrays: dict[str, np.ndarray]
) -> None:
    """Writes an object of a kind: header, a dict for JSON, and arrays by name.

    file: a path, which gets the ending .npz where it has another, or a binary file object. At a
    path, the archive is complete or not there: it is written to a new file in the same folder,
    which then takes the place of whatever file or symbolic link has the name, with the permissions
    of the file.
    """
    arrays = {name: _little_endian(x) for name, x in arrays.items()}
    declared = {name: [x.dtype.str, list(x.shape)] for name, x in arrays.items()}
    header = {"kind": kind, "version": version, "arrays": declared} | header
    text = _json(header)
    if len(text) > MAX_HEADER:
        raise ValueError(f"a header must be of {MAX_HEADER} bytes at most, got {len(text)}")
    path = _path(file, "write")
    target: Any = contextlib.nullcontext(file) if path is None else _replacing(_ending(path))
    with target as open_file:
        _write(open_file, text, arrays)


def _write(file: BinaryIO, text: bytes, arrays: dict[str, np.ndarray]) -> None:
    with zipfile.ZipFile(_Sink(file), "w") as members:  # type: ignore[call-overload]
        members.writestr(zipfile.ZipInfo(_HEADER), text)  # as below, a member without a date
        for name, x in arrays.items():
            with members.open(zipfile.ZipInfo(_member(name)), "w", force_zip64=True) as member:
                npy.write_array(member, x, version=(1, 0), allow_pickle=False)


class _Sink:
    """A file object that is only written to, in order, as pipes and compressed files are.

    zipfile then does not go back to write a size, which would end up elsewhere in a file that is
    appended to.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: bytes | memoryview) -> int:
        self._file.write(data)
        return len(data)

    def flush(self) -> None:
        pass


@contextlib.contextmanager
def _replacing(path: str) -> Iterator[BinaryIO]:
    """A new file that takes the place of the one at path in the end, or is removed."""
    mode = None
    if os.path.exists(path):
        if not os.path.isfile(path):
            raise OSError(f"{path} is no regular file: it cannot be replaced by one")
        if not os.path.islink(path):
            mode = os.stat(path).st_mode & 0o777
    part = os.path.join(os.path.dirname(path), f".lshkit-{secrets.token_hex(8)}.part")
    # No other file or link; until it is renamed, nobody else reads what a private file takes in.
    private = None if mode is None else lambda name, flags: os.open(name, flags, 0o600)
    try:
        file = open(part, "xb", opener=private)
    except OSError as error:
        error.filename = path
        raise
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            os.chmod(part, mode)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(part)
        raise


def _path(file: File, method: str) -> str | None:
    """The path that `file` is; None for a binary file object, which has the method."""
    if hasattr(file, method) and not isinstance(file, io.TextIOBase):
        return None
    try:
        path = os.fsdecode(file)  # type: ignore[arg-type]  # what else there is has been returned
    except TypeError:
        got = type(file).__name__
        raise TypeError(f"file must be a path or a binary file object, got {got}") from None
    if not os.path.basename(path).strip("."):  # with the ending, it would be a hidden file
        raise ValueError(f"file must be the path of a file, got {path!r}")
    return path


def _ending(path: str) -> str:
    return path if path.endswith(".npz") else f"{path}.npz"


def _little_endian(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, order="C")
    x = x.astype(x.dtype.newbyteorder("<"), copy=False)
    if x.dtype.str not in TYPES:
        raise TypeError(f"an archive holds arrays of {', '.join(TYPES)}, got {x.dtype.str}")
    return x


# --- Reading ------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(file: File, kind: str, version: int) -> Iterator[Archive]:
    """The `Archive` in a file that `write` made, of this kind and at most this version.

    file: a path, to which .npz is added where there is none of that name, or a binary file object,
    which is read from where it is to its end.
    ValueError for any other file, and in the place of what is raised in the context: its message
    names the file.
    """
    with contextlib.ExitStack() as stack:
        source: Any
        if (path := _path(file, "read")) is None:
            name = "data" if isinstance(file, _Data) else "the file object"
            source = io.BytesIO(file.read())  # type: ignore[union-attr]
        else:
            name = path
            if not os.path.exists(name) and os.path.exists(_ending(name)):
                name = _ending(name)
            source = stack.enter_context(open(name, "rb"))
        try:
            yield Archive(source, kind, version)
        except (OSError, MemoryError):
            raise
        except Exception as error:  # contents that are none are met in many ways
            what = (
                f"{error} is missing" if isinstance(error, KeyError) else str(error) or repr(error)
            )
            raise ValueError(f"{name} is no whole file of {kind}: {what}") from error


class Archive:
    """header: what `write` was given. arrays: (type, shape) of each that is there, by name."""

    def __init__(self, file: BinaryIO, kind: str, version: int) -> None:
        self._members = zipfile.ZipFile(file)
        self._check_sizes(file.seek(0, os.SEEK_END))
        text = self._members.read(_HEADER)
        self.header = header = json.loads(text)
        if not isinstance(header, dict) or not isinstance(header.get("kind"), str):
            raise ValueError("its header names no kind")
        if header["kind"] != kind:
            raise ValueError(f"it holds a {header['kind'][:80]}")
        if type(header["version"]) is not int or header["version"] < 1:
            raise ValueError(f"version must be an integer >= 1, got {header['version']!r}")
        if header["version"] > version:
            raise ValueError(
                f"it has version {header['version']}, this lshkit reads up to {version}: update it"
            )
        if _json(header) != text:
            raise ValueError("its header is not as it was written")
        declared = header["arrays"]
        if not isinstance(declared, dict):
            raise ValueError(f"arrays must be a dict, got {declared!r:.80}")
        self.arrays = {name: _declared(name, x) for name, x in declared.items()}
        if {_HEADER, *map(_member, self.arrays)} != set(self._members.namelist()):
            raise ValueError("it holds other members than its header names")
        for name, (dtype, shape) in self.arrays.items():
            size, implied = self._members.getinfo(_member(name)).file_size, _data_size(dtype, shape)
            if not implied < size <= implied + _MAX_NPY_HEADER:
                raise ValueError(f"{name} has {size} bytes where its header implies {implied}")

    def read(self, expected: Expected) -> dict[str, np.ndarray]:
        """All arrays, by name.

        expected: (types, shape) of each by name; shape None: any. ValueError, before anything is
        read, unless these very arrays are there.
        """
        for name in expected.keys() ^ self.arrays.keys():
            there = "there is an unknown array" if name in self.arrays else "there is no array"
            raise ValueError(f"{there} {name!r}")
        for name, (dtype, shape) in self.arrays.items():
            types, wanted = expected[name]
            if dtype not in types or shape != (shape if wanted is None else wanted):
                names = " or ".join(np.dtype(x).name for x in types)
                wanted = "of any shape" if wanted is None else wanted
                got = f"{np.dtype(dtype).name} {shape}"
                raise ValueError(f"{name} must be {names} {wanted}, got {got}")
        return {name: self._read_array(name, *x) for name, x in self.arrays.items()}

    def _check_sizes(self, size: int) -> None:
        """ValueError for members that would unpack to more than the file of this size."""
        members = self._members.infolist()
        for x in members:
            if x.compress_type != zipfile.ZIP_STORED or x.file_size != x.compress_size:
                raise ValueError(f"{x.filename[:80]} is compressed")
            if not 0 <= x.header_offset < size:
                raise ValueError(f"{x.filename[:80]} begins beyond its end")
        if min((x.header_offset for x in members), default=0):
            raise ValueError("there is something before it")
        names = {x.filename for x in members}
        if len(names) < len(members) or sum(x.file_size for x in members) > size:
            raise ValueError("its members overlap")
        if _HEADER not in names:
            raise ValueError(f"it has no {_HEADER}")
        if (got := self._members.getinfo(_HEADER).file_size) > MAX_HEADER:
            raise ValueError(f"its header has {got} bytes, more than {MAX_HEADER}")

    def _read_array(self, name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        with self._members.open(_member(name)) as file:
            header = npy.read_magic(file), *npy.read_array_header_1_0(file, _MAX_NPY_HEADER)
            if header != ((1, 0), shape, False, np.dtype(dtype)):
                raise ValueError(f"{name} has another header than the file's")
            x = np.empty(shape, dtype)
            data = x.reshape(-1).view(np.uint8).data
            for first in range(0, len(data), _CHUNK):
                part = data[first : first + _CHUNK]
                part[:] = file.read(len(part))  # ValueError where fewer come
            if file.read(1):  # at the end zipfile compares the checksum
                raise ValueError(f"{name} is followed by something else")
        return x.astype(x.dtype.newbyteorder("="), copy=False)


def _json(header: dict[str, Any]) -> bytes:
    return json.dumps(header).encode()


def _member(name: str) -> str:
    return f"{name}.npy"


def _data_size(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape, start=int(dtype[2:]))


def _declared(name: str, declared: Any) -> tuple[str, tuple[int, ...]]:
    """Type and shape as a header gives them: ValueError for what no array may have."""
    lists = isinstance(declared, list) and len(declared) == 2 and isinstance(declared[1], list)
    if not lists:
        raise ValueError(f"{name} must be [type, shape], got {declared!r:.80}")
    dtype, shape = declared
    if dtype not in TYPES:
        raise ValueError(f"{name} must be of one of {', '.join(TYPES)}, got {dtype!r}")
    if len(shape) > _MAX_DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"{name} must have a shape of integers >= 0, got {shape!r:.80}")
    return dtype, tuple(shape)


# --- Archives in memory -------------------------------------------------------------------------


class _Data(io.BytesIO):
    """What `from_bytes` is given, which messages name by its argument."""


class InBytes:
    """`to_bytes` and `from_bytes` of a class that has `save` and `load`."""

    @abc.abstractmethod
    def save(self, file: File) -> None: ...

    @classmethod
    @abc.abstractmethod
    def load(cls, file: File) -> Self: ...

    def to_bytes(self) -> bytes:
        """The bytes of the file that `save` writes: to send elsewhere, without pickle."""
        file = io.BytesIO()
        self.save(file)
        return file.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview, **options: Any) -> Self:
        """What `to_bytes` was called on; checked as `load` checks files, ValueError for others.

        options: those of `load`, as the seed of a sampler's draws.
        """
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise TypeError(f"data must be bytes, got {type(data).__name__}")
        return cls.load(_Data(data), **options)


# --- Hash families in archives ------------------------------------------------------------------


def split_family(hasher: HashFamily) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A hash family as a dict for the header and one of arrays, their names with "hasher."."""
    entries = hasher.to_arrays()
    arrays = {f"hasher.{name}": x for name, x in entries.items() if x.ndim}
    return {name: x.item() for name, x in entries.items() if not x.ndim}, arrays


def family_arrays(settings: dict[str, Any]) -> Expected:
    """What `Archive.read` is to expect of the family of which these are the header's settings."""
    if not isinstance(settings, dict):
        raise ValueError(f"hasher must be a dict, got {settings!r:.80}")
    name = settings["family"]
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(sorted(FAMILIES))}, got {name!r:.80}")
    family = FAMILIES[name]
    return {f"hasher.{name}": (TYPES, None) for name in family.array_names(settings)}


def join_family(settings: dict[str, Any], arrays: dict[str, np.ndarray]) -> HashFamily:
    """The family of these settings, with its arrays among others. ValueError where it is none."""
    named = {name: x for name, x in arrays.items() if name.startswith("hasher.")}
    return hashing.from_arrays(settings | {k.removeprefix("hasher."): x for k, x in named.items()})
