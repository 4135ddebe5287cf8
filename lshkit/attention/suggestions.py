"""Error and cost of several settings of attention on a user's queries and keys."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, scaled_dot_product_attention

from lshkit import checks
from lshkit.attention.collided_softmax import lsh_attention
from lshkit.attention.estimators import (
    Colliding,
    Estimator,
    Expected,
    Sampled,
    Soft,
    bits_for,
    estimator_of,
)
from lshkit.attention.functional import yoso_attention

Runs: TypeAlias = list[tuple[int, tuple[int, int]]]  # (head, (first, end)) of queries

RUN = 16  # sampled queries come in runs of neighbours, as windows go by position
MAX_HEADS = 4
# Options that change what is called, from rows of a single head, which are what is measured.
NOT_MEASURED = {"seed", "causal_offset", "return_pairs", "cu_seqlens", "cu_seqlens_k", "parameters"}
PATIENCE = 0.5  # seconds after which a setting is timed no more
FUNCTIONS: dict[str, Any] = {"yoso_attention": yoso_attention, "lsh_attention": lsh_attention}


def default_settings(n_keys: int) -> tuple[Estimator | tuple[str, dict[str, Any]], ...]:
    """A choice for sequences of so many keys."""
    n_bits = bits_for(n_keys)
    return (
        Expected(n_bits=n_bits),
        *(
            Sampled(n_bits=n_bits, n_hashes=n_hashes, expectation="never")
            for n_bits in (8, n_bits)
            for n_hashes in (16, 32, 64, 128)
        ),
        *(Soft(n_bits=n_bits, n_hashes=n_hashes) for n_hashes in (32, 64)),
        *(
            ("lsh_attention", {"n_bits": n_bits, "n_hashes": n_hashes})
            for n_bits, n_hashes in ((6, 32), (8, 32), (8, 64), (10, 32), (10, 64), (12, 64))
        ),
    )


@dataclass(frozen=True)
class Suggestion:
    """One setting: call `getattr(lshkit.attention, function)(query, key, value, **options)`.

    Errors are mean angles between output rows, in radians. `error`: from the setting's own
    expectation over the hash functions (of lsh_attention: softmax attention; of Colliding: softmax
    of its cosines; of soft codes, from the angles between outputs). `softmax_error`: from softmax
    attention. `pairs`: share of the pairs that lsh_attention scores; else None.
    `cost`: time over that of softmax attention; None where it was not measured.
    """

    function: str
    options: dict[str, Any]
    error: float
    softmax_error: float
    pairs: float | None
    cost: float | None

    @property
    def name(self) -> str:
        """The call, as text: the function and its options."""
        return f"{self.function}({', '.join(f'{k}={v!r}' for k, v in self.options.items())})"

    @property
    def n_hashes(self) -> int:
        """Number of codes of a row; 0 where none is made."""
        return getattr(self.options.get("estimator"), "n_hashes", self.options.get("n_hashes", 0))


@dataclass(frozen=True)
class Suggestions:
    """What `suggest` found; `print` shows it as a table."""

    rows: tuple[Suggestion, ...]
    n_keys: int
    n_samples: int = field(default=0)  # queries used

    def cheapest(self, error: float, of: str = "softmax_error") -> Suggestion | None:
        """The setting of lowest cost (if not measured: fewest hashes) within an error, or None."""
        if of not in ("error", "softmax_error"):
            raise ValueError(f"of must be 'error' or 'softmax_error', got {of!r}")
        error = checks.positive("error", error)
        able = [row for row in self.rows if getattr(row, of) <= error]
        return min(
            able,
            key=lambda r: r.n_hashes if r.cost is None else r.cost,
            default=None,
        )

    @property
    def report(self) -> dict[str, Any]:
        """As a dict, like `LSHKernelDensity.report_`: methods with their error and cost."""
        methods = {}
        for row in self.rows:
            options = dict(row.options)
            if "estimator" in options:
                options["estimator"] = options["estimator"].to_dict()
            methods[row.name] = asdict(row) | {"options": options}
        return {"n_keys": self.n_keys, "n_samples": self.n_samples, "methods": methods}

    def __str__(self) -> str:
        header = ("attention", "error", "to softmax", "pairs", "time / softmax")
        lines = [header]
        for row in self.rows:
            pairs = "-" if row.pairs is None else f"{row.pairs:.1%}"
            cost = "-" if row.cost is None else f"{row.cost:.2f}"
            lines.append((row.name, f"{row.error:.3f}", f"{row.softmax_error:.3f}", pairs, cost))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        formats = [f"<{widths[0]}", *(f">{width}" for width in widths[1:])]
        table = ["  ".join(map(format, line, formats)) for line in lines]
        note = f"{self.n_samples} queries, {self.n_keys} keys; errors are mean angles in radians"
        return "\n".join([*table, note])


def suggest(
    query: np.ndarray | Tensor,
    key: np.ndarray | Tensor,
    value: np.ndarray | Tensor | None = None,
    *,
    settings: Iterable[Estimator | tuple[str, dict[str, Any]]] | None = None,
    scale: float | None = None,
    n_samples: int = 128,
    n_trials: int = 4,
    timed: bool = True,
    seed: int = 0,
) -> Suggestions:
    """Measures the expected error and cost of settings of attention on queries and keys.

    A few runs of neighbouring queries of up to four heads attend to all keys, with each of n_trials
    sets of hash functions; errors are means over them. (Settings of yoso_attention whose output
    depends on all queries, lift_scale="auto", use all.) Times are those of one full
    head, without gradients, relative to softmax attention's, interleaved. Attention is not causal
    here: pass the keys that a typical query sees.

    Args:
        query: `(..., N_q, D)`, numpy array or torch tensor; leading sizes are heads.
        key: `(..., N_k, D)`, the same leading sizes.
        value: `(..., N_k, D_v)`. None: standard normal, of D columns, whose mean over many keys is
            small: errors are then larger than those of values with a common mean.
        settings: estimators of `yoso_attention`, or pairs of "yoso_attention" or "lsh_attention"
            and its options, without those of packed sequences, groups of heads, seeds and results.
            None: a choice, with the bits that `max_length` of the number of keys sets.
        scale: of the scores of softmax and lsh_attention; None: 1 / sqrt(D).
        n_samples: number of queries used, in runs that are drawn with replacement: of a few
            queries some count several times.
        n_trials: sets of hash functions, 2 or more.
        timed: measure times, which takes seconds at thousands of keys; else costs are None.
        seed: of the choice of queries and of the hash functions.

    Returns:
        `Suggestions`: `rows`, `cheapest(error)`, a table by `str`.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or range; an option is none of
            the function's.
    """
    n_samples = checks.integer("n_samples", n_samples, 1)
    n_trials = checks.integer("n_trials", n_trials, 2)
    timed = checks.boolean("timed", timed)
    seed = checks.integer("seed", seed, 0, 2**62)
    generator = torch.Generator("cpu").manual_seed(seed)
    query, key, value = _heads(query, key, value, generator)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else checks.positive("scale", scale)
    settings = _checked(default_settings(key.shape[-2]) if settings is None else settings)
    runs = _runs(query, n_samples, generator)
    with torch.no_grad():

        def exact(q: Tensor, k: Tensor, v: Tensor, *unused: Any) -> Tensor:
            return scaled_dot_product_attention(q, k, v, scale=scale)

        softmax = _outputs(exact, query, key, value, runs, 1)
        rows = []
        for function, options in settings:
            row = _measure(
                *(function, options, query, key, value, runs, scale, n_trials, seed, softmax),
                exact=exact if timed else None,
            )
            rows.append(row)
    return Suggestions(tuple(rows), key.shape[-2], sum(len(range(*run)) for _, run in runs))


def _heads(
    query: Any, key: Any, value: Any, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """`(heads, rows, columns)` each, of at most MAX_HEADS heads, in float32."""
    tensors = {}
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x is None and name == "value":
            continue
        if isinstance(x, np.ndarray):
            x = torch.from_numpy(np.ascontiguousarray(x))
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name} must be an array or tensor of floats, got {got}")
        if x.dim() < 2 or x.numel() == 0:
            raise ValueError(
                f"{name} must be (..., rows, columns), not empty, got {tuple(x.shape)}"
            )
        tensors[name] = x.detach().to("cpu", torch.float32)
        if not tensors[name].isfinite().all():
            raise ValueError(f"{name} must be finite, in float32 too")
    query, key, value = tensors["query"], tensors["key"], tensors.get("value")
    if key.shape[:-2] != query.shape[:-2] or key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"key must have query's leading sizes and columns {tuple(query.shape)}, got "
            f"{tuple(key.shape)}"
        )
    if value is None:
        value = torch.randn(key.shape, generator=generator, dtype=torch.float32, device="cpu")
    if value.shape[:-1] != key.shape[:-1]:
        raise ValueError(f"value must have key's rows {tuple(key.shape)}, got {tuple(value.shape)}")
    query, key, value = (x.reshape(-1, *x.shape[-2:]) for x in (query, key, value))
    chosen = np.linspace(0, len(query) - 1, min(MAX_HEADS, len(query))).round().astype(int).tolist()
    return query[chosen], key[chosen], value[chosen]


def _checked(settings: Iterable[Any]) -> list[tuple[str, dict[str, Any]]]:
    given, checked = settings, []
    try:
        for setting in given:
            if isinstance(setting, Estimator):
                setting = "yoso_attention", {"estimator": setting}
            function, options = setting
            checked.append((function, dict(options)))
    except (TypeError, ValueError):
        raise TypeError(
            f"settings must be estimators, or pairs of a function's name and a dict of its "
            f"options, got {given!r}"
        ) from None
    for function, options in checked:
        if not isinstance(function, str) or function not in FUNCTIONS:
            raise ValueError(f"settings must name one of {', '.join(FUNCTIONS)}, got {function!r}")
        allowed = FUNCTIONS[function].__kwdefaults__.keys() - NOT_MEASURED
        if unknown := options.keys() - allowed:
            raise ValueError(f"settings of {function} must not have {sorted(unknown)}")
        if function == "yoso_attention":
            options["estimator"] = estimator_of(options.get("estimator", Sampled()))
    return checked


def _runs(
    query: Tensor, n_samples: int, generator: torch.Generator
) -> list[tuple[int, tuple[int, int]]]:
    """(head, (first, end)) of neighbouring queries."""
    heads, n = query.shape[:2]
    length = min(RUN, n, n_samples)
    count = max(n_samples // length, 1)
    firsts = torch.randint(n - length + 1, (count,), generator=generator, device="cpu").tolist()
    return [(i * heads // count, (first, first + length)) for i, first in enumerate(firsts)]


def _outputs(
    attend: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    runs: Runs,
    n_trials: int,
    in_full: bool = False,
) -> Tensor:
    """Output rows of the sampled queries, `(n_trials, samples, d_v)`. In full: from whole heads."""
    trials = []
    for trial in range(n_trials):
        if in_full:
            heads = {h for h, _ in runs}
            outs = {h: attend(*(x[h][None] for x in (query, key, value)), 0, trial) for h in heads}
            rows = [outs[h][0, a:b] for h, (a, b) in runs]
        else:
            rows = [
                attend(query[h, a:b][None], key[h][None], value[h][None], a, trial)[0]
                for h, (a, b) in runs
            ]
        trials.append(torch.cat(rows))
    return torch.stack(trials).double()


def _angle(x: Tensor, y: Tensor) -> float:
    return cosine_similarity(x, y, -1).clamp(-1, 1).acos().mean().item()


def _cost(
    attend: Callable[..., Any], exact: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor
) -> float:
    """Time of one head in full over exact's, the smallest of up to three each, in turns."""
    head = query[:1], key[:1], value[:1]
    best = [math.inf, math.inf]
    start = time.perf_counter()
    for round_ in range(3):
        if round_ > 0 and time.perf_counter() - start > PATIENCE:
            break
        for i, call in enumerate((attend, exact)):
            begin = time.perf_counter()
            call(*head)
            best[i] = min(best[i], time.perf_counter() - begin)
    return best[0] / best[1]


