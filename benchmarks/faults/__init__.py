"""Random faults in real runs: `benchmarks/chaos.py` is the command."""
