"""Estimators: values that own the options of one kind of attention and compute it.

An estimator specifies the attention weights that replace softmax's. It is frozen, contains only
JSON values, compares and hashes by its fields, and validates them when it is made, so it can be an
attribute of a module, a key of a dict, an entry of a config file, and a constant of a compiled
graph. `Sampled` (YOSO-m) and `Expected` (YOSO-E) are from YOSO (ICML 2021), `Soft` is multi-probe
soft hashing. Tensors that may require a gradient are passed to the call instead, as `parameters`.
"""

import abc
import dataclasses
import math
import numbers
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lshkit import checks, torch_ops
from lshkit.attention.arguments import check_choice, seed_tensor
from lshkit.attention.call import Call, aligned, expected_attention
from lshkit.attention.parameters import one_or_each_head, plane_rows
from lshkit.attention.unit_norm import AUTO, lift
from lshkit.hash_functions import MAX_HASHES

# The expectation costs products of every query with every key, a sample codes and tables of every
# row. They cost the same at 6 keys a hash where queries are as many as keys. Measured at 32 hashes,
# 8 heads, d = 64, fp32, one AVX-512 thread: forward is equal at 210 keys, causal forward at 290,
# forward and backward at 190.
EXPECTED_KEYS_PER_HASH = 6

DEFAULT_BITS = 12  # enough for 16,384 positions: see bits_for

UNIT_NORMS = ("l2", "lift")
EXPECTATION = ("auto", "never")


def bits_for(max_length: int) -> int:
    """Bits of a code for sequences of so many positions: 4 a bucket at most, 12 to 16 bits.

    In recall (docs/choosing.md) 8 positions a bucket cost 4 points of accuracy and 4 at most 0.6,
    by collisions with unrelated keys. On text 12 bits are better than fewer at 512 positions too.
    """
    return min(max((max_length - 1).bit_length() - 2, DEFAULT_BITS), 16)


