"""Samples from buckets, with the exact probabilities that make estimates of them unbiased."""

from lshkit.sampling.batch_sampler import LSHBatchSampler, WeightedDataset

__all__ = ["LSHBatchSampler", "WeightedDataset"]
