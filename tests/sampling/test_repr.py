"""The repr of a sampler shows what was set."""

import numpy as np
import pytest

from lshkit.hashing import FastHadamard
from lshkit.sampling import LSHSampler, PartitionSampler


def test_lsh_sampler():
    sampler = LSHSampler(FastHadamard(6, 4, 3, seed=1))
    assert repr(sampler) == "LSHSampler(FastHadamard(6, 4, 3, seed=1), n_rows=0)"
    sampler.fit(np.ones((5, 6)), np.ones(5))
    assert repr(sampler) == "LSHSampler(FastHadamard(6, 4, 3, seed=1), n_rows=5, weighted)"


def test_partition_sampler():
    weights = np.eye(6, dtype=np.float32)
    sampler = PartitionSampler(weights, n_bits=4, n_hashes=3, n_probes=2, center=False, seed=1)
    assert repr(sampler) == (
        "PartitionSampler(n_classes=6, FastHadamard(6, 4, 3, seed=1), "
        "n_probes=2, min_count=2, center=False)"
    )


def test_sampled_softmax_loss():
    pytest.importorskip("torch")
    from lshkit.sampling import SampledSoftmaxLoss

    loss = SampledSoftmaxLoss(
        6, 40, bias=True, n_samples=7, n_bits=3, n_hashes=5, rehash_every=9, reduction="sum"
    )
    assert repr(loss) == (
        "SampledSoftmaxLoss(n_features=6, n_classes=40, bias=True, n_samples=7, n_bits=3, "
        "n_hashes=5, min_count=1, max_bucket_size=1024, rehash_every=9, sparse=False, "
        "exact_eval=True, ignore_index=-100, reduction='sum')"
    )
