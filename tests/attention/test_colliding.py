"""Colliding: softmax of cosines from the pairs that collide, as an estimator."""

import math
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cases.attention import attention_inputs  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from lshkit.attention import (  # noqa: E402
    Colliding,
    Expected,
    Sampled,
    YosoAttention,
    lsh_attention,
    yoso_attention,
)

SAMPLED = Colliding(n_bits=4, n_hashes=12, exact_up_to=0, scale=6.0)


def leaves(case):
    return [x.detach().requires_grad_() for x in (case.query, case.key, case.value)]


def softmax(query, key, value, scale, hidden=None):
    """Of cosines, by pairs; groups of query heads share a head of keys."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = scale * F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).mT
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("offset", [None, 0, 7])
def test_all_pairs_are_softmax_of_cosines(offset, key_heads):
    """With the gradients of rows and of the scale, in float64."""
    case = attention_inputs(40, 47, 16, 9, heads=4)
    case.key, case.value = case.key[:, :key_heads], case.value[:, :key_heads]
    mask = torch.rand(len(case.key), 47, generator=torch.Generator().manual_seed(1)) < 0.8
    mask[:, 0] = True  # no query without a key
    hidden = ~mask[:, None, None]
    if offset is not None:
        hidden = hidden | (torch.arange(47) > torch.arange(40)[:, None] + offset)
    scale = torch.linspace(2, 9, key_heads, requires_grad=True)
    inputs = leaves(case)
    out = yoso_attention(
        *(*inputs, mask),
        is_causal=offset is not None,
        causal_offset=offset,
        enable_gqa=True,
        estimator=Colliding(),
        parameters={"scale": scale},
        normalize=None,
        seed=0,
    )
    exact = [x.detach().double().requires_grad_() for x in (*inputs, scale)]
    by_head = exact[3].repeat_interleave(4 // key_heads)[:, None, None]
    wanted = softmax(*exact[:3], by_head, hidden)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(out, (*inputs, scale), case.grad_out)
    for got, expected in zip(
        grads, torch.autograd.grad(wanted, exact, case.grad_out.double()), strict=True
    ):
        error = (got.double() - expected).abs().max() / expected.abs().max()
        assert error < 1e-5


@pytest.mark.parametrize("window", [1, 5])
@pytest.mark.parametrize("is_causal", [False, True])
def test_samples_are_those_of_lsh_attention(is_causal, window):
    case = attention_inputs(90, 90, 16, 9)
    estimator = replace(SAMPLED, window=window)
    inputs, others = leaves(case), leaves(case)
    options = {"is_causal": is_causal, "seed": 3}
    out = yoso_attention(*inputs, estimator=estimator, normalize=None, **options)
    wanted = lsh_attention(
        F.normalize(others[0], dim=-1) * 6,
        F.normalize(others[1], dim=-1),
        others[2],
        scale=1,
        n_bits=4,
        n_hashes=12,
        window=window,
        n_sinks=0,
        center=False,
        **options,
    )
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)
    grads = [torch.autograd.grad(o, x, case.grad_out) for o, x in ((out, inputs), (wanted, others))]
    for got, expected in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("clustered", [False, True])
def test_sums_are_unbiased(clustered):
    """Numerator and denominator over 3,000 sets of hash functions, to 4 standard errors.

    A column that is 1 at one position only has that position's weight over the denominator there,
    and a position always sees itself.
    """
    n, d, seeds, scale = 24, 8, 3000, 3.0
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(n, d, generator=generator)
    if clustered:  # three clusters, and duplicates
        rows = rows[:3].repeat_interleave(8, 0) + 0.2 * rows
        rows[5], rows[13] = rows[4], rows[12]
    query, key = rows + 0.3 * torch.randn(n, d, generator=generator), rows
    value = torch.cat((torch.eye(n), torch.randn(n, 4, generator=generator)), 1)
    inputs = [
        x.expand(1, seeds, *x.shape) for x in (query, key, value)
    ]  # a head has its own hashes
    estimator = Colliding(
        n_bits=3, n_hashes=4, hasher="hyperplane", exact_up_to=0, scale=scale, unit_norm="l2"
    )
    out = yoso_attention(*inputs, estimator=estimator, normalize=None, seed=1)[0].double()
    weights = (
        scale * F.normalize(query.double(), dim=-1) @ F.normalize(key.double(), dim=-1).T
    ).exp()
    denominator = weights.diagonal() / torch.diagonal(out[..., :n], dim1=1, dim2=2)
    numerator = out[..., n:] * denominator[..., None]
    for got, wanted in (
        (denominator, weights.sum(1)),
        (numerator, weights @ value[:, n:].double()),
    ):
        error = got.std(0) / seeds**0.5
        assert ((got.mean(0) - wanted).abs() <= 4 * error + 1e-5 * wanted.abs()).all()


def test_more_hashes_come_nearer_to_softmax():
    case = attention_inputs(300, 300, 16, 9, batch=1)
    wanted = softmax(case.query, case.key, case.value, 6.0)

    def error(n_hashes):
        estimator = replace(SAMPLED, n_bits=7, n_hashes=n_hashes)
        out = yoso_attention(
            *(case.query, case.key, case.value), estimator=estimator, normalize=None, seed=0
        )
        return ((out - wanted).square().mean() / wanted.square().mean()).sqrt()

    errors = [error(n_hashes) for n_hashes in (4, 32, 256)]
    assert errors[0] > 1.5 * errors[1] > 3 * errors[2]


@pytest.mark.parametrize("n, exact", [(60, True), (61, False)])
def test_all_pairs_up_to_a_length(n, exact):
    case = attention_inputs(20, n, 16, 9)
    inputs = case.query, case.key, case.value
    estimator = replace(SAMPLED, exact_up_to=60)
    options = {"normalize": None, "seed": 0}
    out = yoso_attention(*inputs, estimator=estimator, **options)
    always = yoso_attention(*inputs, estimator=replace(estimator, exact_up_to=61), **options)
    never = yoso_attention(*inputs, estimator=SAMPLED, **options)
    assert torch.equal(out, always if exact else never) and not torch.equal(always, never)
    for lengths, same in (((20, n), out), ((99, 60), always), ((1, 61), never)):
        fixed = estimator.at_lengths(*lengths)
        assert torch.equal(yoso_attention(*inputs, estimator=fixed, **options), same)


def test_normalize():
    case = attention_inputs(70, 70, 16, 9)
    inputs = case.query, case.key, case.value
    of = {
        how: yoso_attention(*inputs, estimator=SAMPLED, normalize=how, seed=0)
        for how in (None, "sum", "l2")
    }
    assert torch.equal(of[None], of["sum"])
    torch.testing.assert_close(of["l2"], F.normalize(of[None], dim=-1))


@pytest.mark.parametrize("exact_up_to", [31, 32])
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences_are_each_alone(is_causal, exact_up_to):
    """All of their pairs by their mean length, 32 rounded down."""
    case = attention_inputs(130, 130, 16, 9, batch=1)
    mask = torch.rand(1, 130, generator=torch.Generator().manual_seed(1)) < 0.8
    starts = [0, 40, 41, 41, 130]
    options = {"is_causal": is_causal, "seed": 2}
    inputs = leaves(case)
    packed = {"estimator": replace(SAMPLED, exact_up_to=exact_up_to)} | options
    out = yoso_attention(*inputs, mask, cu_seqlens=torch.tensor(starts), **packed)
    options["estimator"] = replace(SAMPLED, exact_up_to=130 if exact_up_to == 32 else 0)
    grads = torch.autograd.grad(out, inputs, case.grad_out)
    for start, stop in zip(starts[:-1], starts[1:], strict=True):
        part = [x.detach()[:, :, start:stop].requires_grad_() for x in inputs]
        alone = yoso_attention(*part, mask[:, start:stop], **options)
        assert torch.equal(out[:, :, start:stop], alone)
        wanted = torch.autograd.grad(alone, part, case.grad_out[:, :, start:stop])
        for got, expected in zip(grads, wanted, strict=True):
            assert torch.equal(got[:, :, start:stop], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_are_computed_in_float32(dtype):
    case = attention_inputs(70, 70, 16, 9, dtype=dtype)
    inputs = case.query, case.key, case.value
    out = yoso_attention(*inputs, estimator=SAMPLED, normalize=None, seed=0)
    wide = yoso_attention(*(x.float() for x in inputs), estimator=SAMPLED, normalize=None, seed=0)
    assert out.dtype is dtype
    if dtype is torch.float64:  # whose norms are computed as such
        torch.testing.assert_close(out, wide.double(), rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(out, wide.to(dtype))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("offset", [47, 1000, 2**31 - 1, -40, -(2**31)])
def test_all_pairs_at_any_offset(offset, is_causal):
    case = attention_inputs(40, 47, 16, 9)
    inputs = case.query, case.key, case.value
    out = yoso_attention(
        *inputs,
        estimator=Colliding(),
        is_causal=is_causal,
        causal_offset=offset,
        normalize=None,
        seed=0,
    )
    wanted = softmax(*inputs, 12.0)
    if is_causal and offset < 0:
        wanted = torch.zeros_like(wanted)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("estimator", [Colliding(), SAMPLED])
def test_autocast_changes_the_dtype_of_the_output_alone(estimator):
    case = attention_inputs(50, 50, 16, 9)
    inputs = case.query, case.key, case.value
    wanted = yoso_attention(*inputs, estimator=estimator, seed=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = yoso_attention(*inputs, estimator=estimator, seed=0)
    assert out.dtype is torch.bfloat16 and torch.equal(out, wanted.bfloat16())


def test_shapes_without_contents():
    case = attention_inputs(50, 50, 16, 9, batch=1)
    inputs = [x.to("meta") for x in (case.query, case.key, case.value)]
    starts = torch.tensor([0, 20, 50])
    for options in ({}, {"cu_seqlens": starts.to("meta")}):
        assert yoso_attention(*inputs, estimator=Colliding(), **options).shape == (1, 3, 50, 9)


def test_lifted_scores_are_inner_products():
    case = attention_inputs(30, 30, 16, 9)
    inputs = [0.1 * case.query, 0.1 * case.key, case.value]
    estimator = Colliding(unit_norm="lift", lift_scale=4.0, scale=8.0)
    out = yoso_attention(*inputs, estimator=estimator, normalize=None, seed=0)
    wanted = F.scaled_dot_product_attention(*inputs, scale=2.0)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


def test_rows_of_any_size():
    """Cosines have none; a row of zeros has a cosine of 0 with every other."""
    case = attention_inputs(50, 50, 16, 9)
    inputs = [case.query.clone(), case.key.clone(), case.value]
    inputs[0][:, :, 3], inputs[1][:, :, 7] = 0, 0
    wanted = yoso_attention(*inputs, estimator=Colliding(), normalize=None, seed=0)
    torch.testing.assert_close(wanted, softmax(*inputs, 12.0), rtol=1e-5, atol=1e-5)
    for estimator in (Colliding(), SAMPLED):
        near = yoso_attention(*inputs, estimator=estimator, normalize=None, seed=0)
        for size in (1e-30, 1e30):
            sized = [size * inputs[0], inputs[1] / size, inputs[2]]
            out = yoso_attention(*sized, estimator=estimator, normalize=None, seed=0)
            torch.testing.assert_close(out, near, rtol=1e-4, atol=1e-4)
        sized = [1e200 * inputs[0].double(), 1e-200 * inputs[1].double(), inputs[2].double()]
        out = yoso_attention(*sized, estimator=estimator, normalize=None, seed=0)
        torch.testing.assert_close(out.float(), near, rtol=1e-4, atol=1e-4)


def test_subnormal_rows_are_zeros_and_others_have_finite_gradients():
    key = torch.eye(4)[None, None, :2]
    for dtype in (torch.float32, torch.float64):
        tiny = torch.finfo(dtype).tiny
        for size in (0, tiny / 1000, tiny * 0.9, tiny, 1e-20):
            query = torch.full((1, 1, 2, 4), size, dtype=dtype, requires_grad=True)
            tensors = query, key.to(dtype), key.to(dtype)
            out = yoso_attention(*tensors, estimator="colliding", normalize=None)
            (grad,) = torch.autograd.grad(out[..., 0].sum(), query)
            assert grad.isfinite().all() and (grad == 0).all() == (size < tiny)


class TestModule:
    def test_learns_the_scale(self):
        torch.manual_seed(0)
        estimator = Colliding(n_bits=5, scale=7.0)
        module = YosoAttention(24, 3, estimator=estimator, normalize=None, learn=["scale"], seed=0)
        assert module.log_scale.shape == (3,)
        torch.testing.assert_close(module.log_scale.exp(), torch.full((3,), 7.0))
        x = torch.randn(2, 300, 24)
        module(x, x, x, is_causal=True)[0].square().sum().backward()
        assert (module.log_scale.grad != 0).all() and "learn=['scale']" in repr(module)
        other = YosoAttention(24, 3, estimator=estimator, normalize=None, learn=["scale"], seed=1)
        other.load_state_dict(module.state_dict())
        assert torch.equal(other.eval()(x, x, x)[0], module.eval()(x, x, x)[0])

    def test_is_one_graph(self):
        module = YosoAttention(24, 3, estimator="colliding", learn=["scale"], seed=0).eval()
        torch._dynamo.reset()
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        x = torch.randn(2, 50, 24)
        torch.testing.assert_close(compiled(x, x, x)[0], module(x, x, x)[0])

    def test_on_short_texts_is_multihead_softmax(self):
        """Of unit queries and keys."""
        torch.manual_seed(0)
        module = YosoAttention(24, 3, estimator="colliding", normalize=None).eval()
        x = torch.randn(2, 40, 24)
        heads = F.linear(x, module.in_proj_weight, module.in_proj_bias).view(2, 40, 9, 8)
        out = softmax(*heads.transpose(1, 2).chunk(3, 1), 12.0).transpose(1, 2).flatten(2)
        torch.testing.assert_close(module(x, x, x)[0], module.out_proj(out), rtol=1e-5, atol=1e-5)

    def test_in_a_transformer_layer(self):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(24, 3, 32, batch_first=True, dropout=0.0)
        layer.self_attn = YosoAttention(24, 3, estimator=SAMPLED, normalize=None)
        x = torch.randn(2, 40, 24, requires_grad=True)
        padding = torch.arange(40) > torch.tensor([[39], [30]])
        out = layer(x, src_key_padding_mask=padding)
        out[~padding].sum().backward()
        assert out.isfinite().all() and (x.grad[1, 31:] == 0).all() and (x.grad[0] != 0).any()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scale": 0.0}, ValueError, "scale must be a finite number > 0"),
        ({"scale": torch.tensor(3.0)}, TypeError, "goes into parameters={'scale': tensor}"),
        ({"window": 0}, ValueError, "window must be an integer from 1 to 2147483647, got 0"),
        ({"exact_up_to": -1}, ValueError, "exact_up_to must be an integer from 0"),
        ({"exact_up_to": 2.5}, TypeError, "exact_up_to must be an integer"),
        ({"max_length": 9}, TypeError, "max_length"),
        ({"sharpness": 2.0}, TypeError, "sharpness"),
        ({"n_bits": None}, TypeError, "n_bits must be an integer"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        Colliding(**options)


def test_bad_calls():
    case = attention_inputs(10, 10, 8, 3)
    inputs = case.query, case.key, case.value
    for scale, message in (
        (torch.ones(5), r"parameters\['scale'\] must have shape \(\) or \(heads of keys,\)"),
        (torch.ones(1, dtype=torch.int32), r"parameters\['scale'\] must hold floats"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            yoso_attention(*inputs, estimator="colliding", parameters={"scale": scale})
    for scale in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(
            ValueError, match=r"parameters\['scale'\] must be finite and > 0 in float32, got"
        ):
            yoso_attention(
                *inputs, estimator="colliding", parameters={"scale": torch.tensor([1.0, scale, 2])}
            )
    with pytest.raises(ValueError, match="parameters may hold 'scale' with Colliding"):
        yoso_attention(*inputs, estimator="colliding", parameters={"sharpness": torch.tensor(1.0)})
    with pytest.raises(ValueError, match="learn may hold 'scale' with Colliding"):
        YosoAttention(8, 2, estimator="colliding", learn=["planes"])


class TestDecoding:
    """A module's causal forward over all pairs, step by step."""

    @staticmethod
    def module(**options):
        torch.manual_seed(0)
        options = {
            "normalize": None,
            "conv_window": 3,
            "short_conv": 4,
            "learn": ["scale"],
        } | options
        module = YosoAttention(24, 3, estimator=Colliding(), seed=0, **options).eval()
        torch.nn.init.normal_(module.log_scale, 2.0)
        return module

    @staticmethod
    def decoded(module, cache, x, sizes, ignored=None):
        outs, first = [], 0
        for size in sizes:
            rows = slice(first, first + size)
            part, first = x[:, rows], first + size
            hidden = None if ignored is None else ignored[:, rows]
            out, _ = module(part, part, part, hidden, is_causal=True, state=cache)
            outs.append(out)
        return torch.cat(outs, 1)

    @torch.no_grad()
    @pytest.mark.parametrize("masked", [False, True])
    @pytest.mark.parametrize(
        "options", [{}, {"conv_window": None, "short_conv": None}, {"normalize": "l2"}], ids=str
    )
    def test_equals_the_forward(self, options, masked):
        module, x = self.module(**options), torch.randn(2, 40, 24)
        ignored = torch.arange(40) < torch.tensor([[7], [0]]) if masked else None
        wanted, _ = module(x, x, x, ignored, is_causal=True)
        taking_part = slice(None) if ignored is None else ~ignored
        for sizes in ([1] * 40, [20, 1, 2, 17], [0, 40]):
            cache = module.new_cache(2)
            got = self.decoded(module, cache, x, sizes, ignored)
            torch.testing.assert_close(got[taking_part], wanted[taking_part], rtol=1e-5, atol=1e-5)
            assert cache.length.tolist() == ([33, 40] if masked else [40, 40])

    @torch.no_grad()
    def test_beyond_the_exact_positions_it_is_near(self):
        """Within the cache's tolerance of softmax; and not equal, so it did sample."""
        module, x = self.module(normalize=None), torch.randn(1, 3000, 24)
        module.eval_estimator = replace(module.eval_estimator, exact_up_to=3000)
        wanted = module(x, x, x, is_causal=True)[0][:, -20:]
        cache = module.new_cache(1, epsilon=0.05, max_share=0.5)
        self.decoded(module, cache, x[:, :-20], [2980])
        got = self.decoded(module, cache, x[:, -20:], [1] * 20)
        error = (got - wanted).norm() / wanted.norm()
        assert 0 < error < 0.05

    @torch.no_grad()
    def test_a_copy_a_saved_one_and_another_order(self):
        module, x = self.module(), torch.randn(2, 40, 24)
        wanted, _ = module(x, x, x, is_causal=True)
        cache = module.new_cache(2)
        self.decoded(module, cache, x[:, :30], [30])
        loaded = module.new_cache(2)
        loaded.load_state_dict(cache.state_dict())
        assert cache.nbytes > 0 and "length=[30, 30]" in repr(cache)
        for other, order in ((cache.clone(), [0, 1]), (loaded, [0, 1]), (cache, [1, 0, 1])):
            other.reorder(torch.tensor(order))
            got = self.decoded(module, other, x[order, 30:], [4, 1, 5])
            torch.testing.assert_close(got, wanted[order, 30:], rtol=1e-5, atol=1e-5)
        fresh = self.decoded(module, cache.reset(), x[[1, 0, 1], :1], [1])
        torch.testing.assert_close(fresh, wanted[[1, 0, 1], :1], rtol=1e-5, atol=1e-5)

    @torch.no_grad()
    @pytest.mark.parametrize("sizes", [[40], [1] * 40, [20, 0, 1, 2, 17]], ids=str)
    def test_rows_that_are_not_finite_change_no_other(self, sizes):
        module, x = self.module(conv_window=None, short_conv=None), torch.randn(2, 40, 24)
        x[0, 4], x[1, 25] = math.nan, math.inf
        wanted, _ = module(x, x, x, is_causal=True)
        assert wanted.isnan().any(-1).sum() == 2
        cache = module.new_cache(2)
        got = self.decoded(module, cache, x, sizes)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)
        loaded = module.new_cache(2)
        loaded.load_state_dict(cache.state_dict())
        for other in (cache, loaded):
            assert self.decoded(module, other, torch.randn(2, 3, 24), [3]).isfinite().all()
        assert self.decoded(module, cache.reset(), x[:, :4], [4]).isfinite().all()

    def test_an_order_of_any_integers_outside_of_inference_mode(self):
        module, x = self.module(), torch.randn(2, 6, 24)
        wanted, _ = module(x, x, x, is_causal=True)
        for order in (
            torch.tensor([1, 1, 0], dtype=torch.uint8),
            torch.tensor([1, 0], dtype=torch.int16),
            np.array([1], dtype=np.int8),
        ):
            with torch.inference_mode():
                cache = module.new_cache(2)
                self.decoded(module, cache, x[:, :4], [4])
                cache = cache.clone().reorder(order)
            with torch.no_grad():
                rows = torch.as_tensor(order).long()
                got = self.decoded(module, cache, x[rows, 4:], [1, 1])
            torch.testing.assert_close(got, wanted[rows, 4:], rtol=1e-5, atol=1e-5)

    @torch.no_grad()
    def test_under_autocast_and_in_bfloat16(self):
        module, x = self.module(), torch.randn(2, 12, 24)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            wanted, _ = module(x, x, x, is_causal=True)
            got = self.decoded(module, module.new_cache(2), x, [5] + [1] * 7)
        torch.testing.assert_close(got.float(), wanted.float(), rtol=0.02, atol=0.02)
        module, x = module.bfloat16(), x.bfloat16()
        got = self.decoded(module, module.new_cache(2), x, [5] + [1] * 7)
        assert got.dtype is torch.bfloat16
        torch.testing.assert_close(got.float(), wanted.float(), rtol=0.05, atol=0.05)

    def test_a_call_that_would_need_gradients_changes_nothing(self):
        module, x = self.module(), torch.randn(2, 5, 24)
        cache = module.new_cache(2)
        with torch.no_grad():
            self.decoded(module, cache, x, [5])
        before = cache.state_dict()
        module.requires_grad_(False)
        module.short_conv_weight.requires_grad_()
        with pytest.raises(RuntimeError, match="requires grad"):
            self.decoded(module, cache, x, [5])
        assert all(torch.equal(x, before[name]) for name, x in cache.state_dict().items())

    @torch.no_grad()
    def test_a_refused_call_changes_nothing(self):
        module, x = self.module(), torch.randn(2, 5, 24)
        cache = module.new_cache(2)
        self.decoded(module, cache, x, [5])
        before = cache.state_dict()
        hidden = torch.tensor([[True], [False]])
        with pytest.raises(ValueError, match="key_padding_mask must be of left padding"):
            module(*[x[:, :1]] * 3, hidden, is_causal=True, state=cache)
        for bad in (math.nan, 200.0, -200.0):
            module.log_scale[1] = bad
            with pytest.raises(ValueError, match="scale.* must be finite and > 0 in float32, got"):
                module(x, x, x, is_causal=True)
            with pytest.raises(ValueError, match="scale must be finite and > 0 in float32, got"):
                module(*[x[:, :1]] * 3, is_causal=True, state=cache)
        assert all(torch.equal(x, before[name]) for name, x in cache.state_dict().items())

    @torch.no_grad()
    def test_wrong_caches(self):
        module, x = self.module(), torch.randn(2, 4, 24)
        cache = module.new_cache(2)
        saved = cache.state_dict()
        for wrong, message in (
            (saved | {"tail": saved["tail"][:1]}, r"state_dict\['tail'\] must be torch.float32"),
            (
                {k: v for k, v in saved.items() if k != "inputs"},
                r"\['inputs'\] must be .* NoneType",
            ),
            (saved | {"more": saved["tail"]}, "more"),
        ):
            with pytest.raises(ValueError, match=message):
                cache.load_state_dict(wrong)
        with pytest.raises(TypeError, match="state_dict must be a dict, got NoneType"):
            cache.load_state_dict(None)
        with pytest.raises(TypeError, match="indices must be integers"):
            cache.reorder(None)
        for options in ({"epsilon": 0}, {"max_share": 5}, {"min_share": -1}):
            with pytest.raises(ValueError, match=next(iter(options))):
                module.new_cache(1, **options)
        for option in ("dtype", "scale", "seed", "num_key_heads"):
            with pytest.raises(TypeError, match=f"new_cache has no option '{option}'; it has n_b"):
                module.new_cache(1, **{option: 1})
        before = module.eval_estimator
        for other in (Expected(), Sampled()):
            module.eval_estimator = other
            with pytest.raises(ValueError, match=r"module's estimator=\w+\(n_bits=12.*, has Coll"):
                module(x, x, x, is_causal=True, state=cache)
        module.eval_estimator = before
        with pytest.raises(ValueError, match="is no softmax: decode with new_state"):
            YosoAttention(24, 3).new_cache(1)
        with pytest.raises(ValueError, match="decode with new_cache"):
            module.new_state(1)
        with pytest.raises(ValueError, match="unit_norm must be 'l2' to decode"):
            YosoAttention(24, 3, estimator=Colliding(unit_norm="lift")).new_cache(1)
        with pytest.raises(ValueError, match="state must have the module's conv_window=None"):
            self.module(conv_window=None)(x, x, x, is_causal=True, state=cache)
        with pytest.raises(ValueError, match=r"query must be \(2, 3, n, 8\)"):
            module(*[x[:1]] * 3, is_causal=True, state=cache)
        with pytest.raises(ValueError, match="state must be None while training"):
            module.train()(x, x, x, is_causal=True, state=cache)
