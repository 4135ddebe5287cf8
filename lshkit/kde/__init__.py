"""Kernel density estimation for scikit-learn: methods by need, sketches, outlier detection."""

from lshkit.kde.estimator import LSHKernelDensity
from lshkit.kde.outliers import LSHOutlierDetector

__all__ = ["LSHKernelDensity", "LSHOutlierDetector"]
