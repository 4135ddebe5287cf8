"""Kernel density estimation and what is made of the same sums: regression, two-sample tests."""

from lshkit.kde.curve import LikelihoodCurve, likelihood_curve
from lshkit.kde.estimator import LSHKernelDensity
from lshkit.kde.regression import LSHKernelRegressor
from lshkit.kde.two_sample import TwoSampleTestResult, two_sample_test

__all__ = [
    "LSHKernelDensity",
    "LSHKernelRegressor",
    "LikelihoodCurve",
    "TwoSampleTestResult",
    "likelihood_curve",
    "two_sample_test",
]
