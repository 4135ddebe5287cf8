"""torch.compile of transformers' models with lshkit's attention: one graph, the same numbers."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from cases.huggingface import IMPLEMENTATIONS, combinations, model, tokens  # noqa: E402
from transformers import StaticCache, YosoConfig, YosoForMaskedLM  # noqa: E402

from lshkit.attention import Soft  # noqa: E402
from lshkit.attention.huggingface import register, repair  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def registered():
    register()


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def padding():
    mask = torch.ones(2, 24, dtype=torch.int64)
    mask[0, 17:] = 0
    return mask


def check_training(made, backend="eager", **given):
    """The compiled loss and its gradients, with the same draw of hash functions."""
    made.train()
    results = []
    for run in (made, torch.compile(made, backend=backend, fullgraph=True)):
        torch.manual_seed(0)
        loss = run(**given).loss
        wanted = [p for p in made.parameters() if p.requires_grad]
        results.append((loss.detach(), *torch.autograd.grad(loss, wanted, allow_unused=True)))
    for expected, got in zip(*results, strict=True):
        if expected is not None:
            assert (expected - got).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("family", "implementation"),
    [*combinations("bert"), ("t5gemma", "lshkit_yoso"), ("llama", "lshkit_yoso")],
)
def test_training(family, implementation):
    options = {} if family == "bert" else {"use_cache": False}
    made = model(family, implementation, n_layers=1)
    check_training(made, input_ids=tokens(), attention_mask=padding(), labels=tokens(), **options)


@pytest.mark.parametrize(
    ("implementation", "own"),
    [
        ("lshkit_yoso", {"n_bits": 6, "expectation": "never"}),
        ("lshkit_yoso", {"estimator": "soft", "n_probes": [2, 3], "n_hashes_eval": 8}),
        ("lshkit_yoso", {"estimator": Soft(n_bits=5)}),
        ("lshkit_lsh", {"n_bits": 6, "window": 2}),
        ("lshkit_bert_lsh", {"n_bits": 3}),
    ],
)
def test_options_of_a_model(implementation, own):
    """Options that have changed since are those of the next call."""
    made = model("bert", implementation, n_layers=1)
    made.config.lshkit = own
    given = {"input_ids": tokens(), "attention_mask": padding(), "labels": tokens()}
    if own != {"n_bits": 3}:  # which is trained above
        check_training(made, **given)
    made.eval()
    compiled = torch.compile(made, backend="eager", fullgraph=True)
    with torch.no_grad():
        first = compiled(**given).logits
        assert torch.equal(first, made(**given).logits)
        made.config.lshkit = own | (
            {"normalize": "sum"} if implementation == "lshkit_yoso" else {"n_bits": 2}
        )
        second = compiled(**given).logits
        assert torch.equal(second, made(**given).logits) and not torch.equal(first, second)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_decoding_with_a_static_cache(implementation):
    """Every step is the same graph, and the cache of the uncompiled model works with it."""
    made, ids = model("llama", implementation, n_layers=1), tokens()
    mask = torch.cat((padding().flip(1), torch.ones(2, 8, dtype=torch.int64)), 1)
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph

    results = []
    for step in (made, torch.compile(made, backend=count, fullgraph=True)):
        cache, logits = StaticCache(made.config, 32), []
        with torch.no_grad():
            out = made(ids, attention_mask=mask[:, :24], cache=cache)
            for _ in range(5):
                token = out.logits[:, -1:].argmax(-1)
                out = step(token, attention_mask=mask, cache=cache)
                logits.append(out.logits)
        results.append(torch.cat(logits, 1))
    assert len(graphs) <= 2  # the second where the first saw the cache before its first step
    assert (results[0] - results[1]).abs().max() < 1e-6


def test_a_mask_that_only_eager_code_can_make():
    """Without a mask and a cache positions tell packed sequences apart: a graph break, no error."""
    made = model("llama", "lshkit_yoso", n_layers=1)
    positions = torch.cat((torch.arange(9), torch.arange(15)))[None].expand(2, -1)
    compiled = torch.compile(made, backend="eager")
    with torch.no_grad():
        expected = made(tokens(), use_cache=False, position_ids=positions).logits
        got = compiled(tokens(), use_cache=False, position_ids=positions).logits
    assert torch.equal(expected, got)


@pytest.mark.parametrize("use_expectation", [True, False])
def test_training_of_repaired_models(use_expectation):
    torch.manual_seed(0)
    config = YosoConfig(
        vocab_size=61,
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=3,
        intermediate_size=16,
        max_position_embeddings=32,
        conv_window=3,
        use_expectation=use_expectation,
    )
    made = repair(YosoForMaskedLM(config))
    check_training(made, input_ids=tokens(), attention_mask=padding(), labels=tokens())
