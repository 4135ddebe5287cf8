"""YosoAttention's causal forward, step by step."""

from functools import partial

import pytest

torch = pytest.importorskip("torch")

from cases.attention import EXPECTED, SAMPLED, tokens  # noqa: E402
from cases.decoding import decoded  # noqa: E402

from lshkit.attention import Soft, YosoAttention  # noqa: E402
from lshkit.attention.estimators import estimator_of  # noqa: E402


@torch.no_grad()
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"conv_window": 1},
        {"conv_window": 5, "short_conv": 1},
        {"short_conv": 4},
        {"short_conv": 4, "conv_window": 3, "estimator": Soft(n_bits=5, n_probes=(2, 4))},
    ],
    ids=str,
)
@pytest.mark.parametrize("normalize", ["l2", "sum"])
def test_module(normalize, options, masked):
    options = {"estimator": SAMPLED, "normalize": normalize} | options
    torch.manual_seed(0)  # no projection near zero, where the rounding of chunks flips a bit
    module = YosoAttention(24, 3, dropout=0.5, **options).eval()
    x = tokens(40, seed=3)
    ignored = None
    if masked:
        ignored = torch.zeros(2, 40, dtype=torch.bool)
        ignored[0, :7] = True
    expected, _ = module(x, x, x, key_padding_mask=ignored, is_causal=True)
    for sizes in ([1] * 40, [20, 1, 0, 2, 17], [0, 40]):
        state = module.new_state(2)
        torch.testing.assert_close(decoded(module, state, x, sizes, ignored), expected)
        assert state.length.tolist() == ([33, 40] if masked else [40, 40])


@torch.no_grad()
@pytest.mark.parametrize("options", [{"conv_window": 5}, {"short_conv": 4}])
def test_module_state_keeps_the_convolutions(options):
    """In a copy, a saved state and another order of the sequences."""
    module = YosoAttention(24, 3, estimator=SAMPLED, **options).eval()
    x = tokens(40, seed=3)
    expected, _ = module(x, x, x, is_causal=True)
    state = module.new_state(2)
    module(*[x[:, :30]] * 3, is_causal=True, state=state)
    loaded = module.new_state(2)
    loaded.load_state_dict(state.state_dict())
    for other, order in ((state.clone(), [0, 1]), (loaded, [0, 1]), (state, [1, 0])):
        other.reorder(torch.tensor(order))
        rest = x[order, 30:]
        out, _ = module(rest, rest, rest, is_causal=True, state=other)
        torch.testing.assert_close(out, expected[order, 30:])
    fresh, _ = module(*[x[:, :1]] * 3, is_causal=True, state=state.reset())
    torch.testing.assert_close(fresh, expected[:, :1])


@torch.no_grad()
@pytest.mark.parametrize("name", ["soft", "colliding"])
def test_an_estimator_that_is_set_by_name(name):
    module = YosoAttention(24, 3, estimator=name).eval()
    make = module.new_cache if name == "colliding" else module.new_state
    x = tokens(40, seed=3)
    module.eval_estimator = estimator_of(name)
    wanted = decoded(module, make(2), x, [30, 10])
    module.eval_estimator = name
    torch.testing.assert_close(decoded(module, make(2), x, [30, 10]), wanted)


@torch.no_grad()
def test_module_without_a_batch():
    module = YosoAttention(24, 3, estimator=SAMPLED, conv_window=3).eval()
    x = tokens(40, batch=1)[0]
    state = module.new_state(1)
    out = torch.cat([module(*[row[None]] * 3, is_causal=True, state=state)[0] for row in x])
    torch.testing.assert_close(out, module(x, x, x, is_causal=True)[0])


@torch.no_grad()
def test_module_and_state_must_match():
    module_of = partial(YosoAttention, 24, short_conv=4)
    module = module_of(3).eval()
    x, before = tokens(1), tokens(8)
    state = module.new_state(2)
    module(before, before, before, is_causal=True, state=state)
    before = state.state_dict()

    def error(kind, match, module=module, state=state, x=x, is_causal=True):
        with pytest.raises(kind, match=match):
            module(x, x, x, is_causal=is_causal, state=state)

    error(TypeError, "state must be a YosoState or SoftmaxCache", state=3)
    error(ValueError, "is_causal must be True", is_causal=False)
    error(ValueError, "state must have the module's seed", module_of(3).eval())
    error(ValueError, "module's num_heads=2", module_of(2, seed=state.seed).eval())
    fewer = module_of(3, n_hashes_eval=8).eval()
    error(ValueError, r"module's estimator=Sampled\(n_bits=12, n_hashes=8,", fewer)
    module.eval_estimator, own = Soft(), module.eval_estimator
    error(ValueError, r"module's estimator=Soft\(")
    module.eval_estimator = own
    error(ValueError, "module's conv_window=3", module_of(3, conv_window=3).eval())
    error(ValueError, "query must be \\(2, ", x=tokens(1, batch=3))
    error(ValueError, "training", module.train())
    expected = module_of(3, estimator=EXPECTED)
    with pytest.raises(ValueError, match="estimator must be"):
        expected.new_state(2)
    module.eval()
    with torch.enable_grad(), pytest.raises(RuntimeError, match="no autograd through a state"):
        module(x, x, x, is_causal=True, state=state)
    assert all(torch.equal(x, before[name]) for name, x in state.state_dict().items())
    assert state.to(torch.bfloat16)._inputs.dtype == torch.bfloat16


@torch.no_grad()
@pytest.mark.parametrize("estimator", [SAMPLED, "colliding"])
def test_lengths_of_a_step(estimator):
    module = YosoAttention(24, 3, estimator=estimator, short_conv=4).eval()
    state = module.new_cache(2) if estimator == "colliding" else module.new_state(2)
    x = tokens(2)
    with pytest.raises(ValueError, match="key must have query's length 1 with a state, got 2"):
        module(x[:, :1], x, x, is_causal=True, state=state)