@dataclass(frozen=True, kw_only=True, repr=False)
class Estimator(abc.ABC):
    """What all estimators share: how queries and keys get unit norm, and their form as a dict.

    Args:
        unit_norm: "l2" scales each row, so that cosines are compared. "lift" keeps the norms: two
            more features make unit vectors of the rows whose cosines are q . k / lift_scale (YOSO,
            appendix 1.1). Then D + 2 features are hashed, which "hadamard" pads to a power of two:
            a D of 62 costs half of what a D of 64 does.
        lift_scale: of "lift", the bound on the squared norms of queries and keys, also called tau
            in the paper: a number > 0, or "auto", the largest squared norm of each sequence and
            head. "auto" would leak future rows to a causal query, and is an error there. Masked
            keys and rows with a NaN or infinity are ignored. A tensor, of one number or one for
            each key head, goes into `parameters`.
    """

    unit_norm: str = "l2"
    lift_scale: float | str = 1.0

    name: ClassVar[str]

    def __post_init__(self) -> None:
        check_choice("unit_norm", self.unit_norm, UNIT_NORMS)
        scale, wanted = self.lift_scale, "a number > 0 or 'auto' (a tensor goes into parameters)"
        if isinstance(scale, str):
            if scale != AUTO:
                raise ValueError(f"lift_scale must be {wanted}, got {scale!r}")
        elif isinstance(scale, bool) or not isinstance(scale, numbers.Real):
            raise TypeError(f"lift_scale must be {wanted}, got {scale!r}")
        elif not 0 < scale < math.inf:
            raise ValueError(f"lift_scale must be {wanted}, got {scale}")
        else:
            self._set(lift_scale=float(scale))

    def _set(self, **fields: Any) -> None:
        """The plain Python numbers of what was given."""
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        """The sizes, and what differs from the defaults."""
        fields = [
            f"{field.name}={value!r}"
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
            or field.name in ("n_bits", "n_hashes", "n_probes", "sharpness")
        ]
        return f"{type(self).__name__}({', '.join(fields)})"

    def to_dict(self) -> dict[str, Any]:
        """{"estimator": its name, and its fields}, for `from_dict`, JSON and config files."""
        return {"estimator": self.name, **dataclasses.asdict(self)}

    @staticmethod
    def from_dict(options: Mapping[str, Any]) -> "Estimator":
        """The estimator from `to_dict`'s dict; missing fields have their defaults.

        Raises:
            TypeError, ValueError: "estimator" names none, or a field is unknown or wrong.
        """
        if not isinstance(options, Mapping):
            raise TypeError(f"options must be a dict, got {type(options).__name__}")
        options = dict(options)
        name = options.pop("estimator", Sampled.name)
        check_choice("estimator", name, ESTIMATORS)
        kind = ESTIMATORS[name]
        for option in options:
            if option not in OPTIONS[name]:
                raise TypeError(
                    f"{kind.__name__} has no option {option!r}; it has {', '.join(OPTIONS[name])}"
                )
        return kind(**options)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The tensors that `parameters` may hold."""
        return ("lift_scale",) if self.unit_norm == "lift" else ()

    @property
    def mean(self) -> "Expected | None":
        """The expectation over the hash functions; None where it has no closed form."""
        return None

    def for_inference(self, n_hashes: int | None) -> "Estimator":
        """Itself with another number of hashes, where it has any; itself for None."""
        return self

    def for_decoding(self) -> "Hashed":
        """What a `YosoState` of this estimator depends on. ValueError where there is none."""
        raise ValueError(
            f"estimator must be Sampled or Soft to decode step by step, got {self!r}: its keys "
            f"cannot be summed in tables"
        )

    def at_lengths(self, n_queries: int, n_keys: int) -> "Estimator":
        """The estimator that computes sequences of these lengths, without rules that look at them.

        For calls that hold a part of the rows: it is the whole lengths that rules go by.
        """
        return self

    def attend(self, call: Call) -> Tensor:
        """Attention `(B, H, N_q, D_v)`."""
        return self._attend(self.lifted(call))

    def lifted(self, call: Call) -> Call:
        """The call with queries and keys of unit norm, where a division alone does not do."""
        if self.unit_norm == "lift":
            scale = call.parameters.get("lift_scale", self.lift_scale)
            if isinstance(scale, Tensor):
                heads = call.key.shape[1]
                one_or_each_head("lift_scale", scale, heads, call.query.device)
            elif isinstance(scale, str):
                if call.is_causal:
                    raise ValueError(
                        "lift_scale must be a number or tensor with is_causal=True, got 'auto': "
                        "the largest norm of all rows would leak later rows to earlier queries"
                    )
                if call.query_starts is not None:
                    raise ValueError(
                        "lift_scale must be a number or tensor with cu_seqlens, got 'auto': the "
                        "largest norm of all rows would be shared by separate sequences"
                    )
            query, key = lift(call.query, call.key, call.key_mask, scale)
            call = call._replace(query=query, key=key)
        return call

    @abc.abstractmethod
    def _attend(self, call: Call) -> Tensor:
        """Attention of rows whose norms `unit_norm` has taken care of."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Expected(Estimator):
    """YOSO-E: exact collision probabilities as weights (YOSO, ICML 2021, equations 1 and 3).

    (1 - acos(cosine) / pi)^n_bits for every pair, in quadratic time and linear memory, without
    noise. Computed in float32, for float64 inputs in float64; products of bfloat16 inputs have
    bfloat16 factors where the CPU has AVX512-BF16 or AMX, with errors of 2^-8 of their terms.

    Args:
        n_bits: bits of the codes, tau in the paper, 1 to 16. More make the weights sharper.
        gradient: of queries and keys. "exact": the derivative (eq. 3), which is infinite for
            cosines of 1 and bounded there. "lower_bound": n_bits/2 times the weight (eq. 4).
        unit_norm, lift_scale: see `Estimator`.
    """

    n_bits: int = DEFAULT_BITS
    gradient: str = "exact"

    name: ClassVar[str] = "expected"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("gradient", self.gradient, ("exact", "lower_bound"))
        self._set(n_bits=checks.integer("n_bits", self.n_bits, 1, 16))

    @property
    def mean(self) -> "Expected":
        """Itself."""
        return self

    def _attend(self, call: Call) -> Tensor:
        return expected_attention(call, self.n_bits, self.gradient)


