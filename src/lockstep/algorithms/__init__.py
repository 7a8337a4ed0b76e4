"""Algorithms: one file each, written without a rank in sight."""
