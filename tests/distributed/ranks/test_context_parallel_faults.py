"""Ranks that disagree, refuse or end; arguments that make no sense; what is sent and held."""

import itertools
import math

import pytest

torch = pytest.importorskip("torch")

from cases import context_parallel_faults as of_ranks  # noqa: E402

from lshkit.attention import Colliding, Sampled, Soft, yoso_attention  # noqa: E402
from lshkit.distributed import ContextParallel, exchange_costs  # noqa: E402

SAMPLED = Sampled(n_bits=5, n_hashes=8, expectation="never")


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ({"estimator": Soft(n_bits=6)}, "estimator"),
        ({"estimator": Sampled(n_bits=5)}, "estimator"),
        ({"seed": 1}, "seed"),
        ({"seed": None}, "seed"),
        ({"is_causal": True}, "is_causal"),
        ({"normalize": "sum"}, "normalize"),
        ({"dtype": torch.float64}, "dtype"),
        ({"heads": 2}, "heads"),
        ({"columns": 8}, "features"),
        ({"requires_grad": True}, "requires_grad"),
    ],
)
def test_ranks_that_disagree_get_one_error_on_every_rank(ranks, other, name):
    answers = ranks.run(3, of_ranks.disagree, [{}, other, {}])
    assert len(set(answers)) == 1
    kind, message = answers[0]
    assert kind == "ValueError" and name in message
    assert "rank 0: " in message and "rank 1: " in message


@pytest.mark.parametrize(
    ("other", "words"), [({"dropout_p": 0.1}, "dropout_p"), ({"device": "meta"}, "query")]
)
def test_a_rank_that_refuses_its_arguments_tells_the_others(ranks, other, words):
    answers = ranks.run(3, of_ranks.disagree, [{}, other, {}])
    assert answers[1][0] == "ValueError" and words in answers[1][1]
    for kind, message in (answers[0], answers[2]):
        assert kind == "RuntimeError" and "rank 1" in message and words in message


@pytest.mark.parametrize("exchange", ["heads", "tables", "keys"])
@pytest.mark.parametrize("value", [-1.0, 0.0, math.inf, math.nan, 1e300, 1e-50])
def test_values_of_parameters_are_refused_on_every_rank(ranks, exchange, value):
    """Before rows are sent, which one rank might wait for: heads' parameters are one rank's."""
    estimator = Soft(n_bits=4, n_hashes=4)

    def case(*sharpness):
        given = torch.tensor(sharpness, dtype=torch.float64)
        return {"estimator": estimator, "parameters": {"sharpness": given}}

    options = [case(1.0, 1.0, 1.0, 1.0), case(1.0, 1.0, 1.0, value)]
    (kind, message), refused = ranks.run(2, of_ranks.disagree, options, exchange)
    assert (
        refused[0] == "ValueError"
        and "sharpness must be a finite number > 0 in float32" in refused[1]
    )
    assert kind == "RuntimeError" and refused[1] in message
    same = ranks.run(2, of_ranks.disagree, options[1:] * 2, exchange)
    assert [kind for kind, _ in same] == ["ValueError"] * 2


def test_a_rank_that_ends_is_reported(fresh_ranks):
    fresh_ranks.send(2, of_ranks.one_rank_ends)
    good, message = fresh_ranks.answer(0)
    assert good and "a rank has ended" in message


@pytest.mark.parametrize("ends", [True, False])
def test_a_rank_that_stops_in_an_exchange_is_reported(fresh_ranks, ends):
    fresh_ranks.send(2, of_ranks.one_rank_stops_in_an_exchange, ends)
    good, (message, seconds) = fresh_ranks.answer(0)
    assert good and "a rank has ended" in message
    assert not ends or seconds < 4  # the group's timeout


def test_a_rank_that_does_not_call_is_reported(fresh_ranks):
    answers = fresh_ranks.run(2, of_ranks.one_rank_stays_away)
    message, seconds = answers[0]
    assert "timeout of the process group" in message
    assert seconds > 3  # of the 4 of the timeout: a rank that is late is waited for


