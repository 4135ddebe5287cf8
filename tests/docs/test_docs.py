"""The documentation's code runs as it stands, and its reference holds every public name."""

import importlib
import inspect
import os
import re
import runpy
import types

import pytest
from cases.commands import DOCS, MODULES, ROOT, needs_packages_of

import lshkit

README = ROOT / "README.md"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
ENTRY = re.compile(r"^\.\. (?:auto|py:)(?:class|function|data):: (\w+)", re.MULTILINE)

outputs = types.SimpleNamespace(**runpy.run_path(str(DOCS / "outputs.py")))
RUNNABLE = {os.path.relpath(page, DOCS): list(outputs.blocks(page.read_text())) for page in PAGES}
RUNNABLE = {page: blocks for page, blocks in RUNNABLE.items() if blocks}


@pytest.mark.parametrize("page", RUNNABLE)
def test_code_runs(page, tmp_path, monkeypatch):
    source = "".join(code for code, *_ in RUNNABLE[page])
    if "torch" in source or "lshkit.attention" in source:
        torch = pytest.importorskip("torch")
        torch.manual_seed(0)
    if "transformers" in source or "huggingface" in source:
        pytest.importorskip("transformers")
    if "dask" in source:
        pytest.importorskip("dask.array")
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for code, _, wanted, _ in RUNNABLE[page]:
        printed = outputs.run(code, DOCS / page, namespace)
        assert wanted is None or printed == wanted, "python docs/outputs.py writes it anew"


def test_clients_have_tutorials():
    tutorials = {f"tutorials/{client}.md" for client in ("attention", "kde", "sampling")}
    assert {"../README.md", *tutorials} <= set(RUNNABLE)


def test_gallery_has_a_picture_of_each_example():
    """The build does not run them: it shows what their full runs drew."""
    scripts = sorted((ROOT / "python_examples").glob("*.py"))
    assert scripts
    for script in scripts:
        picture = f"images/{script.stem}.png"
        assert (DOCS / picture).is_file(), picture
        assert f'# sphinx_gallery_thumbnail_path = "{picture}"\n' in script.read_text()


def test_links_of_the_readme_lead_somewhere():
    # Those of the pages are checked when the site is built.
    targets = re.findall(r"\]\(([^)#\s]+)", README.read_text())
    files = [target for target in targets if "://" not in target]
    assert any(target.startswith("docs/") for target in files)
    assert [target for target in files if not (README.parent / target).exists()] == []


def public_names(module):
    needs_packages_of(module)
    if module == "distributed":
        pytest.importorskip("dask.array")
    module = importlib.import_module(f"lshkit.{module}")
    return {name: getattr(module, name) for name in module.__all__}


@pytest.mark.parametrize("module", MODULES)
def test_reference_has_every_public_name(module):
    page = (DOCS / "reference" / f"{module.split('.')[0]}.md").read_text()
    _, *parts = re.split(r"^\.\. currentmodule:: lshkit\.(\S+)$", page, flags=re.MULTILINE)
    of_module = dict(zip(parts[::2], parts[1::2], strict=True))[module]
    entries = set(ENTRY.findall(of_module))
    if module == "torch_ops":  # operators stand in a table
        entries |= set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert entries == set(public_names(module))


@pytest.mark.parametrize("module", MODULES[:-1])
def test_public_names_have_docstrings(module):
    for name, value in public_names(module).items():
        if not callable(value):
            continue
        assert inspect.getdoc(value), name
        for member, function in inspect.getmembers(value) if inspect.isclass(value) else ():
            function = getattr(function, "fget", function)
            if not member.startswith("_") and is_ours(function):
                assert inspect.getdoc(function), f"{name}.{member}"


def is_ours(function):
    return callable(function) and (getattr(function, "__module__", "") or "").startswith("lshkit")


def test_schemas_are_those_of_the_operators():
    torch = pytest.importorskip("torch")
    names = [name for name in public_names("torch_ops") if hasattr(torch.ops.lshkit, name)]
    schemas = [str(getattr(torch.ops.lshkit, name).default._schema) for name in names]
    page = re.sub(r"\s+", " ", (DOCS / "reference" / "torch_ops.md").read_text())
    missing = [s for s in schemas if s.removeprefix("lshkit::") not in page]
    assert not missing


def test_top_level_names_are_in_the_reference():
    page = (DOCS / "reference" / "index.md").read_text()
    assert all(f"`{name}`" in page or name in ENTRY.findall(page) for name in lshkit.__all__)
    assert all(f"\n{module}\n" in page for module in MODULES if "." not in module)
    assert inspect.getdoc(lshkit.show_versions)
