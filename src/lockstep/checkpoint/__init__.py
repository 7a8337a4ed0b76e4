"""Checkpoints: format, atomic publication, fencing, lineage and repair."""
