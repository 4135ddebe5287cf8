"""The sum verb with weights: rows that belong to several buckets of a hash."""

import numpy as np
import pytest
from cases.buckets import ROUNDING, weighted_case
from hypothesis import given, settings
from hypothesis import strategies as st

from lshkit import reference
from lshkit.buckets import bucket_sum


def assert_close(got, arrays, weights, **options):
    expected = reference.bucket_sum(*arrays, **weights, **options)
    sizes = {k: None if w is None else np.abs(w.astype(np.float64)) for k, w in weights.items()}
    size = reference.bucket_sum(
        *arrays[:2], np.abs(arrays[2].astype(np.float64)), **sizes, **options
    )
    assert got.shape == expected.shape
    assert (np.abs(got - expected) <= 2 * ROUNDING[got.dtype.type] * size).all()


SHAPES = [  # n_q, n_k, n_hashes, n_buckets, d_v, n_probes
    (1, 1, 1, 1, 1, (1, 1)),
    (9, 9, 3, 8, 16, (4, 4)),
    (33, 17, 5, 16, 20, (2, 2)),
    (17, 40, 32, 64, 64, (4, 4)),
    (65, 65, 3, 256, 35, (3, 5)),
    (30, 50, 7, 512, 64, (4, 1)),
    (50, 30, 7, 4096, 33, (1, 4)),
    (20, 20, 2, 65536, 7, (16, 8)),
    (40, 40, 3, 32, 50, (32, 2)),
    (40, 40, 2, 16, 32, (20, 33)),
]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_all_pairs(shape, causal, dtype):
    arrays, weights = weighted_case(*shape, dtype=dtype)
    got = bucket_sum(*arrays, shape[3], causal=causal, **weights)
    assert got.dtype == dtype
    assert_close(got, arrays, weights, causal=causal)


@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 9),
    st.integers(1, 300),
    st.integers(1, 40),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_shape(n_q, n_k, n_hashes, n_buckets, d_v, n_probes, causal):
    arrays, weights = weighted_case(n_q, n_k, n_hashes, n_buckets, d_v, n_probes)
    assert_close(
        bucket_sum(*arrays, n_buckets, causal=causal, **weights), arrays, weights, causal=causal
    )