@dataclass(frozen=True, kw_only=True, repr=False)
class Hashed(Estimator):
    """Base of the estimators that hash: the family of hash functions and its sizes."""

    n_bits: int = None  # type: ignore[assignment]  # an integer as soon as it is made
    n_hashes: int = 32
    hasher: str = "hadamard"
    max_length: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("hasher", self.hasher, torch_ops.FAMILY)
        n_bits = self.n_bits
        if self.max_length is not None:
            self._set(max_length=checks.integer("max_length", self.max_length, 1, 2**31 - 1))
            by_rule = bits_for(self.max_length)
            if n_bits is not None and n_bits != by_rule:
                raise ValueError(
                    f"n_bits must be None with max_length={self.max_length}, which sets it to "
                    f"{by_rule}, got {n_bits!r}"
                )
            n_bits = by_rule
        elif n_bits is None:
            n_bits = DEFAULT_BITS
        self._set(
            n_bits=checks.integer("n_bits", n_bits, 1, 16),
            n_hashes=checks.integer("n_hashes", self.n_hashes, 1, MAX_HASHES),
        )

    def check_length(self, n_keys: int) -> None:
        """A warning where a query sees more keys than max_length."""
        if self.max_length is None or n_keys <= self.max_length or torch.compiler.is_compiling():
            return
        # The length itself is left out: Python shows a warning of the same text once.
        warnings.warn(
            f"a sequence is longer than max_length={self.max_length} of {self!r}: unrelated keys "
            "may outweigh those that fit. Train with a larger max_length",
            stacklevel=2,
        )

    def at_lengths(self, n_queries: int, n_keys: int) -> Estimator:
        self.check_length(n_keys)
        return self

    def for_inference(self, n_hashes: int | None) -> "Hashed":
        return self if n_hashes is None else dataclasses.replace(self, n_hashes=n_hashes)

    def for_decoding(self) -> "Hashed":
        if self.unit_norm == "lift":
            raise ValueError(
                "unit_norm must be 'l2' to decode step by step, got 'lift': its bound is "
                "unknown before the last key"
            )
        return self

    def probes(self) -> tuple[int, int]:
        """Buckets of a hash that a query and a key belong to."""
        return 1, 1

    def hash_functions(
        self,
        heads: int,
        columns: int,
        parameters: dict[str, Any],
        seed: int | Tensor | None,
        device: torch.device,
    ) -> tuple[Tensor, int, int, int]:
        """As the operators take them: the planes, given or drawn from the seed, of each key head;
        the number of the family, n_bits, n_hashes."""
        sizes, family = (self.n_bits, self.n_hashes), torch_ops.FAMILY[self.hasher]
        if "planes" in parameters:
            planes = plane_rows(parameters["planes"], heads, columns, *sizes, device)
        else:
            seed = seed_tensor(seed, device)
            planes = torch_ops.hash_parameters(seed, heads, columns, *sizes, family)
        return planes, family, *sizes

    def functions_of(self, call: Call) -> tuple[Tensor, int, int, int]:
        """`hash_functions` of the key heads that the call has."""
        n_heads, columns = call.key.shape[1], call.query.shape[-1]
        parameters, seed, device = call.parameters, call.seed, call.query.device
        if call.heads is None or "planes" in parameters:  # which are those of the call's heads
            return self.hash_functions(n_heads, columns, parameters, seed, device)
        first, of_all = call.heads
        planes, *sizes = self.hash_functions(of_all, columns, parameters, seed, device)
        return planes[first : first + n_heads], sizes[0], sizes[1], sizes[2]


