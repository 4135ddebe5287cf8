"""The causal byte model: which bytes repeat, what the mixers compute, and the command."""

import json
import math
import subprocess
import sys

import pytest
from cases.commands import PNG_SIGNATURE, rows_of, run

torch = pytest.importorskip("torch")
pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

from benchmarks import RESULTS  # noqa: E402
from benchmarks.encoder import Batch  # noqa: E402
from benchmarks.quality.text import __main__ as command  # noqa: E402
from benchmarks.quality.text import report  # noqa: E402
from benchmarks.quality.text.at_once import train  # noqa: E402
from benchmarks.quality.text.candidates import (  # noqa: E402
    CANDIDATES,
    Divided,
    Exact,
    NearHeads,
    OverCollisions,
    far_softmax,
)
from benchmarks.quality.text.model import (  # noqa: E402
    DIM,
    HEADS,
    METHODS,
    Attention,
    ByteModel,
    Softmax,
    collisions,
    rotated,
)
from benchmarks.quality.text.training import Setting, Training  # noqa: E402
from benchmarks.source_text import repeats  # noqa: E402
from lshkit.attention import Colliding, Sampled, yoso_attention  # noqa: E402

MODULE = "benchmarks.quality.text"
BEYOND = "softmax of colliding unit vectors, 12 bits, Horvitz-Thompson, beyond 256"


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


ALL = METHODS | CANDIDATES


def test_every_method_has_a_colour():
    for method in ALL:
        assert any(method.startswith(start) for start in report.COLORS), method


@pytest.mark.parametrize("method", ALL)
def test_no_byte_knows_later_ones(method):
    model = ByteModel(ALL[method], torch.full((256,), 1 / 256)).eval()
    tokens = torch.randint(256, (1, 512), generator=torch.Generator().manual_seed(0))
    other = tokens.clone()
    other[:, 300:] = 7
    with torch.no_grad():
        one, two = (model(Batch(x, None, None, x)).view(1, 512, 256) for x in (tokens, other))
    # The later rows change; the earlier ones are sums in the same order.
    torch.testing.assert_close(one[:, :300], two[:, :300], rtol=0, atol=1e-5)
    assert (one[:, 300:] - two[:, 300:]).abs().max() > 1e-2


def test_alibi_adds_slopes_times_distance():
    q, k, v = torch.randn(3, 2, HEADS, 600, 32, generator=torch.Generator().manual_seed(0))
    q, k, v = (x.bfloat16().float() for x in (q, k, v))
    far = torch.arange(600)[:, None] - torch.arange(600)
    slopes = 2.0 ** -(2 * torch.arange(1, HEADS + 1))[:, None, None]
    scores = (q @ k.mT / math.sqrt(32) - slopes * far).masked_fill(far < 0, -math.inf)
    # q / sqrt(32), the weights and the output are rounded to bfloat16, 8 bits.
    torch.testing.assert_close(
        Softmax(alibi=True)(q, k, v, None), scores.softmax(-1) @ v, rtol=0, atol=0.03
    )


def test_rotary_scores_depend_on_distance_alone():
    q, k = torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(0)).expand(2, 500, 32)
    scores = rotated(q.double()) @ rotated(k.double()).mT
    assert scores[0, 0] == pytest.approx((q[0] @ k[0]).item())
    torch.testing.assert_close(scores[:-7, :-7], scores[7:, 7:], rtol=0, atol=1e-3)
    assert scores[0].std() > 0.1
    out = Softmax(rotary=True)(*(x.expand(1, HEADS, 500, 32) for x in (q, k, q.cumsum(0))), None)
    causal = (scores / math.sqrt(32)).masked_fill(torch.ones(500, 500).triu(1) > 0, -math.inf)
    wanted = causal.softmax(-1) @ q.cumsum(0).double()
    torch.testing.assert_close(
        out[0, 0].double(), wanted, rtol=0.02, atol=0.02 * wanted.abs().max().item()
    )


# --- Candidates -----------------------------------------------------------------------------------


