"""Experiments: several runs of one recipe that differ only in their seed. Their scheduling, scores and statistics."""
