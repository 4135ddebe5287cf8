"""Options of lshkit's attention functions in transformers, and the masks that they refuse."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from cases.huggingface import (  # noqa: E402
    EXACT,
    IMPLEMENTATIONS,
    model,
    padded,
    set_implementation,
    tokens,
)
from torch.nn import functional as F  # noqa: E402
from transformers import AttentionInterface, AttentionMaskInterface  # noqa: E402
from transformers.masking_utils import (  # noqa: E402
    causal_mask_function,
    create_causal_mask,
    or_masks,
)

from lshkit.attention import (  # noqa: E402
    Expected,
    Sampled,
    Soft,
    lsh_attention,
    yoso_attention,
)
from lshkit.attention.huggingface import register  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def registered():
    register(lsh={"exact_steps": False})


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


# --- Options --------------------------------------------------------------------------------------


def test_options_of_register_and_of_a_model():
    made, ids = model("bert", "lshkit_yoso"), tokens()

    def logits(own=None, **options):
        register(yoso={"expectation": "never", **options})
        made.config.lshkit = own
        with torch.no_grad():
            return made(ids).logits

    try:
        plain = logits()
        assert torch.equal(plain, logits(n_hashes_eval=64))
        assert torch.equal(plain, logits(n_hashes=64, n_hashes_eval=None))
        assert not torch.equal(plain, logits(n_bits=5))
        assert torch.equal(logits(n_bits=5), logits({"n_bits": 5}))
        assert torch.equal(logits({"n_bits": 12}, n_bits=5), plain)
        longer = logits(max_length=65_536)  # in the place of n_bits, and the other way round
        assert torch.equal(longer, logits(n_bits=14)) and not torch.equal(longer, plain)
        assert torch.equal(longer, logits({"max_length": 65_536}, n_bits=5))
        assert torch.equal(plain, logits({"n_bits": 12}, max_length=65_536))
    finally:
        register(lsh={"exact_steps": False})


@pytest.mark.parametrize("estimator", [Sampled(expectation="never"), Expected(), Soft(n_bits=6)])
def test_an_estimator_or_its_dict(estimator):
    """And what a call stands for: the function with n_hashes_eval hashes, in eval mode."""
    made, ids = model("bert", "lshkit_yoso"), tokens()
    q, k, v = (
        torch.randn(1, 2, 90, 8, generator=torch.Generator().manual_seed(i)) for i in (0, 1, 2)
    )
    module = torch.nn.Module().eval()
    module.is_causal = False
    forms = (estimator, {"estimator": estimator}, estimator.to_dict())
    results = []
    try:
        for given in forms:
            register(yoso=given)
            with torch.no_grad():
                results.append(made(ids).logits)
        register(yoso={"estimator": estimator, "n_hashes_eval": 100, "seed": 3})
        out, _ = AttentionInterface()["lshkit_yoso"](module, q, k, v, None)
        register()
        made.config.lshkit = estimator.to_dict()
        with torch.no_grad():
            results.append(made(ids).logits)
    finally:
        register(lsh={"exact_steps": False})
    assert all(torch.equal(results[0], other) for other in results[1:])
    expected = yoso_attention(q, k, v, estimator=estimator.for_inference(100), seed=3)
    assert torch.equal(out, expected.transpose(1, 2))


def test_another_estimator_of_a_model():
    """It starts from its own defaults; what stands beside it stays the registered."""
    made, ids = model("bert", "lshkit_yoso"), tokens()

    def logits(own=None, **options):
        register(yoso=options)
        made.config.lshkit = own
        with torch.no_grad():
            return made(ids).logits

    try:
        soft = logits(estimator="soft", normalize="sum")
        own = {"estimator": "soft"}
        assert torch.equal(logits(own, n_bits=3, gradient_hashes=2, normalize="sum"), soft)
        assert not torch.equal(logits(own, n_bits=3), soft)
        wanted = logits(estimator="soft", n_bits=5, n_probes=2)
        assert torch.equal(logits({"n_probes": 2}, estimator="soft", n_bits=5), wanted)
        assert torch.equal(logits({"n_probes": 2}, estimator=Soft(n_bits=5)), wanted)
        assert torch.equal(logits(own | {"n_probes": 2}, estimator="soft", n_bits=5), wanted)
    finally:
        register(lsh={"exact_steps": False})


@pytest.mark.parametrize("is_causal", [False, True])
def test_defaults_are_those_of_the_function(is_causal):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 90, 8, generator=generator) for _ in range(3))
    module = torch.nn.Module().eval()
    module.is_causal = is_causal
    out, _ = AttentionInterface()["lshkit_lsh"](module, q, k, v, None)
    function = lsh_attention(q, k, v, is_causal=is_causal, seed=0)
    assert torch.equal(out, function.transpose(1, 2))


@pytest.mark.parametrize("is_causal", [False, True])
def test_with_a_bias_it_is_softmax_itself(is_causal):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 90, 8, generator=generator).requires_grad_() for _ in range(3))
    bias = torch.randn(1, 2, 90, 90, generator=generator).requires_grad_()
    module = torch.nn.Module().eval()
    module.is_causal = is_causal
    keys = torch.ones(2, 90, dtype=torch.int64)
    keys[1, :30] = 0
    out, _ = AttentionInterface()["lshkit_lsh"](module, q, k, v, keys, position_bias=bias)
    pairs = keys[:, None, None].bool() & (torch.ones(90, 90).tril() > 0 if is_causal else True)
    expected = F.scaled_dot_product_attention(q, k, v, bias.masked_fill(~pairs, -torch.inf))
    differ = (out.transpose(1, 2) - expected).abs() > 1e-5
    assert not differ[0].any() and not differ[1, :, 30:].any()
    assert is_causal == (not out[1, :30].any())  # a query without a key: zeros
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v, bias))


def test_options_of_a_model_are_saved(tmp_path):
    made = model("llama", "lshkit_yoso", lshkit={"n_bits": 5})
    made.save_pretrained(tmp_path)
    again = type(made).from_pretrained(tmp_path, attn_implementation="lshkit_yoso")
    assert again.config.lshkit == {"n_bits": 5}
    with torch.no_grad():
        assert torch.equal(again(tokens()).logits, made(tokens()).logits)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"yoso": {"bits": 8}},
            TypeError,
            "yoso has an unknown option 'bits'; lshkit_yoso with 'sampled' has estimator, unit_norm"
            ", lift_scale, n_bits, n_hashes, .*, normalize, seed, n_hashes_eval",
        ),
        (
            {"yoso": {"estimator": "soft", "gradient": "unbiased"}},
            TypeError,
            "yoso has an unknown option 'gradient'; lshkit_yoso with 'soft' has .* n_probes",
        ),
        (
            {"yoso": {"estimator": Soft(), "n_bits": 8, "sharpness": 1.0}},
            TypeError,
            r"yoso must not have \['n_bits', 'sharpness'\] beside an estimator that has",
        ),
        ({"yoso": {"estimator": Sampled}}, ValueError, "estimator of yoso must be one of"),
        ({"lsh": {"n_hashes_eval": 8}}, TypeError, "lsh has an unknown option"),
        ({"bert_lsh": {"n_bits": 17}}, ValueError, "n_bits must be an integer from 1 to 16"),
        ({"yoso": {"estimator": "exact"}}, ValueError, "estimator of yoso must be one of"),
        ({"yoso": {"n_bits": 17}}, ValueError, "n_bits must be an integer from 1 to 16"),
        ({"yoso": {"normalize": "l1"}}, ValueError, "normalize must be one of"),
        ({"yoso": {"n_hashes_eval": 0}}, ValueError, "n_hashes_eval must be"),
        ({"yoso": {"estimator": "expected", "n_hashes_eval": 0}}, ValueError, "n_hashes_eval must"),
        ({"yoso": {"seed": -1}}, ValueError, "seed must be"),
        ({"lsh": {"exact_steps": 1}}, TypeError, "exact_steps must be"),
        ({"yoso": 8}, TypeError, "yoso must be an estimator or a dict of options, got int"),
        ({"lsh": Soft()}, TypeError, "lsh must be a dict of options, got Soft"),
    ],
)
def test_wrong_options(options, error, message):
    with pytest.raises(error, match=message):
        register(**options)


def test_wrong_options_of_a_model():
    made = model("bert", "lshkit_yoso")
    for own, message in (
        ({"bits": 8}, "config.lshkit has an unknown option 'bits'"),
        (8, "config.lshkit must be an estimator or a dict of options, got int"),
    ):
        made.config.lshkit = own
        with pytest.raises(TypeError, match=message):
            made(tokens())


@pytest.mark.parametrize("n_q", [3, 4, 7])
def test_causal_queries_before_the_first_key_give_zeros(n_q):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 8, generator=generator) for n in (n_q, 3, 3))
    module = torch.nn.Module().eval()
    bias = torch.zeros(1, 2, n_q, 3)
    out, _ = AttentionInterface()["lshkit_lsh"](module, q, k, v, None, position_bias=bias)
    expected = F.scaled_dot_product_attention(q[:, :, -3:], k, v, is_causal=True)
    assert (out[:, -3:].transpose(1, 2) - expected).abs().max() < 1e-5
    assert not out[:, :-3].any()


# --- Refusals -------------------------------------------------------------------------------------


def test_masks_of_pairs():
    """With them "lshkit_lsh" is softmax attention; the others refuse them."""
    ids = tokens()
    mask = torch.rand(2, 1, 24, 24, generator=torch.Generator().manual_seed(0)) < 0.5
    mask |= torch.eye(24, dtype=torch.bool)
    made = model("bert", "eager")
    floats = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    for given in (mask, floats):
        for name in ("lshkit_yoso", "lshkit_bert_lsh"):
            set_implementation(made, name)
            with pytest.raises(NotImplementedError, match=f"{name} can't .* forms no matrix of"):
                made(ids, attention_mask=given)
        with torch.no_grad():
            expected = set_implementation(made, "eager")(ids, attention_mask=floats).logits
            got = set_implementation(made, "lshkit_lsh")(ids, attention_mask=given).logits
        assert (got - expected).abs().max() < 2e-5


def test_free_places_of_a_static_cache():
    """With a pattern of pairs."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 24, 8, generator=generator) for _ in range(3))
    free = [torch.cat((x, torch.zeros(1, 4, 40, 8)), 2) for x in (k, v)]
    module = torch.nn.Module().eval()
    module.is_causal = True
    attend, mask = AttentionInterface()["lshkit_lsh"], AttentionMaskInterface()["lshkit_lsh"]
    pattern = or_masks(causal_mask_function, lambda batch, head, query, key: key < 3)
    whole = mask(1, 24, 24, mask_function=pattern)
    expected, _ = attend(module, q, k, v, whole)
    for first, n in ((0, 24), (0, 9), (9, 14), (23, 1)):
        place = torch.tensor(first)
        part = mask(1, n, 64, q_offset=place, mask_function=pattern)
        assert part.shape == (1, 1, n, first + n)
        out, _ = attend(module, q[:, :, first : first + n], *free, part)
        assert (out - expected[:, first : first + n]).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["lshkit_yoso", "lshkit_bert_lsh"])
