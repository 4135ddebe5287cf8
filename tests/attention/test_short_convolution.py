"""YosoAttention(short_conv=...): depthwise convolutions of queries, keys and values."""

import copy
import io
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from cases.attention import EXPECTED, SAMPLED, module_by_hand, padding_mask, tokens  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.utils import parametrize, prune  # noqa: E402

from lshkit.attention import Colliding, YosoAttention, YosoState  # noqa: E402
from lshkit.attention.convolution import convolve_features  # noqa: E402

WIDTH = 4


def module_of(seed=0, **options):
    torch.manual_seed(seed)
    options = {"short_conv": WIDTH, "estimator": SAMPLED, "seed": 0} | options
    return YosoAttention(24, 3, **options).eval()


@pytest.mark.parametrize("width", [1, 4, 13])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_forward(masked, is_causal, width):
    module = module_of(short_conv=width)
    x = tokens()
    ignored = ~padding_mask(2, 11) if masked else None
    out, _ = module(x, x, x, key_padding_mask=ignored, is_causal=is_causal)
    expected = module_by_hand(module, x, x, x, (ignored, ignored), is_causal)
    torch.testing.assert_close(out, expected)
    # A key that is another tensor: its padding says nothing of the queries.
    out, _ = module(x, x.clone(), x, key_padding_mask=ignored, is_causal=is_causal)
    torch.testing.assert_close(out, module_by_hand(module, x, x, x, (None, ignored), is_causal))
    alone, _ = module(*[x[0]] * 3, is_causal=is_causal)
    wanted = module_by_hand(module, *[x[:1]] * 3, is_causal=is_causal)
    torch.testing.assert_close(alone[None], wanted)


def test_sequences_shorter_than_the_kernel():
    module = module_of()
    for x in (tokens(1), tokens(3)):
        torch.testing.assert_close(module(x, x, x)[0], module_by_hand(module, x, x, x))
    assert module(*[tokens(0)] * 3, is_causal=True)[0].shape == (2, 0, 24)


@torch.no_grad()
@pytest.mark.parametrize("is_causal", [False, True])
def test_padding_on_the_left_changes_nothing(is_causal):
    """Not even a NaN in it: ignored positions are the zeros that stand before every sequence."""
    module, x = module_of(), tokens()
    padded = F.pad(x, (0, 0, 6, 0), value=torch.nan)
    ignored = torch.arange(17).expand(2, -1) < 6
    out, _ = module(padded, padded, padded, key_padding_mask=ignored, is_causal=is_causal)
    torch.testing.assert_close(out[:, 6:], module(x, x, x, is_causal=is_causal)[0])


@torch.no_grad()
def test_packed_sequences_equal_each_alone():
    """Empty ones, and some that are shorter than the kernel, among them."""
    module, x = module_of(), tokens(40, batch=1)
    starts = torch.tensor([0, 1, 1, 3, 6, 22, 40, 40])
    for dtype in (torch.int32, torch.int64):
        out, _ = module(x, x, x, is_causal=True, cu_seqlens=starts.to(dtype))
        for a, b in zip(starts, starts[1:], strict=False):
            part = x[:, a:b]
            torch.testing.assert_close(out[:, a:b], module(part, part, part, is_causal=True)[0])
    with pytest.raises(ValueError, match="cu_seqlens must go from 0 to the 40 rows, got 1 to 40"):
        module(x, x, x, cu_seqlens=starts[1:])
    with pytest.raises(TypeError, match="cu_seqlens must be an integer tensor, got list"):
        module(x, x, x, cu_seqlens=[0, 40])


def test_errors():
    for value, match in ((0, "short_conv must be an integer >= 1"), (2.5, "short_conv must be an")):
        with pytest.raises((TypeError, ValueError), match=match):
            YosoAttention(24, 3, short_conv=value)
        with pytest.raises((TypeError, ValueError), match=match):
            YosoState(1, 3, 8, seed=0, short_conv=value)
    for other in ({"num_key_heads": 1}, {"value_dim": 4}):
        (name,) = other
        with pytest.raises(ValueError, match=f"{name} must be .* with short_conv=4:"):
            YosoState(1, 3, 8, seed=0, short_conv=4, **other)
    x, module = tokens(), module_of()
    state = module_of(short_conv=3).new_state(2)
    with torch.no_grad(), pytest.raises(ValueError, match="module's short_conv=4, has 3"):
        module(x, x, x, is_causal=True, state=state)
    with pytest.raises(ValueError, match="with short_conv=3, this one has 4"):
        module.new_state(2).load_state_dict(state.state_dict())


