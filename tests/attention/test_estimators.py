"""Estimators as values, and yoso_attention's arguments around them."""

import dataclasses
import inspect
import json
import warnings
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cases.attention import attention_inputs  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

from lshkit.attention import (  # noqa: E402
    Colliding,
    Estimator,
    Expected,
    Sampled,
    Soft,
    YosoAttention,
    YosoState,
    lsh_attention,
    yoso_attention,
)
from lshkit.attention.estimators import estimator_of  # noqa: E402
from lshkit.attention.estimators.sampled import EXPECTED_KEYS_PER_HASH  # noqa: E402

KINDS = [Sampled, Expected, Soft, Colliding]
OTHERS = {  # of every field a value that is not the default of any kind
    "unit_norm": "lift",
    "lift_scale": 2.5,
    "n_bits": 5,
    "n_hashes": 7,
    "hasher": "hyperplane",
    "max_length": 20_000,
    "gradient": {"sampled": "unbiased", "expected": "lower_bound"},
    "expectation": "never",
    "gradient_hashes": 5,
    "n_probes": (2, 3),
    "sharpness": 0.7,
    "scale": 3.5,
    "window": 4,
    "exact_up_to": 100,
}
CHANGES = [
    (kind, field.name, other.get(kind.name) if isinstance(other, dict) else other)
    for kind in KINDS
    for field in dataclasses.fields(kind)
    for other in [OTHERS[field.name]]
]
VALUES = [
    *(kind() for kind in KINDS),
    *(kind(**{name: other}) for kind, name, other in CHANGES),
    Sampled(unit_norm="lift", lift_scale="auto", n_bits=3, hasher="hyperplane"),
    Soft(n_bits=1, n_hashes=65535, n_probes=2, sharpness=1e-3),
]


@pytest.mark.parametrize("estimator", VALUES, ids=str)
def test_an_estimator_is_a_value(estimator):
    same = type(estimator)(**dataclasses.asdict(estimator))
    assert same == estimator and hash(same) == hash(estimator) and same is not estimator
    assert {estimator: 1}[same] == 1
    assert [other for other in set(VALUES) if other == estimator] == [estimator]
    names = {kind.__name__: kind for kind in KINDS}
    assert eval(repr(estimator), names) == estimator
    as_dict = estimator.to_dict()
    assert as_dict["estimator"] == estimator.name
    assert as_dict.keys() - {"estimator"} == {f.name for f in dataclasses.fields(estimator)}
    for options in (as_dict, json.loads(json.dumps(as_dict))):
        assert Estimator.from_dict(options) == estimator
        assert options["estimator"] == estimator.name  # not taken out of the caller's
    for field in dataclasses.fields(estimator):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(estimator, field.name, 3)
    with pytest.raises((AttributeError, TypeError)):
        estimator.something = 3


@pytest.mark.parametrize(("kind", "name", "other"), CHANGES)
def test_every_field_counts(kind, name, other):
    changed = kind(**{name: other})
    assert getattr(changed, name) == other and changed != kind()
    assert f"{name}={other!r}" in repr(changed)
    fields = {"estimator": kind.name, name: other}
    assert Estimator.from_dict(fields) == changed
    with pytest.raises(TypeError):
        kind(other)  # by name alone


def test_reprs():
    assert repr(Sampled()) == "Sampled(n_bits=12, n_hashes=32)"
    assert repr(Expected(gradient="lower_bound")) == "Expected(n_bits=12, gradient='lower_bound')"
    long = Sampled(max_length=65536)
    assert repr(long) == "Sampled(n_bits=14, n_hashes=32, max_length=65536)"
    assert repr(Soft()) == "Soft(n_bits=12, n_hashes=32, n_probes=4, sharpness=2.0)"
    assert repr(Colliding()) == "Colliding(n_bits=8, n_hashes=32, scale=12.0)"


