"""Attention over ranks equals attention in one process."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from cases import context_parallel as of_ranks  # noqa: E402

from lshkit.attention import Colliding, Expected, Sampled, Soft  # noqa: E402

STARTS = [0, 5, 40, 41, 41, 150, 203]  # borders of ranks within sequences and on them
SAMPLED = Sampled(n_bits=5, n_hashes=8, expectation="never")
SOFT = Soft(n_bits=5, n_hashes=8)
COLLIDING = Colliding(n_bits=4, n_hashes=8, exact_up_to=100)
# float32, sums in another order, of up to N terms: outputs of about 1, gradients by their largest.
TOLERANCE = 1e-5


def check(ranks, n, cases):
    """All cases on n ranks and in this process; returns the exchanges."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    answers = ranks.run(n, of_ranks.attend_all, cases)[0]
    for case, (exchange, results) in zip(cases, answers, strict=True):
        wanted = of_ranks.attend(None, case)
        assert len(results) == len(wanted)
        for i, (got, expected) in enumerate(zip(results, wanted, strict=True)):
            scale = 1 + expected.abs().max()
            worst = ((got - expected).abs() / scale).max()
            assert worst <= TOLERANCE, f"{case}, {exchange}: tensor {i} is off by {worst:.2g}"
    torch.set_num_threads(threads)
    return [exchange for exchange, _ in answers]


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    ("estimator", "exchange"),
    [
        pytest.param(estimator, exchange, id=f"{estimator.name}-{exchange}")
        for estimator in (SAMPLED, SOFT, Expected(n_bits=5))
        for exchange in ("heads", "keys", "tables")
        if (estimator.name, exchange) != ("expected", "tables")  # which compares all pairs
    ],
)
def test_each_exchange_equals_one_process(ranks, estimator, exchange, n):
    sizes = {"heads": 4, "key_heads": 4} if n == 2 else {"heads": 6, "key_heads": 3}
    cases = [
        {
            "estimator": estimator,
            "exchange": exchange,
            "layout": layout,
            "is_causal": is_causal,
            "inputs": sizes,
            # Sampled's tables carry the gradient of values alone.
            "train": exchange != "tables" or estimator is SOFT,
            **options,
        }
        for is_causal in (False, True)
        for layout, options in (
            ("contiguous", {"normalize": "sum", "joined_bytes": 0}),
            ("head_tail", {"normalize": None, "masked": True}),
            ("contiguous", {"cu_seqlens": STARTS}),
            ("head_tail", {"cu_seqlens": STARTS, "masked": True, "joined_bytes": 0}),
        )
    ]
    assert set(check(ranks, n, cases)) == {exchange}


@pytest.mark.parametrize("n", [2, 3])
def test_tables_are_summed_piece_by_piece(ranks, n):
    """In pieces that divide no table, as large ones are."""
    sizes = {"heads": 3, "key_heads": 3}
    common = {"estimator": SOFT, "exchange": "tables", "inputs": sizes, "piece_bytes": 1000}
    cases = [
        common | {"is_causal": is_causal, "layout": layout}
        for is_causal in (False, True)
        for layout in ("contiguous", "head_tail")
    ]
    assert check(ranks, n, cases) == ["tables"] * len(cases)


def test_one_rank_computes_as_ever(ranks):
    cases = [{"estimator": SAMPLED}, {"estimator": SOFT, "is_causal": True, "cu_seqlens": STARTS}]
    assert check(ranks, 1, cases) == [None, None]


@pytest.mark.parametrize("n", [1, 2])
def test_packed_sequences_of_an_odd_mean_length_have_the_same_estimator(ranks, n):
    """Of 192.5 positions `Sampled` samples, of 256.5 `Colliding` does."""
    cases = [
        {"estimator": e, "inputs": {"n": starts[-1]}, "cu_seqlens": starts}
        for e, starts in ((Sampled(), [0, 193, 385]), (Colliding(), [0, 257, 513]))
    ]
    check(ranks, n, cases)


