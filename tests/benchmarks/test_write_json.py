import json

from hypothesis import given
from hypothesis import strategies as st

from benchmarks import RESULTS, WIDTH, write_json

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9)
)
KEYS = st.none() | st.integers(0, 99) | st.text(max_size=40)
VALUES = st.recursive(
    SCALARS,
    lambda x: st.lists(x, max_size=40) | st.tuples(x, x) | st.dictionaries(KEYS, x, max_size=9),
    max_leaves=99,
)


@given(VALUES)
def test_holds_what_json_holds(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("results") / "new" / "results.json"
    write_json(path, value)
    assert json.dumps(json.loads(path.read_text())) == json.dumps(json.loads(json.dumps(value)))
    assert [x.name for x in path.parent.iterdir()] == ["results.json"]


def test_tuples_are_written_as_lists(tmp_path):
    path = tmp_path / "results.json"
    for value in ([9, 0], list(range(99))):
        written = []
        for x in (value, tuple(value)):
            write_json(path, {"a name that leaves a line little room " * 2: x, "more": [x]})
            written.append(path.read_text())
        assert written[0] == written[1]


def test_lines_are_few_and_short(tmp_path):
    path = tmp_path / "results.json"
    rows = [{"n": n, "seconds": n / 7, "curve": list(range(99))} for n in range(5)]
    write_json(path, {"rows": rows, "empty": {}})
    lines = path.read_text().splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert len(lines) == 5 + 5 * 10
    assert lines[2].strip() == "{"
    assert lines[3].strip() == '"n": 0, "seconds": 0.0,'


def test_results_are_written_by_it(tmp_path):
    for path in sorted(RESULTS.rglob("*.json")):
        write_json(tmp_path / path.name, json.loads(path.read_text()))
        assert (tmp_path / path.name).read_text() == path.read_text(), path.name
