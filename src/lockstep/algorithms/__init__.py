"""Algorithms, one module or package each. Their code does not depend on the number of processes."""
