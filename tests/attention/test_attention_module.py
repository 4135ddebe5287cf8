"""YosoAttention: what torch.nn.MultiheadAttention does around the attention, and YOSO-C."""

import copy
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from cases.attention import SAMPLED as SAMPLES  # noqa: E402
from cases.attention import module_by_hand, padding_mask, tokens  # noqa: E402
from torch import nn  # noqa: E402

from lshkit.attention import Soft, YosoAttention, yoso_attention  # noqa: E402

SAMPLED = {"estimator": SAMPLES}  # where the hash functions should make a difference
NESTED = torch.nested.nested_tensor([torch.ones(11, 24)] * 2)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("conv_window", [None, 1, 5])
@pytest.mark.parametrize("bias", [True, False])
def test_forward(bias, conv_window, masked, is_causal):
    module = YosoAttention(24, 3, bias=bias, conv_window=conv_window, **SAMPLED).eval()
    x = tokens()
    ignored = ~padding_mask(2, 11) if masked else None
    expected = module_by_hand(module, x, x, x, (None, ignored), is_causal)
    for key in (x, x.clone()):  # packed projection and three of them
        out, weights = module(x, key, key, key_padding_mask=ignored, is_causal=is_causal)
        assert weights is None
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("options", [{}, {"short_conv": 4}], ids=str)
def test_cross_attention_of_other_sizes(options):
    module = YosoAttention(24, 3, kdim=10, vdim=7, **options, **SAMPLED).eval()
    query, key, value = tokens(5), tokens(9, 10), tokens(9, 7)
    out, _ = module(query, key, value)
    torch.testing.assert_close(out, module_by_hand(module, query, key, value))
    out.sum().backward()
    assert all(p.grad is not None for p in module.parameters())


@torch.no_grad()
@pytest.mark.parametrize("head_dim", [3, 8, 13])
@pytest.mark.parametrize("options", [{}, {"kdim": 10, "vdim": 7}], ids=str)
def test_heads_of_another_size(options, head_dim):
    module = YosoAttention(24, 3, head_dim=head_dim, **options, **SAMPLED).eval()
    assert module.out_proj.weight.shape == (24, 3 * head_dim)
    assert (f"head_dim={head_dim}" in repr(module)) == (head_dim != 8)
    query, key, value = tokens(9), tokens(9, module.kdim), tokens(9, module.vdim)
    out, _ = module(query, key, value, is_causal=True)
    torch.testing.assert_close(out, module_by_hand(module, query, key, value, is_causal=True))
    state = module.new_state(2)
    steps = zip(*(x.split(4, 1) for x in (query, key, value)), strict=True)
    parts = [module(*step, is_causal=True, state=state)[0] for step in steps]
    torch.testing.assert_close(torch.cat(parts, 1), out)
    copied = YosoAttention(24, 3, head_dim=head_dim, **options, **SAMPLED).eval()
    copied.load_state_dict(module.state_dict())
    assert torch.equal(copied(query, key, value, is_causal=True)[0], out)
    if head_dim != 8:
        match = f"head_dim must be embed_dim / num_heads .*: {head_dim} for 24 / 3"
        with pytest.raises(ValueError, match=match):
            module.multihead_state_dict()


def test_without_a_batch():
    module = YosoAttention(24, 3, conv_window=3, **SAMPLED).eval()
    x, ignored = tokens(), ~padding_mask(2, 11)
    for i in range(2):
        alone, _ = module(x[i], x[i], x[i], key_padding_mask=ignored[i])
        batch, _ = module(x, x, x, key_padding_mask=ignored)
        torch.testing.assert_close(alone, batch[i])


def test_padding_does_not_leak():
    module = YosoAttention(24, 3, conv_window=5, **SAMPLED).eval()
    x = tokens()
    ignored = torch.zeros(2, 11, dtype=torch.bool)
    ignored[:, 8:] = True
    out, _ = module(x, x, x, key_padding_mask=ignored)
    key = x.clone()
    key[:, 8:] = torch.nan
    padded, _ = module(x, key, key, key_padding_mask=ignored)
    torch.testing.assert_close(out, padded)
    as_float = torch.zeros(2, 11).masked_fill(ignored, -torch.inf)
    assert torch.equal(module(x, x, x, key_padding_mask=as_float)[0], out)


