"""The examples with transformers run from the command line and leave what they promise."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.0")

from cases.commands import (  # noqa: E402
    PNG_SIGNATURE,
    ROOT,
    needs_example_packages,
    rows_of,
    run,
)

EXAMPLE = ROOT / "python_examples" / "transformers_models.py"


def test_models_end_in_tables_and_a_picture(tmp_path):
    needs_example_packages()
    picture = tmp_path / "models.png"
    done = run(EXAMPLE, "--quick", "--out", picture, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = rows_of(done.stdout)
    works = [row for row in rows[2:] if len(row) == 6 and row[0] in ("BERT", "Llama-style")]
    works += [row for row in rows if row[0] in ("T5", "T5Gemma")]
    assert len(works) == 16
    for family, attention, *cells in works:
        if family == "T5" and attention in ("lshkit_yoso", "lshkit_bert_lsh"):
            assert set(cells) == {"refused"}
        else:
            assert set(cells) <= {"yes", "-"}, (family, attention)
    for attention in ("lshkit_yoso", "lshkit_bert_lsh"):
        assert f"refused: {attention} can't take position_bias" in done.stdout
    times = [row for row in rows if row[0].endswith("ward")]
    assert len(times) == 3 * 4 * 2  # what, attention, length
    assert all(float(cell) >= 0 for row in times for cell in row[3:])  # each is a number
    assert picture.read_bytes().startswith(PNG_SIGNATURE)


def test_long_document_ends_in_a_table_and_a_picture(tmp_path):
    needs_example_packages()
    picture, script = tmp_path / "document.png", ROOT / "python_examples" / "long_document.py"
    done = run(script, "--quick", "--out", picture, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [row for row in rows_of(done.stdout) if row[0] in ("1,500", "3,000")]
    assert [row[1] for row in rows] == 2 * ["softmax", "cache of codes"]
    keys = [float(row[4].removesuffix(" %")) for row in rows]
    assert keys[0] == keys[2] == 100 and keys[3] < keys[1] < 25
    assert all(float(row[5].removesuffix(" %")) == 100 for row in rows[::2])
    assert "cache of codes generates:" in done.stdout
    assert picture.read_bytes().startswith(PNG_SIGNATURE)