def test_the_causal_exchange_holds_its_tables_and_a_piece(fresh_ranks):
    for grown, tables in fresh_ranks.run(2, of_ranks.peak_memory, 4, 12):
        assert tables < grown <= 1.25 * tables


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (of_ranks.with_tuple, "TypeError", "group_or_mesh"),
        (of_ranks.with_mesh, "ValueError", "mesh['cp']"),
        (of_ranks.with_word, "ValueError", "layout"),
        (of_ranks.with_exchange, "ValueError", "exchange"),
        (of_ranks.with_floats, "TypeError", "cu_seqlens"),
        (of_ranks.with_decreasing, "ValueError", "cu_seqlens"),
        (of_ranks.with_short_starts, "ValueError", "cu_seqlens must go from 0 to the 32 rows"),
        (of_ranks.with_starts_of_the_call, "ValueError", "cu_seqlens must be None"),
        (of_ranks.with_wrong_chunks, "ValueError", "layout='head_tail'"),
        (of_ranks.with_wrong_rows, "ValueError", "x must have"),
        (of_ranks.with_too_many_positions, "ValueError", "n_rows must be an integer from 0"),
        (of_ranks.with_unknown_device, "ValueError", "device must be a device of torch"),
        (of_ranks.with_rows_before, "ValueError", "before must be an integer >= 0"),
        (of_ranks.with_flat_rows, "ValueError", "x must have shape"),
        (of_ranks.with_auto_scale, "ValueError", "lift_scale='auto'"),
        (of_ranks.with_a_string, "TypeError", "context_parallel must be a ContextParallel"),
    ],
)
def test_bad_arguments_are_named(ranks, make, kind, words):
    for answer in ranks.run(4, of_ranks.error_of, make):
        assert answer is not None and answer[0] == kind and words in answer[1], answer


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match="init_process_group"):
        ContextParallel()
    x = torch.randn(1, 1, 2, 4)
    with pytest.raises(TypeError, match="context_parallel"):
        yoso_attention(x, x, x, context_parallel=3)


# ---------------------------------------------------------------------------- which exchange


@pytest.mark.parametrize(
    ("case", "used", "words"),
    [
        ({"exchange": "heads", "inputs": {"heads": 3}}, "keys", "do not divide the 3 heads"),
        (
            {"exchange": "keys", "estimator": Colliding(exact_up_to=9)},
            *("heads", "depend on positions"),
        ),
        ({"exchange": "tables"}, "keys", "gradient of queries and keys of Sampled"),
        ({"exchange": "tables", "train": False}, "tables", None),
    ],
)
def test_an_exchange_that_cannot_is_replaced_with_a_warning(ranks, case, used, words):
    for exchange, reason, warnings in ranks.run(
        2, of_ranks.warnings_of, {"estimator": SAMPLED} | case
    ):
        assert exchange == used
        if words is None:
            assert not warnings
        else:
            assert words in reason
            # It names the line that called.
            assert any(words in warning and place == "cases" for place, warning in warnings)


@pytest.mark.parametrize("is_causal", [False, True])
def test_auto_sends_the_fewest_bytes_and_says_so(ranks, is_causal):
    sizes = list(itertools.product((20, 600), (8, 4, 1), (False, True)))
    cases = [
        {
            "estimator": Soft(n_bits=4, n_hashes=8),
            "is_causal": is_causal,
            "train": train,
            "inputs": {"batch": 1, "heads": 8, "key_heads": key_heads, "n": n},
        }
        for n, key_heads, train in sizes
    ]
    used = set()
    answers = ranks.run(4, of_ranks.chosen, cases)
    assert answers == answers[:1] * 4
    for (n, key_heads, train), (exchange, reason, logged) in zip(sizes, answers[0], strict=True):
        options = {"key_heads": key_heads, "n_bits": 4, "n_hashes": 8, "is_causal": is_causal}
        costs = exchange_costs(4, n, 8, of_ranks.D, **options)
        if key_heads == 1:
            del costs["heads"]
        sent = {name: cost.forward + train * cost.backward for name, cost in costs.items()}
        assert sent[exchange] == min(sent.values())
        assert f"{exchange} {sent[exchange]:,}" in reason
        assert logged == [f"exchange={exchange!r}: {reason}"]
        used.add(exchange)
    assert used == {"tables", "keys"} | (set() if is_causal else {"heads"})


@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
def test_shard_positions_and_gather(ranks, layout):
    for n in (1, 7, 24):
        answers = ranks.run(3, of_ranks.rows_round_trip, layout, n)
        assert all(same for same, _, _ in answers)
        positions = [p for _, p, _ in answers]
        assert sorted(sum(positions, [])) == list(range(n))
        assert [[x / 3 for x in own] for _, _, own in answers] == positions
        if layout == "head_tail" and n == 24:
            assert positions[0] == [0, 1, 2, 3, 20, 21, 22, 23]


