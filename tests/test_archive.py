"""lshkit.archive: what was written comes back; hostile files are a ValueError at little cost."""

import gzip
import io
import json
import mmap
import os
import pathlib
import stat
import struct
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from cases.archives import attempt, contents, with_header
from hypothesis import given, settings
from hypothesis import strategies as st

from lshkit import archive

ARRAYS = {
    "x": np.arange(12.0).reshape(3, 4),
    "codes": np.arange(5, dtype=np.uint8),
    "none": np.zeros((0, 2), np.float32),
}
HEADER = {"n": 3, "options": {"width": 0.1, "name": "é"}}
EXPECTED = {"x": (("<f8",), (3, 4)), "codes": (("|u1",), (5,)), "none": (("<f4",), (0, 2))}


def written(arrays=ARRAYS, header=HEADER, kind="Thing", version=1):
    file = io.BytesIO()
    archive.write(file, kind, version, header, arrays)
    file.seek(0)
    return file


def load(file, expected=EXPECTED):
    with archive.opened(file, "Thing", 1) as stored:
        return stored.header, stored.read(expected)


def refused(file, match):
    """ValueError before more is allocated than the small files of these tests hold."""
    file = io.BytesIO(file) if isinstance(file, bytes) else file
    error = attempt(load, file, 2**18)
    assert isinstance(error, ValueError) and match in str(error), error


def same(got):
    header, arrays = got
    assert {name: header[name] for name in HEADER} == HEADER and arrays.keys() == ARRAYS.keys()
    for name, x in ARRAYS.items():
        assert arrays[name].dtype == x.dtype and np.array_equal(arrays[name], x)
    return True


WHOLE = written().getvalue()


# --- What was written ---------------------------------------------------------------------------


def test_an_archive_comes_back():
    assert same(load(written()))
    assert written().getvalue() == WHOLE  # no dates, no random names


def test_numpy_and_zipfile_open_archives():
    header, arrays = contents(written())
    assert same((header, arrays))
    with zipfile.ZipFile(written()) as opened:
        assert opened.testzip() is None
        assert opened.namelist() == ["header.json", "x.npy", "codes.npy", "none.npy"]


def test_arrays_of_any_layout_come_back():
    x = ARRAYS["x"]
    for other in (np.asfortranarray(x), x.astype(">f8"), np.repeat(x, 2, axis=1)[:, ::2]):
        assert written(ARRAYS | {"x": other}).getvalue() == WHOLE


@pytest.mark.parametrize("x", [np.array([None]), np.array(["a"]), np.zeros(2, "f4,f4")])
def test_objects_are_not_written(x):
    with pytest.raises(TypeError, match="an archive holds arrays of"):
        written({"x": x})


def test_file_objects_may_have_something_before():
    file = io.BytesIO(b"before" + WHOLE)
    file.seek(6)
    assert same(load(file))
    file.seek(0)
    refused(file, "there is something before it")
    refused(WHOLE + WHOLE, "there is something before it")  # not the second one


class OnlyWrites:
    def __init__(self):
        self.data = b""

    def write(self, data):
        self.data += data  # and returns None


class OnlyReads:
    def __init__(self, data):
        self.read = io.BytesIO(data).read


def test_file_objects_of_few_methods(tmp_path):
    """Pipes, compressed files, files that are appended to: no place is gone back to."""
    path, sink = tmp_path / "a", OnlyWrites()
    archive.write(sink, "Thing", 1, HEADER, ARRAYS)
    assert sink.data == WHOLE and same(load(OnlyReads(WHOLE)))
    path.write_bytes(b"before")
    with open(path, "ab") as file:
        archive.write(file, "Thing", 1, HEADER, ARRAYS)
    assert path.read_bytes() == b"before" + WHOLE
    with gzip.open(path, "wb") as file:
        archive.write(file, "Thing", 1, HEADER, ARRAYS)
    with gzip.open(path) as file:
        assert same(load(file))
    path.write_bytes(WHOLE)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert same(load(mapped))