@pytest.mark.parametrize("options", [{}, {"vdim": 20}, {"bias": False, "short_conv": 2}], ids=str)
def test_induction_heads(options):
    """A token that came before gets the value of what followed it then."""
    estimator = Colliding(scale=2000, exact_up_to=1000)
    module = module_of(estimator=estimator, normalize=None, **options)
    if module.in_proj_bias is not None:
        nn.init.normal_(module.in_proj_bias)
    nn.init.zeros_(module.short_conv_weight.chunk(3)[2])
    nn.init.ones_(module.short_conv_weight.chunk(3)[2][..., -1])  # values as they are
    others = {name: x.clone() for name, x in module.state_dict().items()}
    module.init_induction_heads()

    query = tokens(n=40).repeat(1, 2, 1)
    value = tokens(n=40, size=module.vdim, seed=1).repeat(1, 2, 1)
    out, _ = module(query, query, value, is_causal=True)
    weight = module.v_proj_weight
    weight = module.in_proj_weight.chunk(3)[2] if weight is None else weight
    bias = None if module.in_proj_bias is None else module.in_proj_bias.chunk(3)[2]
    expected = module.out_proj(F.linear(value, weight, bias))
    after = 40 + module.short_conv  # the positions of a query are in both copies
    torch.testing.assert_close(out[:, after:-1], expected[:, after + 1 :], atol=1e-4, rtol=0)

    changed = {"q_proj_weight", "k_proj_weight", "in_proj_weight", "in_proj_bias"}
    for name, x in module.state_dict().items():
        if name not in changed | {"short_conv_weight"}:
            assert torch.equal(x, others[name]), name
        elif name != "k_proj_weight" and name != "q_proj_weight":
            assert torch.equal(x.chunk(3)[2], others[name].chunk(3)[2]), name


def test_induction_heads_need_convolutions():
    for width in (None, 1):
        with pytest.raises(ValueError, match=f"short_conv must be at least 2, got {width}"):
            module_of(short_conv=width).init_induction_heads()
    with pytest.raises(ValueError, match="kdim must be embed_dim=24, got 20"):
        module_of(kdim=20).init_induction_heads()


class Twice(nn.Module):
    def forward(self, x):
        return 2 * x


def test_induction_heads_of_weights_that_are_computed():
    module = module_of()
    for name in ("in_proj_weight", "short_conv_weight"):
        nn.utils.parametrizations.weight_norm(module, name)
    module.init_induction_heads()
    query, key, _ = module.in_proj_weight.chunk(3)
    torch.testing.assert_close(key, query)
    query, key, _ = module.short_conv_weight.chunk(3)
    torch.testing.assert_close(key[..., :-1], query[..., 1:])
    assert not query[..., 0].any() and not key[..., -1].any()

    pruned = partial(prune.random_unstructured, amount=0.5)
    doubled = partial(parametrize.register_parametrization, parametrization=Twice())
    options = {"orthogonal_map": "matrix_exp", "use_trivialization": False}
    orthogonal = partial(nn.utils.parametrizations.orthogonal, **options)
    for change, match in (
        (pruned, "short_conv_weight must be a parameter"),
        (doubled, "Twice does not implement right_inverse"),
        (orthogonal, "not possible to assign"),
    ):
        module = nn.utils.parametrizations.weight_norm(module_of(), "in_proj_weight")
        module = change(module, "short_conv_weight")
        before = copy.deepcopy(module.state_dict())
        with pytest.raises((ValueError, RuntimeError), match=match):
            module.init_induction_heads()
        assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())


def test_gradients_by_differences():
    x = torch.randn(2, 3, 9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(3, 4, 3, dtype=torch.float64)
    position = torch.tensor([0, 1, 2, 0, 0, 1, 2])
    for at in (None, position):
        inputs = x.clone().requires_grad_(), weight.clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda x, w, at=at: convolve_features(x, w, at), inputs)


def test_as_a_module():
    """Saved, copied, made anew, on meta, in a graph, exported, in low precision."""
    module, x = module_of(estimator=EXPECTED), tokens()
    assert "short_conv=4" in repr(module) and "short_conv" not in repr(YosoAttention(24, 3))
    assert module.short_conv_weight.shape == (9, 8, 4)
    expected, _ = module(x, x, x, is_causal=True)
    memory = io.BytesIO()
    torch.save(module.state_dict(), memory)
    memory.seek(0)
    other = module_of(seed=1, estimator=EXPECTED)
    other.load_state_dict(torch.load(memory))
    for same in (other, copy.deepcopy(module)):
        assert torch.equal(same(x, x, x, is_causal=True)[0], expected)
    multihead = nn.MultiheadAttention(24, 3, batch_first=True)
    multihead.load_state_dict(module.multihead_state_dict())
    made = YosoAttention(24, 3, short_conv=WIDTH, seed=0, device="meta").to_empty(device="cpu")
    torch.manual_seed(0)
    made.reset_parameters()
    torch.manual_seed(0)
    new = YosoAttention(24, 3, short_conv=WIDTH, seed=0)
    assert all(torch.equal(made.state_dict()[name], x) for name, x in new.state_dict().items())
    assert new.short_conv_weight.abs().max() <= 0.5 and new.short_conv_weight.std() > 0.2

    torch._dynamo.reset()
    fast = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(fast(x, x, x, is_causal=True)[0], expected)
    length = torch.export.Dim("length", min=2, max=64)
    exported = torch.export.export(
        module, (x, x, x), {"is_causal": True}, dynamic_shapes={
            **{name: {1: length} for name in ("query", "key", "value")}, "is_causal": None
        }
    )  # fmt: skip
    longer = tokens(30)
    out, _ = exported.module()(longer, longer, longer, is_causal=True)
    torch.testing.assert_close(out, module(longer, longer, longer, is_causal=True)[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half, _ = module(x, x, x, is_causal=True)
    assert half.dtype == torch.bfloat16
    half.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in module.parameters())
    short = module_of(estimator=EXPECTED, dtype=torch.bfloat16)
    assert short(*[x.bfloat16()] * 3)[0].dtype == torch.bfloat16
