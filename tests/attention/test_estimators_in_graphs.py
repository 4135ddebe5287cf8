"""Estimators as constants of compiled and exported graphs."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from cases.attention import SAMPLED, attention_inputs  # noqa: E402
from torch import nn  # noqa: E402

from lshkit.attention import (  # noqa: E402
    Colliding,
    Expected,
    Sampled,
    Soft,
    YosoAttention,
    yoso_attention,
)

ESTIMATORS = [
    Sampled(n_hashes=4),
    replace(SAMPLED, n_hashes=4, unit_norm="lift", lift_scale=400.0),
    Expected(),
    Soft(n_hashes=4, n_bits=6),
    Colliding(n_hashes=4, n_bits=4, exact_up_to=0),
]
IDS = ["sampled", "lift", "expected", "soft", "colliding"]


class Attend(nn.Module):
    def __init__(self, estimator, is_causal):
        super().__init__()
        self.estimator, self.is_causal = estimator, is_causal

    def forward(self, query, key, value, seed):
        options = {"estimator": self.estimator, "is_causal": self.is_causal, "seed": seed}
        return yoso_attention(query, key, value, **options)


def graphs_of(function):
    """The function compiled, and a list that grows by every graph made."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    return torch.compile(function, backend=backend, fullgraph=True), graphs


@torch.no_grad()
def test_a_graph_for_each_estimator_and_none_for_an_equal_one():
    x = torch.randn(2, 11, 24, generator=torch.Generator().manual_seed(0))
    module = YosoAttention(24, 3, estimator=SAMPLED, seed=0).train()
    module.fresh_hashes = False
    compiled, graphs = graphs_of(module)
    made = 0
    for estimator, fresh in (
        (SAMPLED, True),
        (Sampled(n_bits=8, expectation="never"), False),
        (replace(SAMPLED, n_bits=4), True),
        (replace(SAMPLED, n_bits=4), False),
        (Soft(), True),
        (Soft(), False),
        (Expected(), True),
        (SAMPLED, False),
        (Expected(n_bits=12), False),
        (Soft(n_bits=12, n_probes=4), False),
        (replace(SAMPLED, n_bits=4), False),
    ):
        module.estimator = estimator
        out, _ = compiled(x, x, x)
        torch.testing.assert_close(out, module(x, x, x)[0])
        made += fresh
        assert len(graphs) == made, estimator


@torch.no_grad()
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=IDS)
def test_seeds_of_the_same_graph(estimator, is_causal):
    case = attention_inputs(60, 60, 16, 9)
    attend = Attend(estimator, is_causal)
    compiled, graphs = graphs_of(attend)
    for seed in (3, 4, 5):
        inputs = case.query, case.key, case.value, torch.tensor([seed])
        torch.testing.assert_close(compiled(*inputs), attend(*inputs))
    assert len(graphs) == 1


@torch.no_grad()
@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=IDS)
def test_export_with_a_dynamic_length(estimator, is_causal, same):
    """Samples at all lengths, since a graph for all can hold only one of the two."""

    def inputs(n, n_k=None, batch=2):
        case = attention_inputs(n, n_k, 16, 9, batch=batch)
        return case.query, case.key, case.value, torch.tensor([7])

    # Causal with fewer queries than keys: a graph holds the order of the two lengths.
    length = torch.export.Dim("length", min=4, max=4096 if same else 150)
    keys = length if same else torch.export.Dim("keys", min=151, max=4096)
    shapes = ({2: length}, {2: keys}, {2: keys}, None)
    attend = Attend(estimator, is_causal)
    sizes = (40, 40) if same else (40, 200)
    program = torch.export.export(attend, inputs(*sizes), dynamic_shapes=shapes)
    if estimator.name == "sampled":
        attend = Attend(replace(estimator, expectation="never"), is_causal)
    for n_q, n_k in [(9, 9), (130, 130)] if same else [(9, 151), (130, 300)]:
        given = inputs(n_q, n_k)
        torch.testing.assert_close(program.module()(*given), attend(*given))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=IDS)
def test_compiled_gradients_at_an_offset(estimator, is_causal):
    case = attention_inputs(9, 40, 16, 7)
    attend = Attend(estimator, is_causal)
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    results = []
    for function in (attend, compiled):
        inputs = [x.detach().requires_grad_() for x in (case.query, case.key, case.value)]
        out = function(*inputs, torch.tensor([3]))
        results.append((out, *torch.autograd.grad(out, inputs, case.grad_out)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
