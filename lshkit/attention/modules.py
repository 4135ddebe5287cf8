"""YOSO attention as a layer: projections, short convolutions, heads, YOSO-C's convolution."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from lshkit import checks, torch_ops
from lshkit.attention.across_ranks import AcrossRanks, check_context_parallel
from lshkit.attention.arguments import seed_tensor
from lshkit.attention.convolution import (
    checked_convolutions,
    convolve_inputs,
    convolve_positions,
)
from lshkit.attention.decoding import YosoState
from lshkit.attention.estimators import Estimator, Sampled, Soft, estimator_of
from lshkit.attention.functional import yoso_attention
from lshkit.attention.module_arguments import (
    check_options,
    checked_call,
    checked_heads,
    checked_learn,
)
from lshkit.attention.module_decoding import State, decode, new_cache, new_state
from lshkit.attention.softmax_cache import SoftmaxCache
from lshkit.hash_functions import MAX_HASHES

# What may be learnt, by the name in `parameters`, and the parameter of the module that holds it.
LEARNT = {
    "planes": "planes",
    "sharpness": "log_sharpness",
    "scale": "log_scale",
    "lift_scale": "log_lift_scale",
}


class YosoAttention(nn.Module):
    """Multi-head YOSO attention, called like `torch.nn.MultiheadAttention(batch_first=True)`.

    Parameters have the names, initialisation and, but for another head_dim, shapes of
    `MultiheadAttention`, so its state_dict loads here (the seed of the hash functions then stays as
    it is). While training, every call
    draws fresh hash functions from torch's generator (unless fresh_hashes is False); in eval mode
    they come from the buffer `hash_seed`, so that inference is deterministic and survives
    state_dict and deepcopy. An average of models that takes buffers too, as torch's
    `AveragedModel(use_buffers=True)`, rounds this number: copy it from the model afterwards.

    Args:
        embed_dim: size of the model.
        num_heads: number of heads, each with its own hash functions.
        dropout: probability of zeroing an element of the heads' output while training
            (MultiheadAttention drops weights, which are never formed here).
        bias: whether the projections add one.
        kdim: size of the keys, embed_dim if None.
        vdim: size of the values, embed_dim if None.
        head_dim: features of a head, embed_dim / num_heads if None. `MultiheadAttention` has no
            such option: with another number state_dicts cannot be exchanged with it.
        batch_first: must be True.
        estimator: `Sampled(...)`, `Expected(...)`, `Soft(...)` or `Colliding(...)`, or their names
            in lower case for their defaults: see `yoso_attention`. A plain attribute, as are
            `eval_estimator`, `normalize` and `fresh_hashes`: they may be changed later.
        normalize: see `yoso_attention`.
        n_hashes_eval: number of hashes in eval mode, where less noise matters more: 32 train well,
            and the cost of a step is proportional to the number. None: those of the estimator. The
            attribute `eval_estimator` is the estimator of eval mode, which may be replaced by any
            other.
        fresh_hashes: True: every training call draws new hash functions, so that their noise
            averages out over the steps. False: all calls use those of `hash_seed`.
        learn: names of what is learnt per head, initialised with the estimator's values:
            "sharpness" (its logarithm `log_sharpness`, (num_heads,)), "scale" and "lift_scale"
            (likewise `log_scale` and `log_lift_scale`), "planes" (`planes`, (num_heads, n_hashes,
            n_bits, head_dim), "lift": head_dim + 2, drawn from N(0, 1); all calls use them, in eval
            mode too, and n_hashes_eval is ignored). See `parameters` of `yoso_attention`.
        conv_window: None, or the odd number of positions of YOSO-C's depthwise convolution: one
            kernel per head over the values, added to the normalised attention (YOSO, ICML 2021,
            section 4.2). In a causal call the kernel ends at the position itself.
        short_conv: None, or the number of positions of a depthwise convolution of the projected
            queries, keys and values, one kernel per feature (`short_conv_weight`, (3 num_heads,
            head_dim, short_conv)), over each position and those before it, in every call. With it
            a token can look for what follows its like, as in H3 (Fu et al., 2023) and the linear
            models after it; 4 is usual. `init_induction_heads` makes it do so from the start. Keys
            and values that are ignored are zeros for it, and so are the queries there where query
            and key are the same object.
        seed: of the hash functions in eval mode; None draws it from torch's generator.

    A module made on the meta device needs `reset_parameters` (or a state_dict) after `to_empty`:
    until then its weights and its seed are undefined.
    """

    embed_dim: int
    num_heads: int
    head_dim: int
    kdim: int
    vdim: int
    dropout: float
    batch_first: bool
    fresh_hashes: bool
    normalize: str | None
    conv_window: int | None
    short_conv: int | None
    estimator: Estimator
    eval_estimator: Estimator
    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    out_proj: nn.Linear
    conv: nn.Conv2d | None
    short_conv_weight: nn.Parameter | None
    planes: nn.Parameter | None
    log_sharpness: nn.Parameter | None
    log_scale: nn.Parameter | None
    log_lift_scale: nn.Parameter | None
    hash_seed: Tensor
    _seed: int | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        kdim: int | None = None,
        vdim: int | None = None,
        head_dim: int | None = None,
        batch_first: bool = True,
        estimator: Estimator | str = Sampled(),  # noqa: B008 (immutable)
        normalize: str | None = "l2",
        n_hashes_eval: int | None = 64,
        fresh_hashes: bool = True,
        learn: Sequence[str] = (),
        conv_window: int | None = None,
        short_conv: int | None = None,
        seed: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = checked_heads(embed_dim, num_heads, head_dim)
        self.embed_dim, self.num_heads, self.head_dim = sizes
        check_options(dropout, batch_first, bias, dtype)
        self.dropout = dropout
        self.estimator = estimator_of(estimator)
        learn = checked_learn(learn, self.estimator)
        if "planes" in learn:
            n_hashes_eval = None
        elif n_hashes_eval is not None:
            checks.integer("n_hashes_eval", n_hashes_eval, 1, MAX_HASHES)
        self.eval_estimator = self.estimator.for_inference(n_hashes_eval)
        checks.choice("normalize", normalize, torch_ops.NORMALIZE)
        self.normalize = normalize
        self.conv_window, self.short_conv = checked_convolutions(conv_window, short_conv)
        self.kdim = self.embed_dim if kdim is None else checks.integer("kdim", kdim, 1)
        self.vdim = self.embed_dim if vdim is None else checks.integer("vdim", vdim, 1)
        self.fresh_hashes = checks.boolean("fresh_hashes", fresh_hashes)
        # torch.nn.TransformerEncoderLayer reads these two. False keeps it off the fused inference
        # path, which would put softmax attention in the place of this module's.
        self.batch_first, self._qkv_same_embed_dim = True, False
        self._seed = None if seed is None else int(seed_tensor(seed))

        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self._make_projections(bias, options)
        self._make_convolutions(options)
        self._make_learnt(learn, options)
        place = self.out_proj.weight.device  # not on meta, where it would have no value
        place = place if place.type == "cuda" else "cpu"
        self.register_buffer("hash_seed", torch.empty(1, dtype=torch.int64, device=place))
        self._reset_projections()
        self.register_load_state_dict_pre_hook(_keep_seed)

    def _make_projections(self, bias: bool, options: dict[str, Any]) -> None:
        rows = self.num_heads * self.head_dim
        in_one = self.kdim == self.vdim == self.embed_dim
        shape = (3 * rows, self.embed_dim) if in_one else None
        self._make_parameter("in_proj_weight", shape, options)
        for name, size in (("q", self.embed_dim), ("k", self.kdim), ("v", self.vdim)):
            shape = None if in_one else (rows, size)
            self._make_parameter(f"{name}_proj_weight", shape, options)
        self._make_parameter("in_proj_bias", (3 * rows,) if bias else None, options)
        self.out_proj = nn.Linear(rows, self.embed_dim, bias=bias, **options)

    def _make_convolutions(self, options: dict[str, Any]) -> None:
        heads, width = self.num_heads, self.short_conv
        self.conv = None
        if self.conv_window is not None:
            size = self.conv_window, 1
            self.conv = nn.Conv2d(heads, heads, size, groups=heads, bias=False, **options)
        shape = None if width is None else (3 * heads, self.head_dim, width)
        self._make_parameter("short_conv_weight", shape, options)

    def _make_learnt(self, learn: Sequence[str], options: dict[str, Any]) -> None:
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(learn, (self.num_heads,))
        if "planes" in learn:
            of = self.estimator
            assert isinstance(of, Soft)
            columns = self.head_dim + 2 if of.unit_norm == "lift" else self.head_dim
            shapes["planes"] = self.num_heads, of.n_hashes, of.n_bits, columns
        for name, own in LEARNT.items():
            self._make_parameter(own, shapes.get(name), options)

    def _make_parameter(
        self, name: str, shape: tuple[int, ...] | None, options: dict[str, Any]
    ) -> None:
        """A parameter that has no values yet, or None in its place."""
        new = None if shape is None else nn.Parameter(torch.empty(shape, **options))
        self.register_parameter(name, new)

    def reset_parameters(self) -> None:
        """Initialises all weights, and the seed of the hash functions, as a new module would."""
        self.out_proj.reset_parameters()
        if self.conv is not None:
            self.conv.reset_parameters()
        self._reset_projections()

    def _reset_projections(self) -> None:
        for weight in (
            self.in_proj_weight,
            self.q_proj_weight,
            self.k_proj_weight,
            self.v_proj_weight,
        ):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        if self.short_conv_weight is not None:
            bound = self.short_conv_weight.shape[-1] ** -0.5  # as nn.Conv1d has it
            nn.init.uniform_(self.short_conv_weight, -bound, bound)
        self.hash_seed.copy_(seed_tensor(self._seed))
        if self.planes is not None:
            nn.init.normal_(self.planes)
        for name, own in LEARNT.items():
            parameter = getattr(self, own)
            if parameter is not None and name != "planes":
                nn.init.constant_(parameter, math.log(getattr(self.estimator, name)))

    @torch.no_grad()
    def init_induction_heads(self) -> None:
        """Initialises queries and keys so that a token looks for what followed its like.

        For self-attention with is_causal=True; without it a token would look for its own successor.
        Keys get the queries' projection, and their short convolutions the queries' one position
        later: the key of position j is the query of position j - 1, and queries are of the
        `short_conv - 1` last positions. Every head is then an induction head (Olsson et al. 2022)
        before the first training step, where training from independent weights finds them late, or
        never. Values and all else stay as they are; all weights can still be learnt.

        Raises:
            ValueError: where short_conv is None or 1, where kdim is not embed_dim, or where a
                weight is no parameter any more, as after pruning.
            Exception: what a parametrization raises that cannot be assigned to. The layer stays as
                it was.
        """
        if self.short_conv is None or self.short_conv < 2:
            raise ValueError(f"short_conv must be at least 2, got {self.short_conv}")
        if self.kdim != self.embed_dim:
            raise ValueError(f"kdim must be embed_dim={self.embed_dim}, got {self.kdim}")
        new: dict[str, Tensor] = {}
        for name in ("in_proj_weight", "in_proj_bias"):
            if (x := getattr(self, name)) is not None:
                query, _, value = x.chunk(3)
                new[name] = torch.cat((query, query, value))
        if self.in_proj_weight is None:
            assert self.q_proj_weight is not None
            new["k_proj_weight"] = self.q_proj_weight
        assert self.short_conv_weight is not None
        query, _, value = self.short_conv_weight.chunk(3)
        last = query[..., 1:]
        none = torch.zeros_like(query[..., :1])
        query, key = torch.cat((none, last), -1), torch.cat((last, none), -1)
        new["short_conv_weight"] = torch.cat((query, key, value))
        for name in new:
            if not (is_parametrized(self, name) or isinstance(getattr(self, name), nn.Parameter)):
                raise ValueError(f"{name} must be a parameter, or have a parametrization")
        before = [x.clone() for x in self.parameters()]
        try:
            for name, x in new.items():  # whole tensors: a part of a sharded one is no view of it
                if is_parametrized(self, name):
                    setattr(self, name, x)
                else:
                    getattr(self, name).copy_(x)
        except BaseException:
            for parameter, x in zip(self.parameters(), before, strict=True):
                parameter.copy_(x)
            raise

    def extra_repr(self) -> str:
        names = ["embed_dim", "num_heads", "estimator", "eval_estimator", "normalize"]
        changed: dict[str, Any] = {"kdim": self.embed_dim, "vdim": self.embed_dim, "dropout": 0.0}
        changed |= {"head_dim": self.embed_dim / self.num_heads}
        changed |= {"fresh_hashes": True, "conv_window": None, "short_conv": None}
        names += [name for name, usual in changed.items() if getattr(self, name) != usual]
        parts = [f"{name}={getattr(self, name)!r}" for name in names]
        if self.in_proj_bias is None:
            parts.append("bias=False")
        if learnt := [name for name, own in LEARNT.items() if getattr(self, own) is not None]:
            parts.append(f"learn={learnt}")
        return ", ".join(parts)

    def estimator_parameters(self) -> dict[str, Tensor]:
        """What is learnt, as `parameters` of `yoso_attention` and `YosoState`."""
        parameters = {}
        for name, own in LEARNT.items():
            learnt = getattr(self, own)
            if learnt is not None:
                logarithm = own.startswith("log_")
                parameters[name] = learnt.float().exp() if logarithm else learnt
        return parameters

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        state: State | None = None,
        cu_seqlens: Tensor | None = None,
        context_parallel: AcrossRanks | None = None,
    ) -> tuple[Tensor, None]:
        """Attend.

        Args:
            query: `(B, N_q, embed_dim)`, or `(N_q, embed_dim)` without a batch.
            key: `(B, N_k, kdim)`.
            value: `(B, N_k, vdim)`.
            key_padding_mask: `(B, N_k)`, True for a key that is IGNORED, as in
                `MultiheadAttention` (the opposite of `yoso_attention`'s attn_mask). Floats are also
                accepted, as `TransformerEncoderLayer` passes them: 0 takes part, -inf or any number
                <= -1e4 is ignored; others are an error.
            need_weights: must be False: the weights are never formed.
            attn_mask: None. With is_causal=True it may be the causal mask that `MultiheadAttention`
                requires: 0 or False where a query sees a key, -inf (or <= -1e4) or True elsewhere.
                Its diagonal, the one above it, its first and its last column are read, to refuse
                other masks with a ValueError; in a compiled graph nothing is.
            average_attn_weights: ignored, as there are no weights.
            is_causal: query i sees the keys j <= i + N_k - N_q.
            state: of `new_state` or `new_cache`, in eval mode and with is_causal=True: positions
                follow those that it holds, and are added to it. A `YosoState` always samples; the
                forward without one computes the expectation at short lengths.
            cu_seqlens: packed sequences in a batch of one, `(S + 1,)`: see `yoso_attention`. Not
                with conv_window, which would mix neighbouring sequences.
            context_parallel: where query, key and value are a rank's rows of a sequence that is
                spread over ranks: see `yoso_attention`. The modules of all ranks need the same
                weights and, where they do not train, the same `hash_seed`.

        Returns:
            `(B, N_q, embed_dim)` and None.
        """
        arguments = (
            *(self, query, key, value, key_padding_mask, need_weights, attn_mask, is_causal),
            *(state, cu_seqlens, context_parallel),
        )
        if context_parallel is None:
            is_causal, mask = checked_call(*arguments)
        else:
            check_context_parallel(context_parallel)
            is_causal, mask = context_parallel.checked(checked_call, *arguments)
            if self.short_conv is not None or self.conv_window is not None:
                widths = {"short_conv": self.short_conv, "conv_window": self.conv_window}
                context_parallel.agree("YosoAttention with short_conv or conv_window", **widths)
        batched = query.dim() == 3
        q, k, v = self._heads(query, key, value)
        if not batched:
            q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
            mask = None if mask is None else mask.unsqueeze(0)
        if mask is not None and self.short_conv is not None:
            hidden = ~mask[:, None, :, None]
            k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
            q = q.masked_fill(hidden, 0) if query is key else q
        if state is not None:
            out = decode(self, state, q, k, v, mask, is_causal)
            return (out if batched else out.squeeze(0)), None
        if self.short_conv is not None:
            assert self.short_conv_weight is not None
            q, k, v = convolve_inputs(q, k, v, self.short_conv_weight, cu_seqlens, context_parallel)
        out = yoso_attention(
            q,
            k,
            v,
            mask,
            is_causal=is_causal,
            estimator=self.estimator if self.training else self.eval_estimator,
            parameters=self.estimator_parameters(),
            normalize=self.normalize,
            seed=None if self.training and self.fresh_hashes else self.hash_seed,
            cu_seqlens=cu_seqlens,
            context_parallel=context_parallel,
        )
        if self.conv is not None:
            out = out + self._convolve(v, mask, is_causal, context_parallel)
        out = F.dropout(out, self.dropout, self.training)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        return (out if batched else out.squeeze(0)), None

    def new_state(self, batch_size: int, table_dtype: torch.dtype = torch.float32) -> YosoState:
        """An empty state for forward(..., state=...): causal decoding step by step, in eval mode.

        The outputs are those of the causal forward that samples (`expectation="never"`). With
        `Colliding` see `new_cache`.
        """
        return new_state(self, batch_size, table_dtype)

    def new_cache(self, batch_size: int, **of_cache: Any) -> SoftmaxCache:
        """An empty cache for forward(..., state=...) with `Colliding`, of all keys and values.

        The outputs are those of softmax over all pairs up to 1,024 positions, then near them: see
        `SoftmaxCache`. of_cache: n_bits, epsilon, delta, min_share, max_share, window and n_sinks
        of its `CodeCache`.
        """
        return new_cache(self, batch_size, of_cache)

    def multihead_state_dict(self) -> dict[str, Tensor]:
        """A state_dict for `torch.nn.MultiheadAttention.load_state_dict`: only the projections.

        It omits the seed, the convolution and what `learn` adds; of parametrized weights it has the
        values. `load_state_dict` of this module accepts a MultiheadAttention's state_dict.
        ValueError with a head_dim that has none such, and where a weight is neither a parameter nor
        parametrized, as after pruning (before `prune.remove`) or in a quantized layer.
        """
        if self.num_heads * self.head_dim != self.embed_dim:
            raise ValueError(
                f"head_dim must be embed_dim / num_heads for MultiheadAttention: {self.head_dim} "
                f"for {self.embed_dim} / {self.num_heads}"
            )
        names = "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"
        places: dict[str, tuple[nn.Module, str]] = {name: (self, name) for name in names}
        places |= {f"out_proj.{name}": (self.out_proj, name) for name in ("weight", "bias")}
        weights: dict[str, Tensor] = {}
        for name, (module, own) in places.items():
            x: Any = getattr(module, own, "none")  # of a layer around the projection
            if not (x is None or isinstance(x, nn.Parameter) or is_parametrized(module, own)):
                raise ValueError(f"{name} must be a parameter, or have a parametrization")
            if x is not None:
                weights[name] = x.detach()
        return weights

    def _heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Projected and split into heads, `(..., H, N, head_dim)`, as views where possible."""
        weight, bias = self.in_proj_weight, self.in_proj_bias
        projected: Iterable[Tensor]
        if weight is not None and query is key and key is value:
            projected = F.linear(query, weight, bias).chunk(3, -1)
        else:
            weights: Sequence[Any] = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            if weight is not None:
                weights = weight.chunk(3)
            biases = (None, None, None) if bias is None else bias.chunk(3)
            projected = map(F.linear, (query, key, value), weights, biases)
        q, k, v = (
            x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(-3, -2) for x in projected
        )
        return q, k, v

    def _convolve(
        self,
        value: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        context_parallel: AcrossRanks | None,
    ) -> Tensor:
        if mask is not None:
            value = value.masked_fill(~mask[:, None, :, None], 0)
        assert self.conv is not None and self.conv_window is not None
        before = self.conv_window - 1 if is_causal else self.conv_window // 2
        weight = self.conv.weight[:, 0, :, 0]
        if context_parallel is None:
            # No window fits an empty sequence.
            return convolve_positions(value, weight, before) if value.shape[-2] else value
        parts = []
        for rows, start, stop, _ in context_parallel.neighbours(
            value, before, self.conv_window - 1 - before
        ):
            if start < stop:
                rows = convolve_positions(rows, weight, before)[:, :, before:][:, :, : stop - start]
            else:  # with a gradient of 0, which training over ranks waits for
                rows = (rows * weight[:, :1, None]).to(rows.dtype)
            parts.append(rows)
        return torch.cat(parts, 2)


def _keep_seed(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """A state_dict of MultiheadAttention has no seed: the module keeps its own."""
    state_dict.setdefault(prefix + "hash_seed", module.hash_seed)
