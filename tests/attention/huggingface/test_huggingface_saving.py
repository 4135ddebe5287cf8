"""`save_pretrained` of a model, and which attention function the loaded one has."""

import json

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from cases.huggingface import model, tokens  # noqa: E402
from transformers import AttentionInterface  # noqa: E402

from lshkit.attention.huggingface import keep_attn_implementation, register  # noqa: E402

CONFIG = "config.json"


@pytest.fixture(autouse=True)
def registered():
    register()


def implementations(made):
    """Of the model and of the parts of its config."""
    parts = (getattr(made.config, part) for part in made.config.sub_configs)
    return [x._attn_implementation for x in (made.config, *parts)]


@pytest.mark.parametrize("name", ["lshkit_yoso", "lshkit_lsh"])
@pytest.mark.parametrize("family", ["bert", "llama", "t5gemma"])
def test_a_model_keeps_its_function(family, name, tmp_path):
    made = keep_attn_implementation(model(family, name))
    made.save_pretrained(tmp_path)
    again = type(made).from_pretrained(tmp_path).eval()
    assert implementations(again) == implementations(made)
    assert name in implementations(again)
    other = type(made).from_pretrained(tmp_path, attn_implementation="eager")
    assert not any(x.startswith("lshkit") for x in implementations(other))
    if family != "t5gemma":
        with torch.no_grad():
            assert torch.equal(again(tokens()).logits, made.eval()(tokens()).logits)


def test_without_it_transformers_forgets(tmp_path):
    """What keep_attn_implementation is for. If this fails, transformers keeps it by itself."""
    made = model("bert", "lshkit_yoso")
    made.save_pretrained(tmp_path)
    assert type(made).from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_another_function_removes_the_entry(tmp_path):
    made = keep_attn_implementation(model("bert", "lshkit_yoso"))
    made.set_attn_implementation("sdpa")
    keep_attn_implementation(made).save_pretrained(tmp_path)
    assert "attn_implementation" not in json.loads((tmp_path / CONFIG).read_text())


def test_unregistered_functions_are_an_error(tmp_path, monkeypatch):
    made = keep_attn_implementation(model("bert", "lshkit_yoso"))
    made.save_pretrained(tmp_path)
    monkeypatch.delitem(AttentionInterface._global_mapping, "lshkit_yoso")
    with pytest.raises(ValueError, match="lshkit_yoso"):
        type(made).from_pretrained(tmp_path)


def test_only_models_of_transformers():
    with pytest.raises(TypeError, match="model must have a config of transformers, got Linear"):
        keep_attn_implementation(torch.nn.Linear(2, 2))
