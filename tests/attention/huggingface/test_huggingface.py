"""Models of transformers with lshkit's attention functions: what they compute under which masks."""

import math

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from cases.huggingface import (  # noqa: E402
    EXACT,
    IMPLEMENTATIONS,
    combinations,
    gemma4,
    llama4,
    mistral,
    model,
    padded,
    set_implementation,
    tokens,
)
from torch.nn import functional as F  # noqa: E402
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache  # noqa
from transformers.masking_utils import (  # noqa: E402
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from lshkit.attention import Expected, Sampled, Soft, yoso_attention  # noqa: E402
from lshkit.attention.huggingface import register  # noqa: E402
from lshkit.attention.huggingface.band import yoso_band  # noqa: E402
from lshkit.attention.huggingface.masks import kind_of, mask_function, read_mask  # noqa: E402

FAMILIES = ("bert", "llama", "bart", "t5", "t5gemma")
SAMPLES = {"estimator": "sampled", "expectation": "never"}


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


# Few pairs but those of the window, whose place shows.
COLLIDING = {"estimator": "colliding", "n_bits": 16, "n_hashes": 1, "n_hashes_eval": None}
COLLIDING |= {"window": 3, "exact_up_to": 0}


@pytest.fixture(scope="module", autouse=True)
def registered():
    register(lsh={"exact_steps": False})
    AttentionInterface.register("formula", formula)
    AttentionMaskInterface.register("formula", pairs)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


@torch.no_grad()
def in_pieces(made, mask, cache=None):
    """Logits of all tokens at once, and with a cache: a prompt in pieces, and single steps."""
    ids, positions = tokens(), (mask.cumsum(1) - 1).clamp(0)
    whole = made(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    parts, at = [], 0
    for n in (11, 6, 1, 1, 4, 1):
        now = slice(at, at + n)
        out = made(
            ids[:, now],
            attention_mask=mask[:, : at + n],
            position_ids=positions[:, now],
            cache=cache,
            use_cache=True,
        )
        cache, at = out.cache, at + n
        parts.append(out.logits)
    return whole, torch.cat(parts, 1)


def inputs(family, ids, mask=None, labels=False):
    given = {"input_ids": ids, "attention_mask": mask}
    if labels or family in ("bart", "t5", "t5gemma"):
        given["labels"] = ids
    return given


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


@pytest.mark.parametrize("implementation", ["lshkit_yoso", "lshkit_lsh"])
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
    for expected, got in zip(*results, strict=True):
        assert (expected - got).abs().max() < 2e-5 * max(1, expected.abs().max())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("window", [4, 32])
def test_queries_that_a_model_leaves_out(window, masked, implementation):
    """Gemma 4 goes on with its last queries alone, and with as many rows of its masks."""
    torch.manual_seed(0)
    made = gemma4(window=window, attn_implementation="eager").eval()
    ids, mask = tokens(), padded(True) if masked else torch.ones(2, 24, dtype=torch.int64)
    options, other = EXACT[implementation]
    with torch.no_grad():
        expected = set_implementation(made, other)(ids, attention_mask=mask).logits
        set_implementation(made, implementation, options)
        if implementation == "lshkit_bert_lsh" and window == 4:
            with pytest.raises(NotImplementedError, match="can't take a sliding window"):
                made(ids, attention_mask=mask)
            return
        for n in (1, 2, 7, 24):
            got = made(ids, attention_mask=mask, logits_to_keep=n).logits
            error = (got - expected[:, -n:])[mask[:, -n:].bool()]
            assert error.abs().max() < 2e-5 * expected.abs().max()
        for n in (2, 3):  # the shortest of which one query can be left
            whole = made(ids[:, :n]).logits[:, -1:]
            assert (made(ids[:, :n], logits_to_keep=1).logits - whole).abs().max() < 1e-5
    if implementation != "lshkit_yoso":
        new = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
        generated = made.generate(ids, **new)
        assert torch.equal(generated, set_implementation(made, "eager").generate(ids, **new))


@pytest.mark.parametrize("name", ["lshkit_lsh", "lshkit_cache"])
def test_pieces_with_a_bias(name):
    """A single query has a row of floats too, which may not be taken for padding."""
    made, ids, i = model("llama", "sdpa"), tokens(), torch.arange(24)
    bias = torch.where(i[:, None] < i, -torch.inf, -0.3 * (i[:, None] - i).abs())[None, None]
    with torch.no_grad():
        expected = made(ids, attention_mask=bias).logits
        set_implementation(made, name)
        cache, got = DynamicCache(), []
        for part in (slice(14), slice(14, 23), slice(23, 24)):
            rows = bias[:, :, part, : part.stop]
            got.append(made(ids[:, part], attention_mask=rows, cache=cache).logits)
    assert (torch.cat(got, 1) - expected).abs().max() < 1e-5


@pytest.mark.parametrize(("n_q", "part"), [(6, slice(5)), (3, slice(None, None, 2)), (8, slice(6))])
def test_keys_that_a_model_leaves_out(n_q, part):
    """Its causal mask then says nothing of where queries stand; nor with more of them."""
    query, key = torch.zeros(1, 2, n_q, 8), torch.zeros(1, 2, 6, 8)[:, :, part]
    mask = mask_function("lshkit_lsh", takes_pairs=True)(1, 6, 6)[..., part]
    with pytest.raises(NotImplementedError, match="changes its causal mask in a way that lshkit"):
        read_mask("lshkit_lsh", mask, query, key, True, takes_pairs=True)


@pytest.mark.parametrize("gradient", ["exact", "lower_bound"])
def test_sliding_window_under_autocast(gradient):
    """What is rounded to 16 bits are inputs and results, not cosines."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 20, 16).bfloat16()
    query, key = query + 3, key + 3  # cosines near 1, whose weights change fast
    rows = torch.stack([torch.arange(20), torch.arange(20) + 5])[None]
    options = {"estimator": Expected(n_bits=12, gradient=gradient), "normalize": "l2"}
    results = []
    for inside in (False, True):
        inputs = [x.detach().requires_grad_() for x in (query, key, value)]
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            out = yoso_band(*inputs, rows, options)
        results.append([out, *torch.autograd.grad(out.float().sin().sum(), inputs)])
    for wanted, got in zip(*results, strict=True):
        assert torch.equal(wanted, got)


def test_sliding_window_of_bert_lsh():
    made = mistral(sliding_window=9).eval()
    set_implementation(made, "lshkit_bert_lsh")
    assert made(tokens(n=9)).logits.isfinite().all()  # all tokens are in the window
    with pytest.raises(NotImplementedError, match="can't take a sliding window"):
        made(tokens(n=10))


@pytest.mark.parametrize(
    ("pattern", "n_queries", "wide", "causal_skip", "bidirectional_skip", "kinds"),
    [
        ("causal", 9, False, True, None, ("causal", "causal")),
        ("causal", 9, False, False, None, ("whole", "whole")),  # the model changes its mask
        ("causal", 1, False, False, None, ("causal", "causal")),
        ("bidirectional", 9, False, None, True, ("bidirectional", "bidirectional")),
        ("bidirectional", 9, False, None, False, ("bidirectional", "whole")),
        ("other", 9, True, True, None, ("causal", "causal")),
        ("other", 9, True, None, True, ("bidirectional", "bidirectional")),
        ("other", 9, False, True, None, ("pattern", "pattern")),
        ("other", 9, True, False, None, ("changed pattern", "changed pattern")),
        ("other", 9, True, None, False, ("pattern", "changed pattern")),
    ],
)
def test_kinds_of_masks(pattern, n_queries, wide, causal_skip, bidirectional_skip, kinds):
    """Without and with pairs."""
    functions = {
        "causal": causal_mask_function,
        "bidirectional": bidirectional_mask_function,
        "other": sliding_window_causal_mask_function(9),
    }
    options = functions[pattern], n_queries, wide, causal_skip, bidirectional_skip
    assert tuple(kind_of(*options, takes_pairs) for takes_pairs in (False, True)) == kinds


def test_chunked_attention():
    """Masks of pairs in the prompt and with a cache that keeps one chunk."""
    made = llama4(attention_chunk_size=8).eval().double()
    past = {"max_new_tokens": 6, "do_sample": False, "output_logits": True}
    given = {"attention_mask": padded(left=True), **past, "return_dict_in_generate": True}
    results = []
    for implementation, own in (("eager", None), ("lshkit_lsh", {"n_hashes": 1})):
        set_implementation(made, implementation, own)
        for use_cache in (True, False):
            steps = made.generate(tokens(), **given, use_cache=use_cache).logits
            results.append(torch.stack(steps))
    assert all((got - results[0]).abs().max() < 2e-5 for got in results)
    for implementation in ("lshkit_yoso", "lshkit_bert_lsh"):
        set_implementation(made, implementation)
        with pytest.raises(NotImplementedError, match="can't apply a mask of query-key pairs"):
            made(tokens())


@pytest.mark.parametrize("gradient", ["lower_bound", "exact"])
def test_gradient_in_a_band(gradient):
    """A window that holds all pairs gives the gradient of yoso_attention."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, 13, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2)
    )
    rows = torch.arange(13, dtype=torch.int32)
    rows = torch.stack((rows, torch.full_like(rows, 13))).expand(2, -1, -1)
    for normalize in ("l2", "sum", None):
        options = {
            "estimator": Expected(n_bits=5, gradient=gradient),
            "normalize": normalize,
        }
        out = yoso_band(q, k, v, rows, options)
        expected = yoso_attention(q, k, v, is_causal=True, enable_gqa=True, **options)
        assert (out - expected).abs().max() < 1e-5
        got = torch.autograd.grad(out.sin().sum(), (q, k, v))
        for x, y in zip(got, torch.autograd.grad(expected.sin().sum(), (q, k, v)), strict=True):
            assert (x - y).abs().max() < 2e-5 * max(1, y.abs().max())


@pytest.mark.parametrize("kind", [Sampled, Soft])
def test_what_a_band_takes(kind):
    """Of a sampling estimator the mean, where it has one."""
    x = torch.randn(1, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    rows = torch.arange(9, dtype=torch.int32)
    rows = torch.stack((rows, torch.full_like(rows, 9)))[None]
    if kind is Soft:
        with pytest.raises(NotImplementedError, match="must be Sampled or Expected in a sliding"):
            yoso_band(x, x, x, rows, {"estimator": Soft(), "normalize": "l2"})
    else:
        with pytest.raises(NotImplementedError, match="unit_norm must not be 'lift' in a sliding"):
            yoso_band(x, x, x, rows, {"estimator": kind(unit_norm="lift"), "normalize": "l2"})
        a, b = (
            yoso_band(x, x, x, rows, {"estimator": made, "normalize": "l2"})
            for made in (Sampled(n_bits=5), Expected(n_bits=5))
        )
        assert torch.equal(a, b)


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


@pytest.mark.parametrize("name", ["lshkit_yoso", "lshkit_lsh"])
def test_packed_sequences_of_a_model_that_leaves_out_queries(name):
    """It has them where all queries are wanted, and says so where they are not."""
    torch.manual_seed(0)
    options, other = EXACT[name]
    made, ids = gemma4(window=32, attn_implementation="eager").eval(), tokens(batch=1)
    packed = {"position_ids": torch.cat((torch.arange(9), torch.arange(15)))[None]}
    packed["use_cache"] = False
    with torch.no_grad():
        expected = set_implementation(made, other)(ids, **packed).logits
        set_implementation(made, name, options)
        got = made(ids, **packed, logits_to_keep=24).logits
        assert (got - expected).abs().max() < 2e-5 * expected.abs().max()
        with pytest.raises(NotImplementedError, match="changes its causal mask in a way that lsh"):
            made(ids, **packed, logits_to_keep=1)


WINDOWED = {
    "mistral": lambda: mistral(sliding_window=9),
    "llama4": lambda: llama4(attention_chunk_size=8),
}
EVERY_STEP = {"n_bits": 3, "exact_steps": False}


@pytest.mark.parametrize(
    ("family", "implementation", "options"),
    [
        ("llama", "lshkit_yoso", {"estimator": "expected", "n_bits": 4}),
        ("llama", "lshkit_yoso", {"estimator": "expected", "normalize": "sum"}),
        ("llama", "lshkit_yoso", SAMPLES | {"n_bits": 4}),
        ("llama", "lshkit_yoso", {"estimator": "soft", "n_bits": 4}),
        ("llama", "lshkit_yoso", COLLIDING),
        ("llama", "lshkit_lsh", EVERY_STEP),
        ("llama", "lshkit_lsh", EVERY_STEP | {"window": 3, "n_sinks": 0}),
        ("llama", "lshkit_bert_lsh", {"n_bits": 3}),
        ("mistral", "lshkit_yoso", SAMPLES | {"n_bits": 4}),
        ("mistral", "lshkit_lsh", {"n_bits": 3, "n_hashes": 4, "window": 2}),
        ("mistral", "lshkit_lsh", EVERY_STEP | {"n_hashes": 4}),
        ("llama4", "lshkit_lsh", EVERY_STEP | {"n_hashes": 4, "window": 2}),
        ("llama4", "lshkit_lsh", EVERY_STEP | {"n_hashes": 4, "n_sinks": 0}),
    ],
)
@pytest.mark.parametrize("static", [False, True])
def test_a_cache_changes_nothing(static, family, implementation, options):
    """A prompt in pieces and single steps, on the same hash functions, is the whole at once.

    The first piece is longer than window or chunk: within them the model has none. float64 models:
    float32's rounding before a layer can flip a bit of a code.
    """
    torch.manual_seed(0)
    made = WINDOWED[family]() if family in WINDOWED else model(family, "eager")
    made = set_implementation(made.eval().double(), implementation, options)
    mask = padded(left=True)
    whole, parts = in_pieces(made, mask, StaticCache(made.config, 32) if static else None)
    assert (parts - whole)[mask.bool()].abs().max() < 1e-6


@pytest.mark.parametrize("static", [False, True])
def test_exact_steps(static):
    """A single query gets softmax attention, by default."""
    made, ids, mask = model("llama", "eager"), tokens(), padded(left=True)
    results = []
    with torch.no_grad():
        for exact_steps in (None, True, False, "none"):
            cache = StaticCache(made.config, 32) if static else DynamicCache()
            set_implementation(made, "eager")
            made(ids[:, :-1], attention_mask=mask[:, :-1], cache=cache)
            if exact_steps is not None:
                own = {"n_bits": 3, "n_hashes": 2, "window": 1, "exact_steps": exact_steps}
                if exact_steps == "none":  # no estimate of softmax attention
                    own |= {"weighting": "none", "exact_steps": True}
                set_implementation(made, "lshkit_lsh", own)
            step = made(ids[:, -1:], attention_mask=mask, cache=cache)
            results.append(step.logits)
    assert (results[0] - results[1]).abs().max() < 1e-6
    assert all((results[0] - results[i]).abs().max() > 1e-5 for i in (2, 3))


@pytest.mark.parametrize("static", [False, True])
def test_steps_without_noise(static):
    """One query over a cache costs less as the expectation; a prompt of more than 6 keys a hash
    does as a sample."""
    made, ids, mask = model("llama", "lshkit_yoso"), tokens(), padded(left=True)
    few = {"n_hashes": 1, "n_hashes_eval": None}
    prompts, steps = [], []
    with torch.no_grad():
        for own in (few, few | {"expectation": "never"}, {"estimator": "expected"}):
            cache = StaticCache(made.config, 32) if static else DynamicCache()
            set_implementation(made, "lshkit_yoso", own)
            prompts.append(made(ids, attention_mask=mask).logits[mask.bool()])
            set_implementation(made, "lshkit_yoso", few)
            made(ids[:, :-1], attention_mask=mask[:, :-1], cache=cache)
            set_implementation(made, "lshkit_yoso", own)
            step = made(ids[:, -1:], attention_mask=mask, cache=cache)
            steps.append(step.logits)
    assert torch.equal(prompts[0], prompts[1])
    assert (prompts[0] - prompts[2]).abs().max() > 1e-3
    assert (steps[0] - steps[2]).abs().max() < 1e-6
    assert (steps[0] - steps[1]).abs().max() > 1e-3


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
        variants = [{"estimator": "expected"}, SAMPLES, {"estimator": "soft"}]
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
    options = {"lshkit_yoso": SAMPLES, "lshkit_lsh": {"window": 0, "n_hashes": 4}}
    made.config.lshkit = dict(options.get(implementation, {}))
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
    own = SAMPLES if implementation == "lshkit_yoso" else {"n_hashes": 4}
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
