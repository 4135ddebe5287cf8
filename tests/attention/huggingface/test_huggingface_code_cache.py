"""transformers' Cache interface on the cache of codes."""

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")

from cases.huggingface import llama, mistral  # noqa: E402

from lshkit.attention import CodeCache, lsh_attention  # noqa: E402
from lshkit.attention.huggingface import code_cache, register  # noqa: E402

LENGTH = 1100  # beyond what is read in full


@pytest.fixture(scope="module")
def model():
    register()
    torch.manual_seed(0)
    model = llama(max_position_embeddings=4096).eval()
    model.set_attn_implementation("lshkit_cache")
    return model


def ids(n=LENGTH, batch=2, seed=1):
    return torch.randint(2, 61, (batch, n), generator=torch.Generator().manual_seed(seed))


def run(model, cache, tokens, mask=None):
    with torch.no_grad():
        return model(tokens, attention_mask=mask, cache=cache).logits


def exact(model, tokens, mask=None):
    """The logits without a cache."""
    with torch.no_grad():
        return model(tokens, attention_mask=mask, use_cache=False).logits


def padded(tokens, n):
    """The first row shorter by n, with padding on the left."""
    mask = torch.ones_like(tokens)
    mask[0, :n] = 0
    return tokens * mask, mask


def test_layers_with_different_numbers_of_heads():
    if "laguna" not in transformers.CONFIG_MAPPING:
        pytest.skip("this transformers has no Laguna")
    sizes = dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 32)
    heads = {"num_attention_heads_per_layer": [4, 8], "num_key_value_heads": 2, "head_dim": 16}
    tokens = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    config = transformers.AutoConfig.for_model(
        "laguna",
        **(sizes | heads | tokens),
        hidden_size=64,
        shared_expert_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        layer_types=["full_attention"] * 2,
        mlp_layer_types=["dense", "sparse"],
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    options = {"max_new_tokens": 4, "do_sample": False}
    wanted = model.generate(ids(40), **options)
    register()
    model.set_attn_implementation("lshkit_cache")
    assert torch.equal(model.generate(ids(40), cache=code_cache(model), **options), wanted)


def test_generate_is_the_same_where_all_keys_are_read(model):
    tokens, mask = padded(ids(50), 13)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": mask}
    wanted = model.generate(tokens, **options)
    for more in ({}, {"num_beams": 3}):
        wanted = model.generate(tokens, **options, **more)
        cache = code_cache(model)
        assert torch.equal(model.generate(tokens, cache=cache, **options, **more), wanted)
        assert cache.get_seq_length() == 55
        assert cache.batch_size == 2 * more.get("num_beams", 1)
    assert cache.share_read == 1


def test_steps_estimate_the_logits(model):
    tokens, mask = padded(ids(), 31)
    wanted = exact(model, tokens, mask)
    cache = code_cache(model, epsilon=0.05, max_share=0.5)
    # A prompt, a short question read from few keys, and a token.
    parts = [run(model, cache, tokens[:, :1060], mask[:, :1060])]
    parts.append(run(model, cache, tokens[:, 1060:1099], mask[:, :1099]))
    parts.append(run(model, cache, tokens[:, 1099:], mask))
    torch.testing.assert_close(parts[0][1], wanted[1, :1060], rtol=1e-4, atol=1e-4)
    own = torch.cat(parts[1:], 1)
    assert not torch.equal(own, wanted[:, 1060:])
    far = (own - wanted[:, 1060:]).norm(dim=-1) / wanted[:, 1060:].norm(dim=-1)
    assert far.max() < 2 * 0.05  # epsilon, in each of two layers
    assert 0 < cache.share_read < 0.7
    report = cache.report()[1]
    assert report.keys.shape == (2, 4, 1) and (report.keys < LENGTH).all()
    assert (report.error < 0.3).all()


def test_padding_changes_no_bit(model):
    """Of two sequences in a batch each has the logits that it has alone, past the prompt."""
    tokens, mask = padded(ids(), 40)
    together, alone = code_cache(model), code_cache(model)
    # Exact attention of the prompt is rounded by its shape: so the same keys for both.
    run(model, together, tokens[:, :1090], mask[:, :1090])
    run(model, alone, tokens[:1, 40:1090])
    for layer, own in zip(alone.layers, together.layers, strict=True):
        layer.cache.key.copy_(own.cache.key[:1, :, 40:])
        layer.cache.value.copy_(own.cache.value[:1, :, 40:])
    cache, own = together.layers[0].cache, alone.layers[0].cache
    query = torch.randn(2, 4, 1, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(cache.attend(query)[:1], own.attend(query[:1]))


def test_operations_of_the_cache(model):
    tokens = ids()
    cache = code_cache(model)
    assert cache.get_seq_length() == 0 and cache.get_max_length() == -1 and cache.is_croppable
    run(model, cache, tokens[:, :1090])
    wanted = run(model, cache, tokens[:, 1090:])
    assert cache.get_mask_sizes(3, 0) == (LENGTH + 3, 0)
    cache.crop(-10)
    assert cache.get_seq_length() == 1090
    assert torch.equal(run(model, cache, tokens[:, 1090:]), wanted)
    with pytest.raises(ValueError, match="tokens_to_remove"):
        cache.crop(5)
    cache.crop(-10)
    cache.batch_repeat_interleave(2)
    rows = [0, 0, 1, 1]
    assert torch.equal(run(model, cache, tokens[rows, 1090:]), wanted[rows])
    cache.crop(-10)
    cache.reorder_cache(torch.tensor([3, 0]))
    assert torch.equal(run(model, cache, tokens[[1, 0], 1090:]), wanted[[1, 0]])
    cache.crop(-10)
    cache.batch_select_indices(torch.tensor([1]))
    assert cache.batch_size == 1
    assert torch.equal(run(model, cache, tokens[:1, 1090:]), wanted[:1])
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.share_read == 0
    run(model, cache, tokens[:, :1090])
    assert torch.equal(run(model, cache, tokens[:, 1090:]), wanted)


def test_prefill_in_parts(model):
    tokens = ids()
    whole, parts = code_cache(model, max_queries=1), code_cache(model, max_queries=1)
    wanted = run(model, whole, tokens[:, :1099])
    out = [run(model, parts, tokens[:, a:b]) for a, b in ((0, 500), (500, 504), (504, 1099))]
    torch.testing.assert_close(torch.cat(out, 1), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_caches(dtype):
    register()
    torch.manual_seed(0)
    model = llama(max_position_embeddings=4096).eval().to(dtype)
    model.set_attn_implementation("lshkit_cache")
    cache = code_cache(model)
    run(model, cache, ids()[:, :1099])
    assert cache.layers[0].cache.dtype is dtype
    out = run(model, cache, ids()[:, 1099:])
    far = (out - exact(model, ids())[:, 1099:]).float().norm() / out.float().norm()
    assert out.dtype is dtype and far < 2 * 0.1  # epsilon, in each of two layers


def test_prefill_is_lsh_attention_on_the_same_keys_and_seed(model):
    tokens = ids(200)
    options = {"n_bits": 4, "n_hashes": 8, "window": 4}
    cache = code_cache(model, prefill=options, seed=5)
    calls = []

    layer = cache.layers[1]
    original = layer.attend

    def attend(query, mask, scaling):
        out = original(query, mask, scaling)
        calls.append((query, out))
        return out

    layer.attend = attend
    run(model, cache, tokens)
    (query, out), own = calls[0], layer.cache
    wanted = lsh_attention(
        *(query, own.key, own.value), is_causal=True, enable_gqa=True, seed=own.seed, **options
    )
    assert own.seed == 6 and torch.equal(out, wanted)


def test_state_dict(model, tmp_path):
    tokens, mask = padded(ids(), 12)
    cache = code_cache(model)
    run(model, cache, tokens[:, :1090], mask[:, :1090])
    torch.save(cache.state_dict(), tmp_path / "cache.pt")
    other = code_cache(model)
    other.load_state_dict(torch.load(tmp_path / "cache.pt", weights_only=True))
    last = tokens[:, 1090:], mask
    assert torch.equal(run(model, other, *last), run(model, cache, *last))
    with pytest.raises(ValueError, match="epsilon=0.1"):
        code_cache(model, epsilon=0.2).load_state_dict(cache.state_dict())
    with pytest.raises(ValueError, match="seed"):
        code_cache(model, seed=3).load_state_dict(cache.state_dict())
    with pytest.raises(ValueError, match="2 layers"):
        other.load_state_dict({"7.key": torch.zeros(1)})
    with pytest.raises(ValueError, match="key"):
        other.load_state_dict({})


def test_a_filled_cache_is_pickled_without_its_model(model):
    cache = code_cache(model)
    run(model, cache, ids(20))
    other = pickle.loads(pickle.dumps(cache))
    copied = copy.deepcopy(cache)
    wanted = run(model, cache, ids(1))
    assert torch.equal(run(model, other, ids(1)), wanted)
    assert torch.equal(run(model, copied, ids(1)), wanted)


def test_a_cache_of_another_model(model):
    cache = code_cache(model)
    run(model, cache, ids(20))
    torch.manual_seed(1)
    other = llama(max_position_embeddings=4096).eval()
    other.set_attn_implementation("lshkit_cache")
    with pytest.raises(ValueError, match="cache must be of this model"):
        run(other, cache, ids(1))
    wanted = run(model, copy.deepcopy(cache), ids(1))
    hole = torch.ones(2, 21, dtype=torch.long)
    hole[:, 9] = 0
    with pytest.raises(NotImplementedError, match="a 0 behind a 1"):
        run(model, cache, ids(1), hole)
    assert [layer.get_seq_length() for layer in cache.layers] == [20] * len(cache.layers)
    assert torch.equal(run(model, cache, ids(1)), wanted)
    # A call that is refused fills nothing, and does not say whose the cache is.
    cache = code_cache(model)
    with pytest.raises(NotImplementedError, match="a 0 behind a 1"):
        run(other, cache, ids(21), hole)
    run(model, cache, ids(20, batch=3))
    half = llama(max_position_embeddings=4096).eval().half()
    half.set_attn_implementation("lshkit_cache")
    cache = code_cache(model)
    run(model, cache, ids(20))
    with pytest.raises(TypeError, match="dtype"):
        run(half, cache, ids(1))


@pytest.mark.parametrize("implementation", ["sdpa", "lshkit_lsh"])
def test_keys_of_a_model_with_another_attention(model, implementation):
    """They are noticed by the call that follows."""
    torch.manual_seed(1)
    other = llama(max_position_embeddings=4096).eval()
    other.set_attn_implementation(implementation)
    cache = code_cache(model)
    wanted = run(model, cache, ids(20))
    run(other, cache, ids(3))
    with pytest.raises(RuntimeError, match="not read by lshkit_cache"):
        run(model, cache, ids(1))
    cache.reset()
    assert torch.equal(run(model, cache, ids(20)), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(model, dtype):
    """Rotated keys are float32 there, values 16-bit."""
    tokens = ids()
    with torch.autocast("cpu", dtype):
        wanted = exact(model, tokens)[:, 1095:].float()
        cache = code_cache(model, epsilon=0.05, max_share=0.5)
        run(model, cache, tokens[:, :1095])
        steps = run(model, cache, tokens[:, 1095:]).float()
    assert cache.layers[0].cache.dtype is torch.float32 and cache.share_read < 0.7
    far = (steps - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert 0 < far.max() < 2 * 0.05  # epsilon, in each of two layers


def test_keys_that_a_model_changes_behind_the_cache():
    """Multi-head latent attention: what the cache holds is no key, and all is exact."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "v_head_dim": 16}
    sizes |= {"q_lora_rank": 16, "kv_lora_rank": 16, "moe_intermediate_size": 32}
    sizes |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    sizes |= {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.DeepseekV3Config(**sizes, first_k_dense_replace=2, n_routed_experts=8)
    torch.manual_seed(0)
    made = transformers.DeepseekV3ForCausalLM(config).eval()
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    wanted = made.generate(ids(30), **options)
    made.set_attn_implementation("lshkit_cache")
    assert torch.equal(made.generate(ids(30), cache=code_cache(made), **options), wanted)


@torch.no_grad()
def test_values_that_a_model_changes_behind_the_cache():
    """Differential attention reads halves of two heads: all is exact."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    made = transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**sizes)).eval()
    wanted = made(ids(40)).logits
    made.set_attn_implementation("lshkit_cache")
    cache = code_cache(made)
    prompt = made(ids(40)[:, :38], cache=cache).logits
    steps = [made(ids(40)[:, i : i + 1], cache=cache).logits for i in (38, 39)]
    torch.testing.assert_close(torch.cat([prompt, *steps], 1), wanted, rtol=0, atol=1e-4)
    with pytest.raises(TypeError, match="attention_mask must be boolean or of floats"):
        run(made, cache, ids(3), torch.ones(1, 1, 3, 43, dtype=torch.int64))
    assert [layer.get_seq_length() for layer in cache.layers] == [40, 40]


BART = {"encoder_layers": 1, "decoder_layers": 1, "decoder_attention_heads": 4}


@pytest.mark.parametrize(
    ("kind", "sizes"), [("Bart", BART), ("T5", {"num_layers": 1, "num_heads": 4, "d_kv": 8})]
)
def test_a_model_with_an_encoder_is_told_what_its_cache_is(kind, sizes):
    """Also where scores have a bias, for which attention is exact."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64, d_model=32, encoder_attention_heads=4, pad_token_id=0, **sizes
    )
    made = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    options = {"max_new_tokens": 3, "do_sample": False, "decoder_start_token_id": 1}
    wanted = made.generate(ids(9), **options)
    made.set_attn_implementation("lshkit_cache")
    with pytest.raises(ValueError, match="EncoderDecoderCache"):
        made.generate(ids(9), cache=code_cache(made), **options)
    both = transformers.EncoderDecoderCache(code_cache(made), transformers.DynamicCache())
    assert torch.equal(made.generate(ids(9), cache=both, **options), wanted)


def test_a_call_refused_for_its_mask_leaves_the_cache(model):
    cache = code_cache(model)
    run(model, cache, ids(20))
    wanted = run(model, copy.deepcopy(cache), ids(1))
    with pytest.raises(TypeError, match="attention_mask must be boolean or of floats"):
        run(model, cache, ids(3), torch.ones(2, 1, 3, 23, dtype=torch.int64))
    assert cache.layers[0].get_seq_length() == 20
    assert torch.equal(run(model, cache, ids(1)), wanted)


def test_a_call_refused_for_its_gradients(model):
    made = copy.deepcopy(model)
    for parameter in made.parameters():
        parameter.requires_grad_(False)
    made.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
    cache = code_cache(made)
    run(made, cache, *padded(ids(20), 3))
    wanted = run(made, copy.deepcopy(cache), ids(1), padded(ids(21), 3)[1])
    with pytest.raises(RuntimeError, match="requires grad"):
        made(ids(1), cache=cache)
    assert [layer.get_seq_length() for layer in cache.layers] == [20] * len(cache.layers)
    assert torch.equal(run(made, cache, ids(1), padded(ids(21), 3)[1]), wanted)


def test_a_call_refused_behind_a_layer_that_keeps_it():
    register()
    options = {
        **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 32},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"use_sliding_window": True, "sliding_window": 8},
    }
    kinds = ["sliding_attention", "full_attention"]
    config = transformers.Qwen2Config(layer_types=kinds, **options)
    model = transformers.Qwen2ForCausalLM(config).eval()
    model.set_attn_implementation("lshkit_cache")
    cache = code_cache(model)
    run(model, cache, ids(20))
    hole = torch.ones(2, 21, dtype=torch.long)
    hole[:, 9] = 0
    with pytest.raises(NotImplementedError, match="a 0 behind a 1"):
        run(model, cache, ids(1), hole)
    with pytest.raises(RuntimeError, match="hold different lengths"):
        run(model, cache, ids(1))
    cache.reset()
    run(model, cache, ids(20))


def test_a_model_and_its_cache_copied_together(model):
    cache = code_cache(model)
    run(model, cache, ids(20))
    wanted = run(model, copy.deepcopy(cache), ids(1))
    assert torch.equal(run(*copy.deepcopy((model, cache)), ids(1)), wanted)


def test_masks_that_it_cannot_hold(model):
    tokens = ids(30)
    right = torch.ones_like(tokens)
    right[0, 20:] = 0
    hole = torch.ones_like(tokens)
    hole[0, 5] = 0
    for mask in (right, hole):
        with pytest.raises(NotImplementedError, match="padding on the left"):
            run(model, code_cache(model), tokens, mask)
    pairs = torch.ones(2, 1, 30, 30, dtype=torch.bool).tril()
    with pytest.raises(NotImplementedError, match="masks of pairs"):
        run(model, code_cache(model), tokens, pairs)


def test_sliding_windows_stay_exact():
    register()
    torch.manual_seed(0)
    model = mistral(sliding_window=16).eval()
    model.set_attn_implementation("lshkit_cache")
    tokens = ids(60)
    cache = code_cache(model)
    parts = [run(model, cache, tokens[:, :50]), run(model, cache, tokens[:, 50:])]
    torch.testing.assert_close(torch.cat(parts, 1), exact(model, tokens), rtol=1e-4, atol=1e-4)
    with pytest.raises(NotImplementedError, match="sliding"):
        cache.state_dict()


def test_bad_options(model):
    bad = [
        ({"epsilon": 2}, ValueError, "epsilon"),
        ({"tables": 2}, TypeError, "tables"),
        ({"max_queries": 0}, ValueError, "max_queries"),
        ({"seed": -1}, ValueError, "seed"),
        ({"prefill": {"bits": 1}}, TypeError, "prefill"),
        ({"prefill": {"n_bits": 99}}, ValueError, "n_bits must be an integer from 1 to 16"),
    ]
    for options, error, message in bad:
        with pytest.raises(error, match=message):
            code_cache(model, **options)
    with pytest.raises(TypeError, match="model"):
        code_cache(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="set_attn_implementation"):
        code_cache(llama())
    assert CodeCache(1, 1, 8, seed=0).positions == 0