def test_a_mask_of_pairs_of_a_single_query_is_refused_too(name):
    x = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([1, 1, 0, 0, 1], dtype=torch.uint8)[None, None, None]
    module = torch.nn.Module().eval()
    with pytest.raises(NotImplementedError, match="forms no matrix of pairs"):
        AttentionInterface()[name](module, x[:, :, :1], x, x, mask)


@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("form", ["keys", "pairs", "bias"])
@pytest.mark.parametrize("n_q", [1, 2])
def test_what_a_masked_key_holds(n_q, form, where):
    """NaN, with the default options, in which a single query is exact."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, 8, generator=generator) for n in (n_q, 6, 6))
    module = torch.nn.Module().eval()
    module.is_causal = False
    module.config = SimpleNamespace(lshkit={"exact_steps": True, "window": 6, "n_sinks": 6})
    mask = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    mask[0, ..., 4:] = False
    mask[1] = False  # a row of padding alone
    bias = torch.randn(1, 4, n_q, 6, generator=generator) if form == "bias" else None
    given = mask.expand(-1, 4, n_q, -1) if form == "pairs" else mask
    scores = torch.where(mask, 0.0 if bias is None else bias, -torch.inf)
    expected = F.scaled_dot_product_attention(q, k, v, scores).transpose(1, 2)[0]
    (k if where == "key" else v)[0, :, 4:] = torch.nan
    attend = AttentionInterface()["lshkit_lsh"]
    out, _ = attend(module, q, k, v, given, position_bias=bias)
    assert (out[0] - expected).abs().max() < 1e-5
    assert not out[1].any()


@pytest.mark.parametrize("name", ["lshkit_yoso", "lshkit_lsh", "lshkit_bert_lsh"])
def test_a_layer_without_an_index(name):
    """Zamba2's shared attention has -1, other models' None: as the first."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 200, 8, generator=generator)
    outs = []
    for index in (0, -1, None):
        module = torch.nn.Module().eval()
        module.is_causal, module.layer_idx = True, index
        outs.append(AttentionInterface()[name](module, x, x, x, None)[0])
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


