"""Soft codes with planes that are given and learnt."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from cases.attention import NORMALIZE, attention_inputs, leaves_of, padding_mask  # noqa: E402
from test_soft_attention import assert_close, attend, parameters_of, probe_features  # noqa: E402

from lshkit import torch_ops  # noqa: E402
from lshkit.attention import Expected, Sampled, Soft, yoso_attention  # noqa: E402

HYPERPLANE = torch_ops.FAMILY["hyperplane"]
SOFT = Soft(hasher="hyperplane")
CASES = [  # n_q, n_k, d, d_v, n_bits, n_hashes, n_probes
    (1, 1, 1, 1, 3, 2, (4, 4)),
    (33, 20, 60, 64, 4, 5, (4, 4)),
    (20, 33, 64, 7, 12, 6, (2, 8)),
    (30, 30, 16, 33, 5, 4, (4, 1)),
    (30, 30, 17, 20, 5, 4, (1, 6)),
    (19, 23, 12, 50, 3, 3, (8, 8)),
]


def planes_of(heads, n_hashes, n_bits, d, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(heads, n_hashes, n_bits, d, generator=generator)


def selection(query, key, value, planes, probes):
    """Codes and margins of queries, then of keys, as the operator finds them."""
    heads, n_hashes, n_bits, d = planes.shape
    _, q_codes, q_margins, k_codes, k_margins, _ = torch_ops.soft_attention(
        *(x.detach().float() for x in (query, key, value)),
        *(None, None, None, planes.detach().float().reshape(heads, -1, d), torch.ones(1)),
        *(HYPERPLANE, n_bits, n_hashes, *probes, False, 0),
    )
    return (q_codes, q_margins), (k_codes, k_margins)


def dense(query, key, value, planes, mask, causal, normalize, probes, sharpness, chosen):
    """The formula over all pairs and buckets, differentiable in all of it."""
    group = query.shape[1] // key.shape[1]
    features = []
    for x, (codes, margins), t in zip((query, key), chosen, probes, strict=True):
        per_head = planes.repeat_interleave(x.shape[1] // planes.shape[0], 0)
        norm = x.norm(dim=-1, keepdim=True)
        unit = torch.where(norm > 0, x / norm.clamp(min=1e-300), 0)
        projected = torch.einsum("bhnd,hmcd->bhnmc", unit, per_head)
        features.append(probe_features(projected, codes, margins, t, sharpness))
    keys, values = (x.repeat_interleave(group, 1) for x in (features[1], value))
    return attend(features[0], keys, values, mask, causal, normalize)


def check(inputs, planes, mask, causal, normalize, probes, sharpness, **options):
    n_hashes, n_bits = planes.shape[1:3]
    tensors = inputs.query, inputs.key, inputs.value, planes
    ours = leaves_of(*tensors)
    estimator = replace(
        SOFT, n_bits=n_bits, n_hashes=n_hashes, n_probes=probes, sharpness=sharpness
    )
    out = yoso_attention(
        *(*ours[:3], mask),
        is_causal=causal,
        causal_offset=0,
        estimator=estimator,
        parameters={"planes": ours[3]},
        normalize=normalize,
        **options,
    )
    got = torch.autograd.grad(out, ours, inputs.grad_out)
    doubles = leaves_of(*(x.double() for x in tensors))
    chosen = selection(*tensors, probes)
    expected = dense(*doubles, mask, causal, normalize, probes, sharpness, chosen)
    assert_close(out.detach(), expected.detach())
    wanted = torch.autograd.grad(expected, doubles, inputs.grad_out.double(), allow_unused=True)
    for a, b in zip(got, wanted, strict=True):
        assert_close(a, torch.zeros_like(a).double() if b is None else b, 2e-4)


@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_gradient_equals_that_of_the_dense_formula(case, is_causal, normalize):
    n_q, n_k, d, d_v, n_bits, n_hashes, probes = case
    inputs = attention_inputs(n_q, n_k, d, d_v, batch=2, heads=2)
    mask = padding_mask(2, n_k) if n_k > 1 and not is_causal else None
    planes = planes_of(2, n_hashes, n_bits, d)
    check(inputs, planes, mask, is_causal, normalize, probes, 1.5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradient_of_grouped_heads(is_causal):
    inputs = attention_inputs(21, 30, 16, 12, batch=3, heads=6)
    inputs.key, inputs.value = inputs.key[:, ::3], inputs.value[:, ::3]
    mask = None if is_causal else padding_mask(3, 30)
    planes = planes_of(2, 4, 5, 16)
    check(inputs, planes, mask, is_causal, "sum", (4, 2), 0.8, enable_gqa=True)


def test_given_planes_are_those_that_a_seed_draws():
    inputs = attention_inputs(20, 25, 16, 12)
    args = inputs.query, inputs.key, inputs.value
    estimator = replace(SOFT, n_bits=5, n_hashes=6)

    def attend(*args, planes=None, estimator=estimator, seed=None):
        parameters = None if planes is None else {"planes": planes}
        return yoso_attention(*args, estimator=estimator, parameters=parameters, seed=seed)

    planes = parameters_of(4, 3, 16, 5, 6, "hyperplane")
    expected = attend(*args, seed=4)
    assert torch.equal(attend(*args, planes=planes), expected)
    four = planes.reshape(3, 6, 5, 16)
    assert torch.equal(attend(*args, planes=four, seed=9), expected)
    turned = four.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(attend(*args, planes=turned), expected)
    one = attend(*(x[:, 0] for x in args), planes=planes[:1])
    torch.testing.assert_close(one, expected[:, 0])
    lifted = replace(estimator, unit_norm="lift", lift_scale=400.0)
    planes = parameters_of(4, 3, 18, 5, 6, "hyperplane")
    assert torch.equal(
        attend(*args, planes=planes, estimator=lifted), attend(*args, seed=4, estimator=lifted)
    )


def test_rows_that_are_not_finite_or_masked_add_nothing():
    inputs = attention_inputs(20, 25, 16, 12)
    mask = torch.ones(2, 25, dtype=torch.bool)
    mask[:, 8] = False
    planes = planes_of(3, 4, 5, 16)
    options = {"estimator": replace(SOFT, n_bits=5, n_hashes=4), "normalize": "sum"}

    def gradient(args, mask, grad):
        planes_leaf = planes.clone().requires_grad_()
        out = yoso_attention(*args, mask, parameters={"planes": planes_leaf}, **options)
        out.backward(grad)
        return planes_leaf.grad

    args = [inputs.query, inputs.key, inputs.value]
    args[0][:, :, 3] = 0
    keep = torch.arange(25) != 8
    grad = inputs.grad_out.clone()
    grad[:, :, 5] = 0
    expected = gradient([args[0], args[1][:, :, keep], args[2][:, :, keep]], None, grad)
    args[0][:, :, 5, 2] = float("nan")
    args[1][:, :, 8] = float("inf")
    args[2][:, :, 8] = float("nan")
    # The output of the query with a NaN is NaN whatever the planes are.
    for given in (mask, None):
        got = gradient(args, given, inputs.grad_out)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e300])
def test_planes_that_are_bad_tensors(bad):
    inputs = attention_inputs(20, 25, 16, 12)
    planes = planes_of(3, 4, 5, 16).double()
    planes[1, 2, 3, 4] = bad
    options = {"estimator": replace(SOFT, n_bits=5, n_hashes=4), "parameters": {"planes": planes}}
    with pytest.raises(ValueError, match=r"parameters\['planes'\] must be finite"):
        yoso_attention(inputs.query, inputs.key, inputs.value, **options)


def test_other_gradients_are_those_without_the_planes():
    inputs = attention_inputs(90, 110, 32, 40, batch=5)
    planes = planes_of(3, 32, 8, 32)
    options = {"is_causal": True, "causal_offset": 0, "estimator": replace(SOFT, n_bits=8)}
    results = []
    for learned in (planes.clone().requires_grad_(), planes):
        leaves = leaves_of(inputs.query, inputs.key, inputs.value)
        out = yoso_attention(*leaves, parameters={"planes": learned}, **options)
        results.append(torch.autograd.grad(out, leaves, inputs.grad_out))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype):
    inputs = attention_inputs(20, 20, 16, 12)
    options = {"estimator": replace(SOFT, n_bits=4, n_hashes=4)}
    short = leaves_of(*(x.to(dtype) for x in (inputs.query, inputs.key, inputs.value)))
    planes = planes_of(3, 4, 4, 16).to(dtype).requires_grad_()
    out = yoso_attention(*short, parameters={"planes": planes}, **options)
    (grad,) = torch.autograd.grad(out, [planes], inputs.grad_out.to(dtype))
    assert grad.dtype is dtype
    full = leaves_of(*(x.detach().float() for x in short), planes.detach().float())
    out = yoso_attention(*full[:3], parameters={"planes": full[3]}, **options)
    (wanted,) = torch.autograd.grad(out, full[3:], inputs.grad_out.to(dtype).float())
    tolerance = 2e-2 if dtype is torch.bfloat16 else 3e-3  # what the output's gradient rounds to
    assert_close(grad, wanted.double(), tolerance)


def test_no_rows_and_no_gradient():
    inputs = attention_inputs(6, 6, 8, 5)
    planes = planes_of(3, 2, 3, 8).requires_grad_()
    estimator = replace(SOFT, n_bits=3, n_hashes=2)
    options = {"estimator": estimator, "parameters": {"planes": planes}}
    empty = [x[:, :, :0] for x in (inputs.query, inputs.key, inputs.value)]
    yoso_attention(*empty, **options).sum().backward()
    assert torch.equal(planes.grad, torch.zeros_like(planes))
    args = inputs.query, inputs.key, inputs.value
    options["estimator"] = replace(estimator, n_probes=1)
    yoso_attention(*args, **options).sum().backward()
    assert torch.equal(planes.grad, torch.zeros_like(planes))


def test_learning_planes_lowers_a_loss():
    """Planes that tell the features which matter from those that do not."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 128, 16, generator=generator) for _ in range(3))
    key = key + query
    target = yoso_attention(
        *(x[..., :4] for x in (query, key)), value, estimator=Expected(n_bits=6)
    )
    planes = planes_of(2, 8, 5, 16).requires_grad_()
    optimizer = torch.optim.Adam([planes], lr=0.05)
    losses, options = [], {"estimator": replace(SOFT, n_bits=5, n_hashes=8)}
    options["parameters"] = {"planes": planes}
    for _ in range(40):
        out = yoso_attention(query, key, value, **options)
        loss = (out - target).square().sum() / target.square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0], losses


