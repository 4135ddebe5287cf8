"""The causal byte model: which bytes repeat, what the mixers compute, and the command."""

import json
import math

import pytest
from cases.commands import PNG_SIGNATURE, rows_of, run

torch = pytest.importorskip("torch")
pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

from benchmarks import RESULTS  # noqa: E402
from benchmarks.encoder import Batch  # noqa: E402
from benchmarks.quality.text import __main__ as command  # noqa: E402
from benchmarks.quality.text.model import HEADS, METHODS, ByteModel, Softmax  # noqa: E402
from benchmarks.source_text import causal_batch, repeats  # noqa: E402

MODULE = "benchmarks.quality.text"


def test_bytes_repeat_where_the_last_eight_came_before_and_not_nearby():
    tokens = torch.randint(2, (3, 500), generator=torch.Generator().manual_seed(0))
    tokens[0, 300:350] = tokens[0, 100:150]
    found = repeats(tokens)
    for row, got in zip(tokens.tolist(), found.tolist(), strict=True):
        for i, again in enumerate(got):
            last = [j for j in range(7, i) if row[j - 7 : j + 1] == row[i - 7 : i + 1]]
            assert again == (i >= 7 and bool(last) and i - last[-1] >= 64)
    assert 0 < found.sum() < found.numel() / 2
    assert not repeats(tokens[:, :5]).any()


def test_answers_are_the_next_bytes():
    text = torch.arange(200, dtype=torch.uint8)
    batch = causal_batch(text, 16, 3, torch.Generator().manual_seed(0))
    torch.testing.assert_close(batch.answers.view(3, 16), batch.tokens + 1)


@pytest.mark.parametrize("method", METHODS)
def test_no_byte_knows_later_ones(method):
    model = ByteModel(method, torch.full((256,), 1 / 256)).eval()
    tokens = torch.randint(256, (2, 300), generator=torch.Generator().manual_seed(0))
    other = tokens.clone()
    other[:, 200:] = 7
    with torch.no_grad():
        one, two = (model(Batch(x, None, None, x)).view(2, 300, 256) for x in (tokens, other))
    # The later rows change; the earlier ones are sums in the same order.
    torch.testing.assert_close(one[:, :200], two[:, :200], rtol=0, atol=1e-5)
    assert (one[:, 200:] - two[:, 200:]).abs().max() > 1e-2


def test_alibi_adds_slopes_times_distance():
    q, k, v = torch.randn(3, 2, HEADS, 600, 32, generator=torch.Generator().manual_seed(0))
    q, k, v = (x.bfloat16().float() for x in (q, k, v))
    far = torch.arange(600)[:, None] - torch.arange(600)
    slopes = 2.0 ** -(2 * torch.arange(1, HEADS + 1))[:, None, None]
    scores = (q @ k.mT / math.sqrt(32) - slopes * far).masked_fill(far < 0, -math.inf)
    # q / sqrt(32), the weights and the output are rounded to bfloat16, 8 bits.
    torch.testing.assert_close(
        Softmax("ALiBi")(q, k, v, None), scores.softmax(-1) @ v, rtol=0, atol=0.03
    )


def test_runs_are_kept_and_not_made_again(tmp_path):
    picture, results = tmp_path / "text.png", tmp_path / "runs.json"
    options = ("--quick", "--json", results, "--picture", picture, "--seeds", 0)
    methods = "values alone", "YOSO, 12 bits"
    done = run(MODULE, *options, "--methods", *methods)
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(PNG_SIGNATURE)
    shown = sorted({row[0] for row in rows_of(done.stdout)} & set(METHODS))
    assert shown == sorted(methods)
    kept = results.read_text()
    runs = json.loads(kept)["runs"]
    assert [(r["budget"], r["method"]) for r in runs] == [
        (budget, method) for budget in ("steps", "time") for method in sorted(methods)[::-1]
    ]
    assert all(2 < made["loss"] < 6 for made in runs)
    again = run(MODULE, *options, "--methods", *methods)
    assert again.returncode == 0 and results.read_text() == kept

    data = json.loads(kept)
    data["settings"]["256"]["steps"] = 7
    results.write_text(json.dumps(data))
    other = run(MODULE, *options, "--methods", "values alone")
    assert other.returncode != 0 and "have other settings" in other.stderr


def test_the_results_are_of_these_settings():
    results = json.loads((RESULTS / "text.json").read_text())
    for length, setting in results["settings"].items():
        assert setting == command.described(command.SETTINGS[int(length)])
    for made in results["runs"]:
        assert made["method"] in METHODS and made["budget"] in command.BUDGETS
