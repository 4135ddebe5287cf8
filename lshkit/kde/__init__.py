"""Kernel density estimation: a scikit-learn estimator that selects its method, and sketches."""

from lshkit.kde.estimator import LSHKernelDensity
from lshkit.kde.likelihood import LikelihoodCurve, likelihood_curve

__all__ = ["LSHKernelDensity", "LikelihoodCurve", "likelihood_curve"]
