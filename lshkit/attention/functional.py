"""YOSO attention as a function."""

from typing import Any

from torch import Tensor

from lshkit import checks, torch_ops
from lshkit.attention.across_ranks import (
    CU_SEQLENS_OF_RANKS,
    AcrossRanks,
    check_context_parallel,
    check_values,
)
from lshkit.attention.arguments import (
    check_device,
    check_seed,
    check_softmax_arguments,
    check_tensors,
    folded,
    key_padding_mask,
    packed_starts,
    resolve_causal_offset,
)
from lshkit.attention.call import Call
from lshkit.attention.estimators import Estimator, Sampled, estimator_of
from lshkit.attention.parameters import check_parameters


def yoso_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    estimator: Estimator | str = Sampled(),  # noqa: B008 (immutable)
    parameters: dict[str, Tensor] | None = None,
    normalize: str | None = "l2",
    seed: int | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    causal_offset: int | None = None,
    context_parallel: AcrossRanks | None = None,
) -> Tensor:
    """Attention by collisions of hash codes instead of softmax (YOSO, ICML 2021, equations 1 to 4).

    The weight of a pair is the probability (1 - acos(cosine)/pi)^n_bits that its query and key
    share a code of n_bits random signs, or an estimate of it, as the estimator specifies. Queries
    and keys are scaled to unit norm; a row of zeros gets the code 0. The arguments up to
    `enable_gqa` are those of `torch.nn.functional.scaled_dot_product_attention`, in the same order.

    Basic arguments:
        query: `(..., H, N_q, D)`, or `(B, N_q, D)` for one head. float32, bfloat16, float16 or
            float64; see each estimator for the precision of the computation. On the CPU, sums of
            bfloat16 and float16 without a causal mask, of hard codes and of soft ones, are added up
            in 16-bit integers where many rows share a bucket, without bias, to 0.2 % of the root
            mean square of all outputs; more where queries meet only values far smaller than the
            largest (docs/numerics.md). Other sums are float32.
        key: `(..., H, N_k, D)`, same leading sizes and dtype as query.
        value: `(..., H, N_k, D_v)`.
        attn_mask: boolean key padding mask `(B, N_k)` or `(B, 1, 1, N_k)` (3-D inputs: `(B, 1,
            N_k)`), True for a key that takes part. No other mask: no pair of a query and a key is
            ever visited.
        dropout_p: 0: there are no attention weights to drop.
        is_causal: query i sees the keys j <= i + causal_offset.
        scale: None: cosines have no scale.
        enable_gqa: key and value may have fewer heads than query, a divisor of H: head h reads
            theirs number h // (H / H_k), and shares its hash functions. Nothing is copied.
        estimator: `Sampled(...)` (YOSO-m, linear), `Expected(...)` (YOSO-E, quadratic), `Soft(...)`
            (soft codes, linear with an exact gradient) or `Colliding(...)` (softmax of cosines from
            the pairs that collide), or their names in lower case for their defaults.
        seed: of the hash functions, one set for each head of keys, shared by the batch. None draws
            a fresh seed from torch's generator of the device, so that a CUDA graph draws anew at
            each replay; an int >= 0 or an int64 tensor of one element fixes it. A tensor on CUDA is
            not read: its 64 bits are the seed.

    Advanced arguments:
        normalize: of the output rows. "l2" (to unit norm), "sum" (by the sum of the weights) or
            None. A query without any collision gives a row of zeros.
        parameters: tensors of the estimator that may require a gradient, by name: "sharpness" and
            "planes" of `Soft`, "scale" of `Colliding`, "lift_scale" of unit_norm="lift" (`()` or
            `(H_k,)`). Their values are not validated on CUDA.
        cu_seqlens: packed sequences, each of which attends only to itself: int32 or int64 tensor
            `(S + 1,)` of the rows at which they start, from 0 to N_q, as FlashAttention takes it.
            Batch 1. Causal masking and the hash functions are those of each sequence alone, and
            query i of a sequence sees its keys j <= i. Equal numbers are an empty sequence. On CUDA
            the values are not validated; rows outside every sequence are undefined.
        cu_seqlens_k: the same for the keys, where it differs.
        causal_offset: position of query 0 among the keys, with is_causal. None: N_k - N_q, so that
            the last query sees all keys, as with a cache (`scaled_dot_product_attention` has 0
            there, which is the same where N_q = N_k). None with cu_seqlens.
        context_parallel: a `lshkit.distributed.ContextParallel`, where the tensors are a rank's
            rows of a sequence that is spread over ranks. In what is said here N_q and N_k are then
            the lengths of the whole sequence; attn_mask is that of the rank's keys, cu_seqlens goes
            to the `ContextParallel`. All ranks must call.

    Returns:
        `(..., H, N_q, D_v)` in the dtype of query. A query with a NaN or infinity gives a NaN row,
        such a key is ignored. A query that sees no key gives zeros.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or value, or a
            row has a norm above sqrt(lift_scale) (on CUDA: an assertion of the device).
        NotImplementedError: tensors on a device that has no kernels.
    """
    arguments: tuple[Any, ...] = (
        *(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, estimator),
        *(parameters, normalize, seed, cu_seqlens, cu_seqlens_k, causal_offset),
    )
    if context_parallel is not None:
        check_context_parallel(context_parallel)
        return context_parallel.uncompiled(_across_ranks, *arguments)
    estimator, call = _checked_call(*arguments)
    return _like(query, estimator.attend(call))


