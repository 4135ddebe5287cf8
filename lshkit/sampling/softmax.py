"""Cross entropy over very many classes: near classes exactly, a uniform sample of the others."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lshkit import checks
from lshkit.buckets import HashTables, pair_products
from lshkit.hashing import FastHadamard
from lshkit.torch_ops.library import once_differentiable

if TYPE_CHECKING:
    from typing_extensions import Self

_CLASSES_A_BUCKET = 16
_REDUCTIONS = "mean", "sum", "none"
_TYPES = torch.float32, torch.float64
_TYPE_NAMES = " or ".join(map(str, _TYPES))
_CHUNK = 2**24  # logits of the exact loss at a time


class SampledSoftmaxLoss(nn.Module):
    """The output layer and cross entropy of a classifier, at a cost almost independent of classes.

    The normaliser of a row's softmax is estimated as

        Z = exp(o_target) + sum over near classes of exp(o) + sum over sampled classes of exp(o) / q

    with logits o = weight . hidden + bias. Near classes share a hash bucket with the row in at
    least `min_count` tables; they and the target are exact and excluded from the sample, which is
    shared by the batch: one class from each of n_samples parts of the classes, which has the
    inclusion probability q = 1 / size of the part, n_samples / n_classes or near it. So Z is
    unbiased whatever the tables are: tables that are older than the weights cost accuracy, not
    correctness. (Inverse-probability sampling over the rest of a hash table's answer:
    Spring and Shrivastava 2017.)

    The loss log Z - o_target and its gradient are then consistent, not unbiased: by Jensen's
    inequality the loss is too low by about var(Z) / (2 E[Z]^2) on average, and the gradient is off
    in the same order. Both errors are proportional to 1 / n_samples, and 0 from n_samples =
    n_classes on. In train mode the gradient cannot be differentiated again: NotImplementedError.

    Parameters
    ----------
    n_features, n_classes : int >= 1
    bias : bool or Parameter `(n_classes,)`
        Whether the layer has a bias, or the one to use. -inf leaves a class out of Z; the loss of
        rows whose target it is is not finite.
    weight : Parameter `(n_classes, n_features)`, optional
        float32 or float64, used instead of a new one.
    n_samples : int >= 1
        Classes in the uniform sample of a step.
    n_bits : int, 1 to 16, optional
        Of the hash codes. Default: about 16 classes per bucket.
    n_hashes : int
        Hash tables, of 4 bytes per class each, or a little more.
    min_count : int, 1 to n_hashes
    max_bucket_size : int
        Larger buckets are skipped; their classes are left to the sample.
    rehash_every : int
        Training steps after which the classes are hashed again, with fresh hash functions.
    sparse : bool
        Returns a sparse gradient of the weight, of the classes that took part. Needs an optimizer
        that supports it: SGD, Adagrad, SparseAdam (not for the bias, whose gradient is dense). The
        cost of a dense gradient is proportional to n_classes. DistributedDataParallel takes sparse
        gradients of `nn.Embedding` alone: give the weight of one, which is a module of the model.
    exact_eval : bool
        True: the exact loss over all classes in eval mode. False: the estimate there too.
    ignore_index : int
        Targets with this value are ignored.
    reduction : "mean", "sum" or "none"
        The mean is over the rows whose target is not ignored: NaN if there is none.

    Attributes
    ----------
    n_bits_, n_hashes_ : int
        Of the tables.
    tables_ : HashTables or None
        Hash tables of the classes. None until the first step, and after load_state_dict.

    Notes
    -----
    Random numbers come from torch's generator. Neither the tables nor their age are part of the
    state_dict. A step that `torch.utils.checkpoint` computes again in the backward pass has the
    tables of its forward pass, if no other step came between, and does not count towards
    `rehash_every`.

    A module made on the meta device needs `reset_parameters` (or a state_dict) after `to_empty`.

    Examples
    --------
    >>> loss = SampledSoftmaxLoss(64, 100_000, sparse=True)
    >>> optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    >>> loss(torch.randn(8, 64), torch.randint(100_000, (8,))).backward()
    """

    n_features: int
    n_classes: int
    n_samples: int
    n_bits_: int
    n_hashes_: int
    min_count: int
    max_bucket_size: int
    rehash_every: int
    sparse: bool
    exact_eval: bool
    ignore_index: int
    reduction: str
    weight: nn.Parameter
    bias: nn.Parameter | None
    hasher_: FastHadamard | None
    tables_: HashTables | None

    def __init__(
        self,
        n_features: int,
        n_classes: int,
        *,
        bias: bool | nn.Parameter = False,
        weight: nn.Parameter | None = None,
        n_samples: int = 4096,
        n_bits: int | None = None,
        n_hashes: int = 16,
        min_count: int = 1,
        max_bucket_size: int = 1024,
        rehash_every: int = 100,
        sparse: bool = False,
        exact_eval: bool = True,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        self.n_features = checks.integer("n_features", n_features, 1, 2**31 - 1)
        self.n_classes = checks.integer("n_classes", n_classes, 1, 2**31 - 1)
        self.n_samples = checks.integer("n_samples", n_samples, 1)
        if n_bits is None:
            n_bits = round(math.log2(self.n_classes / _CLASSES_A_BUCKET))
            n_bits = min(max(n_bits, 1), 16)
        self.n_bits_ = checks.integer("n_bits", n_bits, 1, 16)
        self.n_hashes_ = checks.integer("n_hashes", n_hashes, 1, 65535)
        self.min_count = checks.integer("min_count", min_count, 1, self.n_hashes_)
        self.max_bucket_size = checks.integer("max_bucket_size", max_bucket_size, 0)
        self.rehash_every = checks.integer("rehash_every", rehash_every, 1)
        self.sparse = checks.boolean("sparse", sparse)
        self.exact_eval = checks.boolean("exact_eval", exact_eval)
        self.ignore_index = checks.integer("ignore_index", ignore_index, -(2**63), 2**63 - 1)
        if reduction not in _REDUCTIONS:
            raise ValueError(f"reduction must be one of {_REDUCTIONS}, got {reduction!r}")
        self.reduction = reduction
        shape = self.n_classes, self.n_features
        self.weight = nn.Parameter(torch.empty(shape)) if weight is None else weight
        _check_parameter("weight", self.weight, shape)
        if isinstance(bias, (bool, np.bool_)):
            bias = nn.Parameter(self.weight.new_zeros(self.n_classes)) if bias else None
        self.bias = bias
        if bias is not None:
            _check_parameter("bias", bias, shape[:1], self.weight.dtype)
        if weight is None:
            self._reset_weight()
        self.hasher_ = self.tables_ = None
        self._age = 0  # of the tables, in training steps

    def reset_parameters(self) -> None:
        """Initialises weight and bias as a new module would, and forgets the tables."""
        self._reset_weight()
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        self.hasher_ = self.tables_ = None

    def _reset_weight(self) -> None:
        bound = 1 / math.sqrt(self.n_features)  # as nn.Linear
        nn.init.uniform_(self.weight, -bound, bound)

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> Self:
        """The loss with the parameters of an `nn.Linear`, which are shared."""
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear must be a torch.nn.Linear, got a {type(linear).__name__}")
        for name in ("weight", "bias"):
            if name in options:
                raise TypeError(f"{name} is the linear layer's: give it to the layer")
        bias = False if linear.bias is None else linear.bias
        shared: dict[str, Any] = {"weight": linear.weight, "bias": bias}
        return cls(linear.in_features, linear.out_features, **shared, **options)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Loss of rows and their classes.

        Parameters
        ----------
        hidden : tensor of floats `(..., n_features)`
            Converted to the type of the weight, in which all is computed, under autocast too.
        target : integer tensor `(...)`
            Classes from 0 to n_classes - 1, or `ignore_index`.

        Returns
        -------
        loss : tensor `()`, or `(...)` for reduction="none", with 0 where the target is ignored

        Raises
        ------
        TypeError, ValueError
            Arguments of the wrong type, shape or device, a target out of range.
        NotImplementedError
            A transform of torch.func while the loss is estimated, or vmap over targets.
        """
        if torch._C._are_functorch_transforms_active():
            if self.training or not self.exact_eval:
                raise NotImplementedError(
                    "SampledSoftmaxLoss has no torch.func transforms (grad, vjp, jvp, vmap) in "
                    "train mode, which finds classes by the values of hidden: use torch.autograd, "
                    "or eval mode with exact_eval=True"
                )
            if isinstance(target, Tensor) and _is_batched(target):
                raise NotImplementedError(
                    "SampledSoftmaxLoss has no vmap over target, whose values are checked: give "
                    "all rows in one call, with reduction='none' for their losses"
                )
        hidden, target, counted, shape = self._check(hidden, target)
        if self.exact_eval and not self.training:
            losses = self._exact(hidden, target)
        else:
            losses = self._sampled(hidden, target)
        if self.reduction == "sum":
            return losses.sum()
        if self.reduction == "mean":
            return losses.mean()
        return losses.new_zeros(counted.shape).masked_scatter(counted, losses).reshape(shape)

    def rehash(self) -> Self:
        """Hashes the classes with their current weights and new hash functions. Returns self.

        The mean of the weights is subtracted, because it adds the same to all logits of a row and
        would make the angles between classes small. A bias counts as an additional feature.
        """
        rows = self.weight.detach()
        if self.bias is not None:
            bias = self.bias.detach()
            left_out = bias.isneginf()  # at the mean of the others, of which -inf would leave none
            bias = torch.where(left_out, bias[~left_out].mean(), bias)
            rows = torch.cat([rows, bias[:, None]], 1)
        rows = rows - rows.mean(0)
        self.hasher_ = hasher = FastHadamard(
            rows.shape[1], self.n_bits_, self.n_hashes_, seed=_seed()
        )
        self.tables_ = HashTables(hasher.hash(rows, check_finite=False))
        self._age = 0
        return self

    def _check(self, hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor, torch.Size]:
        """Rows whose target counts and their targets, which ones they are, and target's shape."""
        for name, x in (("hidden", hidden), ("target", target)):
            if not isinstance(x, torch.Tensor):
                raise TypeError(f"{name} must be a tensor, got a {type(x).__name__}")
        if self.weight.dtype not in _TYPES:
            raise TypeError(f"weight must be of dtype {_TYPE_NAMES}, got {self.weight.dtype}")
        if tuple(self.weight.shape) != (self.n_classes, self.n_features):  # it may be replaced
            wanted = f"({self.n_classes}, {self.n_features}), as before"
            raise ValueError(f"weight must have shape {wanted}, got {tuple(self.weight.shape)}")
        checks.array("weight", self.weight, torch)  # it may still be on the meta device
        hidden = checks.array("hidden", hidden, torch, kinds="f", wanted="floats")
        target = checks.array("target", target, torch, kinds="i", wanted="integers")
        if hidden.ndim == 0 or hidden.shape[-1] != self.n_features:
            wanted = f"(..., {self.n_features})"
            raise ValueError(f"hidden must have shape {wanted}, got {tuple(hidden.shape)}")
        if target.shape != hidden.shape[:-1]:
            wanted = f"{tuple(hidden.shape[:-1])}, that of hidden but its last dimension"
            raise ValueError(f"target must have shape {wanted}, got {tuple(target.shape)}")
        shape = target.shape
        target = target.reshape(-1).long()
        counted = target != self.ignore_index
        hidden = hidden.reshape(-1, self.n_features).to(self.weight.dtype)
        if not counted.all():
            hidden, target = hidden[counted], target[counted]
        wrong = (target < 0) | (target >= self.n_classes)
        if wrong.any():
            wanted = f"0 to n_classes - 1 = {self.n_classes - 1} or ignore_index"
            got = f"{int(target[wrong][0])}"
            raise ValueError(f"target must be {wanted} = {self.ignore_index}, got {got}")
        return hidden, target, counted, shape

    @torch.autocast("cpu", enabled=False)
    def _exact(self, hidden: Tensor, target: Tensor) -> Tensor:
        bias = self.bias
        if bias is not None:  # the gradient of logsumexp is NaN where all are -inf
            bias = bias.clamp(min=torch.finfo(bias.dtype).min / 2)
        rows = max(1, min(len(hidden), 1024))
        step = max(1, _CHUNK // rows)
        losses = []
        for h, y in zip(hidden.split(rows), target.split(rows), strict=True):
            parts = []
            for first in range(0, self.n_classes, step):
                some = slice(first, first + step)
                of_some = None if bias is None else bias[some]
                parts.append(F.linear(h, self.weight[some], of_some).logsumexp(1))
            true = (h * self.weight[y]).sum(1)
            true = true if self.bias is None else true + self.bias[y]
            losses.append(torch.stack(parts).logsumexp(0) - true)
        return torch.cat(losses)

    def _sampled(self, hidden: Tensor, target: Tensor) -> Tensor:
        samples, log_weights = self._sample(hidden.dtype)
        # Within a backward pass a checkpoint computes a step again, which must have the same near
        # classes, and the same sample whether or not random numbers for new tables follow.
        step = self.training and torch._C._current_graph_task_id() == -1
        if self.tables_ is None or (step and self._age >= self.rehash_every):
            self.rehash()
        self._age += step
        indptr, indices = self._near(hidden.detach())
        arguments = hidden, self.weight, self.bias, target, indptr, indices, samples, log_weights
        return _SampledCrossEntropy.apply(*arguments, self.sparse)

    def _near(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The near classes of each row in CSR form. What they are does not depend on the sample."""
        if self.bias is not None:
            hidden = torch.cat([hidden, hidden.new_ones(len(hidden), 1)], 1)
        assert self.hasher_ is not None and self.tables_ is not None
        codes = self.hasher_.hash(hidden, check_finite=False)
        indptr, indices, counts = self.tables_.union(codes, max_bucket_size=self.max_bucket_size)
        if self.min_count > 1:
            near = counts >= self.min_count
            before = F.pad(near.cumsum(0), (1, 0))
            indptr, indices = before[indptr], indices[near]
        return indptr, indices

    def _sample(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Distinct classes, ascending, and the logarithms of their weights in the sum.

        One from each of n_samples parts of the classes, whose sizes, the weights, differ by one at
        most.
        """
        n, s = self.n_classes, min(self.n_samples, self.n_classes)
        if s == n:
            return torch.arange(n), torch.zeros(n, dtype=dtype)
        begins = torch.arange(s + 1) * n // s
        sizes = begins.diff()
        places = (torch.rand(s, dtype=torch.float64) * sizes).long()
        return begins[:-1] + places, sizes.to(dtype).log()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.hasher_ = self.tables_ = None

    def extra_repr(self) -> str:
        names = (
            *("n_features", "n_classes", "n_samples", "n_bits_", "n_hashes_", "min_count"),
            *("max_bucket_size", "rehash_every", "sparse", "exact_eval", "ignore_index"),
            "reduction",
        )
        options = [f"{name.rstrip('_')}={getattr(self, name)!r}" for name in names]
        return ", ".join([*options[:2], f"bias={self.bias is not None}", *options[2:]])


class _SampledCrossEntropy(torch.autograd.Function):
    """Losses (rows,) of SampledSoftmaxLoss, and their gradients."""

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        indptr: Tensor,
        indices: Tensor,
        samples: Tensor,
        log_weights: Tensor,
        sparse: bool,
    ) -> Tensor:
        rows = torch.repeat_interleave(torch.arange(len(target)), indptr.diff())
        sample_weight = weight[samples]
        near = pair_products(hidden, weight, indptr, indices)
        far = torch.addmm(log_weights, hidden, sample_weight.T)
        true = (hidden * weight[target]).sum(1)
        if bias is not None:
            near = near + bias[indices]
            far += bias[samples]
            true = true + bias[target]
        # Every class once: the target alone, near classes apart from it, the sample apart from all.
        near[indices == target[rows]] = -torch.inf
        for row, label in ((rows, indices), (torch.arange(len(target)), target)):
            row, place = _find(samples, row, label)
            far[row, place] = -torch.inf
        top = torch.maximum(true, far.amax(1))
        top.scatter_reduce_(0, rows, near, "amax")
        near, far, true = (near - top[rows]).exp_(), far.sub_(top[:, None]).exp_(), true - top
        total = true.exp() + far.sum(1)
        total.scatter_add_(0, rows, near)
        near /= total[rows]
        far /= total[:, None]
        ctx.save_for_backward(
            *(hidden, weight, target, indptr, indices, rows, samples, sample_weight),
            *(near, far, true.exp() / total - 1, bias),
        )
        ctx.sparse, ctx.has_bias = sparse, bias is not None
        return total.log() - true

    @staticmethod
    @once_differentiable
    @torch.autocast("cpu", enabled=False)
    def backward(ctx: Any, saved: Any, grad: Tensor) -> Any:
        hidden, weight, target, indptr, indices, rows, samples, sample_weight = saved[:8]
        near, far, true = saved[8] * grad[rows], saved[9] * grad[:, None], saved[10] * grad
        grad_hidden = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_hidden = torch.addcmul(far @ sample_weight, true[:, None], weight[target])
            grad_hidden += _sum_rows(weight, indices, indptr, near)
        if ctx.needs_input_grad[1] and len(target) == 0:
            none = sample_weight.new_zeros(sample_weight.shape)
            grad_weight = _grad_of_rows(weight, samples, none, ctx.sparse)
        elif ctx.needs_input_grad[1]:
            # The pairs sorted by class, those of the sample without any.
            classes = torch.cat([indices.long(), target, samples])
            row = torch.cat([rows, torch.arange(len(target)), torch.zeros_like(samples)])
            factor = torch.cat([near, true, near.new_zeros(len(samples))])
            classes, order = classes.sort(stable=True)
            classes, counts = torch.unique_consecutive(classes, return_counts=True)
            starts = F.pad(counts.cumsum(0), (1, 0))
            values = _sum_rows(hidden, row[order], starts, factor[order])
            places = torch.searchsorted(classes, samples)
            values.index_add_(0, places, far.T @ hidden)
            grad_weight = _grad_of_rows(weight, classes, values, ctx.sparse)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = weight.new_zeros(len(weight))
            for label, g in ((indices, near), (target, true), (samples, far.sum(0))):
                grad_bias.index_add_(0, label, g)
        return grad_hidden, grad_weight, grad_bias, *(None,) * 6


def _find(sorted_classes: Tensor, rows: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Which (row, class) pairs have their class among the sorted ones: rows and places there."""
    classes = classes.long()
    places = torch.searchsorted(sorted_classes, classes).clamp_(max=len(sorted_classes) - 1)
    found = sorted_classes[places] == classes
    return rows[found], places[found]


def _sum_rows(x: Tensor, indices: Tensor, indptr: Tensor, factors: Tensor) -> Tensor:
    """Sums of factor * x[index] over each range of a CSR structure."""
    if len(indices) == 0:
        return x.new_zeros(len(indptr) - 1, x.shape[1])
    indptr = indptr.to(indices.dtype)
    return F.embedding_bag(
        indices, x, indptr, mode="sum", per_sample_weights=factors, include_last_offset=True
    )


def _grad_of_rows(weight: Tensor, classes: Tensor, values: Tensor, sparse: bool) -> Tensor:
    if not sparse:
        return torch.zeros_like(weight).index_copy_(0, classes, values)
    return torch.sparse_coo_tensor(
        classes[None], values, weight.shape, is_coalesced=True, check_invariants=False
    )


def _is_batched(x: Tensor) -> bool:
    """Whether vmap maps the tensor, perhaps within grad."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False


def _seed() -> int:
    return int(torch.randint(2**62, ()))


def _check_parameter(
    name: str, x: Any, shape: tuple[int, ...], dtype: torch.dtype | None = None
) -> None:
    if not isinstance(x, nn.Parameter):
        raise TypeError(f"{name} must be a Parameter, got a {type(x).__name__}")
    if not x.is_meta:
        checks.array(name, x, torch)
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(x.shape)}")
    wanted, names = (_TYPES, _TYPE_NAMES) if dtype is None else ((dtype,), str(dtype))
    if x.dtype not in wanted:
        raise TypeError(f"{name} must be of dtype {names}, got {x.dtype}")