@dataclass(frozen=True, kw_only=True, repr=False)
class Sampled(Hashed):
    """YOSO-m: counts of the collisions of n_hashes codes as weights (YOSO, ICML 2021, equation 2).

    The mean over the hash functions is `Expected`. Time and memory are linear in the lengths.
    Queries and keys are only hashed, so their gradient is an estimate of the expectation's; values
    get the exact gradient of the computed sum. Computed in float32.

    Args:
        n_bits: bits of a code, tau in the paper, 1 to 16. More make the weights sharper. None: by
            max_length, or 12, which suffice for 16,384 positions.
        max_length: instead of n_bits, the number of keys in the longest sequence: 12 bits up to
            16,384 and one more each time it doubles. Tables and states grow with 2^n_bits. A
            warning is given where a sequence is longer (not in compiled graphs).
        n_hashes: number of codes, m in the paper, 1 to 65535. More reduce the noise.
        hasher: "hadamard" (fast rotations) or "hyperplane" (independent normals).
        gradient: of queries and keys. "lower_bound" weights a pair by n_bits/2 times its weight
            (eq. 4). "collided" (`*YOSO`) takes the derivative of the probability (eq. 3) on the
            pairs that collide in some hash, "unbiased" divides it by the inclusion probability 1 -
            (1 - p)^n_hashes, so that its mean is the exact gradient; both compare all pairs of
            codes, in quadratic time and linear memory. Where the expectation is computed instead,
            both are its exact derivative.
        expectation: "auto" computes the expectation, which has no noise, wherever it costs less:
            for N_q queries and N_k keys where 2 N_q N_k <= 6 n_hashes (N_q + N_k), so for up to 6
            n_hashes positions (of packed sequences their mean lengths count), and for one query
            over a cache. "never" samples at all lengths. `torch.export` samples, since a graph for
            all lengths can hold only one of the two; so does `YosoState`.
        gradient_rank: R, 1 to D_v, makes the lower bound's gradient of long sequences D_v / R times
            cheaper: each hash uses R coordinates of a pair's product of output gradient and value,
            after a random rotation of both. Unbiased, with more noise; exact where comparing the
            pairs of a bucket costs less: in small buckets, and at 8 bits up to 1024 rows. With
            fewer bits shorter sequences are sketched too. None: exact. On CUDA the gradient is
            always exact.
        gradient_hashes: the gradient of queries and keys is taken from so many of the n_hashes, 1
            to n_hashes, which divides its cost: unbiased, with the noise that so few hashes have.
            The output and the gradient of values have all of them. None: all. For gradient
            "lower_bound" and "unbiased".
        unit_norm, lift_scale: see `Estimator`.
    """

    gradient: str = "lower_bound"
    expectation: str = "auto"
    gradient_rank: int | None = None
    gradient_hashes: int | None = None

    name: ClassVar[str] = "sampled"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("gradient", self.gradient, ("lower_bound", "collided", "unbiased"))
        check_choice("expectation", self.expectation, EXPECTATION)
        if self.gradient_rank is not None:
            self._set(gradient_rank=checks.integer("gradient_rank", self.gradient_rank, 1))
            if self.gradient != "lower_bound":
                raise ValueError(
                    f'gradient_rank needs gradient="lower_bound", got gradient={self.gradient!r}'
                )
        if self.gradient_hashes is not None:
            count = checks.integer("gradient_hashes", self.gradient_hashes, 1, self.n_hashes)
            self._set(gradient_hashes=count)
            if self.gradient == "collided":
                raise ValueError(
                    'gradient_hashes needs gradient="lower_bound" or "unbiased", got '
                    "gradient='collided', whose mean depends on the number of hashes"
                )

    def for_inference(self, n_hashes: int | None) -> "Sampled":
        if n_hashes is None:
            return self
        subset = self.gradient_hashes
        if subset is not None and subset >= n_hashes:
            subset = None
        return dataclasses.replace(self, n_hashes=n_hashes, gradient_hashes=subset)

    def for_decoding(self) -> "Sampled":
        super().for_decoding()
        return Sampled(
            n_bits=self.n_bits,
            n_hashes=self.n_hashes,
            max_length=self.max_length,
            hasher=self.hasher,
            expectation="never",
        )

    @property
    def mean(self) -> Expected:
        """With the gradient that goes with the samples'."""
        return Expected(
            n_bits=self.n_bits,
            gradient="lower_bound" if self.gradient == "lower_bound" else "exact",
            unit_norm=self.unit_norm,
            lift_scale=self.lift_scale,
        )

    def at_lengths(self, n_queries: int, n_keys: int) -> Estimator:
        super().at_lengths(n_queries, n_keys)
        if self.expectation == "auto" and self._expectation_is_cheaper(n_queries, n_keys):
            return self.mean
        return dataclasses.replace(self, expectation="never")

    def _expectation_is_cheaper(self, n_queries: int, n_keys: int) -> bool:
        hashed = EXPECTED_KEYS_PER_HASH * self.n_hashes * (n_queries + n_keys)
        return 2 * n_queries * n_keys <= hashed

    def _attend(self, call: Call) -> Tensor:
        self.check_length(call.lengths[1])
        rank, n_values = self.gradient_rank, call.value.shape[-1]
        if rank is not None and rank > n_values:
            raise ValueError(
                f"gradient_rank must be at most value's number of columns {n_values}, got {rank}"
            )
        if (
            self.expectation == "auto"
            and not torch.compiler.is_exporting()
            and self._expectation_is_cheaper(*call.lengths)
        ):
            exact = self.gradient != "lower_bound"
            return expected_attention(call, self.n_bits, "exact" if exact else "lower_bound")
        call, first = aligned(call)
        rotation = None
        if rank is not None and torch.is_grad_enabled():
            call = call._replace(seed=seed_tensor(call.seed, call.query.device))
            rotation = self._rotation_of(call)
        out, *_ = torch_ops.yoso_attention(
            *call.tensors,
            *self.functions_of(call),
            *(*call.options, torch_ops.GRADIENT[self.gradient]),
            *(0 if rotation is None else rank, rotation, self.gradient_hashes or 0),
        )
        return out[:, :, first:] if first else out

    @staticmethod
    def _rotation_of(call: Call) -> Tensor:
        n_heads, n_values = call.query.shape[1], call.value.shape[-1]
        if call.heads is None:
            return torch_ops.gradient_rotation(call.seed, n_heads, n_values)
        groups = n_heads // call.key.shape[1]
        first, of_all = (groups * number for number in call.heads)
        rotation = torch_ops.gradient_rotation(call.seed, of_all, n_values)
        return rotation[first : first + n_heads].contiguous()


