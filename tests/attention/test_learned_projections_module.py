"""YosoAttention with planes and a sharpness that it learns."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from cases.attention import tokens  # noqa: E402

from lshkit.attention import Sampled, Soft, YosoAttention, YosoState, yoso_attention  # noqa: E402

SOFT = Soft(hasher="hyperplane", n_bits=4, n_hashes=6)
LEARN = {"estimator": SOFT, "learn": ["planes", "sharpness"]}


@pytest.mark.parametrize("unit_norm", ["l2", "lift"])
def test_module_uses_what_it_learns(unit_norm):
    x = tokens()
    estimator = replace(SOFT, sharpness=1.5, unit_norm=unit_norm, lift_scale=60.0)
    module = YosoAttention(24, 3, **LEARN | {"estimator": estimator})
    columns = 8 if unit_norm == "l2" else 10
    assert module.planes.shape == (3, 6, 4, columns) and module.log_sharpness.shape == (3,)
    torch.testing.assert_close(module.log_sharpness.detach().exp(), torch.full((3,), 1.5))
    assert 0.8 < module.planes.std() < 1.2
    with torch.no_grad():
        module.log_sharpness.copy_(torch.tensor([0.1, 0.5, -0.3]))
    assert "learn=['planes', 'sharpness']" in repr(module)
    q, k, v = module._heads(x, x, x)
    parameters = {"planes": module.planes, "sharpness": module.log_sharpness.exp()}
    out = yoso_attention(q, k, v, is_causal=True, estimator=estimator, parameters=parameters)
    expected = module.out_proj(out.transpose(1, 2).flatten(2))
    for train in (True, False):
        out, _ = module.train(train)(x, x, x, is_causal=True)
        torch.testing.assert_close(out, expected)
        for leaf in (module.planes, module.log_sharpness):
            a, b = (
                torch.autograd.grad(y.square().sum(), leaf, retain_graph=True)[0]
                for y in (out, expected)
            )
            assert a.abs().max() > 0
            torch.testing.assert_close(a, b)


def test_module_learns():
    torch.manual_seed(0)
    x, target = tokens(64), tokens(64, seed=1).cumsum(1)
    module = YosoAttention(24, 3, **LEARN)
    learned = [module.planes, module.log_sharpness]
    optimizer = torch.optim.Adam(learned, lr=0.05)
    losses = []
    for _ in range(20):
        loss = (module(x, x, x)[0] - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_module_s_parameters_are_kept():
    x = tokens()
    one, two = (YosoAttention(24, 3, **LEARN).eval() for _ in range(2))
    names = set(YosoAttention(24, 3).state_dict())
    assert set(one.state_dict()) == names | {"planes", "log_sharpness"}
    with torch.no_grad():
        assert not torch.equal(one(x, x, x)[0], two(x, x, x)[0])
        one.log_sharpness.add_(0.3)
        two.load_state_dict(one.state_dict())
        assert torch.equal(one(x, x, x)[0], two(x, x, x)[0])
    one.reset_parameters()
    assert not torch.equal(one.planes, two.planes)
    torch.testing.assert_close(one.log_sharpness.exp(), torch.full((3,), 2.0))
    assert {"planes", "log_sharpness"} <= {name for name, _ in one.named_parameters()}
    meta = YosoAttention(24, 3, device="meta", **LEARN)
    assert meta.planes.is_meta and meta.log_sharpness.is_meta
    short = YosoAttention(24, 3, dtype=torch.bfloat16, **LEARN)
    out, _ = short(*[x.bfloat16()] * 3)
    out.sum().backward()
    assert short.planes.grad.dtype is torch.bfloat16
    plain = YosoAttention(24, 3, estimator=SOFT)
    assert plain.planes is None and plain.log_sharpness is None


@torch.no_grad()
def test_module_decodes_what_its_causal_forward_gives():
    x = tokens()
    module, other = (YosoAttention(24, 3, **LEARN, seed=1).eval() for _ in range(2))
    state = module.new_state(2)
    first = module(*[x[:, :5]] * 3, is_causal=True, state=state)[0]
    saved = state.state_dict()
    again = module.new_state(2)
    again.load_state_dict(saved)
    expected = module(x, x, x, is_causal=True)[0]
    for s in (state.clone(), again):
        rest = [module(y, y, y, is_causal=True, state=s)[0] for y in x[:, 5:].split(1, 1)]
        torch.testing.assert_close(torch.cat([first, *rest], 1), expected)
    with pytest.raises(ValueError, match="state_dict is of a state with other planes"):
        other.new_state(2).load_state_dict(saved)
    sharpness = {"sharpness": module.log_sharpness.exp()}
    drawn = YosoState(2, 3, 8, seed=1, estimator=SOFT, parameters=sharpness)
    with pytest.raises(ValueError, match="state must have the module's planes: make it by new_st"):
        module(x, x, x, is_causal=True, state=drawn)
    planes = {"planes": module.planes}
    with pytest.raises(ValueError, match="parameters may hold nothing with Sampled"):
        YosoState(2, 3, 8, seed=1, estimator=Sampled(), parameters=planes)
    with pytest.raises(ValueError, match="parameters.'planes'. must have shape"):
        YosoState(2, 3, 8, seed=1, estimator=replace(SOFT, n_hashes=7), parameters=planes)


@pytest.mark.parametrize(
    ("estimator", "learn", "error", "words"),
    [
        (Sampled(), ["planes"], ValueError, "learn may hold nothing with Sampled.*, got 'planes'"),
        (Soft(), ["planes"], ValueError, "learn may hold 'sharpness' with Soft.*, got 'planes'"),
        (Sampled(), ["sharpness"], ValueError, "learn may hold nothing.* got 'sharpness'"),
        (SOFT, ["lift_scale"], ValueError, "learn may hold 'sharpness', 'planes' with Soft"),
        (SOFT, "planes", TypeError, "learn must be a list or tuple of names, got 'planes'"),
        (SOFT, [1], TypeError, "learn must be a list or tuple of names"),
        (
            Sampled(unit_norm="lift", lift_scale="auto"),
            ["lift_scale"],
            ValueError,
            "lift_scale must be a number to learn it, got 'auto'",
        ),
    ],
)
def test_wrong_options_of_the_module_are_named(estimator, learn, error, words):
    with pytest.raises(error, match=words):
        YosoAttention(24, 3, estimator=estimator, learn=learn)