def inputs(n: int, dtype: torch.dtype = torch.float32) -> tuple:
    """q, k, v and the layer's input x."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, HEADS, n, DIM // HEADS, generator=generator).to(dtype)
    return q, k, v, torch.randn(2, n, DIM, generator=generator).to(dtype)


@pytest.mark.parametrize(("n", "window"), [(100, 256), (256, 256), (600, 256), (600, 64)])
def test_half_of_the_heads_see_what_is_near(n, window):
    q, k, v, x = inputs(n)
    mixer = NearHeads(far_softmax, window)
    i = torch.arange(n)
    far = i[:, None] - i
    hidden = (far < 0) | (i[:, None] // window - i // window > 1)
    scores = q[:, :2] @ k[:, :2].mT / math.sqrt(32) - mixer.slopes * far
    near = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v[:, :2]
    out = mixer(q, k, v, x)
    torch.testing.assert_close(out[:, :2], near, rtol=0, atol=1e-5)
    assert torch.equal(out[:, 2:], mixer.far(q[:, 2:], k[:, 2:], v[:, 2:], x))


def test_look_ups_from_the_start():
    """The key of a position is the query of the one before, which has its last four inputs."""
    rows = []

    class Kept(torch.nn.Module):
        def forward(self, q, k, v, x):
            rows.extend((q, k, v))
            return v

    torch.manual_seed(0)
    plain, attention = Attention(Kept()), Attention(Kept(), look_up=True)
    x = torch.randn(2, 50, DIM)
    with torch.no_grad():
        attention(x), plain(x)
    q, k, v, other_q, other_k, _ = rows
    torch.testing.assert_close(k[:, :, 4:], q[:, :, 3:-1])
    assert not torch.allclose(other_k[:, :, 4:], other_q[:, :, 3:-1], atol=0.1)
    assert (v - q).abs().mean() > 0.1
    changed = x.clone()
    changed[:, 20] = 0
    rows.clear()
    with torch.no_grad():
        attention(changed)
    for i, (new, old) in enumerate(zip(rows[:2], (q, k), strict=True)):
        moved = (new != old).any(-1).any(1).any(0).nonzero().flatten().tolist()
        assert moved == list(range(20 + i, 24 + i))


def test_the_kernel_is_divided():
    q, k, v, x = inputs(32, torch.float64)
    angle = torch.acos(
        torch.nn.functional.cosine_similarity(q[..., :, None, :], k[..., None, :, :], -1)
    )
    weights = ((1 - angle / math.pi) ** 12).tril()
    wanted = weights @ v / (weights.sum(-1, keepdim=True) + 0.1)
    torch.testing.assert_close(Divided(Exact().double(), 0.1).double()(q, k, v, x), wanted)


def test_scores_of_softmax_decay_by_token():
    q, k, v, x = inputs(32, torch.float64)
    mixer = Exact("softmax").double()
    torch.nn.init.normal_(mixer.decay.project.weight, std=0.3)
    gates = torch.nn.functional.softplus(mixer.decay.slope + x @ mixer.decay.project.weight.mT)
    scores = q @ k.mT / math.sqrt(DIM // HEADS)
    for i in range(32):
        for j in range(32):
            scores[..., i, j] -= gates[:, j + 1 : i + 1].sum(1) if j <= i else math.inf
    torch.testing.assert_close(mixer(q, k, v, x), scores.softmax(-1) @ v)


@pytest.mark.parametrize("kind", ["soft codes, 12 bits", "YOSO, 12 bits"])
def test_sums_of_the_library_are_divided(kind):
    q, k, v, x = tensors = [y.requires_grad_() for y in inputs(64)]
    k.data[:, :, ::2] = q.data[:, :, 1::2]  # equal vectors collide in all hashes
    divided = CANDIDATES[f"{kind}, null key"]().mixer
    out = divided.eval()(*tensors)
    estimator = divided.mixer.estimator
    options = {"estimator": estimator, "normalize": None, "is_causal": True, "seed": 0}
    ones = torch.ones_like(v)
    sums, weights = (yoso_attention(q, k, y, **options) for y in (v, ones))
    torch.testing.assert_close(out, sums / (weights + 0.1))
    leaves = q, k, v, *divided.parameters()
    grad = torch.randn(v.shape, generator=torch.Generator().manual_seed(1))
    for of_leaf in torch.autograd.grad(out, leaves, grad):
        assert of_leaf.isfinite().all() and of_leaf.abs().amax() > 0


def test_collisions_are_the_weights_of_the_library():
    q, k, v, _ = (x.requires_grad_() for x in inputs(300))
    seed = torch.tensor([7])
    sampled = Sampled(n_bits=6, expectation="never")
    outs = (
        collisions(q, k, sampled, seed) @ v,
        yoso_attention(q, k, v, estimator=sampled, normalize=None, seed=seed),
    )
    torch.testing.assert_close(*outs)
    grad = torch.randn(v.shape, generator=torch.Generator().manual_seed(1))
    for ours, theirs in zip(*(torch.autograd.grad(x, (q, k, v), grad) for x in outs), strict=True):
        # The library may round products to bfloat16.
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02 * ours.abs().max().item())


def test_colliding_pairs_are_those_of_the_library():
    q, k, v, x = (y.requires_grad_() for y in inputs(300))
    mixer = OverCollisions(Sampled(n_bits=5, n_hashes=8))
    ours = mixer.eval()(q, k, v, x)
    scaled = torch.nn.functional.normalize(q, dim=-1) * math.exp(2.5)
    unit = torch.nn.functional.normalize(k, dim=-1)
    dense = mixer.dense(scaled, unit, v, torch.zeros(1, dtype=torch.int64))
    torch.testing.assert_close(ours, dense, rtol=1e-4, atol=1e-4)
    grad = torch.randn(v.shape, generator=torch.Generator().manual_seed(1))
    leaves = q, k, v
    pairs = (torch.autograd.grad(out, leaves, grad) for out in (ours, dense))
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_short_texts_come_first():
    text, _ = command.text_of(command.STDLIB, "cpu")
    setting = command.QUICK["short first"][256]
    training = Training("values alone", 256, 0, setting, text)
    sizes = []
    for _ in range(setting.steps):
        sizes.append(tuple(training.batch().tokens.shape))
        training.step()
    assert sizes == [(8, 64)] * 2 + [(2, 256)] * 2


def test_a_budget_of_seconds(monkeypatch):
    """Lengths and the learning rate go by the time that has passed."""
    now = 5.0
    monkeypatch.setattr("time.process_time", lambda: now)
    text, _ = command.text_of(command.STDLIB, "cpu")
    setting = Setting(1, 99, first=((64, 2, 1 / 2), (128, 1, 5 / 6)), seconds=12)
    training = Training("values alone", 256, 0, setting, text)
    sizes, rates = [], []
    for _ in range(12):
        assert training.progress() < 1
        sizes.append(tuple(training.batch().tokens.shape))
        training.step()
        rates.append(training.rate_now.item())
        now += 1
    assert sizes == [(2, 64)] * 6 + [(1, 128)] * 4 + [(1, 256)] * 2
    assert rates == pytest.approx([training.rate(done / 12) for done in range(12)])
    assert training.progress() == 1


def test_colliding_runs_are_tested_with_all_pairs_too(tmp_path):
    method = BEYOND
    estimator = CANDIDATES[method]().mixer.estimator
    text, _ = command.text_of(command.STDLIB, "cpu")
    setting = command.QUICK["seconds"][256]._replace(tested=4096)
    keys = [(512, "seconds", name, 0) for name in (method, "values alone")]
    (_, run), (_, other) = train(keys, lambda key: setting, text, 1, graphs=False)
    assert 0 < abs(run["exact_loss"] - run["loss"]) < 0.1 and "exact_loss" not in other
    assert estimator == Colliding(n_bits=12, scale=math.exp(2.5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--budgets", "seconds", "--lengths", 1024), "--lengths: 'seconds' has 8192, 16384"),
        (("--device", "cuda", "--methods", BEYOND), "run on a CPU alone"),
        (("--budgets", "seconds", "--lengths", 8192, "--at-once", 2), "--at-once 1"),
    ],
)
def test_options_that_would_make_no_run(options, message):
    done = run(MODULE, *options)
    assert done.returncode == 2 and message in done.stderr


def test_every_run_is_kept_and_shown(tmp_path):
    picture, results = tmp_path / "text.png", tmp_path / "runs.json"
    options = ("--quick", "--json", results, "--picture", picture, "--seeds", 0)
    methods = "values alone", "YOSO, 12 bits, own value"
    done = run(MODULE, *options, "--methods", *methods)
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(PNG_SIGNATURE)
    shown = sorted({row[0] for row in rows_of(done.stdout)} & set(METHODS))
    assert shown == sorted(methods)
    runs = json.loads(results.read_text())["runs"]
    assert [(r["budget"], r["method"]) for r in runs] == [("steps", method) for method in methods]
    assert all(2 < made["loss"] < 6 for made in runs)


def test_a_run_that_is_killed_loses_no_other(tmp_path):
    runs, results = tmp_path / "list.json", tmp_path / "runs.json"
    keys = [[256, "steps", "values alone", seed] for seed in range(200)]
    runs.write_text(json.dumps(keys))
    options = ("--quick", "--json", results, "--picture", tmp_path / "text.png", "--runs", runs)
    command = [sys.executable, "-m", MODULE, *map(str, options), "--at-once", "4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for _ in range(5):
            assert process.stdout.readline().startswith("256, steps, values alone")
        process.kill()
    kept = json.loads(results.read_text())["runs"]
    assert 5 <= len(kept) < 200
    cut = run(MODULE, *options, "--within", 0)
    assert cut.returncode == 0 and json.loads(results.read_text())["runs"] == kept


def test_equal_steps_are_equal_alone_and_at_once(tmp_path):
    text, _ = command.text_of(command.STDLIB, "cpu")
    keys = [(256, "steps", method, 0) for method in ("YOSO, 12 bits, own value", "softmax, ALiBi")]
    settings = command.QUICK["steps"][256]
    at_once = dict(train(keys, lambda key: settings, text, 2, graphs=False))
    for key in keys:
        alone = dict(train([key], lambda key: settings, text, 1, graphs=False))
        assert alone[key]["loss"] == at_once[key]["loss"]


def test_little_text_is_an_error(tmp_path):
    (tmp_path / "a.py").write_text("pass\n")
    done = run(MODULE, "--quick", "--json", tmp_path / "runs.json", "--text", tmp_path)
    assert done.returncode != 0 and "bytes of .py files to train with" in done.stderr


@pytest.mark.parametrize("name", ["text", "text_gpu"])
def test_the_results_are_of_these_settings(name, tmp_path):
    results = json.loads((RESULTS / f"{name}.json").read_text())
    for budget, by_length in results["settings"].items():
        for length, setting in by_length.items():
            assert setting == command.described(command.SETTINGS[budget][int(length)])
    report.draw(results, tmp_path / "text.png")  # methods whose code is gone too
    assert all(made["method"] in report.tables(results) for made in results["runs"])