def test_compiles_and_maps():
    inputs = attention_inputs(9, 9, 8, 8, heads=2)
    args = inputs.query, inputs.key, inputs.value
    planes = planes_of(2, 4, 4, 8)

    estimator = replace(SOFT, n_bits=4, n_hashes=4)

    def attend(*x):
        return yoso_attention(*x[:3], estimator=estimator, parameters={"planes": x[3]})

    def loss(planes, *x):
        return (attend(*x, planes) * inputs.grad_out[:1]).sum()

    expected = attend(*args, planes)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    leaves = leaves_of(*args, planes)
    out = compiled(*leaves)
    assert torch.equal(out, expected)
    got = torch.autograd.grad(out, leaves, inputs.grad_out)
    wanted = torch.autograd.grad(attend(*leaves), leaves, inputs.grad_out)
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b)

    # A gradient for each element of a batch, and for each of an ensemble of planes.
    batched = [x[:, None] for x in args]
    grads = torch.vmap(torch.func.grad(loss), (None, 0, 0, 0))(planes, *batched)
    many = torch.stack([planes, planes_of(2, 4, 4, 8, seed=1)])
    for_planes = torch.vmap(torch.func.grad(loss), (0, None, None, None))(
        many, *(x[:1] for x in args)
    )
    for i in range(2):
        leaf = planes.clone().requires_grad_()
        (wanted,) = torch.autograd.grad(loss(leaf, *(x[i] for x in batched)), leaf)
        torch.testing.assert_close(grads[i], wanted)
        leaf = many[i].clone().requires_grad_()
        (wanted,) = torch.autograd.grad(loss(leaf, *(x[:1] for x in args)), leaf)
        torch.testing.assert_close(for_planes[i], wanted)


