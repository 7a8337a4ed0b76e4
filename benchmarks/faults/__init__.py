"""Random faults in real runs: `benchmarks/chaos.py` is the command.

It is run from a checkout, and uses the hosts, the S3 server and the sweep of the tests.
"""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[2] / "tests"
sys.path += [str(TESTS), str(TESTS / "fault")]
