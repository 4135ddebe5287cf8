"""A kept table against the sum verb's reference."""

import copy
import pickle

import numpy as np
import pytest
from cases.buckets import assert_close, random_case

from lshkit import reference
from lshkit.buckets import BucketTable

CODES, VALUES = np.zeros((4, 5), np.uint8), np.ones((4, 2), np.float32)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("n_buckets", "n_hashes"), [(2, 1), (256, 33), (300, 5), (65536, 2)])
@pytest.mark.parametrize("d_v", [1, 19, 64])
def test_table_is_a_bucket_sum(dtype, n_buckets, n_hashes, d_v):
    arguments = random_case(65, 130, n_hashes, n_buckets, d_v, dtype=dtype)
    query_codes, key_codes, values = arguments
    table = BucketTable(n_hashes, n_buckets, d_v, dtype=dtype)
    assert table.add(key_codes[:50], values[:50]) is table
    table.add(key_codes[50:], values[50:])
    assert table.count == 130
    got = table.query(query_codes)
    assert got.dtype == dtype
    assert_close(got, *arguments)


def test_table_leading_dimensions_and_types():
    query_codes, key_codes, values = random_case(6, 8, 5, 16, 7, (2, 3))
    table = BucketTable(5, 16, 7, dtype=np.float64).add(key_codes.tolist(), values.tolist())
    assert table.count == 48
    got = table.query(query_codes.astype(np.int64))
    assert got.shape == (2, 3, 6, 7)
    flat = (query_codes.reshape(-1, 5), key_codes.reshape(-1, 5), values.reshape(-1, 7))
    assert_close(got.reshape(-1, 7), *flat)


def test_table_remove():
    query_codes, key_codes, values = random_case(20, 30, 5, 16, 7)
    table = BucketTable(5, 16, 7).add(key_codes, values)
    assert table.remove(key_codes[10:], values[10:]) is table
    assert table.count == 10
    expected = reference.bucket_sum(query_codes, key_codes[:10], values[:10])
    # what was removed leaves rounding of its own size, about 1
    np.testing.assert_allclose(table.query(query_codes), expected, atol=1e-5)
    with pytest.raises(ValueError, match="codes has 11 rows to remove, the table holds 10"):
        table.remove(key_codes[:11], values[:11])
    assert table.count == 10


def test_table_merge_copy_and_pickle():
    query_codes, key_codes, values = random_case(20, 30, 5, 16, 7)
    left, right = BucketTable(5, 16, 7), BucketTable(5, 16, 7)
    left.add(key_codes[:10], values[:10])
    right.add(key_codes[10:], values[10:])
    before = left.query(query_codes)
    for same in (left.copy(), copy.deepcopy(left), pickle.loads(pickle.dumps(left))):
        np.testing.assert_array_equal(same.query(query_codes), before)
        assert same.count == 10
        assert same.merge(right) is same
        assert_close(same.query(query_codes), query_codes, key_codes, values)
        assert same.count == 30
    np.testing.assert_array_equal(left.query(query_codes), before)
    assert (left.count, right.count) == (10, 20)


def test_empty_table():
    table = BucketTable(5, 16, 7)
    assert repr(table) == "BucketTable(5, 16, 7, dtype=float32, count=0)"
    assert table.table.shape == (5, 16, 7)
    codes = np.zeros((3, 5), np.uint8)
    np.testing.assert_array_equal(table.query(codes), np.zeros((3, 7)))
    assert table.query(codes[:0]).shape == (0, 7)
    assert table.add(codes[:0], np.zeros((0, 7))).count == 0


TABLE_ROWS = np.ones((4, 7), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda t: BucketTable(0, 16, 7), ValueError, "n_hashes must be an integer >= 1, got 0"),
        (lambda t: BucketTable(5, 2**17, 7), ValueError, "n_buckets must be .* 1 to 65536"),
        (lambda t: BucketTable(5, 16, 7.0), TypeError, "n_values must be an integer >= 1"),
        (lambda t: BucketTable(5, 16, 7, dtype=np.float16), TypeError, "dtype must be float32 or"),
        (lambda t: BucketTable(5, 16, 7, dtype="no"), TypeError, "dtype .* got 'no'"),
        (lambda t: BucketTable(5, 16, 7, dtype=None), TypeError, "dtype .* got None"),
        (lambda t: t.add(CODES[:, :4], TABLE_ROWS), ValueError, r"codes must have shape \(..., n"),
        (lambda t: t.add(CODES, TABLE_ROWS[:3]), ValueError, r"have shape \(4, 7\), got \(3, 7\)"),
        (lambda t: t.add(CODES, VALUES), ValueError, r"have shape \(4, 7\), got \(4, 2\)"),
        (lambda t: t.add(CODES + 16, TABLE_ROWS), ValueError, "codes must be from 0 .* got 16"),
        (lambda t: t.add(CODES, TABLE_ROWS * 1j), TypeError, "values must hold real numbers"),
        (lambda t: t.query(CODES * 1.0), TypeError, "codes must hold integer codes"),
        (lambda t: t.query(CODES + 16), ValueError, "codes must be from 0 .* got 16"),
        (lambda t: t.query(CODES[0]), ValueError, "codes must have shape"),
        (lambda t: t.merge(3), TypeError, "other must be a BucketTable, got int"),
        (lambda t: t.merge(BucketTable(5, 16, 8)), ValueError, "other must be like BucketTable"),
        (
            lambda t: t.merge(BucketTable(5, 16, 7, dtype=np.float64)),
            ValueError,
            "other must be like BucketTable.* got BucketTable.*float64",
        ),
    ],
)
def test_bad_table_input(call, error, message):
    table = BucketTable(5, 16, 7)
    with pytest.raises(error, match=message):
        call(table)
    assert table.count == 0
    assert not table.table.any()


def test_table_takes_tensors():
    torch = pytest.importorskip("torch")
    query_codes, key_codes, values = random_case(20, 30, 5, 300, 7)
    table = BucketTable(5, 300, 7)
    table.add(torch.from_numpy(key_codes), torch.from_numpy(values).requires_grad_())
    got = table.query(torch.from_numpy(query_codes))
    assert isinstance(got, torch.Tensor)
    assert got.dtype == torch.float32
    np.testing.assert_array_equal(got.numpy(), table.query(query_codes))
    assert_close(got.numpy(), query_codes, key_codes, values)
    short = torch.from_numpy(values).bfloat16()
    table = BucketTable(5, 300, 7).add(torch.from_numpy(key_codes), short)
    assert_close(table.query(query_codes), query_codes, key_codes, short.float().numpy())
    with pytest.raises(ValueError, match="codes must be on the cpu, got a tensor on meta"):
        table.query(torch.from_numpy(query_codes).to("meta"))
