"""The attention that the benchmarks compare with is what its papers say."""

import math

import pytest

torch = pytest.importorskip("torch")

from benchmarks import baselines  # noqa: E402
from benchmarks.baselines.delta_rule import delta_rule  # noqa: E402
from benchmarks.baselines.linformer import Linformer  # noqa: E402
from benchmarks.baselines.performer import Performer, log_features, orthogonal_normals  # noqa: E402
from benchmarks.baselines.projected import (  # noqa: E402
    Softmax,
    Window,
    bfloat16_softmax,
    explicit_softmax,
    softmax,
)

OF_TRANSFORMERS = ("Nystromformer", "Reformer", "Longformer")
DIM, HEADS = 16, 2


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


SMALL = {"Longformer": {"window": 32}, "Nystromformer": {"n_landmarks": 16}}


def layer(name, length, **options):
    if name in OF_TRANSFORMERS:
        pytest.importorskip("transformers")
    options = options or SMALL.get(name, {})
    return baselines.build(name, DIM, HEADS, length, **options).eval()


def heads_of(n, dim=8):
    return [torch.randn(2, HEADS, n, dim) for _ in range(3)]


@pytest.mark.parametrize("n", [1, 7, 130])
@pytest.mark.parametrize("name", baselines.NAMES)
def test_any_length_gives_finite_outputs_and_gradients(name, n):
    attention = layer(name, 130)
    x = torch.randn(2, n, DIM, requires_grad=True)
    out = attention(x)
    assert out.shape == x.shape
    out.square().sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all() and x.grad.abs().max() > 0


@pytest.mark.parametrize("name", baselines.NAMES)
def test_tokens_that_take_no_part_change_no_other(name):
    attention = layer(name, 130)
    x = torch.randn(2, 130, DIM)
    mask = torch.ones(2, 130, dtype=torch.bool)
    mask[0, 90:] = mask[1, :20] = False
    other = torch.where(mask[..., None], x, 5 * torch.randn_like(x))
    outputs = []
    for tokens in (x, other):
        torch.manual_seed(1)  # Reformer draws its hash functions at every call
        outputs.append(attention(tokens, mask))
    assert torch.equal(outputs[0][mask], outputs[1][mask])
    assert outputs[0][mask].isfinite().all()


def test_a_mask_is_as_good_as_fewer_tokens():
    x = torch.randn(1, 40, DIM)
    mask = torch.arange(40)[None] < 23
    for name in ("softmax", "window only", "Linformer", "Performer"):
        attention = layer(name, 40)
        torch.testing.assert_close(attention(x, mask)[:, :23], attention(x[:, :23]))


@pytest.mark.parametrize("fused", [True, False])
def test_linformer_with_identity_projections_is_softmax(fused):
    attention = Linformer(DIM, HEADS, 30, rank=30, fused=fused)
    torch.nn.init.eye_(attention.projection)
    tensors = heads_of(30)
    torch.testing.assert_close(attention.mix(*tensors, None), softmax(*tensors))


def test_performer_features_have_the_exponential_as_mean():
    q, k = torch.randn(2, 6, 8) * 0.3  # larger ones have products too skewed for a mean of few
    normals = orthogonal_normals(2000 * 8, 8).view(2000, 8, 8)
    products = torch.stack(
        [log_features(q, w).exp() @ log_features(k, w).exp().T for w in normals.unbind()]
    )
    error = products.mean(0) - (q @ k.T).exp()
    assert (error.abs() < 4 * products.std(0) / math.sqrt(len(products))).all()


def test_performer_normals_are_orthogonal_normals():
    normals = orthogonal_normals(20, 8)
    assert normals.shape == (20, 8)
    for block in normals.split(8):
        products = block @ block.T
        torch.testing.assert_close(products, products.diagonal().diag(), atol=1e-4, rtol=0)
    lengths = torch.cat([orthogonal_normals(8, 8) for _ in range(500)]).square().sum(-1)
    assert abs(lengths.mean() - 8) < 4 * math.sqrt(2 * 8 / len(lengths))  # chi square, 8 degrees


