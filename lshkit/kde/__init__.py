"""Kernel density estimation and what is made of the same sums: regression, two-sample tests."""

from lshkit.kde.estimator import LSHKernelDensity
from lshkit.kde.regression import LSHKernelRegressor

__all__ = ["LSHKernelDensity", "LSHKernelRegressor"]
