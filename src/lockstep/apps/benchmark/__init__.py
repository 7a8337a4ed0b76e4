"""Benchmark suites: train their tasks with several seeds and compare the scores with published ones."""
