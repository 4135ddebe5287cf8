"""Kernel density estimation: a scikit-learn estimator that picks its method, and its sketches."""

from lshkit.kde.estimator import LSHKernelDensity

__all__ = ["LSHKernelDensity"]
