"""Sweeps: search for good settings of a recipe. Their space, suggestions, pruning, trials and results."""
