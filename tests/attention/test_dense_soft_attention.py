"""Soft attention with weights in all buckets, which goes by matrix products."""

import pytest
import torch
from cases.attention import NORMALIZE, attention_inputs, one_thread, padding_mask  # noqa: F401
from test_soft_attention import (
    attend,
    bucket_likelihoods,
    compare,
    parameters_of,
    probe_features,
    projections_of,
    run,
)

from lshkit import torch_ops
from lshkit.attention import yoso_attention

pytestmark = pytest.mark.usefixtures("one_thread")

# n_q, n_k, d, d_v, n_bits, n_hashes, n_probes: chunks are of 128 rows, causal ones of 64, groups of
# hashes have tables of 32 KB, batches of 2 MB.
CASES = [
    (150, 140, 20, 24, 4, 5, (16, 16)),
    (130, 70, 16, 64, 6, 2, (64, 64)),
    (64, 5, 8, 7, 4, 3, (16, 16)),
    (1, 129, 8, 16, 3, 3, (8, 8)),
    (70, 140, 12, 7, 4, 37, (16, 3)),
    (140, 75, 12, 33, 6, 2, (2, 64)),
    (70, 75, 12, 20, 5, 4, (32, 1)),
    (70, 75, 12, 20, 5, 4, (1, 32)),
    (131, 66, 8, 130, 1, 70, (2, 2)),
    (20, 30, 16, 9, 9, 3, (512, 512)),
    (10, 13, 16, 80, 12, 3, (4096, 4096)),
]


def arguments(case, seed, sharpness, mask=None, is_causal=False, hasher="hadamard"):
    n_bits, n_hashes, probes = case[4:]
    options = {"n_bits": n_bits, "n_hashes": n_hashes, "n_probes": probes, "seed": seed}

    def ours(normalize):
        return lambda query, key, value, sharpness: yoso_attention(
            *(query, key, value, mask, is_causal),
            **options,
            estimator="soft",
            hasher=hasher,
            normalize=normalize,
            sharpness=sharpness,
        )

    return ours


def dense(inputs, case, seed, sharpness, mask, is_causal, hasher="hadamard"):
    """The sum over all buckets in float64, by the selected bits where not all are."""
    d, _, n_bits, n_hashes, probes = case[2:]
    parameters = parameters_of(seed, 2, d, n_bits, n_hashes, hasher)
    saved = torch_ops.soft_attention(
        *(inputs.query, inputs.key, inputs.value, mask, None, None, parameters, sharpness),
        *(torch_ops.FAMILY[hasher], n_bits, n_hashes, *probes, is_causal, 0),
    )

    def of(normalize):
        def attention(query, key, value, sharpness):
            beta = sharpness[:, None, None, None]
            features = []
            for x, codes, bits, t in (
                (query, *saved[1:3], probes[0]),
                (key, *saved[4:6], probes[1]),
            ):
                z = projections_of(x, parameters, hasher, n_bits, n_hashes)
                features.append(
                    bucket_likelihoods(z, beta[..., None])
                    if t == 2**n_bits
                    else probe_features(z, codes, bits, t, beta)
                )
            return attend(*features, value, mask, is_causal, normalize)

        return attention

    return of


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_dense_formula_and_its_autograd(case, is_causal, masked):
    n_q, n_k, d, d_v = case[:4]
    inputs = attention_inputs(n_q, n_k, d, d_v, batch=2, heads=2)
    mask = padding_mask(2, n_k) if masked and n_k > 1 else None
    sharpness = torch.tensor([1.5, 0.7])
    ours = arguments(case, 3, sharpness, mask, is_causal)
    expected_of = dense(inputs, case, 3, sharpness, mask, is_causal)
    tensors = inputs.query, inputs.key, inputs.value, sharpness
    for normalize in NORMALIZE:
        got = run(ours(normalize), [x.clone().requires_grad_() for x in tensors], inputs.grad_out)
        expected = run(
            expected_of(normalize), [x.double().requires_grad_() for x in tensors], inputs.grad_out
        )
        compare(got, expected)


@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("probes", [(16, 16), (16, 2), (2, 16)])
def test_rows_that_are_not_finite_stay_apart(probes, normalize):
    case = (150, 140, 12, 20, 4, 6, probes)
    inputs = attention_inputs(*case[:4], batch=2, heads=2)
    sharpness = torch.tensor([1.5, 0.7])
    tensors = [inputs.query, inputs.key, inputs.value]
    mask = torch.ones(2, 140, dtype=torch.bool)
    mask[:, [5, 70]] = False
    ours = arguments(case, 0, sharpness, mask)(normalize)
    leaves = [x.clone().requires_grad_() for x in (*tensors, sharpness)]
    clean = run(ours, leaves, inputs.grad_out)
    # Keys of NaN are like masked ones, queries of NaN have no part but in their own output.
    tensors[1][:, :, 5] = float("nan")
    tensors[2][:, :, 5] = float("inf")
    tensors[2][:, :, 70] = float("nan")
    mask[:, 5] = True
    leaves = [x.clone().requires_grad_() for x in (*tensors, sharpness)]
    got = run(ours, leaves, inputs.grad_out)
    assert got[2][:, :, 5].isnan().all()
    got[2][:, :, 5] = 0
    for a, b in zip(got, clean, strict=True):
        assert torch.equal(a, b)
    grad_out = inputs.grad_out.clone()
    grad_out[:, :, 9] = 0
    without = run(ours, leaves, grad_out)
    tensors[0][:, :, 9, 3] = float("nan")
    got = run(ours, [x.clone().requires_grad_() for x in (*tensors, sharpness)], inputs.grad_out)
    assert got[0][:, :, 9].isnan().all() and got[1][:, :, 9].isnan().all()
    for a, b in zip(got[2:4], without[2:4], strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)
    torch.testing.assert_close(got[4], without[4], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n_bits", [3, 5])
def test_a_later_value_reaches_no_earlier_row(n_bits):
    inputs = attention_inputs(100, 100, 12, 20)
    options = {"n_bits": n_bits, "n_hashes": 4, "n_probes": 2**n_bits, "seed": 0}
    clean = yoso_attention(
        *(inputs.query, inputs.key, inputs.value, None, True), **options, estimator="soft"
    )
    inputs.value[:, :, 40] = float("nan")
    inputs.value[:, :, 90] = float("inf")
    leaves = [x.clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
    out = yoso_attention(*leaves, None, True, **options, estimator="soft")
    torch.testing.assert_close(out[:, :, :40], clean[:, :, :40])
    assert out[:, :, 40:].isnan().all()
    grads = torch.autograd.grad((out[:, :, :40] * inputs.grad_out[:, :, :40]).sum(), leaves[0])[0]
    assert grads[:, :, :40].isfinite().all()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("probes", [(16, 16), (16, 2)])
def test_threads_do_not_change_a_bit(probes, is_causal):
    inputs = attention_inputs(200, 230, 32, 70, batch=1, heads=1)
    case = (200, 230, 32, 70, 4, 40, probes)
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        leaves = [x.clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
        sharpness = torch.tensor([2.0], requires_grad=True)
        ours = arguments(case, 1, sharpness, None, is_causal)("sum")
        results.append(run(ours, [*leaves, sharpness], inputs.grad_out))
    torch.set_num_threads(before)
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)
