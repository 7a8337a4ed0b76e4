"""Status message on the terminal while torch is imported, which takes seconds."""

import sys

from lockstep.launch.process_lifetime import started_by_a_launcher


def import_torch_with_status() -> None:
    """Import torch and show a status on the terminal. Workers of a launcher show nothing."""
    if started_by_a_launcher() or not sys.stderr.isatty() or "torch" in sys.modules:
        return  # the modules that need torch import it
    from lockstep.io.rich_console import PrintableConsole

    with PrintableConsole(stderr=True).status("importing torch"):
        import torch  # noqa: F401