def test_a_key_that_is_not_finite_is_ignored():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 6, 8, generator=generator) for _ in range(3))
    module = torch.nn.Module().eval()
    module.is_causal = False
    attend = AttentionInterface()["lshkit_lsh"]
    without = torch.tensor([True, True, False, True, True, True])
    expected, _ = attend(module, q, k, v, without[None, None, None])
    k[:, :, 2] = torch.nan
    out, _ = attend(module, q, k, v, None)
    assert (out - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("implementation", "options"),
    [
        ("lshkit_lsh", {"n_bits": 6, "n_hashes": 4, "n_sinks": 0, "exact_steps": False}),
        ("lshkit_yoso", {"estimator": "colliding", "n_bits": 6, "n_hashes": 4, "exact_up_to": 0}),
    ],
)
def test_cross_attention_has_no_positions(implementation, options):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 8, generator=generator) for n in (5, 9, 9))
    module = torch.nn.Module().eval()
    module.is_causal = False
    module.config = SimpleNamespace(lshkit=options)
    attend, order = AttentionInterface()[implementation], torch.arange(9).flip(0)
    expected, _ = attend(module, q, k, v, None)
    out, _ = attend(module, q, k[:, :, order], v[:, :, order], None)
    assert expected.any() and (out - expected).abs().max() < 1e-5