def test_ranks_may_have_any_number_of_rows(ranks):
    cases = [
        {"estimator": e, "exchange": x, "lengths": lengths, "is_causal": causal, "masked": masked}
        for e, x in (
            *((SAMPLED, "keys"), (SOFT, "tables"), (SAMPLED, "heads")),
            *((COLLIDING, "keys"), (COLLIDING, "heads")),
        )
        for lengths in ([100, 3, 100], [0, 203, 0], [203, 0, 0])
        for causal, masked in ((True, False), (False, True))
        if causal or e is not COLLIDING or x == "heads"
    ]
    learnt = {"sharpness": torch.tensor(2.0)}
    cases += [{"estimator": SOFT, "exchange": "keys", "lengths": [203, 0, 0], "parameters": learnt}]
    check(ranks, 3, cases)


def test_without_keys_the_output_is_zero(ranks):
    """Of queries with a NaN too."""
    cases = [
        {"estimator": e, "exchange": x, "inputs": {"n": 30, "n_keys": 0}, "nan_queries": [3, 20]}
        for e in (SAMPLED, SOFT)
        for x in ("tables", "keys", "heads")
    ]
    cases = [case | {"train": False} for case in cases]  # gradients of keys would be empty
    # No keys are fewer bytes than the queries of "heads".
    assert check(ranks, 2, cases) == ["keys", "keys", "heads"] * 2


def test_rows_with_a_nan_change_no_other_row(ranks):
    cases = [
        {
            "estimator": e,
            "exchange": x,
            "is_causal": causal,
            "normalize": normalize,
            "nan_rows": [5, 150],
        }
        for e, x in ((SAMPLED, "keys"), (SOFT, "tables"), (SOFT, "heads"))
        for causal in (False, True)
        for normalize in (None, "l2", "sum")
    ]
    check(ranks, 3, cases)


def test_masked_keys_reach_no_gradient(ranks):
    generator = torch.Generator().manual_seed(0)
    learnt = {"planes": torch.randn(6, 8, 5, 16, generator=generator), "sharpness": torch.ones(6)}
    cases = [
        {
            "estimator": replace(SOFT, hasher="hyperplane"),
            "exchange": "tables",
            "is_causal": causal,
            "parameters": learnt,
            "masked": True,
            "masked_keys": value,
        }
        for causal in (False, True)
        for value in (torch.inf, torch.nan)
    ]
    check(ranks, 3, cases)
    (results,) = [x for _, x in ranks.run(3, of_ranks.attend_all, cases[:1])[0]]
    assert all((x != 7.0).all() for x in results)  # nor is there a NaN, which 7 stands for


def test_rules_of_lengths_go_by_the_whole_sequence(ranks):
    # The expectation is cheaper up to 6 n_hashes rows: 48, 192 and, packed, a mean of 33.
    cases = [
        {"estimator": Sampled(n_bits=5, n_hashes=hashes), "exchange": "keys", **options}
        for hashes in (8, 32, 40)
        for options in ({}, {"cu_seqlens": STARTS, "is_causal": True})
    ]
    # All pairs of 203 rows, and of a mean of 33; those that collide of 203, with no window.
    pairs = [
        (COLLIDING, {"cu_seqlens": STARTS}),
        (COLLIDING, {"is_causal": True}),
        (replace(COLLIDING, exact_up_to=203), {}),
        (replace(COLLIDING, window=0), {}),
    ]
    cases += [{"estimator": e, "exchange": "keys", **options} for e, options in pairs]
    assert check(ranks, 4, cases) == ["keys"] * len(cases)


