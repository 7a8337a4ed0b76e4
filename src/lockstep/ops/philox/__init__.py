"""Counter-based random numbers (Philox) with the same bits on every device."""
