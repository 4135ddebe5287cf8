"""What all estimators share, and their list."""

import dataclasses
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from lshkit import checks
from lshkit.attention.call import Call
from lshkit.attention.parameters import one_or_each_head
from lshkit.attention.unit_norm import AUTO, lift

if TYPE_CHECKING:
    from lshkit.attention.estimators.expected import Expected
    from lshkit.attention.estimators.hashed import BucketSums

UNIT_NORMS = ("l2", "lift")

# By name: the classes, listed in __init__.py, and their fields, which torch.compile cannot trace.
ESTIMATORS: dict[str, type["Estimator"]] = {}
OPTIONS: dict[str, tuple[str, ...]] = {}


@dataclass(frozen=True, kw_only=True, repr=False)
class Estimator:  # no ABC: `isinstance` of one costs every call 15 us where caches are cold
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
        checks.choice("unit_norm", self.unit_norm, UNIT_NORMS)
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

    def _positive(self, name: str) -> float:
        """The field, a number > 0."""
        value = getattr(self, name)
        if isinstance(value, Tensor):
            wanted = f"a tensor goes into parameters={{{name!r}: tensor}}"
            raise TypeError(f"{name} must be a number: {wanted}")
        return checks.positive(name, value)

    def __repr__(self) -> str:
        """The sizes, and what differs from the defaults."""
        fields = [
            f"{field.name}={value!r}"
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
            or field.name in ("n_bits", "n_hashes", "n_probes", "sharpness", "scale")
        ]
        return f"{type(self).__name__}({', '.join(fields)})"

    def to_dict(self) -> dict[str, Any]:
        """{"estimator": its name, and its fields}, for `from_dict`, JSON and config files."""
        names = [field.name for field in dataclasses.fields(self)]
        return {"estimator": self.name} | {name: getattr(self, name) for name in names}

    @staticmethod
    def from_dict(options: Mapping[str, Any]) -> "Estimator":
        """The estimator from `to_dict`'s dict. Missing fields have their defaults, "estimator"
        "sampled".

        Raises:
            TypeError, ValueError: "estimator" names none, or a field is unknown or wrong.
        """
        if not isinstance(options, Mapping):
            raise TypeError(f"options must be a dict, got {type(options).__name__}")
        options = dict(options)
        name = options.pop("estimator", "sampled")
        checks.choice("estimator", name, ESTIMATORS)
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

    def for_decoding(self) -> "BucketSums":
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

    def _attend(self, call: Call) -> Tensor:
        """Attention of rows whose norms `unit_norm` has taken care of."""
        raise NotImplementedError(f"{type(self).__name__} computes no attention")
