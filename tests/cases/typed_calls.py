"""What a type checker makes of calls of the public names. mypy reads this file, nothing runs it."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import assert_type

import lshkit
from lshkit import (
    BucketTable,
    EuclideanLSH,
    FastHadamard,
    HashTables,
    LSHKernelDensity,
    LSHKernelRegressor,
    LSHOutlierDetector,
    LSHSampler,
    PartitionSampler,
    Sampled,
    SampledSoftmaxLoss,
    YosoAttention,
    YosoState,
)
from lshkit.attention import CodeCache, Estimator, Expected, StepReport, Suggestion
from lshkit.distributed import DaskKernelDensity, DaskLSHSampler
from lshkit.kde import LikelihoodCurve, TwoSampleTestResult
from lshkit.sampling import log_partition
from lshkit.typing import FloatArray

Array = np.ndarray[Any, np.dtype[Any]]

x: NDArray[np.float32] = np.ones((8, 4), np.float32)
t: Tensor = torch.ones(8, 4)

# Arrays for arrays, tensors for tensors.
hasher = FastHadamard(4, n_bits=4, n_hashes=2, seed=0)
array: Array = hasher.hash(x)
assert_type(hasher.hash(t), Tensor)
assert_type(hasher.soft_hash(t, 2, 2.0), tuple[Tensor, Tensor])
assert_type(EuclideanLSH(4, 2, 2, width=1.0).distance(t, t), Tensor)
assert_type(hasher.n_features, int)
assert_type(hasher.n_buckets, int)
assert_type(hasher.parameters, NDArray[np.float32])
assert_type(lshkit.fold(t, 16), Tensor)
assert_type(lshkit.bucket_sum(t, t, t, 16), Tensor)
assert_type(lshkit.collisions(t, t), tuple[Tensor, Tensor, Tensor])
assert_type(BucketTable(2, 16, 1).add(x, x), BucketTable)
assert_type(HashTables(x).draw(t, seed=0), tuple[Tensor, Tensor, Tensor])
hasher.hash("words")  # type: ignore[type-var]  # refused: no array
lshkit.typo  # type: ignore[attr-defined]  # noqa: B018  refused: no name of the package

# scikit-learn's estimators: each method that fits returns the estimator.
density = LSHKernelDensity("gaussian", bandwidth=[1.0, 2.0], rtol=0.1, random_state=0)
assert_type(density.fit(x).partial_fit(t), LSHKernelDensity)
assert_type(density.score_samples(x), FloatArray)
assert_type(density.score_samples([[0.0]]), FloatArray)
assert_type(density.score_samples(t), Tensor)
assert_type(density.score_samples(t, return_std=True), tuple[Tensor, Tensor])
assert_type(density.kernel_mean(x, return_std=True), tuple[FloatArray, FloatArray])
assert_type(density.score(x), float)
assert_type(density.bandwidth_, float | np.ndarray)
assert_type(density.n_samples_seen_, int)
assert_type(LSHKernelDensity.load("density.npz"), LSHKernelDensity)
assert_type(LSHKernelDensity.from_bytes(density.to_bytes()), LSHKernelDensity)
spread = DaskKernelDensity("gaussian", bandwidth=[1.0, 2.0], rtol=0.1, random_state=0)
assert_type(spread.fit(x).partial_fit(x), DaskKernelDensity)
assert_type(spread.to_local(), LSHKernelDensity)
assert_type(LSHKernelRegressor().fit(x, x).predict(x), FloatArray)
assert_type(
    LSHKernelRegressor().predict(x, return_std=True),
    tuple[FloatArray, FloatArray],
)
assert_type(LSHOutlierDetector(density).fit_predict(x), NDArray[np.int64])
assert_type(lshkit.likelihood_curve(x), LikelihoodCurve)
assert_type(lshkit.two_sample_test(x, t), TwoSampleTestResult)
assert_type(lshkit.two_sample_test(x, x).pvalue, float)
flag = bool(x.any())  # where it is not known which overload applies
assert_type(density.score_samples(x, return_std=flag), Any)
assert_type(density.kernel_mean(t, return_std=flag), Any)
assert_type(LSHKernelRegressor().predict(x, return_std=flag), Any)
LSHKernelDensity(kernel=3)  # type: ignore[arg-type]  # refused: no name

# Samplers.
sampler = LSHSampler(hasher, seed=0).fit(x)
assert_type(sampler, LSHSampler)
assert_type(LSHSampler.from_bytes(sampler.to_bytes()), LSHSampler)
assert_type(DaskLSHSampler(hasher).fit(x).to_local(), LSHSampler)
assert_type(sampler.sample(t), tuple[Tensor, Tensor])
value, standard_error = sampler.estimate(x, lambda i, j: j)
assert_type(PartitionSampler(x).refresh(t), PartitionSampler)
assert_type(log_partition(x, x).value, Any)
assert_type(SampledSoftmaxLoss(4, 8).forward(t, t), Tensor)
assert_type(SampledSoftmaxLoss(4, 8).weight, torch.nn.Parameter)

# Attention.
assert_type(lshkit.yoso_attention(t, t, t, estimator=Sampled(n_hashes=8)), Tensor)
assert_type(lshkit.lsh_attention(t, t, t), Tensor)
assert_type(lshkit.lsh_attention(t, t, t, return_pairs=True), tuple[Tensor, Tensor])
assert_type(lshkit.bert_lsh_attention(t, t, t, return_counts=True), tuple[Tensor, Tensor])
assert_type(lshkit.suggest(x, x).cheapest(0.1), Suggestion | None)
assert_type(Estimator.from_dict({"estimator": "soft"}), Estimator)
assert_type(Sampled().mean, Expected)
layer = YosoAttention(16, 2)
assert_type(layer.forward(t, t, t), tuple[Tensor, None])
assert_type(layer.out_proj.weight, Tensor)
assert_type(layer.hash_seed, Tensor)
assert_type(layer.new_state(1).step(t, t, t), Tensor)
assert_type(YosoState(1, 2, 8, seed=0).reset(), YosoState)
cache = CodeCache(1, 2, 8, seed=0)
assert_type(cache.reset(), CodeCache)
assert_type(cache.attend(t), Tensor)
assert_type(cache.attend(t, return_report=True), tuple[Tensor, StepReport])
lshkit.yoso_attention(x, x, x)  # type: ignore[arg-type]  # refused: arrays
