"""transformers' own YOSO models, repaired, against the published formulas."""

import copy
import math
import sys
import types

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from transformers import (  # noqa: E402
    BertConfig,
    BertModel,
    YosoConfig,
    YosoForMaskedLM,
    YosoForMultipleChoice,
    YosoForQuestionAnswering,
    YosoForSequenceClassification,
    YosoForTokenClassification,
    YosoModel,
)

from lshkit.attention.huggingface import register, repair  # noqa: E402

N = 21
SAMPLED = {"use_expectation": False, "num_hash": 16, "hash_code_len": 4}


def yoso(kind=YosoModel, repaired=True, **options):
    torch.manual_seed(0)
    config = YosoConfig(
        vocab_size=61,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=16,
        max_position_embeddings=32,
        **options,
    )
    made = kind(config).eval()
    return repair(made) if repaired else made


def tokens(seed=0):
    return torch.randint(3, 61, (2, N), generator=torch.Generator().manual_seed(seed))


def padding():
    mask = torch.ones(2, N, dtype=torch.int64)
    mask[0, 15:] = 0
    return mask


class Formula(nn.Module):
    """Self-attention of a YosoSelfAttention's parameters: YOSO-E and the convolution of YOSO-C."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, mask, *_):
        layer, size = self.layer, self.layer.attention_head_size
        q, k, v = (
            project(x).view(*x.shape[:2], -1, size).transpose(1, 2)
            for project in (layer.query, layer.key, layer.value)
        )
        cosine = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-1, -2)
        weight = (1 - torch.acos(cosine.clamp(-1, 1)) / math.pi) ** layer.hash_code_len
        weight = weight * mask[:, None, :, None] * mask[:, None, None]
        out = F.normalize(weight @ v, dim=-1)
        if layer.use_conv:
            v, window = v * mask[:, None, :, None], layer.conv.weight.shape[2]
            v = F.pad(v, (0, 0, window // 2, window // 2))
            shifted = (
                layer.conv.weight[:, 0, i, :, None] * v[:, :, i : i + N] for i in range(window)
            )
            out = out + sum(shifted)
        return (out.transpose(1, 2).flatten(2),)


def by_formula(made):
    made = copy.deepcopy(made)
    for module in list(made.modules()):
        if type(module).__name__ == "YosoAttention":
            module.self = Formula(module.self)
    return made


@pytest.mark.parametrize("hash_code_len", [9, 3])
@pytest.mark.parametrize("conv_window", [None, 1, 5, 4])
def test_expectation_is_the_formula(conv_window, hash_code_len):
    made = yoso(conv_window=conv_window, hash_code_len=hash_code_len)
    with torch.no_grad():
        for mask in (torch.ones_like(padding()), padding()):
            expected = by_formula(made)(tokens(), attention_mask=mask).last_hidden_state
            got = made(tokens(), attention_mask=mask).last_hidden_state
            assert (got - expected).abs().max() < 1e-5
        full = made(tokens()).last_hidden_state
        assert torch.equal(full, made(tokens(), attention_mask=torch.ones(2, N)).last_hidden_state)


@pytest.mark.parametrize("conv_window", [None, 5])
def test_without_masks_the_original_expectation_is_the_same(conv_window):
    """What the original computes right stays, forward and backward."""
    results = []
    for repaired in (False, True):
        made = yoso(repaired=repaired, conv_window=conv_window)
        out = made(tokens()).last_hidden_state
        results.append((out, *torch.autograd.grad(out.sin().sum(), list(made.parameters()))))
    for expected, got in zip(*results, strict=True):
        assert (expected - got).abs().max() < 2e-5 * max(1, expected.abs().max())


@pytest.mark.parametrize(
    "options",
    [
        {"conv_window": 5},
        SAMPLED,
        {**SAMPLED, "use_fast_hash": False, "conv_window": 3},
        {**SAMPLED, "lsh_backward": False},
    ],
)
def test_padding_changes_no_bit_and_gets_no_gradient(options):
    made, mask = yoso(**options), padding()
    ids, other = tokens(), torch.where(mask == 1, tokens(), tokens(seed=1))
    a, b = (made(x, attention_mask=mask).last_hidden_state[mask.bool()] for x in (ids, other))
    assert torch.equal(a, b) and not torch.equal(ids, other)
    embeddings = made.embeddings.word_embeddings(ids).detach().requires_grad_()
    made.train()
    out = made(inputs_embeds=embeddings, attention_mask=mask).last_hidden_state
    out[mask.bool()].sin().sum().backward()
    assert embeddings.grad[mask.bool()].isfinite().all() and embeddings.grad[mask.bool()].any()
    assert not embeddings.grad[mask == 0].any()


@pytest.mark.parametrize("fast", [True, False])
def test_sampled_path_tends_to_the_expectation(fast):
    errors = []
    with torch.no_grad():
        expected = yoso(hash_code_len=4)(tokens()).last_hidden_state
        for n_hashes in (16, 4096):
            options = {**SAMPLED, "num_hash": n_hashes, "use_fast_hash": fast}
            error = yoso(**options)(tokens()).last_hidden_state - expected
            errors.append(error.square().mean().sqrt())
    assert errors[1] < errors[0] / 8  # a sixteenth with independent hashes
    assert errors[0] > 0


def test_training_draws_hash_functions_and_eval_keeps_them():
    made = yoso(**SAMPLED, hidden_dropout_prob=0.0)
    with torch.no_grad():
        first = made(tokens()).last_hidden_state
        assert torch.equal(first, made(tokens()).last_hidden_state)
        assert torch.equal(first, copy.deepcopy(made)(tokens()).last_hidden_state)
        assert not torch.equal(first, repair(made, seed=5)(tokens()).last_hidden_state)
        made.train()
        assert not torch.equal(made(tokens())[0], made(tokens())[0])
        torch.manual_seed(0)
        first = made(tokens())[0]
        torch.manual_seed(0)
        assert torch.equal(first, made(tokens())[0])


def test_gradient_of_the_expectation_for_sampled_values():
    """lsh_backward=False: the sampled output with the gradient of YOSO-E, but for noise."""
    made = yoso(**{**SAMPLED, "num_hash": 4096}, lsh_backward=False)
    exact = yoso(hash_code_len=4)
    gradients = []
    for each in (made, exact):
        out = each(tokens()).last_hidden_state
        weight = each.encoder.layer[0].attention.self.query.weight
        gradients.append(torch.autograd.grad(out.sin().sum(), weight)[0])
    assert (gradients[0] - gradients[1]).norm() < 0.1 * gradients[1].norm()
    with torch.no_grad():
        sampled = yoso(**{**SAMPLED, "num_hash": 4096})(tokens()).last_hidden_state
        assert (made(tokens()).last_hidden_state - sampled).abs().max() < 1e-5


def test_shared_queries_and_keys():
    """Cosines of 1, whose rounding makes the original's arc cosine NaN."""
    made = yoso()
    for layer in made.encoder.layer:
        layer.attention.self.key = layer.attention.self.query
    out = made(tokens()).last_hidden_state
    out.sum().backward()
    assert out.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in made.parameters())


