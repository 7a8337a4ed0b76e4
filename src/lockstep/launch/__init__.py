"""Start and monitor worker processes."""