def test_masks_of_integers(implementation):
    """A user's 0 and 1 are not one of the masks that are made here, which are of integers too."""
    attend, x = AttentionInterface()[implementation], torch.randn(2, 1, 6, 4)
    for shape in ((2, 1, 1, 6), (2, 1, 2, 6)):
        query = x[:, :, : shape[2]]
        for given in (torch.ones(shape).int(), torch.zeros(shape).int()):
            with pytest.raises(TypeError, match="must be boolean or of floats"):
                attend(torch.nn.Module(), query, x, x, given)
    with pytest.raises(TypeError, match=r"attention_mask \(batch, keys\) must be boolean or"):
        attend(torch.nn.Module(), x, x, x, torch.zeros(2, 6))


def test_masks_of_each_head():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 9, 8, generator=generator) for h in (4, 2, 2))
    mask = torch.rand(2, 4, 9, 9, generator=generator) < 0.5
    mask |= torch.eye(9, dtype=torch.bool)
    expected = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)
    try:
        register(lsh=EXACT["lshkit_lsh"][0])
        attend = AttentionInterface()["lshkit_lsh"]
        assert (attend(torch.nn.Module(), q, k, v, mask)[0] - expected).abs().max() < 1e-5
    finally:
        register(lsh={"exact_steps": False})


def test_masks_that_a_model_changes(implementation):
    """It gets all of the mask if it asks for it; what it has made of another is noticed."""
    made, ids = model("llama", implementation), tokens()
    given = {
        "config": made.config,
        "inputs_embeds": made.model.embed_tokens(ids),
        "attention_mask": padded(),
        "cache": None,
    }
    mask = create_causal_mask(**given, allow_is_causal_skip=False)
    assert torch.equal(mask, torch.ones(24, 24).bool().tril() & padded()[:, None, None].bool())
    mask = create_causal_mask(**given)
    changed = torch.cat((mask, torch.ones(2, 1, 1, 5, dtype=torch.bool)), -1)
    attend, x = AttentionInterface()[implementation], torch.zeros(2, 1, 29, 4)
    with pytest.raises(NotImplementedError, match="changes its causal mask in a way that lshkit"):
        attend(torch.nn.Module(), x[:, :, :24], x, x, changed)


