"""transformers' own YOSO models, made to compute what their configs say."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.yoso import modeling_yoso
from transformers.utils import logging

from lshkit import checks
from lshkit.attention import Expected, Sampled, yoso_attention
from lshkit.attention.unit_norm import unit_rows
from lshkit.torch_ops.assertions import may_be_read, require

logger = logging.get_logger(__name__)


def repair(model: nn.Module, seed: int) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch module, got {type(model).__name__}")
    seed = checks.integer("seed", seed, 0, 2**62)
    layers: list[Any] = [
        m for m in model.modules() if isinstance(m, modeling_yoso.YosoSelfAttention)
    ]
    if not layers:
        known = ", ".join(name for name in modeling_yoso.__all__ if name != "YosoPreTrainedModel")
        raise ValueError(
            f"model must have attention layers that can be repaired, got {type(model).__name__}: "
            f"known is YOSO ({known}). For models with the attention interface there is "
            f"attn_implementation='lshkit_yoso' after lshkit.attention.huggingface.register()"
        )
    for i, layer in enumerate(layers):
        layer.__class__ = RepairedSelfAttention
        layer.hash_seed = seed + i


class RepairedSelfAttention(modeling_yoso.YosoSelfAttention):
    """A YosoSelfAttention (YOSO, ICML 2021) with its parameters and options, computed by lshkit.

    The output is the l2-normalised attention plus, with conv_window, the depthwise convolution of
    the values that are not masked. Attention dropout does not apply, as in the original: there are
    no weights. An even conv_window has its larger half before the token.
    """

    hash_seed: int

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor | None, ...]:
        if output_attentions:
            logger.warning_once("YOSO has no attention weights to return: they are never formed")
        heads = self.num_attention_heads, self.attention_head_size
        query, key, value = (
            project(hidden_states).unflatten(-1, heads).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mask = None if attention_mask is None else _padding_mask(attention_mask, hidden_states)
        context = self._attend(query, key, value, mask)
        if mask is not None:  # a masked query has no attention either
            context = context * mask[:, None, :, None].to(context.dtype)
        if self.use_conv:
            context = context + self._convolve(value, mask)
        context = context.transpose(1, 2).flatten(2)
        return (context, None) if output_attentions else (context,)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        inputs = query, key, value, mask
        expected = Expected(n_bits=self.hash_code_len, gradient="lower_bound")
        if self.use_expectation:
            return yoso_attention(*inputs, estimator=expected)
        sampled = Sampled(
            n_bits=self.hash_code_len,
            n_hashes=self.num_hash,
            hasher="hadamard" if self.use_fast_hash else "hyperplane",
            expectation="never",
        )
        seed = None if self.training else self.hash_seed
        if self.lsh_backward or not torch.is_grad_enabled():
            return yoso_attention(*inputs, estimator=sampled, seed=seed)
        # The sampled sums with the gradient of their expectation.
        mean = yoso_attention(*inputs, estimator=expected, normalize=None)
        with torch.no_grad():
            sums = yoso_attention(*inputs, estimator=sampled, seed=seed, normalize=None)
        return unit_rows(sums + (mean - mean.detach()))

    def _convolve(self, value: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            value = torch.where(mask[:, None, :, None], value, 0)
        return self.conv(value)[:, :, : value.shape[2]]


def _padding_mask(mask: Tensor, hidden_states: Tensor) -> Tensor:
    if mask.shape != hidden_states.shape[:2]:
        raise ValueError(
            f"attention_mask must be (batch, n) = {tuple(hidden_states.shape[:2])}, 1 for a token, "
            f"0 for padding, got {tuple(mask.shape)}: YOSO forms no pair of a query and a key that "
            f"another mask could remove"
        )
    takes_part = mask != 0
    if may_be_read(mask):
        require(
            takes_part == mask,
            "attention_mask must hold 1 for a token and 0 for padding",
            lambda: f", got values from {mask.min()} to {mask.max()}",
        )
    return takes_part
