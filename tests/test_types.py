"""Types: every public name has them, and mypy agrees with the documentation's code.

That the package itself is right, and what calls return (tests/cases/typed_calls.py), is checked by
`mypy` alone, which CI runs.
"""

import ast
import importlib
import importlib.util
import inspect
import pathlib
import re
import subprocess
import sys

import pytest
from cases.commands import DOCS, MODULES, ROOT, needs_packages_of

import lshkit
from lshkit import _C

PACKAGE = pathlib.Path(lshkit.__file__).parent


def test_the_package_is_marked_as_typed():
    assert (PACKAGE / "py.typed").exists()


def test_type_checkers_see_the_lazy_names():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = (n for n in tree.body if ast.unparse(getattr(n, "test", n)) == "TYPE_CHECKING")
    seen = {alias.asname: (node.module, alias.name) for node in block.body for alias in node.names}
    names = {name: (module, name) for name, module in lshkit._NAMES.items()}
    assert seen == names | {name: (None, name) for name in lshkit._SUBMODULES}


def test_the_compiled_module_has_what_is_asked_of_it():
    """For a type checker it has any name."""
    sources = (path.read_text() for path in PACKAGE.rglob("*.py"))
    used = {name for text in sources for name in re.findall(r"(?<![\w.])_C\.(\w+)", text)}
    assert len(used) > 40 and not used - vars(_C).keys()


# --- Public names ---------------------------------------------------------------------------------


def public_functions(module):
    """Functions, methods and properties of the public names of a module, which lshkit defines."""
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isfunction(value):
            yield name, value
        if not inspect.isclass(value):
            continue
        for member, found in inspect.getmembers_static(value):
            found = getattr(found, "fget", None) or getattr(found, "__func__", found)
            public = member == "__init__" or not member.startswith("_")
            if public and inspect.isfunction(found) and found.__module__.startswith("lshkit"):
                yield f"{name}.{member}", found


@pytest.mark.parametrize("module", MODULES)
def test_every_public_function_is_annotated(module):
    needs_packages_of(module)
    found = dict(public_functions(importlib.import_module(f"lshkit.{module}")))
    assert found
    missing = []
    for name, function in found.items():
        of = inspect.signature(function)
        if of.return_annotation is of.empty:
            missing.append(f"{name} ->")
        for i, parameter in enumerate(of.parameters.values()):
            own = i == 0 and parameter.name in ("self", "cls")
            if parameter.annotation is of.empty and not own:
                missing.append(f"{name}({parameter.name})")
    assert missing == []


# --- The documentation's code ---------------------------------------------------------------------


def test_mypy_accepts_the_documentation(tmp_path):
    pytest.importorskip("mypy")
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    outputs = importlib.util.module_from_spec(
        spec := importlib.util.spec_from_file_location("outputs", DOCS / "outputs.py")
    )
    spec.loader.exec_module(outputs)
    folder = tmp_path / "documentation"
    folder.mkdir()
    (folder / "__init__.py").touch()
    for page in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))):
        text = page.read_text()
        lines = [""] * (text.count("\n") + 1)  # code on its lines of the page, as in its errors
        for code, *_ in outputs.blocks(text):
            for i, line in enumerate(code.splitlines()):
                lines[i] = line or lines[i]
        if any(lines):
            name = re.sub(r"\W", "_", str(page.relative_to(ROOT)))
            (folder / f"{name}.py").write_text("\n".join(lines) + "\n")
    pages = [*folder.iterdir()]
    assert len(pages) > 15
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", *map(str, pages)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
