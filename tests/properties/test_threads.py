"""The same bits at any number of threads, whatever is computed."""

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cases.attention import (  # noqa: E402
    EXPECTED,
    SAMPLED,
    attention_inputs,
    forward_and_gradients,
    padding_mask,
)
from cases.buckets import random_case, random_codes, weighted_case  # noqa: E402
from cases.decoding import positions, qkv, state_for  # noqa: E402
from cases.hashing import soft_codes_of_core  # noqa: E402
from cases.kde import clustered  # noqa: E402
from cases.sampling import FAMILIES as SAMPLER_FAMILIES  # noqa: E402
from cases.sampling import METHODS as ESTIMATES  # noqa: E402

from lshkit import _C, torch_ops  # noqa: E402
from lshkit.attention import (  # noqa: E402
    Colliding,
    Expected,
    Soft,
    YosoAttention,
    bert_lsh_attention,
    lsh_attention,
    yoso_attention,
)
from lshkit.buckets import (  # noqa: E402
    BucketTable,
    HashTables,
    bucket_sum,
    collisions,
    draw,
    fold,
    pair_distances,
    pair_products,
)
from lshkit.hash_functions import FAMILY, make_parameters  # noqa: E402
from lshkit.hashing import EuclideanLSH, FastHadamard, Hyperplane, RandomBinning  # noqa: E402
from lshkit.kde import LSHKernelDensity  # noqa: E402
from lshkit.sampling import (  # noqa: E402
    LSHSampler,
    PartitionSampler,
    SampledSoftmaxLoss,
    log_partition,
)

CASES = {}


def cases(*arguments):
    """Registers a function of some of these arguments, then of the number of threads.

    It gives tensors and arrays. torch is set to that number, which is what calls take by default.
    """

    def register(make):
        for chosen in itertools.product(*arguments):
            name = "-".join([make.__name__, *(getattr(x, "__name__", str(x)) for x in chosen)])
            CASES[name] = partial(make, *chosen)
        return make

    return register


# ---------------------------------------------------------------- attention


def attend(inputs, estimator, *arguments, **options):
    out, gradients = forward_and_gradients(inputs, estimator, *arguments, **{"seed": 0} | options)
    return out, *gradients


@cases([SAMPLED, EXPECTED, Expected()], [False, True])
def attention(estimator, is_causal, threads):
    return attend(attention_inputs(257, batch=1), estimator, None, is_causal)


@cases(
    [
        (Colliding(n_bits=12), {"scale": 12.0}),
        (replace(SAMPLED, unit_norm="lift"), {"lift_scale": 2000.0}),
        (replace(SAMPLED, unit_norm="lift", lift_scale="auto"), {}),
    ],
    [(2, 4000), (1, 40_000), (40_000, 1)],
)
def gradient_of_a_scale(estimator_and_value, sizes, threads):
    """One number, of more rows and sequences than torch sums up on one thread."""
    estimator, parameters = estimator_and_value
    case = attention_inputs(sizes[1], d=16, batch=sizes[0], heads=1)
    parameters = {name: torch.tensor(x, requires_grad=True) for name, x in parameters.items()}
    inputs = [x.requires_grad_() for x in (case.query, case.key, case.value)]
    out = yoso_attention(*inputs, estimator=estimator, parameters=parameters, seed=0)
    return torch.autograd.grad(out, [*inputs, *parameters.values()], case.grad_out)


@cases(["collided", "unbiased"], [False, True])
def gradient_by_pairs(gradient, is_causal, threads):
    estimator = replace(SAMPLED, gradient=gradient)
    return attend(attention_inputs(257, batch=1), estimator, None, is_causal)


@cases()
def gradient_of_16_bit_inputs(threads):
    estimator = replace(SAMPLED, n_bits=3, n_hashes=9)
    inputs = attention_inputs(1300, 1200, 64, 64, batch=1, heads=3, dtype=torch.bfloat16)
    return attend(inputs, estimator, seed=3)


