"""torch.ops.lshkit.*: the core's operators for PyTorch, with fake kernels, autograd and autocast.

Every operator is functional, allocates its results and takes the hash parameters as a tensor, so a
compiled graph needs no new trace for new hash functions. Tensors are (batch, heads, rows, columns)
and may be strided, key masks (batch, keys) booleans with True for a key that takes part, codes
uint8 (n_bits <= 8) or uint16. Options are the core's integers: FAMILY, NORMALIZE, GRADIENT
and, for bucket_sum, order 0 (all keys), 1 (causal) or 2 (the transpose of causal).
The public doors with the checks of shapes and words are lshkit.attention and lshkit.buckets.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lshkit import _C, hashing

FAMILY = hashing.FAMILY
NORMALIZE = {None: 0, "sum": 1, "l2": 2}
GRADIENT = {"lower_bound": 0, "expected": 1}
_FAMILY_NAME = {number: name for name, number in FAMILY.items()}
_TRANSPOSED_ORDER = (0, 2, 1)  # of lshkit::Order: all keys, causal, reversed

# Library.define and .impl cost less per call than the custom_op decorator. The object is kept
# alive: the registrations end with it.
_lib = torch.library.Library("lshkit", "FRAGMENT")

_HASHING = "int family, int n_bits, int n_hashes"
_OPTIONS = "bool is_causal, int normalize, int gradient"
_QKV = "Tensor query, Tensor key, Tensor value, Tensor? key_mask"
for _schema in (
    "hash_parameters(Tensor seed, int n_sets, SymInt n_features, int n_bits, int n_hashes, "
    "int family) -> Tensor",
    f"hash(Tensor x, Tensor parameters, {_HASHING}) -> Tensor",
    "bucket_sum(Tensor query_codes, Tensor key_codes, Tensor values, SymInt n_buckets, int order, "
    "Tensor? key_mask) -> Tensor",
    f"yoso_attention({_QKV}, Tensor parameters, {_HASHING}, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor)",
    f"yoso_attention_backward(Tensor grad_out, {_QKV}, Tensor query_codes, Tensor key_codes, "
    f"int n_bits, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    f"expected_attention({_QKV}, int n_bits, {_OPTIONS}) -> Tensor",
    f"expected_attention_backward(Tensor grad_out, {_QKV}, int n_bits, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor)",
):
    _lib.define(_schema, tags=torch.Tag.pt2_compliant_tag)


# --- What goes down to the core -------------------------------------------------------------


def code_dtype(n_bits: int) -> torch.dtype:
    return torch.uint8 if n_bits <= 8 else torch.uint16


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in the dtype, its last dimension contiguous; a strided view passes without a copy."""
    if x.dtype is not dtype:
        x = x.to(dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


def _mask(key_mask: Tensor | None) -> Tensor | None:
    return key_mask if key_mask is None or key_mask.stride(-1) == 1 else key_mask.contiguous()


def _sampled_dtype(x: Tensor) -> torch.dtype:
    return torch.float32


def _expected_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _new_codes(x: Tensor, n_bits: int, n_hashes: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], n_hashes), dtype=code_dtype(n_bits))


def _new_output(query: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]), dtype=dtype)