def test_hash_functions_are_fresh_in_training_and_fixed_in_eval():
    module = YosoAttention(24, 3, **SAMPLED)
    x = tokens()

    def attend(module=module):
        return module(x, x, x)[0]

    module.train()
    torch.manual_seed(1)
    first, second = attend(), attend()
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(attend(), first)

    module.eval()
    out = attend()
    assert torch.equal(attend(), out)
    assert torch.equal(attend(copy.deepcopy(module)), out)
    other = YosoAttention(24, 3, **SAMPLED).eval()
    assert int(other.hash_seed) != int(module.hash_seed)
    other.load_state_dict(module.state_dict())
    assert torch.equal(attend(other), out)
    assert torch.equal(attend(module.train().eval()), out)
    seeded = [YosoAttention(24, 3, seed=5).hash_seed for _ in range(2)]
    assert int(seeded[0]) == int(seeded[1]) == 5


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 10, "vdim": 7}])
def test_weights_of_multihead_attention(options):
    torch.manual_seed(0)
    multihead = nn.MultiheadAttention(24, 3, batch_first=True, **options)
    torch.manual_seed(0)
    module = YosoAttention(24, 3, **options).eval()
    weights = multihead.state_dict()
    own = module.state_dict()
    assert set(own) - set(weights) == {"hash_seed"}
    for name, weight in weights.items():
        assert torch.equal(own[name], weight)  # initialised alike

    loaded = YosoAttention(24, 3, seed=5, **options).eval()
    before = set(weights)
    loaded.load_state_dict(weights)
    assert set(weights) == before and int(loaded.hash_seed) == 5
    wrapped = nn.ModuleDict({"attention": loaded})
    wrapped.load_state_dict({f"attention.{name}": w for name, w in weights.items()})
    module.hash_seed.fill_(5)
    inputs = tokens(5), tokens(9, module.kdim), tokens(9, module.vdim)
    assert torch.equal(loaded(*inputs)[0], module(*inputs)[0])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_inside_transformer_encoder_layer(masked, is_causal):
    """In training and in inference, where PyTorch has a fused path of softmax attention."""
    layer = nn.TransformerEncoderLayer(24, 4, 32, dropout=0.0, batch_first=True)
    layer.self_attn = YosoAttention(24, 4, **SAMPLED)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = tokens()
    ignored = ~padding_mask(2, 11) if masked else None
    ignored = None if ignored is None else ignored.logical_and(torch.arange(11) > 0)
    mask = nn.Transformer.generate_square_subsequent_mask(11) if is_causal else None
    arguments = {"mask": mask, "src_key_padding_mask": ignored, "is_causal": is_causal}

    encoder.train()(x, **arguments).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in encoder.parameters())

    encoder.eval()
    with torch.no_grad():
        out = encoder(x, **arguments)
        by_layers = x
        for layer in encoder.layers:
            rows = [by_layers] * 3
            attention = module_by_hand(layer.self_attn, *rows, (None, ignored), is_causal)
            by_layers = layer.norm1(by_layers + attention)
            by_layers = layer.norm2(by_layers + layer._ff_block(by_layers))
    torch.testing.assert_close(out, by_layers)


def test_transformer_encoder_hands_over_dense_tensors():
    """It makes nested ones of padded rows, unless its layers had this module when it was built."""
    layer = nn.TransformerEncoderLayer(24, 4, 32, batch_first=True)
    late = nn.TransformerEncoder(layer, 1).eval()
    late.layers[0].self_attn = YosoAttention(24, 4)
    layer.self_attn = YosoAttention(24, 4)
    with pytest.warns(UserWarning, match="use_nested_tensor is False"):
        early = nn.TransformerEncoder(layer, 1).eval()
    ignored = torch.arange(11) >= torch.tensor([[7], [11]])  # at the end: only this is nested
    with torch.no_grad():
        assert early(tokens(), src_key_padding_mask=ignored).shape == (2, 11, 24)
        with pytest.raises(TypeError, match="query must be a dense tensor, got a nested one"):
            late(tokens(), src_key_padding_mask=ignored)


def test_inside_transformer_decoder_layer():
    layer = nn.TransformerDecoderLayer(24, 4, 32, dropout=0.0, batch_first=True)
    layer.self_attn, layer.multihead_attn = (YosoAttention(24, 4, **SAMPLED) for _ in range(2))
    x, memory = tokens(7), tokens(11)
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    arguments = {"tgt_mask": causal, "tgt_is_causal": True}
    arguments["memory_key_padding_mask"] = ~padding_mask(2, 11)
    layer.train()(x, memory, **arguments).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    layer.eval()
    with torch.no_grad():
        out = layer(x, memory, **arguments)
        inner = layer.norm1(x + layer.self_attn(x, x, x, is_causal=True)[0])
        ignored = {"key_padding_mask": ~padding_mask(2, 11)}
        inner = layer.norm2(inner + layer.multihead_attn(inner, memory, memory, **ignored)[0])
        assert torch.equal(out, layer.norm3(inner + layer._ff_block(inner)))


