"""Attention with soft codes: rows that belong to their likeliest buckets, with weights."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cases.attention import (  # noqa: E402
    NORMALIZE,
    SAMPLED,
    attention_inputs,
    bits_of_margins,
    normalized,
    padding_mask,
)

from lshkit import reference, torch_ops  # noqa: E402
from lshkit.attention import Soft, yoso_attention  # noqa: E402

CASES = [  # n_q, n_k, d, d_v, n_bits, n_hashes, n_probes
    (1, 1, 1, 1, 3, 2, (4, 4)),
    (17, 17, 32, 32, 8, 8, (2, 2)),
    (33, 20, 60, 64, 4, 5, (4, 4)),
    (20, 33, 64, 7, 12, 6, (4, 4)),
    (40, 40, 24, 40, 9, 3, (8, 3)),
    (30, 30, 16, 33, 5, 4, (4, 1)),
    (30, 30, 16, 20, 5, 4, (1, 4)),
    (14, 14, 16, 16, 16, 2, (4, 6)),
    (10, 12, 16, 8, 12, 3, (3000, 4)),
    (19, 23, 12, 50, 3, 3, (8, 8)),
]


def parameters_of(seed, heads, d, n_bits, n_hashes, hasher):
    family = torch_ops.FAMILY[hasher]
    return torch_ops.hash_parameters(torch.tensor(seed), heads, d, n_bits, n_hashes, family)


def projections_of(x, parameters, hasher, n_bits, n_hashes):
    """Projections of the unit rows at unit variance, in float64 and differentiable."""
    axes = np.broadcast_to(np.eye(x.shape[-1]), (x.shape[1], x.shape[-1], x.shape[-1]))
    matrix = reference.unit_projections(axes, parameters.numpy(), hasher, n_bits, n_hashes)
    norm = x.norm(dim=-1, keepdim=True)
    unit = torch.where(norm > 0, x / norm.clamp(min=1e-300), 0)
    return torch.einsum("bhnd,hdmc->bhnmc", unit, torch.from_numpy(matrix))


def probe_features(projected, codes, selected, n_probes, sharpness):
    """Weights in all 2^n_bits buckets: (batch, heads, n, n_hashes, n_buckets).

    selected: the operator's margins, of which the selection is taken.
    """
    bits = bits_of_margins(selected)
    z = projected.gather(-1, bits)
    own = codes.long()[..., None]
    margins = torch.where(own >> bits & 1 == 1, z, -z)  # |z|
    flips = torch.arange(n_probes)[:, None] >> torch.arange(bits.shape[-1]) & 1
    probes = own ^ (flips << bits[..., None, :]).sum(-1)
    weights = (-2 * sharpness * (flips * margins[..., None, :]).sum(-1)).softmax(-1)
    features = weights.new_zeros(*codes.shape, 2 ** projected.shape[-1])
    return features.scatter(-1, probes, weights)


def bucket_likelihoods(projected, sharpness):
    """prod_b sigmoid(2 sharpness z_b bit_b) of every bucket: no selection."""
    n_bits = projected.shape[-1]
    signs = 2.0 * (torch.arange(2**n_bits)[:, None] >> torch.arange(n_bits) & 1) - 1
    return torch.sigmoid(2 * sharpness * projected[..., None, :] * signs).prod(-1)


def attend(query_features, key_features, value, mask, is_causal, normalize):
    pairs = torch.einsum("bhnmc,bhkmc->bhnk", query_features, key_features)
    pairs = pairs / query_features.shape[-2]
    if is_causal:
        pairs = pairs.tril()
    if mask is not None:
        pairs = pairs * mask[:, None, None]
    return normalized(pairs, value, normalize)


def attention_of(mask=None, **options):
    """A function of queries, keys, values and sharpness."""
    return lambda *tensors: yoso_attention(
        *tensors[:3], mask, parameters={"sharpness": tensors[3]}, **options
    )


def run(function, inputs, grad_out):
    out = function(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, grad_out.to(out.dtype))


def assert_close(got, expected, tolerance=2e-5):
    """Against the largest entry, or what float32 leaves of terms of size 1 that cancel."""
    assert got.shape == expected.shape
    size = max(float(expected.abs().max()), 1e-2)
    assert float((got.double() - expected).abs().max()) <= tolerance * size


def compare(got, expected):
    for name, a, b in zip(
        ("out", "query", "key", "value", "sharpness"), got, expected, strict=True
    ):
        tolerance = 2e-5 if name in ("out", "value") else 2e-4
        assert_close(a, b, tolerance)


@pytest.mark.parametrize(
    ("hasher", "is_causal", "group", "case"),
    [
        *(("hadamard", causal, 1, case) for causal in (False, True) for case in CASES),
        *(("hyperplane", True, 1, case) for case in CASES),
        *(("hadamard", causal, 2, case) for causal in (False, True) for case in CASES[2:5]),
    ],
)
def test_equals_the_dense_formula_and_its_autograd(case, is_causal, hasher, group):
    """group: query heads that share a head of keys, with its functions and sharpness."""
    n_q, n_k, d, d_v, n_bits, n_hashes, probes = case
    inputs = attention_inputs(n_q, n_k, d, d_v, batch=2, heads=2 * group)
    inputs.key, inputs.value = inputs.key[:, ::group], inputs.value[:, ::group]
    mask = padding_mask(2, n_k) if n_k > 1 and not is_causal else None
    sharpness = torch.tensor([1.5, 0.7])
    estimator = Soft(n_bits=n_bits, n_hashes=n_hashes, hasher=hasher, n_probes=probes)
    parameters = parameters_of(3, 2, d, n_bits, n_hashes, hasher)
    saved = torch_ops.soft_attention(
        *(inputs.query, inputs.key, inputs.value, mask, None, None, parameters, sharpness),
        *(torch_ops.FAMILY[hasher], n_bits, n_hashes, *probes, is_causal, 0),
    )
    for normalize in NORMALIZE:
        options = {"is_causal": is_causal, "causal_offset": 0, "normalize": normalize, "seed": 3}
        ours = attention_of(mask, estimator=estimator, enable_gqa=group > 1, **options)

        def dense(query, key, value, sharpness, normalize=normalize):
            features = []
            for x, codes, margins, t in (
                (query, *saved[1:3], probes[0]),
                (key, *saved[3:5], probes[1]),
            ):
                own, beta = (
                    y.repeat_interleave(x.shape[1] // 2, 0) for y in (parameters, sharpness)
                )
                z = projections_of(x, own, hasher, n_bits, n_hashes)
                features.append(probe_features(z, codes, margins, t, beta[:, None, None, None]))
            key, value = (x.repeat_interleave(group, 1) for x in (features[1], value))
            return attend(features[0], key, value, mask, is_causal, normalize)

        tensors = inputs.query, inputs.key, inputs.value, sharpness
        got = run(ours, [x.clone().requires_grad_() for x in tensors], inputs.grad_out)
        expected = run(dense, [x.double().requires_grad_() for x in tensors], inputs.grad_out)
        compare(got, expected)


@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("n_bits", "n_q", "n_k"), [(2, 17, 33), (4, 33, 17), (6, 70, 70)])
def test_all_buckets_need_no_selection(n_bits, n_q, n_k, is_causal, normalize):
    inputs = attention_inputs(n_q, n_k, 20, 24, batch=1, heads=2)
    sharpness = torch.tensor(0.8)
    parameters = parameters_of(5, 2, 20, n_bits, 4, "hadamard")

    options = {"is_causal": is_causal, "causal_offset": 0, "normalize": normalize, "seed": 5}
    ours = attention_of(estimator=Soft(n_bits=n_bits, n_hashes=4, n_probes=2**n_bits), **options)

    def dense(query, key, value, sharpness):
        features = (
            bucket_likelihoods(projections_of(x, parameters, "hadamard", n_bits, 4), sharpness)
            for x in (query, key)
        )
        return attend(*features, value, None, is_causal, normalize)

    tensors = inputs.query, inputs.key, inputs.value, sharpness
    got = run(ours, [x.clone().requires_grad_() for x in tensors], inputs.grad_out)
    expected = run(dense, [x.double().requires_grad_() for x in tensors], inputs.grad_out)
    compare(got, expected)


@pytest.mark.parametrize("n_bits", [8, 12])
@pytest.mark.parametrize("is_causal", [False, True])
def test_one_probe_is_the_sampled_estimator(is_causal, n_bits):
    inputs = attention_inputs(60, 70, 32, 40)
    args = inputs.query, inputs.key, inputs.value, padding_mask(2, 70)
    sampled = replace(SAMPLED, n_bits=n_bits, n_hashes=16)
    estimator = Soft(n_bits=n_bits, n_hashes=16, n_probes=1)
    options = {"is_causal": is_causal, "causal_offset": 0, "seed": 4}
    for normalize in NORMALIZE:
        hard = yoso_attention(*args, estimator=sampled, normalize=normalize, **options)
        soft = yoso_attention(*args, estimator=estimator, normalize=normalize, **options)
        torch.testing.assert_close(soft, hard, rtol=1e-5, atol=1e-6)
    query = inputs.query.clone().requires_grad_()
    out = yoso_attention(query, *args[1:], estimator=estimator, **options)
    out.sum().backward()
    assert (query.grad == 0).all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_long_rows_run_by_run(is_causal):
    # More rows than are expanded at once, in both directions.
    inputs = attention_inputs(40000, 39000, 4, 5, batch=1, heads=1)
    options = {"estimator": Soft(n_bits=3, n_hashes=2), "normalize": "sum", "seed": 2}
    options |= {"is_causal": is_causal, "causal_offset": 0}
    parameters = parameters_of(2, 1, 4, 3, 2, "hadamard")
    saved = torch_ops.soft_attention(
        *(
            inputs.query,
            inputs.key,
            inputs.value,
            None,
            None,
            None,
            parameters,
            torch.tensor([2.0]),
        ),
        *(torch_ops.FAMILY["hadamard"], 3, 2, 4, 4, is_causal, 0),
    )

    def ours(query, key, value):
        return yoso_attention(query, key, value, **options)

    def linear(query, key, value):
        queries, keys = (
            probe_features(projections_of(x, parameters, "hadamard", 3, 2), *codes, 4, 2.0).flatten(
                -2
            )
            for x, codes in ((query, saved[1:3]), (key, saved[3:5]))
        )
        with_ones = torch.cat([value, torch.ones_like(value[..., :1])], -1)
        tables = keys[..., :, None] * with_ones[..., None, :]
        if not is_causal:
            out = queries @ tables.sum(-3)
            return out[..., :-1] / out[..., -1:]
        tables = tables.cumsum(-3)
        beyond = tables[..., -1:, :, :].expand(-1, -1, queries.shape[-2] - keys.shape[-2], -1, -1)
        out = torch.einsum("...nc,...ncd->...nd", queries, torch.cat([tables, beyond], -3))
        return out[..., :-1] / out[..., -1:]

    tensors = inputs.query, inputs.key, inputs.value
    got = run(ours, [x.clone().requires_grad_() for x in tensors], inputs.grad_out)
    expected = run(linear, [x.double().requires_grad_() for x in tensors], inputs.grad_out)
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, 1e-3)


@pytest.mark.parametrize("normalize", NORMALIZE)
def test_rows_that_are_not_finite(normalize):
    inputs = attention_inputs(20, 25, 16, 12)
    inputs.query[0, 0, 3, 5] = float("nan")
    inputs.query[1, 2, 7] = float("inf")
    inputs.key[0, 1, 4, 0] = float("nan")
    inputs.key[1, 0, 2, 1] = float("-inf")
    mask = torch.ones(2, 25, dtype=torch.bool)
    mask[:, 8] = False
    inputs.key[:, :, 8] = float("nan")
    inputs.value[:, :, 8] = float("nan")
    options = {"estimator": Soft(n_bits=5, n_hashes=4), "normalize": normalize, "seed": 0}
    leaves = [x.clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
    leaves.append(torch.tensor(1.5, requires_grad=True))
    got = run(
        lambda *x: yoso_attention(*x[:3], mask, **options, parameters={"sharpness": x[3]}),
        leaves,
        inputs.grad_out,
    )
    parameters = parameters_of(0, 3, 16, 5, 4, "hadamard").numpy()
    arrays = [x.double().numpy() for x in (inputs.query, inputs.key, inputs.value)]
    rest = (parameters, "hadamard", 5, 4), inputs.grad_out.double().numpy(), (4, 4), 1.5
    given = {"key_mask": mask[:, None].numpy(), "normalize": normalize}
    out = reference.soft_attention_forward(*arrays, rest[0], *rest[2:], **given)
    *grads, grad_sharpness = reference.soft_attention_backward(*arrays, *rest, **given)
    expected = [torch.from_numpy(x) for x in (out, *grads)] + [torch.tensor(grad_sharpness.sum())]
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        assert_close(a.nan_to_num(), b.nan_to_num(), 2e-4)


def test_zero_rows_and_no_collisions():
    inputs = attention_inputs(10, 12, 16, 8)
    inputs.query[:, :, 2] = 0
    inputs.key[:, :, 3] = 0
    leaves = [x.clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
    options = {"estimator": Soft(n_bits=16, n_hashes=2), "seed": 0}
    out, *grads = run(lambda *x: yoso_attention(*x, **options), leaves, inputs.grad_out)
    assert all(x.isfinite().all() for x in (out, *grads))
    assert (grads[0][:, :, 2] == 0).all() and (grads[1][:, :, 3] == 0).all()
    none = torch.zeros(2, 12, dtype=torch.bool)
    out, *grads = run(lambda *x: yoso_attention(*x, none, **options), leaves, inputs.grad_out)
    assert all((x == 0).all() for x in (out, *grads))


def test_shapes_dtypes_and_strides():
    inputs = attention_inputs(20, 20, 16, 16)
    options = {"estimator": Soft(n_bits=6, n_hashes=8), "seed": 1}
    args = inputs.query, inputs.key, inputs.value
    full = yoso_attention(*args, **options)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in args]
    assert torch.equal(yoso_attention(*turned, **options), full)
    one_head = yoso_attention(*(x[:, 0] for x in args), **options)
    torch.testing.assert_close(one_head, full[:, 0])
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        short = [x.to(dtype).requires_grad_() for x in args]
        out = yoso_attention(*short, **options)
        out.sum().backward()
        assert out.dtype is dtype and all(x.grad.dtype is dtype for x in short)
    empty = yoso_attention(*(x[:, :, :0] for x in args), **options)
    assert empty.shape == (2, 3, 0, 16)


def test_saved_floats_may_be_rounded():
    """As hooks that save memory do; the numbers of bits in margins are no floats to them."""
    inputs = attention_inputs(64, 64, 16, 16, batch=2, heads=4)
    tensors = [x.requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]

    def rounded(x):
        return x.bfloat16() if x.dtype is torch.float32 else x

    def unrounded(x):
        return x.float() if x.dtype is torch.bfloat16 else x

    def gradients():
        out = yoso_attention(*tensors, estimator=Soft(n_bits=6, n_hashes=16), seed=1)
        return torch.autograd.grad(out, tensors, inputs.grad_out)

    wanted = gradients()
    with torch.autograd.graph.saved_tensors_hooks(rounded, unrounded):
        got = gradients()
    for a, b in zip(got, wanted, strict=True):
        assert (a - b).norm() < 0.02 * b.norm()


@pytest.mark.parametrize("hasher", ["hadamard", "hyperplane"])
def test_operators_keep_torch_s_rules(hasher):
    inputs = attention_inputs(7, 9, 8, 5, heads=2)
    tensors = [x.requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
    parameters = parameters_of(0, 2, 8, 4, 3, hasher).requires_grad_(hasher == "hyperplane")
    sharpness = torch.tensor([1.0, 2.0], requires_grad=True)
    options = torch_ops.FAMILY[hasher], 4, 3, 4, 2, False, 2
    args = *tensors, padding_mask(2, 9), None, None, parameters, sharpness, *options
    ops = torch.ops.lshkit
    torch.library.opcheck(ops.soft_attention, args)
    args = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
    out, *codes = ops.soft_attention(*args)
    masks = (
        [True] * 4,
        [False] * 3 + [True],
        [False, True, True, False],
        [False, True, False, False],
    )
    for of_planes in {False, hasher == "hyperplane"}:
        for output_mask in masks:
            backward = inputs.grad_out, out, *args[:6], *codes, *args[6:], of_planes, output_mask
            torch.library.opcheck(ops.soft_attention_backward, backward)


def test_compiles_and_maps():
    inputs = attention_inputs(9, 9, 8, 8, heads=2)
    args = inputs.query, inputs.key, inputs.value
    options = {"estimator": Soft(n_bits=4, n_hashes=4)}
    seed = torch.tensor(3)
    expected = yoso_attention(*args, seed=seed, **options)
    compiled = torch.compile(
        lambda *x: yoso_attention(*x[:3], seed=x[3], **options), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(*args, seed), expected)
    mapped = torch.vmap(lambda *x: yoso_attention(*x, seed=seed, **options))
    batched = [x[:, None] for x in args]
    torch.testing.assert_close(mapped(*batched)[:, 0], expected)


def test_errors_name_the_argument():
    for wrong in (9, 0, (4, 9), (4, 4, 4)):
        with pytest.raises(ValueError, match="n_probes must be"):
            Soft(n_bits=3, n_probes=wrong)
    with pytest.raises(TypeError, match="n_probes must be"):
        Soft(n_probes=2.5)
    for wrong in (0, -1.0, float("nan"), float("inf"), 1e60):
        with pytest.raises(ValueError, match="sharpness must be a finite number > 0"):
            Soft(sharpness=wrong)
    with pytest.raises(TypeError, match="sharpness must be"):
        Soft(sharpness="2")
    with pytest.raises(TypeError, match="sharpness must be a number: a tensor goes into param"):
        Soft(sharpness=torch.tensor(2.0))


@pytest.mark.parametrize(
    ("sharpness", "error", "words"),
    [
        (torch.tensor(0.0), ValueError, "sharpness must be a finite number > 0"),
        (torch.tensor([1, -1.0, 2]), ValueError, "sharpness must be a finite number > 0"),
        (torch.tensor(1e60, dtype=torch.float64), ValueError, "sharpness must be a finite"),
        (torch.tensor(2), TypeError, "parameters.'sharpness'. must hold floats, got .*int64"),
        (torch.ones(2), ValueError, r"parameters.'sharpness'. must .* shape \(\) or .* \(3,\)"),
        (
            torch.ones(3, device="meta"),
            ValueError,
            "parameters.'sharpness'. must be on query's dev",
        ),
        (2.0, TypeError, "parameters.'sharpness'. must be a torch tensor, got float"),
    ],
)
def test_errors_of_a_sharpness_that_is_given(sharpness, error, words):
    inputs = attention_inputs(5, 5, 8, 8)
    args = inputs.query, inputs.key, inputs.value
    with pytest.raises(error, match=words):
        yoso_attention(*args, estimator=Soft(n_bits=3), parameters={"sharpness": sharpness})
