"""YOSO attention as a function, with the checks of all that comes in from outside."""

import torch
from torch import Tensor

from lshkit import checks, hashing, torch_ops
from lshkit.attention.projections import check_learnable, plane_rows
from lshkit.attention.unit_norm import check_lift_scale, lift

ESTIMATORS = ("auto", "sampled", "expected", "soft")
UNIT_NORMS = ("l2", "lift")
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
    lift_scale: float | Tensor | str = 1.0,
    window: int | None = None,
    enable_gqa: bool = False,
    seed: int | Tensor | None = None,
    n_probes: int | tuple[int, int] = 4,
    sharpness: float | Tensor = 2.0,
    gradient_rank: int | None = None,
    precision: str = "full",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    projections: Tensor | None = None,
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
        attn_mask: boolean key padding mask `(B, N_k)` or `(B, 1, 1, N_k)` (3-D inputs: `(B, 1,
            N_k)`), True for a key that takes part. No other mask: no pair of a query and a key is
            ever visited.
        is_causal: query i sees the keys j <= i.
        n_bits: bits of a code, tau in the paper, 1 to 16. More bits make the weights sharper.
        n_hashes: number of codes, m in the paper, 1 to 65535. More hashes make less noise.
        hasher: "hadamard" (fast rotations) or "hyperplane" (independent normals).
        estimator: "sampled" (YOSO-m), "expected" (YOSO-E) or "auto": the expectation at short
            lengths, where it is the faster one, else sampled. "soft": a row belongs to its
            n_probes likeliest buckets of a hash, with weights; linear too, and its gradient is
            the exact one of what was computed, given which buckets these are.
        gradient: of queries and keys. "lower_bound" weights a pair by n_bits/2 times its weight
            (eq. 4), "expected" by the exact derivative of the probability (eq. 3), in quadratic
            time. "collided" (*YOSO) takes that derivative on the pairs that collide in some hash,
            "unbiased" divides it by the probability 1 - (1 - p)^n_hashes that such a pair does, so
            that its mean is the exact gradient; both compare all pairs of codes, in quadratic time
            and linear memory. For the expectation (also where "auto" takes it) every pair counts
            and both are the exact derivative, as "expected" is. Values get the exact gradient of
            the sum that was computed. "soft" has its own exact gradient: the word does not apply.
        normalize: of the output rows. "l2" (to unit norm), "sum" (by the sum of the weights) or
            None. A query without any collision gives a row of zeros.
        unit_norm: how queries and keys get unit norm. "l2" scales each row, so that cosines are
            compared. "lift" keeps their lengths: two more features make unit vectors of them whose
            cosines are q . k / lift_scale (appendix 1.1). Then D + 2 features are hashed, which
            "hadamard" pads to a power of two: a D of 62 costs half of what a D of 64 does.
        lift_scale: of "lift", the bound on the squared norms of queries and keys, also called tau
            in the paper: a number, a tensor of one, or of one for each key head (gradients reach
            it), or "auto", the largest squared norm of each sequence and head. "auto" would show
            the future to a causal query, and is refused there. Masked keys and rows with a NaN or
            infinity do not count.
        gradient_rank: R, 1 to D_v, makes the lower bound's gradient of long sequences D_v / R times
            cheaper: each hash takes R coordinates of a pair's product of output gradient and value,
            after a random rotation of both. Unbiased, with more noise; exact where a bucket holds
            few tokens or the sequence 1024 or less. For estimator "sampled" or "auto". None: exact.
        window: None, or the near window of the sampled estimator: pairs of positions |i - j| <
            window (causal: 0 <= i - j < window) get the probability itself in the place of the
            collisions that estimate it, in the output and in all gradients (those of queries and
            keys: its exact weight of the word `gradient`). The mean stays what it is, these pairs
            add no noise; the cost is n_q window d. The expectation is exact anyway. Not "soft".
        precision: of the forward pass where it samples. "fast" hashes with 16-bit rotations
            ("hadamard" with up to 128 features; else in full) and sums in tables of 16-bit
            integers, in about 0.6 of the time. About one bit of a code in 10^4 differs, where its
            projection is within rounding of zero: codes collide with the same probability. Each
            value is rounded to a step of its column, which puts an error of 2e-4 (length 512) to
            1e-3 (hundreds of keys a bucket), relative to the output's root mean square before
            normalize, on random values. Values that 16 bits cannot hold so well (a few much larger
            than the rest, very many in a bucket, not finite) are summed in full, as they are above
            11 bits. Gradients are computed in full from these codes.
        enable_gqa: key and value may have fewer heads than query, a divisor of H: head h reads
            theirs number h // (H / H_k), and shares its hash functions. Nothing is copied.
        seed: of the hash functions, one set for each head of keys, shared by the batch. None draws
            a fresh seed from torch's generator, an int >= 0 or an int64 CPU tensor of one element
            fixes it.
        cu_seqlens: packed sequences, of which each sees itself alone: int32 or int64 tensor
            `(S + 1,)` of the rows at which they start, from 0 to N_q, as FlashAttention takes it.
            Batch 1. Causal masking and the hash functions are those of each sequence alone; "auto"
            goes by the mean length, for all of them. Equal numbers are an empty sequence.
        cu_seqlens_k: the same for the keys, where it differs.
        n_probes: of "soft", buckets a row belongs to, of queries and keys or `(queries, keys)`, 1
            to 2^n_bits: its own code and those with its least certain bits flipped. 1 is its code
            alone, 2^n_bits are all buckets (the features of RACE attention).
        sharpness: of "soft", how fast a bucket's weight falls with the projections that its flipped
            bits have to cross: weights are the softmax of -2 sharpness sum |z|. A number > 0 or a
            tensor () or (H_k,), which may require a gradient.
        projections: of "soft" with the hasher "hyperplane", the normals of its planes in the place
            of those that seed draws, `(H_k, n_hashes, n_bits, D)` or `(H_k, n_hashes * n_bits, D)`
            ("lift": D + 2), of a floating dtype; computed with in float32. They may require a
            gradient, which is the exact one given the flipped bits. Weights compare the projections
            z with sharpness: normals drawn from N(0, 1) give them unit variance, longer ones are
            sharper.

    Returns:
        `(..., H, N_q, D_v)` in the dtype of query. A query with a NaN or infinity gives a NaN row,
        such a key takes no part. A query that sees no key gives zeros.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or word, or a
            row is longer than sqrt(lift_scale).
        NotImplementedError: tensors that are not on the CPU.
    """
    n_bits, n_hashes = check_options(n_bits, n_hashes, hasher, estimator, gradient, normalize)
    is_causal = checks.boolean("is_causal", is_causal)
    _check_word("precision", precision, torch_ops.PRECISION)
    if precision != "full" and estimator in ("expected", "soft"):
        raise ValueError(
            f'precision must be "full" with estimator={estimator!r}, got {precision!r}: only '
            f"sampling has another"
        )
    probes = check_probes(n_probes, n_bits if estimator == "soft" else 16)
    # Numbers that this call does not use: a compiled graph would be guarded on them.
    unused_too = not torch.compiler.is_compiling()
    if unused_too and not isinstance(sharpness, Tensor):
        checks.positive("sharpness", sharpness)
    rank = _check_gradient_rank(gradient_rank, value, estimator, gradient)
    window = 0 if window is None else checks.integer("window", window, 1, 2**31 - 1)
    if window and estimator == "soft":
        raise ValueError(
            f"window must be None with estimator='soft', got {window}: the weight that soft codes "
            f"estimate has no closed form"
        )
    _check_word("unit_norm", unit_norm, UNIT_NORMS)
    enable_gqa = checks.boolean("enable_gqa", enable_gqa)
    _check_tensors(query, key, value, enable_gqa)
    if unused_too or unit_norm == "lift":
        heads = 1 if key.dim() == 3 else key.shape[-3]
        check_lift_scale(lift_scale, heads, is_causal and unit_norm == "lift")
    if projections is not None:
        check_learnable("projections", estimator, hasher)
        key_heads = 1 if key.dim() == 3 else key.shape[-3]
        n_features = query.shape[-1] + (2 if unit_norm == "lift" else 0)
        sizes = key_heads, n_features, n_bits, n_hashes
        projections = plane_rows(projections, *sizes, query.device)
    if seed is not None:  # None is drawn only where it is used
        seed = seed_tensor(seed, query.device.type)

    shape = query.shape
    key_mask = None if attn_mask is None else _key_mask(attn_mask, query, key)
    starts = _starts(cu_seqlens, cu_seqlens_k, query, key)
    if len(shape) == 3:  # one head
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
    elif len(shape) > 4:
        query, key, value = query.flatten(0, -4), key.flatten(0, -4), value.flatten(0, -4)
    if unit_norm == "lift":
        if isinstance(lift_scale, str) and cu_seqlens is not None:
            raise ValueError(
                f"lift_scale must be a number or tensor with cu_seqlens, got {lift_scale!r}: the "
                f"largest norm of all rows would be shared by sequences that are apart"
            )
        query, key = lift(query, key, key_mask, lift_scale)

    options = (is_causal, torch_ops.NORMALIZE[normalize])
    if estimator == "soft":
        sharpness = _sharpness_tensor(sharpness, key.shape[1], query.device)
    if estimator == "expected" or (
        estimator == "auto"
        and _expected_is_faster(
            key.shape[-2] // (1 if cu_seqlens is None else starts[0].shape[0] - 1), n_hashes
        )
    ):
        # Every pair has a weight, as if all collided: what is left of the others is the derivative.
        code = torch_ops.GRADIENT["lower_bound" if gradient == "lower_bound" else "expected"]
        out = torch_ops.expected_attention(
            query, key, value, key_mask, *starts, n_bits, *options, code
        )
    else:
        family = torch_ops.FAMILY[hasher]
        if seed is None and projections is None:
            seed = seed_tensor(None)
        rotation = None
        if rank and estimator != "soft" and torch.is_grad_enabled():
            rotation = torch_ops.gradient_rotation(seed, query.shape[1], value.shape[-1])
        parameters = projections
        if parameters is None:
            sizes = key.shape[1], query.shape[-1], n_bits, n_hashes
            parameters = torch_ops.hash_parameters(seed, *sizes, family)
        hash_options = family, n_bits, n_hashes
        if estimator == "soft":
            out, *_ = torch_ops.soft_attention(
                *(query, key, value, key_mask, *starts, parameters, sharpness),
                *(*hash_options, *probes, *options),
            )
        else:
            out, _, _ = torch_ops.yoso_attention(
                *(query, key, value, key_mask, *starts, parameters, *hash_options, *options),
                *(torch_ops.GRADIENT[gradient], window, 0 if rotation is None else rank),
                *(rotation, torch_ops.PRECISION[precision]),
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


def _check_gradient_rank(rank: int | None, value, estimator: str, gradient: str) -> int:
    """As the operators take it: 0 for None."""
    if rank is None:
        return 0
    n_values = value.shape[-1] if isinstance(value, Tensor) and value.dim() else None
    rank = checks.integer("gradient_rank", rank, 1, n_values)
    if gradient != "lower_bound":
        raise ValueError(f'gradient_rank needs gradient="lower_bound", got gradient={gradient!r}')
    if estimator in ("expected", "soft"):
        raise ValueError(f'gradient_rank needs estimator "sampled" or "auto", got {estimator!r}')
    return rank


def check_probes(n_probes: int | tuple[int, int], n_bits: int) -> tuple[int, int]:
    """Numbers of probes of queries and of keys."""
    if not isinstance(n_probes, (tuple, list)):
        n_probes = n_probes, n_probes
    if len(n_probes) != 2:
        raise ValueError(f"n_probes must be a number or (queries, keys), got {n_probes!r}")
    queries, keys = (checks.integer("n_probes", t, 1, 2**n_bits) for t in n_probes)
    return queries, keys


def _sharpness_tensor(sharpness: float | Tensor, heads: int, device: torch.device) -> Tensor:
    """(1,) or (heads,). The operator checks the values of a tensor."""
    if not isinstance(sharpness, Tensor):
        return torch.tensor(
            [checks.positive("sharpness", sharpness)], dtype=torch.float32, device=device
        )
    if not sharpness.is_floating_point():
        raise TypeError(f"sharpness must be a tensor of floats, got {sharpness.dtype}")
    if sharpness.shape not in ((), (1,), (heads,)):
        raise ValueError(
            f"sharpness must be a number or a tensor of shape () or (heads,) = ({heads},), "
            f"got shape {tuple(sharpness.shape)}"
        )
    if sharpness.device != device:
        raise ValueError(
            f"sharpness must be on query's device {device}, got a tensor on {sharpness.device}"
        )
    return sharpness.reshape(1) if sharpness.dim() == 0 else sharpness


def _check_word(name, word, words) -> None:
    if not (word is None or isinstance(word, str)) or word not in words:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, words))}, got {word!r}")


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
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
        wanted = query.shape[:-2] if name == "key" or not enable_gqa else key.shape[:-2]
        if name == "key" and enable_gqa:
            _check_groups(query, key)
        elif x.shape[:-2] != wanted:
            of = "query" if wanted is query.shape[:-2] or not enable_gqa else "key"
            raise ValueError(
                f"{name} must have {of}'s batch and heads {tuple(wanted)}, "
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


def _check_groups(query: Tensor, key: Tensor) -> None:
    if query.dim() < 4 or key.dim() != query.dim():
        raise ValueError(
            f"key must be (batch, heads, rows, columns) like query with enable_gqa, got shapes "
            f"{tuple(key.shape)} and {tuple(query.shape)}"
        )
    heads, key_heads = query.shape[-3], key.shape[-3]
    if key.shape[:-3] != query.shape[:-3]:
        raise ValueError(
            f"key must have query's batch {tuple(query.shape[:-3])}, got {tuple(key.shape[:-3])}"
        )
    if key_heads == 0 or heads % key_heads:
        raise ValueError(
            f"key must have a number of heads that divides query's {heads} with enable_gqa, "
            f"got {key_heads}"
        )


def _starts(
    cu_seqlens: Tensor | None, cu_seqlens_k: Tensor | None, query: Tensor, key: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Where packed sequences start among queries and keys, int64 and checked."""
    if cu_seqlens is None:
        if cu_seqlens_k is not None:
            raise ValueError("cu_seqlens_k must be None without cu_seqlens, which the queries need")
        return None, None
    batch = query.shape[:1] if query.dim() == 3 else query.shape[:-3]
    if any(size != 1 for size in batch):
        raise ValueError(f"query must have batch 1 with cu_seqlens, got batch {tuple(batch)}")
    query_starts = _sequence_starts("cu_seqlens", cu_seqlens, query)
    if cu_seqlens_k is None:
        if key.shape[-2] != query.shape[-2]:
            raise ValueError(
                f"cu_seqlens_k must be given where key's length {key.shape[-2]} differs from "
                f"query's {query.shape[-2]}"
            )
        return query_starts, query_starts
    key_starts = _sequence_starts("cu_seqlens_k", cu_seqlens_k, key)
    if key_starts.shape != query_starts.shape:
        raise ValueError(
            f"cu_seqlens_k must have as many sequences as cu_seqlens, {len(query_starts) - 1}, "
            f"got {len(key_starts) - 1}"
        )
    return query_starts, key_starts


def _sequence_starts(name: str, starts: Tensor, x: Tensor) -> Tensor:
    if not isinstance(starts, Tensor):
        raise TypeError(f"{name} must be an integer tensor, got {type(starts).__name__}")
    if starts.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got dtype {starts.dtype}")
    if starts.dim() != 1 or starts.shape[0] < 2:
        raise ValueError(
            f"{name} must have shape (sequences + 1,), at least one sequence, "
            f"got {tuple(starts.shape)}"
        )
    if starts.device != x.device:
        raise ValueError(f"{name} must be on {x.device}, got a tensor on {starts.device}")
    n_rows = x.shape[-2]
    if not (torch.compiler.is_compiling() or starts.is_meta):  # else the core looks at the values
        if starts[0] != 0 or starts[-1] != n_rows:
            raise ValueError(
                f"{name} must go from 0 to the {n_rows} rows, got {starts[0]} to {starts[-1]}"
            )
        if (starts.diff() < 0).any():
            raise ValueError(f"{name} must not decrease, got {starts.tolist()}")
    return starts.to(torch.int64).contiguous()


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
