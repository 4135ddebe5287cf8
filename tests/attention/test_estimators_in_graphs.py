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
    Colliding(n_hashes=4, n_bits=4, exact_up_to=8),
]
IDS = ["sampled", "lift", "expected", "soft", "colliding"]


class Attend(nn.Module):
    def __init__(self, estimator, is_causal, **parameters):
        super().__init__()
        self.estimator, self.is_causal = estimator, is_causal
        self.parameters_by_name = nn.ParameterDict(parameters)

    def forward(self, query, key, value, seed):
        options = {"estimator": self.estimator, "is_causal": self.is_causal, "seed": seed}
        options["parameters"] = dict(self.parameters_by_name) or None
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
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=IDS)
def test_seeds_of_the_same_graph(estimator):
    case = attention_inputs(60, 60, 16, 9)
    attend = Attend(estimator, is_causal=True)
    compiled, graphs = graphs_of(attend)
    for seed in (3, 4, 5):
        inputs = case.query, case.key, case.value, torch.tensor([seed])
        torch.testing.assert_close(compiled(*inputs), attend(*inputs))
    assert len(graphs) == 1


@torch.no_grad()
@pytest.mark.parametrize(
    ("keys", "is_causal"),
    [("as queries", False), ("more", True), ("any", True)],
)
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=IDS)
def test_export_with_a_dynamic_length(estimator, is_causal, keys):
    """Samples at all lengths, since a graph for all can hold only one of the two."""

    def inputs(n, n_k=None, batch=2):
        case = attention_inputs(n, n_k, 16, 9, batch=batch)
        return case.query, case.key, case.value, torch.tensor([7])

    n_q = torch.export.Dim("n_q", min=1, max=150 if keys == "more" else 4096)
    n_k = torch.export.Dim("n_k", min=151 if keys == "more" else 1, max=4096)
    n_k = n_q if keys == "as queries" else n_k
    traced, sizes = {
        "as queries": ((40, 40), [(1, 1), (130, 130)]),
        "more": ((40, 200), [(1, 151), (150, 151), (130, 300)]),
        "any": ((40, 200), [(1, 1), (1, 2), (130, 40), (40, 41), (50, 50)]),
    }[keys]
    attend = Attend(estimator, is_causal)
    shapes = ({2: n_q}, {2: n_k}, {2: n_k}, None)
    program = torch.export.export(attend, inputs(*traced), dynamic_shapes=shapes).module()
    sampling = {"sampled": {"expectation": "never"}, "colliding": {"exact_up_to": 0}}
    attend = Attend(replace(estimator, **sampling.get(estimator.name, {})), is_causal)
    for given in (inputs(*size) for size in sizes):
        torch.testing.assert_close(program(*given), attend(*given))


@torch.no_grad()
@pytest.mark.parametrize(
    ("estimator", "parameters"),
    [
        (Colliding(n_bits=4), {"scale": torch.tensor(12.0)}),
        (Expected(unit_norm="lift"), {"lift_scale": torch.tensor(900.0)}),
        (Expected(unit_norm="lift", lift_scale="auto"), {}),
    ],
    ids=["scale", "lift_scale", "auto"],
)
def test_export_of_scales(estimator, parameters):
    attend = Attend(estimator, False, **parameters)
    shapes = (*({2: torch.export.Dim("length", min=2, max=65536)},) * 3, None)
    x, longer = (torch.randn(1, 1, n, 8) for n in (300, 2000))
    program = torch.export.export(attend, (x, x, x, torch.tensor([7])), dynamic_shapes=shapes)
    given = longer, longer, longer, torch.tensor([7])
    torch.testing.assert_close(program.module()(*given), attend(*given))


@torch.no_grad()
def test_a_longest_length_limits_no_graph():
    x = torch.randn(1, 1, 40, 8)
    attend = Attend(Sampled(max_length=64, n_hashes=4, expectation="never"), False)
    shapes = (*({2: torch.export.Dim("length", min=1, max=4096)},) * 3, None)
    program = torch.export.export(attend, (x, x, x, torch.tensor([7])), dynamic_shapes=shapes)
    longer = (*[torch.randn(1, 1, 100, 8)] * 3, torch.tensor([7]))
    with pytest.warns(match="longer than max_length"):
        torch.testing.assert_close(program.module()(*longer), attend(*longer))


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=IDS)
def test_compiled_gradients_at_an_offset(estimator):
    case = attention_inputs(9, 40, 16, 7)
    attend = Attend(estimator, is_causal=True)
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    results = []
    for function in (attend, compiled):
        inputs = [x.detach().requires_grad_() for x in (case.query, case.key, case.value)]
        out = function(*inputs, torch.tensor([3]))
        results.append((out, *torch.autograd.grad(out, inputs, case.grad_out)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