def test_performer_approaches_softmax_with_more_features():
    query, key, value = heads_of(40)
    tensors = query * 0.6, key * 0.6, value
    exact = softmax(*tensors)
    errors = []
    for n_features in (16, 1024, 65536):
        attention = Performer(DIM, HEADS, 40, n_features=n_features)
        errors.append((attention.mix(*tensors, None) - exact).norm() / exact.norm())
    # By the square root of the features, 8 each time; the noise is below 2.
    assert errors[1] < errors[0] / 4 and errors[2] < errors[1] / 4 and errors[2] < 0.03
    before = attention.normals.clone()
    attention.redraw()
    assert not torch.equal(attention.normals, before)


def test_explicit_softmax_and_windows_are_softmax():
    tensors = heads_of(50)
    mask = torch.rand(2, 50) < 0.7
    torch.testing.assert_close(explicit_softmax(*tensors), softmax(*tensors))
    torch.testing.assert_close(bfloat16_softmax(*tensors), softmax(*tensors), atol=0.02, rtol=0.02)
    torch.testing.assert_close(explicit_softmax(*tensors, mask), softmax(*tensors, mask))
    torch.testing.assert_close(
        Window(DIM, HEADS, 50, reach=64).mix(*tensors, None), softmax(*tensors)
    )
    near = (torch.arange(50)[:, None] - torch.arange(50)).abs() <= 7
    allowed = near & (mask[:, None, None, :] | torch.eye(50, dtype=torch.bool))
    wanted = torch.nn.functional.scaled_dot_product_attention(*tensors, allowed)
    out = Window(DIM, HEADS, 50, reach=7).mix(*tensors, mask)
    torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize("chunk", [1, 16, 64])
def test_the_delta_rule_in_chunks_is_the_one_step_by_step(chunk):
    query, key, value = (x.double() for x in heads_of(45))
    key = torch.nn.functional.normalize(key, dim=-1)
    beta = torch.rand(2, HEADS, 45, dtype=torch.float64)
    state, rows = torch.zeros(2, HEADS, 8, 8, dtype=torch.float64), []
    for t in range(45):
        k, v, q = (x[:, :, t, None] for x in (key, value, query))
        state = state + beta[:, :, t, None, None] * k.transpose(-1, -2) @ (v - k @ state)
        rows.append(q @ state)
    torch.testing.assert_close(delta_rule(query, key, value, beta, chunk), torch.cat(rows, 2))


def copied(attention, wanted):
    """A layer of transformers with the weights of Softmax."""
    inner = attention.attention
    with torch.no_grad():
        for i, name in enumerate(("query", "key", "value")):
            part = slice(i * DIM, (i + 1) * DIM)
            getattr(inner, name).weight.copy_(wanted.project.weight[part])
            getattr(inner, name).bias.copy_(wanted.project.bias[part])
        attention.out.load_state_dict(wanted.out.state_dict())
    return attention


@pytest.mark.parametrize(
    ("name", "options"), [("Nystromformer", {"n_landmarks": 48}), ("Longformer", {"window": 96})]
)
def test_layers_of_transformers_are_softmax_where_they_see_all(name, options):
    wanted = Softmax(DIM, HEADS, 48)
    attention = copied(layer(name, 48, **options), wanted)
    x = torch.randn(2, 48, DIM)
    mask = torch.ones(2, 48, dtype=torch.bool)
    mask[0, 31:] = False
    torch.testing.assert_close(attention(x), wanted(x), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        attention(x, mask)[mask], wanted(x, mask)[mask], atol=1e-5, rtol=1e-5
    )


def test_reformer_has_one_bucket_for_its_queries_as_keys():
    attention = layer("Reformer", 50)  # one chunk: all tokens, but each itself
    x = torch.randn(1, 50, DIM)
    inner = attention.attention
    q, v = (w(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in (inner.query_key, inner.value))
    key = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-6) / math.sqrt(DIM // HEADS)
    scores = (q @ key.transpose(-1, -2)).masked_fill(torch.eye(50, dtype=torch.bool), -torch.inf)
    wanted = attention.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x), wanted, atol=1e-5, rtol=1e-5)


def test_build_names_what_it_does_not_know():
    with pytest.raises(ValueError, match="name must be one of 'softmax'"):
        baselines.build("attention", DIM, HEADS, 10)
    with pytest.raises(ValueError, match="dim must be a multiple of heads=3"):
        baselines.build("softmax", 16, 3, 10)
