"""What the gradient of one input alone costs, over the forward pass."""

import torch

from benchmarks.measurement import (
    BACKWARD,
    FORWARD,
    Section,
    figure,
    inputs,
    milliseconds,
    of_pass,
    table,
)
from benchmarks.speed.attention.options import LENGTHS, QUICK_LENGTHS, SIDES, SOFT_OPTIONS

WANTED = {  # of query, key and value
    "value": (False, False, True),
    "query": (True, False, False),
    "key": (False, True, False),
    "all": (True, True, True),
}


def forward_and_gradients(attention, tensors, wanted):
    """A call without arguments: forward, and backward for the inputs that are wanted."""
    given = [x.clone().requires_grad_(w) for x, w in zip(tensors, wanted, strict=True)]
    leaves = [x for x in given if x.requires_grad]
    grad_out = torch.ones_like(tensors[0])
    return lambda: torch.autograd.grad(attention(*given), leaves, grad_out)


def one_gradient(lengths, stopwatch):
    results = {}
    for n in lengths:
        tensors = inputs(n)
        results[n] = {
            side: stopwatch.in_turns(
                {FORWARD: of_pass(attention, FORWARD, tensors)}
                | {
                    name: forward_and_gradients(attention, tensors, wanted)
                    for name, wanted in WANTED.items()
                }
            )
            for side, attention in SIDES.items()
        }
    return results


def one_gradient_tables(results):
    rows = [
        [n, side, milliseconds(t[FORWARD]), *(figure(t[name] / t[FORWARD]) for name in WANTED)]
        for n, times in results.items()
        for side, t in times.items()
    ]
    title = f"{BACKWARD} for one input or all / {FORWARD}"
    yield table(title.capitalize(), ["n", "", f"{FORWARD}, ms", *WANTED], rows)


SECTIONS = {
    "one_gradient": Section(
        one_gradient, one_gradient_tables, LENGTHS, QUICK_LENGTHS, options=SOFT_OPTIONS
    )
}
