"""`lockstep report RUN...`: one HTML file about one run or several, to look at and to send."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from lockstep.io.printable import write_text

if TYPE_CHECKING:
    from lockstep.tools.report.charts import Reference


@dataclass(frozen=True)
class Report:
    """Write one self-contained HTML file about runs: curves, evaluations, speed, proof and config.

    Runs that differ in nothing but their seed are shown as one experiment, with its mean and its spread. The file needs
    no network and runs no script.
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """A run directory."""
    more: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="[RUN ...]")] = ()
    """Others to show beside it."""
    out: Path = Path("report.html")
    """The file to write."""
    reference: Path | None = None
    """Curves to lay behind the evaluations: a CSV file with the columns step, reward and seed."""
    reference_steps_per_sample: float = 1.0
    """How many of the reference's steps are one sample of the run, such as 2 for the DeepMind control suite."""
    proof: Path | None = None
    """A record that `lockstep prove --json FILE` left."""
    bench: Path | None = None
    """A bench.json that `lockstep bench --out DIR` left; one in the run directory is found by itself."""
    gif: Path | None = None
    """A film to show; best.gif in the run directory is found by itself."""


def run(arguments: Sequence[str]) -> int:
    command = tyro.cli(Report, args=list(arguments), prog="lockstep report")

    from lockstep.config import ConfigError
    from lockstep.io.safe_read import UnreadableFileError
    from lockstep.tools.report.page import Extras, write_page
    from lockstep.tools.report.run_data import read_gif, read_record, read_runs

    if command.out.is_dir():
        raise ConfigError(f"{command.out} is a directory.", f"Name a file: --out {command.out / 'report.html'}")
    try:
        film = read_gif(command.gif) if command.gif else None
    except UnreadableFileError as error:
        raise ConfigError(f"{error}.", "Give another with --gif.") from None
    try:
        runs = read_runs([command.run, *command.more])
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}.", "Check who may read it.") from None
    extras = Extras(
        reference=_reference(command),
        proof=read_record(command.proof, "a file that `lockstep prove --json FILE` left") if command.proof else None,
        bench=read_record(command.bench, "a bench.json of `lockstep bench --out DIR`") if command.bench else None,
        gif=film,
    )
    page = write_page(runs, extras).encode("utf-8", "replace")
    try:
        command.out.write_bytes(page)
    except OSError as error:
        raise ConfigError(f"{command.out} cannot be written: {error.strerror}.", "Name another with --out.") from None
    write_text(sys.stdout, f"{command.out}: {len(page) / 1e3:,.0f} kB\n")
    return 0


def _reference(command: Report) -> "Reference | None":
    if command.reference is None:
        return None
    from lockstep.config import ConfigError
    from lockstep.tools.report.charts import Reference
    from lockstep.tools.report.reference_curves import read_reference

    if not 0 < command.reference_steps_per_sample < 1e9:
        raise ConfigError(
            f"--reference-steps-per-sample is {command.reference_steps_per_sample}.",
            "Give how many of its steps are a sample, such as 2.",
        )
    return Reference(command.reference.stem, read_reference(command.reference), command.reference_steps_per_sample)