def test_long_rows_run_by_run():
    # More probes than are held at once: 70000 rows, and 2000 rows of 4096 probes each.
    arrays, weights = weighted_case(70000, 70000, 1, 64, 3, (2, 2))
    for causal in (False, True):
        got = bucket_sum(*arrays, 64, causal=causal, **weights)
        query, key, values = (x.astype(np.float64) for x in arrays)
        table = np.zeros((64, 3))
        rows = [0, 1, 35000, 69999]
        for i in rows:
            table[:] = 0
            last = i + 1 if causal else len(values)
            for a in range(2):
                products = weights["key_weights"][:last, 0, a, None] * values[:last]
                np.add.at(table, key[:last, 0, a].astype(int), products)
            expected = sum(
                weights["query_weights"][i, 0, a] * table[int(query[i, 0, a])] for a in range(2)
            )
            np.testing.assert_allclose(got[i], expected, rtol=1e-3, atol=3e-3)
    arrays, weights = weighted_case(2000, 1999, 1, 4096, 3, (2, 1500), dtype=np.float64)
    got = bucket_sum(*arrays, 4096, causal=True, **weights)
    one = [x[:1] for x in arrays]
    last = bucket_sum(
        arrays[0][-1:],
        *arrays[1:],
        4096,
        **(weights | {"query_weights": weights["query_weights"][-1:]}),
    )
    np.testing.assert_allclose(got[-1:], last, rtol=1e-10, atol=1e-12)
    first = {k: w[:1] for k, w in weights.items()}
    np.testing.assert_allclose(got[:1], bucket_sum(*one, 4096, **first), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("absent", ["query_weights", "key_weights"])
def test_a_side_without_weights_has_one_code(absent):
    side = {"query_weights": 0, "key_weights": 1}[absent]
    arrays, weights = weighted_case(20, 30, 4, 8, 5, (3, 3))
    arrays = list(arrays)
    arrays[side] = np.ascontiguousarray(arrays[side][..., 0])
    weights[absent] = None
    assert_close(bucket_sum(*arrays, 8, **weights), arrays, weights)


def test_ones_of_a_single_probe_are_the_plain_sum():
    arrays, weights = weighted_case(40, 50, 32, 64, 40, (1, 1))
    ones = {name: np.ones_like(w) for name, w in weights.items()}
    plain = bucket_sum(arrays[0][..., 0], arrays[1][..., 0], arrays[2], 64)
    np.testing.assert_allclose(bucket_sum(*arrays, 64, **ones), plain, rtol=1e-5, atol=1e-6)


def test_leading_dimensions_and_masks():
    arrays, weights = weighted_case(9, 11, 4, 8, 5, (2, 3), leading=(2, 3))
    mask = np.random.default_rng(1).random((2, 1, 11)) < 0.6
    values = np.where(mask[..., None], arrays[2], np.nan)  # what is masked may hold anything
    got = bucket_sum(*arrays[:2], values, 8, key_mask=mask, **weights)
    assert_close(got, arrays, weights, key_mask=mask)
    shared = {
        "query_weights": weights["query_weights"][0, 0],
        "key_weights": weights["key_weights"],
    }
    got = bucket_sum(arrays[0][0, 0], *arrays[1:], 8, **shared)
    for i in np.ndindex(2, 3):
        one = bucket_sum(
            arrays[0][0, 0],
            *(x[i] for x in arrays[1:]),
            8,
            query_weights=shared["query_weights"],
            key_weights=weights["key_weights"][i],
        )
        np.testing.assert_array_equal(got[i], one)


def test_errors_name_the_argument():
    (query, key, values), weights = weighted_case(5, 6, 3, 8, 4, (2, 3))
    with pytest.raises(ValueError, match="query_weights must have the shape"):
        bucket_sum(query, key, values, 8, **(weights | {"query_weights": np.ones((5, 3))}))
    with pytest.raises(ValueError, match="query_codes must have shape"):
        bucket_sum(query[:, 0], key, values, 8, **(weights | {"query_weights": np.ones((5, 2))}))
    with pytest.raises(ValueError, match="key_codes must have the 3 hashes"):
        bucket_sum(
            query,
            key[:, :2],
            values,
            8,
            **(weights | {"key_weights": weights["key_weights"][:, :2]}),
        )
    with pytest.raises(ValueError, match="key_codes must be from 0"):
        bucket_sum(query, key + np.uint8(8), values, 8, **weights)
    with pytest.raises(TypeError, match="key_weights must hold real numbers"):
        bucket_sum(
            query, key, values, 8, **(weights | {"key_weights": weights["key_weights"] * 1j})
        )


# ---- torch ----

torch = pytest.importorskip("torch")


def tensors(arrays, weights, dtype=torch.float64):
    arrays = [torch.from_numpy(x) for x in arrays]
    arrays[2] = arrays[2].to(dtype).requires_grad_()
    weights = {
        name: None if w is None else torch.from_numpy(w).to(dtype).requires_grad_()
        for name, w in weights.items()
    }
    return arrays, weights


def dense_sum(
    query_codes,
    key_codes,
    values,
    n_buckets,
    causal=False,
    key_mask=None,
    *,
    query_weights,
    key_weights,
):
    """The same through one-hot codes, for autograd."""
    features = []
    for codes, weights in ((query_codes, query_weights), (key_codes, key_weights)):
        if weights is None:
            codes, weights = codes[..., None], values.new_ones(codes.shape + (1,))
        hot = torch.nn.functional.one_hot(codes.long(), n_buckets).to(weights.dtype)
        features.append((hot * weights[..., None]).sum(-2))
    pairs = torch.einsum("...ihb,...jhb->...ij", *features) / features[0].shape[-2]
    if causal:
        pairs = pairs.tril()
    if key_mask is not None:
        pairs = pairs * key_mask[..., None, :]
    return pairs @ values


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES[1:7])
def test_gradients_equal_autograd(shape, causal, masked):
    arrays, weights = tensors(*weighted_case(*shape, leading=(2,), dtype=np.float64))
    mask = torch.rand(2, shape[1], generator=torch.Generator().manual_seed(0)) < 0.6
    mask = mask if masked else None
    inputs = [arrays[2], *weights.values()]
    grads = []
    for function in (bucket_sum, dense_sum):
        out = function(*arrays, shape[3], causal=causal, key_mask=mask, **weights)
        grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).double()
        grads.append((out.detach(), *torch.autograd.grad(out, inputs, grad_out)))
    for got, expected in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


