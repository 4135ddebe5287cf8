"""Settings of Sphinx: `sphinx-build -W docs build/docs` makes the site."""

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
    "sphinx.ext.napoleon",
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
autodoc_typehints = "none"  # the docstrings say what is wanted, shapes and dtypes too
autodoc_docstring_signature = False
autodoc_mock_imports = ["pyod"]  # of lshkit.kde.pyod, whose other imports the package needs itself
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_custom_sections = [(f"{kind} arguments", "params_style") for kind in ("Basic", "Advanced")]
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False

html_theme = "furo"
html_title = "lshkit"
html_static_path = ["_static"]
html_css_files = ["lshkit.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False


def bars_are_bars(app, what, name, obj, options, lines):
    """|x| in a docstring is an absolute value, not a substitution of reStructuredText."""
    lines[:] = [re.sub(r"(`[^`]*`)|\|", lambda found: found[1] or r"\|", x) for x in lines]


def underscores_stay(app, what, name, obj, options, lines):
    """Of attributes like report_, which would be references: in the fields that napoleon makes."""
    lines[:] = [re.sub(r"^(:(?:ivar|vartype) \w+)_:", r"\1\\_:", x) for x in lines]


def setup(app):
    app.connect("autodoc-process-docstring", bars_are_bars)
    app.connect("autodoc-process-docstring", underscores_stay, priority=900)
