"""Each instruction set that the machine runs computes what the others do, and says if it cannot."""

import os
import subprocess
import sys

import numpy as np
import pytest

from lshkit import _C

INSTRUCTION_SETS = tuple(_C.instruction_sets.split())  # those compiled
REFUSED = "does not run here"
FLOAT32, FLOAT64 = 2e-5, 1e-12  # relative to the largest result: sums are taken in another order


def attention_inputs(rng, dtype, n_queries=75, n_keys=83):
    query = rng.standard_normal((2, 3, n_queries, 37)).astype(dtype)
    key = rng.standard_normal((2, 3, n_keys, 37)).astype(dtype)
    value = rng.standard_normal((2, 3, n_keys, 21)).astype(dtype)
    grad_out = rng.standard_normal((2, 3, n_queries, 21)).astype(dtype)
    mask = rng.random((2, n_keys)) < 0.8
    return query, key, value, mask, grad_out


def parameters_of(rng, family, n_bits, n_hashes, heads, n_features):
    if family == 0:
        rows = rng.standard_normal((heads, n_hashes * n_bits, n_features))
    else:
        columns = 64
        rows = rng.choice([-1.0, 1.0], (heads, 3 + n_bits, columns))
        angles = rng.uniform(0, 2 * np.pi, (heads, 3, columns // 2))
        rows[:, :3] = np.concatenate([np.cos(angles), np.sin(angles)], axis=2)
    return rows.astype(np.float32)


def results():
    """Every function of the module on fixed inputs. No projection lies within rounding of zero."""
    rng = np.random.default_rng(7)
    out = {}
    for family in (0, 1):
        for n_bits in (5, 11):
            name, n_hashes, code = f"{family}_{n_bits}", 9, "u1" if n_bits <= 8 else "u2"
            query, key, value, mask, grad_out = attention_inputs(rng, np.float32)
            functions = parameters_of(rng, family, n_bits, n_hashes, 3, 37)
            codes = np.empty((*query.shape[:3], n_hashes), code)
            finite = _C.hash(query, functions, family, n_bits, n_hashes, codes, 1)
            out[f"hash_{name}"], out[f"finite_{name}"] = codes, np.array(finite)
            for causal in (False, True):
                for normalize in (0, 1, 2):
                    case = f"{name}_{causal}_{normalize}"
                    y = np.empty_like(grad_out)
                    query_codes, key_codes = np.empty_like(codes), np.empty((2, 3, 83, 9), code)
                    _C.yoso_forward(
                        *(query, key, value, mask, functions, family, n_bits, n_hashes),
                        *(causal, normalize, y, query_codes, key_codes, 1),
                    )
                    out[f"yoso_{case}"] = y
                    out[f"query_codes_{case}"], out[f"key_codes_{case}"] = query_codes, key_codes
                    for gradient in (0, 2, 3):  # 1 is the expectation's
                        gradients = [np.empty_like(a) for a in (query, key, value)]
                        _C.yoso_backward(
                            *(query, key, value, mask, query_codes, key_codes, n_bits),
                            *(causal, normalize, gradient, grad_out, *gradients, 1),
                        )
                        for which, array in zip("qkv", gradients, strict=True):
                            out[f"yoso_grad_{which}_{case}_{gradient}"] = array
            out |= soft_results(name, query, functions, family, n_bits, n_hashes)
    for dtype in (np.float32, np.float64):
        name = np.dtype(dtype).name
        query, key, value, mask, grad_out = attention_inputs(rng, dtype)
        for causal in (False, True):
            for normalize in (0, 1, 2):
                case = f"{name}_{causal}_{normalize}"
                y = np.empty_like(grad_out)
                _C.expected_forward(query, key, value, mask, 6, causal, normalize, y, 1)
                out[f"expected_{case}"] = y
                for gradient in (0, 1):
                    gradients = [np.empty_like(a) for a in (query, key, value)]
                    _C.expected_backward(
                        *(query, key, value, mask, 6, causal, normalize, gradient),
                        *(grad_out, *gradients, 1),
                    )
                    for which, array in zip("qkv", gradients, strict=True):
                        out[f"expected_grad_{which}_{case}_{gradient}"] = array
        for code in (np.uint8, np.uint16):
            query_codes = rng.integers(0, 32, (2, 3, 75, 9)).astype(code)
            key_codes = rng.integers(0, 32, (2, 3, 83, 9)).astype(code)
            for order in (0, 1, 2):
                y = np.empty_like(grad_out)
                _C.bucket_sum(query_codes, key_codes, value, 32, order, mask, 1 / 9, y, 1)
                out[f"bucket_sum_{name}_{code.__name__}_{order}"] = y
            indptr = np.empty(76, np.int64)
            _C.collision_indptr(query_codes[0, 0], key_codes[0, 0], mask[0], True, indptr, 1)
            pairs = [np.empty(indptr[-1], np.int32) for _ in range(2)]
            _C.collisions(query_codes[0, 0], key_codes[0, 0], mask[0], True, indptr, *pairs, 1)
            out[f"collisions_{name}_{code.__name__}"] = np.stack(pairs)
            if dtype is np.float32:
                for weighting in (0, 1, 2):
                    arrays = lsh_results(query_codes, key_codes, weighting)
                    for i, array in enumerate(arrays):
                        out[f"lsh_{code.__name__}_{weighting}_{i}"] = array
            table = np.zeros((9, 32, 21), dtype)
            _C.bucket_table_add(table, key_codes[0, 0], value[0, 0], 1.0, 1)
            _C.bucket_table_add(table, key_codes[0, 0, :7], value[0, 0, :7], -1.0, 1)
            y = np.empty((75, 21), dtype)
            _C.bucket_table_query(table, query_codes[0, 0], 1 / 9, y, 1)
            out[f"table_{name}_{code.__name__}"], out[f"query_{name}_{code.__name__}"] = table, y
    return out


def lsh_results(query_codes, key_codes, weighting):
    """Output, logarithms, numbers of pairs and gradients of softmax from colliding pairs."""
    inputs = attention_inputs(np.random.default_rng(11), np.float32)
    query, key, value, mask, grad_out = inputs
    n_bits = 8 if query_codes.dtype == np.uint8 else 9
    options = mask, query_codes, key_codes, n_bits, 0.2, weighting, True, 8, 3, 2
    out, log_sum = np.empty_like(grad_out), np.empty(query.shape[:3], np.float64)
    pairs = np.empty(query.shape[:3], np.int32)
    _C.lsh_attention_forward(query, key, value, *options, out, log_sum, pairs, 1)
    gradients = [np.empty_like(x) for x in (query, key, value)]
    _C.lsh_attention_backward(query, key, value, *options, grad_out, out, log_sum, *gradients, 1)
    log_sum = np.where(np.isfinite(log_sum), log_sum, 0).astype(np.float32)  # of sums in float32
    return out, log_sum, pairs, *gradients


def soft_results(name, x, functions, family, n_bits, n_hashes):
    out, code = {}, np.uint8 if n_bits <= 8 else np.uint16
    for n_probes in (1, 2, 3, 4, 8, 11, 16):
        rows, selected = x.shape[:3], n_hashes * (n_probes - 1).bit_length()
        sharpness = np.float32([1, 2, 3])
        options = x, functions, sharpness, family, n_bits, n_hashes, n_probes
        codes, words = np.empty((*rows, n_hashes), code), np.empty((*rows, selected), np.int32)
        probes = np.empty((*rows, n_hashes * n_probes), code)
        weights = np.empty(probes.shape, np.float32)
        _C.soft_hash(*options, codes, words, probes, weights, 1)
        grad = np.cos(np.arange(weights.size, dtype=np.float32)).reshape(weights.shape)
        grad_x, grad_sharpness = np.empty_like(x), np.empty(rows[:2], np.float32)
        planes = np.empty_like(functions) if family == 0 else None
        saved = codes, words, weights
        _C.soft_hash_backward(*options, *saved, grad, grad_x, grad_sharpness, planes, 1)
        bits, margins = words & 15, words.view(np.float32)
        arrays = codes, bits, margins, probes, weights, grad_x, grad_sharpness
        for i, array in enumerate(arrays if planes is None else (*arrays, planes)):
            out[f"soft_{name}_{n_probes}_{i}"] = array
    return out


def run(path, instruction_set=None):
    env = {name: value for name, value in os.environ.items() if name != "LSHKIT_ISA"}
    if instruction_set:
        env["LSHKIT_ISA"] = instruction_set
    done = subprocess.run(
        [sys.executable, __file__, str(path)], env=env, capture_output=True, text=True, timeout=300
    )
    if instruction_set and REFUSED in done.stderr:
        message = done.stderr.splitlines()[-1]
        assert f"LSHKIT_ISA={instruction_set} {REFUSED}: " in message
        assert any(missing in message for missing in ("tile", "avx512", "avx2", "fma"))
        pytest.skip(message)
    assert done.returncode == 0, done.stderr
    with np.load(path) as arrays:
        return done.stdout.strip(), dict(arrays)


@pytest.fixture(scope="module")
def best(tmp_path_factory):
    return run(tmp_path_factory.mktemp("best") / "results.npz")


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_same_results(name, best, tmp_path):
    _, wanted = best
    used, got = run(tmp_path / "results.npz", name)
    assert used == name
    assert got.keys() == wanted.keys()
    for case, array in wanted.items():
        if array.dtype.kind == "f":
            relative = FLOAT32 if array.dtype == np.float32 else FLOAT64
            assert np.isfinite(array).all(), case
            atol = relative * np.abs(array).max(initial=0)
            np.testing.assert_allclose(got[case], array, rtol=0, atol=atol, err_msg=case)
        else:
            np.testing.assert_array_equal(got[case], array, err_msg=case)


def test_an_unknown_set_is_refused():
    environment = os.environ | {"LSHKIT_ISA": "avx1024"}
    program = [sys.executable, "-c", "from lshkit import _C; _C.instruction_set()"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    message = done.stderr.splitlines()[-1]
    assert "LSHKIT_ISA must be base, " in message and message.endswith("was avx1024")


if __name__ == "__main__":
    np.savez(sys.argv[1], **results())
    print(_C.instruction_set())
