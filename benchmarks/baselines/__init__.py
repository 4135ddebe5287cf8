"""Other attention to compare with, as modules of one interface.

`build(name, dim, heads, length, **options)` is a layer for sequences of up to `length` tokens:
`layer(x, mask)` takes `(B, n, dim)` and None or a boolean `(B, n)`, True for a token that takes
part, and gives `(B, n, dim)`. No output of a token that takes part depends on one that does not.
Projections of the model's size to queries, keys and values and back are part of every layer. All
attend both ways; nothing is dropped out.

Those of `projected` differ in `mix(query, key, value, mask)` alone, on `(B, heads, n, head_dim)`,
and can be used there without the layer. Nystromformer, Reformer and Longformer are transformers'
own attention, imported when asked for.
"""

import importlib

from torch import nn

_MODULES = {
    "softmax": ("projected", "Softmax"),
    "softmax of unit vectors": ("projected", "UnitSoftmax"),
    "window only": ("projected", "Window"),
    "convolution only": ("projected", "Convolution"),
    "no attention": ("projected", "Values"),
    "YOSO": ("projected", "Yoso"),
    "Linformer": ("linformer", "Linformer"),
    "Performer": ("performer", "Performer"),
    "delta rule": ("delta_rule", "DeltaRule"),
    "Nystromformer": ("from_transformers", "Nystromformer"),
    "Reformer": ("from_transformers", "Reformer"),
    "Longformer": ("from_transformers", "Longformer"),
}
NAMES = tuple(_MODULES)
CONTROLS = ("window only", "convolution only", "no attention")


def build(name: str, dim: int, heads: int, length: int, **options) -> nn.Module:
    """One layer of that name; options are those of its class."""
    if name not in _MODULES:
        raise ValueError(f"name must be one of {', '.join(map(repr, NAMES))}, got {name!r}")
    if dim % heads:
        raise ValueError(f"dim must be a multiple of heads={heads}, got {dim}")
    module, kind = _MODULES[name]
    return getattr(importlib.import_module(f"benchmarks.baselines.{module}"), kind)(
        dim, heads, length, **options
    )
