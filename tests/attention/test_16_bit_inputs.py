"""bfloat16 and float16 inputs on the CPU: codes from 16-bit rotations, or with AMX from rotations
multiplied out in bfloat16, and sums in tables of integers.

float32 inputs of the same rows are hashed and summed in full.
"""

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cases.attention import (  # noqa: E402
    NORMALIZE,
    SAMPLED,
    SHAPES,
    attention_inputs,
    padding_mask,
)
from cases.commands import run_by_instruction_set  # noqa: E402

from lshkit import _C, reference, torch_ops  # noqa: E402
from lshkit.attention import Sampled, yoso_attention  # noqa: E402

# A slice is summed in 16 bits only where rounding moves no value by more than 2e-3 of its column's
# mean magnitude (0.8 of the root mean square, of normal values). 1 / sqrt(3) of it is left in a sum
# of independent errors.
LARGEST_ERROR = 2e-3
SHORT = (torch.bfloat16, torch.float16)


def rounding(dtype=torch.bfloat16):
    """What storing the output in 16 bits adds."""
    return torch.finfo(dtype).eps / 2


def run(query, key, value, mask=None, *, family="hadamard", n_bits=8, n_hashes=32,
        is_causal=False, normalize=None, seed=1):  # fmt: skip
    """(out, query codes, key codes) of the operator."""
    family = torch_ops.FAMILY[family]
    parameters = torch_ops.hash_parameters(
        torch.tensor(seed), query.shape[1], query.shape[-1], n_bits, n_hashes, family
    )
    options = is_causal, torch_ops.NORMALIZE[normalize], 0
    return torch_ops.yoso_attention(
        *(query, key, value, mask, None, None, parameters, family, n_bits, n_hashes, *options)
    )[:3]


def share_of_bits(n_bits, n_hashes, n_features, dtype=torch.bfloat16):
    """Of a code's bits, how many differ from those of float32 rows, at most: measured 0.8e-4 (64
    features) to 1.6e-4 (128), and 4e-4 to 5.4e-4 where AMX has normals of bfloat16."""
    tiles = _C.instruction_set().startswith("amx") and n_features % 32 == 0
    tiles = tiles and dtype is torch.bfloat16
    few_bytes = n_hashes * (1 if n_bits <= 8 else 2) <= 32
    return 6.5e-4 if tiles and few_bytes and n_bits > 4 else 2.5e-4


def exact(query_codes, key_codes, value, mask=None, *, n_bits=8, is_causal=False):
    """The sum that these codes ask for, in float64."""
    return torch_ops.bucket_sum(
        query_codes, key_codes, value.double(), 2**n_bits, int(is_causal), mask
    )