@pytest.mark.parametrize("name", ["a.npz", "a", "3.5"])
@pytest.mark.parametrize("kind", [pathlib.Path, str, os.fsencode])
def test_names(tmp_path, name, kind):
    path = kind(tmp_path / name) if kind is not str else str(tmp_path / name)
    archive.write(path, "Thing", 1, HEADER, ARRAYS)
    (stored,) = tmp_path.iterdir()
    assert stored.name == (name if name.endswith(".npz") else f"{name}.npz")
    assert same(load(path)) and same(load(stored))


@pytest.mark.parametrize("file", [None, 3, io.StringIO()])
def test_neither_a_path_nor_a_binary_file(file):
    for call in (load, lambda x: archive.write(x, "Thing", 1, HEADER, ARRAYS)):
        with pytest.raises(TypeError, match="file must be a path or a binary file object, got"):
            call(file)


@pytest.mark.parametrize("name", ["", ".", "..", "folder/"])
def test_a_path_without_a_name(name, tmp_path, monkeypatch):
    """No hidden file ".npz" is written."""
    monkeypatch.chdir(tmp_path)
    for call in (load, lambda x: archive.write(x, "Thing", 1, HEADER, ARRAYS)):
        with pytest.raises(ValueError, match=f"file must be the path of a file, got '{name}'"):
            call(name)
    assert not any(tmp_path.iterdir())


# --- Files that are refused ---------------------------------------------------------------------


def test_other_files(tmp_path):
    for data in (b"", b"P", b"text" * 100, WHOLE[:50]):
        refused(data, "the file object is no whole file of Thing")
    for save in (np.savez, np.savez_compressed):
        file = io.BytesIO()
        save(file, **ARRAYS)
        refused(file.getvalue(), "")
    refused(written(kind="LSHSampler"), "it holds a LSHSampler")
    refused(written(version=2), "it has version 2, this lshkit reads up to 1: update it")
    refused(written(version=0), "version must be an integer >= 1, got 0")
    refused(written(version=True), "version must be an integer >= 1, got True")
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "missing")
    with pytest.raises(IsADirectoryError):
        load(tmp_path)
    (tmp_path / "bad.npz").write_bytes(WHOLE[:-1])
    with pytest.raises(
        ValueError, match="bad.npz is no whole file of Thing: File is not a zip file"
    ):
        load(tmp_path / "bad")


def test_files_that_are_cut_short():
    for size in range(len(WHOLE)):
        refused(WHOLE[:size], "")


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (["<f8", [10**12, 10**6]], "implies 80000000000"),
        (["<f8", [2**62, 4]], "implies"),
        (["<f8", [10**4000, 4]], ""),
        (["<f8", [0, 2**63]], "x must be float64 (3, 4), got float64 (0,"),
        (["<f8", [-3, -4]], "integers >= 0, got [-3, -4]"),
        (["<f8", [3, 4.0]], "integers >= 0"),
        (["<f8", [True, 12]], "integers >= 0"),
        (["<f8", [3, "4"]], "integers >= 0"),
        (["<f8", [1] * 9], "integers >= 0"),
        (["<f8", 12], ""),
        (["<f8"], ""),
        (["<f8", [4, 3]], "x has another header than the file's"),
        (["<i8", [3, 4]], "x must be float64 (3, 4), got int64 (3, 4)"),
        ([">f8", [3, 4]], "x must be of one of"),
        (["|O", [3, 4]], "x must be of one of"),
        (["<U2", [3, 4]], "x must be of one of"),
        (["<f8,<f8", [3, 2]], "x must be of one of"),
        ([["<f8"], [3, 4]], "x must be of one of"),
        (None, ""),
    ],
)
def test_declared_types_and_shapes(declared, message):
    header, _ = contents(written())
    header["arrays"]["x"] = declared
    text = json.dumps(header)
    expected = EXPECTED
    if message.startswith("x has another"):
        expected = EXPECTED | {"x": (("<f8",), (4, 3))}
    error = attempt(lambda file: load(file, expected), with_header(written(), text.encode()), 2**20)
    assert isinstance(error, ValueError) and message in str(error), error


