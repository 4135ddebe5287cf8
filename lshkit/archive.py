"""Files of lshkit: .npz archives that numpy opens, read by comparison instead of by parsing.

Members are stored uncompressed: "header.json" (the kind of object, the version of its contents, the
type and shape of every array, and the object's own settings), then one .npy member for each array.
Dates are fixed and sizes are always of 64 bits, so the header implies every other byte of the file
except the arrays' data and the checksums. `opened` computes those bytes and compares: the header
must match the size of the file before any array is allocated, and no member can be larger than the
file, overlap another or be described in two ways.
"""

from __future__ import annotations

import abc
import contextlib
import io
import json
import os
import secrets
import struct
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

import numpy as np

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
_CHUNK = 2**20
_MAX_DIMENSIONS = 8
_DATE = 1 << 5 | 1  # 1 January 1980
_IN_EXTRA = 2**32 - 1  # a size that stands in the field of 64 bits


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
    members: list[tuple[str, bytes, bytes | memoryview]] = [(_HEADER, b"", text)]
    for name, x in arrays.items():
        data = x.reshape(-1).view(np.uint8).data
        members.append((f"{name}.npy", _npy_header(x.dtype.str, x.shape), data))
    directory, offset = b"", 0
    for name, start, data in members:
        checksum = zlib.crc32(data, zlib.crc32(start))
        size = len(start) + len(data)
        local = _local_entry(name, checksum, size)
        for part in (local, start, data):
            file.write(part)
        directory += _directory_entry(name, checksum, size, offset)
        offset += len(local) + size
    file.write(directory + _end(len(members), len(directory), offset))


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
    file = open(part, "xb", opener=private)
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

    file: a path, to which .npz is added where there is none of that name, or a binary file object.
    ValueError for any other file, and in the place of what is raised in the context: its message
    names the file.
    """
    with contextlib.ExitStack() as stack:
        name = "the file object"
        source: Any = file
        if (path := _path(file, "read")) is not None:
            name = path
            if not os.path.exists(name) and os.path.exists(_ending(name)):
                name = _ending(name)
            source = stack.enter_context(open(name, "rb"))
        try:
            yield Archive(source, kind, version)
        except (OSError, MemoryError):
            raise
        except Exception as error:  # contents that are none are met in many ways
            what = f"{error} is missing" if isinstance(error, KeyError) else error
            raise ValueError(f"{name} is no whole file of {kind}: {what}") from error


class Archive:
    """header: what `write` was given. arrays: (type, shape) of each that is there, by name."""

    def __init__(self, file: BinaryIO, kind: str, version: int) -> None:
        self._file, start = file, file.tell()
        file.seek(0, os.SEEK_END)
        size = file.tell() - start
        file.seek(start)
        text, self._directory, self._offset = self._read_header()
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
        self.arrays = {name: _declared(name, *x) for name, x in header["arrays"].items()}
        implied = self._implied_size()
        if size != implied:
            raise ValueError(f"it has {size} bytes where its header implies {implied}")

    def read(self, expected: Expected) -> dict[str, np.ndarray]:
        """All arrays, by name. Once, as the file is read in order.

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
        arrays = {name: self._read_array(name, *x) for name, x in self.arrays.items()}
        directory = self._directory + _end(1 + len(arrays), len(self._directory), self._offset)
        if self._take(len(directory)) != directory:
            raise ValueError("its directory is damaged")
        return arrays

    def _read_header(self) -> tuple[bytes, bytes, int]:
        entry = self._take(len(_local_entry(_HEADER, 0, 0)))
        checksum, size = _checksum(entry), int.from_bytes(entry[-8:], "little")
        if entry != _local_entry(_HEADER, checksum, size):
            raise ValueError("it does not begin as one")
        if size > MAX_HEADER:
            raise ValueError(f"its header has {size} bytes, more than {MAX_HEADER}")
        text = self._take(size)
        if zlib.crc32(text) != checksum:
            raise ValueError("its header is damaged")
        return text, _directory_entry(_HEADER, checksum, size, 0), len(entry) + size

    def _implied_size(self) -> int:
        size, directory = self._offset, len(self._directory)
        for name, (dtype, shape) in self.arrays.items():
            name = f"{name}.npy"
            size += len(_local_entry(name, 0, 0)) + len(_npy_header(dtype, shape))
            size += _data_size(dtype, shape)
            directory += len(_directory_entry(name, 0, 0, 0))
        return size + directory + len(_end(0, 0, 0))

    def _read_array(self, name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        start = _npy_header(dtype, shape)
        member, size = f"{name}.npy", len(start) + _data_size(dtype, shape)
        entry = self._take(len(_local_entry(member, 0, 0)))
        checksum = _checksum(entry)
        if entry != _local_entry(member, checksum, size) or self._take(len(start)) != start:
            raise ValueError(f"{name} has another header than the file's")
        x = np.empty(shape, dtype)
        data, computed = x.reshape(-1).view(np.uint8), zlib.crc32(start)
        for first in range(0, len(data), _CHUNK):
            part = data[first : first + _CHUNK]
            chunk = self._take(len(part))
            part[:] = np.frombuffer(chunk, np.uint8)
            computed = zlib.crc32(chunk, computed)
        if computed != checksum:
            raise ValueError(f"{name} is damaged: its checksum differs")
        self._directory += _directory_entry(member, checksum, size, self._offset)
        self._offset += len(entry) + size
        return x.astype(x.dtype.newbyteorder("="), copy=False)

    def _take(self, size: int) -> bytes:
        data = self._file.read(size)
        while data and len(data) < size and (more := self._file.read(size - len(data))):
            data += more
        if len(data) != size:
            raise ValueError("it is cut short")
        return data


def _declared(name: str, dtype: str, shape: list[int]) -> tuple[str, tuple[int, ...]]:
    """Type and shape as a header gives them: ValueError for what no array may have."""
    if dtype not in TYPES:
        raise ValueError(f"{name} must be of one of {', '.join(TYPES)}, got {dtype!r}")
    if len(shape) > _MAX_DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"{name} must have a shape of integers >= 0, got {shape!r:.80}")
    return dtype, tuple(shape)