@pytest.mark.parametrize("unlike", ["dtype", "sizes", "dims", "dim", "none"])
def test_rows_that_cannot_be_gathered_are_an_error_on_every_rank(ranks, unlike):
    answers = ranks.run(3, of_ranks.gather_unlike_rows, unlike)
    assert all(goes_on for _, goes_on in answers)
    errors = [error for error, _ in answers]
    if unlike == "none":
        assert errors[2] == ("TypeError", "x must be a tensor, got NoneType")
        assert all("rank 2 refused its arguments: x must be" in text for _, text in errors[:2])
    else:
        name = {"dtype": "dtype", "dim": "dim"}.get(unlike, "sizes beside dim")
        assert all(kind == "ValueError" and text.startswith(name) for kind, text in errors)


# ------------------------------------------------------------------------------------- costs


@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_costs_are_the_bytes_that_are_sent(ranks, layout, is_causal):
    sizes = {"batch": 2, "heads": 8, "key_heads": 4, "n": 96}
    cases = [
        {
            "estimator": Soft(n_bits=4, n_hashes=8),
            "exchange": exchange,
            "layout": layout,
            "is_causal": is_causal,
            "inputs": sizes,
            "train": train,
        }
        for exchange in ("tables", "keys", "heads")
        for train in (False, True)
    ]
    answers = ranks.run(4, of_ranks.count_bytes, cases)
    forward = [sum(sent) // 4 for sent in zip(*answers, strict=True)]
    wanted = exchange_costs(
        4,
        96,
        8,
        of_ranks.D,
        key_heads=4,
        batch=2,
        n_bits=4,
        n_hashes=8,
        is_causal=is_causal,
        layout=layout,
    )
    for i, exchange in enumerate(("tables", "keys", "heads")):
        cost = wanted[exchange]
        assert forward[2 * i] == cost.forward
        assert forward[2 * i + 1] == cost.forward + cost.backward


def test_tables_do_not_grow_with_the_length(ranks):
    cases = [
        {"estimator": SAMPLED, "exchange": "tables", "train": False, "inputs": {"n": n}}
        for n in (64, 1024)
    ]
    for short, long in ranks.run(2, of_ranks.count_bytes, cases):
        assert short == long > 0


@pytest.mark.parametrize(("n_bits", "most"), [(8, 1 / 20), (12, 0.6)])
@pytest.mark.parametrize("ranks_", [2, 4, 8, 64, 1024])
def test_tables_send_less_than_a_ring_at_long_lengths(n_bits, most, ranks_):
    costs = exchange_costs(ranks_, 262_144, 8, 64, n_bits=n_bits)
    ring = (ranks_ - 1) * 262_144 // ranks_ * 8 * 128 * 4  # keys and values go round
    assert costs["keys"].forward == ring
    assert costs["tables"].forward <= most * ring


def test_costs_refuse_what_they_do_not_know():
    with pytest.raises(ValueError, match="layout"):
        exchange_costs(2, 10, 1, 4, layout="ring")
    with pytest.raises(ValueError, match="ranks"):
        exchange_costs(0, 10, 1, 4)
    sizes = {"ranks": 2, "n_rows": 10, "heads": 1, "head_dim": 4}
    for name, least in (
        *(("n_rows", 0), ("heads", 1), ("head_dim", 1), ("n_bits", 1), ("n_hashes", 1)),
        *(("batch", 0), ("key_heads", 1), ("value_dim", 1), ("itemsize", 1)),
        ("heads_in_flight", 1),
    ):
        with pytest.raises(ValueError, match=f"{name} must be an integer .*, got {least - 1}"):
            exchange_costs(**sizes | {name: least - 1})
        with pytest.raises(TypeError, match=f"{name} must be an integer .*, got 1.5"):
            exchange_costs(**sizes | {name: 1.5})
    with pytest.raises(ValueError, match="key_heads must divide heads=2, got 3"):
        exchange_costs(2, 8, 2, 16, n_bits=8, key_heads=3)
    with pytest.raises(TypeError, match="is_causal must be a bool"):
        exchange_costs(**sizes, is_causal=1)
