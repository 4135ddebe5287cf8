"""Grouped query heads: a head of keys and values is read by several heads of queries."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from cases.attention import SAMPLED  # noqa: E402

from lshkit import reference, torch_ops  # noqa: E402
from lshkit.attention import Expected, yoso_attention  # noqa: E402

GROUP, KEY_HEADS, D, D_V, N_BITS, N_HASHES = 3, 2, 20, 12, 5, 8


def problem(n_queries=19, n_keys=23, batch=2, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(heads, rows, columns):
        return torch.randn(batch, heads, rows, columns, generator=generator).to(dtype)

    query, grad = normal(GROUP * KEY_HEADS, n_queries, D), normal(GROUP * KEY_HEADS, n_queries, D_V)
    return query, normal(KEY_HEADS, n_keys, D), normal(KEY_HEADS, n_keys, D_V), grad


def repeated(x):
    return x.repeat_interleave(GROUP, 1)


def codes(query, key, hasher, seed=3):
    """What the attention hashes to: a set of functions for each head of keys."""
    family = torch_ops.FAMILY[hasher]
    sizes = KEY_HEADS, D, N_BITS, N_HASHES, family
    parameters = torch_ops.hash_parameters(torch.tensor([seed]), *sizes)
    shared = parameters.repeat_interleave(GROUP, 0)
    return tuple(
        torch_ops.hash(x, shared, family, N_BITS, N_HASHES).numpy() for x in (query, repeated(key))
    )


def gradients(out, grad, *inputs):
    return torch.autograd.grad(out, inputs, grad)


@pytest.mark.parametrize("normalize", ["l2", "sum", None])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("hasher", ["hadamard", "hyperplane"])
def test_sampled_equals_repeated_heads(hasher, causal, normalize):
    query, key, value, grad = problem()
    mask = torch.rand(2, key.shape[2], generator=torch.Generator().manual_seed(1)) > 0.3
    inputs = [x.requires_grad_() for x in (query, key, value)]
    estimator = replace(SAMPLED, n_bits=N_BITS, n_hashes=N_HASHES, hasher=hasher)
    options = {"estimator": estimator, "is_causal": causal, "causal_offset": 0, "seed": 3}
    out = yoso_attention(*inputs, mask, enable_gqa=True, normalize=normalize, **options)
    arrays = [x.detach().numpy() for x in (query, repeated(key), repeated(value))]
    both = codes(query.detach(), key.detach(), hasher)
    words = {"causal": causal, "normalize": normalize, "key_mask": mask.numpy()[:, None]}
    expected = reference.yoso_forward(*arrays, *both, **words)
    torch.testing.assert_close(out, torch.from_numpy(expected).float(), rtol=1e-4, atol=1e-5)

    grads = gradients(out, grad, *inputs)
    wanted = reference.yoso_backward(*arrays, *both, grad.numpy(), N_BITS, **words)
    for got, want, grouped in zip(grads, wanted, (False, True, True), strict=True):
        want = torch.from_numpy(want)
        if grouped:
            want = want.unflatten(1, (KEY_HEADS, GROUP)).sum(2)
        torch.testing.assert_close(got, want.float(), rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("causal", [False, True])
def test_expected_equals_repeated_heads(causal, dtype):
    query, key, value, grad = problem(dtype=dtype)
    inputs = [x.requires_grad_() for x in (query, key, value)]
    options = {"estimator": Expected(n_bits=N_BITS), "is_causal": causal}
    out = yoso_attention(*inputs, enable_gqa=True, **options)
    wanted = yoso_attention(query, repeated(key), repeated(value), **options)
    torch.testing.assert_close(out, wanted)
    for got, want in zip(
        gradients(out, grad, *inputs), gradients(wanted, grad, *inputs), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (
            ((2, 6, 5, 8), (2, 4, 5, 8), (2, 4, 5, 8)),
            "key must have a number of heads that divides",
        ),
        (((2, 6, 5, 8), (2, 3, 5, 8), (2, 2, 5, 8)), "value must have key's batch and heads"),
        (((2, 6, 5, 8), (1, 3, 5, 8), (1, 3, 5, 8)), "key must have query's batch"),
        (((6, 5, 8), (3, 5, 8), (3, 5, 8)), "key must be .batch, heads, rows, columns."),
    ],
)
def test_wrong_groups_are_named(shapes, words):
    with pytest.raises(ValueError, match=words):
        yoso_attention(*map(torch.zeros, shapes), enable_gqa=True)


def test_fewer_heads_of_keys_need_the_option():
    query, key, value, _ = problem()
    with pytest.raises(ValueError, match="key must have query's batch and heads"):
        yoso_attention(query, key, value)
