"""`lockstep benchmark SUITE`: train a suite of tasks with several seeds and compare the scores with published ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from lockstep.apps.benchmark.suites import Suite, find_suite
from lockstep.cli.parser import parse_args
from lockstep.config import ConfigError
from lockstep.io.printable import print_line


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Train the tasks of a suite with several seeds, and write a table and curves next to published scores.

    Runs are trained several at a time. Repeat the command to resume a suite that was interrupted: finished runs are
    skipped. A signal asks the runs to save and stop.
    """

    suite: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SUITE")]
    """Suite: classic, mujoco-ppo, mujoco-td3, mujoco-sac, minatar, minigrid or atari."""
    tasks: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[ID ...]")] = ()
    """Environment ids of the suite to train. Empty: all."""
    seeds: int = 5
    """Number of runs per task, with seeds from 0 on."""
    procs: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 1
    """Processes per run."""
    parallel: int | None = None
    """Runs at a time. None: the number of CPU cores divided by the processes per run."""
    steps: int | None = None
    """Global samples per run, to try out a suite. None: the budget of each task."""
    runs: Path = Path("runs/benchmark")
    """Parent directory of the run directories, in a directory for each suite."""
    out: Path = Path("benchmarks/results/suites")
    """Output directory: SUITE.jsonl (one line per finished run), SUITE.md (table) and SUITE.svg (curves)."""
    plot: bool = False
    """Train nothing; write the table and the curves from SUITE.jsonl."""


def run(arguments: Sequence[str]) -> int:
    command = parse_args(Benchmark, arguments, "lockstep benchmark")
    suite = find_suite(command.suite)
    numbers = (command.seeds, command.procs, command.parallel or 1, command.steps or 1)
    if min(numbers) < 1 or 0 in (command.parallel, command.steps):
        raise ConfigError(
            f"--seeds is {command.seeds}, --procs {command.procs}, --parallel {command.parallel} and --steps "
            f"{command.steps}.",
            "Use at least 1 of each.",
        )
    if command.out.exists() and not command.out.is_dir():
        raise ConfigError(f"{command.out} is not a directory.", "Choose another --out.")
    code = 0 if command.plot else _train(command, suite)
    data = _data_file(command)
    if data.exists():
        _present(suite, data)
    elif command.plot:
        raise ConfigError(f"there is no {data}.", f"Train the suite first: lockstep benchmark {suite.name}")
    return code


def _data_file(command: Benchmark) -> Path:
    return command.out / f"{command.suite}.jsonl"


def _train(command: Benchmark, suite: Suite) -> int:
    """Train the missing runs. Return the exit code: 1 if a run failed, that of a preempted run after a stop."""
    tasks = suite.select(command.tasks)

    from lockstep.apps.benchmark.planned_runs import plan_runs
    from lockstep.apps.benchmark.runner import SuiteRunner
    from lockstep.experiment.progress import RunsProgress
    from lockstep.experiment.scheduler import available_cores
    from lockstep.launch.world import EXIT_PREEMPTED, warn_user

    directory = command.runs.absolute() / suite.name
    planned = plan_runs(suite, tasks, command.seeds, command.procs, command.steps, directory)
    parallel = command.parallel or max(1, available_cores() // command.procs)
    runner = SuiteRunner(planned, _data_file(command), parallel, RunsProgress())
    runner.run()
    if runner.failed:
        names = ", ".join(run.label for run in runner.failed)
        warn_user(f"{len(runner.failed)} runs failed: {names}. Environments of this suite: pip install {suite.install}")
    if runner.stopped:
        warn_user("The benchmark was stopped. Repeat the command to resume it.")
        return EXIT_PREEMPTED
    return 1 if runner.failed else 0


def _present(suite: Suite, data: Path) -> None:
    """Write table and curves from the data file, and print the table."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from lockstep.apps.benchmark.plots import draw_suite
    from lockstep.apps.benchmark.results import group_by_seed, read_results
    from lockstep.apps.benchmark.table import TERMINAL_HEADINGS, markdown, score_rows, terminal_rows
    from lockstep.io.rich_console import PrintableConsole
    from lockstep.tools.report.comparison import statistics_note

    groups = group_by_seed(suite, read_results(data))
    if not groups:
        raise ConfigError(f"{data} has no results of the suite {suite.name}.", "Train the suite first.")
    rows = score_rows(suite, groups)
    table, curves = data.with_suffix(".md"), data.with_suffix(".svg")
    table.write_text(markdown(suite, groups, rows), encoding="utf-8")
    curves.write_text(draw_suite(suite, groups), encoding="utf-8")
    console = PrintableConsole()
    first, *others = TERMINAL_HEADINGS
    shown = Table(first, title=suite.title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for heading in others:
        shown.add_column(heading, justify="right")
    for cells in terminal_rows(rows):
        shown.add_row(*cells)
    console.print(shown)
    console.print(statistics_note())
    print_line(f"Table and curves: {table}, {curves}")
