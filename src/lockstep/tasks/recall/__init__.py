"""Recall: remember a cue for a fixed delay."""