def test_gradients_in_float32_and_of_one_side():
    arrays, weights = weighted_case(40, 50, 4, 32, 33, (4, 4))
    grads = []
    for function, dtype in ((bucket_sum, torch.float32), (dense_sum, torch.float64)):
        inputs, given = tensors(arrays, weights, dtype)
        function(*inputs, 32, **given).square().sum().backward()
        grads.append([x.grad.double() for x in (inputs[2], *given.values())])
    for got, expected in zip(*grads, strict=True):
        torch.testing.assert_close(
            got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())
        )
    arrays, weights = tensors(*weighted_case(9, 9, 4, 8, 5, (1, 3), dtype=np.float64))
    arrays[0], weights["query_weights"] = arrays[0][..., 0], None
    inputs = arrays[2], weights["key_weights"]
    results = [
        torch.autograd.grad(function(*arrays, 8, **weights).sum(), inputs)
        for function in (bucket_sum, dense_sum)
    ]
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


def test_operators_keep_torch_s_rules():
    (query, key, values), weights = tensors(*weighted_case(5, 6, 3, 8, 4, (2, 3), leading=(2, 1)))
    mask = torch.tensor([[1, 1, 0, 1, 1, 0], [1, 0, 1, 1, 1, 1]], dtype=torch.bool)
    ops = torch.ops.lshkit
    args = query, key, values, *weights.values(), 8, 1, mask
    torch.library.opcheck(ops.weighted_bucket_sum, args)
    one_sided = query[..., :1].contiguous(), key, values, None, weights["key_weights"], 8, 0, None
    torch.library.opcheck(ops.weighted_bucket_sum, one_sided)
    detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
    grad_out = torch.ones(2, 1, 5, 4, dtype=torch.float64)
    torch.library.opcheck(ops.weighted_bucket_sum_backward, (grad_out, *detached))


def test_vmap_and_func_grad():
    (query, key, values), weights = tensors(*weighted_case(5, 6, 3, 8, 4, (2, 3), leading=(4,)))
    pair = weights["query_weights"].detach(), weights["key_weights"].detach()
    values = values.detach()

    def loss(values, query_weights, key_weights, query, key):
        options = {"query_weights": query_weights, "key_weights": key_weights}
        return bucket_sum(query, key, values, 8, **options).square().sum()

    grads = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(values, *pair, query, key)
    for i in range(4):
        one = [x[i].clone().requires_grad_() for x in (values, *pair)]
        expected = torch.autograd.grad(loss(*one, query[i], key[i]), one)
        for got, wanted in zip(grads, expected, strict=True):
            torch.testing.assert_close(got[i], wanted)


def test_no_rows_and_no_columns():
    for n_q, n_k, d_v in ((0, 5, 4), (5, 0, 4), (5, 5, 0)):
        arrays, weights = weighted_case(n_q, n_k, 2, 8, d_v)
        assert (bucket_sum(*arrays, 8, **weights) == np.zeros((n_q, d_v))).all()
        inputs, given = tensors(arrays, weights)
        bucket_sum(*inputs, 8, **given).sum().backward()
        for x in (inputs[2], *given.values()):
            assert (x.grad == 0).all()
