"""What is compared on a GPU: lshkit's attention, and the fastest exact ones, each by its name."""

from functools import partial

BATCH, HEADS, D = 8, 12, 64
LENGTHS = 1024, 4096, 16384, 65536
HARD = {"estimator": "sampled", "n_bits": 8, "n_hashes": 32, "expectation": "never"}
# By name: the estimator, and whether its inputs are clustered.
OURS = {
    "hard": (HARD, False),
    "hard, gradient of 16": (HARD | {"gradient_hashes": 16}, False),
    "hard, clustered": (HARD, True),
    "soft": ({"estimator": "soft", "n_bits": 12, "n_hashes": 32, "n_probes": 4}, False),
}
CENTRES, COSINE = 8, 0.9


def of_kind(kind, backward):
    """The names of a part's sides in a pass: a subset of the gradient has a forward pass of all."""
    names = [name for name in OURS if name.split(",")[0] == kind]
    return names if backward else [name for name in names if "gradient_hashes" not in OURS[name][0]]


def inputs(batch, n, sets, device, clustered=False):
    """`sets` of query, key, value and output gradient `(batch, HEADS, n, D)`, bfloat16.

    Queries and keys are independent normals or, clustered, rows about CENTRES shared ones a head,
    with a cosine of COSINE within: their buckets hold thousands of rows where the others' are even.
    """
    import torch

    generator = torch.Generator(device).manual_seed(n)
    options = {"generator": generator, "device": device}
    shape = batch, HEADS, n, D

    def rows(clustered):
        x = torch.randn(shape, **options, dtype=torch.bfloat16)
        if not clustered:
            return x
        which = torch.randint(CENTRES, (*shape[:3], 1), **options).expand(shape)
        return (COSINE**0.5 * centres.gather(2, which) + (1 - COSINE) ** 0.5 * x).to(x.dtype)

    found = []
    for _ in range(sets):
        centres = torch.randn((batch, HEADS, CENTRES, D), **options, dtype=torch.bfloat16)
        found.append([rows(clustered and i < 2) for i in range(4)])
    return found


def call(function, arrays, backward):
    """The output, or the gradients of query, key and value."""
    import torch

    query, key, value, grad = arrays
    if not backward:
        with torch.no_grad():
            return function(query, key, value)
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    return torch.autograd.grad(function(*leaves), leaves, grad)


def ours(name, causal, seed=None):
    from lshkit.attention import Estimator, yoso_attention

    estimator = Estimator.from_dict(OURS[name][0])
    return partial(yoso_attention, is_causal=causal, estimator=estimator, seed=seed)


def _by_backend(name, causal):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def attention(query, key, value):
        with sdpa_kernel(getattr(SDPBackend, name)):
            return scaled_dot_product_attention(query, key, value, is_causal=causal)

    return attention


def _flash_3(causal):
    """FlashAttention-3's own package, which torch does not bring: None where it is not there."""
    try:
        from flash_attn_interface import flash_attn_func
    except ImportError:
        return None

    def attention(query, key, value):
        out = flash_attn_func(*(x.transpose(1, 2) for x in (query, key, value)), causal=causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return attention


def opponents(causal):
    """By name: torch's FlashAttention-2, cuDNN's attention, and FlashAttention-3 where it is."""
    found = {
        "flash": _by_backend("FLASH_ATTENTION", causal),
        "cudnn": _by_backend("CUDNN_ATTENTION", causal),
        "flash3": _flash_3(causal),
    }
    return {name: function for name, function in found.items() if function}
