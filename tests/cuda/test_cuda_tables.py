"""BucketTable on a CUDA device."""

import copy
import pickle

import numpy as np
import pytest

from lshkit import reference
from lshkit.buckets import BucketTable, collisions

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.cuda


def random_rows(device, rows, n_hashes, n_buckets, n_values, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(n_buckets, (rows, n_hashes), generator=generator)
    codes = codes.to(torch.uint8 if n_buckets <= 256 else torch.uint16)
    values = torch.randn(rows, n_values, generator=generator, dtype=torch.float64).to(dtype)
    return codes.to(device), values.to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n_buckets", "n_hashes"), [(2, 1), (256, 33), (300, 5)])
@pytest.mark.parametrize("n_values", [1, 40])
def test_is_a_bucket_sum(cuda_device, dtype, n_buckets, n_hashes, n_values):
    sizes = n_hashes, n_buckets, n_values
    codes, values = random_rows(cuda_device, 130, *sizes, dtype)
    queries, _ = random_rows(cuda_device, 65, *sizes, seed=1)
    kind = np.dtype(str(dtype).removeprefix("torch."))
    table = BucketTable(*sizes, dtype=kind, device=cuda_device)
    assert table.add(codes[:50], values[:50]) is table
    table.add(codes[50:].to(torch.int64), values[50:].double())
    assert table.count == 130 and table.dtype == kind
    got = table.query(queries)
    assert got.dtype is dtype and got.device == values.device
    arrays = [x.cpu().numpy() for x in (queries, codes)]
    wanted = reference.bucket_sum(*arrays, values.double().cpu().numpy())
    tolerance = 1e-5 if dtype is torch.float32 else 1e-12
    np.testing.assert_allclose(got.cpu(), wanted, rtol=tolerance, atol=tolerance)
    assert table.query(queries.reshape(5, 13, -1)).shape == (5, 13, n_values)
    table.remove(codes, values)
    assert table.count == 0
    np.testing.assert_allclose(table.query(queries).cpu(), 0, atol=1e-5)


def test_same_bits_as_on_the_cpu(cuda_device):
    codes, values = random_rows("cpu", 3000, 9, 16, 5)
    table = BucketTable(9, 16, 5, device=cuda_device)
    table.add(codes.to(cuda_device), values.to(cuda_device))
    wanted = np.zeros((9, 16, 5), np.float32)
    for code, value in zip(codes.numpy(), values.numpy(), strict=True):
        wanted[np.arange(9), code] += value
    got = table.table if isinstance(table.table, np.ndarray) else table.table.cpu().numpy()
    np.testing.assert_array_equal(got, wanted)


def test_merge_copy_and_pickle(cuda_device):
    codes, values = random_rows(cuda_device, 30, 5, 16, 7)
    left, right = (BucketTable(5, 16, 7, device=cuda_device) for _ in range(2))
    left.add(codes[:10], values[:10])
    right.add(codes[10:], values[10:])
    for same in (left.copy(), copy.deepcopy(left), pickle.loads(pickle.dumps(left))):
        assert torch.equal(same.query(codes), left.query(codes))
        assert same.merge(right).count == 30 and same.device == left.device
    assert left.count == 10
    assert table_rows(BucketTable(5, 16, 7, device=cuda_device), codes[:0]) == 0


def table_rows(table, codes):
    return len(table.query(codes))


def test_errors(cuda_device):
    with pytest.raises(NotImplementedError, match="device must be the cpu, or cuda"):
        BucketTable(5, 16, 7, device="meta")
    if cuda_device.type != "cuda":
        pytest.skip("needs a GPU")
    table = BucketTable(5, 16, 7, device=cuda_device)
    codes, values = random_rows(cuda_device, 30, 5, 16, 7)
    with pytest.raises(ValueError, match="codes must be on cuda:0, got a tensor on cpu"):
        table.add(codes.cpu(), values)
    with pytest.raises(TypeError, match="values must be a tensor on cuda:0, got a ndarray"):
        table.add(codes, values.cpu().numpy())
    with pytest.raises(ValueError, match="codes must be on the cpu"):
        BucketTable(5, 16, 7).query(codes)
    with pytest.raises(ValueError, match="other must be like"):
        table.merge(BucketTable(5, 16, 7))
    assert "device='cuda:0'" in repr(table)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16])
@pytest.mark.parametrize("n_hashes", [1, 33, 300])
@pytest.mark.parametrize(("n_q", "n_k"), [(1, 1), (130, 17), (65, 200)])
def test_collisions(cuda_device, n_q, n_k, n_hashes, dtype, causal):
    generator = torch.Generator().manual_seed(0)
    codes = [
        torch.randint(60, (n, n_hashes), generator=generator).to(dtype).to(cuda_device)
        for n in (n_q, n_k)
    ]
    some = (torch.rand(n_k, generator=generator) < 0.7).to(cuda_device)
    for key_mask in (None, some):
        got = collisions(*codes, causal=causal, key_mask=key_mask)
        arrays = [x.cpu().numpy() for x in codes]
        mask = None if key_mask is None else key_mask.cpu().numpy()
        wanted = reference.collisions(*arrays, causal=causal, key_mask=mask)
        assert [x.dtype for x in got] == [torch.int64, torch.int32, torch.int32]
        assert all(x.device == codes[0].device for x in got)
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(a.cpu(), b)


def test_collisions_of_nothing(cuda_device):
    for n_q, n_k in ((0, 3), (3, 0), (3, 5)):
        codes = torch.zeros(n_q, 2, dtype=torch.uint8), torch.ones(n_k, 2, dtype=torch.uint8)
        indptr, indices, counts = collisions(*(x.to(cuda_device) for x in codes))
        assert indptr.tolist() == [0] * (n_q + 1) and len(indices) == len(counts) == 0
