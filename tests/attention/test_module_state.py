"""YosoAttention's state: to and from MultiheadAttention, what it learns, what it says of itself."""

import pytest

torch = pytest.importorskip("torch")

from cases.attention import tokens  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.utils import prune  # noqa: E402

from lshkit.attention import (  # noqa: E402
    Expected,
    Sampled,
    Soft,
    YosoAttention,
    yoso_attention,
)

LIFT = {"unit_norm": "lift", "lift_scale": 60.0}
LEARNERS = [
    (Soft(n_bits=4, n_hashes=6), ["sharpness"]),
    (Soft(n_bits=4, n_hashes=6, hasher="hyperplane"), ["sharpness", "planes"]),
    (Soft(n_bits=4, n_hashes=6, hasher="hyperplane", **LIFT), ("planes", "lift_scale")),
    (Expected(n_bits=4, **LIFT), ["lift_scale"]),
    (Sampled(n_bits=4, n_hashes=6, expectation="never", **LIFT), ["lift_scale"]),
]


@pytest.mark.parametrize(
    "more", [{}, {"conv_window": 3, "estimator": Soft(), "learn": ["sharpness"]}]
)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [{}, {"kdim": 10}, {"vdim": 7}, {"kdim": 10, "vdim": 7}])
def test_to_multihead_attention_and_back(sizes, bias, more):
    module = YosoAttention(24, 3, bias=bias, **sizes, **more).eval()
    multihead = nn.MultiheadAttention(24, 3, bias=bias, batch_first=True, **sizes)
    weights = module.multihead_state_dict()
    assert weights.keys() == multihead.state_dict().keys()
    multihead.load_state_dict(weights)
    inputs = tokens(), tokens(size=module.kdim, seed=1), tokens(size=module.vdim, seed=2)
    assert multihead(*inputs)[0].shape == module(*inputs)[0].shape

    back = YosoAttention(24, 3, bias=bias, **sizes, **more).eval()
    strict = not more  # the convolution and what is learnt have no place there
    missing = back.load_state_dict(multihead.state_dict(), strict=strict).missing_keys
    assert set(missing) == ({"conv.weight", "log_sharpness"} if more else set())
    for name, weight in weights.items():
        assert torch.equal(back.state_dict()[name], weight)
    if not more:
        back.hash_seed.copy_(module.hash_seed)
        assert torch.equal(back(*inputs)[0], module(*inputs)[0])


def test_parametrized_weights_to_multihead_attention():
    module = YosoAttention(24, 3).eval()
    nn.utils.parametrizations.orthogonal(module, "in_proj_weight")
    nn.utils.parametrizations.weight_norm(module.out_proj, "weight")
    multihead = nn.MultiheadAttention(24, 3)
    multihead.load_state_dict(module.multihead_state_dict())
    assert torch.equal(multihead.in_proj_weight, module.in_proj_weight)
    assert torch.equal(multihead.out_proj.weight, module.out_proj.weight)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("change", ["prune", "quantize", "weight_norm"])
def test_weights_that_are_made_anew_are_none_of_multihead_attention(change):
    """Between changes and the next forward they are older than what they are made of."""
    module = YosoAttention(24, 3)
    if change == "prune":
        prune.l1_unstructured(module.out_proj, "weight", 0.5)
    elif change == "quantize":
        module = torch.ao.quantization.quantize_dynamic(module, {nn.Linear})
    else:
        nn.utils.weight_norm(module.out_proj, "weight")
    with pytest.raises(ValueError, match="out_proj.weight must be a parameter, or have"):
        module.multihead_state_dict()
    if change == "prune":
        prune.remove(module.out_proj, "weight")
        weights = module.multihead_state_dict()
        assert (weights["out_proj.weight"] == 0).float().mean() == 0.5


@pytest.mark.parametrize(("estimator", "learn"), LEARNERS, ids=str)
def test_gradients_reach_what_is_learnt(estimator, learn):
    x = tokens()
    module = YosoAttention(24, 3, estimator=estimator, learn=learn, seed=0)
    own = {"planes": "planes", "sharpness": "log_sharpness", "lift_scale": "log_lift_scale"}
    names = {name for name, _ in module.named_parameters()}
    assert {own[name] for name in learn} == names & set(own.values())
    assert module.estimator_parameters().keys() == set(learn)
    for name in {"sharpness", "lift_scale"} & set(learn):
        start = module.estimator_parameters()[name].detach()
        torch.testing.assert_close(start, torch.full((3,), getattr(estimator, name)))
    for train in (True, False):
        out, _ = module.train(train)(x, x, x, is_causal=True)
        leaves = [getattr(module, own[name]) for name in learn]
        for grad in torch.autograd.grad(out.square().sum(), leaves):
            assert grad.isfinite().all() and grad.any()

    other = YosoAttention(24, 3, estimator=estimator, learn=learn).eval()
    with torch.no_grad():
        for name in learn:
            getattr(module, own[name]).add_(0.1)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(x, x, x)[0], module.eval()(x, x, x)[0])
    q, k, v = module._heads(x, x, x)
    out = yoso_attention(
        *(q, k, v),
        estimator=module.eval_estimator,
        parameters=module.estimator_parameters(),
        seed=module.hash_seed,
    )
    wanted = module.out_proj(out.transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x, x, x)[0], wanted)
    fixed = YosoAttention(24, 3, estimator=estimator)
    assert not any(name in dict(fixed.named_parameters()) for name in own.values())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "embed_dim=24, num_heads=3, estimator=Sampled(n_bits=12, n_hashes=32), eval_est"),
        ({}, "eval_estimator=Sampled(n_bits=12, n_hashes=64), normalize='l2'"),
        ({"n_hashes_eval": None}, "eval_estimator=Sampled(n_bits=12, n_hashes=32)"),
        ({"estimator": Soft(n_bits=9)}, "estimator=Soft(n_bits=9, n_hashes=32, n_probes=4, sharp"),
        ({"normalize": None}, "normalize=None"),
        ({"kdim": 5}, "kdim=5"),
        ({"vdim": 7}, "vdim=7"),
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"bias": False}, "bias=False"),
        ({"fresh_hashes": False}, "fresh_hashes=False"),
        ({"conv_window": 3}, "conv_window=3"),
        ({"estimator": Soft(), "learn": ["sharpness"]}, "learn=['sharpness']"),
    ],
)
def test_repr_shows_what_was_set(options, told):
    assert told in YosoAttention(24, 3, **options).extra_repr()
    plain = YosoAttention(24, 3).extra_repr()
    for word in ("kdim", "vdim", "dropout", "bias", "fresh_hashes", "conv_window", "learn"):
        assert word not in plain
