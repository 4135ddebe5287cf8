"""Where the package's modules come from: sources that are not compiled hide an installed copy."""

import importlib.util
import pathlib
import sys
from importlib.machinery import PathFinder


def folders(own: list[str], version: str) -> list[str]:
    """`__path__` of lshkit: `own` where it has the compiled module, or an installed copy's.

    All modules then come from there, as in a checkout after `pip install .`, where Python finds
    the source folder first.
    """
    if importlib.util.find_spec("lshkit._C") is not None:  # an editable install's finder too
        return own
    for entry in sys.path:
        folder = pathlib.Path(entry, "lshkit")
        if PathFinder.find_spec("lshkit._C", [str(folder)]) is None:
            continue
        if f'__version__ = "{version}"' not in (folder / "__init__.py").read_text():
            continue
        return [str(folder)]
    raise ImportError(
        f"lshkit {version} is not compiled for {sys.executable}: pip install . "
        f"(or an editable install: see CONTRIBUTING.md) in {pathlib.Path(own[0]).parent}"
    )
