"""lshkit.attention.suggest: its errors are those that the settings then have."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cases.attention import SAMPLED  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

import lshkit.attention  # noqa: E402
from lshkit.attention import (  # noqa: E402
    Colliding,
    Expected,
    Sampled,
    Soft,
    suggest,
    yoso_attention,
)

SETTINGS = (
    ("yoso_attention", {"estimator": Expected(n_bits=6)}),
    ("yoso_attention", {"estimator": replace(SAMPLED, n_bits=6, n_hashes=64)}),
    ("yoso_attention", {"estimator": Soft(n_bits=8, n_hashes=64, n_probes=3)}),
    (
        "yoso_attention",
        {"estimator": replace(SAMPLED, n_bits=6, n_hashes=8), "normalize": "sum"},
    ),
    (
        "yoso_attention",
        {"estimator": replace(SAMPLED, n_bits=6, n_hashes=64, unit_norm="lift", lift_scale="auto")},
    ),
    ("lsh_attention", {"n_bits": 6, "n_hashes": 24}),
    ("lsh_attention", {"n_bits": 8, "n_hashes": 24, "window": 0, "weighting": "none"}),
    # A run of 16 queries alone would be computed by the expectation, all of them are not.
    ("yoso_attention", {"estimator": Sampled(n_bits=6, n_hashes=8)}),
    # Of few pairs but those of the window.
    ("yoso_attention", {"estimator": Colliding(n_bits=12, n_hashes=8, window=8, exact_up_to=0)}),
)


@pytest.fixture(scope="module")
def tensors():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 300, 32, generator=generator)
    key = query + torch.randn(2, 300, 32, generator=generator)
    return query, key, torch.randn(2, 300, 16, generator=generator) + 0.3


@pytest.fixture(scope="module")
def found(tensors):
    return suggest(*tensors, settings=SETTINGS, n_samples=160, n_trials=6, timed=False)


def mean_angle(x, y):
    return torch.cosine_similarity(x.double(), y.double(), -1).clamp(-1, 1).acos().mean().item()


def observed(row, tensors, of):
    """Mean angle over all queries and other sets of hash functions."""
    attend = getattr(lshkit.attention, row.function)
    query, key, value = (x[None] for x in tensors)
    outs = [attend(query, key, value, seed=100 + s, **row.options) for s in range(12)]
    if of == "softmax" or row.function == "lsh_attention":
        wanted = scaled_dot_product_attention(query, key, value)
    elif isinstance(row.options["estimator"], Colliding):
        wanted = yoso_attention(query, key, value, estimator=row.options["estimator"].exact())
    elif row.options["estimator"].mean is None:
        many = row.options | {"estimator": replace(row.options["estimator"], n_hashes=1024)}
        outs_of_many = [attend(query, key, value, seed=1000 + s, **many) for s in range(4)]
        wanted = torch.stack(outs_of_many).mean(0)
    else:
        mean = row.options | {"estimator": row.options["estimator"].mean}
        wanted = yoso_attention(query, key, value, **mean)
    return np.mean([mean_angle(out, wanted) for out in outs])


@pytest.mark.parametrize("i", range(len(SETTINGS)))
def test_errors_are_what_is_observed(found, tensors, i):
    """160 of 600 queries: within a tenth, many standard errors of such a mean."""
    row = found.rows[i]
    assert (row.function, row.options) == SETTINGS[i] and row.cost is None
    assert row.softmax_error == pytest.approx(observed(row, tensors, "softmax"), rel=0.1)
    assert row.error == pytest.approx(observed(row, tensors, "mean"), rel=0.1, abs=1e-6)


def test_pairs_are_what_is_observed(found, tensors):
    row = found.rows[5]
    options = row.options | {"seed": 7, "return_pairs": True}
    _, pairs = lshkit.attention.lsh_attention(*(x[None] for x in tensors), **options)
    assert row.pairs == pytest.approx(pairs.float().mean().item() / 300, rel=0.1)
    assert found.rows[0].pairs is None


def test_table_report_and_choice(tensors, found):
    text = str(found)
    assert len(text.splitlines()) == 2 + len(SETTINGS) and "160 queries, 300 keys" in text
    for row in found.rows:
        assert row.name in text
        assert found.report["methods"][row.name]["error"] == row.error
    assert found.cheapest(10.0) is found.rows[0]  # no hashes at all
    assert found.cheapest(1e-6) is None
    assert found.cheapest(1e-6, of="error") is found.rows[0]
    timed = suggest(*tensors, settings=SETTINGS[:2], n_samples=16, n_trials=2)
    assert all(row.cost > 0 for row in timed.rows)
    best = min(timed.rows, key=lambda row: row.cost)
    assert timed.cheapest(10.0) is best


def test_arrays_heads_and_defaults():
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((2, 3, 2, 40, 8))
    found = suggest(query, key, n_samples=20, n_trials=2, timed=False)
    again = suggest(
        torch.from_numpy(query), torch.from_numpy(key), n_samples=20, n_trials=2, timed=False
    )
    assert found == again and found.n_keys == 40 and len(found.rows) > 10
    estimators = suggest(query, key, settings=[Soft(), Expected()], n_trials=2, timed=False)
    assert [row.options for row in estimators.rows] == [
        {"estimator": Soft()},
        {"estimator": Expected()},
    ]
    one = suggest(query[0, 0], key[0, 0, :7], settings=SETTINGS[5:7], n_trials=2, timed=False)
    assert one.n_keys == 7 and all(0 <= row.pairs <= 1 for row in one.rows)


def test_defaults_of_torch_do_not_matter():
    query, key = np.random.default_rng(0).standard_normal((2, 2, 30, 8))
    options = {"settings": SETTINGS[:2], "n_samples": 20, "n_trials": 2, "timed": False}
    wanted = suggest(query, key, **options)
    torch.set_default_dtype(torch.float64)
    try:
        assert suggest(query, key, **options) == wanted
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert suggest(query, key, **options) == wanted


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"query": [[1.0]]}, TypeError, "query must be an array"),
        ({"key": np.full((4, 3), np.nan)}, ValueError, "key must be finite"),
        ({"query": np.ones((5, 4), int)}, TypeError, "floats"),
        ({"query": np.ones(4)}, ValueError, "rows, columns"),
        ({"key": np.ones((5, 3))}, ValueError, "key must have query's"),
        ({"value": np.ones((4, 4))}, ValueError, "value must have key's rows"),
        (
            {"settings": ["lsh_attention"]},
            TypeError,
            "settings must be estimators, or pairs.*'lsh_attention'",
        ),
        ({"settings": 3}, TypeError, "settings must be estimators, or pairs .* got 3"),
        ({"settings": [("attention", {})]}, ValueError, "settings must name one of"),
        ({"settings": [("lsh_attention", {"estimator": "soft"})]}, ValueError, "estimator"),
        ({"settings": [("lsh_attention", {"return_pairs": True})]}, ValueError, "return_pairs"),
        ({"settings": [("yoso_attention", {"cu_seqlens": None})]}, ValueError, "cu_seqlens"),
        ({"settings": [("yoso_attention", {"n_bits": 6})]}, ValueError, "n_bits"),
        ({"settings": [("yoso_attention", {"estimator": 3})]}, TypeError, "estimator must be"),
        ({"n_trials": 1}, ValueError, "n_trials"),
        ({"n_samples": 0}, ValueError, "n_samples"),
        ({"scale": 0}, ValueError, "scale"),
        ({"timed": None}, TypeError, "timed"),
    ],
)
def test_bad_input(change, error, words):
    with pytest.raises(error, match=words):
        suggest(**({"query": np.ones((5, 4)), "key": np.ones((5, 4))} | change))
    with pytest.raises(ValueError, match="of must be"):
        lshkit.attention.Suggestions((), 1).cheapest(0.1, of="time")


@pytest.mark.parametrize("estimator", [Sampled(), Soft(), Colliding()])
def test_torch_draws_the_same_numbers_after_it(estimator, tensors):
    before = torch.get_rng_state()
    suggest(*tensors, settings=[estimator], timed=False, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