@cases([(1, 80), (8, 64), (3, 7)], [False, True])
def attention_of_16_bit_inputs(heads_and_values, is_causal, threads):
    heads, d_v = heads_and_values
    inputs = attention_inputs(1100, d=64, d_v=d_v, batch=1, heads=heads, dtype=torch.bfloat16)
    inputs.value[0, 0, :, 0] *= 1000
    inputs.value[0, 0, 5, 0] = 1e9  # a slice that is summed in full
    parameters = torch_ops.hash_parameters(torch.tensor(1), heads, 64, 8, 32, FAMILY["hadamard"])
    hashing = None, None, None, parameters, FAMILY["hadamard"], 8, 32
    options = is_causal, torch_ops.NORMALIZE["l2"], 0
    return torch_ops.yoso_attention(inputs.query, inputs.key, inputs.value, *hashing, *options)


@cases()
def soft_codes_of_16_bit_inputs(threads):
    inputs = attention_inputs(1100, d=64, d_v=80, batch=1, heads=2, dtype=torch.bfloat16)
    return attend(inputs, Soft(n_bits=12, n_hashes=16), seed=3)


@cases()
def grouped_heads(threads):
    inputs = attention_inputs(300, 300, 20, 12, heads=6)
    inputs.key, inputs.value = inputs.key[:, ::3], inputs.value[:, ::3]
    return attend(inputs, SAMPLED, enable_gqa=True)


@cases([SAMPLED, Soft(), Colliding(n_bits=6, exact_up_to=100)])
def packed_sequences(estimator, threads):
    starts = torch.tensor([0, 200, 201, 330], dtype=torch.int32)
    options = {"cu_seqlens": starts, "causal_offset": None}
    return attend(attention_inputs(330, batch=1), estimator, **options)


