"""What is no array, tensor or estimator is refused at the door, by the name of the argument.

LSHKernelDensity leaves most of what is wrong with its arrays to scikit-learn, whose messages those
are, but not what scikit-learn takes for numbers.
"""

import re

import numpy as np
import pytest
from cases.kde import clustered

from lshkit.buckets import BucketTable, HashTables, bucket_sum, collisions, fold
from lshkit.hashing import EuclideanLSH, FastHadamard, Hyperplane, RandomBinning
from lshkit.kde import (
    LSHKernelDensity,
    LSHKernelRegressor,
    LSHOutlierDetector,
    likelihood_curve,
    two_sample_test,
)
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


def fitted(estimator, **options):
    def call(**given):
        return estimator(**options | given).fit(ROWS, ROWS[:, 0])

    return call


SKETCH = dict(kernel="angular", algorithm="bucket_sum")
DENSITY = LSHKernelDensity().fit(ROWS)
# Name of a call: the call, and the names of its arguments that are numbers in a range.
NUMBERS = {
    "LSHKernelDensity": (
        fitted(LSHKernelDensity),
        "bandwidth rtol atol confidence n_bits n_hashes random_state n_jobs",
    ),
    "a sketch": (fitted(LSHKernelDensity, **SKETCH), "sliding_window half_life"),
    "a window": (
        fitted(LSHKernelDensity, **SKETCH, sliding_window=9),
        "sliding_window_error",
    ),
    "LSHKernelDensity.sample": (DENSITY.sample, "n_samples random_state"),
    "LSHKernelRegressor": (
        fitted(LSHKernelRegressor),
        "bandwidth rtol n_bits n_hashes random_state n_jobs",
    ),
    "LSHOutlierDetector": (fitted(LSHOutlierDetector), "contamination random_state n_jobs"),
    "two_sample_test": (
        lambda **given: two_sample_test(ROWS, ROWS, **given),
        "bandwidth n_permutations n_bits n_hashes random_state n_jobs",
    ),
    "likelihood_curve": (lambda **given: likelihood_curve(ROWS, **given), "random_state"),
    "LSHSampler.sample": (lambda **given: SAMPLER.sample(ROWS[:2], **given), "n_samples seed"),
}
WRONG = {"400": 10**400, "5000": 10**5000, "True": True, "-1": -1}
ARGUMENTS = [
    pytest.param(call, name, bad, id=f"{call}-{name}-{known_as}")
    for call, (_, names) in NUMBERS.items()
    for name in names.split()
    for known_as, bad in WRONG.items()
    if (name, bad) != ("n_jobs", -1)
]


@pytest.mark.parametrize("call, name, bad", ARGUMENTS)
def test_a_wrong_number_is_refused_by_its_name(call, name, bad):
    """Also one that float64 does not hold, and one that Python does not write."""
    got = f"an integer of {bad.bit_length()} bits" if bad > 1 else f"({bad}|bool)"
    with pytest.raises((TypeError, ValueError), match=rf"^{name} must .*, got .*{got}"):
        NUMBERS[call][0](**{name: bad})


@pytest.mark.parametrize(
    "call, name, value",
    [
        ("a sketch", "sliding_window", 2**60),
        ("LSHKernelDensity.sample", "n_samples", 2**60),
        ("two_sample_test", "n_permutations", 2**60),
        ("LSHSampler.sample", "n_samples", 2**60),
    ],
)
def test_sizes_beyond_any_memory_are_refused_by_their_name(call, name, value):
    with pytest.raises(ValueError, match=f"{name} must be an integer from 1 to .*, got {value}"):
        NUMBERS[call][0](**{name: value})


def test_integers_that_numpy_holds_as_objects_are_numbers():
    for options in ({"atol": 10**30}, {"rtol": 10**30, "atol": 1}, {"bandwidth": 10**30}):
        as_float = {name: float(value) for name, value in options.items()}
        found = [LSHKernelDensity(**x, random_state=0).fit(ROWS) for x in (options, as_float)]
        assert np.array_equal(*(x.score_samples(ROWS[:5]) for x in found))
    LSHKernelDensity(bandwidth=[10**30] * 6).fit(ROWS)
    with pytest.raises(TypeError, match="bandwidth must hold real numbers, got a list of dtype <U"):
        LSHKernelDensity(bandwidth=["1"] * 6).fit(ROWS)


DATES = np.arange("2020-01-01", "2020-01-31", dtype="datetime64[D]")[:, None]
OBJECTS = np.empty((30, 1), object)
OBJECTS[:, 0] = list(DATES[:, 0])  # of NumPy, which astype(object) would make Python's
NO_NUMBERS = {
    "dates": DATES,
    "dates as objects": OBJECTS,
    "times": DATES - DATES[0],
    "a list of dates": [[x] for x in DATES[:, 0]],
    "digits": np.arange(30).astype(str)[:, None],
    "a list of digits": [[str(i)] for i in range(30)],
    "digits as objects": np.arange(30).astype(str).astype(object)[:, None],
    "bytes": np.arange(30).astype("S")[:, None],
    "records": np.zeros((30, 1), [("x", float)]),
    "masked": np.ma.masked_array(np.arange(30.0)[:, None], np.arange(30)[:, None] > 3),
    "a dict": {"x": np.arange(30.0)},
    "a generator": ([x] for x in range(30)),
}
COLUMN = np.arange(30.0)[:, None]
OF_ROWS = {
    "LSHKernelDensity.fit": (lambda X: LSHKernelDensity().fit(X), "X"),
    "score_samples": (lambda X: LSHKernelDensity().fit(COLUMN).score_samples(X), "X"),
    "sample_weight": (
        lambda w: LSHKernelDensity().fit(COLUMN, sample_weight=w),
        "sample_weight",
    ),
    "LSHKernelRegressor.fit": (lambda X: LSHKernelRegressor().fit(X, np.arange(30.0)), "X"),
    "targets": (lambda y: LSHKernelRegressor().fit(COLUMN, y), "y"),
    "LSHOutlierDetector.fit": (lambda X: LSHOutlierDetector().fit(X), "X"),
    "two_sample_test, X": (lambda X: two_sample_test(X, COLUMN), "X"),
    "two_sample_test, Y": (lambda Y: two_sample_test(COLUMN, Y), "Y"),
    "likelihood_curve": (likelihood_curve, "X"),
}


@pytest.mark.parametrize("bad", NO_NUMBERS)
@pytest.mark.parametrize("call", OF_ROWS)
def test_what_could_be_converted_to_numbers_is_none(call, bad):
    function, name = OF_ROWS[call]
    wanted = "is a masked array" if bad == "masked" else "must hold real numbers, got a "
    with pytest.raises(TypeError, match=f"^{name} {wanted}"):
        function(NO_NUMBERS[bad])


@pytest.mark.parametrize("call", OF_ROWS)
def test_objects_that_are_numbers_stay_numbers(call):
    if call != "sample_weight":
        OF_ROWS[call][0](COLUMN.astype(object))