def _new_gradient(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def _hash_parameters(seed, n_sets, n_features, n_bits, n_hashes, family):
    sizes = n_features, n_bits, n_hashes, n_sets
    seed = seed.item()
    if seed < 0:
        raise ValueError(f"seed must be an integer >= 0, got {seed}")
    parameters = hashing.make_parameters(_FAMILY_NAME[family], *sizes, seed)
    return torch.from_numpy(parameters)


def _hash(x, parameters, family, n_bits, n_hashes):
    codes = _new_codes(x, n_bits, n_hashes)
    if x.numel() == 0:
        return codes.zero_()
    x, parameters = _rows(x, torch.float32), parameters.contiguous()
    _C.hash(x, parameters, family, n_bits, n_hashes, codes, torch.get_num_threads())
    return codes


def _check_codes(name: str, codes: Tensor, n_buckets: int) -> None:
    """The core trusts codes as table rows, so a code out of range would leave the table."""
    if n_buckets < (256 if codes.dtype is torch.uint8 else 65536):
        largest = int(codes.numpy().max())
        if largest >= n_buckets:
            raise ValueError(f"{name} has code {largest}, wanted codes below n_buckets={n_buckets}")


def _bucket_sum(query_codes, key_codes, values, n_buckets, order, key_mask):
    dtype = _expected_dtype(values)
    out = _new_output(query_codes, values, dtype)
    if out.numel() == 0 or key_codes.numel() == 0:
        return out.zero_().to(values.dtype)
    _check_codes("query_codes", query_codes, n_buckets)
    _check_codes("key_codes", key_codes, n_buckets)
    codes = query_codes.contiguous(), key_codes.contiguous()
    options = n_buckets, order, _mask(key_mask), 1.0 / query_codes.shape[-1]
    _C.bucket_sum(*codes, _rows(values, dtype), *options, out, torch.get_num_threads())
    return out.to(values.dtype)


def _yoso_attention(query, key, value, key_mask, parameters, *options):
    *forward_options, _ = options
    _, n_bits, n_hashes, *_ = options
    out = _new_output(query, value, torch.float32)
    codes = _new_codes(query, n_bits, n_hashes), _new_codes(key, n_bits, n_hashes)
    if out.numel() == 0 or key.numel() == 0:
        return out.zero_().to(query.dtype), *(c.zero_() for c in codes)
    inputs = (_rows(x, torch.float32) for x in (query, key, value))
    parameters = parameters.contiguous()
    threads = torch.get_num_threads()
    _C.yoso_forward(*inputs, _mask(key_mask), parameters, *forward_options, out, *codes, threads)
    return out.to(query.dtype), *codes


def _expected_attention(query, key, value, key_mask, n_bits, is_causal, normalize, gradient):
    dtype = _expected_dtype(query)
    out = _new_output(query, value, dtype)
    if out.numel() == 0 or key.numel() == 0:
        return out.zero_().to(query.dtype)
    inputs = (_rows(x, dtype) for x in (query, key, value))
    options = n_bits, is_causal, normalize
    _C.expected_forward(*inputs, _mask(key_mask), *options, out, torch.get_num_threads())
    return out.to(query.dtype)


def _backward_kernel(core: Callable, compute_dtype: Callable) -> Callable:
    """The backward operators differ in the codes alone, which stand between mask and n_bits."""

    def kernel(grad_out, query, key, value, key_mask, *codes_and_options):
        dtype = compute_dtype(query)
        inputs = (query, key, value)
        gradients = [_new_gradient(x, dtype) for x in inputs]
        if grad_out.numel() == 0 or key.numel() == 0:
            return tuple(g.zero_().to(x.dtype) for g, x in zip(gradients, inputs, strict=True))
        *codes, n_bits, is_causal, normalize, gradient = codes_and_options
        for name, c in zip(("query_codes", "key_codes"), codes, strict=False):
            _check_codes(name, c, 2**n_bits)
        core(
            *(_rows(x, dtype) for x in inputs),
            _mask(key_mask),
            *(c.contiguous() for c in codes),
            *(n_bits, is_causal, normalize, gradient),
            _rows(grad_out, dtype),
            *gradients,
            torch.get_num_threads(),
        )
        return tuple(g.to(x.dtype) for g, x in zip(gradients, inputs, strict=True))

    return kernel


for _name, _kernel in (
    ("hash_parameters", _hash_parameters),
    ("hash", _hash),
    ("bucket_sum", _bucket_sum),
    ("yoso_attention", _yoso_attention),
    ("yoso_attention_backward", _backward_kernel(_C.yoso_backward, _sampled_dtype)),
    ("expected_attention", _expected_attention),
    ("expected_attention_backward", _backward_kernel(_C.expected_backward, _expected_dtype)),
):
    _lib.impl(_name, _kernel, "CPU")


# --- Shapes and dtypes without data -----------------------------------------------------------


@torch.library.register_fake("lshkit::hash_parameters", lib=_lib)
def _(seed, n_sets, n_features, n_bits, n_hashes, family):
    if family == FAMILY["hadamard"]:
        n_features = int(n_features)  # padded to a power of two, which no symbol can be
    shape = hashing.parameter_shape(_FAMILY_NAME[family], n_features, n_bits, n_hashes)
    return seed.new_empty((n_sets, *shape), dtype=torch.float32)


@torch.library.register_fake("lshkit::hash", lib=_lib)
def _(x, parameters, family, n_bits, n_hashes):
    return _new_codes(x, n_bits, n_hashes)


@torch.library.register_fake("lshkit::bucket_sum", lib=_lib)
def _(query_codes, key_codes, values, n_buckets, order, key_mask):
    return _new_output(query_codes, values, values.dtype)


@torch.library.register_fake("lshkit::yoso_attention", lib=_lib)
def _(query, key, value, key_mask, parameters, family, n_bits, n_hashes, *options):
    return (
        _new_output(query, value, query.dtype),
        _new_codes(query, n_bits, n_hashes),
        _new_codes(key, n_bits, n_hashes),
    )


@torch.library.register_fake("lshkit::expected_attention", lib=_lib)
def _(query, key, value, *options):
    return _new_output(query, value, query.dtype)


@torch.library.register_fake("lshkit::yoso_attention_backward", lib=_lib)
@torch.library.register_fake("lshkit::expected_attention_backward", lib=_lib)
def _(grad_out, query, key, value, *options):
    return tuple(_new_gradient(x, x.dtype) for x in (query, key, value))


# --- Gradients ----------------------------------------------------------------------------------


def _setup_bucket_sum(ctx, inputs, output):
    query_codes, key_codes, _, n_buckets, order, key_mask = inputs
    ctx.save_for_backward(query_codes, key_codes, key_mask)
    ctx.n_buckets, ctx.order = n_buckets, order


def _bucket_sum_backward(ctx, grad_out):
    # Linear in the values with the collisions as its matrix, so the gradient is the same sum with
    # queries and keys exchanged; it can be differentiated again.
    query_codes, key_codes, key_mask = ctx.saved_tensors
    order = _TRANSPOSED_ORDER[ctx.order]
    grad = bucket_sum(key_codes, query_codes, grad_out, ctx.n_buckets, order, None)
    if key_mask is not None:
        grad = grad.masked_fill(~key_mask[:, None, :, None], 0)
    return None, None, grad, None, None, None


def _setup_yoso_attention(ctx, inputs, output):
    query, key, value, key_mask, _, _, n_bits, _, *options = inputs
    _, query_codes, key_codes = output
    ctx.mark_non_differentiable(query_codes, key_codes)
    ctx.set_materialize_grads(False)  # zeros for the codes would cost as much as the codes
    ctx.save_for_backward(query, key, value, key_mask, query_codes, key_codes)
    ctx.options = (n_bits, *options)


def _yoso_attention_backward(ctx, grad_out, *_):
    if grad_out is None:
        return (None,) * 11
    gradients = yoso_attention_backward(grad_out, *ctx.saved_tensors, *ctx.options)
    return *gradients, *(None,) * 8


def _setup_expected_attention(ctx, inputs, output):
    *tensors, n_bits, is_causal, normalize, gradient = inputs
    ctx.save_for_backward(*tensors)
    ctx.options = (n_bits, is_causal, normalize, gradient)


def _expected_attention_backward(ctx, grad_out):
    gradients = expected_attention_backward(grad_out, *ctx.saved_tensors, *ctx.options)
    return *gradients, *(None,) * 5


def _nothing_to_save(ctx, inputs, output):
    pass


def _no_second_derivative(ctx, *grads):
    raise NotImplementedError(
        "lshkit attention can be differentiated once: the gradient of its gradient "
        "(create_graph=True, torch.func.hessian) is not available"
    )


_FORMULAS = {  # what is kept for the backward pass, and the backward pass
    "bucket_sum": (_setup_bucket_sum, _bucket_sum_backward),
    "yoso_attention": (_setup_yoso_attention, _yoso_attention_backward),
    "yoso_attention_backward": (_nothing_to_save, _no_second_derivative),
    "expected_attention": (_setup_expected_attention, _expected_attention_backward),
    "expected_attention_backward": (_nothing_to_save, _no_second_derivative),
}
for _name, (_setup, _backward) in _FORMULAS.items():
    torch.library.register_autograd(f"lshkit::{_name}", _backward, setup_context=_setup, lib=_lib)
for _name in ("hash_parameters", "hash"):  # a step function of its input: nothing to differentiate
    _lib.impl(_name, torch.library.fallthrough_kernel, "Autograd")


# --- Autocast and vmap --------------------------------------------------------------------------


def _register_autocast(name: str) -> None:
    """Queries, keys and values in the autocast dtype, as scaled_dot_product_attention has them.

    torch.library.register_autocast would cast to one dtype fixed here, and the parameters too.
    """
    op = getattr(torch.ops.lshkit, name).default

    def kernel(query, key, value, *rest):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (
            x if x.dtype is torch.float64 else x.to(dtype) for x in (query, key, value)
        )
        with torch.autocast("cpu", enabled=False):
            return op(query, key, value, *rest)

    _lib.impl(name, kernel, "AutocastCPU")


def _register_vmap(name: str, with_batch: tuple[int, ...]) -> None:
    """Fold the mapped dimension into the batch of the arguments in with_batch.

    Seeds and parameters have no batch: where these are mapped there is one call for each.
    """
    op = getattr(torch.ops.lshkit, name).default

    def fold(x, dim, size):
        if x is None:
            return None
        x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        return x.flatten(0, 1)

    def rule(info, in_dims, *args):
        size = info.batch_size
        mapped = {i for i, dim in enumerate(in_dims) if dim is not None}
        if mapped <= set(with_batch):
            args = [fold(x, in_dims[i], size) if i in with_batch else x for i, x in enumerate(args)]
            out = op(*args)
            if isinstance(out, Tensor):
                return out.unflatten(0, (size, -1)), 0
            return tuple(x.unflatten(0, (size, -1)) for x in out), (0,) * len(out)
        outs = [
            op(*(x.select(in_dims[i], j) if i in mapped else x for i, x in enumerate(args)))
            for j in range(size)
        ]
        if isinstance(outs[0], Tensor):
            return torch.stack(outs), 0
        return tuple(torch.stack(out) for out in zip(*outs, strict=True)), (0,) * len(outs[0])

    torch.library.register_vmap(f"lshkit::{name}", rule, lib=_lib)


for _name in ("yoso_attention", "expected_attention"):
    _register_autocast(_name)
for _name, _with_batch in (
    ("hash_parameters", ()),
    ("hash", (0,)),
    ("bucket_sum", (0, 1, 2, 5)),
    ("yoso_attention", (0, 1, 2, 3)),
    ("yoso_attention_backward", (0, 1, 2, 3, 4, 5, 6)),
    ("expected_attention", (0, 1, 2, 3)),
    ("expected_attention_backward", (0, 1, 2, 3, 4)),
):
    _register_vmap(_name, _with_batch)


# --- What Python calls --------------------------------------------------------------------------


def _transformed(name: str) -> Callable:
    """The operator, as an autograd.Function where torch.func or forward mode differentiates.

    The function that register_autograd makes of the same formulas refuses torch.func.grad, and
    forward mode would pass it by and give tangents of zero; this one says that it has no jvp.
    """
    op = getattr(torch.ops.lshkit, name).default
    setup, backward = _FORMULAS[name]
    methods = {"forward": op, "setup_context": setup, "backward": backward}
    function = type(
        f"{name}_function",
        (torch.autograd.Function,),
        {key: staticmethod(method) for key, method in methods.items()}
        | {"generate_vmap_rule": True},
    )

    def call(*args):
        if not torch.compiler.is_compiling() and (
            torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
        ):
            return function.apply(*args)
        return op(*args)

    return call


hash_parameters = torch.ops.lshkit.hash_parameters.default
hash = torch.ops.lshkit.hash.default
bucket_sum = _transformed("bucket_sum")
yoso_attention = _transformed("yoso_attention")
yoso_attention_backward = _transformed("yoso_attention_backward")
expected_attention = _transformed("expected_attention")
expected_attention_backward = _transformed("expected_attention_backward")
