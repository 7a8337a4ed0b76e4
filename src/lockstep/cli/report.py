"""`lockstep report RUN...`: write one self-contained HTML file about one or more runs or experiments."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from lockstep.cli.parser import parse_args
from lockstep.io.printable import print_line

if TYPE_CHECKING:
    from lockstep.tools.report.charts import Reference


@dataclass(frozen=True)
class Report:
    """Write one self-contained HTML file about runs: curves, evaluations, speed, proof and config.

    The runs of an experiment, and other runs that differ only in their seed, are shown together, with interquartile
    mean and interval. The file loads nothing from the network and contains no scripts.
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Run directory, or directory of an experiment (several seeds) or a sweep."""
    more: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="[RUN ...]")] = ()
    """More runs or experiments to compare."""
    out: Path = Path("report.html")
    """HTML file to write."""
    reference: Path | None = None
    """CSV file with reference curves for the evaluation plot: columns step, reward and seed. None: no reference."""
    reference_steps_per_sample: float = 1.0
    """Steps of the reference per sample of the run, such as 2 for the DeepMind control suite."""
    proof: Path | None = None
    """File written by `lockstep prove --json FILE`. None: the report has no proof."""
    bench: Path | None = None
    """File bench.json written by `lockstep bench --out DIR`. None: bench.json in the run directory, if any."""
    gif: Path | None = None
    """GIF to show. None: best.gif in the run directory, if any."""
    price: float | None = None
    """Price of one process (one GPU) for an hour, in dollars. None: the report has hours, but no dollars."""


def run(arguments: Sequence[str]) -> int:
    command = parse_args(Report, arguments, "lockstep report")

    from lockstep.config import ConfigError
    from lockstep.io.safe_read import UnreadableFileError
    from lockstep.sweeps.record import is_sweep
    from lockstep.tools.report.charts import name_groups
    from lockstep.tools.report.comparison import summary
    from lockstep.tools.report.page import write_page
    from lockstep.tools.report.run_data import group, read_gif, read_record, read_runs
    from lockstep.tools.report.sweep_charts import read_section

    if command.out.is_dir():
        raise ConfigError(f"{command.out} is a directory.", f"Choose a file: --out {command.out / 'report.html'}")
    if command.price is not None and not 0 <= command.price < 1e6:
        raise ConfigError(f"--price is {command.price}.", "Use dollars for an hour, such as 2.10.")
    try:
        gif = read_gif(command.gif) if command.gif else None
    except UnreadableFileError as error:
        raise ConfigError(f"{error}.", "Choose another file with --gif.") from None
    try:
        runs = read_runs([command.run, *command.more])
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}.", "Check its permissions.") from None
    sweeps = [read_section(path, path.resolve().name) for path in (command.run, *command.more) if is_sweep(path)]
    page = write_page(
        runs,
        reference=_reference(command),
        proof=read_record(command.proof, "a file written by `lockstep prove --json FILE`") if command.proof else None,
        bench=read_record(command.bench, "a bench.json of `lockstep bench --out DIR`") if command.bench else None,
        gif=gif,
        sweeps=sweeps,
        price=command.price,
    ).encode("utf-8", "replace")
    try:
        command.out.write_bytes(page)
    except OSError as error:
        raise ConfigError(
            f"{command.out} cannot be written: {error.strerror}.", "Choose another file with --out."
        ) from None
    print_line(f"{command.out}: {len(page) / 1e3:,.0f} kB")
    for line in summary(name_groups(group(runs))):
        print_line(line)
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
            "Use the number of reference steps per sample, such as 2.",
        )
    return Reference(command.reference.stem, read_reference(command.reference), command.reference_steps_per_sample)
