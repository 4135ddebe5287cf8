"""Small random models of transformers for the tests."""

import pytest
import torch
import transformers
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
    T5GemmaModuleConfig,
)

VOCABULARY = 61
IMPLEMENTATIONS = ("lshkit_yoso", "lshkit_lsh", "lshkit_bert_lsh")
# Options with which nothing is estimated, and the implementation that computes the same.
EXACT = {
    "lshkit_yoso": ({"estimator": "expected", "n_bits": 8}, "formula"),
    "lshkit_lsh": ({"window": 1000, "n_sinks": 1000}, "eager"),
    "lshkit_bert_lsh": ({"n_bits": 1, "n_hashes": 300}, "eager"),
}
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_ENCODER_DECODER = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def bert(n_layers=2, **options):
    return BertForMaskedLM(BertConfig(**_SIZES, num_hidden_layers=n_layers, **options))


def llama(n_layers=2, **options):
    """With grouped heads."""
    sizes = {**_SIZES, "num_hidden_layers": n_layers, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **options))


def mistral(n_layers=2, **options):
    sizes = {**_SIZES, "num_hidden_layers": n_layers, "num_key_value_heads": 2}
    return MistralForCausalLM(MistralConfig(**sizes, **options))


def llama4(n_layers=2, **options):
    """With attention in chunks."""
    sizes = {**_SIZES, "num_hidden_layers": n_layers, "num_key_value_heads": 2, "head_dim": 8}
    sizes |= {"intermediate_size_mlp": 32, "num_local_experts": 2}
    return Llama4ForCausalLM(Llama4TextConfig(**sizes, **options))


def bart(n_layers=2, **options):
    sizes = {
        f"{side}_{name}": size
        for side in ("encoder", "decoder")
        for name, size in (("layers", n_layers), ("attention_heads", 4), ("ffn_dim", 32))
    }
    config = BartConfig(**_ENCODER_DECODER, **sizes, forced_eos_token_id=None, **options)
    return BartForConditionalGeneration(config)


def t5(n_layers=2, **options):
    config = T5Config(
        **_ENCODER_DECODER,
        d_kv=8,
        num_heads=4,
        d_ff=32,
        num_layers=n_layers,
        is_gated_act=True,
        **options,
    )
    return T5ForConditionalGeneration(config)


def t5gemma(n_layers=2, attn_logit_softcapping=None, lshkit=None, **options):
    """With grouped heads and rotary positions, and without the soft cap of its scores."""
    sides = [
        T5GemmaModuleConfig(
            **_SIZES,
            num_key_value_heads=2,
            head_dim=8,
            query_pre_attn_scalar=8,
            attn_logit_softcapping=attn_logit_softcapping,
            final_logit_softcapping=None,
            layer_types=["full_attention"] * n_layers,
            num_hidden_layers=n_layers,
            **({} if lshkit is None else {"lshkit": lshkit}),
        )
        for _ in range(2)
    ]
    config = T5GemmaConfig(encoder=sides[0], decoder=sides[1], **options)
    config.decoder_start_token_id = config.bos_token_id = 1
    config.pad_token_id, config.eos_token_id = 0, None
    return T5GemmaForConditionalGeneration(config)


def gemma4(n_layers=4, window=4, **options):
    """Its last two layers have the keys of the first two, and only the queries of wanted logits."""
    if not hasattr(transformers, "Gemma4TextConfig"):
        pytest.skip("this transformers has no Gemma 4")
    sizes = {**_SIZES, "num_hidden_layers": n_layers, "num_key_value_heads": 2, "head_dim": 8}
    sizes |= {"global_head_dim": 16, "num_kv_shared_layers": 2, "sliding_window": window}
    sizes |= {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
    sizes |= {"layer_types": ["sliding_attention", "full_attention"] * (n_layers // 2)}
    config = transformers.Gemma4TextConfig(**sizes, initializer_range=0.2, **options)
    return transformers.Gemma4ForCausalLM(config)


FAMILIES = {"bert": bert, "llama": llama, "bart": bart, "t5": t5, "t5gemma": t5gemma}


def combinations(*families):
    """(family, implementation) of those that go together: T5 adds a bias to scores."""
    return [
        (family, implementation)
        for family in families
        for implementation in IMPLEMENTATIONS
        if family != "t5" or implementation == "lshkit_lsh"
    ]


def model(family, implementation, seed=0, **options):
    torch.manual_seed(seed)
    return FAMILIES[family](attn_implementation=implementation, **options).eval()


def tokens(batch=2, n=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (batch, n), generator=generator)


def set_implementation(made, name, options=None):
    made.set_attn_implementation(name)
    for module in made.modules():
        if hasattr(module, "config"):
            module.config.lshkit = options
    return made


def padded(left=False):
    """A mask (2, 24) of seven paddings in the first sequence."""
    mask = torch.ones(2, 24, dtype=torch.int64)
    mask[0, -7:] = 0
    return mask.flip(1) if left else mask
