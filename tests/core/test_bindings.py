"""lshkit._C takes any CPU tensor or array without a copy and names what it refuses."""

import gc
import re
import sys
import threading
import time
import weakref

import numpy as np
import pytest

from lshkit import _C

HYPERPLANE, HADAMARD = 0, 1
N_BITS, N_HASHES = 4, 3
B, H, NQ, NK, D, DV = 2, 3, 5, 7, 6, 4


def arguments(name):
    """Valid arguments of a function of the module, as fresh arrays."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    def codes(*shape):
        return rng.integers(0, 2**N_BITS, shape).astype(np.uint8)

    planes = normal(H, N_BITS * N_HASHES, D)
    attention = {
        "query": normal(B, H, NQ, D),
        "key": normal(B, H, NK, D),
        "value": normal(B, H, NK, DV),
        "key_mask": rng.random((B, NK)) < 0.7,
    }
    code_arrays = {"query_codes": codes(B, H, NQ, N_HASHES), "key_codes": codes(B, H, NK, N_HASHES)}
    options = {"causal": False, "normalize": 2}
    functions = {"parameters": planes, "family": HYPERPLANE, "n_bits": N_BITS, "n_hashes": N_HASHES}
    out = np.zeros((B, H, NQ, DV), np.float32)
    gradients = {"grad_out": normal(B, H, NQ, DV)} | {
        f"grad_{name}": np.zeros_like(attention[name]) for name in ("query", "key", "value")
    }
    table = {"table": normal(N_HASHES, 2**N_BITS, DV), "codes": codes(NK, N_HASHES)}
    return {
        "hash": {"x": normal(B, H, NQ, D), **functions, "codes": codes(B, H, NQ, N_HASHES)},
        "bucket_sum": code_arrays
        | {"values": attention["value"], "n_buckets": 2**N_BITS, "order": 0}
        | {"key_mask": attention["key_mask"], "scale": 1 / N_HASHES, "out": out},
        "bucket_table_add": table | {"values": normal(NK, DV), "sign": 1.0},
        "bucket_table_query": table | {"scale": 0.5, "out": np.zeros((NK, DV), np.float32)},
        "yoso_forward": attention | functions | options | {"out": out} | code_arrays,
        "yoso_backward": attention
        | code_arrays
        | {"n_bits": N_BITS, "gradient": 0}
        | options
        | gradients,
        "expected_forward": attention | {"n_bits": N_BITS, "out": out} | options,
        "expected_backward": attention | {"n_bits": N_BITS, "gradient": 1} | options | gradients,
    }[name]


FUNCTIONS = (
    *("hash", "bucket_sum", "bucket_table_add", "bucket_table_query"),
    *("yoso_forward", "yoso_backward", "expected_forward", "expected_backward"),
)
ARRAYS = [
    (function, name)
    for function in FUNCTIONS
    for name, value in arguments(function).items()
    if isinstance(value, np.ndarray)
]
OUTPUTS = {"out", "grad_query", "grad_key", "grad_value", "table"}


def is_output(function, name):
    if name == "table":
        return function == "bucket_table_add"
    if name.endswith("codes"):
        return function == "yoso_forward" or (function, name) == ("hash", "codes")
    return name in OUTPUTS


def call(function, /, **changed):
    kwargs = arguments(function) | changed
    getattr(_C, function)(**kwargs)
    return kwargs


def refuses(error, function, name, value, *words):
    """The error names the argument first, then says what it was and what is wanted."""
    with pytest.raises(error, match=rf"^{name}: ") as caught:
        call(function, **{name: value})
    for word in words:
        assert re.search(word, str(caught.value)), str(caught.value)


def outputs_of(function, kwargs):
    return {
        name: np.asarray(value).copy()
        for name, value in kwargs.items()
        if name not in ("family", "order") and is_output(function, name)
    }


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_output_element_is_written(function):
    kwargs = arguments(function)
    for name, value in kwargs.items():
        if is_output(function, name) and name != "table" and value.dtype.kind == "f":
            value.fill(np.nan)
    getattr(_C, function)(**kwargs)
    for name, value in outputs_of(function, kwargs).items():
        assert value.dtype.kind != "f" or np.isfinite(value).all(), name


@pytest.mark.parametrize("function", FUNCTIONS)
def test_torch_and_numpy_mix(function):
    torch = pytest.importorskip("torch")
    wanted = outputs_of(function, call(function))
    for odd in (0, 1):  # every other array is a tensor, then the others
        mixed, count = {}, 0
        for name, value in arguments(function).items():
            if isinstance(value, np.ndarray):
                count += 1
                mixed[name] = torch.from_numpy(value) if count % 2 == odd else value
        got = outputs_of(function, call(function, **mixed))
        for name, value in wanted.items():
            np.testing.assert_array_equal(got[name], value, err_msg=name)


# None: that gradient is not computed (tests/attention/test_wanted_gradients.py).
MAY_BE_UNWANTED = [
    (function, f"grad_{name}")
    for function in ("yoso_backward", "expected_backward")
    for name in ("query", "key", "value")
]


@pytest.mark.parametrize(("function", "name"), ARRAYS)
def test_wrong_argument_is_named(function, name):
    good = arguments(function)[name]
    refuses(TypeError, function, name, good.astype(np.complex64), "wanted", "was complex64")
    refuses(TypeError, function, name, good.astype(np.int64), "wanted", "was int64")
    refuses(TypeError, function, name, good.tolist(), "tensor or an array is wanted", "list")
    with pytest.raises(ValueError, match=r"^\w+: .*(wanted|contiguous)"):
        call(function, **{name: good[..., :-1]})  # or the argument that it then disagrees with
    refuses(ValueError, function, name, good[0], "wanted", re.escape(str(good[0].shape)))
    five = good.reshape((1,) * (5 - good.ndim) + good.shape)
    refuses(ValueError, function, name, five, "at most 4 dimensions", "was 5")
    spread = np.repeat(good, 2, axis=-1)[..., ::2]
    assert spread.shape == good.shape
    refuses(ValueError, function, name, spread, "contiguous")
    if name != "key_mask" and (function, name) not in MAY_BE_UNWANTED:
        refuses(TypeError, function, name, None, "NoneType")
    if good.itemsize > 1:
        refuses(TypeError, function, name, good.astype(good.dtype.newbyteorder()), "format '>")
        shifted = np.frombuffer(b"\0" + good.tobytes(), np.uint8)[1:].view(good.dtype)
        refuses(ValueError, function, name, shifted.reshape(good.shape), "aligned")
    if is_output(function, name):
        frozen = good.copy()
        frozen.flags.writeable = False
        refuses(ValueError, function, name, frozen, "read-only")


@pytest.mark.parametrize(("function", "name"), ARRAYS)
def test_tensor_without_readable_memory_is_named(function, name):
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    good = torch.from_numpy(arguments(function)[name])
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(good)
    refuses(TypeError, function, name, fake, "with memory is wanted", "FakeTensor")
    refuses(TypeError, function, name, good.to("meta"), "with memory is wanted", "meta")
    refuses(TypeError, function, name, good.to_sparse(), "dense tensor")
    if good.dtype == torch.float32:
        refuses(TypeError, function, name, torch._neg_view(good), "resolve_neg")
        refuses(TypeError, function, name, good.to(torch.complex64).conj(), "was complex64")
        for short in (good.bfloat16(), good.half()):
            kind = str(short.dtype).removeprefix("torch.")
            if (function, name) == ("hash", "x"):
                call(function, x=short)
            elif name == "query":  # attention takes them, but of one type all
                with pytest.raises(TypeError, match=f"^key: dtype {kind} is wanted, was float32"):
                    call(function, query=short)
            else:
                refuses(TypeError, function, name, short, "float32", f"was {kind}")


@pytest.mark.parametrize(
    ("function", "name", "value", "words"),
    [
        ("hash", "family", 2, "0 to 1 is wanted, was 2"),
        ("hash", "n_bits", 0, "1 to 64 is wanted, was 0"),
        ("hash", "n_bits", 65, "was 65"),
        ("hash", "n_hashes", 0, "was 0"),
        ("hash", "n_hashes", 2**62, "was 4611686018427387904"),
        ("bucket_sum", "order", 3, "0 to 2 is wanted, was 3"),
        ("bucket_sum", "n_buckets", 0, "1 to 65536 is wanted, was 0"),
        ("yoso_forward", "normalize", -1, "0 to 2 is wanted, was -1"),
        ("yoso_backward", "gradient", 4, "0 to 3 is wanted, was 4"),
        ("yoso_backward", "n_bits", 17, "was 17"),
        ("expected_forward", "n_bits", 0, "was 0"),
        ("expected_backward", "normalize", 3, "was 3"),
    ],
)
def test_wrong_number_is_named(function, name, value, words):
    refuses(ValueError, function, name, value, words)


def test_shapes_that_disagree():
    normal = np.random.default_rng(0).standard_normal
    key = normal((B, H + 1, NK, D)).astype(np.float32)
    words = r"divides query's 3 is wanted, was shape \(2, 4, 7, 6\)"
    refuses(ValueError, "yoso_forward", "key", key, words)
    mask = np.ones((B, NQ), bool)
    refuses(ValueError, "expected_forward", "key_mask", mask, r"\(2, 7\) is wanted, was \(2, 5\)")
    planes = normal((2, N_BITS * N_HASHES, D)).astype(np.float32)
    refuses(ValueError, "hash", "parameters", planes, r"\(3, 12, 6\) is wanted, was \(2, 12, 6\)")
    with pytest.raises(ValueError, match="^parameters: columns as many as a power of two"):
        call("hash", family=HADAMARD)
    signs = np.ones((1, 3 + N_BITS, 64), np.float32)
    call("hash", family=HADAMARD, parameters=signs)
    with pytest.raises(ValueError, match=r"^parameters: shape \(\*, 7, \*\) .*\(1, 13, 64\)"):
        call("hash", family=HADAMARD, parameters=np.repeat(signs, 2, axis=1)[:, :-1].copy())


def test_codes_have_the_dtype_of_their_bits():
    with pytest.raises(TypeError, match="^codes: dtype uint16 is wanted, was uint8"):
        call("hash", n_bits=9, parameters=np.ones((1, 9 * N_HASHES, D), np.float32))
    wide = arguments("bucket_sum")["key_codes"].astype(np.uint16)
    refuses(TypeError, "bucket_sum", "key_codes", wide, "dtype uint8 is wanted, was uint16")


def test_strides_are_followed():
    """Transposed (batch, rows, heads, columns), broadcast and reversed views, in and out."""
    plain = arguments("bucket_sum")
    wanted = call("bucket_sum")["out"]
    values = np.ascontiguousarray(plain["values"].transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    out = np.empty((B, NQ, H, DV), np.float32).transpose(0, 2, 1, 3)
    call("bucket_sum", values=values, out=out)
    np.testing.assert_array_equal(out, wanted)
    upside_down = np.ascontiguousarray(plain["values"][:, :, ::-1])[:, :, ::-1]
    np.testing.assert_array_equal(call("bucket_sum", values=upside_down)["out"], wanted)
    shared = np.broadcast_to(plain["values"][:1, :1], (B, H, NK, DV))
    np.testing.assert_array_equal(
        call("bucket_sum", values=shared)["out"], call("bucket_sum", values=shared.copy())["out"]
    )


def test_output_with_shared_elements_is_refused():
    row = np.empty((B, H, 1, DV), np.float32)
    shared = np.lib.stride_tricks.as_strided(row, (B, H, NQ, DV), (*row.strides[:2], 0, 4))
    refuses(ValueError, "bucket_sum", "out", shared, "share memory")
    line = np.empty(1000, np.float32)
    sliding = np.lib.stride_tricks.as_strided(line, (B, H, NQ, DV), (400, 80, 8, 4))
    refuses(ValueError, "bucket_sum", "out", sliding, "share memory")


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["bool", "uint8"])
def test_masks(kind, dtype):
    mask = np.random.default_rng(0).random((B, NK)) < 0.5
    kept = arguments("bucket_sum")["values"] * mask[:, None, :, None]
    wanted = call("bucket_sum", values=kept, key_mask=None)["out"]
    given = mask.astype(dtype)
    if kind == "torch":
        given = pytest.importorskip("torch").from_numpy(given)
    np.testing.assert_array_equal(call("bucket_sum", key_mask=given)["out"], wanted)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize(
    "empty", [{"b": 0}, {"h": 0}, {"n_q": 0}, {"n_k": 0}, {"d_v": 0}, {"n_q": 0, "n_k": 0}]
)
@pytest.mark.parametrize("causal", [False, True])
def test_empty_tensors(kind, empty, causal):
    sizes = {"b": B, "h": H, "n_q": NQ, "n_k": NK, "d_v": DV} | empty
    b, h, n_q, n_k, d_v = sizes.values()

    def array(*shape, dtype=np.float32, value=1):
        filled = np.full(shape, value, dtype)
        return pytest.importorskip("torch").from_numpy(filled) if kind == "torch" else filled

    inputs = array(b, h, n_q, D), array(b, h, n_k, D), array(b, h, n_k, d_v)
    mask = array(b, n_k, dtype=bool)
    planes = array(1, N_BITS * N_HASHES, D)
    codes = [array(b, h, n, N_HASHES, dtype=np.uint8, value=255) for n in (n_q, n_k)]
    out = array(b, h, n_q, d_v, value=np.nan)
    gradients = [array(*x.shape, value=np.nan) for x in inputs]
    grad_out = array(b, h, n_q, d_v)

    def finite(*arrays):
        return all(np.isfinite(np.asarray(a)).all() for a in arrays)

    functions = planes, HYPERPLANE, N_BITS, N_HASHES
    _C.yoso_forward(*inputs, mask, *functions, causal, 2, out, *codes, 1)
    assert finite(out)
    assert all((np.asarray(c) == 2**N_BITS - 1).all() for c in codes)
    _C.yoso_backward(*inputs, mask, *codes, N_BITS, causal, 1, 0, grad_out, *gradients, 1)
    assert finite(*gradients)
    for normalize in (0, 1, 2):
        _C.expected_forward(*inputs, mask, N_BITS, causal, normalize, out, 1)
        _C.expected_backward(
            *(*inputs, mask, N_BITS, causal, normalize, 0, grad_out, *gradients, 1)
        )
        assert finite(out, *gradients)
    _C.bucket_sum(*codes, inputs[2], 16, int(causal), mask, 1.0, out, 1)
    assert finite(out)
    if n_k == 0:
        assert not np.asarray(out).any()


class Exporter:
    """An array of another library: __dlpack__ alone, on a device of its choice."""

    def __init__(self, array, device=1, versioned=True):
        self.array, self.device, self.versioned, self.streams = array, device, versioned, []

    def __dlpack_device__(self):
        return self.device, 0

    def __dlpack__(self, *, stream=None, **kwargs):
        if kwargs and not self.versioned:
            raise TypeError("unexpected keyword argument 'max_version'")
        self.streams.append(stream)
        return self.array.__dlpack__(**kwargs)


@pytest.mark.parametrize("versioned", [True, False])
def test_dlpack_method(versioned):
    wanted = call("bucket_sum")["out"]
    values = Exporter(arguments("bucket_sum")["values"], versioned=versioned)
    np.testing.assert_array_equal(call("bucket_sum", values=values)["out"], wanted)
    assert values.streams == [None]
    on_gpu = Exporter(values.array, device=2, versioned=versioned)
    call("bucket_sum", values=on_gpu)
    assert on_gpu.streams == [-1]  # no synchronisation with the default stream


def test_dlpack_method_that_fails():
    class Broken(Exporter):
        def __dlpack__(self, **kwargs):
            raise BufferError("nothing to export")

    refuses(TypeError, "bucket_sum", "values", Broken(None), "Broken", "nothing to export")

    class NoCapsule(Exporter):
        def __dlpack__(self, **kwargs):
            return 3

    refuses(TypeError, "bucket_sum", "values", NoCapsule(None), "no DLPack capsule")


@pytest.mark.cuda
def test_cuda_tensor_is_refused():
    torch = pytest.importorskip("torch")
    if _C.with_cuda or not torch.cuda.is_available():
        pytest.skip("needs a GPU and a build without CUDA kernels")
    refuses(ValueError, "hash", "x", torch.zeros(B, H, NQ, D, device="cuda"), "no CUDA kernels")


@pytest.mark.parametrize("kind", ["numpy", "torch", "exporter"])
def test_arguments_are_let_go(kind):
    """Calls, refused ones too, leave no reference to an argument and no locked buffer behind."""
    wrap = {
        "numpy": lambda a: a,
        "torch": lambda a: pytest.importorskip("torch").from_numpy(a),
        "exporter": Exporter,
    }[kind]
    kwargs = arguments("bucket_sum") | {"threads": 1}
    values, out = wrap(kwargs["values"]), kwargs["out"]
    kwargs["values"] = values
    gc.collect()  # what earlier tests have left holds None, too
    counts = sys.getrefcount(values), sys.getrefcount(out)
    array_count = sys.getrefcount(values.array) if kind == "exporter" else 0

    def call_right_and_wrong():
        _C.bucket_sum(**kwargs)
        for wrong in ({"order": 5}, {"out": out[0]}, {"key_codes": out}):
            with pytest.raises((TypeError, ValueError)):
                _C.bucket_sum(**(kwargs | wrong))

    for _ in range(1000):
        call_right_and_wrong()
    if kind == "exporter":
        values.streams.clear()
    gc.collect()
    assert sys.getrefcount(values) == counts[0]
    assert sys.getrefcount(out) == counts[1]
    if kind == "exporter":
        array_count_after = sys.getrefcount(values.array)  # an assert would hold one more
        assert array_count_after == array_count
    if kind == "numpy":
        out.resize((0,), refcheck=False)  # an exported buffer would forbid it
        gone = weakref.ref(values)
        del values, kwargs["values"]
        gc.collect()
        assert gone() is None


def test_lock_is_released():
    """This thread goes on while another one is in the core."""
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 1, 4, 3000, 64)).astype(np.float32)
    out = np.empty_like(value)
    times = []

    def work():
        times.append(time.perf_counter())
        _C.expected_forward(query, key, value, None, 8, False, 2, out, 1)
        times.append(time.perf_counter())

    thread = threading.Thread(target=work)
    thread.start()
    longest_stop, last = 0.0, time.perf_counter()
    while thread.is_alive():
        now = time.perf_counter()
        longest_stop, last = max(longest_stop, now - last), now
    thread.join()
    assert longest_stop < (times[1] - times[0]) / 2
