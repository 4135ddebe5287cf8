"""Arguments of the functions and classes of attention: checks and conversions."""

import numbers
from typing import Any

import torch
from torch import Tensor

from lshkit import _C, checks
from lshkit.torch_ops.assertions import may_be_read

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CPU = torch.device("cpu")


def seed_tensor(seed: int | Tensor | None, inputs_device: torch.device = CPU) -> Tensor:
    """The seed as an int64 tensor, so that a compiled graph takes new seeds without a new trace.

    On the CPU, but for inputs on CUDA on their device, where the numbers of hash functions are
    made: a seed of None is drawn there and an int written there, without a copy and without a wait.
    A seed on the meta device has no value: good for inputs there, and for nothing else.
    """
    device = inputs_device if inputs_device.type == "cuda" else CPU
    if seed is None:
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)
    check_seed(seed, inputs_device)
    if not isinstance(seed, Tensor):
        return torch.full((1,), int(seed), dtype=torch.int64, device=device)
    if seed.device == device or seed.is_meta:
        return seed
    if seed.device == CPU:
        if may_be_read(seed) and not torch._C._functorch.is_functorch_wrapped_tensor(seed):
            return seed_tensor(int(seed.item()), inputs_device)
        return seed.to(device, non_blocking=True)
    return seed.to(device)  # a wait for the GPU


def check_seed(seed: int | Tensor | None, inputs_device: torch.device) -> None:
    if seed is None:
        return
    if not isinstance(seed, Tensor):
        checks.integer("seed", seed, 0, 2**63 - 1)
        return
    if seed.dtype is not torch.int64 or seed.numel() != 1:
        raise ValueError(
            f"seed must be an int64 tensor of one element, got shape {tuple(seed.shape)} and "
            f"dtype {seed.dtype}"
        )
    if seed.device != CPU and seed.device != inputs_device:
        wanted = "the cpu" if inputs_device == CPU else f"the cpu or {inputs_device}"
        raise ValueError(f"seed must be on {wanted}, got a tensor on {seed.device}")


def check_softmax_arguments(function: str, dropout_p: float, scale: float | None = None) -> None:
    """Of scaled_dot_product_attention's arguments those that only softmax attention has."""
    numeric = isinstance(dropout_p, numbers.Real) and not isinstance(dropout_p, bool)
    if not numeric or dropout_p != 0:
        raise ValueError(
            f"dropout_p must be 0, got {dropout_p!r}: {function} forms no attention weights that "
            f"could be dropped (drop elements of its output instead)"
        )
    if scale is not None:
        raise ValueError(
            f"scale must be None, got {scale!r}: weights depend on the cosine of query and key, "
            f"which has no scale (unit_norm='lift' compares inner products, n_bits sharpens; "
            f"Colliding(scale=...) has one)"
        )


def resolve_causal_offset(
    causal_offset: int | None, is_causal: bool, query: Tensor, key: Tensor
) -> int:
    """The position of query 0 among the keys. None: N_k - N_q when causal, else 0."""
    if causal_offset is not None:
        return checks.integer("causal_offset", causal_offset, -(2**31), 2**31 - 1)
    return key.shape[-2] - query.shape[-2] if is_causal else 0


def check_dense(name: str, x: Tensor) -> None:
    if x.is_nested:
        raise TypeError(
            f"{name} must be a dense tensor, got a nested one: give padded rows and a mask of the "
            f"keys, or rows of one batch and cu_seqlens"
        )
    if x.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {x.layout}")


