"""YosoState as an object: saved, copied, reordered, and its checks."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cases.attention import NORMALIZE  # noqa: E402
from cases.decoding import (  # noqa: E402
    SEED,
    positions,
    qkv,
    same_contents,
    state_for,
)

from lshkit import _C  # noqa: E402
from lshkit.attention import Sampled, Soft, YosoState  # noqa: E402


@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("table_dtype", [torch.float32, torch.float16])
def test_state_dict(tmp_path, table_dtype, normalize):
    tensors = qkv()
    mask = torch.rand(2, 29, generator=torch.Generator().manual_seed(1)) < 0.7
    options = {"normalize": normalize, "table_dtype": table_dtype}
    state = state_for(*tensors, **options)
    state.prefill(*tensors, mask)
    torch.save(state.state_dict(), tmp_path / "state.pt")
    other = state_for(*tensors, **options)
    other.prefill(*tensors)  # to be overwritten
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert same_contents(state, other)
    assert torch.equal(state.length, other.length)
    one = positions(tensors, 3, 4)
    assert torch.equal(state.step(*one), other.step(*one))


@pytest.mark.parametrize(
    "name, value",
    [
        ("batch_size", 3),
        ("num_heads", 8),
        ("head_dim", 21),
        ("value_dim", 5),
        ("num_key_heads", 2),
        ("normalize", "sum"),
        ("normalize", None),
        ("dtype", torch.bfloat16),
        ("table_dtype", torch.float16),
        ("conv_window", 3),
        ("seed", 12),
    ],
)
def test_a_state_of_other_options_is_not_loaded(name, value):
    arguments = {
        "batch_size": 2,
        "num_heads": 4,
        "head_dim": 20,
        "value_dim": 9,
        "num_key_heads": 4,
        "seed": SEED,
    }
    state, other = YosoState(**arguments), YosoState(**{**arguments, name: value})
    told = repr(str(value)) if isinstance(value, torch.dtype) else repr(value)
    with pytest.raises(ValueError, match=f"{name}={told}"):
        state.load_state_dict(other.state_dict())
    assert same_contents(state, YosoState(**arguments))


@pytest.mark.parametrize(
    ("estimator", "told"),
    [
        (Sampled(n_bits=7), "n_bits=7, this one has 12"),
        (Sampled(n_hashes=13), "n_hashes=13, this one has 32"),
        (Sampled(hasher="hyperplane"), "hasher='hyperplane', this one has 'hadamard'"),
        (Soft(n_bits=8), "estimator='soft', this one has 'sampled'"),
    ],
    ids=str,
)
def test_a_state_of_another_estimator_is_not_loaded(estimator, told):
    state, other = (YosoState(2, 4, 20, estimator=e, seed=SEED) for e in (Sampled(), estimator))
    with pytest.raises(ValueError, match=told):
        state.load_state_dict(other.state_dict())
    assert same_contents(state, YosoState(2, 4, 20, seed=SEED))


def test_what_a_state_does_not_depend_on_is_no_part_of_it():
    one = Sampled(gradient="unbiased", expectation="auto", gradient_hashes=None)
    states = [YosoState(1, 2, 8, estimator=e, seed=SEED) for e in (one, Sampled(gradient_hashes=2))]
    assert states[0].estimator == states[1].estimator == Sampled(expectation="never")
    states[0].load_state_dict(states[1].state_dict())


def test_a_damaged_state_dict_is_not_loaded():
    state = YosoState(1, 2, 8, seed=SEED)
    saved = state.state_dict()
    with pytest.raises(TypeError, match="state_dict must be a dict, got YosoState"):
        state.load_state_dict(state)
    with pytest.raises(ValueError, match="version 4, got 5"):
        state.load_state_dict({**saved, "version": torch.tensor(5)})
    with pytest.raises(ValueError, match="'masked'"):
        state.load_state_dict({name: x for name, x in saved.items() if name != "masked"})
    with pytest.raises(ValueError, match="'more'"):
        state.load_state_dict({**saved, "more": torch.tensor(2)})
    with pytest.raises(ValueError, match="sums must be"):
        state.load_state_dict({**saved, "sums": saved["sums"][1:]})
    config = bytes(saved["config"].tolist())
    for damaged, told in (
        (config.replace(b'"hadamard"', b'"simhash"'), "hasher='simhash', this one has 'hadamard'"),
        (config.replace(b'"hasher"', b'"hashes"'), "differs in .'config'."),
        (config[:-1], "config must hold the JSON of a dict"),
        (b"\xff", "config must hold the JSON of a dict"),
        (b"3", "config must hold the JSON of a dict"),
    ):
        damaged = torch.tensor(list(damaged), dtype=torch.uint8)
        with pytest.raises(ValueError, match=told):
            state.load_state_dict({**saved, "config": damaged})


@pytest.mark.parametrize("normalize", ["l2", "sum"])
def test_reorder_and_clone(normalize):
    tensors = qkv(batch=3)
    mask = torch.ones(3, 29, dtype=torch.bool)
    mask[2, :4] = False
    state = state_for(*tensors, normalize=normalize)
    state.prefill(*tensors, mask)
    clone = state.clone()
    assert same_contents(state, clone)
    indices = torch.tensor([2, 0, 2, 1])
    assert clone.reorder(indices) is clone
    assert clone.batch_size == 4 and clone.length.tolist() == [25, 29, 25, 29]
    one = positions(tensors, 5, 6)
    picked = [x[indices] for x in one]
    before = state.state_dict()
    assert torch.equal(clone.step(*picked), state.clone().step(*one)[indices])
    after = state.state_dict()  # untouched by what happened to the clones
    assert all(torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(ValueError, match="indices must be from 0 to 2, got 3"):
        state.reorder(torch.tensor([0, 3]))
    with pytest.raises(TypeError, match="indices must be integers .*, got dtype torch.float32"):
        state.reorder(torch.tensor([0.0]))
    with pytest.raises(ValueError, match="indices must be integers"):
        state.reorder([])
    assert state.clone().reorder(np.array([2], np.int16)).length.tolist() == [25]
    with pytest.raises(TypeError, match="indices must be integers .*, got NoneType"):
        state.reorder(None)


def test_numpy_integers_do_not_overflow():
    x = torch.ones(100, 4, 1, 2)
    state = YosoState(
        np.uint8(100), 4, 2, estimator=Sampled(n_bits=1, n_hashes=np.int8(1)), conv_window=3, seed=0
    )
    assert state.step(x, x, x).shape == x.shape and state.length.sum() == 100


def test_widths_that_are_numpy_integers_are_saved():
    state = YosoState(1, 4, 2, conv_window=np.int64(3), short_conv=np.int32(2), seed=0)
    YosoState(1, 4, 2, conv_window=3, short_conv=2, seed=0).load_state_dict(state.state_dict())


def test_defaults_of_torch_do_not_matter():
    arguments = {"batch_size": 2, "num_heads": 2, "head_dim": 8, "seed": SEED}
    soft = arguments | {"estimator": Soft(n_bits=8)}
    soft["parameters"] = {"sharpness": torch.tensor(2.1)}
    wanted = YosoState(**soft).state_dict()
    torch.set_default_dtype(torch.float16)
    try:
        given = YosoState(**soft).state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        state = YosoState(**soft).reorder([1, 0, 0])
    assert all(torch.equal(given[name], x) for name, x in wanted.items())
    assert torch.equal(state.state_dict()["sharpness"], wanted["sharpness"])


def test_reset():
    tensors = qkv()
    state = state_for(*tensors, normalize="sum")
    first = state.prefill(*tensors)
    assert state.reset() is state and state.length.tolist() == [0, 0]
    assert torch.equal(state.prefill(*tensors), first)


def test_to():
    tensors = qkv()
    state = state_for(*tensors)
    assert state.to(torch.bfloat16).to("cpu") is state
    assert state.step(*(x[:, :, :1].bfloat16() for x in tensors)).dtype is torch.bfloat16
    with pytest.raises(NotImplementedError, match="device"):
        state.to("meta")
    with pytest.raises(TypeError, match="dtype"):
        state.to(torch.int32)


def test_repr():
    text = repr(YosoState(2, 4, 8, num_key_heads=2, seed=SEED))
    assert text.startswith("YosoState(2, 4, 8, 8, num_key_heads=2, estimator=Sampled(n_bits=12, ")
    assert "length=[0, 0]" in text


# --- Checks at the door -------------------------------------------------------------------------


def test_arguments_of_the_constructor():
    def error(kind, match, *sizes, **options):
        with pytest.raises(kind, match=match):
            YosoState(*(sizes or (1, 4, 8)), **{"seed": 0, **options})

    error(ValueError, "batch_size", 0, 4, 8)
    error(TypeError, "num_heads", 1, 4.0, 8)
    error(ValueError, "head_dim", 1, 4, 0)
    error(ValueError, "value_dim", 1, 4, 8, 0)
    error(ValueError, "num_key_heads must divide", num_key_heads=3)
    error(ValueError, "estimator must be Sampled or Soft to decode", estimator="expected")
    error(ValueError, "estimator must be .* got 'hard'", estimator="hard")
    error(TypeError, "estimator must be .* got 8", estimator=8)
    error(ValueError, "normalize", normalize="l1")
    for lifted in (Sampled(unit_norm="lift"), Soft(unit_norm="lift")):
        error(ValueError, "unit_norm must be 'l2' to decode", estimator=lifted)
    error(TypeError, "parameters must be a dict", parameters=[])
    error(ValueError, "parameters may hold nothing", parameters={"planes": torch.ones(1)})
    error(ValueError, "seed", seed=-1)
    error(TypeError, "dtype", dtype=torch.int32)
    error(TypeError, "table_dtype", table_dtype=torch.bfloat16)
    error(ValueError, "conv_window", conv_window=4)


def test_arguments_of_a_call():
    query, key, value = tensors = qkv()
    state = state_for(*tensors)
    empty = state.state_dict()
    wrong = [
        (TypeError, "query must be a torch tensor", (query.numpy(), key, value)),
        (TypeError, "query must be a torch tensor, got NoneType", (None, key, value)),
        (TypeError, "key must be a torch tensor, got NoneType", (query, None, value)),
        (TypeError, "value must be a torch tensor, got NoneType", (query, key, None)),
        (ValueError, "query must be \\(2, 3, n, 20\\)", (query[:1], key, value)),
        (ValueError, "key must be \\(2, 3, n, 20\\)", (query, key[..., :19], value)),
        (ValueError, "value must be \\(2, 3, n, 9\\)", (query, key, value[0])),
        (ValueError, "value must have key's length", (query, key, value[:, :, 1:])),
        (TypeError, "key must have the state's dtype", (query, key.double(), value)),
        (NotImplementedError, "value must be on the cpu", (query, key, value.to("meta"))),
        (RuntimeError, "key requires grad", (query, key.clone().requires_grad_(), value)),
        (TypeError, "attn_mask must be a boolean", (*tensors, torch.ones(2, 29))),
        (TypeError, "attn_mask must be a boolean", (*tensors, True)),
        (ValueError, "attn_mask must be \\(2, 29\\)", (*tensors, torch.ones(29) > 0)),
    ]
    for kind, match, arguments in wrong:
        for method in (state.step, state.prefill):
            with pytest.raises(kind, match=match):
                method(*arguments)
    with pytest.raises(ValueError, match="key must have query's length"):
        state.prefill(query[:, :, 1:], key, value)
    with pytest.raises(TypeError, match="query must be a torch tensor, got NoneType"):
        state.attend(None)
    assert all(torch.equal(x, empty[name]) for name, x in state.state_dict().items())
    with torch.no_grad():
        state.step(query, key.clone().requires_grad_(), value)


def test_the_core_checks_what_it_is_given():
    state = YosoState(1, 4, 8, num_key_heads=2, seed=SEED)
    query, key = torch.zeros(1, 4, 1, 8), torch.zeros(1, 2, 1, 8)
    out = torch.zeros(1, 4, 1, 8)

    def decode(sums=state._sums, counts=None, batch=1, normalize=2, causal=False, **tensors):
        given = {"query": query, "key": key, "value": key, "key_mask": None, "out": out, **tensors}
        options = {"normalize": normalize, "causal": causal, **given}
        _C.decode(sums, counts, batch, *state._options[:-1], **options)

    decode()
    for match, arguments in [
        ("sums", {"sums": state._sums.double()}),
        ("sums", {"sums": state._sums[:, :, 1:]}),
        ("sums", {"batch": 3}),
        ("batch", {"batch": 0}),
        ("counts", {"normalize": 1}),
        ("counts", {"counts": torch.zeros(2, 32, 255)}),
        ("query and key", {"query": None, "key": None}),
        ("value", {"value": None}),
        ("out", {"out": None}),
        ("out", {"out": out[:, :2]}),
        ("query", {"query": torch.zeros(1, 3, 1, 8), "out": torch.zeros(1, 3, 1, 8)}),
        ("key", {"key": torch.zeros(1, 2, 2, 8), "value": torch.zeros(1, 2, 2, 8), "causal": True}),
        ("key_mask", {"key_mask": torch.zeros(1, 2, dtype=torch.bool)}),
    ]:
        with pytest.raises((TypeError, ValueError), match=match):
            decode(**arguments)