# --- Archives in memory -------------------------------------------------------------------------


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
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Self:
        """What `to_bytes` was called on; checked as `load` checks files, ValueError for others."""
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise TypeError(f"data must be bytes, got {type(data).__name__}")
        return cls.load(io.BytesIO(data))


# --- The bytes of an archive --------------------------------------------------------------------


def _json(header: dict[str, Any]) -> bytes:
    return json.dumps(header).encode()


def _data_size(dtype: str, shape: tuple[int, ...]) -> int:
    size = int(dtype[2:])
    for n in shape:
        size *= n
    return size


def _npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape!r}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text


def _local_entry(name: str, checksum: int, size: int) -> bytes:
    """What stands before a member (APPNOTE.TXT of PKWARE, 4.3.7 and 4.5.3)."""
    name, extra = name.encode(), struct.pack("<HHQQ", 1, 16, size, size)
    numbers = 45, 0, 0, 0, _DATE, checksum, _IN_EXTRA, _IN_EXTRA, len(name), len(extra)
    return struct.pack("<4s5H3I2H", b"PK\3\4", *numbers) + name + extra


def _checksum(entry: bytes) -> int:
    return int.from_bytes(entry[14:18], "little")


def _directory_entry(name: str, checksum: int, size: int, offset: int) -> bytes:
    """What the directory at the end says of a member (4.3.12)."""
    name, extra = name.encode(), struct.pack("<HHQQQ", 1, 24, size, size, offset)
    numbers = 45, 45, 0, 0, 0, _DATE, checksum, _IN_EXTRA, _IN_EXTRA, len(name), len(extra)
    return struct.pack("<4s6H3I5H2I", b"PK\1\2", *numbers, 0, 0, 0, 0, _IN_EXTRA) + name + extra


def _end(count: int, size: int, offset: int) -> bytes:
    """After a directory of so many entries and bytes at offset (4.3.14 to 4.3.16)."""
    numbers = 44, 45, 45, 0, 0, count, count, size, offset
    return (
        struct.pack("<4sQ2H2I4Q", b"PK\6\6", *numbers)
        + struct.pack("<4sIQI", b"PK\6\7", 0, offset + size, 1)
        + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, _IN_EXTRA, _IN_EXTRA, 0)
    )


# --- Hash families in archives ------------------------------------------------------------------


def split_family(hasher: HashFamily) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A hash family as a dict for the header and one of arrays, their names with "hasher."."""
    entries = hasher.to_arrays()
    arrays = {f"hasher.{name}": x for name, x in entries.items() if x.ndim}
    return {name: x.item() for name, x in entries.items() if not x.ndim}, arrays


def family_arrays(settings: dict[str, Any]) -> Expected:
    """What `Archive.read` is to expect of the family of which these are the header's settings."""
    family = FAMILIES.get(settings["family"])
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise ValueError(f"family must be one of {known}, got {settings['family']!r}")
    return {f"hasher.{name}": (TYPES, None) for name in family.array_names(settings)}


def join_family(settings: dict[str, Any], arrays: dict[str, np.ndarray]) -> HashFamily:
    """The family of these settings, with its arrays among others. ValueError where it is none."""
    named = {name: x for name, x in arrays.items() if name.startswith("hasher.")}
    return hashing.from_arrays(settings | {k.removeprefix("hasher."): x for k, x in named.items()})