def test_names_of_arrays():
    refused(written(ARRAYS | {"more": np.zeros(3)}), "there is an unknown array 'more'")
    refused(written({"x": ARRAYS["x"]}), "there is no array")
    refused(written(ARRAYS | {"x": np.zeros((4, 3))}), "x must be float64 (3, 4), got float64 (4,")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"3",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b"[" * 10**5,
        b'{"kind": 3, "version": 1}',
        b'{"kind": "Thing"}',
        b'{"kind": "Thing", "version": 1}',
        b'{"kind": "Thing", "version": 1, "arrays": 3}',
        b'{"kind": "Thing",  "version": 1, "arrays": {}}',  # not as it was written
        b'{"kind": "Thing", "version": 1, "arrays": {"\\ud800": ["<f8", []]}}',
    ],
)
def test_headers(text):
    error = attempt(load, with_header(written(), text), 2**22)  # lists in lists, until it gives up
    assert isinstance(error, ValueError), error


def test_a_header_that_names_an_array_twice():
    text = json.dumps(contents(written())[0]).replace('"codes"', '"x"').encode()
    refused(with_header(written(), text), "its header is not as it was written")


def test_long_headers():
    with pytest.raises(ValueError, match="a header must be of 1048576 bytes at most"):
        written(header={"x": "x" * 2**20})
    error = attempt(load, with_header(written(), b" " * 2**20 + b" "), 2**21)  # twice its size
    assert isinstance(error, ValueError) and "more than 1048576" in str(error)


def zipped(members, compression=zipfile.ZIP_STORED):
    """An archive of (name, bytes) pairs."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as target:
        for name, data in members:
            target.writestr(name, data)
    return file.getvalue()


with zipfile.ZipFile(written()) as whole:
    MEMBERS = {name: whole.read(name) for name in whole.namelist()}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"False", b"True ", "x has another header"),
        (b"<f8", b">f8", "x has another header"),
        (b"<f8", b"|O'", ""),
        (b"(3, 4)", b"(9, 9)", "x has another header"),
        (b"\x01\x00", b"\x02\x00", "x has another header"),
        (b"\x93NUMPY", b"\x93numpy", ""),
        (b"\n", b"\n more", "x is followed by something else"),
        (b"\n", b"\n" + b" " * 2000, "x has 2224 bytes where its header implies 96"),
    ],
)
def test_members_that_disagree_with_the_header(old, new, message):
    x = MEMBERS["x.npy"]
    assert x.count(old) == 1 and same(load(io.BytesIO(zipped(MEMBERS.items()))))
    refused(zipped((MEMBERS | {"x.npy": x.replace(old, new)}).items()), message)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_other_members():
    refused(zipped([*MEMBERS.items(), ("x.npy", MEMBERS["x.npy"])]), "its members overlap")
    refused(zipped([*MEMBERS.items(), ("y.npy", b"")]), "other members than its header names")
    refused(zipped(list(MEMBERS.items())[:-1]), "other members than its header names")
    refused(zipped(list(MEMBERS.items())[1:]), "it has no header.json")


@pytest.mark.parametrize("text", [b"-" * 9900 + b"1", b"~" * 9900 + b"1", b"1" + b"**1" * 3300])
def test_headers_of_arrays_that_nest(text):
    """They would take the parser's stack, or its memory, if they were parsed."""
    x = np.zeros(2**12)
    header, _ = contents(written({"x": x}))
    data = b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text
    members = [("header.json", json.dumps(header)), ("x.npy", data.ljust(128 + x.nbytes, b"\0"))]
    error = attempt(
        lambda file: load(file, {"x": (("<f8",), None)}), io.BytesIO(zipped(members)), 2**19
    )
    assert isinstance(error, ValueError) and "Header info length" in str(error), error


