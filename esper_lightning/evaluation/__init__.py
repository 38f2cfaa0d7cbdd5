"""Comparison of controllers on the same hosts, with confidence intervals."""
