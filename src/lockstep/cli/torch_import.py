"""Status message while torch and the modules of a run are imported, which takes seconds."""

import importlib
import sys

from lockstep.launch.process_lifetime import started_by_a_launcher


def import_torch_with_status(*modules: str) -> None:
    """Import torch, then other modules, and show a status. Workers of a launcher show nothing."""
    if started_by_a_launcher() or "torch" in sys.modules:
        return  # the modules that need torch import it
    from lockstep.io.status_line import StatusLine

    status = StatusLine()
    status.start("importing torch")
    try:
        import torch  # noqa: F401

        status.update("importing lockstep")
        for module in modules:
            importlib.import_module(module)
    finally:
        status.stop()
