"""bfloat16 and float16 tensors: read and written as they are, computed in float32."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from cases.attention import (  # noqa: E402
    EXPECTED,
    SAMPLED,
    attention_inputs,
    float32_expected_gradients,
    float32_gradients,
    padding_mask,
)

from lshkit.attention import yoso_attention  # noqa: E402

SHORT = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("estimator", [SAMPLED, EXPECTED], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_equals_float32_rounded_once(estimator, causal, dtype):
    case = attention_inputs(45, 45, dtype=dtype)
    mask = padding_mask(2, 45)
    inputs = case.query, case.key, case.value
    results = []
    for convert in (lambda x: x, lambda x: x.float()):
        converted = [convert(x).detach().requires_grad_() for x in inputs]
        out = yoso_attention(*converted, mask, estimator=estimator, is_causal=causal, seed=1)
        results.append((out, *torch.autograd.grad(out, converted, convert(case.grad_out))))
    if estimator is SAMPLED:  # outputs: test_16_bit_inputs.py
        results[0] = results[0][1:]
        results[1] = float32_gradients(inputs, case.grad_out, mask, causal, seed=1)
    else:
        gradients = float32_expected_gradients(inputs, case.grad_out, mask, causal, EXPECTED.n_bits)
        results[1] = results[1][0], *gradients
    for short, full in zip(*results, strict=True):
        assert short.dtype == dtype
        if dtype is torch.bfloat16 and estimator is EXPECTED:  # products of bfloat16
            assert (short.float() - full).norm() < 2**-8 * full.norm()
        else:
            assert torch.equal(short, full.to(dtype))


def every_pattern(dtype):
    """All 65,536 numbers of a 16-bit type as values that one key alone hands on."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    return bits.view(dtype).reshape(1, 1, 1024, 64)


@pytest.mark.parametrize("dtype", SHORT)
def test_every_number_survives(dtype):
    # Each position sees itself alone through the packing, so that its value comes out again.
    value = every_pattern(dtype)
    query = torch.ones(1, 1, 1024, 8, dtype=dtype)
    starts = torch.arange(1025)
    options = {"normalize": None, "seed": 0, "cu_seqlens": starts}
    options["estimator"] = replace(SAMPLED, n_hashes=1)
    out = yoso_attention(query, query, value, **options)
    wanted = value.float() + 0.0  # a sum that starts at zero makes +0 of -0
    assert torch.equal(out.isnan(), wanted.isnan())
    assert torch.equal(out.float().nan_to_num(7.0), wanted.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", SHORT)
def test_rounds_to_nearest_even(dtype):
    # The mean over hashes is exact; the output rounds sums of float32 once.
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(1, 1, 4096, 64, generator=generator) * 2.0 ** torch.randint(
        -30, 16, (1, 1, 4096, 64), generator=generator
    )
    value = torch.stack([spread, spread * 2**-9], 3).flatten(2, 3).to(dtype)  # pairs of keys
    query = torch.ones(1, 1, 8192, 8, dtype=dtype)
    starts = torch.arange(0, 8193, 2)
    options = {"normalize": None, "seed": 0, "cu_seqlens": starts}
    options["estimator"] = replace(SAMPLED, n_hashes=1)
    out = yoso_attention(query, query, value, **options)
    sums = value.float().unflatten(2, (-1, 2)).sum(3)
    assert torch.equal(out[:, :, ::2], sums.to(dtype))


@pytest.mark.parametrize("dtype", SHORT)
def test_strides(dtype):
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(2, 30, 3, 4, 16, generator=generator).to(dtype)  # (B, N, 3, H, D)
    views = [packed[:, :, i].transpose(1, 2) for i in range(3)]
    options = {"estimator": SAMPLED, "seed": 0}
    wanted = yoso_attention(*(x.contiguous() for x in views), **options)
    assert torch.equal(yoso_attention(*views, **options), wanted)
