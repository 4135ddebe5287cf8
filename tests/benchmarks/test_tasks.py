"""Tasks for attention: the answers are right, what is local cannot find them, the command runs."""

import json
import re
import sys

import pytest
from cases.commands import PNG_SIGNATURE, ROOT, run

torch = pytest.importorskip("torch")
pytest.importorskip("tqdm")

from benchmarks import RESULTS  # noqa: E402
from benchmarks.encoder import NEAR  # noqa: E402
from benchmarks.quality.tasks import (  # noqa: E402
    ListOps,
    MaskedWords,
    Needle,
    Recall,
    listops,
    report,
)
from benchmarks.quality.tasks import __main__ as command  # noqa: E402
from benchmarks.quality.tasks.masked_words import MASK, UNKNOWN, WORD, read_words  # noqa: E402
from benchmarks.quality.tasks.methods import METHODS  # noqa: E402

RECALL = dict(length=256, n_pairs=16, n_questions=24, n_keys=32, n_values=16, gap=96)
NEEDLE = dict(length=256, n_needles=6, n_keys=10, n_values=16, n_hay=12, gap=96)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def assert_even(counts, message):
    """Counts of equally likely things: each within 4 standard errors and one."""
    counts = torch.as_tensor(counts, dtype=torch.float64)
    total, part = counts.sum(), 1 / len(counts)
    allowed = 4 * (total * part * (1 - part)).sqrt() + 1
    assert ((counts - total * part).abs() <= allowed).all(), f"{message}: {counts.tolist()}"


# --- ListOps --------------------------------------------------------------------------------------


