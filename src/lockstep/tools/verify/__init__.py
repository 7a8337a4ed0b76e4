"""Verification of a run: check the chain of its checkpoints, repeat segments, compare exports."""