CAUSAL = torch.ones(11, 11, dtype=torch.bool).triu(1)
AS_FLOATS = torch.zeros(11, 11).masked_fill(CAUSAL, -torch.inf)


@pytest.mark.parametrize("sizes", [(11, 11), (3, 11), (11, 3), (1, 11), (11, 1), (1, 1), (0, 0)])
def test_causal_masks_are_accepted(sizes):
    module = YosoAttention(24, 3)
    query, key = tokens(sizes[0]), tokens(sizes[1])
    mask = torch.ones(sizes, dtype=torch.bool).triu(1 + sizes[1] - sizes[0])
    for dtype in (torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        given = mask
        if dtype is not torch.bool:
            given = torch.zeros(sizes, dtype=dtype).masked_fill(mask, -torch.inf)
        for of_heads in (given, given.expand(6, *sizes)):
            module(query, key, key, attn_mask=of_heads, is_causal=True)


@pytest.mark.parametrize(
    "mask",
    [
        ~CAUSAL,
        torch.zeros(11, 11),
        torch.full((11, 11), torch.nan),
        AS_FLOATS.masked_fill(CAUSAL.mT.tril(-3), -torch.inf),  # a band
        AS_FLOATS - (torch.arange(11)[:, None] - torch.arange(11)).clamp_min(0),  # ALiBi
        torch.stack((AS_FLOATS,) * 5 + (torch.zeros(11, 11),)),
    ],
    ids=["attended", "zeros", "nan", "band", "alibi", "one head of six"],
)
def test_other_masks_are_refused(mask):
    """But not in a compiled graph, where a mask's elements are not read."""
    module, x = YosoAttention(24, 3).eval(), tokens()
    with pytest.raises(ValueError, match="attn_mask must be the causal mask with is_causal=True"):
        module(x, x, x, attn_mask=mask, is_causal=True)
    if mask.dim() == 2:
        torch._dynamo.reset()
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        out, _ = compiled(x, x, x, attn_mask=mask, is_causal=True)
        torch.testing.assert_close(out, module(x, x, x, is_causal=True)[0])


def test_dropout_only_while_training():
    module = YosoAttention(24, 3, estimator="expected", dropout=0.5)
    x = tokens()
    assert not torch.equal(module(x, x, x)[0], module(x, x, x)[0])
    module.eval()
    assert torch.equal(module(x, x, x)[0], module(x, x, x)[0])
    plain = YosoAttention(24, 3, estimator="expected")
    plain.load_state_dict(module.state_dict())
    assert torch.equal(plain(x, x, x)[0], module(x, x, x)[0])


@pytest.mark.parametrize("conv_window", [None, 3])
def test_compile_and_autocast(conv_window):
    torch._dynamo.reset()
    module = YosoAttention(24, 3, conv_window=conv_window, **SAMPLED).eval()
    fast = torch.compile(module, fullgraph=True, backend="aot_eager")
    x, ignored = tokens(), ~padding_mask(2, 11)
    eager, _ = module(x, x, x, key_padding_mask=ignored, is_causal=True)
    out, _ = fast(x, x, x, key_padding_mask=ignored, is_causal=True)
    torch.testing.assert_close(out, eager)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half, _ = module(x, x, x, key_padding_mask=ignored, is_causal=True)
    assert half.dtype == torch.bfloat16
    half.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in module.parameters())


@pytest.mark.parametrize("ignore", [-torch.inf, torch.finfo(torch.float32).min, -1e9, -1e4])
@pytest.mark.parametrize("compile", [False, True])
def test_float_padding_masks(compile, ignore):
    torch._dynamo.reset()
    module = YosoAttention(24, 3, **SAMPLED).eval()
    attend = torch.compile(module, fullgraph=True, backend="aot_eager") if compile else module
    x, ignored = tokens(), ~padding_mask(2, 11)
    expected, _ = module(x, x, x, key_padding_mask=ignored)
    mask = torch.zeros(2, 11).masked_fill(ignored, ignore)
    torch.testing.assert_close(attend(x, x, x, key_padding_mask=mask)[0], expected)
    for other in (-1.0, 1.0, torch.nan):
        mask[0, 3] = other
        with pytest.raises((ValueError, RuntimeError), match="must hold only 0 and -1e4 or less"):
            attend(x, x, x, key_padding_mask=mask)


