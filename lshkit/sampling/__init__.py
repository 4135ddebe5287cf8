"""Samples from buckets, with the exact probabilities that make estimates of them unbiased."""

from lshkit.sampling.batch_sampler import LSHBatchSampler, WeightedDataset
from lshkit.sampling.lsh_sampler import Estimate, LSHSampler
from lshkit.sampling.partition import LogPartition, PartitionSampler, log_partition

__all__ = [
    "Estimate",
    "LSHBatchSampler",
    "LSHSampler",
    "LogPartition",
    "PartitionSampler",
    "WeightedDataset",
    "log_partition",
]
