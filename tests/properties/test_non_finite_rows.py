"""What is not finite in a query stays in its row; in a key, the key takes no part, as if masked."""

from dataclasses import replace
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from cases.attention import EXPECTED, SAMPLED, attention_inputs  # noqa: E402

from lshkit.attention import Colliding, Expected, Soft, lsh_attention, yoso_attention  # noqa: E402

QUERY, KEY, MASKED = 4, 6, -2  # the first batch's or head's row that has it


def yoso(estimator, **options):
    return partial(yoso_attention, estimator=estimator, **options)


FUNCTIONS = {
    "sampled": yoso(SAMPLED),
    "not normalized": yoso(SAMPLED, normalize=None),
    "expected": yoso(EXPECTED),
    "exact gradient": yoso(Expected()),
    "expected, not normalized": yoso(Expected(), normalize=None),
    "collided": yoso(replace(SAMPLED, gradient="collided")),
    "unbiased": yoso(replace(SAMPLED, gradient="unbiased")),
    "soft": yoso(Soft(n_bits=5, n_hashes=8)),
    "soft, hyperplane": yoso(Soft(n_bits=5, n_hashes=8, hasher="hyperplane"), normalize="sum"),
    "packed": yoso(SAMPLED),
    "packed, soft": yoso(Soft(n_bits=5, n_hashes=8)),
    "colliding": yoso(Colliding(n_bits=4, n_hashes=8, exact_up_to=0)),
    "colliding, all pairs": yoso(Colliding()),
    "packed, colliding": yoso(Colliding(n_bits=4, n_hashes=8, exact_up_to=20)),
    "pairs": lsh_attention,
    "pairs, a sink": partial(lsh_attention, n_sinks=1),
}
FUNCTIONS |= {f"{name}, causal": partial(f, is_causal=True) for name, f in FUNCTIONS.items()}
FUNCTIONS |= {
    f"{name}, causal from {offset}": partial(FUNCTIONS[name], is_causal=True, causal_offset=offset)
    for offset in (5, 0, -2, -41, 2**31 - 1)
    for name in ("sampled", "expected", "soft", "colliding")
}


def results(function, inputs, mask):
    """Output and gradients, each `(batch, heads, rows, columns)`."""
    leaves = [x.detach().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
    out = function(*leaves, mask, enable_gqa=True, seed=0)
    return out.detach(), *torch.autograd.grad(out, leaves, inputs.grad_out)


@pytest.mark.parametrize(
    ("key_heads", "bad"),
    [(4, float("nan")), (1, float("nan")), (1, float("inf")), (4, -float("inf"))],
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_they_stay_in_their_rows(name, key_heads, bad):
    function, batch = FUNCTIONS[name], 2
    if "packed" in name:
        starts = torch.tensor([0, 10, 11, 41], dtype=torch.int32)
        function, batch = partial(function, cu_seqlens=starts), 1
    inputs = attention_inputs(41, d=32, d_v=20, batch=batch, heads=4)
    inputs.key, inputs.value = inputs.key[:, :key_heads], inputs.value[:, :key_heads]
    mask = torch.ones(len(inputs.key), 41, dtype=torch.bool)
    mask[:, MASKED] = False
    without = mask.clone()
    without[0, KEY] = False

    # The gradient of an output that is NaN has no part in those of keys and values.
    inputs.grad_out[0, 1, QUERY] = 0
    whole, masked = (results(function, inputs, x) for x in (mask, without))
    expected = []
    for a, b in zip(whole, masked, strict=True):
        group = a.shape[1] // key_heads  # of the first head of keys, which has the bad one
        a[0, :group] = b[0, :group]
        expected.append(a)
    for x in expected[:2]:  # the output and the gradient of the query
        x[0, 1, QUERY] = torch.nan
    expected[2][0, 0, KEY] = torch.nan

    inputs.query, inputs.key, inputs.value = (
        x.clone() for x in (inputs.query, inputs.key, inputs.value)
    )
    inputs.query[0, 1, QUERY, 3] = bad
    inputs.key[0, 0, KEY, 3] = bad
    inputs.key[:, :, MASKED] = bad  # padding may hold anything
    inputs.value[:, :, MASKED] = bad
    inputs.grad_out[0, 1, QUERY] = 1
    for got, wanted in zip(results(function, inputs, mask), expected, strict=True):
        torch.testing.assert_close(got, wanted, equal_nan=True, rtol=1e-4, atol=1e-5)