@pytest.mark.parametrize("seed", [None, 5])
def test_from_the_meta_device(seed):
    module = YosoAttention(24, 3, seed=seed, conv_window=3, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for x in (*module.parameters(), *module.buffers()):
            x.fill_(-7)
    torch.manual_seed(0)
    module.reset_parameters()
    torch.manual_seed(0)
    new = YosoAttention(24, 3, seed=seed, conv_window=3)
    for name, x in new.state_dict().items():
        assert torch.equal(module.state_dict()[name], x), name
    assert seed is None or int(module.hash_seed) == seed


def test_dtype_and_device():
    module = YosoAttention(24, 3, conv_window=3, dtype=torch.bfloat16).eval()
    assert module.hash_seed.dtype == torch.int64
    out, _ = module(*[tokens().bfloat16()] * 3)
    assert out.dtype == torch.bfloat16
    with torch.device("meta"):
        assert YosoAttention(24, 3).in_proj_weight.is_meta
    x = tokens().to("meta")
    out, _ = YosoAttention(24, 3, conv_window=3, device="meta")(x, x, x)
    out.sum().backward()
    assert out.is_meta and out.shape == x.shape


@pytest.mark.parametrize("is_causal", [False, True])
def test_empty_sequences(is_causal):
    module = YosoAttention(24, 3, conv_window=3)
    x = tokens(0)
    assert module(x, x, x, is_causal=is_causal)[0].shape == (2, 0, 24)
    module = YosoAttention(24, 3)
    out, _ = module(tokens(5), x, x)
    assert out.shape == (2, 5, 24) and not out.any()  # the output bias starts at zero


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_heads": 5}, ValueError, "embed_dim must be a multiple of num_heads=5: 24"),
        ({"num_heads": 0}, ValueError, "num_heads must be an integer >= 1"),
        ({"dropout": 1.0}, ValueError, "dropout must be from 0 to below 1, got 1.0"),
        ({"dropout": "x"}, TypeError, "dropout must be a number from 0 to below 1, got 'x'"),
        ({"dropout": True}, TypeError, "dropout must be a number from 0 to below 1, got True"),
        ({"dtype": "float32"}, TypeError, "dtype must be one of torch.float32, .* got 'float32'"),
        ({"kdim": 0}, ValueError, "kdim must be an integer >= 1, got 0"),
        ({"vdim": 7.5}, TypeError, "vdim must be an integer >= 1, got 7.5"),
        ({"head_dim": 0}, ValueError, "head_dim must be an integer >= 1, got 0"),
        ({"head_dim": 8.0}, TypeError, "head_dim must be an integer >= 1, got 8.0"),
        ({"n_hashes_eval": 65536}, ValueError, "n_hashes_eval must be an integer from 1 to 65535"),
        ({"conv_window": 4}, ValueError, "conv_window must be odd, got 4"),
        ({"conv_window": -1}, ValueError, "conv_window must be an integer >= 1"),
        ({"estimator": None}, TypeError, "estimator must be .* got None"),
        ({"estimator": {"n_bits": 8}}, TypeError, "estimator must be .* got .'n_bits': 8."),
        ({"batch_first": False}, ValueError, "batch_first must be True: inputs are .batch, length"),
        ({"batch_first": 1}, TypeError, "batch_first must be a bool"),
        ({"fresh_hashes": "no"}, TypeError, "fresh_hashes must be a bool"),
        ({"normalize": "l1"}, ValueError, "normalize must be one of"),
        ({"estimator": "softmax"}, ValueError, "estimator must be .* one of 'sampled'"),
        ({"seed": -3}, ValueError, "seed must be an integer from 0"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        YosoAttention(**({"embed_dim": 24, "num_heads": 3} | options))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"need_weights": True}, ValueError, "need_weights must be False"),
        ({"attn_mask": torch.zeros(11, 11)}, ValueError, "attn_mask must be None"),
        (
            {"attn_mask": torch.zeros(11, 10), "is_causal": True},
            ValueError,
            r"the causal mask \(11, 11\) or None, got shape \(11, 10\)",
        ),
        ({"attn_mask": 1, "is_causal": True}, TypeError, "attn_mask must be a tensor, got int"),
        ({"context_parallel": 3}, TypeError, "must be a ContextParallel or None, got int"),
        ({"is_causal": "no"}, TypeError, "is_causal must be a bool, got 'no'"),
        ({"query": torch.ones(11)}, ValueError, r"query must be .* got shape \(11,\)"),
        ({"query": torch.ones(2, 11, 20)}, ValueError, r"query must be \(batch, length, 24\)"),
        ({"key": torch.ones(3, 11, 24)}, ValueError, r"key must have query's batch \(2,\)"),
        ({"key": torch.ones(2, 7, 24)}, ValueError, "value must have key's length 7, got 11"),
        ({"value": None}, TypeError, "value must be a torch tensor, got NoneType"),
        ({"query": NESTED}, TypeError, "query must be a dense tensor, got a nested one"),
        ({"key_padding_mask": torch.ones(2, 9) > 0}, ValueError, r"shape \(2, 11\), got \(2, 9\)"),
        ({"key_padding_mask": torch.ones(2, 11)}, ValueError, "must hold only 0 and -1e4 or less"),
        ({"key_padding_mask": torch.ones(2, 11).int()}, TypeError, "boolean, got dtype .*int32"),
        ({"query": torch.ones(2, 5, 24)}, ValueError, "key must have query's length 5 for the con"),
    ],
)
def test_bad_calls(arguments, error, message):
    module = YosoAttention(24, 3, conv_window=3)
    with pytest.raises(error, match=message):
        module(**(dict.fromkeys(("query", "key", "value"), tokens()) | arguments))


