"""Attention step by step: a state of constant size instead of the keys and values so far."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lshkit import _C, checks, torch_ops
from lshkit.attention import saved_state
from lshkit.attention.arguments import CPU, DTYPES, seed_tensor
from lshkit.attention.convolution import checked_convolutions
from lshkit.attention.estimators import BucketSums, Estimator, Sampled, Soft, estimator_of
from lshkit.attention.parameters import check_parameters, sharpness_values
from lshkit.attention.saved_state import TABLE_DTYPES
from lshkit.attention.steps import check_step, checked_integers, checked_mask, checked_sizes
from lshkit.torch_ops.tensors import rows


class YosoState:
    """The state of causal YOSO attention: sums of the values by hash bucket.

    Memory, and the time of a token, do not depend on the number of tokens: a key head has n_hashes
    tables of 2^n_bits rows. A new token adds its value to one row of each table; a query reads one
    of each (YOSO, ICML 2021, section 3.2, as a stream); with soft codes n_probes rows. Outputs are
    those of `yoso_attention(..., is_causal=True)` with the same seed: bit-for-bit the same however
    the tokens are divided among calls of `prefill` and of `step` with one token, and to rounding
    the same as in one call of it (hard codes of 16-bit inputs, which that call hashes in 16 bits:
    but for the few codes that differ).

    Args:
        batch_size: number of sequences.
        num_heads: number of query heads, H.
        head_dim: features of queries and keys, D.
        value_dim: features of values, D_v; head_dim if None.
        num_key_heads: number of key and value heads, H_k, a divisor of H: query head h reads the
            tables of key head h // (H / H_k), with its hash functions. H if None.
        estimator: `Sampled(...)`, which always samples here, or `Soft(...)`, or "sampled" or "soft"
            for their defaults. Without unit_norm="lift", whose results depend on all keys. The
            attribute `estimator` is what the state depends on.
        parameters: see `yoso_attention`. They are copied.
        normalize: see `yoso_attention`.
        seed: of the hash functions, one set for each key head: an int >= 0 or an int64 tensor of
            one element. None draws it from torch's generator; see the attribute `seed`.
        dtype: of queries, keys, values and outputs: float32, bfloat16, float16 or float64. All is
            computed in float32.
        table_dtype: of the sums. float32, or float16 for half the memory: every addition then
            rounds to 11 bits. A value is lost if the sum is 2048 times larger, and a sum beyond
            65504 overflows: see docs/attention.md for the error measured.
        conv_window: None, or the positions of a `YosoAttention` module's convolution: the state
            then stores the values of the last conv_window - 1 positions.
        short_conv: None, or the positions of a module's short convolutions: the state then stores
            the queries, keys and values of the last short_conv - 1 positions. For as many key heads
            as heads, and value_dim = head_dim.
        device: of the tables, arguments and results: the CPU, or CUDA in a build with CUDA kernels.
            `step`, `append`, `attend` and `prefill` do not synchronise with the GPU and can be
            captured in a CUDA graph (after a first call); each replay then is a step.

    Tensors of another shape, dtype or device raise ValueError or TypeError and leave the state as
    it was. There is no autograd through a state: RuntimeError where grad mode is on and an input
    requires grad. A NaN or infinity in a value stays in the buckets it was added to. One state must
    not be used by two threads at once. Where Ctrl-C interrupts a call that adds keys, further ones
    raise RuntimeError until `reset` or `load_state_dict`.
    """

    batch_size: int
    num_heads: int
    num_key_heads: int
    head_dim: int
    value_dim: int
    estimator: BucketSums
    normalize: str | None
    dtype: torch.dtype
    table_dtype: torch.dtype
    conv_window: int | None
    short_conv: int | None
    device: torch.device
    seed: int
    _interrupted = False  # between the core's call and what is counted here

    def __init__(
        self,
        batch_size: int,
        num_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        num_key_heads: int | None = None,
        estimator: Estimator | str = Sampled(),  # noqa: B008 (immutable)
        parameters: dict[str, Tensor] | None = None,
        normalize: str | None = "l2",
        seed: int | Tensor | None,
        dtype: torch.dtype = torch.float32,
        table_dtype: torch.dtype = torch.float32,
        conv_window: int | None = None,
        short_conv: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        sizes = checked_sizes(batch_size, num_heads, head_dim, value_dim, num_key_heads)
        self.batch_size, self.num_heads, self.head_dim, self.value_dim, self.num_key_heads = sizes
        estimator = estimator_of(estimator)
        self.estimator = estimator.for_decoding()
        parameters = {} if parameters is None else parameters
        check_parameters(parameters, estimator)
        checks.choice("normalize", normalize, torch_ops.NORMALIZE)
        if dtype not in DTYPES:
            raise TypeError(f"dtype must be float32, bfloat16, float16 or float64, got {dtype!r}")
        if table_dtype not in TABLE_DTYPES:
            raise TypeError(f"table_dtype must be float32 or float16, got {table_dtype!r}")
        conv_window, short_conv = checked_convolutions(conv_window, short_conv)
        if short_conv is not None:
            for name, like in (("num_key_heads", "num_heads"), ("value_dim", "head_dim")):
                if getattr(self, name) != getattr(self, like):
                    raise ValueError(
                        f"{name} must be {like} with short_conv={short_conv}: "
                        f"{getattr(self, name)}, {getattr(self, like)}"
                    )
        self.short_conv = short_conv
        self.normalize = normalize
        self.dtype, self.table_dtype, self.conv_window = dtype, table_dtype, conv_window
        self.device = _checked_device(device)
        seed = seed_tensor(seed)
        self.seed = int(seed)
        # Of a module's numbers on a GPU: those that have been compared.
        self._seen: dict[str, Any] = {}
        seed = seed_tensor(seed, self.device)
        given = {name: x.detach().to(CPU, copy=True) for name, x in parameters.items()}
        sizes = self.num_key_heads, self.head_dim
        place = CPU if "planes" in given else self.device
        planes, *family = self.estimator.hash_functions(*sizes, given, seed, place)
        self._family = family[0], family[1], family[2]
        if "planes" in given:
            given["planes"] = planes = planes.contiguous()
        self._parameters = planes.to(self.device)
        if "sharpness" in given:
            given["sharpness"] = sharpness_values(given["sharpness"], self.num_key_heads)
        self._given = given
        self._place_sharpness()
        tables = (
            self.batch_size * self.num_key_heads,
            self.estimator.n_hashes,
            2**self.estimator.n_bits,
        )
        self._sums = self._new_table((*tables, self.value_dim), table_dtype)
        self._counts = self._new_table(tables, torch.float32) if normalize == "sum" else None
        self._positions = 0  # the same for all sequences, ...
        self._masked = self._new_table((self.batch_size,), torch.int64)  # ... less these
        self._tail = None
        if conv_window is not None:
            shape = (self.batch_size, self.num_key_heads, conv_window - 1, self.value_dim)
            self._tail = self._new_table(shape, dtype)
        self._inputs = None  # queries, keys and values, one behind the other along the heads
        if short_conv is not None:
            shape = (self.batch_size, 3 * self.num_heads, short_conv - 1, self.head_dim)
            self._inputs = self._new_table(shape, dtype)
        self.reset()

    # --- Attention ------------------------------------------------------------------------------

    def append(self, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> None:
        """Adds keys `(B, H_k, n, D)` and values `(B, H_k, n, D_v)` to the tables.

        attn_mask: boolean `(B, n)` or `(B, 1, 1, n)`, True for a position that takes part; others
        are not added. A key with a NaN or infinity is ignored too, but counts in `length`.
        """
        self._check(key=key, value=value)
        self._decode(None, key, value, self._mask(attn_mask, key), False)

    def attend(self, query: Tensor) -> Tensor:
        """Attention `(B, H, n, D_v)` of queries `(B, H, n, D)`, each of which sees all positions.

        A query that collides with no key gives zeros, one with a NaN or infinity a NaN row.
        """
        self._check(query=query)
        return self._decode(query, None, None, None, False)

    def step(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
    ) -> Tensor:
        """`append`, then `attend`, in one call of the core: the next token of a generation.

        query `(B, H, n, D)`, key `(B, H_k, n, D)` and value `(B, H_k, n, D_v)`, n mostly 1: every
        query sees all of the n keys. Returns `(B, H, n, D_v)`.
        """
        self._check(query=query, key=key, value=value)
        return self._decode(query, key, value, self._mask(attn_mask, key), False)

    def prefill(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
    ) -> Tensor:
        """Causal attention of n positions at once: query i sees the past and the keys j <= i.

        For the prompt, or pieces of it, which give the same result. Shapes are those of `step`,
        with as many queries as keys.
        """
        self._check(query=query, key=key, value=value)
        if query.shape[-2] != key.shape[-2]:
            raise ValueError(f"key must have query's length {query.shape[-2]}, got {key.shape[-2]}")
        return self._decode(query, key, value, self._mask(attn_mask, key), True)

    def _decode(
        self,
        query: Tensor | None,
        key: Tensor | None,
        value: Tensor | None,
        mask: Tensor | None,
        is_causal: bool,
    ) -> Any:
        """The output, or None without queries."""
        out, masked = None, None
        if mask is not None:
            masked = self._masked + mask.logical_not().sum(1)
        # A GPU reads and writes short floats as they are.
        short = self.device.type == "cuda" and self.dtype is not torch.float64
        dtype = self.dtype if short else torch.float32
        if query is not None:
            shape = *query.shape[:-1], self.value_dim
            out = torch.empty(shape, dtype=dtype, device=self.device)
            query = rows(query, dtype)
        if key is not None and value is not None:
            key, value = rows(key, dtype), rows(value, dtype)
            self._interrupted = True
        _C.decode(
            self._sums,
            self._counts,
            self.batch_size,
            *self._options,
            query,
            key,
            value,
            mask,
            is_causal,
            out,
            torch.get_num_threads(),
        )
        if key is not None:
            if masked is not None:
                self._masked.copy_(masked)
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                self._masked.sub_(key.shape[2])  # at each replay, of which nothing else here knows
            else:
                self._positions += key.shape[2]
            self._interrupted = False
            self.estimator.check_length(self._positions)
        return out if out is None else out.to(self.dtype)

    def _check(self, **tensors: Tensor) -> None:
        self._refuse_interrupted()
        check_step("state", self, self._check_device, **tensors)

    def _refuse_interrupted(self) -> None:
        if self._interrupted:
            raise RuntimeError(
                "the state holds keys of a call that was interrupted (prefill, append or step): "
                "reset it, or load a state_dict"
            )

    def _check_device(self, name: str, x: Tensor) -> None:
        if x.device != self.device:
            known = x.device.type in ("cpu", "cuda")
            wanted = "the cpu" if self.device == CPU else self.device
            raise (ValueError if known else NotImplementedError)(
                f"{name} must be on {wanted}, where the state is, got {x.device}"
            )

    def _mask(self, mask: Tensor | None, key: Tensor) -> Tensor | None:
        """The padding mask as (batch, n), its last dimension contiguous."""
        mask = checked_mask(mask, self.batch_size, key.shape[2])
        if mask is None:
            return None
        if mask.device != self.device:
            raise ValueError(
                f"attn_mask must be on the state's device {self.device}, got {mask.device}"
            )
        return mask.contiguous()

    # --- The state as a thing -------------------------------------------------------------------

    @property
    def length(self) -> Tensor:
        """Positions added to each sequence, masked ones left out; int64 `(B,)`."""
        return self._positions - self._masked

    @property
    def nbytes(self) -> int:
        """Memory of all tensors, hash functions included."""
        return sum(x.nbytes for x in (self._parameters, *self._tensors().values()))

    def reset(self) -> "YosoState":
        """Removes everything that was added; returns self."""
        self._positions, self._interrupted = 0, True
        for x in self._tensors().values():
            x.zero_()
        self._interrupted = False
        return self

    def clone(self) -> "YosoState":
        """A state with the same contents that shares no memory that is written to."""
        return self._like(range(self.batch_size))

    def reorder(self, indices: Any) -> "YosoState":
        """Replaces sequence i by sequence indices[i], for beam search; returns self.

        indices: integers `(n,)`. Their number becomes the batch size: one prompt can become many.
        """
        indices = checked_integers("indices", indices, self.batch_size - 1)
        self.__dict__.update(self._like(indices).__dict__)
        return self

    def to(self, dtype: torch.dtype | torch.device | str) -> "YosoState":
        """Changes the dtype of arguments and results, not of the tables, or the device.

        Returns self.
        """
        if not isinstance(dtype, torch.dtype):
            self.device = _checked_device(dtype)
            self._parameters = self._parameters.to(self.device)
            self._place_sharpness()
            for name, x in self._tensors().items():
                setattr(self, f"_{name}", x.to(self.device))
            return self
        if dtype not in DTYPES:
            raise TypeError(f"dtype must be float32, bfloat16, float16 or float64, got {dtype!r}")
        self.dtype = dtype
        self._tail = None if self._tail is None else self._tail.to(dtype)
        self._inputs = None if self._inputs is None else self._inputs.to(dtype)
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """Plain tensors: "version", "config" and copies of all that was added."""
        self._refuse_interrupted()
        return saved_state.save(self)

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Loads the contents of a state that was made with the same arguments, on any device.

        TypeError or ValueError, which leave this state unchanged, name the argument that differs,
        or the entry that is missing, unknown or of another type or shape.
        """
        saved_state.load(self, state_dict)

    def _tensors(self) -> dict[str, Tensor]:
        """All that changes as positions are added."""
        tensors = {
            "sums": self._sums,
            "counts": self._counts,
            "masked": self._masked,
            "tail": self._tail,
            "inputs": self._inputs,
        }
        return {name: x for name, x in tensors.items() if x is not None}

    @property
    def _options(self) -> tuple[Tensor, int, int, int, Tensor | None, int, int, int]:
        """Arguments of the core that are those of the state."""
        return (
            self._parameters,
            *self._family,
            self._sharpness,
            *self.estimator.probes(),
            torch_ops.NORMALIZE[self.normalize],
        )

    def _place_sharpness(self) -> None:
        """Of soft codes, (1,) or (H_k,) where the tables are."""
        sharpness = self._given.get("sharpness")
        if sharpness is None and isinstance(self.estimator, Soft):
            sharpness = torch.tensor([self.estimator.sharpness], dtype=torch.float32, device=CPU)
        self._sharpness = None if sharpness is None else sharpness.to(self.device)

    def _like(self, indices: Iterable[int]) -> "YosoState":
        """Another state, whose sequence i is a copy of sequence indices[i] of this one."""
        other = object.__new__(YosoState)
        other.__dict__.update(self.__dict__)
        indices = torch.tensor(list(indices), dtype=torch.int64, device=self.device)
        other.batch_size = len(indices)
        for name, x in self._tensors().items():
            by_sequence = x.view(self.batch_size, -1)
            copy = self._new_table((other.batch_size, by_sequence.shape[1]), x.dtype)
            torch.index_select(by_sequence, 0, indices, out=copy)
            heads = len(x) // self.batch_size
            setattr(other, f"_{name}", copy.view(other.batch_size * heads, *x.shape[1:]))
        return other

    def _new_table(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory without contents, in large pages where the system has them."""
        with torch.inference_mode(False):  # a tensor made in that mode could not be changed outside
            table = torch.empty(shape, dtype=dtype, device=self.device)
        if dtype in TABLE_DTYPES and table.is_cpu:
            _C.use_large_pages(table)
        return table

    def __repr__(self) -> str:
        names = ["estimator", "normalize", "table_dtype", "seed"]
        options = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        if self._given:
            options += f", parameters of {', '.join(self._given)}"
        return (
            f"YosoState({self.batch_size}, {self.num_heads}, {self.head_dim}, {self.value_dim}, "
            f"num_key_heads={self.num_key_heads}, {options}, dtype={self.dtype}; "
            f"length={self.length.tolist()}, {self.nbytes / 2**20:.1f} MB"
            f"{'' if self.device == CPU else f' on {self.device}'})"
        )


def _checked_device(device: torch.device | str | None) -> torch.device:
    try:
        device = CPU if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:  # of a name that is no device's
        raise ValueError(f"device must be the cpu or cuda, got {device!r}") from error
    if device.type == "cpu":
        return CPU
    if device.type != "cuda" or not (_C.with_cuda and torch.cuda.is_available()):
        raise NotImplementedError(
            f"device must be the cpu, or cuda in a build with its kernels, got {device}"
        )
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
