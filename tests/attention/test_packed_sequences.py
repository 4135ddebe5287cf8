"""Packed sequences: as if each were attended to alone, with the same hash functions."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from cases.attention import EXPECTED, SAMPLED  # noqa: E402

from lshkit.attention import YosoAttention, yoso_attention  # noqa: E402

LENGTHS = (5, 0, 37, 1, 64)
KEY_LENGTHS = (9, 3, 20, 0, 70)
HEADS, D, D_V = 3, 24, 17


def starts(lengths, dtype=torch.int32):
    return torch.tensor((0, *torch.tensor(lengths).cumsum(0)), dtype=dtype)


def problem(lengths, key_lengths, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)

    def packed(rows, columns):  # (1, T, H, D) transposed, as models have it
        x = torch.randn(1, rows, HEADS, columns, generator=generator).to(dtype)
        return x.transpose(1, 2).requires_grad_()

    n_keys = sum(key_lengths)
    query, key, value = packed(sum(lengths), D), packed(n_keys, D), packed(n_keys, D_V)
    return (query, key, value), packed(sum(lengths), D_V).detach()


def one_by_one(inputs, lengths, key_lengths, mask=None, **options):
    query, key, value = inputs
    out = [
        yoso_attention(q, k, v, None if mask is None else m, **options)
        for q, k, v, m in zip(
            query.split(lengths, 2),
            key.split(key_lengths, 2),
            value.split(key_lengths, 2),
            [None] * len(lengths) if mask is None else mask.split(key_lengths, 1),
            strict=True,
        )
    ]
    return torch.cat(out, 2)


@pytest.mark.parametrize("estimator", [SAMPLED, EXPECTED], ids=str)
@pytest.mark.parametrize("normalize", ["l2", "sum"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("same", [True, False])
def test_equals_sequences_alone(same, causal, normalize, estimator):
    key_lengths = LENGTHS if same else KEY_LENGTHS
    inputs, grad = problem(LENGTHS, key_lengths)
    mask = torch.rand(1, sum(key_lengths), generator=torch.Generator().manual_seed(1)) > 0.2
    estimator = replace(estimator, n_bits=4)
    options = {"is_causal": causal, "normalize": normalize, "estimator": estimator, "seed": 5}
    wanted = one_by_one(inputs, LENGTHS, key_lengths, mask, causal_offset=0, **options)
    packing = {"cu_seqlens": starts(LENGTHS)}
    if not same:
        packing["cu_seqlens_k"] = starts(key_lengths, torch.int64)
    out = yoso_attention(*inputs, mask, **options, **packing)
    torch.testing.assert_close(out, wanted)
    for got, want in zip(
        torch.autograd.grad(out, inputs, grad),
        torch.autograd.grad(wanted, inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_equals_padded_batch():
    inputs, grad = problem(LENGTHS, LENGTHS)
    longest = max(LENGTHS)
    mask = torch.arange(longest) < torch.tensor(LENGTHS)[:, None]

    def padded(x):
        rows = x.split(LENGTHS, 2)
        fill = [torch.nn.functional.pad(r, (0, 0, 0, longest - r.shape[2])) for r in rows]
        return torch.cat(fill)

    options = {"estimator": replace(SAMPLED, n_bits=6), "seed": 2}
    out = yoso_attention(*inputs, cu_seqlens=starts(LENGTHS), **options)
    wanted = yoso_attention(*map(padded, inputs), mask, **options)
    wanted = wanted.transpose(1, 2)[mask].transpose(0, 1)[None]
    torch.testing.assert_close(out, wanted)
    for got, want in zip(
        torch.autograd.grad(out, inputs, grad),
        torch.autograd.grad(wanted, inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_grouped_heads_and_bfloat16():
    (query, key, value), _ = problem(LENGTHS, LENGTHS, torch.bfloat16)
    key, value = key[:, :1], value[:, :1]
    options = {"estimator": replace(SAMPLED, n_bits=6), "seed": 2, "enable_gqa": True}
    out = yoso_attention(query, key, value, cu_seqlens=starts(LENGTHS), **options)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, one_by_one((query, key, value), LENGTHS, LENGTHS, **options))


def test_compiles():
    torch._dynamo.reset()
    inputs, _ = problem(LENGTHS, LENGTHS)
    options = {"estimator": SAMPLED, "seed": 2}

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(query, key, value, packing):
        return yoso_attention(query, key, value, cu_seqlens=packing, **options)

    out = attend(*inputs, starts(LENGTHS))
    torch.testing.assert_close(out, yoso_attention(*inputs, cu_seqlens=starts(LENGTHS), **options))
    with pytest.raises(ValueError, match="increasing"):
        attend(*inputs, torch.tensor([0, 60, 40, 50, 60, sum(LENGTHS)], dtype=torch.int32))


@pytest.mark.parametrize(
    ("packing", "error", "words"),
    [
        ([0, 10], TypeError, "cu_seqlens must be an integer tensor, got list"),
        (torch.tensor([0.0, 10.0]), TypeError, "cu_seqlens must be int32 or int64"),
        (torch.tensor([0]), ValueError, r"cu_seqlens must have shape \(sequences \+ 1,\)"),
        (torch.tensor([[0, 10]]), ValueError, r"cu_seqlens must have shape \(sequences \+ 1,\)"),
        (torch.tensor([0, 9]), ValueError, "cu_seqlens must go from 0 to the 10 rows, got 0 to 9"),
        (torch.tensor([1, 10]), ValueError, "cu_seqlens must go from 0 to the 10 rows, got 1"),
        (torch.tensor([0, 7, 4, 10]), ValueError, "cu_seqlens must not decrease"),
    ],
)
def test_wrong_starts_are_named(packing, error, words):
    x = torch.zeros(1, 2, 10, 8)
    with pytest.raises(error, match=words):
        yoso_attention(x, x, x, cu_seqlens=packing)


def test_wrong_combinations_are_named():
    x, shorter, two = torch.zeros(1, 2, 10, 8), torch.zeros(1, 2, 6, 8), torch.zeros(2, 2, 10, 8)
    packing = torch.tensor([0, 4, 10])
    with pytest.raises(ValueError, match="query must have batch 1 with cu_seqlens"):
        yoso_attention(two, two, two, cu_seqlens=packing)
    with pytest.raises(ValueError, match="cu_seqlens_k must be None without cu_seqlens"):
        yoso_attention(x, x, x, cu_seqlens_k=packing)
    module = YosoAttention(8, 2)
    with pytest.raises(ValueError, match="key must have query's length 6 with cu_seqlens, got 8"):
        module(torch.zeros(1, 6, 8), *[torch.zeros(1, 8, 8)] * 2, cu_seqlens=torch.tensor([0, 6]))
    with pytest.raises(ValueError, match="cu_seqlens_k must be given"):
        yoso_attention(x, shorter, shorter, cu_seqlens=packing)
    with pytest.raises(ValueError, match="cu_seqlens_k must have as many sequences"):
        yoso_attention(x, shorter, shorter, cu_seqlens=packing, cu_seqlens_k=torch.tensor([0, 6]))