def test_padding_masks_of_floats():
    made, ids, mask = model("bert", "lshkit_yoso"), tokens(), padded()
    with torch.no_grad():
        expected = made(ids, attention_mask=mask).logits
        floats = torch.where(mask[:, None, None] == 1, 0.0, torch.finfo(torch.float32).min)
        assert torch.equal(expected, made(ids, attention_mask=floats).logits)
        with pytest.raises(ValueError, match="must be 0 or at most -10000"):
            made(ids, attention_mask=floats.clamp(-3))


def test_patterns_of_pairs():
    made, ids = model("llama", "lshkit_yoso"), tokens()
    given = {
        "config": made.config,
        "inputs_embeds": made.model.embed_tokens(ids),
        "attention_mask": None,
        "cache": None,
        "or_mask_function": lambda batch, head, query, key: key < 3,
    }
    with pytest.raises(NotImplementedError, match="lshkit_yoso can't apply a mask of query-key"):
        create_causal_mask(**given)
    made.set_attn_implementation("lshkit_lsh")
    mask = create_causal_mask(**given)
    assert mask.shape == (2, 1, 24, 24) and mask[:, :, :, :3].all() and not mask[0, 0, 4, 5]


def test_refused_arguments():
    ids = tokens()
    with pytest.raises(NotImplementedError, match="can't take position_bias: a bias is added"):
        model("t5", "lshkit_yoso")(ids, labels=ids)
    capped = model("t5gemma", "lshkit_lsh", attn_logit_softcapping=50.0)
    with pytest.raises(NotImplementedError, match="can't take softcap: it bounds scores"):
        capped(ids, labels=ids)
    attend = AttentionInterface()["lshkit_lsh"]
    x = torch.zeros(1, 1, 3, 4)
    with pytest.raises(NotImplementedError, match="can't take s_aux"):
        attend(torch.nn.Module(), x, x, x, None, s_aux=torch.zeros(1))
    with pytest.raises(ValueError, match="with up to 3 keys for lshkit_lsh, got"):
        attend(torch.nn.Module(), x, x, x, torch.ones(1, 1, 1, 4, dtype=torch.bool))
    made = model("llama", "lshkit_bert_lsh", lshkit={"faithful": True})
    with pytest.raises(NotImplementedError, match="faithful=True supports only padding masks"):
        made(ids)


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "lshkit_cache"])
def test_models_that_attend_by_themselves_are_refused(implementation):
    sizes = dict(vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    config = transformers.MPNetConfig(**sizes, attn_implementation=implementation)
    with pytest.raises(NotImplementedError, match="MPNetModel can't have attn_implementation"):
        transformers.MPNetModel(config)(tokens())


@torch.no_grad()
@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "lshkit_cache"])
def test_models_whose_text_attends_by_itself_are_refused(implementation):
    """Beside parts that use the interface: they would add masks that are not theirs to add."""
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48)
    vision = sizes | dict(image_size=32, patch_size=8)
    git = transformers.GitConfig(**sizes, vocab_size=61, vision_config=vision)
    sizes = dict(vocab_size=61, d_model=32, encoder_layers=1, decoder_layers=1)
    heads = dict(encoder_attention_heads=4, decoder_attention_heads=4)
    pegasus = transformers.BigBirdPegasusConfig(**sizes, **heads, attention_type="original_full")
    for config, cls in ((git, "GitModel"), (pegasus, "BigBirdPegasusModel")):
        made = getattr(transformers, cls)(config).eval()
        made(tokens())
        made.set_attn_implementation(implementation)
        with pytest.raises(NotImplementedError, match=f"{cls} can't have attn_implementation"):
            made(tokens())


@torch.no_grad()
@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "lshkit_cache"])
def test_models_may_view_the_result(implementation):
    sizes = dict(vocab_size=61, hidden_size=32, num_hidden_layers=1, num_key_value_heads=2)
    config = transformers.JetMoeConfig(**sizes, kv_channels=8, intermediate_size=32)
    config._attn_implementation = implementation
    made = transformers.JetMoeForCausalLM(config).eval()
    assert made(tokens()).logits.isfinite().all()