def test_damage():
    """Of each member the checksum is compared, and of each name and place what is said twice."""
    for name in MEMBERS:
        at = WHOLE.index(MEMBERS[name]) + len(MEMBERS[name]) - 1
        refused(WHOLE[:at] + bytes([WHOLE[at] ^ 1]) + WHOLE[at + 1 :], "Bad CRC-32")
    refused(WHOLE.replace(b"codes.npy", b"sedoc.npy", 1), "")
    directory = WHOLE.index(b"PK\1\2")
    for place, size in (("sizes", 20), ("offsets", 42)):
        for number in (0, 2**20, 2**32 - 1):
            changed = bytearray(WHOLE)
            changed[directory + size : directory + size + 4] = struct.pack("<I", number)
            if changed != WHOLE:
                refused(bytes(changed), "")
            else:
                assert place == "offsets"  # the first member's is 0


def test_a_reason_without_words():
    """A field that seems longer than the file: the end comes as an error that has no text.

    Python from 3.11.8, 3.12.2 and 3.13 on sees first that it reaches into others.
    """
    damaged = WHOLE[:29] + bytes([WHOLE[29] ^ 128]) + WHOLE[30:]
    with pytest.raises(ValueError, match="no whole file of Thing: (EOFError|Overlapped entries)"):
        load(io.BytesIO(damaged))


def test_compressed_members_are_not_unpacked():
    """4 KB that would be 4 MB: the same members as `write` makes, deflated."""
    header, _ = contents(written())
    header["arrays"] = {"x": ["<f8", [2**19]]}
    array = io.BytesIO()
    np.save(array, np.zeros(2**19))
    text = json.dumps(header)
    members = [("header.json", text), ("x.npy", array.getvalue())]
    deflated = zipped(members, zipfile.ZIP_DEFLATED)
    assert len(deflated) < 5000
    refused(deflated, "header.json is compressed")
    refused(zipped([members[0], ("x.npy", array.getvalue()[:128])]), "implies 4194304")


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_mutations(data):
    """A file with other bytes gives equal contents or a ValueError, in memory of its size."""
    mutated = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 3))):
        mutated = mutated or bytearray(1)
        at = data.draw(st.integers(0, len(mutated) - 1))
        kind = data.draw(st.sampled_from(["set", "flip", "cut", "insert", "copy", "end"]))
        if kind == "set":
            number = data.draw(st.sampled_from([0, 1, 0xFF, 0x7F, 0x80]) | st.integers(0, 255))
            size = data.draw(st.sampled_from([1, 2, 4, 8]))
            mutated[at : at + size] = bytes([number]) * size
        elif kind == "flip":
            mutated[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "cut":
            del mutated[at : at + data.draw(st.integers(1, 100))]
        elif kind == "insert":
            mutated[at:at] = data.draw(st.binary(min_size=1, max_size=20))
        elif kind == "copy":
            other = data.draw(st.integers(0, len(mutated) - 1))
            mutated[at : at + 30] = mutated[other : other + 30]
        else:
            mutated[at:] = b"\0"
    got = attempt(load, io.BytesIO(bytes(mutated)), 2**18)
    assert isinstance(got, ValueError) or same(got)


# --- Writing to a path --------------------------------------------------------------------------


def test_links_are_not_followed(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path = tmp_path / "a.npz"
    monkeypatch.setattr(archive.secrets, "token_hex", lambda n: "0" * 2 * n)
    for guess in (f"{path}.part", tmp_path / f".lshkit-{'0' * 16}.part"):
        os.symlink(victim, guess)
    with pytest.raises(FileExistsError):
        archive.write(path, "Thing", 1, HEADER, ARRAYS)
    assert sorted(x.is_symlink() for x in tmp_path.iterdir()) == [False, True, True]
    monkeypatch.undo()
    path.symlink_to(victim)
    archive.write(path, "Thing", 1, HEADER, ARRAYS)
    assert same(load(path)) and not path.is_symlink()
    assert victim.read_text() == "precious"


def test_a_folder_that_is_not_there(tmp_path):
    path = tmp_path / "none" / "x"
    with pytest.raises(FileNotFoundError) as raised:
        archive.write(path, "Thing", 1, HEADER, ARRAYS)
    assert raised.value.filename == f"{path}.npz"


def test_only_files_are_replaced(tmp_path):
    (tmp_path / "folder.npz").mkdir()
    os.mkfifo(tmp_path / "pipe.npz")
    for name in ("folder", "pipe"):
        with pytest.raises(OSError, match=f"{name}.npz is no regular file"):
            archive.write(tmp_path / name, "Thing", 1, HEADER, ARRAYS)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["folder.npz", "pipe.npz"]
    assert stat.S_ISFIFO((tmp_path / "pipe.npz").stat().st_mode)


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_permissions_are_those_of_any_new_file(tmp_path, mask):
    before = os.umask(mask)
    try:
        archive.write(tmp_path / "a", "Thing", 1, HEADER, ARRAYS)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.npz").stat().st_mode) == 0o666 & ~mask


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_permissions_of_a_file_that_is_replaced_stay(tmp_path, mode):
    path = tmp_path / "a.npz"
    archive.write(path, "Thing", 1, HEADER, ARRAYS)
    path.chmod(mode)
    archive.write(path, "Thing", 1, HEADER, ARRAYS)
    assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch, call, error):
    path = tmp_path / "a.npz"
    archive.write(path, "Thing", 1, HEADER, ARRAYS)

    def fail(*args):
        raise error

    monkeypatch.setattr(archive.os, call, fail)
    with pytest.raises(type(error)):
        archive.write(path, "Thing", 1, {}, {})
    assert path.read_bytes() == WHOLE and list(tmp_path.iterdir()) == [path]


HEAD = "import os, resource, sys\nimport numpy as np\nfrom lshkit import archive\n"


def run(script, *arguments):
    command = [sys.executable, "-c", HEAD + script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_disk_that_is_full(tmp_path):
    path = tmp_path / "a.npz"
    archive.write(path, "Thing", 1, HEADER, ARRAYS)
    done = run(
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, 10**5))\n"
        "archive.write(sys.argv[1], 'Thing', 1, {}, {'x': np.zeros(10**6)})",
        path,
    )
    assert "OSError: [Errno 27] File too large" in done.stderr
    assert path.read_bytes() == WHOLE and list(tmp_path.iterdir()) == [path]