def check_tensors(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch tensor, got {type(x).__name__}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be float32, bfloat16, float16 or float64, got {x.dtype}")
        check_dense(name, x)
        if x.dim() < 3:
            raise ValueError(
                f"{name} must be (batch, heads, rows, columns) or (batch, rows, columns), "
                f"got shape {tuple(x.shape)}"
            )
    device, dtype = query.device, query.dtype
    for name, x in (("key", key), ("value", value)):
        if x.device != device:
            raise ValueError(f"{name} must be on query's device {device}, got {x.device}")
        if x.dtype is not dtype and not torch.is_autocast_enabled(autocast_device(query)):
            raise TypeError(f"{name} must have query's dtype {dtype}, got {x.dtype}")
    (*heads, _, features), of = query.shape, "query"
    *key_heads, n_keys, key_features = key.shape
    *value_heads, n_values, _ = value.shape
    if enable_gqa:
        _check_groups(query, key)
        of, heads = "key", key_heads
    for name, own in (("key", key_heads), ("value", value_heads)):
        if own != heads:
            raise ValueError(
                f"{name} must have {of}'s batch and heads {tuple(heads)}, got {tuple(own)}"
            )
    if key_features != features:
        raise ValueError(f"key must have query's number of features {features}, got {key_features}")
    if features == 0:
        raise ValueError(f"query must have features, got shape {tuple(query.shape)}")
    if n_values != n_keys:
        raise ValueError(f"value must have key's length {n_keys}, got {n_values}")


def folded(x: Tensor) -> Tensor:
    """(batch, heads, rows, columns) of one batch dimension; three dimensions have one head."""
    if x.dim() == 3:
        return x.unsqueeze(1)
    return x.flatten(0, -4) if x.dim() > 4 else x


def autocast_device(x: Tensor) -> str:
    """Of autocast, which knows no meta device."""
    return "cuda" if x.device.type == "cuda" else "cpu"


def check_device(query: Tensor) -> None:
    """There are kernels for the CPU and, in a build with CUDA, for CUDA."""
    if query.is_cpu or query.is_meta or (query.is_cuda and _C.with_cuda):
        return
    hint = f" ({checks.HOW_TO_BUILD})" if query.is_cuda else ""
    raise NotImplementedError(
        f"query must be on the cpu, got {query.device}: this build of lshkit has no kernels for "
        f"it{hint}"
    )


def check_cpu(name: str, query: Tensor, others: str = "yoso_attention runs") -> None:
    """For what has no CUDA kernels. others: what has."""
    if query.device.type not in ("cpu", "meta"):
        raise NotImplementedError(
            f"{name} runs on the CPU only, got a tensor on {query.device}: move it there with "
            f".cpu() ({others} on CUDA)"
        )


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


def packed_starts(
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


def check_starts(name: str, starts: Any) -> None:
    """That these may be starts of packed sequences, whatever their values."""
    if not isinstance(starts, Tensor):
        raise TypeError(f"{name} must be an integer tensor, got {type(starts).__name__}")
    if starts.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got dtype {starts.dtype}")
    if starts.dim() != 1 or starts.shape[0] < 2:
        raise ValueError(
            f"{name} must have shape (sequences + 1,), at least one sequence, "
            f"got {tuple(starts.shape)}"
        )


def _sequence_starts(name: str, starts: Tensor, x: Tensor) -> Tensor:
    check_starts(name, starts)
    if starts.device != x.device:
        raise ValueError(f"{name} must be on {x.device}, got a tensor on {starts.device}")
    n_rows = x.shape[-2]
    if may_be_read(starts):  # else the core looks at them, or keeps within the rows
        if starts[0] != 0 or starts[-1] != n_rows:
            raise ValueError(
                f"{name} must go from 0 to the {n_rows} rows, got {starts[0]} to {starts[-1]}"
            )
        if (starts.diff() < 0).any():
            raise ValueError(f"{name} must not decrease, got {starts.tolist()}")
    return starts.to(torch.int64).contiguous()


def key_padding_mask(
    mask: Tensor | None,
    query: Tensor,
    key: Tensor,
    reason: str = "no pair is visited (for a causal mask give is_causal=True)",
) -> Tensor | None:
    """The padding mask as (batch, n_keys), the batch as the operators see it.

    reason: why there is no mask of pairs, for the error.
    """
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise TypeError(f"attn_mask must be a boolean tensor, got {type(mask).__name__}")
    if mask.dtype is not torch.bool:
        raise TypeError(
            f"attn_mask must be a boolean key padding mask, True for a key that takes part, "
            f"got dtype {mask.dtype}: it is not added to scores"
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
            f"apply, as {reason}"
        )
    return mask.reshape(-1, n_keys) if n_keys else None
