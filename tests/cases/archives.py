"""Archives with other contents, whole otherwise; what a load may raise and allocate."""

import io
import json
import tracemalloc

import numpy as np
from hypothesis import strategies as st

from lshkit import archive


def contents(source):
    """Header and arrays of an archive, as numpy reads them."""
    with np.load(source) as stored:
        header = json.loads(stored["header.json"])
        return header, {name: stored[name] for name in header["arrays"]}


def changed(source, edit):
    """A file object with the archive that `edit(header, arrays)` has changed."""
    header, arrays = contents(source)
    del header["arrays"]
    edit(header, arrays)
    target = io.BytesIO()
    archive.write(target, header.pop("kind", None), header.pop("version", None), header, arrays)
    target.seek(0)
    return target


def with_header(source, text):
    """A file object with the archive's arrays under another header, whatever that says."""
    target = io.BytesIO()
    archive._write(target, text, contents(source)[1])
    target.seek(0)
    return target


def attempt(load, file, limit):
    """What load gives for a file, or the ValueError; it allocates less than limit bytes."""

    def loaded():
        try:
            return load(file)
        except ValueError as error:
            return error

    loaded()  # what this imports, for an error's message too, is not counted
    for _ in range(3):  # what other threads allocate meanwhile is counted too, once 300 KB
        file.seek(0)
        tracemalloc.start()
        try:
            got = loaded()
            if tracemalloc.get_traced_memory()[1] < limit:
                return got
        finally:
            tracemalloc.stop()
    raise AssertionError(f"{limit} bytes and more were allocated")


NUMBERS = st.sampled_from([-1, 0, 1, 2, 16, 64, 255, 4096, 65535, 10**6, 2**31, 2**63, 10**30])
ANYTHING = NUMBERS | st.floats() | st.none() | st.booleans() | st.text(max_size=3)


def put_anything(data, header):
    """Something else in the place of one value in a header, or of its entries' names."""
    of = header
    while True:
        key = data.draw(st.sampled_from(sorted(of)) if isinstance(of, dict) else st.just(0))
        if (
            not isinstance(of[key], (dict, list))
            or not of[key]
            or data.draw(st.integers(0, 9)) == 0
        ):
            break
        of = of[key]
    if isinstance(of, dict) and data.draw(st.integers(0, 9)) == 0:
        of[data.draw(st.text(max_size=5))] = of.pop(key)
    else:
        of[key] = data.draw(ANYTHING | st.lists(ANYTHING, max_size=3) | st.just({}))