def test_a_folder_that_may_not_be_written(tmp_path):
    tmp_path.chmod(0o555)
    try:
        done = run(
            "folder = os.open(sys.argv[1], os.O_RDONLY)\nos.fchdir(folder)\n"
            "if os.getuid() == 0:\n    os.setuid(65534)\n"
            "archive.write('a', 'Thing', 1, {}, {'x': np.zeros(10)})",
            tmp_path,
        )
    finally:
        tmp_path.chmod(0o755)
    assert "PermissionError" in done.stderr and not list(tmp_path.iterdir())


WRITER = """
x = np.full(50_000, float(sys.argv[2]))
for _ in range(60):
    archive.write(sys.argv[1], "Thing", 1, {}, {"x": x})
"""


def test_two_writers_at_once(tmp_path):
    """Whenever it is read, the file is that of one of them, whole."""
    path, any_shape = tmp_path / "a.npz", {"x": (("<f8",), None)}
    archive.write(path, "Thing", 1, {}, {"x": np.zeros(50_000)})
    writers = [
        subprocess.Popen([sys.executable, "-c", HEAD + WRITER, str(path), str(number)])
        for number in (1, 2)
    ]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        x = load(path, any_shape)[1]["x"]
        assert len(x) == 50_000 and (x == x[0]).all()
        seen.add(x[0])
    assert [writer.returncode for writer in writers] == [0, 0] and seen & {1.0, 2.0}
    assert list(tmp_path.iterdir()) == [path]
