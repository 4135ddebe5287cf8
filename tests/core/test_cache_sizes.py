"""Results do not depend on the caches of the machine, beyond rounding."""

import os
import subprocess
import sys

import numpy as np
import pytest
from scipy import sparse

from lshkit import _C, reference

# "L2,L3" in KB, None as the machine has them: from tables that never fit to those that always do.
SIZES = (None, "1,1", "32,256", "1048576,1048576")
INSTRUCTION_SETS = sorted({"base", "avx2", "avx512"} & set(_C.instruction_sets.split()))


def codes_and_weights(rng, rows, n_buckets, n_hashes, n_probes):
    codes = rng.integers(0, n_buckets, (1, 2, rows, n_hashes * n_probes))
    weights = rng.random(codes.shape).astype(np.float32)
    return codes.astype(np.uint8 if n_buckets <= 256 else np.uint16), weights


def within_a_line(x):
    """A copy that begins 16 bytes behind the beginning of a cache line."""
    memory = np.empty(x.nbytes + 64, np.uint8)
    start = (16 - memory.ctypes.data) % 64
    copy = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


def check_sums():
    """Hard and weighted sums against all pairs, with the same bits on one and on three threads, and
    wherever in a cache line the values begin.
    """
    rng = np.random.default_rng(0)
    n_hashes = 32
    for n_buckets, n_queries, n_keys, columns in (
        (64, 150, 170, 64),  # codes of a byte
        (256, 100, 300, 40),  # a last slice that is not full
        (512, 300, 280, 64),  # of two bytes
        (4096, 90, 80, 20),  # most buckets empty
        (1024, 1100, 1050, 40),  # columns copied slice by slice where L2 is large
    ):
        values = rng.standard_normal((1, 2, n_keys, columns)).astype(np.float32)
        mask = (rng.random((1, n_keys)) < 0.8).astype(np.uint8)
        for n_probes in (1, 4):
            query, query_weights = codes_and_weights(rng, n_queries, n_buckets, n_hashes, n_probes)
            key, key_weights = codes_and_weights(rng, n_keys, n_buckets, n_hashes, n_probes)
            pairs = pair_weights(
                [(query, query_weights), (key, key_weights)], n_buckets, n_hashes, n_probes
            )
            for order in (0, 1, 2):
                results = []
                for threads, given in ((1, values), (3, values), (1, within_a_line(values))):
                    out = np.full((1, 2, n_queries, columns), np.nan, np.float32)
                    rest = given, n_buckets, order, mask, 1 / n_hashes, out, threads
                    if n_probes == 1:
                        _C.bucket_sum(query, key, *rest)
                    else:
                        _C.weighted_bucket_sum(
                            query, query_weights, n_probes, key, key_weights, n_probes, *rest
                        )
                    results.append(out)
                for other in results[1:]:
                    np.testing.assert_array_equal(results[0], other)
                seen = np.ones((n_queries, n_keys))
                seen = (seen, np.tril(seen), np.triu(seen))[order] * mask
                wanted = (pairs * seen) @ values / n_hashes
                # Sums of some hundred float32 numbers.
                np.testing.assert_allclose(results[0], wanted, rtol=0, atol=1e-4)


def check_attention_of_16_bits():
    """Attention of float16 inputs, whose tables are of 16-bit integers, and its gradient.

    The steps of the integers are chosen so that no value moves by more than 2e-3 of its column's
    mean magnitude; float16 rounds the results once more.
    """
    rng = np.random.default_rng(1)
    n_hashes, columns = 16, 70
    for n_bits, n_queries, n_keys in ((5, 300, 280), (8, 200, 260), (12, 150, 130)):
        shapes = (n_queries, 64), (n_keys, 64), (n_keys, columns), (n_queries, columns)
        query, key, value, grad = (
            rng.standard_normal((1, 2, *shape)).astype(np.float16) for shape in shapes
        )
        planes = rng.standard_normal((2, n_hashes * n_bits, 64)).astype(np.float32)
        code = np.uint8 if n_bits <= 8 else np.uint16
        for causal in (False, True):
            results = []
            for threads in (1, 3):
                out = np.full_like(grad, np.nan)
                codes = [np.empty((1, 2, n, n_hashes), code) for n in (n_queries, n_keys)]
                _C.yoso_forward(
                    *(query, key, value, None, planes, 0, n_bits, n_hashes),
                    *(causal, 0, out, *codes, threads),
                )
                grads = [np.full_like(x, np.nan) for x in (query, key, value)]
                _C.yoso_backward(
                    *(query, key, value, None, *codes, n_bits, causal, 0, 0, grad, *grads),
                    threads,
                )
                results.append((out, *grads))
            for one, three in zip(*results, strict=True):
                np.testing.assert_array_equal(one, three)
            weights = (codes[0][:, :, :, None] == codes[1][:, :, None]).mean(-1)
            if causal:
                weights = weights * np.tril(np.ones((n_queries, n_keys)))
            out, *_, value_grad = results[0]
            wanted = weights @ value.astype(float), weights.swapaxes(-1, -2) @ grad.astype(float)
            for a, e in zip((out, value_grad), wanted, strict=True):
                error = np.sqrt(np.mean((a - e) ** 2) / np.mean(e**2))
                assert error < 2e-3 + 2**-11, (n_bits, causal, error)