def _across_ranks(context_parallel: AcrossRanks, *arguments: Any) -> Tensor:
    *rest, cu_seqlens, cu_seqlens_k, causal_offset = arguments

    def checked() -> tuple[Estimator, Call]:
        if cu_seqlens is not None or cu_seqlens_k is not None:
            raise ValueError(CU_SEQLENS_OF_RANKS)
        if context_parallel.cu_seqlens is not None and causal_offset is not None:
            raise ValueError(f"causal_offset must be None with cu_seqlens, got {causal_offset!r}")
        offset = 0 if causal_offset is None else causal_offset
        estimator, call = _checked_call(*(*rest, None, None, offset))
        check_values("query", call.query)
        return estimator, call

    estimator, call = context_parallel.checked(checked)
    return _like(rest[0], context_parallel.attend(estimator, call, causal_offset))


def _like(query: Tensor, out: Tensor) -> Tensor:
    """The output with query's leading sizes."""
    return out if query.dim() == 4 else out.reshape(*query.shape[:-1], out.shape[-1])


def _checked_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    estimator: Estimator | str,
    parameters: dict[str, Tensor] | None,
    normalize: str | None,
    seed: int | Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    causal_offset: int | None,
) -> tuple[Estimator, Call]:
    estimator = estimator_of(estimator)
    checks.choice("normalize", normalize, torch_ops.NORMALIZE)
    is_causal = checks.boolean("is_causal", is_causal)
    check_softmax_arguments("yoso_attention", dropout_p, scale)
    enable_gqa = checks.boolean("enable_gqa", enable_gqa)
    check_tensors(query, key, value, enable_gqa)
    check_device(query)
    if parameters is None:
        parameters = {}
    elif parameters or not isinstance(parameters, dict):
        check_parameters(parameters, estimator)
    check_seed(seed, query.device)

    key_mask = key_padding_mask(attn_mask, query, key)
    starts = packed_starts(cu_seqlens, cu_seqlens_k, query, key)
    if starts[0] is None:
        offset = resolve_causal_offset(causal_offset, is_causal, query, key)
    elif causal_offset is None:
        offset = 0
    else:
        raise ValueError(f"causal_offset must be None with cu_seqlens, got {causal_offset!r}")
    call = Call(
        *(folded(query), folded(key), folded(value), key_mask, *starts, is_causal, offset),
        *(normalize, parameters, seed),
    )
    return estimator, call