def evaluated(symbols):
    """Value of an expression by a stack: operators and numbers are pushed, ] reduces."""
    stack, depth, deepest, arguments = [], 0, 0, []
    for symbol in symbols:
        if symbol == "]":
            numbers = []
            while isinstance(stack[-1], int):
                numbers.append(stack.pop())
            numbers.sort()
            arguments.append(len(numbers))
            operator, depth = stack.pop(), depth - 1
            if operator == "[MED":
                lower, upper = numbers[(len(numbers) - 1) // 2], numbers[len(numbers) // 2]
                stack.append(int((lower + upper) / 2))
            else:
                by_name = {"[MIN": numbers[0], "[MAX": numbers[-1], "[SM": sum(numbers) % 10}
                stack.append(by_name[operator])
        elif symbol.startswith("["):
            stack.append(symbol)
            depth += 1
            deepest = max(deepest, depth)
        else:
            stack.append(int(symbol))
    (value,) = stack
    return value, deepest, arguments


def test_listops_values_are_those_of_an_independent_evaluator():
    task = ListOps(length=96, min_length=32, n_training=300, n_held_out=100)
    batch = task.training(200, seeded())
    seen = set()
    for tokens, mask, answer in zip(batch.tokens, batch.mask, batch.answers, strict=True):
        length = int(mask.sum())
        assert 32 <= length <= 96 and mask[:length].all()
        symbols = [listops.SYMBOLS[token] for token in tokens[:length]]
        value, deepest, arguments = evaluated(symbols)
        assert value == answer
        assert deepest < listops.MAX_DEPTH
        assert 2 <= min(arguments) and max(arguments) <= 10
        seen.add(int(answer))
    assert seen == set(range(10))
    assert evaluated("[MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8 9 2 ] ]".split())[0] == 5
    assert evaluated("[MED 1 2 ]".split())[0] == 1
    assert evaluated("[SM 9 9 4 ]".split())[0] == 2


def test_listops_expressions_follow_the_grammar():
    rng = listops.random.Random(0)
    drawn = [listops.expression(rng, 10**9)[0] for _ in range(60)]
    symbols = [[listops.SYMBOLS[token] for token in tokens] for tokens in drawn]
    arguments = [number for s in symbols for number in evaluated(s)[2]]
    assert_even([arguments.count(number) for number in range(2, 11)], "numbers of arguments")
    everything = [symbol for s in symbols for symbol in s]
    assert_even([everything.count(name) for name in listops.OPERATORS], "operators")
    assert_even([everything.count(str(digit)) for digit in range(10)], "digits")
    # Of the arguments above the greatest depth a quarter are operators.
    inner, outer = 0, 0
    for s in symbols:
        depth = 0
        for position, symbol in enumerate(s):
            if position and symbol != "]" and depth + 1 < listops.MAX_DEPTH:
                outer += 1
                inner += symbol.startswith("[")
            depth += symbol.startswith("[") - (symbol == "]")
    assert abs(inner / outer - 0.25) <= 4 * (0.25 * 0.75 / outer) ** 0.5


def test_listops_is_the_same_every_time_and_held_out():
    task = ListOps(length=64, min_length=24, n_training=200, n_held_out=100)
    first, second = task.training(16, seeded(3)), task.training(16, seeded(3))
    assert torch.equal(first.tokens, second.tokens) and torch.equal(first.answers, second.answers)
    listops.expressions.cache_clear()
    assert torch.equal(task.training(16, seeded(3)).tokens, first.tokens)

    training = set(map(tuple, listops.expressions(200, 24, 64, 0)[0].tolist()))
    held_out = list(map(tuple, listops.expressions(100, 24, 64, 1)[0].tolist()))
    assert len(training.union(held_out)) == 300
    batches = task.held_out(30)
    assert sum(len(batch.answers) for batch in batches) == 100
    common = max(torch.bincount(torch.cat([b.answers for b in batches])).tolist())
    assert task.guess() == common / 100
    answers_of = {}
    for batch in batches:
        for tokens, answer in zip(batch.tokens.tolist(), batch.answers.tolist(), strict=True):
            answers_of.setdefault(tokens[0], []).append(answer)
    right = sum(max(map(found.count, found)) for found in answers_of.values())
    assert task.guess_from_operator() == right / 100


# --- Look-ups -------------------------------------------------------------------------------------


def looked_up(tokens, asked, is_key):
    """For every question the token after the only other place where its key stands."""
    answers, distances = [], []
    for row, questions in zip(tokens.tolist(), asked.tolist(), strict=True):
        first = questions.index(True)
        for position in (i for i, question in enumerate(questions) if question):
            assert is_key(row[position])
            (place,) = (i for i in range(first) if row[i] == row[position])
            answers.append(row[place + 1])
            distances.append(position - place - 1)
    return torch.tensor(answers), distances


def test_recall_answers_are_the_values_of_their_keys():
    task = Recall(**RECALL)
    batch = task.training(40, seeded())
    assert batch.mask is None and batch.tokens.shape == (40, 256)
    found, distances = looked_up(batch.tokens, batch.asked, lambda token: 1 <= token <= 32)
    assert torch.equal(found - 1 - 32, batch.answers)
    assert batch.asked.sum(1).eq(24).all()
    assert min(distances) > task.gap > 2 * (NEAR + 1)
    assert_even(torch.bincount(batch.answers, minlength=16), "values")
    assert (batch.tokens == 0).sum(1).eq(256 - 32 - 24).all()  # all else is blank
    assert batch.tokens.max() < task.n_tokens


def test_needle_answers_are_the_values_of_their_keys():
    task = Needle(**NEEDLE)
    batch = task.training(60, seeded())
    found, distances = looked_up(batch.tokens, batch.asked, lambda token: token < 10)
    assert torch.equal(found - 10, batch.answers)
    assert min(distances) > task.gap > 2 * (NEAR + 1)
    assert (batch.tokens < 10).sum(1).eq(2 * 6).all()  # the hay holds no key
    values = batch.tokens[:, 1:-6:2]
    assert ((values >= 10) & (values < 26)).all()  # but as many values as anything
    assert_even(torch.bincount(batch.answers, minlength=16), "values")
    places = (batch.tokens[:, :-6] < 10).nonzero()[:, 1]
    halves = (256 - 6 - 96) // 2 // 2 * 2
    assert_even([(places < halves).sum(), (places >= halves).sum()], "places")
    longer = task.at_length(512)
    assert longer.training(2, seeded()).tokens.shape == (2, 512)
    assert longer.n_needles == 6 and longer.n_tokens == task.n_tokens


@pytest.mark.parametrize("make", [lambda: Recall(**RECALL), lambda: Needle(**NEEDLE)])
def test_look_ups_are_the_same_every_time(make):
    task = make()
    a, b = task.training(4, seeded(5)), make().training(4, seeded(5))
    assert torch.equal(a.tokens, b.tokens) and torch.equal(a.answers, b.answers)
    held_out = task.held_out(5, 12)
    assert [len(batch.tokens) for batch in held_out] == [5, 5, 2]
    assert torch.equal(held_out[0].tokens, make().held_out(5, 12)[0].tokens)
    assert not torch.equal(held_out[0].tokens[:4], task.training(4, seeded(5)).tokens)
    assert task.guess() == 1 / 16


def test_sizes_that_do_not_fit_are_refused_by_name():
    with pytest.raises(ValueError, match="length must be at least 152"):
        Recall(**RECALL | dict(length=100))
    with pytest.raises(ValueError, match="n_pairs must be at most n_keys=8: 16"):
        Recall(**RECALL | dict(n_keys=8))
    with pytest.raises(ValueError, match="length must be at least 114"):
        Needle(**NEEDLE | dict(length=100))
    with pytest.raises(ValueError, match="n_needles must be at most n_keys=2: 6"):
        Needle(**NEEDLE | dict(n_keys=2))


# --- Text -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder of Python files; numbers 0 and 10 are held out."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(11):
        name = "held" if i % 10 == 0 else "seen"
        lines = f"def {name}_out(x_{i}):\n    return x_{i} + {i}  # rare{'abc'[i % 3]}\n"
        (folder / f"{i:02}.py").write_text(lines * 20)
    return folder


def test_masked_words_hides_known_words_and_asks_for_them(text):
    assert WORD.findall("Def f_o(x1):\n") == ["Def", "f", "o", "(", "x", "1", ")", ":", "\n"]
    task = MaskedWords(length=64, n_words=12, folder=text)
    batch = task.training(200, seeded())
    assert (batch.tokens[batch.asked] == MASK).all()
    assert (batch.tokens[~batch.asked] != MASK).all()
    assert len(batch.answers) == batch.asked.sum()
    assert (batch.answers != UNKNOWN).all() and (batch.answers != MASK).all()
    unknown = (batch.tokens == UNKNOWN).sum().item()
    known = batch.tokens.numel() - unknown
    part = len(batch.answers) / known
    assert abs(part - 0.15) <= 4 * (0.15 * 0.85 / known) ** 0.5
    # With the answers put back a sequence is a piece of the text.
    whole = batch.tokens.masked_scatter(batch.asked, batch.answers)
    words = " ".join(map(str, read_words(text, 12)[0].tolist()))
    for row in whole[:20].tolist():
        assert " ".join(map(str, row)) in words


def test_masked_words_of_held_out_files_make_no_vocabulary(text):
    training, held_out, counts = read_words(text, 512)
    assert counts.sum() == len(training) and counts[MASK] == counts[UNKNOWN] == 0
    assert (held_out == UNKNOWN).sum() > 0  # "held" stands in held-out files alone
    task = MaskedWords(length=64, n_words=512, folder=text)
    assert task.frequencies().sum() == pytest.approx(1)
    assert torch.equal(task.held_out(4, 8)[1].tokens, task.held_out(4, 8)[1].tokens)
    assert 0 < task.guess() < 1
    with pytest.raises(ValueError, match="too few words"):
        MaskedWords(length=10**6, n_words=512, folder=text)


# --- Models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("task", [Recall(**RECALL), Needle(**NEEDLE)], ids=["recall", "needle"])
def test_only_attention_reaches_the_pairs(name, task):
    torch.manual_seed(0)
    model = command.model_of(task, METHODS[name], 16, 2, 2).eval()
    batch = task.training(2, seeded())
    # All questions are after the gap: what stands before it is changed, every token.
    first = int(batch.asked.any(0).nonzero()[0])
    tokens = batch.tokens.clone()
    tokens[:, : first - task.gap] = 1
    with torch.no_grad():
        before, after = model(batch), model(batch._replace(tokens=tokens))
    is_control = name in ("convolution only", "window only", "no attention")
    assert torch.equal(before, after) == is_control


@pytest.mark.parametrize("name", METHODS)
def test_padding_never_counts(name):
    task = ListOps(length=48, min_length=8, n_training=32, n_held_out=8)
    torch.manual_seed(0)
    model = command.model_of(task, METHODS[name], 16, 2, 2).eval()
    batch = task.training(8, seeded())
    assert not batch.mask.all()
    with torch.no_grad():
        before = model(batch)
        after = model(batch._replace(tokens=batch.tokens.masked_fill(~batch.mask, 7)))
    assert torch.equal(before, after)


# --- The command ----------------------------------------------------------------------------------

METHODS_RUN = ("softmax", "YOSO-32", "Linformer")


def options_of(folder, *more):
    out = ("--json", folder / "new" / "tasks.json", "--picture", folder / "tasks.png")
    return ["benchmarks.quality.tasks", *map(str, ("--quick", *out, *more))]


def test_command_resumes_and_ends_in_tables_and_a_picture(tmp_path, text, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    options = ("--text", text, "--methods", *METHODS_RUN, "--seeds", 0)
    done = run(*options_of(tmp_path, *options))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "tasks.png").read_bytes().startswith(PNG_SIGNATURE)
    path = tmp_path / "new" / "tasks.json"
    first = json.loads(path.read_text())
    assert len(first["runs"]) == 5 * 3 and len(first["tasks"]) == 5
    for made in first["runs"]:
        assert 0 <= made["accuracy"] <= 1 and made["loss"] > 0
        assert ("64 hashes" in made) == ("expectation" in made) == (made["method"] == "YOSO-32")
        longer = made["task"] == "needle" and made["method"] != "Linformer"
        assert ("at length" in made) == longer
    assert len(re.findall(r"^\| (softmax|YOSO-32|Linformer) \|", done.stdout, re.M)) == 15

    monkeypatch.setattr(sys, "argv", options_of(tmp_path, *options, 1, "--tasks", "recall"))
    command.main()
    second = json.loads(path.read_text())
    assert len(second["runs"]) == 5 * 3 + 3
    assert all(made in second["runs"] for made in first["runs"])
    # The same once more: nothing is trained, and the same run gives the same figures.
    capsys.readouterr()
    command.main()
    assert "seed" not in capsys.readouterr().out.split("\n\n")[0]
    assert json.loads(path.read_text()) == second
    made = command.train("recall", "YOSO-32", 1, command.QUICK["recall"])
    (stored,) = (r for r in second["runs"] if r["seed"] == 1 and r["method"] == "YOSO-32")
    assert all(made[key] == stored[key] for key in ("loss", "accuracy", "expectation"))


def test_documented_tables_are_those_of_the_results():
    results = json.loads((RESULTS / "quality_tasks.json").read_text())
    page = (ROOT / "docs/quality.md").read_text()
    for task in results["tasks"]:
        assert report.task_table(results, task) in page
