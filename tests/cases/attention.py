"""Random attention problems and what lshkit.reference says of them, for the attention tests."""

import math
from types import SimpleNamespace

import torch
from torch.nn import functional as F

from lshkit import reference, torch_ops
from lshkit.attention import Expected, Sampled, yoso_attention

# Samples at all lengths, and the expectation whose gradient is that of samples.
SAMPLED = Sampled(n_bits=8, expectation="never")
EXPECTED = Expected(gradient="lower_bound")

# Odd lengths, n_q != n_k, d_v != d, and every feature count from below to above the padding to 64.
SHAPES = [  # n_q, n_k, d, d_v
    (1, 1, 1, 1),
    (3, 3, 7, 5),
    (17, 17, 32, 32),
    (65, 17, 60, 64),
    (17, 65, 64, 7),
    (130, 130, 80, 80),
    (65, 130, 128, 33),
    (257, 257, 200, 16),
]
NORMALIZE = ["l2", "sum", None]
FAMILIES = ["hadamard", "hyperplane"]


def attention_inputs(
    n_q=17, n_k=None, d=32, d_v=None, *, batch=2, heads=3, dtype=torch.float32, seed=0
):
    """query, key, value (batch, heads, rows, columns) and a gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    n_k, d_v = n_k or n_q, d_v or d
    sizes = [(n_q, d), (n_k, d), (n_k, d_v), (n_q, d_v)]
    query, key, value, grad_out = (
        torch.randn(batch, heads, *size, generator=generator, dtype=dtype) for size in sizes
    )
    shared = min(n_q, n_k)  # so that some pairs are close and do collide at 16 bits
    key[..., :shared, :] += 2 * query[..., :shared, :]
    return SimpleNamespace(query=query, key=key, value=value, grad_out=grad_out)


def tokens(n=11, size=24, batch=2, seed=0):
    """Inputs of a module."""
    return torch.randn(batch, n, size, generator=torch.Generator().manual_seed(seed))


def module_by_hand(module, query, key, value, hidden=(None, None), is_causal=False):
    """YosoAttention: projections, convolutions, heads, attention and output, each written out.

    hidden: positions of queries, which a short convolution leaves out, and of keys and values.
    """
    if module.in_proj_weight is None:
        weights = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    else:
        weights = module.in_proj_weight.chunk(3)
    biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    heads = []
    for i, x in enumerate((query, key, value)):
        y = F.linear(x, weights[i], biases[i])
        if module.short_conv is not None:
            if hidden[i > 0] is not None:
                y = y.masked_fill(hidden[i > 0][..., None], 0)
            kernels = module.short_conv_weight.flatten(0, 1).chunk(3)[i][:, None]
            y = F.conv1d(F.pad(y.mT, (kernels.shape[-1] - 1, 0)), kernels, groups=len(kernels)).mT
        heads.append(y.unflatten(-1, (module.num_heads, module.head_dim)).transpose(1, 2))
    mask = None if hidden[1] is None else ~hidden[1]
    options = {"estimator": module.eval_estimator, "seed": module.hash_seed}
    out = yoso_attention(*heads, mask, is_causal=is_causal, **options)
    if module.conv is not None:
        kept = heads[2] if mask is None else heads[2] * mask[:, None, :, None]
        window, n = module.conv_window, kept.shape[2]
        before = window - 1 if is_causal else window // 2
        kept = F.pad(kept, (0, 0, before, window - 1 - before))
        kernel = module.conv.weight[:, 0, :, 0]  # (heads, window)
        out = out + sum(kernel[:, i, None, None] * kept[:, :, i : i + n] for i in range(window))
    return module.out_proj(out.transpose(1, 2).flatten(2))


def leaves_of(*tensors):
    """Copies that require a gradient."""
    return [x.detach().clone().requires_grad_() for x in tensors]


def forward_and_gradients(case, estimator, mask=None, is_causal=False, *, grad_out=None, **options):
    """The output, and the gradients of query, key and value through autograd."""
    inputs = [x.detach().requires_grad_() for x in (case.query, case.key, case.value)]
    options = {"is_causal": is_causal, "causal_offset": 0, "estimator": estimator} | options
    out = yoso_attention(*inputs, mask, **options)
    grad_out = case.grad_out if grad_out is None else grad_out
    return out.detach(), torch.autograd.grad(out, inputs, grad_out)


def gradients(*arguments, **options):
    return forward_and_gradients(*arguments, **options)[1]


def padding_mask(batch, n_k, seed=0):
    """About two thirds of the keys take part, and the last of the batch has none."""
    mask = torch.rand(batch, n_k, generator=torch.Generator().manual_seed(seed)) < 0.67
    mask[-1] = False
    return mask


def bits_of_margins(margins):
    """Numbers of the selected bits, which margins have in their 4 lowest bits."""
    return (margins & 15).long()


def codes_of(x, seed, estimator=SAMPLED):
    """The codes that yoso_attention(seed=seed) gives the rows of x, from the hash operator."""
    sizes = estimator.n_bits, estimator.n_hashes
    family = torch_ops.FAMILY[estimator.hasher]
    parameters = torch_ops.hash_parameters(
        torch.tensor(seed), x.shape[1], x.shape[-1], *sizes, family
    )
    return torch_ops.hash(x, parameters, family, *sizes)


def arrays(case):
    return (x.detach().double().numpy() for x in (case.query, case.key, case.value))


def reference_options(mask, is_causal, normalize):
    key_mask = None if mask is None else mask[:, None].numpy()  # for every head
    return {"causal": is_causal, "key_mask": key_mask, "normalize": normalize}


def sampled_reference(case, query_codes, key_codes, mask=None, is_causal=False, normalize="l2"):
    options = reference_options(mask, is_causal, normalize)
    codes = query_codes.numpy(), key_codes.numpy()
    return torch.from_numpy(reference.yoso_forward(*arrays(case), *codes, **options))


def expected_reference(case, n_bits=8, mask=None, is_causal=False, normalize="l2"):
    options = reference_options(mask, is_causal, normalize)
    return torch.from_numpy(reference.expected_forward(*arrays(case), n_bits, **options))


def float32_gradients(
    inputs, grad_out, mask=None, is_causal=False, *, seed, n_bits=8, n_hashes=32, normalize="l2"
):  # fmt: skip
    """Those of the output that rows of 16 bits have, and of their codes, all else in float32."""
    sizes = inputs[1].shape[1], inputs[0].shape[-1], n_bits, n_hashes
    parameters = torch_ops.hash_parameters(torch.tensor(seed), *sizes, 1)
    options = is_causal, torch_ops.NORMALIZE[normalize], 0
    out, *codes, divisors = torch_ops.yoso_attention(
        *(*(x.detach() for x in inputs), mask, None, None, parameters, 1, n_bits, n_hashes),
        *options,
    )
    floats = [x.detach().float() for x in (grad_out, *inputs)]
    kept = (out.float(), divisors) if normalize else (None, None)
    return torch_ops.yoso_attention_backward(
        *floats, mask, None, None, *codes, n_bits, *options, 0, *kept
    )


def float32_expected_gradients(inputs, grad_out, mask, is_causal, n_bits):
    """Likewise, of the expectation and the lower bound."""
    options = is_causal, torch_ops.NORMALIZE["l2"], torch_ops.GRADIENT["lower_bound"]
    rows = [x.detach() for x in inputs]
    kept = torch_ops.expected_attention(*rows, mask, None, None, n_bits, *options)
    floats = [x.float() for x in (grad_out, *rows)]
    return torch_ops.expected_attention_backward(
        *floats, mask, None, None, n_bits, *options, kept[0].float(), kept[1]
    )


def softmax_of_cosines(query, key, value, scale, hidden=None):
    """By pairs; groups of query heads share a head of keys."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = scale * F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).mT
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ value


def normalized(weights, value, normalize):
    """weights @ value over their norm or the sum of the weights; zeros where that is zero."""
    out = weights @ value
    if normalize is None:
        return out
    size = (out.norm if normalize == "l2" else weights.sum)(dim=-1, keepdim=True)
    return torch.where(size > 0, out / torch.where(size > 0, size, 1), 0)


def dense_attention(query, key, value, mask, is_causal, n_bits, normalize, scale=None):
    """YOSO-E in plain torch, for autograd: equation 2 with its expectation.

    scale: None, for the angles of the rows, or what their inner products are divided by instead.
    """
    if scale is None:
        query, key, scale = F.normalize(query, dim=-1), F.normalize(key, dim=-1), 1
    weights = (1 - torch.acos(query @ key.mT / scale) / math.pi) ** n_bits
    if is_causal:
        weights = weights.tril()
    if mask is not None:
        weights = weights * mask[:, None, None]
    return normalized(weights, value, normalize)