def test_fields_are_plain_numbers():
    soft = Soft(
        n_bits=np.int64(5), n_hashes=np.uint8(7), n_probes=[np.int32(2), 3], sharpness=np.float32(2)
    )
    assert soft == Soft(n_bits=5, n_hashes=7, n_probes=(2, 3), sharpness=2)
    assert all(type(x) is int for x in (soft.n_bits, soft.n_hashes, *soft.n_probes))
    assert type(soft.sharpness) is float and type(soft.n_probes) is tuple
    sampled = Sampled(gradient_hashes=np.int64(3), lift_scale=np.float64(2))
    assert type(sampled.gradient_hashes) is int
    assert type(sampled.lift_scale) is float and type(Sampled(lift_scale=3).lift_scale) is float
    for estimator in (soft, sampled):
        assert Estimator.from_dict(json.loads(json.dumps(estimator.to_dict()))) == estimator


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Sampled(n_bits=0), ValueError, "n_bits must be an integer from 1 to 16, got 0"),
        (lambda: Expected(n_bits=17), ValueError, "n_bits must be an integer from 1 to 16, got 17"),
        (lambda: Soft(n_bits=8.0), TypeError, "n_bits must be an integer"),
        (lambda: Sampled(n_hashes=0), ValueError, "n_hashes must be an integer from 1 to 65535"),
        (lambda: Soft(n_hashes=65536), ValueError, "n_hashes must be .* got 65536"),
        (lambda: Sampled(n_hashes="32"), TypeError, "n_hashes must be an integer"),
        (lambda: Soft(hasher="cross"), ValueError, "hasher must be one of 'hyperplane', 'hadam"),
        (lambda: Sampled(hasher=None), ValueError, "hasher must be one of .* got None"),
        (
            lambda: Sampled(gradient="exact"),
            ValueError,
            "gradient must be one of 'lower_bound', 'c",
        ),
        (lambda: Sampled(gradient="expected"), ValueError, "gradient must be one of"),
        (lambda: Expected(gradient="eq3"), ValueError, "gradient must be one of 'exact', 'lower_b"),
        (lambda: Expected(gradient="unbiased"), ValueError, "gradient must be one of 'exact'"),
        (lambda: Sampled(expectation="always"), ValueError, "expectation must be one of 'auto'"),
        (lambda: Sampled(expectation=True), ValueError, "expectation must be one of .* got True"),
        (
            lambda: Expected(unit_norm="l1"),
            ValueError,
            "unit_norm must be one of 'l2', 'lift', got",
        ),
        (
            lambda: Soft(unit_norm=None),
            ValueError,
            "unit_norm must be one of 'l2', 'lift', got None",
        ),
        (lambda: Soft(sharpness=True), (TypeError, ValueError), "sharpness must be"),
    ],
)
def test_wrong_values_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("kind", [Sampled, Soft, Colliding])
def test_the_longest_sequence_sets_the_bits(kind):
    """12, or 8 of `Colliding`, as long as there are no more than 4 positions a bucket."""
    least = 8 if kind is Colliding else 12
    assert kind().n_bits == kind(n_bits=None).n_bits == least
    wanted = {1: 1, 512: 7, 1024: 8, 1025: 9, 4096: 10, 16_384: 12, 16_385: 13, 65_536: 14}
    wanted |= {2**18: 16, 2**30: 16}
    for max_length, n_bits in wanted.items():
        n_bits = max(n_bits, least)
        estimator = kind(max_length=max_length)
        assert (estimator.n_bits, estimator.max_length) == (n_bits, max_length)
        assert estimator != kind(n_bits=n_bits) and replace(estimator, n_hashes=7).n_bits == n_bits
    assert kind(max_length=np.int32(9)) == kind(max_length=9)
    assert type(kind(max_length=np.int32(9)).max_length) is int
    for given in ({"n_bits": 9}, {"n_bits": 13}):
        with pytest.raises(ValueError, match="n_bits must be None with max_length=4096, which set"):
            kind(max_length=4096, **given)
    with pytest.raises(ValueError, match="n_bits must be None with max_length=20000, which sets"):
        replace(kind(), max_length=20_000)
    assert replace(kind(), max_length=20_000, n_bits=None).n_bits == 13
    for wrong, error in ((0, ValueError), (2.5, TypeError), (True, TypeError), ("9", TypeError)):
        with pytest.raises(error, match="max_length must be an integer"):
            kind(max_length=wrong)


@pytest.mark.parametrize(
    "options", [{"expectation": "never"}, {"expectation": "auto"}, {"estimator": "soft"}], ids=str
)
def test_a_sequence_longer_than_max_length_warns_once(options):
    estimator = Estimator.from_dict({"max_length": 40} | options)
    case = attention_inputs(41, 41, 16, 8)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for n in (40, 41, 41, 30):
            inputs = (x[..., :n, :] for x in (case.query, case.key, case.value))
            yoso_attention(*inputs, estimator=estimator, seed=0)
            assert len(shown) == (n > 40 or len(shown))
        yoso_attention(case.query, case.key[..., :30, :], case.value[..., :30, :], seed=0)
    assert len(shown) == 1 and shown[0].category is UserWarning
    assert "longer than max_length=40 of" in str(shown[0].message)
    assert shown[0].filename == __file__


