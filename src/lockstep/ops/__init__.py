"""Numerical functions: pure arithmetic, kernels and random numbers."""
