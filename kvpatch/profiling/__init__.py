"""Profiling: what kernels use, and the check of a GPU."""
