"""Arguments of context parallelism: checks and conversions."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lshkit.attention.arguments import autocast_device, check_starts
from lshkit.attention.call import Call


def short(value: Any) -> str:
    """For an error message."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def group_of(given: Any) -> dist.ProcessGroup:
    """Of a group, of a mesh of one dimension, or of all ranks."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "group_or_mesh must be a process group: torch.distributed.init_process_group has not "
            "been called"
        )
    if given is None:
        return dist.group.WORLD  # type: ignore[return-value]
    if isinstance(given, DeviceMesh):
        if given.ndim != 1:
            names = given.mesh_dim_names or ("...",)
            raise ValueError(
                f"group_or_mesh must be one dimension of a mesh, mesh[{names[-1]!r}], got a mesh "
                f"of {given.ndim} dimensions"
            )
        return given.get_group()
    if not isinstance(given, dist.ProcessGroup):
        raise TypeError(
            f"group_or_mesh must be a ProcessGroup, a DeviceMesh or None, got "
            f"{type(given).__name__}"
        )
    if dist.get_rank(given) < 0:
        raise ValueError("group_or_mesh must be a group that this rank belongs to")
    return given


def sequence_starts(starts: Any) -> list[int]:
    """cu_seqlens as numbers."""
    check_starts("cu_seqlens", starts)
    numbers: list[int] = starts.tolist()
    if numbers[0] != 0 or any(a > b for a, b in zip(numbers, numbers[1:], strict=False)):
        raise ValueError(f"cu_seqlens must begin with 0 and not decrease, got {short(numbers)}")
    return numbers


def check_parameter_values(call: Call) -> None:
    """On the CPU, before ranks wait for each other's rows: a rank may use some heads' alone."""
    for name, x in call.parameters.items():
        if not x.is_cuda and not x.is_meta:
            single, must_be = x.detach().to(torch.float32), "finite in float32"
            wrong = ~single.isfinite()
            if name != "planes":
                wrong, must_be = wrong | (single <= 0), "a finite number > 0 in float32"
            if wrong.any():
                raise ValueError(f"{name} must be {must_be}, got {x[wrong].flatten()[0].item()}")


def cast(call: Call) -> Call:
    """Under autocast queries, keys and values in its dtype, before they are sent."""
    device = autocast_device(call.query)
    if not torch.is_autocast_enabled(device):
        return call
    dtype = torch.get_autocast_dtype(device)
    query, key, value = (
        x if x.dtype is torch.float64 else x.to(dtype) for x in (call.query, call.key, call.value)
    )
    return call._replace(query=query, key=key, value=value)