def check_soft_codes():
    """Attention with soft codes of three and four probes, and its gradient, against the reference.

    Of 12 bits, whose tables take two hashes a pass where rows do not fit L3.
    """
    rng = np.random.default_rng(2)
    n_queries, n_keys, d, n_hashes = 150, 1100, 64, 9
    key, value = rng.standard_normal((2, 1, 1, n_keys, d)).astype(np.float32)
    query, grad = rng.standard_normal((2, 1, 1, n_queries, d)).astype(np.float32)
    for n_bits in (8, 12):
        planes = rng.standard_normal((1, n_hashes * n_bits, d)).astype(np.float32)
        code = np.uint8 if n_bits <= 8 else np.uint16
        for n_probes in (3, 4):
            inputs = query, key, value, None, planes, np.full(1, 2, np.float32)
            options = 0, n_bits, n_hashes, n_probes, n_probes, False, 0
            codes = [
                np.empty((1, 1, n, width), kind)
                for n in (n_queries, n_keys)
                for width, kind in ((n_hashes, code), (2 * n_hashes, np.int32))
            ]
            divisors = np.empty((1, 1, 0), np.float32)
            out, *grads = (np.full_like(x, np.nan) for x in (grad, query, key, value))
            _C.soft_attention_forward(*inputs, *options, out, *codes, divisors)
            _C.soft_attention_backward(
                *(*inputs, *options, grad, *codes, divisors, None, *grads, None)
            )
            exact = [x.astype(float) for x in (query, key, value, grad)]
            hasher = planes.astype(float), "hyperplane", n_bits, n_hashes
            given = {"n_probes": (n_probes, n_probes), "normalize": None}
            wanted = [
                reference.soft_attention_forward(*exact[:3], hasher, **given),
                *reference.soft_attention_backward(*exact[:3], hasher, exact[3], **given)[:3],
            ]
            for a, e in zip((out, *grads), wanted, strict=True):
                # A probe may flip another bit where margins are within rounding of each other.
                error = np.sqrt(np.mean((a - e) ** 2) / np.mean(e**2))
                assert error < 1e-4, (n_bits, n_probes, error)


def pair_weights(sides, n_buckets, n_hashes, n_probes):
    """(1, 2, n_queries, n_keys): over hashes and probes, the products of weights of equal codes."""
    first_bucket = n_buckets * np.repeat(np.arange(n_hashes), n_probes)
    heads = []
    for head in range(2):
        features = []
        for codes, weights in sides:
            columns = codes[0, head] + first_bucket
            weight = weights[0, head].astype(float) if n_probes > 1 else np.ones(columns.shape)
            ends = np.arange(0, columns.size + 1, columns.shape[1])
            shape = len(columns), n_hashes * n_buckets
            features.append(sparse.csr_array((weight.ravel(), columns.ravel(), ends), shape))
        heads.append((features[0] @ features[1].T).toarray())
    return np.array(heads)[None]


def in_process(sizes, *arguments, **variables):
    environment = {k: v for k, v in os.environ.items() if k != "LSHKIT_CACHE_SIZES"} | variables
    if sizes is not None:
        environment["LSHKIT_CACHE_SIZES"] = sizes
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("sizes", SIZES)
def test_sums_equal_all_pairs_with_any_caches(sizes):
    done = in_process(sizes, __file__)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("sizes", [None, "8,16", "128,4096"])
def test_attention_of_16_bits_with_any_caches(sizes, instruction_set):
    done = in_process(sizes, __file__, "16 bits", LSHKIT_ISA=instruction_set)
    if f"LSHKIT_ISA={instruction_set} does not run here" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("sizes", ["8,64", "1024,1024"])
def test_soft_codes_with_any_caches(sizes):
    done = in_process(sizes, __file__, "soft codes")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("sizes", ["big", "1024", "1024,", "0,64", "64,32", "1024,32768,1", "-1,8"])
def test_sizes_that_are_none_are_refused(sizes):
    done = in_process(sizes, "-c", "from lshkit import _C; _C.cache_sizes()")
    assert done.returncode != 0
    assert "LSHKIT_CACHE_SIZES must be the sizes" in done.stderr and f"was {sizes}" in done.stderr


def test_sizes_are_those_of_the_variable():
    program = "import lshkit; lshkit.show_versions()"
    assert (
        "L2 96 KB, L3 2048 KB (LSHKIT_CACHE_SIZES=96,2048)"
        in in_process("96,2048", "-c", program).stdout
    )
    assert 0 < _C.cache_sizes()[0] <= _C.cache_sizes()[1]


if __name__ == "__main__":
    checks = {"16 bits": check_attention_of_16_bits, "soft codes": check_soft_codes}
    checks.get(" ".join(sys.argv[1:]), check_sums)()
