"""Attention layers of the transformers package behind the interface of the others.

What they demand of lengths is met by padding with tokens that take no part.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

try:
    from transformers import LongformerConfig, NystromformerConfig, ReformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention
    from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention
except ImportError as error:
    raise ImportError(
        "Nystromformer, Reformer and Longformer need transformers: pip install transformers"
    ) from error


class Padded(nn.Module):
    """A layer whose attention wants lengths that are multiples of `multiple`."""

    def __init__(self, dim: int, multiple: int) -> None:
        super().__init__()
        self.multiple = multiple
        self.out = nn.Linear(dim, dim)

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, _ = x.shape
        if missing := -length % self.multiple:
            if mask is None:
                mask = torch.ones(batch, length, dtype=torch.bool, device=x.device)
            mask = F.pad(mask, (0, missing))
            x = F.pad(x, (0, 0, 0, missing))
        if mask is not None:  # also where a layer looks at tokens that take no part
            x = x.masked_fill(~mask[..., None], 0)
        return self.out(self.attend(x, mask)[:, :length])


class Nystromformer(Padded):
    """NystromformerSelfAttention. Tokens that take no part are zeros in the means of its landmarks,
    as in the authors' code; its convolution sees the bias of their values."""

    def __init__(
        self,
        dim: int,
        heads: int,
        length: int,
        n_landmarks: int = 64,
        conv_window: int | None = None,
    ) -> None:
        super().__init__(dim, n_landmarks)
        config = NystromformerConfig(
            hidden_size=dim,
            num_attention_heads=heads,
            num_landmarks=n_landmarks,
            segment_means_seq_len=length + -length % n_landmarks,
            attention_probs_dropout_prob=0.0,
        )
        if conv_window is not None:
            config.conv_kernel_size = conv_window
        self.attention = NystromformerSelfAttention(config)
        if conv_window is None:  # the configuration takes no None
            self.attention.conv_kernel_size = None
            del self.attention.conv

    def attend(self, x, mask):
        self.attention.seq_len = x.shape[1]
        bias = None
        if mask is not None:
            bias = torch.zeros(mask.shape, dtype=x.dtype, device=x.device)
            bias = bias.masked_fill(~mask, torch.finfo(x.dtype).min)[:, None, None, :]
        return self.attention(x, bias)[0]


class Reformer(Padded):
    """LSHSelfAttention: sorted into buckets, chunks of 64 that see the chunk before them too.

    Queries are keys. As many buckets as its own rule takes for `length`.
    """

    def __init__(self, dim: int, heads: int, length: int, n_hashes: int = 2) -> None:
        chunk = 64
        super().__init__(dim, chunk)
        config = ReformerConfig(
            hidden_size=dim,
            num_attention_heads=heads,
            attention_head_size=dim // heads,
            attn_layers=["lsh"],
            num_hashes=n_hashes,
            num_buckets=2 ** ((2 * max(1, -(-length // chunk))).bit_length() - 1),
            lsh_attn_chunk_length=chunk,
            lsh_attention_probs_dropout_prob=0.0,
            max_position_embeddings=length,
            is_decoder=False,
        )
        self.attention = LSHSelfAttention(config, layer_idx=0)

    def attend(self, x, mask):
        return self.attention(x, None if mask is None else mask.long()).hidden_states


class Longformer(Padded):
    """LongformerSelfAttention: softmax over a window of tokens, half of it to either side."""

    def __init__(self, dim: int, heads: int, length: int, window: int = 512) -> None:
        super().__init__(dim, window)
        config = LongformerConfig(
            hidden_size=dim,
            num_attention_heads=heads,
            attention_window=[window],
            attention_probs_dropout_prob=0.0,
        )
        self.attention = LongformerSelfAttention(config, layer_id=0)
        for name in ("query_global", "key_global", "value_global"):  # no token is global
            delattr(self.attention, name)

    def attend(self, x, mask):
        if mask is None:
            mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        bias = torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_fill(~mask, -10000.0)
        return self.attention(x, bias, is_index_masked=~mask, is_global_attn=False)[0]
