"""Kernel density estimation and what the same sums give: regression, tests, outlier detection."""

from lshkit.kde.curve import LikelihoodCurve, likelihood_curve
from lshkit.kde.estimator import LSHKernelDensity
from lshkit.kde.outliers import LSHOutlierDetector
from lshkit.kde.regression import LSHKernelRegressor
from lshkit.kde.two_sample import TwoSampleTestResult, two_sample_test

__all__ = [
    "LSHKernelDensity",
    "LSHKernelRegressor",
    "LSHOutlierDetector",
    "LikelihoodCurve",
    "TwoSampleTestResult",
    "likelihood_curve",
    "two_sample_test",
]