@cases([Soft(n_bits=10), Soft(n_bits=8, hasher="hyperplane")])
def soft_attention(estimator, threads):
    """With gradients of the sharpness, or of planes."""
    inputs = attention_inputs(200, 230, 32, 70, batch=3)
    leaves = [x.detach().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
    if estimator.hasher == "hyperplane":
        planes = torch.randn(3, 32, 8, 32, generator=torch.Generator().manual_seed(0))
        parameters = {"planes": planes.requires_grad_()}
    else:
        parameters = {"sharpness": torch.tensor(2.0, requires_grad=True)}
    inputs.query, inputs.key, inputs.value = leaves
    leaves += parameters.values()
    options = {"is_causal": True, "causal_offset": 0, "parameters": parameters, "seed": 1}
    out = yoso_attention(*leaves[:3], estimator=estimator, **options)
    return out.detach(), *torch.autograd.grad(out, leaves, inputs.grad_out)


@cases(
    [SAMPLED, Soft()],
    [torch.float32, torch.bfloat16],
    [(20, 17), (40, 37), (64, 32), (72, 17)],
    [2, 3],
)
def parts_of_registers(estimator, dtype, sizes, heads, threads):
    d_v, n_hashes = sizes
    inputs = attention_inputs(300, 300, 32, d_v, batch=1, heads=heads, dtype=dtype)
    estimator = replace(estimator, n_bits=7, n_hashes=n_hashes)
    return (yoso_attention(inputs.query, inputs.key, inputs.value, estimator=estimator, seed=0),)


@cases([False, True], [(300, 8), (9000, 12)])
def attention_to_pairs(is_causal, sizes, threads):
    n_keys, n_bits = sizes  # the second ones: pairs are found by buckets
    # More queries than what one thread takes at once.
    inputs = attention_inputs(1100, n_keys, 24, 20)
    leaves = [x.detach().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
    mask = padding_mask(2, n_keys)
    out = lsh_attention(*leaves, mask, is_causal=is_causal, n_bits=n_bits, seed=5)
    return out.detach(), *torch.autograd.grad(out, leaves, inputs.grad_out)


@cases([False, True])
def bert_lsh(faithful, threads):
    inputs = attention_inputs(300, batch=1)
    leaves = [x.detach().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
    out = bert_lsh_attention(*leaves, faithful=faithful, seed=2)
    if faithful:  # the gradient is that of torch's own products, of another order of sums
        return (out.detach(),)
    return out.detach(), *torch.autograd.grad(out, leaves, inputs.grad_out)


@cases([SAMPLED, Soft(n_bits=6)])
def decoding(estimator, threads):
    tensors = qkv(batch=3, heads=8, n=300, d=64, d_v=64)
    state = state_for(*tensors, estimator=replace(estimator, n_hashes=12))
    return state.prefill(*tensors), state.step(*positions(tensors, 0, 1)), state._sums


@cases()
def module(threads):
    torch.manual_seed(0)
    attention = YosoAttention(64, num_heads=4, estimator=SAMPLED)
    x = torch.randn(2, 300, 64, requires_grad=True)
    out, _ = attention(x, x, x)
    return out.detach(), *torch.autograd.grad(out.sin().sum(), [x, *attention.parameters()])


# ---------------------------------------------------------------- sums, tables, pairs


@cases([0, 1, 2], [np.float32, np.float64])
def sums_of_core(order, dtype, threads):
    query_codes, key_codes, values = random_case(130, 70, 33, 256, 80, (2, 3), dtype=dtype)
    out = np.empty((2, 3, 130, 80), dtype)
    _C.bucket_sum(query_codes, key_codes, values, 256, order, None, 1 / 33, out, threads)
    return (out,)


@cases([False, True])
def sums(causal, threads):
    query_codes, key_codes, values = map(torch.from_numpy, random_case(300, 400, 9, 64, 40, (2, 3)))
    values.requires_grad_()
    out = bucket_sum(query_codes, key_codes, values, 64, causal=causal)
    return out.detach(), *torch.autograd.grad(out.square().sum(), [values])


@cases()
def weighted_sums(threads):
    arrays, weights = weighted_case(300, 300, 5, 64, 70, (4, 3))
    *codes, values = map(torch.from_numpy, arrays)
    weights = {name: torch.from_numpy(w).requires_grad_() for name, w in weights.items()}
    out = bucket_sum(*codes, values.requires_grad_(), 64, causal=True, **weights)
    return out.detach(), *torch.autograd.grad(out.square().sum(), [values, *weights.values()])


@cases()
def table_of_core(threads):
    _, codes, values = random_case(1, 1000, 33, 256, 20)
    table, out = np.zeros((33, 256, 20), np.float32), np.empty((1000, 20), np.float32)
    _C.bucket_table_add(table, codes, values, 1, threads)
    _C.bucket_table_query(table, codes, 1 / 33, out, threads)
    return table, out


@cases()
def table(threads):
    query_codes, key_codes, values = map(torch.from_numpy, random_case(300, 1000, 33, 256, 20))
    table = BucketTable(33, 256, 20).add(key_codes.numpy(), values.numpy())
    return (table.query(query_codes.numpy()),)


@cases([300, 17000])
def pairs_of_core(n_k, threads):
    codes = random_codes(1100, n_k, 2, 20000, np.uint16)
    indptr = np.empty(1101, np.int64)
    _C.collision_indptr(*codes, None, True, indptr, threads)
    indices, counts = (np.empty(indptr[-1], np.int32) for _ in range(2))
    _C.collisions(*codes, None, True, indptr, indices, counts, threads)
    return indptr, indices, counts


@cases()
def pairs(threads):
    codes = [torch.from_numpy(x.view(np.int16)) for x in random_codes(600, 900, 3, 200, np.uint16)]
    indptr, indices, counts = collisions(*codes)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(len(x), 40, generator=generator) for x in codes]
    products = pair_products(*rows, indptr, indices)
    return indptr, indices, counts, products, pair_distances(*rows, indptr, indices)


@cases()
def draws(threads):
    query, key = random_codes(600, 5000, 9, 700, np.uint16)
    query, key = (torch.from_numpy(c.view(np.int16)) for c in (query, key))
    weights = torch.arange(5000) % 3
    tables = HashTables(key, weights=weights)
    drawn = [*tables.draw(query, seed=1), *tables.draw(query, 5, seed=1)]
    found = [*tables.union(query), tables.bucket_weights(query), fold(key, 64)]
    return *drawn, *found, *draw(query, key, 5, weights=weights, seed=1)


# ---------------------------------------------------------------- codes

ANGULAR = {"hyperplane": Hyperplane, "hadamard": FastHadamard}


@cases(FAMILY)
def codes_of_core(family, threads):
    parameters = make_parameters(family, 60, 9, 33, n_sets=3, seed=0)
    x = np.random.default_rng(0).standard_normal((2, 3, 257, 60)).astype(np.float32)
    codes = np.zeros((2, 3, 257, 33), np.uint16)
    _C.hash(x, parameters, FAMILY[family], 9, 33, codes, threads)
    return (codes,)


@cases(FAMILY)
def long_codes_of_core(family, threads):
    hasher = ANGULAR[family](20, 40, 9, seed=0)
    x = np.random.default_rng(0).standard_normal((1, 1, 1030, 20)).astype(np.float32)
    x[..., 5, :], x[..., 6, 3] = 0, np.nan
    codes = np.zeros((1, 1, 1030, 9), np.uint64)
    finite = _C.hash(x, hasher.parameters, FAMILY[family], 40, 9, codes, threads)
    # A NaN may give any code: it stays in its row.
    return np.delete(codes, 6, 2), np.array(finite)


@cases(FAMILY, [1, 3])
def soft_codes_of_the_core(family, n_sets, threads):
    parameters = make_parameters(family, 60, 9, 33, n_sets=n_sets, seed=0)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 530, 60)).astype(np.float32)
    grad = rng.standard_normal((2, 3, 530, 33 * 4)).astype(np.float32)
    sharpness = np.float32([2.0]) if n_sets == 1 else np.float32([1, 2, 3])
    return soft_codes_of_core(x, parameters, family, 9, 33, 4, sharpness, grad, threads)


