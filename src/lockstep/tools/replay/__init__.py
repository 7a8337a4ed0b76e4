"""Replay of a run: train a part of it again from a kept checkpoint, and write what went into its updates."""