@pytest.mark.parametrize(
    ("planes", "estimator", "error", "words"),
    [
        (torch.zeros(3, 2, 3, 8), Sampled(), ValueError, "may hold nothing with Sampled.*'planes'"),
        (torch.zeros(3, 2, 3, 8), Expected(), ValueError, "may hold nothing with Expected"),
        (torch.zeros(3, 2, 3, 8), Soft(), ValueError, r"may hold 'sharpness' with Soft.*'planes'"),
        (torch.zeros(2, 2, 3, 8), SOFT, ValueError, r"'planes'. must have .*\(3, 2, 3, 8\)"),
        (torch.zeros(3, 6, 7), SOFT, ValueError, r"'planes'. must have shape.*\(3, 6, 8\)"),
        (torch.zeros(3, 2, 3, 8, dtype=torch.int32), SOFT, TypeError, "'planes'. must hold floats"),
        ([1.0], SOFT, TypeError, "parameters.'planes'. must be a torch tensor, got list"),
        (torch.zeros(3, 6, 8, device="meta"), SOFT, ValueError, "'planes'. must be on query's"),
    ],
)
def test_wrong_planes_are_named(planes, estimator, error, words):
    x = torch.zeros(1, 3, 5, 8)
    if estimator is SOFT:
        estimator = replace(SOFT, n_bits=3, n_hashes=2)
    with pytest.raises(error, match=words):
        yoso_attention(x, x, x, estimator=estimator, parameters={"planes": planes})


def test_only_hyperplanes_have_a_gradient():
    x = torch.randn(1, 1, 5, 8)
    parameters = parameters_of(0, 1, 8, 3, 2, "hadamard")
    args = x, x, x, None, None, None, parameters, torch.ones(1)
    options = torch_ops.FAMILY["hadamard"], 3, 2, 2, 2, False, 0
    out, *codes = torch_ops.soft_attention(*args, *options)
    wanted = True, [True] * 4
    with pytest.raises(ValueError, match="grad_parameters: only hyperplanes"):
        torch_ops.soft_attention_backward(x, out, *args[:6], *codes, *args[6:], *options, *wanted)
