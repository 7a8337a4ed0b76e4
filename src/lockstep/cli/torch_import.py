"""A word on the terminal while torch is imported, which takes seconds."""

import sys

from lockstep.launch.process_lifetime import started_by_a_launcher


def import_torch_with_status() -> None:
    """Import torch, and say so where somebody looks; a process that a launcher started is one of many, and silent."""
    if started_by_a_launcher() or not sys.stderr.isatty() or "torch" in sys.modules:
        return  # whoever needs it imports it
    from lockstep.io.rich_console import PrintableConsole

    with PrintableConsole(stderr=True).status("waking torch"):
        import torch  # noqa: F401
