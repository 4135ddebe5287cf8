"""Runs the Python code of the documentation's pages and writes what it prints below each block.

    python docs/outputs.py [PAGE ...]        (all pages without arguments)

A page's blocks run top to bottom in one namespace. Where a ```text block follows a block of code it
is what the code prints, which tests/docs/test_docs.py compares; make an empty one for new code.
"""

import contextlib
import io
import os
import pathlib
import re
import sys
import tempfile

DOCS = pathlib.Path(__file__).resolve().parent
FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(text):
    """Of each Python block: its code, where it ends, what stands as printed below it or None, and
    where that ends."""
    found = list(FENCE.finditer(text))
    for block, after in zip(found, [*found, None][1:], strict=True):
        if block[1] != "python":
            continue
        # Code starts at its line of the page, so that a traceback points there.
        code = "\n" * text.count("\n", 0, block.start(2)) + block[2]
        if after and after[1] == "text" and not text[block.end() : after.start()].strip():
            yield code, block.end(), after[2], after.end()
        else:
            yield code, block.end(), None, block.end()


def run(code, page, namespace):
    """What it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, str(page), "exec"), namespace)
    return printed.getvalue()


def update(page):
    text, updated, at = page.read_text(), [], 0
    namespace = {"__name__": "__main__"}
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    for code, end, wanted, end_of_printed in blocks(text):
        printed = run(code, page, namespace)
        if wanted is not None and printed != wanted:
            updated += [text[at:end], f"\n\n```text\n{printed}```"]
            at = end_of_printed
    page.write_text("".join([*updated, text[at:]]))


if __name__ == "__main__":
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401
    pages = [pathlib.Path(page).resolve() for page in sys.argv[1:]] or sorted(DOCS.rglob("*.md"))
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        for page in pages:
            print(page.relative_to(DOCS.parent), flush=True)
            update(page)
