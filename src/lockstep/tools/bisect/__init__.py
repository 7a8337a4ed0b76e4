"""Bisection of two runs: the first iteration, update and tensor in which they differ."""