@dataclass(frozen=True, kw_only=True, repr=False)
class Soft(Hashed):
    """Soft codes: multi-probe soft hashing. A row belongs to its likeliest buckets, with weights.

    In each hash a row has its own code and those with its least certain bits flipped, weighted by
    the softmax of `-2 sharpness sum |z|` over the projections z that the flipped bits cross.
    Time and memory are linear in the lengths; the gradient is exact given the selected buckets.
    Computed in float32; on the CPU, sums of bfloat16 and float16 inputs without a causal mask are
    added up in 16-bit integers where that is precise (docs/attention.md, "Data types").

    Args:
        n_bits, max_length: see `Sampled`.
        n_hashes: number of codes, 1 to 65535. More reduce the noise.
        hasher: "hadamard" (fast rotations) or "hyperplane" (independent normals, or those in
            `parameters`).
        n_probes: buckets a row belongs to in each hash, of queries and keys or `(queries, keys)`, 1
            to 2^n_bits. 1 is its code alone.
        sharpness: how fast a bucket's weight falls with the projections that its flipped bits
            cross, > 0. A tensor, of one number or one for each key head, goes into `parameters`.
        unit_norm, lift_scale: see `Estimator`.

    parameters: "sharpness", `()` or `(H_k,)`; with hasher="hyperplane" "planes", `(H_k, n_hashes,
    n_bits, D)` or `(H_k, n_hashes * n_bits, D)` ("lift": D + 2). Normals drawn from N(0, 1) give
    the projections z unit variance; larger norms are sharper.
    """

    n_probes: int | tuple[int, int] = 4
    sharpness: float = 2.0

    name: ClassVar[str] = "soft"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.sharpness, Tensor):
            raise TypeError(
                "sharpness must be a number: a tensor goes into parameters={'sharpness': tensor}"
            )
        n_probes, most = self.n_probes, 2**self.n_bits
        if isinstance(n_probes, (tuple, list)):
            if len(n_probes) != 2:
                raise ValueError(f"n_probes must be a number or (queries, keys), got {n_probes!r}")
            n_probes = tuple(checks.integer("n_probes", t, 1, most) for t in n_probes)
        else:
            n_probes = checks.integer("n_probes", n_probes, 1, most)
        self._set(n_probes=n_probes, sharpness=checks.positive("sharpness", self.sharpness))

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The tensors that `parameters` may hold: planes only with hasher="hyperplane"."""
        lifted = ("lift_scale",) if self.unit_norm == "lift" else ()
        return (*lifted, "sharpness", *(("planes",) if self.hasher == "hyperplane" else ()))

    def probes(self) -> tuple[int, int]:
        n_probes = self.n_probes
        return n_probes if isinstance(n_probes, tuple) else (n_probes, n_probes)

    def sharpness_of(self, call: Call) -> Tensor:
        """(1,) or one for each key head of the call."""
        heads, device = call.key.shape[1], call.query.device
        sharpness = call.parameters.get("sharpness")
        if sharpness is None:
            return torch.full((1,), self.sharpness, dtype=torch.float32, device=device)
        return one_or_each_head("sharpness", sharpness, heads, device)

    def _attend(self, call: Call) -> Tensor:
        self.check_length(call.lengths[1])
        call, first = aligned(call)
        sharpness = self.sharpness_of(call)
        planes, *family = self.functions_of(call)
        out, *_ = torch_ops.soft_attention(
            *(*call.tensors, planes, sharpness, *family, *self.probes(), *call.options)
        )
        return out[:, :, first:] if first else out


ESTIMATORS = {kind.name: kind for kind in (Sampled, Expected, Soft)}
# torch.compile cannot trace dataclasses.fields of a class.
OPTIONS = {
    name: tuple(field.name for field in dataclasses.fields(kind))
    for name, kind in ESTIMATORS.items()
}


def estimator_of(given: Estimator | str, name: str = "estimator") -> Estimator:
    """The estimator itself, or the one with default options that a name stands for."""
    if isinstance(given, Estimator):
        return given
    if isinstance(given, str) and given in ESTIMATORS:
        return ESTIMATORS[given]()
    words = ", ".join(map(repr, ESTIMATORS))
    message = f"{name} must be Sampled(...), Expected(...), Soft(...) or one of {words}"
    raise (ValueError if isinstance(given, str) else TypeError)(f"{message}, got {given!r}")
