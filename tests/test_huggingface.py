"""Models of transformers with lshkit's attention functions: what they compute under which masks."""

import math

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from attention_cases import one_thread  # noqa: E402, F401
from huggingface_cases import (  # noqa: E402
    IMPLEMENTATIONS,
    combinations,
    llama4,
    mistral,
    model,
    tokens,
)
from torch.nn import functional as F  # noqa: E402
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache  # noqa
from transformers.masking_utils import create_causal_mask, sdpa_mask  # noqa: E402

from lshkit.attention.huggingface import register  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ("bert", "llama", "bart", "t5", "t5gemma")
# Options with which nothing is estimated, and the implementation that computes the same.
EXACT = {
    "lshkit_yoso": ({"estimator": "expected"}, "formula"),
    "lshkit_lsh": ({"window": 1000, "n_sinks": 1000}, "eager"),
    "lshkit_bert_lsh": ({"n_bits": 1, "n_hashes": 300}, "eager"),
}


def formula(module, query, key, value, attention_mask, **_):
    """YOSO-E (eq. 1-3), a mask of pairs applied: of the paper alone."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    cosine = F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).transpose(-1, -2)
    weight = (1 - torch.acos(cosine.clamp(-1, 1)) / math.pi) ** 8
    if attention_mask is not None:
        weight = weight * attention_mask
    return F.normalize(weight @ value, dim=-1).transpose(1, 2), None


def pairs(*args, **kwargs):
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(*args, **{**kwargs, **skips})


@pytest.fixture(scope="module", autouse=True)
def registered():
    register(lsh={"exact_steps": False})
    AttentionInterface.register("formula", formula)
    AttentionMaskInterface.register("formula", pairs)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


def set_implementation(made, name, options=None):
    made.set_attn_implementation(name)
    for module in made.modules():
        if hasattr(module, "config"):
            module.config.lshkit = options
    return made


def inputs(family, ids, mask=None, labels=False):
    given = {"input_ids": ids, "attention_mask": mask}
    if labels or family in ("bart", "t5", "t5gemma"):
        given["labels"] = ids
    return given


def padded(left=False):
    """A mask (2, 24) of seven paddings in the first sequence."""
    mask = torch.ones(2, 24, dtype=torch.int64)
    mask[0, -7:] = 0
    return mask.flip(1) if left else mask


# --- What is computed -----------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "implementation"), combinations(*FAMILIES))
def test_forward_backward_and_generation(family, implementation):
    made, ids, mask = model(family, implementation), tokens(), padded(family == "llama")
    made(**inputs(family, ids, mask, labels=True)).loss.backward()
    for name, x in made.named_parameters():
        if any(word in name for word in ("query", "key", "value", "_proj", ".q.", ".k.", ".v.")):
            assert x.grad.isfinite().all(), name
            assert x.grad.any() or name.endswith("bias"), name
    if family != "bert":
        options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
        made = made.double()
        cached = made.generate(ids, **options)
        assert torch.equal(cached, made.generate(ids, use_cache=False, **options))


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize(("family", "implementation"), combinations(*FAMILIES))
def test_equals_all_pairs(family, left, implementation):
    """Where nothing is estimated a model gives what the matrix of all pairs gives."""
    options, other = EXACT[implementation]
    made, ids, mask = model(family, "eager"), tokens(), padded(left)
    with torch.no_grad():
        for given in (mask, None):
            expected = set_implementation(made, other)(**inputs(family, ids, given)).logits
            got = set_implementation(made, implementation, options)(**inputs(family, ids, given))
            kept = slice(None) if given is None or family not in ("bert", "llama") else mask.bool()
            error = (got.logits - expected)[kept].abs().max()
            assert error < 2e-5  # float32, two layers


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("window", [4, 9, 24])
def test_sliding_window(window, masked, implementation):
    torch.manual_seed(0)
    made, ids = mistral(sliding_window=window).eval(), tokens()
    options, other = EXACT[implementation]
    given = {"input_ids": ids, "attention_mask": padded(left=True) if masked else None}
    past = {"max_new_tokens": 4, "do_sample": False, "output_logits": True}
    kept = padded(left=True).bool() if masked else slice(None)
    results = []
    for name, own in ((other, None), (implementation, options)):
        set_implementation(made, name, own)
        logits = made(**given).logits
        grad = torch.autograd.grad(logits[kept].sin().sum(), made.model.embed_tokens.weight)[0]
        steps = made.generate(**given, **past, return_dict_in_generate=True).logits
        results.append((logits[kept], grad, torch.stack(steps)))
    for i, (expected, got) in enumerate(zip(*results, strict=True)):
        if i == 1 and implementation == "lshkit_yoso":
            continue  # the lower bound: test_gradient_in_a_band
        assert (expected - got).abs().max() < 2e-5 * max(1, expected.abs().max())


@pytest.mark.parametrize("name", ["lshkit_lsh", "lshkit_bert_lsh"])
def test_chunked_attention(name):
    """Masks of pairs in the prompt and with a cache that keeps one chunk."""
    made = llama4(attention_chunk_size=8).eval().double()
    past = {"max_new_tokens": 6, "do_sample": False, "output_logits": True}
    given = {"attention_mask": padded(left=True), **past, "return_dict_in_generate": True}
    results = []
    for implementation, own in (("eager", None), (name, EXACT[name][0])):
        set_implementation(made, implementation, own)
        for use_cache in (True, False):
            steps = made.generate(tokens(), **given, use_cache=use_cache).logits
            results.append(torch.stack(steps))
    assert all((got - results[0]).abs().max() < 2e-5 for got in results)
    set_implementation(made, "lshkit_yoso")
    with pytest.raises(NotImplementedError, match="can't apply a mask of query-key pairs .chunked"):
        made(tokens())


@pytest.mark.parametrize("gradient", ["lower_bound", "expected"])
def test_gradient_in_a_band(gradient):
    """A window that holds all pairs gives the gradient of yoso_attention."""
    from lshkit.attention import yoso_attention
    from lshkit.attention.huggingface.band import yoso_band

    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, 13, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2)
    )
    rows = torch.arange(13, dtype=torch.int32)
    rows = torch.stack((rows, torch.full_like(rows, 13))).expand(2, -1, -1)
    for normalize in ("l2", "sum", None):
        options = {"n_bits": 5, "gradient": gradient, "normalize": normalize}
        out = yoso_band(q, k, v, rows, options)
        expected = yoso_attention(
            *(q, k, v, None, True), estimator="expected", enable_gqa=True, **options
        )
        assert (out - expected).abs().max() < 1e-5
        got = torch.autograd.grad(out.sin().sum(), (q, k, v))
        for x, y in zip(got, torch.autograd.grad(expected.sin().sum(), (q, k, v)), strict=True):
            assert (x - y).abs().max() < 2e-5 * max(1, y.abs().max())


@pytest.mark.parametrize("batch", [1, 2])
def test_packed_sequences(batch, implementation):
    """Positions that start again: each sequence as if it were alone."""
    made = model("llama", implementation).double()
    ids = tokens(batch=batch)
    positions = torch.cat((torch.arange(9), torch.arange(15)))[None].expand(batch, -1)
    with torch.no_grad():
        packed = made(ids, position_ids=positions, use_cache=False).logits
        alone = [made(ids[:, part], use_cache=False).logits for part in (slice(9), slice(9, None))]
    assert (packed - torch.cat(alone, 1)).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("implementation", "options"),
    [
        ("lshkit_yoso", {"estimator": "expected", "n_bits": 4}),
        ("lshkit_yoso", {"estimator": "expected", "normalize": "sum"}),
        ("lshkit_yoso", {"estimator": "sampled", "n_bits": 4}),
        ("lshkit_yoso", {"estimator": "sampled", "n_bits": 4, "window": 3}),
        ("lshkit_yoso", {"estimator": "soft", "n_bits": 4}),
        ("lshkit_lsh", {"n_bits": 3, "exact_steps": False}),
        ("lshkit_lsh", {"n_bits": 3, "window": 3, "n_sinks": 0, "exact_steps": False}),
        ("lshkit_bert_lsh", {"n_bits": 3}),
    ],
)
@pytest.mark.parametrize("static", [False, True])
def test_a_cache_changes_nothing(static, implementation, options):
    """A prompt in pieces and single steps, on the same hash functions, is the whole at once.

    float64 models: float32's rounding before a layer can flip a bit of a code.
    """
    made, ids = model("llama", implementation, lshkit=options).double(), tokens()
    mask = padded(left=True)
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp(0)
        whole = made(ids, attention_mask=mask, position_ids=positions).logits
        cache, parts, at = StaticCache(made.config, 32) if static else None, [], 0
        for n in (11, 6, 1, 1, 4, 1):
            now = slice(at, at + n)
            out = made(
                ids[:, now],
                attention_mask=mask[:, : at + n],
                position_ids=positions[:, now],
                past_key_values=cache,
                use_cache=True,
            )
            cache, at = out.past_key_values, at + n
            parts.append(out.logits)
    assert (torch.cat(parts, 1) - whole)[mask.bool()].abs().max() < 1e-6


@pytest.mark.parametrize("static", [False, True])
def test_exact_steps(static):
    """A single query gets softmax attention, by default."""
    made, ids, mask = model("llama", "eager"), tokens(), padded(left=True)
    results = []
    with torch.no_grad():
        for exact_steps in (None, True, False):
            cache = StaticCache(made.config, 32) if static else DynamicCache()
            set_implementation(made, "eager")
            made(ids[:, :-1], attention_mask=mask[:, :-1], past_key_values=cache)
            if exact_steps is not None:
                own = {"n_bits": 3, "n_hashes": 2, "window": 1, "exact_steps": exact_steps}
                set_implementation(made, "lshkit_lsh", own)
            step = made(ids[:, -1:], attention_mask=mask, past_key_values=cache)
            results.append(step.logits)
    assert (results[0] - results[1]).abs().max() < 1e-6
    assert (results[0] - results[2]).abs().max() > 1e-5


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_left_padding_in_generation(cache, implementation):
    made, ids, mask = model("llama", implementation).double(), tokens(), padded(left=True)
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache}
    together = made.generate(ids, attention_mask=mask, **options)
    alone = made.generate(ids[:1, 7:], **options)
    assert torch.equal(together[:1, 24:], alone[:, 17:])


# --- Padding --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "implementation"), combinations(*FAMILIES))
def test_padding_changes_no_bit(family, implementation):
    variants = [{}]
    if implementation == "lshkit_yoso":
        variants = [{"estimator": word} for word in ("expected", "sampled", "soft")]
    elif implementation == "lshkit_lsh":
        variants = [{"n_bits": 3, "window": 4}]
    if (family, implementation) == ("bert", "lshkit_bert_lsh"):
        variants.append({"faithful": True})
    for options in variants:
        made = set_implementation(model(family, "eager"), implementation, options)
        for left in (False, True):
            ids, mask = tokens(), padded(left)
            other = torch.where(mask == 1, ids, tokens(seed=1))
            decoder = {} if family in ("bert", "llama") else {"decoder_input_ids": tokens(seed=2)}
            with torch.no_grad():
                a, b = (made(x, attention_mask=mask, **decoder).logits for x in (ids, other))
            kept = slice(None) if decoder else mask.bool()
            assert not torch.equal(ids, other)
            assert torch.equal(a[kept], b[kept]), (options, left)


# --- Modes ----------------------------------------------------------------------------------------


def test_hash_functions_are_fixed_in_eval_and_fresh_in_training(implementation):
    made, ids = model("bert", implementation), tokens()
    options = {"lshkit_yoso": {"estimator": "sampled"}, "lshkit_lsh": {"window": 0, "n_hashes": 4}}
    made.config.lshkit = options.get(implementation, {})
    made.config.attention_probs_dropout_prob = 0
    with torch.no_grad():
        assert torch.equal(made(ids).logits, made(ids).logits)
        before = made(ids).logits
        made.config.lshkit["seed"] = 1
        assert not torch.equal(before, made(ids).logits)
        for module in made.modules():
            module.training = not isinstance(module, torch.nn.Dropout)
        assert not torch.equal(made(ids).logits, made(ids).logits)
        torch.manual_seed(3)
        before = made(ids).logits
        torch.manual_seed(3)
        assert torch.equal(before, made(ids).logits)


def test_gradient_checkpointing_draws_the_same_hash_functions(implementation):
    own = {"estimator": "sampled"} if implementation == "lshkit_yoso" else {"n_hashes": 4}
    made, ids = model("llama", implementation, lshkit=own).train(), tokens()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            made.activation_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(0)
        loss = made(ids, labels=ids, use_cache=False, attention_mask=padded()).loss
        gradients.append(torch.autograd.grad(loss, list(made.parameters())))
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def test_dropout_falls_on_the_output(implementation):
    attend = AttentionInterface()[implementation]
    module = torch.nn.Module().train()
    module.is_causal = False
    x = torch.randn(1, 2, 40, 8, generator=torch.Generator().manual_seed(0))
    out, weights = attend(module, x, x, x, None, dropout=0.5)
    assert weights is None and out.shape == (1, 40, 2, 8)
    assert 0.4 < (out == 0).float().mean() < 0.6


def test_attention_weights_are_not_returned(implementation):
    made = model("bert", implementation)
    assert not any(x is not None for x in made(tokens(), output_attentions=True).attentions or ())


# --- Options --------------------------------------------------------------------------------------


def test_options_of_register_and_of_a_model():
    made, ids = model("bert", "lshkit_yoso"), tokens()

    def logits(own=None, **options):
        register(yoso={"estimator": "sampled", **options})
        made.config.lshkit = own
        with torch.no_grad():
            return made(ids).logits

    try:
        plain = logits()
        assert torch.equal(plain, logits(n_hashes_eval=64))
        assert torch.equal(plain, logits(n_hashes=64, n_hashes_eval=None))
        assert not torch.equal(plain, logits(n_bits=5))
        assert torch.equal(logits(n_bits=5), logits({"n_bits": 5}))
        assert torch.equal(logits({"n_bits": 8}, n_bits=5), plain)
    finally:
        register(lsh={"exact_steps": False})


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
            "yoso has an unknown option 'bits'; lshkit_yoso has n_b",
        ),
        ({"lsh": {"n_hashes_eval": 8}}, TypeError, "lsh has an unknown option"),
        ({"bert_lsh": {"n_bits": 17}}, ValueError, "n_bits must be an integer from 1 to 16"),
        ({"yoso": {"estimator": "exact"}}, ValueError, "estimator must be one of"),
        ({"yoso": {"n_hashes_eval": 0}}, ValueError, "n_hashes must be"),
        ({"yoso": {"seed": -1}}, ValueError, "seed must be"),
        ({"lsh": {"exact_steps": 1}}, TypeError, "exact_steps must be"),
        ({"yoso": 8}, TypeError, "yoso must be a dict of options, got int"),
    ],
)
def test_wrong_options(options, error, message):
    with pytest.raises(error, match=message):
        register(**options)


def test_wrong_options_of_a_model():
    made = model("bert", "lshkit_yoso")
    for own, message in (
        ({"bits": 8}, "config.lshkit has an unknown option 'bits'"),
        (8, "config.lshkit must be a dict of options, got int"),
    ):
        made.config.lshkit = own
        with pytest.raises(TypeError, match=message):
            made(tokens())


# --- Refusals -------------------------------------------------------------------------------------


def test_masks_of_pairs():
    """YOSO refuses them, the others apply them."""
    ids = tokens()
    mask = torch.rand(2, 1, 24, 24, generator=torch.Generator().manual_seed(0)) < 0.5
    mask |= torch.eye(24, dtype=torch.bool)
    made = model("bert", "eager")
    floats = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    for given in (mask, floats):
        set_implementation(made, "lshkit_yoso")
        with pytest.raises(NotImplementedError, match="forms no pair of a query and a key"):
            made(ids, attention_mask=given)
        for name in ("lshkit_lsh", "lshkit_bert_lsh"):
            with torch.no_grad():
                expected = set_implementation(made, "eager")(ids, attention_mask=floats).logits
                set_implementation(made, name, EXACT[name][0])
                got = made(ids, attention_mask=given).logits
            assert (got - expected).abs().max() < 2e-5
    set_implementation(made, "lshkit_bert_lsh", {"faithful": True})
    with pytest.raises(NotImplementedError, match="takes padding masks only"):
        made(ids, attention_mask=mask)


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
        "past_key_values": None,
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
        "past_key_values": None,
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
    with pytest.raises(NotImplementedError, match="faithful=True takes padding masks only"):
        made(ids)