# ---------------------------------------------------------------- training and inference apart


def attend(x, **options):
    """A module whose projections are the identity, and the attention that it must then equal."""
    module = YosoAttention(24, 3, **options)
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.eye(24).repeat(3, 1))
        module.out_proj.weight.copy_(torch.eye(24))
    heads = x.unflatten(-1, (3, 8)).transpose(1, 2)

    def expected(estimator, seed):
        out = yoso_attention(heads, heads, heads, estimator=estimator, seed=seed)
        return out.transpose(1, 2).flatten(2)

    return module, expected


@torch.no_grad()
@pytest.mark.parametrize("estimator", [SAMPLES, Soft()], ids=str)
@pytest.mark.parametrize("n_hashes_eval", [None, 5, 40])
def test_hashes_of_training_and_inference(n_hashes_eval, estimator):
    x = tokens()
    estimator = replace(estimator, n_hashes=7, n_bits=4)
    module, expected = attend(
        x, fresh_hashes=False, estimator=estimator, n_hashes_eval=n_hashes_eval
    )
    module.train()
    torch.testing.assert_close(module(x, x, x)[0], expected(estimator, module.hash_seed))
    module.eval()
    if n_hashes_eval is not None:
        estimator = replace(estimator, n_hashes=n_hashes_eval)
    assert module.eval_estimator == estimator
    torch.testing.assert_close(module(x, x, x)[0], expected(estimator, module.hash_seed))


@torch.no_grad()
def test_estimators_may_be_replaced():
    x = tokens()
    module, expected = attend(x, fresh_hashes=False)
    module.estimator, module.eval_estimator = Soft(n_bits=3), replace(SAMPLES, n_bits=4)
    for train in (True, False):
        estimator = module.estimator if train else module.eval_estimator
        wanted = expected(estimator, module.hash_seed)
        torch.testing.assert_close(module.train(train)(x, x, x)[0], wanted)


@torch.no_grad()
def test_fixed_hashes_while_training():
    x = tokens()
    module = YosoAttention(24, 3, **SAMPLED, fresh_hashes=False).train()
    assert torch.equal(*(module(x, x, x)[0] for _ in range(2)))


@torch.no_grad()
def test_packed_sequences_equal_a_batch():
    x = tokens()
    module = YosoAttention(24, 3, **SAMPLED, seed=0).eval()
    length = x.shape[1]
    starts = torch.arange(0, x.shape[0] * length + 1, length)
    packed, _ = module(*[x.reshape(1, -1, 24)] * 3, is_causal=True, cu_seqlens=starts)
    wanted, _ = module(x, x, x, is_causal=True)
    torch.testing.assert_close(packed, wanted.reshape(1, -1, 24))
    module = YosoAttention(24, 3, conv_window=3)
    with pytest.raises(ValueError, match="cu_seqlens must be None with conv_window=3"):
        module(*[x.reshape(1, -1, 24)] * 3, cu_seqlens=starts)