def _measure(
    function: str,
    options: dict[str, Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    runs: Runs,
    scale: float,
    n_trials: int,
    seed: int,
    softmax: Tensor,
    *,
    exact: Callable[..., Any] | None,
) -> Suggestion:
    used = []
    estimator = options.get("estimator")
    # A run of queries is computed as the whole head is.
    at_lengths = estimator and estimator.at_lengths(query.shape[-2], key.shape[-2])

    def attend(q: Tensor, k: Tensor, v: Tensor, first: int, trial: int) -> Tensor:
        own = options | {"seed": seed + trial}
        if function == "yoso_attention":
            own |= {"estimator": at_lengths, "causal_offset": first}
            return yoso_attention(q, k, v, **own)
        own = {"causal_offset": first, "scale": scale} | own | {"return_pairs": True}
        out, pairs = lsh_attention(q, k, v, **own)
        used.append(pairs.float().mean().item() / k.shape[-2])
        return out

    def of(other: Estimator) -> Callable[..., Tensor]:
        own = options | {"estimator": other, "seed": seed}
        return lambda q, k, v, first, trial: yoso_attention(q, k, v, **own)

    def in_full(q: Tensor, k: Tensor, v: Tensor) -> Any:
        own = options if function == "yoso_attention" else options | {"scale": scale}
        return FUNCTIONS[function](q, k, v, seed=seed, **own)

    # The bound "auto" depends on all queries. (Calls take the position of the first row.)
    whole = estimator is not None and isinstance(estimator.lift_scale, str)
    sampled = _outputs(attend, query, key, value, runs, n_trials, whole)
    softmax_error = _angle(sampled, softmax)
    if estimator is None:
        error = softmax_error
    elif isinstance(estimator, Colliding):
        error = _angle(sampled, _outputs(of(estimator.exact()), query, key, value, runs, 1, whole))
    elif estimator.mean is None:
        # Two unit rows whose errors are independent have the product of the cosines of both angles
        # for the cosine between them.
        between = cosine_similarity(sampled[1:], sampled[:-1], -1).mean(0).clamp(0, 1)
        error = between.sqrt().acos().mean().item()
    else:
        error = _angle(sampled, _outputs(of(estimator.mean), query, key, value, runs, 1, whole))
    return Suggestion(
        function,
        options,
        error,
        softmax_error,
        float(np.mean(used)) if used else None,
        None if exact is None else _cost(in_full, exact, query, key, value),
    )