def relative_error(out, wanted):
    wanted = wanted.double()
    return float((out.double() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


def unit_rows(rows, n_features, seed=0, dtype=torch.bfloat16):
    x = torch.randn(1, 1, rows, n_features, generator=torch.Generator().manual_seed(seed))
    return (x / x.norm(dim=-1, keepdim=True)).to(dtype)


def short_inputs(*sizes, dtype=torch.bfloat16, **shape):
    case = attention_inputs(*sizes, **shape)
    for name in ("query", "key", "value", "grad_out"):
        setattr(case, name, getattr(case, name).to(dtype))
    return case


# ---------------------------------------------------------------- codes


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("n_features", [7, 64, 100, 128])
@pytest.mark.parametrize(
    "n_bits, n_hashes", [(1, 40), (8, 32), (8, 130), (12, 16), (12, 17), (16, 64)]
)
def test_few_codes_change(n_features, n_bits, n_hashes, dtype):
    x = unit_rows(1501, n_features, dtype=dtype)
    options = {"n_bits": n_bits, "n_hashes": n_hashes}
    _, full, _ = run(x.float(), x.float(), x[..., :1].float(), **options)
    _, fast, again = run(x, x, x[..., :1], **options)
    assert torch.equal(fast, again)
    full, fast = full.numpy().astype(np.int64), fast.numpy().astype(np.int64)
    changed = np.unpackbits((full ^ fast).astype(np.uint16).view(np.uint8)).sum()
    assert changed / (full.size * n_bits) < share_of_bits(n_bits, n_hashes, n_features, dtype)


def test_rows_of_more_than_128_features_are_hashed_in_full():
    x = unit_rows(1501, 200)
    full, fast = (run(rows, rows, rows[..., :1])[1] for rows in (x.float(), x))
    assert torch.equal(full, fast)


@pytest.mark.parametrize("n_features, n_hashes", [(64, 64), (64, 32), (128, 128), (100, 130)])
def test_changed_bits_have_projections_near_zero(n_features, n_hashes):
    x = unit_rows(1501, n_features)
    _, full, _ = run(*[x.float()] * 3, n_hashes=n_hashes)
    _, fast, _ = run(x, x, x, n_hashes=n_hashes)
    parameters = torch_ops.hash_parameters(torch.tensor(1), 1, n_features, 8, n_hashes, 1)[0]
    rows = x[0, 0].double().numpy()
    projections = reference.hadamard_projections(rows, parameters.numpy(), 8, n_hashes)
    projections = (projections / projections.std()).reshape(1501, n_hashes, 8)
    changed = (full ^ fast)[0, 0].numpy()
    changed = (changed[..., None] >> np.arange(8)) & 1 != 0
    assert changed.any()
    # Rounding has 3e-4 (64) or 5e-4 (128), that of normals to bfloat16 1.7e-3.
    in_bfloat16 = share_of_bits(8, n_hashes, n_features) > 2.5e-4
    assert np.abs(projections[changed]).max() < (1e-2 if in_bfloat16 else 4e-3)


@pytest.mark.parametrize("n_bits, n_hashes", [(4, 64), (5, 32)])
@pytest.mark.parametrize("cosine", [-0.3, 0.0, 0.5, 0.9, 0.99])
def test_collision_probability_is_that_of_the_formula(cosine, n_bits, n_hashes):
    # 400 pairs at one angle times the hashes, over 40 draws of the functions.
    generator = torch.Generator().manual_seed(3)
    x = unit_rows(400, 64, 1, torch.float32)
    across = torch.randn(x.shape, generator=generator)
    across -= (across * x).sum(-1, keepdim=True) * x
    across /= across.norm(dim=-1, keepdim=True)
    dtype = torch.half if n_hashes == 64 else torch.bfloat16  # of normals of bfloat16, with AMX
    x, y = x.to(dtype), (cosine * x + (1 - cosine**2) ** 0.5 * across).to(dtype)

    def rate(seed, *rows):
        _, a, b = run(*rows, rows[0][..., :1], n_bits=n_bits, n_hashes=n_hashes, seed=seed)
        return (a == b).double().mean().item()

    rates = [rate(seed, x, y) for seed in range(40)]
    probability = (1 - np.arccos(cosine) / np.pi) ** n_bits
    error = np.std(rates, ddof=1) / len(rates) ** 0.5
    assert abs(np.mean(rates) - probability) < max(4 * error, 0.005 * probability)
    # The same functions in full precision have the same noise, so this is 0.5 % and no less.
    full = [rate(seed, x.float(), y.float()) for seed in range(40)]
    assert abs(np.mean(rates) - np.mean(full)) < 0.005 * probability


@pytest.mark.parametrize("scale", [2.0**-93, 2.0**-33, 1.0, 2.0**33, 2.0**106])
def test_only_the_direction_of_a_row_is_hashed(scale):
    x = unit_rows(100, 64)
    _, codes, _ = run(x, x, x)
    _, scaled, _ = run(scale * x, x, x)
    assert (codes != scaled).double().mean() < 2e-3  # the factor rounds, too


def test_rows_of_zeros_have_the_code_zero():
    x = unit_rows(77, 64)
    x[..., 5, :] = 0
    x[..., 76, :] = -0.0
    _, codes, _ = run(x, x, x)
    assert (codes[..., [5, 76], :] == 0).all()
    assert (codes[..., 6, :] != 0).any()


@pytest.mark.parametrize("n_features", [60, 64])
@pytest.mark.parametrize("n_hashes", [1, 9, 32, 33, 64, 65])
def test_a_row_hashes_the_same_in_any_company(n_hashes, n_features):
    x = unit_rows(75, n_features)
    _, codes, _ = run(x, x, x, n_hashes=n_hashes)
    for rows in (1, 2, 31, 33):
        part = x[..., :rows, :]
        _, few, _ = run(part, part, part, n_hashes=n_hashes)
        assert torch.equal(few, codes[..., :rows, :])


# ---------------------------------------------------------------- sums


@pytest.mark.parametrize("n_bits", [1, 8, 12])
@pytest.mark.parametrize(
    ("dtype", "family"), [(torch.bfloat16, "hadamard"), (torch.float16, "hyperplane")]
)
@pytest.mark.parametrize("n_q, n_k, d, d_v", [*SHAPES, (700, 900, 64, 64), (900, 700, 40, 80)])
def test_sum_of_the_codes(n_q, n_k, d, d_v, family, n_bits, dtype):
    case = short_inputs(n_q, n_k, d, d_v, dtype=dtype)
    inputs = case.query, case.key, case.value
    masks = None, padding_mask(2, n_k)
    for mask, is_causal in itertools.product(masks, (False, True)):
        options = {"family": family, "n_bits": n_bits, "n_hashes": 37, "is_causal": is_causal}
        out, *codes = run(*inputs, mask, **options)
        wanted = exact(*codes, case.value, mask, n_bits=n_bits, is_causal=is_causal)
        assert torch.isfinite(out).all()
        if mask is not None:
            assert (out[-1] == 0).all()
        if wanted.any():
            assert relative_error(out, wanted) < LARGEST_ERROR + rounding(dtype)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("n, d_v, n_bits", [(2048, 64, 8), (20000, 33, 8), (9001, 64, 12)])
def test_rounding_has_no_bias(n, d_v, n_bits, is_causal):
    case = short_inputs(n, d=64, d_v=d_v, batch=1, heads=1, dtype=torch.float16)
    options = {"n_bits": n_bits, "is_causal": is_causal}
    out, *codes = run(case.query, case.key, case.value, **options)
    wanted = exact(*codes, case.value, **options)
    error = out - wanted
    assert not torch.equal(out, wanted.half())  # 16 bits were in use
    assert relative_error(out, wanted) < LARGEST_ERROR
    # Truncation instead of rounding would shift the mean by as much as the errors are large.
    assert abs(error.mean()) < 0.2 * error.square().mean().sqrt()


@pytest.mark.parametrize("normalize", NORMALIZE)
def test_normalized_output(normalize):
    case = short_inputs(600, d=64)
    inputs = case.query, case.key, case.value
    out, *codes = run(*inputs, normalize=normalize)
    raw = exact(*codes, case.value)
    if normalize == "l2":
        raw = torch.nn.functional.normalize(raw, dim=-1)
    if normalize == "sum":
        raw /= exact(*codes, torch.ones_like(case.value[..., :1]))
    assert relative_error(out, raw) < LARGEST_ERROR


def same_codes(n, d_v):
    """Queries and keys of one direction: every key is in every query's bucket."""
    x = torch.ones(1, 1, n, 64, dtype=torch.bfloat16)
    return x, x, torch.empty(1, 1, n, d_v, dtype=torch.bfloat16)


@pytest.mark.parametrize("value", [1.0, -3.0, 1e30, 1e-30, 3e-20])
@pytest.mark.parametrize("n", [500, 100_000])
def test_one_bucket_of_equal_values(n, value):
    query, key, values = same_codes(n, 33)
    values.fill_(value)
    few, value = query[..., :40, :], float(values[0, 0, 0, 0])
    bound = {"rtol": 2e-3 + rounding(), "atol": 0}
    out, *codes = run(few, key, values, n_hashes=4)
    torch.testing.assert_close(out.double(), torch.full_like(out, n * value).double(), **bound)
    causal, *_ = run(key, key, values, n_hashes=4, is_causal=True)
    wanted = torch.arange(1, n + 1).double()[:, None] * value
    torch.testing.assert_close(causal[0, 0].double(), wanted.expand(-1, 33), **bound)


def test_a_bucket_that_overflows_and_comes_back():
    # The sums of the last rows are small again: a look at the final table would find nothing.
    n = 4000
    query, key, values = same_codes(n, 64)
    values[..., : n // 2, :] = 1.0
    values[..., n // 2 :, :] = -1.0
    for is_causal in (False, True):
        out, *codes = run(query, key, values, is_causal=is_causal)
        wanted = exact(*codes, values, is_causal=is_causal)
        torch.testing.assert_close(out.double(), wanted, rtol=1e-3 + rounding(), atol=1.0)


def test_buckets_beyond_the_expected_size():
    # Values that are alike where the codes are: sums far above those of independent values.
    n = 4096
    generator = torch.Generator().manual_seed(2)
    centre = torch.randn(16, 64, generator=generator)
    which = torch.randint(16, (n,), generator=generator)
    x = (centre[which] + 0.1 * torch.randn(n, 64, generator=generator))[None, None]
    value = (10 * torch.randn(16, 64, generator=generator))[which][None, None]
    x, value = x.bfloat16(), value.bfloat16()
    out, *codes = run(x, x, value)
    assert relative_error(out, exact(*codes, value)) < LARGEST_ERROR


def test_a_value_far_above_the_rest_keeps_the_others():
    case = short_inputs(1000, d=64, batch=1, heads=1)
    case.value[..., 10, 3] = 1e30
    case.value[..., 20, 40] = 1e6
    out, *codes = run(case.query, case.key, case.value)
    seen = exact(*codes, case.value)
    torch.testing.assert_close(out.double(), seen, rtol=1e-4 + rounding(), atol=1e-2)


def test_columns_of_any_size_keep_their_accuracy():
    case = short_inputs(1000, d=64, batch=1, heads=1)
    value = case.value * torch.logspace(-8, 8, 64).bfloat16()
    value[..., 7] = 0
    out, *codes = run(case.query, case.key, value)
    wanted = exact(*codes, value)
    error = (out - wanted).square().mean((0, 1, 2)).sqrt()
    assert (error <= LARGEST_ERROR * wanted.square().mean((0, 1, 2)).sqrt()).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite(bad):
    case = short_inputs(600, d=64, batch=1, heads=2)
    case.value[0, 0, 3, 50] = bad
    inputs = case.query, case.key, case.value
    out, *codes = run(*inputs)
    clean = case.value.clone()
    clean[0, 0, 3, 50] = 0
    wanted = exact(*codes, clean)
    meets = (codes[0] == codes[1][:, :, 3:4]).any(-1)[0, 0]
    assert meets.any() and not torch.isfinite(out[0, 0, meets, 50]).any()
    good = torch.ones_like(out, dtype=torch.bool)
    good[0, 0, meets, 50] = False
    assert relative_error(out[good], wanted[good]) < LARGEST_ERROR
    mask = torch.ones(1, 600, dtype=torch.bool)
    mask[0, 3] = False
    out, *codes = run(*inputs, mask)
    assert relative_error(out, exact(*codes, clean, mask)) < LARGEST_ERROR


@pytest.mark.parametrize("where", ["query", "key"])
def test_rows_that_are_not_finite_stay_alone(where):
    case = short_inputs(600, d=64, batch=1, heads=2)
    mask = torch.ones(1, 600, dtype=torch.bool)
    if where == "key":
        mask[0, 7] = False
    clean, *_ = run(case.query, case.key, case.value, mask)
    getattr(case, where)[0, :, 7, 3] = float("nan")
    out, *_ = run(case.query, case.key, case.value)
    if where == "query":
        assert out[..., 7, :].isnan().all()
        out[..., 7, :] = clean[..., 7, :]
    assert relative_error(out, clean) < LARGEST_ERROR
    assert torch.isfinite(out).all()


# ---------------------------------------------------------------- gradients


def values_backward(grad_out, query, key, value, query_codes, key_codes, *, n_bits=8,
                    is_causal=False, threads=1):  # fmt: skip
    """(the gradient of the values, the sum of grad_out that the same codes ask for in float64)."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        *_, got = torch_ops.yoso_attention_backward(
            *(grad_out, query, key, value, None, None, None),
            *(query_codes, key_codes, n_bits, is_causal, 0, 0),
        )
    finally:
        torch.set_num_threads(before)
    order = 2 if is_causal else 0  # a key gets the gradients of the queries behind it
    rows = grad_out.double()
    return got, torch_ops.bucket_sum(key_codes, query_codes, rows, 2**n_bits, order, None)


def gradient_rows(kind, n, dtype):
    """Queries, which are the keys too, and the output's gradient."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(n, 64, generator=generator)
    grad = torch.randn(n, 64, generator=generator)
    which = torch.randint(16, (n,), generator=generator)
    if kind == "clustered":
        x = x[:16][which] + 0.1 * x
        grad = 10 * grad[:16][which] + grad
    if kind == "duplicated":
        x, grad = x[: n // 8].repeat(8, 1), grad[: n // 8].repeat(8, 1)
    if kind == "small in a cluster":  # as behind a normalisation, which divides by their number
        x[: n // 7] = x[0] + 0.2 * x[: n // 7]
        grad[: n // 7] /= 130
    if kind == "large":
        grad = grad * (1e30 if dtype is torch.bfloat16 else 6000)
    if kind == "heavy tail":
        grad = grad.sign() * grad.abs() ** 5
    return x[None, None].to(dtype), grad[None, None].to(dtype)


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("n_bits", [3, 8, 12])
@pytest.mark.parametrize("kind", ["random", "clustered", "duplicated", "large", "heavy tail"])
def test_gradient_of_the_values(kind, n_bits, is_causal, dtype):
    x, grad = gradient_rows(kind, 1000, dtype)
    if kind == "large" and dtype is torch.float16 and n_bits == 3:
        grad = grad / 64  # else the sums are beyond float16
    _, *codes = run(x, x, x, n_bits=n_bits)
    options = {"n_bits": n_bits, "is_causal": is_causal}
    got, wanted = values_backward(grad, x, x, x, *codes, **options)
    assert relative_error(got, wanted) < LARGEST_ERROR + rounding(dtype)


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("n_bits", [8, 10])
def test_rows_that_are_small_where_most_collide(n_bits, dtype):
    """The mean of all is not theirs, which most readers meet."""
    x, rows = gradient_rows("small in a cluster", 1400, dtype)
    out, *codes = run(x, x, rows, n_bits=n_bits)
    sums = out, exact(*codes, rows, n_bits=n_bits)
    gradients = values_backward(rows, x, x, x, *codes, n_bits=n_bits)
    for got, wanted in (sums, gradients):
        assert relative_error(got, wanted) < LARGEST_ERROR + rounding(dtype)
        cluster = got[..., :200, :], wanted[..., :200, :]
        assert relative_error(*cluster) < LARGEST_ERROR + rounding(dtype)


def test_padding_in_one_bucket_needs_no_wider_numbers():
    """Its zeros have no rounding, however many rows read them."""
    x, rows = gradient_rows("random", 2048, torch.float16)
    x[..., :128, :], rows[..., :128, :] = x[..., :1, :].clone(), 0
    out, *codes = run(x, x, rows)
    wanted = exact(*codes, rows)
    assert relative_error(out, wanted) < LARGEST_ERROR + rounding(torch.float16)
    assert (out != wanted.half()).float().mean() > 0.05  # what float32 would be


@pytest.mark.parametrize("n_bits", [8, 12])
def test_gradient_of_60000_equal_rows_in_one_bucket(n_bits):
    # More than 16-bit integers or bfloat16 could count.
    n = 60_000
    query, _, value = same_codes(n, 33)
    value.fill_(0)
    grad = torch.full_like(value, 0.75)
    _, *codes = run(query, query, value, n_bits=n_bits, n_hashes=2)
    for is_causal in (False, True):
        got, _ = values_backward(
            grad, query, query, value, *codes, n_bits=n_bits, is_causal=is_causal
        )
        behind = torch.arange(n, 0, -1) if is_causal else torch.full((n,), n)
        wanted = (0.75 * behind.double())[:, None].expand(-1, 33)
        torch.testing.assert_close(got[0, 0].double(), wanted, rtol=2e-3 + rounding(), atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_stay_in_their_column(bad):
    x, grad = gradient_rows("random", 600, torch.bfloat16)
    _, *codes = run(x, x, x)
    clean = grad.clone()
    clean[..., 3, 50] = 0
    grad[..., 3, 50] = bad
    got, _ = values_backward(grad, x, x, x, *codes)
    _, wanted = values_backward(clean, x, x, x, *codes)
    meets = (codes[1] == codes[0][:, :, 3:4]).any(-1)[0, 0]
    assert meets.any() and not torch.isfinite(got[0, 0, meets, 50]).any()
    good = torch.ones_like(got, dtype=torch.bool)
    good[0, 0, meets, 50] = False
    assert relative_error(got[good], wanted[good]) < LARGEST_ERROR + rounding()


# ---------------------------------------------------------------- the public door


def test_gradients_are_those_of_the_same_codes():
    case = short_inputs(600, d=64, batch=1)
    inputs = [x.requires_grad_() for x in (case.query, case.key, case.value)]
    out, *codes = run(*inputs, normalize=None)
    gradients = torch.autograd.grad(out, inputs, case.grad_out)
    wanted = torch_ops.yoso_attention_backward(
        case.grad_out, *(x.detach() for x in inputs), None, None, None, *codes, 8, False, 0, 0
    )
    assert all(torch.equal(a, b) for a, b in zip(gradients, wanted, strict=True))


def test_vmap_and_func_grad():
    case = short_inputs(300, d=64)

    def attend(query, key, value):
        return yoso_attention(query, key, value, estimator=SAMPLED, seed=3)

    inputs = case.query, case.key, case.value
    stacked = torch.func.vmap(attend)(*(x[:, None] for x in inputs))
    assert torch.equal(stacked[:, 0], attend(*inputs))
    gradient = torch.func.grad(lambda v: attend(*inputs[:2], v).sum())(case.value)
    value = case.value.clone().requires_grad_()
    attend(*inputs[:2], value).sum().backward()
    assert torch.equal(gradient, value.grad)


def test_public_function():
    case = short_inputs(600, d=64)
    inputs = case.query, case.key, case.value
    options = {"estimator": SAMPLED, "seed": 1}
    full = yoso_attention(*(x.float() for x in inputs), **options)
    short = yoso_attention(*inputs, **options)
    assert torch.equal(short, run(*inputs, normalize="l2")[0])
    # Of unrelated rows an output is noise, which each code that differs changes.
    alike = torch.nn.functional.cosine_similarity(full, short.float(), dim=-1).mean()
    assert alike > (0.999 if share_of_bits(8, 32, 64) == 2.5e-4 else 0.99)


@pytest.mark.parametrize("n_bits", [8, 12])
def test_early_queries_do_not_depend_on_later_values(n_bits):
    """Nor late keys' gradients on those of earlier queries, whatever their scale."""
    torch.manual_seed(0)
    query, key, value, grad = (torch.randn(1, 1, 512, 32).bfloat16() for _ in range(4))
    half = slice(0, 256), slice(256, 512)
    estimator = Sampled(n_bits=n_bits, expectation="never")

    def attend(rows, value, grad):
        x = [x[:, :, rows].clone().requires_grad_() for x in (query, key, value)]
        out = yoso_attention(*x, is_causal=True, seed=0, estimator=estimator)
        out.backward(grad[:, :, rows])
        return out.detach(), x[2].grad

    louder, steeper = value.clone(), grad.clone()
    louder[:, :, half[1]] *= 1e4
    steeper[:, :, half[0]] *= 1e4
    alone, _ = attend(half[0], value, grad)
    assert torch.equal(attend(slice(None), louder, grad)[0][:, :, half[0]], alone)
    late = attend(slice(None), value, grad)[1][:, :, half[1]]
    assert torch.equal(attend(slice(None), value, steeper)[1][:, :, half[1]], late)


@pytest.mark.parametrize("mean", [0, 10])
@pytest.mark.parametrize("normalize", ["l2", "sum"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_from_the_rounded_output_are_near_those_of_sums_added_up_again(
    dtype, normalize, mean
):
    """A rounding is 2^-9 in bfloat16, 2^-12 in float16. Both gradients have one; that of the output
    counts as often as the gradient that the normalisation takes away is larger than what it leaves,
    the values' mean over their deviation.
    """
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = torch.randn(4, 1, 2, 300, 64, generator=generator)
    tensors = [x.to(dtype) for x in (query, key, value + mean)]
    parameters = torch_ops.hash_parameters(torch.tensor(1), 2, 64, 8, 32, 1)
    options = False, torch_ops.NORMALIZE[normalize], 0
    starts = None, None, None
    out, *codes, divisors = torch_ops.yoso_attention(
        *tensors, *starts, parameters, 1, 8, 32, *options
    )
    arguments = grad.to(dtype), *tensors, *starts, *codes, 8, *options, 0
    again = torch_ops.yoso_attention_backward(*arguments)
    kept = torch_ops.yoso_attention_backward(*arguments, out, divisors)
    unit = torch.finfo(dtype).eps / 4
    for got, wanted in zip(kept, again, strict=True):
        off = (got.double() - wanted.double()).norm() / wanted.double().norm()
        assert off < (1.5 + 1.2 * mean) * unit, off / unit


@pytest.mark.parametrize("name", [x for x in _C.instruction_sets.split() if x.startswith("amx")])
def test_instruction_set(name):
    run_by_instruction_set(__file__, name)


def check():
    """Of the instruction set in use: AMX's twin multiplies rotations out on every machine."""
    test_few_codes_change(64, 8, 32, torch.bfloat16)
    test_changed_bits_have_projections_near_zero(64, 32)
    for cosine in (0.0, 0.9):
        test_collision_probability_is_that_of_the_formula(cosine, 5, 32)
    for scale in (2.0**-93, 2.0**106):
        test_only_the_direction_of_a_row_is_hashed(scale)
    test_rows_of_zeros_have_the_code_zero()
    test_a_row_hashes_the_same_in_any_company(32, 64)
    test_public_function()


if __name__ == "__main__":
    check()
