"""A word on the terminal while torch is imported, which takes seconds."""

import sys

from lockstep.parent import started_by_a_launcher


def wake() -> None:
    """Import torch, and say so where somebody looks; a process that a launcher started is one of many, and silent."""
    if started_by_a_launcher() or not sys.stderr.isatty() or "torch" in sys.modules:
        return  # whoever needs it imports it
    from lockstep.console import Console

    with Console(stderr=True).status("waking torch"):
        import torch  # noqa: F401
