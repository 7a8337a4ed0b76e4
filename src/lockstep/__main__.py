"""`python -m lockstep`: the same as the command `lockstep`, for torchrun."""

import sys

from lockstep.cli import main

sys.exit(main())
