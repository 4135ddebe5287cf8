"""What is no array, tensor or estimator is refused at the door, by the name of the argument.

LSHKernelDensity checks its arrays by scikit-learn's own functions, whose messages those are.
"""

import re

import numpy as np
import pytest
from cases.kde import clustered

from lshkit.buckets import BucketTable, HashTables, bucket_sum, collisions, fold
from lshkit.hashing import EuclideanLSH, FastHadamard, Hyperplane, RandomBinning
from lshkit.sampling import LSHSampler, log_partition

torch = pytest.importorskip("torch")

from lshkit.attention import (  # noqa: E402
    Colliding,
    Estimator,
    Expected,
    Sampled,
    Soft,
    YosoAttention,
    YosoState,
    bert_lsh_attention,
    lsh_attention,
    suggest,
    yoso_attention,
)

ROWS, _ = clustered(200, 6, 5)
HASHER = FastHadamard(6, 4, 8, seed=0)
CODES = HASHER.hash(ROWS)
TENSORS = {name: torch.randn(1, 2, 9, 6) for name in ("query", "key", "value")}
X = torch.randn(1, 9, 12)
MODULE = YosoAttention(12, 2)
STATE = YosoState(1, 2, 6, seed=0)
SAMPLER = LSHSampler(HASHER, seed=0).fit(ROWS)
TABLE = BucketTable(8, HASHER.n_buckets, n_values=2)
TABLES = HashTables(CODES)


def of_state(name):
    return lambda **given: getattr(STATE, name)(**given)


def with_estimator(estimator):
    return lambda **given: yoso_attention(**given, estimator=estimator)


# Name of a call: the call, and the arguments with which it is right.
CALLS = {
    **{
        f"yoso_attention, {type(e).__name__}": (with_estimator(e), TENSORS)
        for e in (Sampled(), Sampled(expectation="never"), Expected(), Soft(), Colliding())
    },
    "lsh_attention": (lsh_attention, TENSORS),
    "bert_lsh_attention": (bert_lsh_attention, TENSORS),
    "YosoAttention": (MODULE, {"query": X, "key": X, "value": X}),
    **{f"YosoState.{name}": (of_state(name), TENSORS) for name in ("step", "prefill")},
    "YosoState.attend": (STATE.attend, {"query": TENSORS["query"]}),
    "suggest": (
        lambda **given: suggest(**given, settings=[Soft()], n_samples=4, timed=False),
        {name: x[0, 0] for name, x in TENSORS.items()},
    ),
    **{
        f"{type(hasher).__name__}.hash": (hasher.hash, {"x": ROWS})
        for hasher in (
            *(HASHER, Hyperplane(6, 4, 2, seed=0)),
            *(EuclideanLSH(6, 2, 2, width=1.0, seed=0), RandomBinning(6, 2, bandwidth=1.0, seed=0)),
        )
    },
    "collision_probability": (HASHER.collision_probability, {"x": ROWS, "y": ROWS}),
    "bucket_sum": (
        lambda **given: bucket_sum(**given, n_buckets=HASHER.n_buckets),
        {"query_codes": CODES, "key_codes": CODES, "values": ROWS},
    ),
    "collisions": (collisions, {"query_codes": CODES, "key_codes": CODES}),
    "fold": (lambda **given: fold(**given, n_buckets=4), {"codes": CODES}),
    "BucketTable.add": (TABLE.add, {"codes": CODES, "values": ROWS[:, :2]}),
    "BucketTable.query": (TABLE.query, {"codes": CODES}),
    "HashTables.draw": (lambda **given: TABLES.draw(**given, seed=0), {"query_codes": CODES}),
    "LSHSampler.fit": (LSHSampler(HASHER, seed=0).fit, {"X": ROWS}),
    "LSHSampler.sample": (
        lambda **given: SAMPLER.sample(**given, n_samples=3),
        {"query": ROWS[:2]},
    ),
    "log_partition": (
        lambda **given: log_partition(**given, n_samples=50, seed=0),
        {"query": ROWS[:2], "weight_matrix": ROWS},
    ),
}
BAD = {
    "an object": object(),
    "a word": "x",
    "ragged": [[1.0], [1.0, 2.0]],
    "complex": np.ones((9, 6), complex),
    "a number": np.float64(1.0),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(
    "call, name", [(call, name) for call, (_, good) in CALLS.items() for name in good]
)
def test_a_wrong_array_is_refused_by_its_name(call, name, bad):
    function, good = CALLS[call]
    with pytest.raises((TypeError, ValueError)) as refused:
        function(**{**good, name: BAD[bad]})
    assert re.search(rf"\b{name}\b", str(refused.value)), str(refused.value)


@pytest.mark.parametrize("call", CALLS)
def test_the_right_ones_are_taken(call):
    function, good = CALLS[call]
    with torch.no_grad():
        function(**good)


@pytest.mark.parametrize("bad", [None, 3, "softmax", Estimator, {"estimator": "soft"}], ids=repr)
@pytest.mark.parametrize(
    "call",
    [
        lambda e: yoso_attention(**TENSORS, estimator=e),
        lambda e: YosoAttention(12, 2, estimator=e),
        lambda e: YosoState(1, 2, 6, estimator=e, seed=0),
    ],
)
def test_what_is_no_estimator_is_refused(call, bad):
    with pytest.raises((TypeError, ValueError), match="estimator must be Sampled"):
        call(bad)
