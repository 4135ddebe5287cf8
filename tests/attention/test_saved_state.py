"""YosoState.load_state_dict takes all of a state_dict or, with an error, nothing."""

import pytest

torch = pytest.importorskip("torch")

from cases.decoding import qkv, state_for  # noqa: E402

from lshkit.attention import Soft  # noqa: E402

REFUSED = {
    "meta": lambda x: x.to("meta"),
    "another dtype": lambda x: x.to(torch.float64),
    "a boolean": lambda x: x.bool(),
    "another shape": lambda x: x[None],
    "numpy": lambda x: x.numpy(),
    "a list": lambda x: x.tolist(),
    "sparse": lambda x: x.reshape(-1).to_sparse(),
    "nested": lambda x: torch.nested.nested_tensor([x.reshape(-1)]),
    "none": lambda x: None,
}
FILLED = {
    "estimator": Soft(n_bits=8, n_hashes=12, hasher="hyperplane"),
    "normalize": "sum",
    "conv_window": 3,
}


def filled_state(seed=0):
    """A state with all there can be in one, and its contents."""
    tensors = qkv(seed=seed)
    planes = torch.randn(3, 12 * 8, 20, generator=torch.Generator().manual_seed(2))
    parameters = {"sharpness": torch.tensor([1.0, 2.0, 3.0]), "planes": planes}
    state = state_for(*tensors, parameters=parameters, **FILLED)
    state.prefill(*tensors)
    state._tail.copy_(torch.ones(()))
    return state, state.state_dict()


def contains(state, wanted):
    got = state.state_dict()
    return got.keys() == wanted.keys() and all(torch.equal(got[k], x) for k, x in wanted.items())


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("name", sorted(filled_state()[1]))
def test_entries_that_are_refused_change_nothing(name, what):
    state, before = filled_state()
    saved = filled_state(seed=1)[1]
    with pytest.raises((TypeError, ValueError), match=name):
        state.load_state_dict({**saved, name: REFUSED[what](saved[name])})
    assert contains(state, before)
    state.load_state_dict(saved)
    assert contains(state, saved)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("positions", torch.tensor(-1), "positions must be from 0 to"),
        ("positions", torch.tensor(float("nan")), "positions must be torch.int64"),
        ("positions", torch.tensor(28), "masked must be at most positions=28, got 29"),
        ("masked", torch.tensor([0, 30]), "masked must be at most positions=29, got 30"),
        ("counts", -torch.ones(6, 12, 256), "counts must be finite and >= 0"),
        ("counts", torch.full((6, 12, 256), torch.nan), "counts must be finite and >= 0"),
        ("sharpness", torch.tensor([1.0]), "of a state with sharpness="),
        ("sharpness", torch.full((3,), torch.nan), "of a state with sharpness="),
        (3, torch.tensor(3), "differs in .'3'"),
    ],
)
def test_values_that_are_refused_change_nothing(name, value, message):
    state, before = filled_state()
    saved = filled_state(seed=1)[1] | {"masked": torch.tensor([29, -5])}
    with pytest.raises(ValueError, match=message):
        state.load_state_dict({**saved, name: value})
    assert contains(state, before)


def test_tensors_of_any_layout_are_loaded():
    state, before = filled_state()
    saved = filled_state(seed=1)[1]
    strided = {k: x.unsqueeze(-1).repeat_interleave(2, -1)[..., 0] for k, x in saved.items()}
    assert not strided["sums"].is_contiguous()
    with torch.inference_mode():
        made = {k: x.clone() for k, x in saved.items()}
    for other in (strided, made):
        state.load_state_dict(before)
        state.load_state_dict(other)
        assert contains(state, saved)
    graph = saved["sums"].clone().requires_grad_() * 1
    state.load_state_dict(saved | {"sums": graph})
    assert not state._sums.requires_grad and torch.equal(state._sums, saved["sums"])


def test_entries_that_share_memory_with_the_state():
    """Each is what it was when the call began."""
    state, saved = filled_state()
    state.load_state_dict(saved | state._tensors() | {"sums": state._sums.flip(0)})
    assert torch.equal(state._sums, saved["sums"].flip(0))
    state.load_state_dict(saved)
    counts, rows = state._counts, state._sums.view(-1)[: saved["counts"].numel()]
    rows.abs_()
    wanted = rows.view_as(counts).clone()
    state.load_state_dict(saved | {"counts": rows.view_as(counts)})
    assert torch.equal(state._counts, wanted) and torch.equal(state._sums, saved["sums"])


def test_a_state_that_was_changed_in_inference_mode_is_loaded_outside():
    state, _ = filled_state()
    saved = filled_state(seed=1)[1]
    with torch.inference_mode():
        state.to(torch.bfloat16).to(torch.float32)  # its tail is an inference tensor now
    state.load_state_dict(saved)
    assert contains(state, saved)
