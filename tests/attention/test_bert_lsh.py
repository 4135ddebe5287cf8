"""bert_lsh_attention: the paper's scores, and what is corrected."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cases.attention import attention_inputs  # noqa: E402

from lshkit import reference, torch_ops  # noqa: E402
from lshkit.attention import bert_lsh_attention, lsh_attention  # noqa: E402
from lshkit.attention.bert_lsh import subset_sums  # noqa: E402


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("n_bits", "n_hashes", "table_size"), [(2, 1, 64), (9, 3, 5), (1, 1, 1)])
def test_faithful_equals_reference(masked, n_bits, n_hashes, table_size):
    case = attention_inputs(19, d=12)
    mask = torch.rand(2, 19, generator=torch.Generator().manual_seed(0)) < 0.7
    buckets = []
    for x in (case.query, case.key):
        parameters = torch_ops.hash_parameters(torch.tensor([3]), 3, 12, n_bits, n_hashes, 0)
        codes = torch_ops.hash(x, parameters, 0, n_bits, n_hashes)
        buckets.append(subset_sums(codes, n_bits, table_size, 3).numpy())
    wanted, counts = reference.bert_lsh_forward(
        *(x.double().numpy() for x in (case.query, case.key, case.value)),
        *(*buckets, 1 / math.sqrt(12), mask[:, None].numpy() if masked else None),
    )
    options = {"n_bits": n_bits, "n_hashes": n_hashes, "table_size": table_size, "seed": 3}
    out, got_counts = bert_lsh_attention(
        *(case.query, case.key, case.value, mask if masked else None),
        **(options | {"faithful": True, "return_counts": True}),
    )
    np.testing.assert_allclose(out.numpy(), wanted, rtol=1e-4, atol=1e-5)
    assert np.array_equal(got_counts.numpy(), counts)


def test_the_papers_number_of_dot_products():
    """28.5 at n = 10, 2 heads, hidden 128: a quarter of the 110 pairs i <= j and false collisions.

    Of two bits, each right with probability 1/2, for queries and keys that are independent.
    """
    faithful, corrected = [], []
    for seed in range(300):
        case = attention_inputs(10, d=64, batch=1, heads=2, seed=seed)
        key = torch.randn(1, 2, 10, 64, generator=torch.Generator().manual_seed(9000 + seed))
        arguments = case.query, key, case.value
        options = {"seed": seed, "return_counts": True}
        faithful.append(bert_lsh_attention(*arguments, faithful=True, **options)[1].sum().item())
        corrected.append(bert_lsh_attention(*arguments, **options)[1].sum().item())
    for counts, low, high in ((faithful, 110 / 4, 1.05), (corrected, 200 / 4, 1)):
        error = np.std(counts) / math.sqrt(len(counts))
        # unequal codes, 3 in 4, have equal subset sums modulo 64 for 1 in 64 of the numbers
        assert low - 4 * error < np.mean(counts) < high * low + 4 * error


def test_default_is_softmax_over_the_pairs():
    case = attention_inputs(70, 50, 16)
    mask = torch.rand(2, 50, generator=torch.Generator().manual_seed(0)) < 0.7
    out, counts = bert_lsh_attention(
        *(case.query, case.key, case.value, mask), n_bits=3, n_hashes=2, seed=1, return_counts=True
    )
    options = {"weighting": "none", "hasher": "hyperplane", "window": 0, "n_sinks": 0}
    wanted, pairs = lsh_attention(
        *(case.query, case.key, case.value, mask),
        **(options | {"n_bits": 3, "n_hashes": 2, "center": False, "seed": 1}),
        return_pairs=True,
    )
    assert torch.equal(out, wanted) and torch.equal(counts, pairs.sum(-1))


@pytest.mark.parametrize("faithful", [False, True])
def test_padding_gradients_and_groups(faithful):
    case = attention_inputs(30, d=16, heads=4)
    key, value = case.key[:, :2].clone(), case.value[:, :2].clone()
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[0, 20:] = False
    options = {"faithful": faithful, "seed": 2, "enable_gqa": True}
    query = case.query.clone().requires_grad_()
    out = bert_lsh_attention(query, key, value, mask, **options)
    out.sum().backward()
    assert out.shape == case.query.shape and torch.isfinite(query.grad).all() and query.grad.any()
    key[0, :, 20:], value[0, :, 20:] = 7.0, torch.nan
    again = bert_lsh_attention(case.query, key, value, mask, **options)
    assert torch.equal(out.detach()[0, :, :20], again[0, :, :20])


def test_faithful_rows_that_are_not_finite_or_masked():
    """NaN goes where a score with it is copied, and no row without one becomes zeros."""
    case = attention_inputs(20, d=16)
    options = {"faithful": True, "seed": 2, "n_bits": 1, "table_size": 2**20}
    queries = [case.query.clone() for _ in range(3)]
    queries[1][0, 0, 5] *= -1
    queries[2][0, 0, 5] = torch.nan  # its code of one bit is that of the row or of its negative
    *before, out = (bert_lsh_attention(x, case.key, case.value, **options) for x in queries)
    bad = out.isnan().any(-1)
    assert bad[0, 0, 5] and not bad[0, 0, :5].any() and not bad[0, 1:].any() and not bad[1:].any()
    assert any(torch.equal(out[~bad], finite[~bad]) for finite in before)
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[0], mask[1, 12:] = False, False
    key = case.key.clone()
    key[~mask[:, None].expand(-1, key.shape[1], -1)] = torch.nan
    tensors = [x.clone().requires_grad_() for x in (case.query, key, case.value)]
    out = bert_lsh_attention(*tensors, mask, **options)
    out.sin().sum().backward()
    assert not out[0].any() and out[1].all() and all(x.grad.isfinite().all() for x in tensors)


def test_faithful_under_vmap_and_on_meta():
    case = attention_inputs(10, d=16)
    inputs = case.query, case.key, case.value

    def attend(*inputs):
        return bert_lsh_attention(*inputs, faithful=True, n_hashes=3, seed=0)

    def one(*inputs):
        return attend(*(x[None] for x in inputs))[0]

    torch.testing.assert_close(torch.func.vmap(one)(*inputs), attend(*inputs))
    out = attend(*(x.to("meta") for x in inputs))
    assert out.is_meta and out.shape == inputs[0].shape


def test_no_heads():
    x = torch.zeros(2, 0, 5, 8)
    for faithful in (False, True):
        out, counts = bert_lsh_attention(x, x, x, faithful=faithful, return_counts=True)
        assert out.shape == x.shape and counts.shape == (2, 0)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"table_size": 0}, ValueError, "table_size"),
        ({"n_bits": 0}, ValueError, "n_bits"),
        ({"faithful": 1}, TypeError, "faithful"),
        ({"scale": -1.0}, ValueError, "scale"),
        (
            {"attn_mask": torch.ones(10, 10, dtype=torch.bool)},
            ValueError,
            "from the codes, and there is no causal order",
        ),
        (
            {"key": torch.zeros(2, 3, 9, 16), "value": torch.zeros(2, 3, 9, 16)},
            ValueError,
            "length",
        ),
    ],
)
def test_bad_input(change, error, words):
    case = attention_inputs(10, d=16)
    arguments = {"query": case.query, "key": case.key, "value": case.value, "faithful": True}
    with pytest.raises(error, match=words):
        bert_lsh_attention(**(arguments | change))
