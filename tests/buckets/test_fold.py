"""Wide codes folded to a table of buckets."""

import re

import numpy as np
import pytest

from lshkit.buckets import BucketTable, bucket_sum, fold
from lshkit.hash_functions import code_dtype


@pytest.mark.parametrize("n_buckets", [1, 7, 256, 257, 4096, 65536])
@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint32, np.uint64])
def test_equal_codes_stay_equal(dtype, n_buckets):
    codes = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (3, 40, 5), dtype)
    folded = fold(codes, n_buckets)
    assert folded.shape == codes.shape and folded.dtype == code_dtype(n_buckets)
    assert int(folded.max()) < n_buckets
    np.testing.assert_array_equal(folded, fold(codes.astype(np.uint64), n_buckets))
    if dtype != np.uint64:  # of whose numbers numpy makes floats
        np.testing.assert_array_equal(folded[1, 2], fold(codes[1, 2].tolist(), n_buckets))


@pytest.mark.parametrize("shift", [0, 16, 44])
@pytest.mark.parametrize("n_buckets", [16, 100, 1024])
def test_different_codes_fall_together_as_if_at_random(n_buckets, shift):
    """Codes in a row, or that differ in their high bits only, are spread evenly: chi squared."""
    n = 2**17
    codes = np.arange(n, dtype=np.uint64) << np.uint64(shift)
    counts = np.bincount(fold(codes, n_buckets), minlength=n_buckets)
    expected = n / n_buckets
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_squared - n_buckets) <= 4 * np.sqrt(2 * n_buckets)


def test_bad_arguments():
    with pytest.raises(ValueError, match="codes must be >= 0, got -3"):
        fold([1, -3], 8)
    with pytest.raises(TypeError, match="codes must hold integer codes"):
        fold([1.5], 8)
    for n_buckets in (0, 65537):
        with pytest.raises(ValueError, match="n_buckets must be an integer from 1 to 65536"):
            fold([1], n_buckets)


def test_verbs_that_take_no_wide_codes_say_how_to_fold_them():
    wide, values = np.full((2, 3), 2**33), np.ones((2, 4))
    hint = re.escape("lshkit.buckets.fold maps wider codes to fewer buckets")
    with pytest.raises(ValueError, match=f"got {2**33}: {hint}"):
        bucket_sum(wide, wide, values, 65536)
    with pytest.raises(ValueError, match=f"from 1 to 65536, got {2**32}: {hint}"):
        bucket_sum(wide, wide, values, 2**32)
    with pytest.raises(ValueError, match=hint):
        BucketTable(3, 2**32, 4)
    assert (bucket_sum(fold(wide, 4096), fold(wide, 4096), values, 4096) == 2).all()


def test_tensors():
    torch = pytest.importorskip("torch")
    codes = np.random.default_rng(0).integers(0, 2**63, (6, 4))
    folded = fold(torch.from_numpy(codes), 512)
    assert folded.dtype == torch.uint16
    np.testing.assert_array_equal(folded.numpy(), fold(codes, 512))
