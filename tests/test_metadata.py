"""The version stands in one place, lshkit/__init__.py; what must repeat it is held to it here."""

import re

import pytest
from cases.commands import ROOT

import lshkit


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("CITATION.cff", r"^version: (\S+)$"),
        ("CHANGELOG.md", r"^## (\d\S*?),? "),  # the first heading: the newest version
        ("docs/citing.md", r"^  version = \{(.*)\},$"),
    ],
)
def test_version_is_that_of_the_package(file, pattern):
    found = re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)
    assert found and found[1] == lshkit.__version__


def test_formats_of_files_are_those_of_the_page():
    from lshkit.hashing.family import FORMAT
    from lshkit.kde.persistence import VERSION as OF_DENSITIES
    from lshkit.sampling.persistence import VERSION as OF_SAMPLERS

    page = (ROOT / "docs" / "stability.md").read_text()
    rows = [[cell.strip() for cell in x.split("|")] for x in page.splitlines() if "|" in x]
    versions = {row[1]: row[3] for row in rows}
    assert versions["`LSHKernelDensity.save`, `LSHOutlierDetector.save`"] == str(OF_DENSITIES)
    assert versions["`LSHSampler.save`"] == str(OF_SAMPLERS)
    assert versions["`to_arrays` of a hash family"] == str(FORMAT)
    pytest.importorskip("torch")
    from lshkit.attention.saved_cache import VERSION as OF_CACHES
    from lshkit.attention.saved_state import VERSION as OF_STATES

    assert versions["`state_dict` of `YosoState`"] == str(OF_STATES)
    assert versions["`state_dict` of `CodeCache`"] == str(OF_CACHES)
