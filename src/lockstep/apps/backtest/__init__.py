"""Backtests: what a trading agent would have earned on bars that came after all it learned from."""
