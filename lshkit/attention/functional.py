"""YOSO attention as a function, with the checks of all that comes in from outside."""

import torch
from torch import Tensor

from lshkit import checks, hashing, torch_ops

ESTIMATORS = ("auto", "sampled", "expected")
UNIT_NORMS = ("l2",)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Number of keys per hash up to which the expectation costs less than sampling it: products of every
# query with every key against codes and tables. Measured at 32 hashes, 8 heads, d = 64, fp32, one
# AVX-512 thread: forward meets at 210 keys, causal forward at 290, forward and backward at 190.
EXPECTED_KEYS_PER_HASH = 6


def _expected_is_faster(n_keys: int, n_hashes: int) -> bool:
    return n_keys <= EXPECTED_KEYS_PER_HASH * n_hashes


def yoso_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    n_bits: int = 8,
    n_hashes: int = 32,
    hasher: str = "hadamard",
    estimator: str = "auto",
    gradient: str = "lower_bound",
    normalize: str | None = "l2",
    unit_norm: str = "l2",
    precision: str = "full",
    enable_gqa: bool = False,
    seed: int | Tensor | None = None,
) -> Tensor:
    """Attention by collisions of hash codes instead of softmax (YOSO, ICML 2021, eq. 1-4).

    The weight of a pair is the probability (1 - acos(cosine)/pi)^n_bits that its query and key
    share a code of n_bits random signs. "sampled" counts the collisions of n_hashes codes, in time
    and memory linear in the lengths; "expected" takes the probability itself, in quadratic time and
    linear memory. Queries and keys are scaled to unit norm; a row of zeros gets the code 0.

    Args:
        query: `(..., H, N_q, D)`, or `(B, N_q, D)` for one head, as in
            `torch.nn.functional.scaled_dot_product_attention`. float32, bfloat16, float16 or
            float64; sampling computes in float32, the expectation in float32 or float64.
        key: `(..., H, N_k, D)`, same leading sizes and dtype as query.
        value: `(..., H, N_k, D_v)`.
        attn_mask: boolean key padding mask `(B, N_k)` or `(B, 1, 1, N_k)`, True for a key that
            takes part. No other mask: no pair of a query and a key is ever visited.
        is_causal: query i sees the keys j <= i.
        n_bits: bits of a code, tau in the paper, 1 to 16. More bits make the weights sharper.
        n_hashes: number of codes, m in the paper, 1 to 65535. More hashes make less noise.
        hasher: "hadamard" (fast rotations) or "hyperplane" (independent normals).
        estimator: "sampled" (YOSO-m), "expected" (YOSO-E) or "auto": the expectation at short
            lengths, where it is the faster one, else sampled.
        gradient: of queries and keys. "lower_bound" weights a pair by n_bits/2 times its weight
            (eq. 4), "expected" by the exact derivative of the probability (eq. 3), in quadratic
            time. Values get the exact gradient of the sum that was computed.
        normalize: of the output rows. "l2" (to unit norm), "sum" (by the sum of the weights) or
            None. A query without any collision gives a row of zeros.
        unit_norm: how queries and keys get unit norm: "l2".
        precision: of the forward pass where it samples. "fast" hashes with 16-bit rotations
            ("hadamard" with up to 128 features; else in full) and sums in tables of 16-bit
            integers, in about 0.6 of the time. About one bit of a code in 10^4 differs, where its
            projection is within rounding of zero: codes collide with the same probability. Each
            value is rounded to a step of its column, which puts an error of 2e-4 (length 512) to
            1e-3 (hundreds of keys a bucket), relative to the output's root mean square before
            normalize, on random values. Values that 16 bits cannot hold so well (a few much larger
            than the rest, very many in a bucket, not finite) are summed in full, as they are above
            11 bits. Gradients are computed in full from these codes.
        enable_gqa: False; grouped query heads are not available.
        seed: of the hash functions, one set for each head, shared by the batch. None draws a fresh
            seed from torch's generator, an int >= 0 or an int64 CPU tensor of one element fixes it.

    Returns:
        `(..., H, N_q, D_v)` in the dtype of query. A query with a NaN or infinity gives a NaN row,
        such a key takes no part. A query that sees no key gives zeros.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or word.
        NotImplementedError: tensors that are not on the CPU.
    """
    n_bits, n_hashes = check_options(n_bits, n_hashes, hasher, estimator, gradient, normalize)
    is_causal = checks.boolean("is_causal", is_causal)
    _check_word("unit_norm", unit_norm, UNIT_NORMS)
    _check_word("precision", precision, torch_ops.PRECISION)
    if enable_gqa:
        raise ValueError(f"enable_gqa must be False, got {enable_gqa!r}: give each head its keys")
    _check_tensors(query, key, value)
    if seed is not None:  # None is drawn only where it is used
        seed = seed_tensor(seed, query.device.type)

    shape = query.shape
    key_mask = None if attn_mask is None else _key_mask(attn_mask, query, key)
    if len(shape) == 3:  # one head
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
    elif len(shape) > 4:
        query, key, value = query.flatten(0, -4), key.flatten(0, -4), value.flatten(0, -4)

    options = (is_causal, torch_ops.NORMALIZE[normalize], torch_ops.GRADIENT[gradient])
    if estimator == "expected" or (
        estimator == "auto" and _expected_is_faster(key.shape[-2], n_hashes)
    ):
        out = torch_ops.expected_attention(query, key, value, key_mask, n_bits, *options)
    else:
        family = torch_ops.FAMILY[hasher]
        parameters = torch_ops.hash_parameters(
            seed_tensor(None) if seed is None else seed,
            query.shape[1],
            query.shape[-1],
            n_bits,
            n_hashes,
            family,
        )
        options += (torch_ops.PRECISION[precision],)
        out, _, _ = torch_ops.yoso_attention(
            query, key, value, key_mask, parameters, family, n_bits, n_hashes, *options
        )
    return out if len(shape) == 4 else out.reshape(*shape[:-1], value.shape[-1])