def test_a_modules_warning_names_the_line_that_calls_it():
    module, x = YosoAttention(8, 1, estimator=Sampled(max_length=4)), torch.ones(1, 10, 8)
    with pytest.warns(UserWarning, match="longer than max_length=4") as shown:
        module(x, x, x)
    assert [warning.filename for warning in shown] == [__file__]


@pytest.mark.parametrize("kind", [Sampled, Soft])
def test_a_state_warns_beyond_max_length(kind):
    state = YosoState(1, 2, 8, estimator=kind(max_length=4), seed=0)
    key = torch.ones(1, 2, 3, 8)
    state.append(key, key)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state.step(*[key[:, :, :1]] * 3)
        with pytest.raises(UserWarning, match="longer than max_length=4 of"):
            state.step(*[key[:, :, :1]] * 3)


def test_options_of_others_are_not_taken():
    for kind, name in ((Soft, "gradient"), (Expected, "n_hashes"), (Sampled, "sharpness")):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            kind(**{name: 3})
        with pytest.raises(TypeError, match=f"{kind.__name__} has no option '{name}'; it has unit"):
            Estimator.from_dict({"estimator": kind.name, name: 3})
    with pytest.raises(ValueError, match="estimator must be one of 'sampled', .* got 'hard'"):
        Estimator.from_dict({"estimator": "hard"})
    with pytest.raises(TypeError, match="options must be a dict, got list"):
        Estimator.from_dict([])
    with pytest.raises(ValueError, match="n_bits must be"):
        Estimator.from_dict({"n_bits": 99})
    assert Estimator.from_dict({}) == Sampled()


@pytest.mark.parametrize("kind", KINDS)
def test_words_stand_for_the_defaults(kind):
    assert estimator_of(kind.name) == kind()
    case = attention_inputs(40, 40, 16, 8)
    inputs = case.query, case.key, case.value
    by_word = yoso_attention(*inputs, estimator=kind.name, seed=3)
    assert torch.equal(by_word, yoso_attention(*inputs, estimator=kind(), seed=3))
    assert YosoAttention(24, 3, estimator=kind.name).estimator == kind()
    if kind in (Sampled, Soft):
        state = YosoState(1, 2, 8, estimator=kind.name, seed=0)
        assert state.estimator == kind().for_decoding()


def test_the_default_is_sampled():
    for function in (yoso_attention, YosoAttention.__init__, YosoState.__init__):
        assert inspect.signature(function).parameters["estimator"].default == Sampled()


def test_soft_alone_tells_keys_apart():
    """Its defaults: a query that equals one of 200 keys finds that one's value."""
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 1, 2, 200, 64, generator=generator)
    out = yoso_attention(key, key, value, estimator=Soft(), seed=0)
    assert (torch.cosine_similarity(out, value, -1) > 0.9).all()


# ---------------------------------------------------------------- where the expectation is cheaper


