"""YosoState: the causal forward, a few positions at a time, from tables of constant size."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cases.attention import FAMILIES, NORMALIZE  # noqa: E402
from cases.decoding import (  # noqa: E402
    SAMPLED,
    SEED,
    causal,
    in_chunks,
    in_steps,
    positions,
    qkv,
    same_contents,
    soft_features,
    state_for,
)

from lshkit import _C, reference, torch_ops  # noqa: E402
from lshkit.attention import Sampled, Soft, YosoState, yoso_attention  # noqa: E402


@pytest.mark.parametrize("n_bits", [1, 4, 8, 11])
@pytest.mark.parametrize("hasher", FAMILIES)
@pytest.mark.parametrize("normalize", NORMALIZE)
def test_steps_equal_the_causal_forward(normalize, hasher, n_bits):
    tensors = qkv()
    estimator = replace(SAMPLED, hasher=hasher, n_bits=n_bits)
    options = {"normalize": normalize, "estimator": estimator}
    state = state_for(*tensors, **options)
    torch.testing.assert_close(in_steps(state, tensors), causal(*tensors, **options))
    assert state.length.tolist() == [29, 29]


@pytest.mark.parametrize("d, d_v", [(1, 1), (7, 64), (64, 64), (80, 33), (200, 130)])
@pytest.mark.parametrize("n", [1, 17, 300])  # below and above a block of positions
def test_prefill_equals_the_causal_forward(n, d, d_v):
    tensors = qkv(n=n, d=d, d_v=d_v)
    state = state_for(*tensors)
    torch.testing.assert_close(state.prefill(*tensors), causal(*tensors))


@pytest.mark.parametrize("table_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("normalize", NORMALIZE)
def test_division_into_calls_does_not_change_a_bit(normalize, table_dtype):
    tensors = qkv(n=290)
    options = {"normalize": normalize, "table_dtype": table_dtype}
    states = [state_for(*tensors, **options) for _ in range(4)]
    whole = states[0].prefill(*tensors)
    assert torch.equal(in_chunks(states[1], tensors, (1, 0, 100, 189)), whole)
    assert torch.equal(in_steps(states[2], tensors), whole)
    query, key, value = tensors
    for first, last in ((0, 260), (260, 290)):
        states[3].append(*positions((key, value), first, last))
    assert torch.equal(states[3].attend(query)[:, :, -1], whole[:, :, -1])
    assert all(same_contents(states[0], other) for other in states[1:])


def test_every_query_sees_all_that_was_added():
    query, key, value = qkv(n=300)
    state = state_for(query, key, value)
    expected = yoso_attention(query, key, value, estimator=SAMPLED, seed=SEED)
    clone = state.clone()
    torch.testing.assert_close(state.step(query, key, value), expected)  # all at once
    clone.append(key, value)
    assert torch.equal(clone.attend(query), state.attend(query))
    few = query[:, :, :2]
    assert torch.equal(clone.step(few, key, value), state.step(few, key, value))


def test_nothing_added_gives_zeros():
    query, key, value = qkv()
    for normalize in NORMALIZE:
        state = state_for(query, key, value, normalize=normalize)
        assert not state.attend(query).any()
        state.append(key[:, :, :0], value[:, :, :0])
        assert state.attend(query[:, :, :0]).shape == (2, 3, 0, 9)
        assert state.length.tolist() == [0, 0]


@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("heads, key_heads", [(4, 2), (6, 1), (6, 3)])
def test_grouped_heads_share_tables_and_functions(heads, key_heads, normalize):
    query, key, value = tensors = qkv(heads=heads, key_heads=key_heads, n=40)
    group = heads // key_heads
    functions = torch_ops.hash_parameters(
        torch.tensor([SEED]), key_heads, 20, 8, 12, torch_ops.FAMILY["hadamard"]
    )
    # By hand: each query head with its key head's keys, values and functions.
    repeated = [x.repeat_interleave(group, dim) for x, dim in ((key, 1), (value, 1))]
    by_head = functions.repeat_interleave(group, 0)
    family = torch_ops.FAMILY["hadamard"]
    codes = [torch_ops.hash(x, by_head, family, 8, 12).numpy() for x in (query, repeated[0])]
    expected = reference.yoso_forward(
        query.numpy(), *(x.numpy() for x in repeated), *codes, causal=True, normalize=normalize
    )
    options = {"normalize": normalize}
    steps = in_steps(state_for(*tensors, **options), tensors)
    np.testing.assert_allclose(steps, expected, rtol=1e-5, atol=1e-5)
    state = state_for(*tensors, **options)
    assert torch.equal(in_chunks(state, tensors, (13, 27)), steps)
    assert state._sums.shape[0] == 2 * key_heads


def test_a_sequence_does_not_depend_on_its_batch_mates():
    tensors = qkv(batch=40, n=5)  # more rows than a block of them
    together = in_steps(state_for(*tensors), tensors)
    for b in (0, 17, 39):
        alone = [x[b : b + 1] for x in tensors]
        assert torch.equal(in_steps(state_for(*alone), alone), together[b : b + 1])


@pytest.mark.parametrize("normalize", NORMALIZE)
def test_left_padding(normalize):
    tensors = qkv(n=30)
    query, key, value = tensors
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[1, :13] = False
    key[1, :, :5] = torch.nan  # whatever a masked key holds
    expected = causal(*tensors, mask, normalize=normalize)
    for divide in (in_steps, lambda *a: in_chunks(a[0], a[1], (20, 10), a[2])):
        state = state_for(*tensors, normalize=normalize)
        torch.testing.assert_close(divide(state, tensors, mask), expected)
        assert state.length.tolist() == [30, 17]
    short = [x[1:, :, 13:] for x in tensors]
    unpadded = in_steps(state_for(*short, normalize=normalize), short)
    torch.testing.assert_close(unpadded, expected[1:, :, 13:])
    state = state_for(*tensors, normalize=normalize)
    state.append(key, value, mask[:, None, None])
    torch.testing.assert_close(state.attend(query[:, :, -1:]), expected[:, :, -1:])


@pytest.mark.parametrize("normalize", NORMALIZE)
def test_rows_that_are_not_finite(normalize):
    query, key, value = tensors = qkv(n=20)
    query[0, 1, 7, 3] = torch.nan
    query[1, 0, 19, 0] = torch.inf
    key[0, 2, 4, 5] = -torch.inf
    key[1, 1, 0] = torch.nan
    key[1, 2, 3] = 0  # code 0, and takes part
    query[1, 2, 9] = 0
    expected = causal(*tensors, normalize=normalize)
    steps = in_steps(state_for(*tensors, normalize=normalize), tensors)
    torch.testing.assert_close(steps, expected, equal_nan=True)
    assert steps[0, 1, 7].isnan().all() and steps.isnan().any(-1).sum() == 2
    state = state_for(*tensors, normalize=normalize)
    torch.testing.assert_close(state.prefill(*tensors), expected, equal_nan=True)


def test_strided_tensors():
    tensors = qkv()
    expected = in_steps(state_for(*tensors), tensors)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    assert torch.equal(in_steps(state_for(*tensors), strided), expected)
    columns = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in tensors]
    assert torch.equal(state_for(*tensors).prefill(*columns), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_computed_in_float32(dtype):
    tensors = qkv(dtype=dtype)
    out = in_steps(state_for(*tensors), tensors)
    assert out.dtype is dtype
    in_float = [x.float() for x in tensors]
    assert torch.equal(out, in_steps(state_for(*in_float), in_float).to(dtype))


# --- Soft codes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("normalize", "hasher", "n_probes"),
    [
        *itertools.product(["l2"], FAMILIES, [1, 2, 4, 5, 16, (4, 1), (1, 3), (2, 8)]),
        *(("sum", hasher, (2, 8)) for hasher in FAMILIES),
        *((None, hasher, 4) for hasher in FAMILIES),
    ],
)
def test_soft_codes(normalize, hasher, n_probes):
    tensors = qkv(n=21, heads=4, key_heads=2)
    query, key, value = (x.double().numpy() for x in tensors)
    sharpness, n_bits, m = torch.tensor([2.0, 0.5]), 4, 6
    functions = torch_ops.hash_parameters(
        torch.tensor([SEED]), 2, 20, n_bits, m, torch_ops.FAMILY[hasher]
    ).numpy()
    probes = n_probes if isinstance(n_probes, tuple) else (n_probes, n_probes)
    expected = np.empty((2, 4, 21, 9))
    for head in range(4):
        options = functions[head // 2], hasher, n_bits, m
        beta = float(sharpness[head // 2])
        q = soft_features(query[:, head], *options, probes[0], beta)
        k = soft_features(key[:, head // 2], *options, probes[1], beta)
        weights = np.tril(np.einsum("bihc,bjhc->bij", q, k) / m)
        expected[:, head] = reference.attention_forward(weights, value[:, head // 2], normalize)
    estimator = Soft(hasher=hasher, n_bits=n_bits, n_hashes=m, n_probes=n_probes)
    options = {"normalize": normalize, "estimator": estimator}
    options["parameters"] = {"sharpness": sharpness}
    state = state_for(*tensors, **options)
    out = in_steps(state, tensors)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)
    other = state_for(*tensors, **options)
    assert torch.equal(in_chunks(other, tensors, (10, 11)), out)
    assert same_contents(state, other)


def test_one_soft_probe_is_the_hard_code():
    tensors = qkv()
    one_probe = Soft(n_bits=8, n_hashes=12, n_probes=1)
    hard, soft = state_for(*tensors), state_for(*tensors, estimator=one_probe)
    assert torch.equal(hard.prefill(*tensors), soft.prefill(*tensors))
    assert torch.equal(hard._sums, soft._sums)


@pytest.mark.parametrize("normalize", NORMALIZE)
def test_soft_codes_of_masked_and_broken_rows(normalize):
    query, key, value = tensors = qkv(n=20)
    options = {"estimator": Soft(n_bits=8, n_hashes=12), "normalize": normalize}
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1, :6] = False
    expected = state_for(*tensors, **options).prefill(*tensors, mask)
    state = state_for(*tensors, **options)
    key[1, 0, 3] = torch.nan
    value[1, 0, 3] = torch.nan
    query[0, 2, 5, 1] = torch.inf
    out = state.prefill(*tensors, mask)
    assert out[0, 2, 5].isnan().all()
    out[0, 2, 5] = expected[0, 2, 5]
    assert torch.equal(out, expected)
    key[0, 1, :10] = torch.nan  # takes no part either
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[0, :10] = False
    broken = in_steps(state.reset(), positions(tensors, 0, 20))[0, 1]
    assert torch.equal(broken, state.reset().prefill(*tensors, mask)[0, 1])


def test_options_of_soft_codes():
    def state_of(estimator=Soft(n_bits=8), sharpness=None):  # noqa: B008 (immutable)
        parameters = None if sharpness is None else {"sharpness": torch.as_tensor(sharpness)}
        return YosoState(1, 4, 8, estimator=estimator, parameters=parameters, seed=0)

    for wrong in (0.0, -1.0, torch.nan, torch.inf, torch.ones(3)):
        with pytest.raises(ValueError, match="sharpness"):
            state_of(sharpness=wrong)
    with pytest.raises(ValueError, match="parameters may hold nothing with Sampled.*'sharpness'"):
        state_of(Sampled(), sharpness=1.0)
    state = state_of(sharpness=torch.ones(4))
    assert "n_probes=4, sharpness=2.0" in repr(state) and "parameters of sharpness" in repr(state)
    state.load_state_dict(state_of(sharpness=torch.ones(4)).state_dict())
    with pytest.raises(ValueError, match="sharpness"):
        state.load_state_dict(state_of(sharpness=2.5).state_dict())
    state = state_of()
    for name, other in (
        ("n_probes", Soft(n_bits=8, n_probes=(2, 4))),
        ("sharpness", Soft(n_bits=8, sharpness=2.5)),
        ("estimator", Sampled()),
    ):
        with pytest.raises(ValueError, match=name):
            state.load_state_dict(state_of(other).state_dict())


# --- 16-bit tables ----------------------------------------------------------------------------


def test_half_precision_rounds_as_torch_does():
    """One hash of one bit: a row of the table is a float16 number, added to in float32."""
    generator = torch.Generator().manual_seed(0)
    scales = 10.0 ** torch.randint(-9, 5, (400, 1), generator=generator)
    value = torch.randn(400, 69, generator=generator) * scales
    value[:2, :4] = torch.tensor([65519.9, -65520.0, torch.inf, torch.nan])
    value[2] = 2.0**-24 * torch.arange(-34, 35) / 4  # ties among the smallest
    key = torch.ones(1, 1, 1, 1)
    expected = torch.zeros(69, dtype=torch.float16)
    options = {"normalize": None, "table_dtype": torch.float16}
    options["estimator"] = Sampled(n_bits=1, n_hashes=1)
    state = YosoState(1, 1, 1, 69, seed=SEED, **options)
    for j, row in enumerate(value):
        if j == 50:  # without the infinities of the first
            expected.zero_()
            state.reset()
        out = state.step(key, key, row.view(1, 1, 1, -1))
        expected = (expected.float() + row).half()
        assert np.array_equal(out[0, 0, 0], expected.float(), equal_nan=True)


def test_error_of_half_precision():
    """A sum of r additions is off by at most r half units in the last place of its largest
    partial sum: 2^-11 of it each."""
    tensors = query, key, value = qkv(batch=1, n=4000, d=16, d_v=32)
    options = {"normalize": None, "estimator": Sampled(n_bits=4, n_hashes=4)}
    full, half = (
        state_for(*tensors, **options, table_dtype=x) for x in (torch.float32, torch.float16)
    )
    most = state_for(key, key, value, **options)  # sums of |value|
    difference = full.prefill(*tensors) - half.prefill(*tensors)
    largest = most.prefill(query, key, value.abs())
    additions = 4000  # to one row, at most
    assert (difference.abs() <= additions * 2**-11 * largest).all()
    # Rounding errors are independent: what is expected grows with the root of their number.
    assert difference.std() < 2**-11 * (4000 / 16) ** 0.5 * full.attend(query).std()
    assert half._sums.nbytes * 2 == full._sums.nbytes


def test_memory_does_not_depend_on_the_length():
    tensors = qkv(n=200)
    state = state_for(*tensors)
    before = state.nbytes
    state.prefill(*tensors)
    assert state.nbytes == before
    tables = 2 * 3 * 12 * 256 * 9 * 4
    assert tables <= before < 1.5 * tables


# --- The state as a thing -----------------------------------------------------------------------


@pytest.mark.parametrize("call", ["prefill", "append", "step"])
def test_a_state_whose_call_was_interrupted_is_refused(call, monkeypatch):
    query, key, value = torch.randn(3, 1, 2, 40, 16)
    state = YosoState(1, 2, 16, seed=0)
    state.prefill(query, key, value)
    saved, add = state.state_dict(), lambda: getattr(state, call)(*tensors)
    tensors = (key, value) if call == "append" else (query, key, value)
    plain = _C.decode

    def decode(*args):
        plain(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_C, "decode", decode)
        with pytest.raises(KeyboardInterrupt):
            add()
    for use in (add, lambda: state.attend(query), state.state_dict):
        with pytest.raises(RuntimeError, match="keys of a call that was interrupted"):
            use()
    state.load_state_dict(saved)
    add()
    assert int(state.length[0]) == 80
    state._interrupted = True
    assert int(state.reset().length[0]) == 0
    add()
