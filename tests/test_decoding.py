"""YosoState: the causal forward, a few positions at a time, from tables of constant size."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from attention_cases import FAMILIES, NORMALIZE, one_thread  # noqa: E402, F401

from lshkit import _C, reference, torch_ops  # noqa: E402
from lshkit.attention import YosoAttention, YosoState, yoso_attention  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

SEED = 11


def qkv(batch=2, heads=3, n=29, d=20, d_v=9, *, key_heads=None, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    key_heads = heads if key_heads is None else key_heads
    shapes = (batch, heads, n, d), (batch, key_heads, n, d), (batch, key_heads, n, d_v)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def state_for(query, key, value, **options):
    batch, heads, _, d = query.shape
    return YosoState(
        batch,
        heads,
        d,
        value.shape[-1],
        num_key_heads=key.shape[1],
        dtype=query.dtype,
        **{"seed": SEED, "n_hashes": 12, **options},
    )


def causal(query, key, value, mask=None, **options):
    options = {"seed": SEED, "n_hashes": 12, "estimator": "sampled", **options}
    return yoso_attention(query, key, value, mask, is_causal=True, **options)


def positions(tensors, first, last):
    return [x[:, :, first:last] for x in tensors]


def in_steps(state, tensors, mask=None):
    n = tensors[0].shape[2]
    masks = [() if mask is None else (mask[:, i : i + 1],) for i in range(n)]
    return torch.cat(
        [state.step(*positions(tensors, i, i + 1), *m) for i, m in enumerate(masks)], 2
    )


def in_chunks(state, tensors, sizes, mask=None):
    outs, first = [], 0
    for size in sizes:
        chunk_mask = () if mask is None else (mask[:, first : first + size],)
        outs.append(state.prefill(*positions(tensors, first, first + size), *chunk_mask))
        first += size
    return torch.cat(outs, 2)


def same_contents(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- The causal forward -----------------------------------------------------------------------


@pytest.mark.parametrize("n_bits", [1, 4, 8, 11])
@pytest.mark.parametrize("hasher", FAMILIES)
@pytest.mark.parametrize("normalize", NORMALIZE)
def test_steps_equal_the_causal_forward(normalize, hasher, n_bits):
    tensors = qkv()
    options = {"normalize": normalize, "hasher": hasher, "n_bits": n_bits}
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
    expected = yoso_attention(query, key, value, n_hashes=12, estimator="sampled", seed=SEED)
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


def soft_features(x, functions, family, n_bits, n_hashes, n_probes, sharpness):
    """Rows as weights over the buckets of every hash, `(..., n, n_hashes, 2^n_bits)`, in numpy."""
    z = reference.projections(reference.unit(x), functions, family, n_bits, n_hashes)
    z = z / (functions.shape[-1] if family == "hadamard" else 1)
    margins = np.abs(z)
    order = np.argsort(margins, -1, kind="stable")
    features = np.zeros((*z.shape[:-1], 2**n_bits))
    own = reference.codes(z).astype(int)
    codes, logits = [], []
    for a in range(n_probes):
        code, logit = own, 0
        for k in range(n_bits):
            if a >> k & 1:
                bit = order[..., k]
                code = code ^ (1 << bit)
                picked = np.take_along_axis(margins, bit[..., None], -1)[..., 0]
                logit = logit - 2 * sharpness * picked
        codes.append(code)
        logits.append(logit + np.zeros_like(z[..., 0]))
    weights = np.exp(logits) / np.exp(logits).sum(0)
    for code, weight in zip(codes, weights, strict=True):
        np.put_along_axis(features, code[..., None], weight[..., None], -1)
    return features


@pytest.mark.parametrize("n_probes", [1, 2, 4, 5, 16, (4, 1), (1, 3), (2, 8)])
@pytest.mark.parametrize("hasher", FAMILIES)
@pytest.mark.parametrize("normalize", NORMALIZE)
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
    options = {"normalize": normalize, "hasher": hasher, "n_bits": n_bits, "n_hashes": m}
    options |= {"estimator": "soft", "n_probes": n_probes, "sharpness": sharpness}
    state = state_for(*tensors, **options)
    out = in_steps(state, tensors)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)
    other = state_for(*tensors, **options)
    assert torch.equal(in_chunks(other, tensors, (10, 11)), out)
    assert same_contents(state, other)


def test_one_soft_probe_is_the_hard_code():
    tensors = qkv()
    hard, soft = state_for(*tensors), state_for(*tensors, estimator="soft", n_probes=1)
    assert torch.equal(hard.prefill(*tensors), soft.prefill(*tensors))
    assert torch.equal(hard._sums, soft._sums)


@pytest.mark.parametrize("normalize", NORMALIZE)
def test_soft_codes_of_masked_and_broken_rows(normalize):
    query, key, value = tensors = qkv(n=20)
    options = {"normalize": normalize, "estimator": "soft"}
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
    for wrong in (0, 257, (1, 2, 3), (4, 0)):
        with pytest.raises(ValueError, match="n_probes"):
            YosoState(1, 4, 8, estimator="soft", n_probes=wrong, seed=0)
    for wrong in (0, -1.0, torch.nan, torch.inf, torch.ones(3)):
        with pytest.raises(ValueError, match="sharpness"):
            YosoState(1, 4, 8, estimator="soft", sharpness=wrong, seed=0)
    state = YosoState(1, 4, 8, estimator="soft", sharpness=torch.ones(4), seed=0)
    assert "n_probes=(4, 4), sharpness=[1.0" in repr(state)
    state.load_state_dict(YosoState(1, 4, 8, estimator="soft", sharpness=1, seed=0).state_dict())
    for name, value in (("n_probes", (2, 4)), ("sharpness", 2.5), ("estimator", "sampled")):
        options = {"estimator": "soft", "sharpness": 1, name: value}
        with pytest.raises(ValueError, match=name):
            state.load_state_dict(YosoState(1, 4, 8, seed=0, **options).state_dict())


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
    options = {"n_bits": 1, "n_hashes": 1, "normalize": None, "table_dtype": torch.float16}
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
    options = {"normalize": None, "n_bits": 4, "n_hashes": 4}
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


def test_threads_do_not_change_a_bit():
    tensors = qkv(batch=3, heads=8, n=300, d=64, d_v=64)
    outs = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)  # set back by the fixture
        state = state_for(*tensors)
        outs.append((state.prefill(*tensors), state.step(*positions(tensors, 0, 1)), state._sums))
    for other in outs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outs[0], other, strict=True))


# --- The state as a thing -----------------------------------------------------------------------


@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("table_dtype", [torch.float32, torch.float16])
def test_state_dict(tmp_path, table_dtype, normalize):
    tensors = qkv()
    mask = torch.rand(2, 29, generator=torch.Generator().manual_seed(1)) < 0.7
    options = {"normalize": normalize, "table_dtype": table_dtype}
    state = state_for(*tensors, **options)
    state.prefill(*tensors, mask)
    torch.save(state.state_dict(), tmp_path / "state.pt")
    other = state_for(*tensors, **options)
    other.prefill(*tensors)  # to be overwritten
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert same_contents(state, other)
    assert torch.equal(state.length, other.length)
    one = positions(tensors, 3, 4)
    assert torch.equal(state.step(*one), other.step(*one))


@pytest.mark.parametrize(
    "name, value",
    [
        ("batch_size", 3),
        ("num_heads", 8),
        ("head_dim", 21),
        ("value_dim", 5),
        ("num_key_heads", 2),
        ("n_bits", 7),
        ("n_hashes", 13),
        ("hasher", "hyperplane"),
        ("normalize", "sum"),
        ("normalize", None),
        ("dtype", torch.bfloat16),
        ("table_dtype", torch.float16),
        ("conv_window", 3),
        ("seed", 12),
    ],
)
def test_a_state_of_other_options_is_not_loaded(name, value):
    arguments = {
        "batch_size": 2,
        "num_heads": 4,
        "head_dim": 20,
        "value_dim": 9,
        "num_key_heads": 4,
        "seed": SEED,
    }
    state, other = YosoState(**arguments), YosoState(**{**arguments, name: value})
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        state.load_state_dict(other.state_dict())
    assert same_contents(state, YosoState(**arguments))


def test_a_damaged_state_dict_is_not_loaded():
    state = YosoState(1, 2, 8, seed=SEED)
    saved = state.state_dict()
    with pytest.raises(ValueError, match="version 1, got 2"):
        state.load_state_dict({**saved, "version": torch.tensor(2)})
    with pytest.raises(ValueError, match="'masked'"):
        state.load_state_dict({name: x for name, x in saved.items() if name != "masked"})
    with pytest.raises(ValueError, match="'more'"):
        state.load_state_dict({**saved, "more": torch.tensor(2)})
    with pytest.raises(ValueError, match="sums must be"):
        state.load_state_dict({**saved, "sums": saved["sums"][1:]})


@pytest.mark.parametrize("normalize", ["l2", "sum"])
def test_reorder_and_clone(normalize):
    tensors = qkv(batch=3)
    mask = torch.ones(3, 29, dtype=torch.bool)
    mask[2, :4] = False
    state = state_for(*tensors, normalize=normalize)
    state.prefill(*tensors, mask)
    clone = state.clone()
    assert same_contents(state, clone)
    indices = torch.tensor([2, 0, 2, 1])
    assert clone.reorder(indices) is clone
    assert clone.batch_size == 4 and clone.length.tolist() == [25, 29, 25, 29]
    one = positions(tensors, 5, 6)
    picked = [x[indices] for x in one]
    before = state.state_dict()
    assert torch.equal(clone.step(*picked), state.clone().step(*one)[indices])
    after = state.state_dict()  # untouched by what happened to the clones
    assert all(torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(ValueError, match="indices must be from 0 to 2, got 3"):
        state.reorder(torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="indices must be integers"):
        state.reorder(torch.tensor([0.0]))


def test_reset():
    tensors = qkv()
    state = state_for(*tensors, normalize="sum")
    first = state.prefill(*tensors)
    assert state.reset() is state and state.length.tolist() == [0, 0]
    assert torch.equal(state.prefill(*tensors), first)


def test_to():
    tensors = qkv()
    state = state_for(*tensors)
    assert state.to(torch.bfloat16).to("cpu") is state
    assert state.step(*(x[:, :, :1].bfloat16() for x in tensors)).dtype is torch.bfloat16
    with pytest.raises(NotImplementedError, match="device"):
        state.to("cuda")
    with pytest.raises(TypeError, match="dtype"):
        state.to(torch.int32)


def test_repr():
    text = repr(YosoState(2, 4, 8, num_key_heads=2, seed=SEED))
    assert text.startswith("YosoState(2, 4, 8, 8, num_key_heads=2, n_bits=8, n_hashes=32")
    assert "length=[0, 0]" in text


# --- Checks at the door -------------------------------------------------------------------------


def test_arguments_of_the_constructor():
    def error(kind, match, *sizes, **options):
        with pytest.raises(kind, match=match):
            YosoState(*(sizes or (1, 4, 8)), **{"seed": 0, **options})

    error(ValueError, "batch_size", 0, 4, 8)
    error(TypeError, "num_heads", 1, 4.0, 8)
    error(ValueError, "head_dim", 1, 4, 0)
    error(ValueError, "value_dim", 1, 4, 8, 0)
    error(ValueError, "num_key_heads must divide", num_key_heads=3)
    error(ValueError, "n_bits", n_bits=17)
    error(ValueError, "n_hashes", n_hashes=0)
    error(ValueError, "hasher", hasher="simhash")
    error(ValueError, "estimator", estimator="expected")
    error(ValueError, "normalize", normalize="l1")
    error(ValueError, "unit_norm", unit_norm=None)
    error(ValueError, "seed", seed=-1)
    error(TypeError, "dtype", dtype=torch.int32)
    error(TypeError, "table_dtype", table_dtype=torch.bfloat16)
    error(ValueError, "conv_window", conv_window=4)


def test_arguments_of_a_call():
    query, key, value = tensors = qkv()
    state = state_for(*tensors)
    empty = state.state_dict()
    wrong = [
        (TypeError, "query must be a torch tensor", (query.numpy(), key, value)),
        (ValueError, "query must be \\(2, 3, n, 20\\)", (query[:1], key, value)),
        (ValueError, "key must be \\(2, 3, n, 20\\)", (query, key[..., :19], value)),
        (ValueError, "value must be \\(2, 3, n, 9\\)", (query, key, value[0])),
        (ValueError, "value must have key's length", (query, key, value[:, :, 1:])),
        (TypeError, "key must have the state's dtype", (query, key.double(), value)),
        (NotImplementedError, "value must be on the cpu", (query, key, value.to("meta"))),
        (RuntimeError, "key requires grad", (query, key.clone().requires_grad_(), value)),
        (TypeError, "attn_mask must be a boolean", (*tensors, torch.ones(2, 29))),
        (TypeError, "attn_mask must be a boolean", (*tensors, True)),
        (ValueError, "attn_mask must be \\(2, 29\\)", (*tensors, torch.ones(29) > 0)),
    ]
    for kind, match, arguments in wrong:
        for method in (state.step, state.prefill):
            with pytest.raises(kind, match=match):
                method(*arguments)
    with pytest.raises(ValueError, match="key must have query's length"):
        state.prefill(query[:, :, 1:], key, value)
    assert all(torch.equal(x, empty[name]) for name, x in state.state_dict().items())
    with torch.no_grad():
        state.step(query, key.clone().requires_grad_(), value)


def test_the_core_checks_what_it_is_given():
    state = YosoState(1, 4, 8, num_key_heads=2, seed=SEED)
    query, key = torch.zeros(1, 4, 1, 8), torch.zeros(1, 2, 1, 8)
    out = torch.zeros(1, 4, 1, 8)

    def decode(sums=state._sums, counts=None, batch=1, normalize=2, causal=False, **tensors):
        given = {"query": query, "key": key, "value": key, "key_mask": None, "out": out, **tensors}
        options = {"normalize": normalize, "causal": causal, **given}
        _C.decode(sums, counts, batch, *state._options[:-1], **options)

    decode()
    for match, arguments in [
        ("sums", {"sums": state._sums.double()}),
        ("sums", {"sums": state._sums[:, :, 1:]}),
        ("sums", {"batch": 3}),
        ("batch", {"batch": 0}),
        ("counts", {"normalize": 1}),
        ("counts", {"counts": torch.zeros(2, 32, 255)}),
        ("query and key", {"query": None, "key": None}),
        ("value", {"value": None}),
        ("out", {"out": None}),
        ("out", {"out": out[:, :2]}),
        ("query", {"query": torch.zeros(1, 3, 1, 8), "out": torch.zeros(1, 3, 1, 8)}),
        ("key", {"key": torch.zeros(1, 2, 2, 8), "value": torch.zeros(1, 2, 2, 8), "causal": True}),
        ("key_mask", {"key_mask": torch.zeros(1, 2, dtype=torch.bool)}),
    ]:
        with pytest.raises((TypeError, ValueError), match=match):
            decode(**arguments)


# --- The module -----------------------------------------------------------------------------------


def tokens(n=40, size=24, batch=2):
    return torch.randn(batch, n, size, generator=torch.Generator().manual_seed(3))


@torch.no_grad()
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("conv_window", [None, 1, 5])
@pytest.mark.parametrize("normalize", ["l2", "sum"])
def test_module(normalize, conv_window, masked):
    options = {"estimator": "sampled", "normalize": normalize, "conv_window": conv_window}
    module = YosoAttention(24, 3, dropout=0.5, **options).eval()
    x = tokens()
    ignored = None
    if masked:
        ignored = torch.zeros(2, 40, dtype=torch.bool)
        ignored[0, :7] = True
    expected, _ = module(x, x, x, key_padding_mask=ignored, is_causal=True)
    for sizes in ([1] * 40, [20, 1, 2, 17], [0, 40]):
        state, outs, first = module.new_state(2), [], 0
        for size in sizes:
            part = x[:, first : first + size]
            part_ignored = None if ignored is None else ignored[:, first : first + size]
            out, weights = module(
                part, part, part, key_padding_mask=part_ignored, is_causal=True, state=state
            )
            assert weights is None
            outs.append(out)
            first += size
        torch.testing.assert_close(torch.cat(outs, 1), expected)
        assert state.length.tolist() == ([33, 40] if masked else [40, 40])


@torch.no_grad()
def test_module_state_keeps_the_convolution():
    """In a copy, a saved state and another order of the sequences."""
    module = YosoAttention(24, 3, estimator="sampled", conv_window=5).eval()
    x = tokens()
    expected, _ = module(x, x, x, is_causal=True)
    state = module.new_state(2)
    module(*[x[:, :30]] * 3, is_causal=True, state=state)
    loaded = module.new_state(2)
    loaded.load_state_dict(state.state_dict())
    for other, order in ((state.clone(), [0, 1]), (loaded, [0, 1]), (state, [1, 0])):
        other.reorder(torch.tensor(order))
        rest = x[order, 30:]
        out, _ = module(rest, rest, rest, is_causal=True, state=other)
        torch.testing.assert_close(out, expected[order, 30:])
    fresh, _ = module(*[x[:, :1]] * 3, is_causal=True, state=state.reset())
    torch.testing.assert_close(fresh, expected[:, :1])


@torch.no_grad()
def test_module_without_a_batch():
    module = YosoAttention(24, 3, estimator="sampled", conv_window=3).eval()
    x = tokens(batch=1)[0]
    state = module.new_state(1)
    out = torch.cat([module(*[row[None]] * 3, is_causal=True, state=state)[0] for row in x])
    torch.testing.assert_close(out, module(x, x, x, is_causal=True)[0])


@torch.no_grad()
def test_module_and_state_must_match():
    module = YosoAttention(24, 3).eval()
    x = tokens(1)
    state = module.new_state(2)

    def error(kind, match, module=module, state=state, x=x, is_causal=True):
        with pytest.raises(kind, match=match):
            module(x, x, x, is_causal=is_causal, state=state)

    error(TypeError, "state must be a YosoState", state=3)
    error(ValueError, "is_causal must be True", is_causal=False)
    error(ValueError, "state must have the module's seed", YosoAttention(24, 3).eval())
    error(ValueError, "module's num_heads=2", YosoAttention(24, 2, seed=state.seed).eval())
    error(ValueError, "module's n_hashes=8", YosoAttention(24, 3, n_hashes_eval=8).eval())
    error(ValueError, "module's conv_window=3", YosoAttention(24, 3, conv_window=3).eval())
    error(ValueError, "query must be \\(2, ", x=tokens(1, batch=3))
    error(ValueError, "training", module.train())
    expected = YosoAttention(24, 3, estimator="expected")
    with pytest.raises(ValueError, match="estimator must be"):
        expected.new_state(2)
    module.eval()
    with torch.enable_grad(), pytest.raises(RuntimeError, match="no autograd through a state"):
        module(x, x, x, is_causal=True, state=state)
