"""Estimates of sums over a data set from the rows that collide with a query."""

from lshkit.sampling.lsh_sampler import Estimate, LSHSampler
from lshkit.sampling.partition import LogPartition, PartitionSampler, log_partition

__all__ = ["Estimate", "LSHSampler", "LogPartition", "PartitionSampler", "log_partition"]
