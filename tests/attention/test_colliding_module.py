"""`YosoAttention` of `Colliding`, and what it decodes with: `SoftmaxCache`."""

import math
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cases.attention import softmax_of_cosines  # noqa: E402
from cases.decoding import decoded  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from lshkit.attention import (  # noqa: E402
    Colliding,
    Expected,
    Sampled,
    YosoAttention,
)

SAMPLED = Colliding(n_bits=4, n_hashes=12, exact_up_to=0, scale=6.0)


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
        out = (
            softmax_of_cosines(*heads.transpose(1, 2).chunk(3, 1), 12.0).transpose(1, 2).flatten(2)
        )
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
            got = decoded(module, cache, x, sizes, ignored)
            torch.testing.assert_close(got[taking_part], wanted[taking_part], rtol=1e-5, atol=1e-5)
            assert cache.length.tolist() == ([33, 40] if masked else [40, 40])

    @torch.no_grad()
    def test_beyond_the_exact_positions_it_is_near(self):
        """Within the cache's tolerance of softmax; and not equal, so it did sample."""
        module, x = self.module(normalize=None), torch.randn(1, 3000, 24)
        module.eval_estimator = replace(module.eval_estimator, exact_up_to=3000)
        wanted = module(x, x, x, is_causal=True)[0][:, -20:]
        cache = module.new_cache(1, epsilon=0.05, max_share=0.5)
        decoded(module, cache, x[:, :-20], [2980])
        got = decoded(module, cache, x[:, -20:], [1] * 20)
        error = (got - wanted).norm() / wanted.norm()
        assert 0 < error < 0.05

    @torch.no_grad()
    def test_a_copy_a_saved_one_and_another_order(self):
        module, x = self.module(), torch.randn(2, 40, 24)
        wanted, _ = module(x, x, x, is_causal=True)
        cache = module.new_cache(2)
        decoded(module, cache, x[:, :30], [30])
        loaded = module.new_cache(2)
        loaded.load_state_dict(cache.state_dict())
        assert cache.nbytes > 0 and "length=[30, 30]" in repr(cache)
        for other, order in ((cache.clone(), [0, 1]), (loaded, [0, 1]), (cache, [1, 0, 1])):
            other.reorder(torch.tensor(order))
            got = decoded(module, other, x[order, 30:], [4, 1, 5])
            torch.testing.assert_close(got, wanted[order, 30:], rtol=1e-5, atol=1e-5)
        fresh = decoded(module, cache.reset(), x[[1, 0, 1], :1], [1])
        torch.testing.assert_close(fresh, wanted[[1, 0, 1], :1], rtol=1e-5, atol=1e-5)

    @torch.no_grad()
    @pytest.mark.parametrize("sizes", [[40], [1] * 40, [20, 0, 1, 2, 17]], ids=str)
    def test_rows_that_are_not_finite_change_no_other(self, sizes):
        module, x = self.module(conv_window=None, short_conv=None), torch.randn(2, 40, 24)
        x[0, 4], x[1, 25] = math.nan, math.inf
        wanted, _ = module(x, x, x, is_causal=True)
        assert wanted.isnan().any(-1).sum() == 2
        cache = module.new_cache(2)
        got = decoded(module, cache, x, sizes)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)
        loaded = module.new_cache(2)
        loaded.load_state_dict(cache.state_dict())
        for other in (cache, loaded):
            assert decoded(module, other, torch.randn(2, 3, 24), [3]).isfinite().all()
        assert decoded(module, cache.reset(), x[:, :4], [4]).isfinite().all()

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
                decoded(module, cache, x[:, :4], [4])
                cache = cache.clone().reorder(order)
            with torch.no_grad():
                rows = torch.as_tensor(order).long()
                got = decoded(module, cache, x[rows, 4:], [1, 1])
            torch.testing.assert_close(got, wanted[rows, 4:], rtol=1e-5, atol=1e-5)

    @torch.no_grad()
    @pytest.mark.parametrize("short_conv", [None, 3])
    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    def test_rows_that_are_not_finite_change_no_row_before_and_no_other_sequence(
        self, bad, short_conv
    ):
        module = self.module(short_conv=short_conv)
        x = torch.randn(2, 1300, 24)
        y = x.clone()
        y[0, 1200] = bad
        wanted, got = (decoded(module, module.new_cache(2), z, [1100, 200]) for z in (x, y))
        assert torch.equal(got[1], wanted[1])
        torch.testing.assert_close(got[0, :1200], wanted[0, :1200], rtol=1e-5, atol=1e-5)
        assert got[0, 1210:].isfinite().all()  # behind both convolutions
        stepped = decoded(module, module.new_cache(2), y, [1200, *[1] * 100])
        torch.testing.assert_close(
            got[0, 1200:], stepped[0, 1200:], rtol=1e-4, atol=1e-4, equal_nan=True
        )

    @torch.no_grad()
    def test_under_autocast_and_in_bfloat16(self):
        module, x = self.module(), torch.randn(2, 12, 24)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            wanted, _ = module(x, x, x, is_causal=True)
            got = decoded(module, module.new_cache(2), x, [5] + [1] * 7)
        torch.testing.assert_close(got.float(), wanted.float(), rtol=0.02, atol=0.02)
        module, x = module.bfloat16(), x.bfloat16()
        got = decoded(module, module.new_cache(2), x, [5] + [1] * 7)
        assert got.dtype is torch.bfloat16
        torch.testing.assert_close(got.float(), wanted.float(), rtol=0.05, atol=0.05)

    def test_a_call_that_would_need_gradients_changes_nothing(self):
        module, x = self.module(), torch.randn(2, 5, 24)
        cache = module.new_cache(2)
        with torch.no_grad():
            decoded(module, cache, x, [5])
        before = cache.state_dict()
        module.requires_grad_(False)
        module.short_conv_weight.requires_grad_()
        with pytest.raises(RuntimeError, match="requires grad"):
            decoded(module, cache, x, [5])
        assert all(torch.equal(x, before[name]) for name, x in cache.state_dict().items())

    @torch.no_grad()
    def test_a_refused_call_changes_nothing(self):
        module, x = self.module(), torch.randn(2, 5, 24)
        cache = module.new_cache(2)
        decoded(module, cache, x, [5])
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
            (saved | {"inputs": saved["inputs"].to("meta")}, r"\['inputs'\] must be on the cpu"),
            (saved | {"tail": saved["tail"].to_sparse()}, r"\['tail'\] must be a dense tensor"),
        ):
            wrong["key"] = wrong["key"] + 1
            with pytest.raises((TypeError, ValueError), match=message):
                cache.load_state_dict(wrong)
            assert all(torch.equal(x, saved[name]) for name, x in cache.state_dict().items())
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


def test_a_cache_of_another_module_is_refused():
    def module(seed, normalize="l2"):
        return YosoAttention(32, 4, estimator=Colliding(), seed=seed, normalize=normalize).eval()

    x = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    cache = module(1).new_cache(1)
    with torch.no_grad():
        with pytest.raises(ValueError, match="state must have the module's seed=2, has 1"):
            module(2)(x, x, x, is_causal=True, state=cache)
        module(1)(x, x, x, is_causal=True, state=cache)
    saved = cache.state_dict()
    with pytest.raises(ValueError, match="of a cache with normalize='l2', this one has None"):
        module(1, None).new_cache(1).load_state_dict(saved)
    nothing = torch.tensor([*b"{}"], dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"module must hold \['conv_window', .*holds \[\]"):
        cache.load_state_dict(saved | {"module": nothing})
    with pytest.raises(TypeError, match="module must be a torch tensor, got NoneType"):
        cache.load_state_dict({name: x for name, x in saved.items() if name != "module"})