def seed_tensor(seed: int | Tensor | None, inputs_device: str = "cpu") -> Tensor:
    """The seed as an int64 tensor, so that a compiled graph takes new seeds without a new trace.

    A seed on the meta device has no value: good for inputs there, and for nothing else.
    """
    if seed is None:
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device="cpu")
    if isinstance(seed, Tensor):
        if seed.dtype is not torch.int64 or seed.numel() != 1:
            raise ValueError(
                f"seed must be an int64 tensor of one element, got shape {tuple(seed.shape)} and "
                f"dtype {seed.dtype}"
            )
        if seed.device.type not in ("cpu", inputs_device):
            raise ValueError(f"seed must be on the cpu, got a tensor on {seed.device}")
        return seed
    seed = checks.integer("seed", seed, 0, 2**63 - 1)
    return torch.full((1,), seed, dtype=torch.int64, device="cpu")


def check_options(
    n_bits: int, n_hashes: int, hasher: str, estimator: str, gradient: str, normalize: str | None
) -> tuple[int, int]:
    n_bits = checks.integer("n_bits", n_bits, 1, 16)
    n_hashes = checks.integer("n_hashes", n_hashes, 1, hashing.MAX_HASHES)
    _check_word("hasher", hasher, torch_ops.FAMILY)
    _check_word("estimator", estimator, ESTIMATORS)
    _check_word("gradient", gradient, torch_ops.GRADIENT)
    _check_word("normalize", normalize, torch_ops.NORMALIZE)
    return n_bits, n_hashes


def _check_word(name, word, words) -> None:
    if not (word is None or isinstance(word, str)) or word not in words:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, words))}, got {word!r}")


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch tensor, got {type(x).__name__}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be float32, bfloat16, float16 or float64, got {x.dtype}")
        if x.layout is not torch.strided:
            raise TypeError(f"{name} must be a dense tensor, got layout {x.layout}")
        if x.dim() < 3:
            raise ValueError(
                f"{name} must be (batch, heads, rows, columns) or (batch, rows, columns), "
                f"got shape {tuple(x.shape)}"
            )
    for name, x in (("key", key), ("value", value)):
        if x.device != query.device:
            raise ValueError(f"{name} must be on query's device {query.device}, got {x.device}")
        if x.dtype is not query.dtype and not torch.is_autocast_enabled("cpu"):
            raise TypeError(f"{name} must have query's dtype {query.dtype}, got {x.dtype}")
        if x.shape[:-2] != query.shape[:-2]:
            raise ValueError(
                f"{name} must have query's batch and heads {tuple(query.shape[:-2])}, "
                f"got {tuple(x.shape[:-2])}"
            )
    if query.device.type not in ("cpu", "meta"):
        raise NotImplementedError(
            f"query must be on the cpu, got {query.device}: attention has CPU kernels only"
        )
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"key must have query's number of features {query.shape[-1]}, got {key.shape[-1]}"
        )
    if query.shape[-1] == 0:
        raise ValueError(f"query must have features, got shape {tuple(query.shape)}")
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(f"value must have key's length {key.shape[-2]}, got {value.shape[-2]}")


def _key_mask(mask: Tensor, query: Tensor, key: Tensor) -> Tensor | None:
    """The padding mask as (batch, n_keys), the batch as the operators see it."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"attn_mask must be a boolean tensor, got {type(mask).__name__}")
    if mask.dtype is not torch.bool:
        raise TypeError(
            f"attn_mask must be a boolean key padding mask, True for a key that takes part, "
            f"got dtype {mask.dtype}: there are no scores to add a mask to"
        )
    if mask.device != query.device:
        raise ValueError(f"attn_mask must be on query's device {query.device}, got {mask.device}")
    n_keys = key.shape[-2]
    batch = query.shape[:1] if query.dim() == 3 else query.shape[:-3]
    ones = (1,) * (query.dim() - 1 - len(batch))
    if mask.shape != (*batch, n_keys) and mask.shape != (*batch, *ones, n_keys):
        raise ValueError(
            f"attn_mask must be a key padding mask of shape {(*batch, n_keys)} or "
            f"{(*batch, *ones, n_keys)}, got {tuple(mask.shape)}: a mask of query-key pairs cannot "
            f"apply, as no pair is visited (for a causal mask give is_causal=True)"
        )
    return mask.reshape(-1, n_keys) if n_keys else None
