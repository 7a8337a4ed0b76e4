"""Measure the speed of a run, compare it with its bare work, and predict its scaling over processes."""