def test_options_of_the_estimators(ranks):
    generator = torch.Generator().manual_seed(0)
    planes = torch.randn(4, 8, 5, 16, generator=generator)
    learnt = {"planes": planes, "sharpness": torch.rand(4, generator=generator) + 1}
    hyperplane = Soft(n_bits=5, n_hashes=8, hasher="hyperplane", n_probes=(2, 4))
    lifted = Soft(n_bits=5, n_hashes=8, unit_norm="lift", lift_scale=60.0)
    four = {"heads": 4}
    cases = [
        {
            "estimator": hyperplane,
            "exchange": exchange,
            "parameters": learnt,
            "inputs": four,
            **more,
        }
        for exchange in ("heads", "keys", "tables")
        for more in ({"is_causal": True}, {})
    ]
    cases += [
        {"estimator": lifted, "exchange": exchange, "inputs": four, **more}
        for exchange in ("heads", "keys", "tables")
        for more in ({"is_causal": True}, {"parameters": {"lift_scale": torch.tensor(70.0)}})
    ]
    cases += [
        {"estimator": Sampled(n_bits=5, n_hashes=8, gradient=gradient), "inputs": four}
        for gradient in ("collided", "unbiased")
    ]
    auto = Sampled(unit_norm="lift", lift_scale="auto", expectation="never", n_bits=5)
    cases += [{"estimator": auto, "inputs": four}]
    exchanges = check(ranks, 2, cases)
    assert exchanges[-1] == "heads"


def test_queries_and_keys_of_other_lengths(ranks):
    cases = [
        {"estimator": e, "exchange": x, "inputs": {"n": n, "n_keys": m}, **options}
        for e, x in ((SAMPLED, "keys"), (SAMPLED, "heads"), (SOFT, "tables"))
        for n, m in ((50, 203), (203, 50))
        for options in ({}, {"is_causal": True}, {"is_causal": True, "causal_offset": 20})
    ]
    exchanges = check(ranks, 3, cases)
    assert "tables" in exchanges


def test_results_have_the_same_bits_in_every_run(ranks):
    cases = [
        {"estimator": SOFT, "exchange": exchange, "is_causal": causal, "threads": threads}
        for exchange in ("heads", "keys", "tables")
        for causal in (False, True)
        for threads in (1, 2)
    ]
    first, second = (ranks.run(3, of_ranks.attend_all, cases)[0] for _ in range(2))
    for (_, a), (_, b) in zip(first, second, strict=True):
        assert all(map(torch.equal, a, b))
    for (_, a), (_, b) in zip(first[::2], first[1::2], strict=True):
        assert all(map(torch.equal, a, b))  # at any number of threads


def test_a_gradient_of_values_alone_goes_by_tables(ranks):
    answers = ranks.run(3, of_ranks.value_gradient, SAMPLED)
    for is_causal, (exchange, got, wanted) in enumerate(answers[0]):
        assert exchange == "tables", is_causal
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("exchange", ["tables", "keys", "heads"])
def test_second_derivatives_are_refused(ranks, exchange):
    for message in ranks.run(2, of_ranks.second_derivative, SOFT, exchange):
        # Where rows are exchanged, torch's own message comes first.
        assert "can be differentiated once" in message or "differentiate twice" in message


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("exchange", ["tables", "keys"])
def test_gradients_of_soft_codes_are_numerical_derivatives(ranks, is_causal, exchange):
    for good, used in ranks.run(2, of_ranks.gradcheck, is_causal, exchange):
        assert good and used == exchange


def test_sixteen_bits_are_exchanged_as_they_are(ranks):
    cases = [
        {"estimator": e, "exchange": x, "is_causal": c, "inputs": {"dtype": torch.bfloat16}}
        for e, x in ((SAMPLED, "keys"), (SAMPLED, "heads"), (SOFT, "tables"))
        for c in (False, True)
    ]
    for case, (_, results) in zip(cases, ranks.run(2, of_ranks.attend_all, cases)[0], strict=True):
        wanted = of_ranks.attend(None, case)
        for got, expected in zip(results, wanted, strict=True):
            assert got.dtype is torch.bfloat16
            scale = 1 + expected.abs().max()  # a rounding of each part, and one of their sum
            assert ((got - expected).abs() / scale).max() <= 2**-6


def test_messages_of_the_caller_are_left_alone(ranks):
    for arrived, out, alone in ranks.run(2, of_ranks.beside_other_messages):
        assert (arrived == 7).all()
        torch.testing.assert_close(out, alone, atol=1e-5, rtol=1e-5)


def test_fresh_hash_functions_are_those_of_the_first_rank(ranks):
    for first, second, alone in ranks.run(3, of_ranks.fresh_seeds):
        torch.testing.assert_close(first, alone, atol=1e-5, rtol=1e-5)
        assert not torch.equal(first, second)
