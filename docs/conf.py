"""Settings of Sphinx: `sphinx-build -W docs build/docs` makes the site."""

import os
import pathlib
import re
import sys

import lshkit

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # mathml.py

project = "lshkit"
author = "the lshkit authors"
copyright = "the lshkit authors, Apache-2.0"
release = version = lshkit.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "mathml",
]
html_math_renderer = "mathml"
numfig = True
numfig_secnum_depth = 0  # equations are numbered through all pages
exclude_patterns = ["images"]
suppress_warnings = ["ref.python"]  # a word in backticks that is a member of several classes

# Markdown pages, which must also read well where the code is hosted.
myst_enable_extensions = ["dollarmath", "amsmath", "deflist"]
myst_heading_anchors = 3
myst_dmath_double_inline = True

# Docstrings: `name` is code, and a link where there is something to link to.
default_role = "py:obj"
smartquotes_action = "D"  # dashes alone: words in quotes are values
autosummary_generate = False  # the tables only: the pages of docs/reference hold the entries
autodoc_member_order = "bysource"
autodoc_typehints = "description"  # beside what the docstrings say of each argument
autodoc_typehints_description_target = "documented_params"
autodoc_typehints_format = "short"
# By their names, not by all that they stand for.
autodoc_type_aliases = {
    name: name
    for name in ("ArrayLike", "ArrayOrTensor", "FloatArray", "File", "RandomState", "Rows", "Seed")
}
autodoc_docstring_signature = False
autodoc_mock_imports = ["pyod"]  # of lshkit.kde.pyod, whose other imports the package needs itself
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_custom_sections = [(f"{kind} arguments", "params_style") for kind in ("Basic", "Advanced")]
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False

# Links to the types of other libraries. Inventories are fetched only when asked for, because a
# build without a network must not fail.
if os.environ.get("LSHKIT_DOCS_ONLINE"):
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "sklearn": ("https://scikit-learn.org/stable", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
    }

# The examples' pictures are those of docs/images, made by their full runs: nothing is run here.
sphinx_gallery_conf = {
    "examples_dirs": "../python_examples",
    "gallery_dirs": "gallery",
    "plot_gallery": False,
    "within_subsection_order": "FileNameSortKey",
    "notebook_extensions": set(),  # they read a command line
    "download_all_examples": False,
    "remove_config_comments": True,
    "show_signature": False,
    "write_computation_times": False,
}
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"  # not on output

html_theme = "furo"
html_title = "lshkit"
html_static_path = ["_static"]
html_css_files = ["lshkit.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False


def links_to_pages(text):
    """docs/kde.md in a docstring, which is its path in a checkout, as a link to the page."""
    return re.sub(r"\bdocs/([\w/]+)\.md", r":doc:`docs/\1.md </\1>`", text)


def picture_of_an_example(app, docname, source):
    """What the full run of an example drew, and a link to its file, above its code."""
    folder, _, name = docname.rpartition("/")
    if folder == "gallery" and name != "index":
        text, code, rest = source[0].partition(".. code-block:: Python")
        head = f".. image:: /images/{name}.png\n   :alt: What the example draws\n\n"
        head += f":download:`Download {name}.py <{name}.py>`\n\n"
        source[0] = links_to_pages(text) + head + code + rest


def pages_are_links(app, what, name, obj, options, lines):
    lines[:] = map(links_to_pages, lines)


def bars_are_bars(app, what, name, obj, options, lines):
    """|x| in a docstring is an absolute value, not a substitution of reStructuredText."""
    lines[:] = [re.sub(r"(`[^`]*`)|\|", lambda found: found[1] or r"\|", x) for x in lines]


def underscores_stay(app, what, name, obj, options, lines):
    """Of attributes like report_, which would be references: in the fields that napoleon makes."""
    lines[:] = [re.sub(r"^(:(?:ivar|vartype) \w+)_:", r"\1\\_:", x) for x in lines]


def types_in_sections(app, what, name, obj, options, lines):
    """Types of arguments in the sections of napoleon_custom_sections, which autodoc leaves out."""
    types = app.env.current_document.autodoc_annotations.get(name, {})
    if types.get("return", "").endswith("Any"):  # of a function with overloads
        del types["return"]
    argument = re.compile(r"((?:^:\w+ arguments: |^ +)\* \*\*(\w+)\*\*)( -- )")
    for i, line in enumerate(lines):
        if (found := argument.match(line)) and found[2] in types:
            type_ = re.sub(r"~?(?:\w+\.)*(\w+)", r"\1", types[found[2]])
            lines[i] = f"{found[1]} (*{type_}*){line[found.end(1) :]}"


def setup(app):
    app.connect("source-read", picture_of_an_example)
    app.connect("autodoc-process-docstring", bars_are_bars)
    app.connect("autodoc-process-docstring", pages_are_links)
    app.connect("autodoc-process-docstring", underscores_stay, priority=900)
    app.connect("autodoc-process-docstring", types_in_sections, priority=900)
