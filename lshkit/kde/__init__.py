"""Kernel density estimation: a scikit-learn estimator that selects its method, and sketches."""

from lshkit.kde.curve import LikelihoodCurve, likelihood_curve
from lshkit.kde.estimator import LSHKernelDensity

__all__ = ["LSHKernelDensity", "LikelihoodCurve", "likelihood_curve"]