@pytest.mark.parametrize(
    ("kind", "labels"),
    [
        (YosoForMaskedLM, lambda ids: {"labels": ids}),
        (YosoForSequenceClassification, lambda ids: {"labels": ids[:, 0] % 2}),
        (YosoForTokenClassification, lambda ids: {"labels": ids % 2}),
        (
            YosoForQuestionAnswering,
            lambda ids: {"start_positions": ids[:, 0] * 0, "end_positions": ids[:, 0] * 0 + 3},
        ),
        (YosoForMultipleChoice, None),
    ],
)
@pytest.mark.parametrize("options", [{"conv_window": 3}, SAMPLED])
def test_heads_train(kind, labels, options):
    made, ids, mask = yoso(kind, **options).train(), tokens(), padding()
    if labels is None:
        ids, mask = ids[None], mask[None]
        given = {"labels": torch.tensor([1])}
    else:
        given = labels(ids)
    loss = made(input_ids=ids, attention_mask=mask, **given).loss
    loss.backward()
    layer = made.yoso.encoder.layer[0].attention.self
    weights = [layer.query.weight, layer.key.weight, layer.value.weight]
    if layer.use_conv:
        weights.append(layer.conv.weight)
    assert loss.isfinite() and all(w.grad.isfinite().all() and w.grad.any() for w in weights)


def test_checkpoints(tmp_path):
    original = yoso(YosoForMaskedLM, repaired=False, conv_window=3)
    original.save_pretrained(tmp_path / "original")
    names = list(original.state_dict())
    loaded = repair(YosoForMaskedLM.from_pretrained(tmp_path / "original"))
    assert list(loaded.state_dict()) == names
    loaded.save_pretrained(tmp_path / "repaired")
    again = YosoForMaskedLM.from_pretrained(tmp_path / "repaired")
    for name, x in again.state_dict().items():
        assert torch.equal(x, original.state_dict()[name]), name
    again.load_state_dict(loaded.state_dict())
    with torch.no_grad():
        a, b = (m(tokens(), attention_mask=padding()).logits for m in (loaded, repair(again)))
    assert torch.equal(a, b)


def test_attention_weights_are_not_returned():
    out = yoso()(tokens(), output_attentions=True)
    assert out.attentions == (None, None)


def test_unknown_models():
    config = BertConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    with pytest.raises(ValueError, match=r"got BertModel: known is YOSO \(YosoForMaskedLM, Yoso"):
        repair(BertModel(config))
    with pytest.raises(TypeError, match="model must be a torch module, got str"):
        repair("yoso")
    with pytest.raises(ValueError, match="seed must be"):
        repair(yoso(), seed=-1)


def test_wrong_masks():
    made = yoso()
    with pytest.raises(ValueError, match=r"must be \(batch, n\) = \(2, 21\)"):
        made(tokens(), attention_mask=torch.ones(2, N, N))
    with pytest.raises(ValueError, match="1 for a token and 0 for padding, got values from -10000"):
        made(tokens(), attention_mask=(1 - padding()) * -10000.0)


@pytest.mark.parametrize("call", [register, lambda: repair(YosoModel)])
def test_missing_transformers(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="pip install transformers accelerate"):
        call()


def test_old_transformers(monkeypatch):
    old = types.ModuleType("transformers")
    old.__version__ = "4.37.0"
    monkeypatch.setitem(sys.modules, "transformers", old)
    with pytest.raises(ImportError, match="needs transformers 5.24 or newer, got 4.37"):
        register()
