"""`lockstep export RUN --to jidi`: take a policy away."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro


@dataclass(frozen=True)
class Export:
    """Write a run's best policy in a form that others can use."""

    run: tyro.conf.Positional[Path]
    """The run directory."""
    to: Literal["jidi"] = "jidi"
    """Form: jidi is a directory to hand in at the team snakes competition."""
    out: Path | None = None
    """Where to write it; ./submission unless told."""
    at: int | None = None
    """Use the checkpoint at this many samples instead of the best."""


def run(arguments: Sequence[str]) -> int:
    command = tyro.cli(Export, args=list(arguments), prog="lockstep export")

    from rich.console import Console

    from lockstep.jidi.submission import write_submission
    from lockstep.loading import load

    out = command.out or Path("submission")
    write_submission(load(command.run, command.at), out)
    Console().print(f"{out}: hand in this directory; it needs numpy alone.", highlight=False, soft_wrap=True)
    return 0