def is_expectation(estimator, n_q, n_k, **options):
    """Which of the two was computed: they never agree to the bit."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 1, n_q, 8, generator=generator)
    key, value = torch.randn(2, 1, 1, n_k, 8, generator=generator)
    inputs = query, key, value
    out = yoso_attention(*inputs, estimator=estimator, seed=0, **options)
    expected = yoso_attention(*inputs, estimator=estimator.mean, **options)
    never = replace(estimator, expectation="never")
    sampled = yoso_attention(*inputs, estimator=never, seed=0, **options)
    assert not torch.equal(expected, sampled)
    assert torch.equal(out, expected) != torch.equal(out, sampled)
    return torch.equal(out, expected)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("n_hashes", [1, 2, 8])
def test_the_rule_counts_queries_and_keys(n_hashes, is_causal):
    edge = EXPECTED_KEYS_PER_HASH * n_hashes
    lengths = [(edge, edge), (edge + 1, edge + 1), (1, 500), (500, 1)]
    lengths += [(edge // 2 + 1, 500), (edge // 2, 500), (500, edge // 2), (500, edge // 2 + 2)]
    lengths += [(edge - 1, edge + 2), (2 * edge, edge), (3 * edge // 4, 3 * edge // 2)]
    for n_q, n_k in lengths:
        cheaper = 2 * n_q * n_k <= 6 * n_hashes * (n_q + n_k)
        options = {"is_causal": is_causal, "causal_offset": n_k}
        assert is_expectation(Sampled(n_hashes=n_hashes), n_q, n_k, **options) == cheaper
    assert is_expectation(Sampled(n_hashes=n_hashes), edge, edge)
    assert not is_expectation(Sampled(n_hashes=n_hashes), edge + 1, edge + 1)
    assert not is_expectation(Sampled(n_hashes=n_hashes, expectation="never"), 3, 3)


def test_of_packed_sequences_the_mean_lengths_count():
    estimator = Sampled(n_hashes=2)  # up to 12 positions
    for starts, starts_k, expectation in (
        ([0, 12, 24, 36], None, True),
        ([0, 1, 2, 36], None, True),
        ([0, 13, 26, 39], None, False),
        ([0, 39], None, False),
        ([0, 4, 8], [0, 100, 200], True),  # 2 4 100 <= 12 104
        ([0, 7, 14], [0, 100, 200], False),
    ):
        packing = {"cu_seqlens": torch.tensor(starts)}
        if starts_k is not None:
            packing["cu_seqlens_k"] = torch.tensor(starts_k)
        lengths = starts[-1], (starts_k or starts)[-1]
        assert is_expectation(estimator, *lengths, **packing) == expectation


@pytest.mark.parametrize("gradient", ["lower_bound", "unbiased", "collided"])
def test_the_expectation_has_the_gradient_that_the_samples_estimate(gradient):
    estimator = Sampled(gradient=gradient, n_bits=5, unit_norm="lift", lift_scale=400.0)
    mean = "lower_bound" if gradient == "lower_bound" else "exact"
    assert estimator.mean == Expected(gradient=mean, n_bits=5, unit_norm="lift", lift_scale=400.0)
    case = attention_inputs(20, 20, 8, 5)
    grads = []
    for e in (estimator, estimator.mean):
        inputs = [x.detach().requires_grad_() for x in (case.query, case.key, case.value)]
        grads.append(torch.autograd.grad(yoso_attention(*inputs, estimator=e).sum(), inputs))
    assert all(map(torch.equal, *grads))


# ---------------------------------------------------------------- as scaled_dot_product_attention


@pytest.mark.parametrize("function", [yoso_attention, lsh_attention])
def test_arguments_are_in_the_order_of_scaled_dot_product_attention(function):
    parameters = inspect.signature(function).parameters
    names = list(parameters)[:8]
    wanted = scaled_dot_product_attention.__doc__.split("(", 1)[1].split(")")[0]
    wanted = [part.split(":")[0].split("=")[0].strip() for part in wanted.split(",")]
    assert names == [name for name in wanted if name in names]
    assert names[:4] == ["query", "key", "value", "attn_mask"]
    for name in names[:8]:
        assert parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    kinds = {parameter.kind for parameter in list(parameters.values())[8:]}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}
    if function is yoso_attention:
        assert len(parameters) <= 16


@pytest.mark.parametrize("attend", [yoso_attention, lsh_attention, scaled_dot_product_attention])
def test_a_call_is_swapped_by_its_name(attend):
    case = attention_inputs(9, 9, 16, 8, heads=4)
    key, value = case.key[:, :2], case.value[:, :2]
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    out = attend(case.query, key, value, mask, 0.0, False, scale=None, enable_gqa=True)
    assert out.shape == case.value.shape
    causal = attend(case.query, key, value, None, 0.0, True, scale=None, enable_gqa=True)
    changed = torch.cat([key[:, :, :-1], -key[:, :, -1:]], 2)
    again = attend(case.query, changed, value, None, 0.0, True, scale=None, enable_gqa=True)
    if attend is not lsh_attention:  # whose centre of the keys moves too
        torch.testing.assert_close(again[:, :, :-1], causal[:, :, :-1])


def test_what_has_no_meaning_is_refused_with_the_reason():
    x = torch.zeros(1, 2, 3, 8)
    for wrong in (0.1, True, "0", None):
        with pytest.raises(ValueError, match=r"dropout_p must be 0, got .* attention weights that"):
            yoso_attention(x, x, x, dropout_p=wrong)
        with pytest.raises(ValueError, match="dropout_p must be 0, got"):
            lsh_attention(x, x, x, dropout_p=wrong)
    for wrong in (1.0, 0.125):
        with pytest.raises(ValueError, match="scale must be None, got .* which has no scale"):
            yoso_attention(x, x, x, scale=wrong)
    with pytest.raises(ValueError, match="dropout_p must be 0, got True"):  # is_causal's old place
        yoso_attention(x, x, x, None, True)
