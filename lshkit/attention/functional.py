"""YOSO attention as a function."""

import torch
from torch import Tensor

from lshkit import checks, torch_ops
from lshkit.attention.arguments import (
    UNIT_NORMS,
    check_device,
    check_gradient_rank,
    check_options,
    check_probes,
    check_seed,
    check_tensors,
    check_word,
    key_padding_mask,
    packed_starts,
    seed_tensor,
    sharpness_tensor,
)
from lshkit.attention.projections import check_learnable, plane_rows
from lshkit.attention.unit_norm import check_lift_scale, lift

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
    """Attention by collisions of hash codes instead of softmax (YOSO, ICML 2021, equations 1 to 4).

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
            time. "collided" (`*YOSO`) takes that derivative on the pairs that collide in some hash,
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
        window: None, or the near window of the sampled estimator: pairs of positions
            `|i - j| < window` (causal: 0 <= i - j < window) get the probability itself in the place
            of the collisions that estimate it, in the output and in all gradients (those of queries
            and keys: its exact weight of the word `gradient`). The mean stays what it is, these
            pairs add no noise; the cost is n_q window d. The expectation is exact anyway. Not of
            "soft".
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
            a fresh seed from torch's generator of the device, so that a CUDA graph draws anew at
            each replay; an int >= 0 or an int64 tensor of one element fixes it. A tensor on CUDA is
            not read: it is taken as its 64 bits.
        cu_seqlens: packed sequences, of which each sees itself alone: int32 or int64 tensor
            `(S + 1,)` of the rows at which they start, from 0 to N_q, as FlashAttention takes it.
            Batch 1. Causal masking and the hash functions are those of each sequence alone; "auto"
            goes by the mean length, for all of them. Equal numbers are an empty sequence. On CUDA
            the values are not looked at: rows of no sequence have results without a meaning.
        cu_seqlens_k: the same for the keys, where it differs.
        n_probes: of "soft", buckets a row belongs to, of queries and keys or `(queries, keys)`, 1
            to 2^n_bits: its own code and those with its least certain bits flipped. 1 is its code
            alone, 2^n_bits are all buckets (the features of RACE attention).
        sharpness: of "soft", how fast a bucket's weight falls with the projections that its flipped
            bits have to cross: weights are the softmax of `-2 sharpness sum |z|`. A number > 0 or a
            tensor () or (H_k,), which may require a gradient and on CUDA is not looked at.
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
            row is longer than sqrt(lift_scale) (on CUDA: an assertion of the device).
        NotImplementedError: tensors on a device that has no kernels. CUDA tensors, in a build with
            its kernels, take everything; `precision` and `gradient_rank` do not apply, all is
            computed in full there.
    """
    n_bits, n_hashes = check_options(n_bits, n_hashes, hasher, estimator, gradient, normalize)
    is_causal = checks.boolean("is_causal", is_causal)
    probes = check_probes(n_probes, n_bits if estimator == "soft" else 16)
    # Numbers that this call does not use: a compiled graph would be guarded on them.
    unused_too = not torch.compiler.is_compiling()
    if unused_too and not isinstance(sharpness, Tensor):
        checks.positive("sharpness", sharpness)
    rank = check_gradient_rank(gradient_rank, value, estimator, gradient)
    window = 0 if window is None else checks.integer("window", window, 1, 2**31 - 1)
    if window and estimator == "soft":
        raise ValueError(
            f"window must be None with estimator='soft', got {window}: the weight that soft codes "
            f"estimate has no closed form"
        )
    check_word("unit_norm", unit_norm, UNIT_NORMS)
    enable_gqa = checks.boolean("enable_gqa", enable_gqa)
    check_tensors(query, key, value, enable_gqa)
    check_device(query)
    if unused_too or unit_norm == "lift":
        heads = 1 if key.dim() == 3 else key.shape[-3]
        auto_fails = is_causal and unit_norm == "lift"
        check_lift_scale(lift_scale, heads, auto_fails, query.device)
    if projections is not None:
        check_learnable("projections", estimator, hasher)
        key_heads = 1 if key.dim() == 3 else key.shape[-3]
        n_features = query.shape[-1] + (2 if unit_norm == "lift" else 0)
        sizes = key_heads, n_features, n_bits, n_hashes
        projections = plane_rows(projections, *sizes, query.device)
    check_seed(seed, query.device)

    shape = query.shape
    key_mask = None if attn_mask is None else key_padding_mask(attn_mask, query, key)
    starts = packed_starts(cu_seqlens, cu_seqlens_k, query, key)
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
        sharpness = sharpness_tensor(sharpness, key.shape[1], query.device)
    if estimator == "expected" or (
        estimator == "auto"
        and _expected_is_faster(
            key.shape[-2] // (1 if cu_seqlens is None else starts[0].shape[0] - 1), n_hashes
        )
    ):
        # Every pair has a weight, as if all collided: what is left of the others is the derivative.
        code = torch_ops.GRADIENT["lower_bound" if gradient == "lower_bound" else "exact"]
        out = torch_ops.expected_attention(
            query, key, value, key_mask, *starts, n_bits, *options, code
        )
    else:
        family = torch_ops.FAMILY[hasher]
        if projections is None:  # made only where it is used
            seed = seed_tensor(seed, query.device)
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
                rotation,
            )
    return out if len(shape) == 4 else out.reshape(*shape[:-1], value.shape[-1])
