"""The decoder that reads long contexts: its texts, its start, and other methods."""

import json

import pytest
from cases.commands import PNG_SIGNATURE, ROOT, run

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks import decoder  # noqa: E402
from benchmarks.quality import sparse_steps  # noqa: E402

TEXT = torch.randint(32, 127, (5000,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)


def generator():
    return torch.Generator().manual_seed(1)


def test_letters_are_asked_for_where_they_come_again():
    tokens, labels, answers = decoder.sample(TEXT, 600, generator())
    text = bytes(tokens.tolist())
    values = {}
    for at in range(len(text) - decoder.PAIR + 1):
        line = text[at : at + decoder.PAIR]
        if line[:1] + line[5:6] + line[-1:] == b"$=\n" and line[1:5].islower():
            value = slice(at + decoder.VALUE.start, at + decoder.VALUE.stop)
            asked = answers[value] != decoder.NOT_ASKED
            assert asked.all() if line[1:5] in values else not asked.any()
            assert values.setdefault(line[1:5], line[decoder.VALUE]) == line[decoder.VALUE]
            assert (labels[value] == decoder.NOT_ASKED).all()
            assert (labels[at + 1 : at + 5] == decoder.NOT_ASKED).all()
    asked = answers != decoder.NOT_ASKED
    assert len(values) > 1 and asked.any()
    assert torch.equal(answers[asked], tokens[asked])


def test_positions_go_on_up_to_the_longest():
    drawn = [decoder.drawn_positions(512, torch.Generator().manual_seed(i)) for i in range(50)]
    steps = torch.stack(drawn).diff()
    assert (steps >= 1).all() and (steps == 1).float().mean() > 0.98
    assert decoder.LONGEST / 2 < max(x[-1] for x in drawn) < decoder.LONGEST


def test_it_starts_with_looking_up():
    assert decoder.lookups(decoder.new_decoder(0).eval(), TEXT, 1024, 16, seed=0) > 0.6


def step():
    random = generator()
    sizes = (4, 6), (2, 300), (2, 300)
    query, key, value = (torch.randn(1, *size, 64, generator=random) for size in sizes)
    return sparse_steps.Step(0, query, key, value, 0.1)


@pytest.mark.parametrize("method", [*"TopK Window RandomKeys".split(), "Codes"])
def test_methods_that_read_all_keys_are_softmax(method):
    of = step()
    made = getattr(sparse_steps, method)(4 if method == "Codes" else 1.0)
    made.append(0, of.key, of.value)
    out, read = made.attend(of)
    torch.testing.assert_close(out, sparse_steps.Method().attend(of)[0], rtol=1e-4, atol=1e-5)
    assert torch.allclose(read, torch.ones(()))


def test_random_keys_are_weighted_by_their_probability():
    """The mean of many numerators is softmax's, to 5 standard errors; and few keys are read."""
    of, method = step(), sparse_steps.RandomKeys(0.5)
    exact = of.scores.exp() @ of.values
    samples = []
    for of.layer in range(400):
        scores = of.scores.clone()
        of.softmax = lambda kept: ((kept.exp() @ of.values), kept.isfinite().float().mean())
        numerator, read = method.attend(of)
        samples.append(numerator)
        assert torch.equal(of.scores, scores) and read < 0.6
    samples = torch.stack(samples)
    error = samples.std(0) / len(samples) ** 0.5
    assert ((samples.mean(0) - exact).abs() < 5 * error + 1e-4).all()


def test_command_writes_what_it_shows(tmp_path):
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "long_context.json", tmp_path / "long_context.png"
    script = ROOT / "benchmarks/quality/long_context.py"
    done = run(script, "--quick", "--json", path, "--figure", picture)
    assert done.returncode == 0, done.stderr
    results = json.loads(path.read_text())
    of = results["lengths"]["2048"]
    assert of["softmax"]["agreement"] == 1 and of["softmax"]["keys"] == 1
    assert of["cache of codes"]["keys"] < 0.2
    errors = results["errors"]["2048"]
    assert errors["cache of codes 0.2"]["error"] < errors["random keys 0.2"]["error"]
    assert "nats a byte" in done.stdout
    again = run(script, "--quick", "--json", path, "--methods", "top-k")
    assert again.returncode == 0, again.stderr
    kept = json.loads(path.read_text())
    assert list(kept["lengths"]["2048"]) == list(of) and kept["errors"] == results["errors"]
    assert kept["lengths"]["2048"]["cache of codes"] == of["cache of codes"]
    assert picture.read_bytes().startswith(PNG_SIGNATURE)
