"""`python -m lockstep`: the same as the command `lockstep`, for torchrun."""

import os
import sys

# `python -m` puts the current directory first on the import path, where a downloaded run may hold a `numpy.py`.
if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]

from lockstep.cli import main

sys.exit(main())