BINNED = {
    "normal": lambda: EuclideanLSH(20, 3, 9, width=2.0, seed=0),
    "cauchy": lambda: EuclideanLSH(20, 3, 9, width=2.0, p=1, seed=0),
    "grid": lambda: RandomBinning(20, 9, bandwidth=2.0, seed=0),
    "uneven grid": lambda: RandomBinning(20, 9, bandwidth=np.linspace(1, 3, 20), seed=0),
}


@cases(BINNED)
def binned_codes_of_core(name, threads):
    hasher = BINNED[name]()
    x = np.random.default_rng(0).standard_normal((1030, 20))
    codes = np.zeros((1030, 9), np.uint32)
    hasher._core(x, *(getattr(hasher, name) for name in hasher._numbers), codes, threads)
    np.testing.assert_array_equal(codes, hasher.hash(x))
    return (codes,)


@cases(ANGULAR)
def codes(family, threads):
    x = torch.randn(1030, 20, generator=torch.Generator().manual_seed(0))
    hasher = ANGULAR[family](20, 9, 9, seed=0)
    return hasher.hash(x), *hasher.soft_hash(x, 4, 2.0)


# ---------------------------------------------------------------- densities and samples


@cases(["auto", "brute", "random", "near_far", "hbe", "bucket_sum"], ["laplacian"])
def density(algorithm, kernel, threads):
    rows, queries = clustered(6000, 8, 60, n_queries=300)
    options = dict(algorithm=algorithm, random_state=3, n_jobs=threads)
    fitted = LSHKernelDensity(kernel, 0.5, **options).fit(rows)
    return *fitted.score_samples(queries, return_std=True), fitted.kernel_mean(queries)


@cases()
def sampled_softmax(threads):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(5000, 8))
    hidden = torch.randn(200, 8)
    loss = SampledSoftmaxLoss(8, 5000, weight=weight, n_bits=6).rehash()
    near, sample = loss._near(hidden), loss._sample(torch.float32)
    return *near, *sample


@cases()
def partition(threads):
    generator = torch.Generator().manual_seed(0)
    classes, query = (torch.randn(n, 16, generator=generator) for n in (5000, 200))
    sampler = PartitionSampler(classes, seed=0)
    return tuple(log_partition(query, classes, sampler=sampler, n_samples=500, seed=1))


@cases(SAMPLER_FAMILIES)
def sampler(family, threads):
    rng = np.random.default_rng(0)
    fitted = LSHSampler(SAMPLER_FAMILIES[family](0), seed=0).fit(rng.standard_normal((3000, 6)))
    queries = rng.standard_normal((300, 6))
    estimates = [fitted.estimate(queries, np.ones(3000), x, seed=1) for x in ESTIMATES]
    drawn = *fitted.sample(queries, 9, seed=1), *fitted.union(queries)
    return *drawn, *(x for estimate in estimates for x in estimate)


@pytest.mark.parametrize("name", CASES)
def test_same_bits_at_any_number_of_threads(name):
    results = []
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        results.append([torch.as_tensor(x) for x in CASES[name](threads)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
