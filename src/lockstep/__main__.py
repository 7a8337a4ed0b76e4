"""`python -m lockstep`: entry point for torchrun, equivalent to the command `lockstep`."""

import os
import sys

# `python -m` puts the current directory first on the import path, where a downloaded run may contain a `numpy.py`.
if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]

from lockstep.cli import main

sys.exit(main())
