"""`lockstep ls`: list the runs and experiments in a directory with their state, progress and returns."""

import math
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import tyro

from lockstep.cli.parser import parse_args
from lockstep.io.printable import print_line, printable

LISTED_METRICS = ("samples", "time/global_fps", "rollout/ep_return_mean", "eval/return_mean")
"""Metrics that are listed."""
HEADINGS = (
    ("run", "state", "steps", "return", "started"),
    ("  recipe, environment", "", "steps/s", "eval", "seed"),
)
"""Headings of the two lines of a run. One line would not fit 80 columns."""
INDENT = "    "
"""Indentation of a fork below its parent."""
TEXT_COLUMNS = 2
"""Number of columns with text. The others are aligned right."""
MAX_TABLE_ROWS = 200
"""More runs than this are listed as plain text, because rich tables are slow."""
_FORMAT = re.compile(r"^format: (\d{1,9})$", re.ASCII | re.MULTILINE)
_RECIPE = re.compile(r"^recipe: ([\w./-]{1,200})$", re.ASCII | re.MULTILINE)
_SEED = re.compile(r"^run:\n(?:  .*\n)*?  seed: (\d{1,18})$", re.ASCII | re.MULTILINE)
_TASK = re.compile(r"^task:(?: \{\}|((?:\n  .*)*))$", re.MULTILINE)
_ENV_KEY = re.compile(r"^  (?:id|tasks):", re.MULTILINE)
_ENV_ID = re.compile(r"^  id: ([\w./:-]{1,200}-v\d{1,3})$", re.ASCII | re.MULTILINE)
_ENV_TASKS = re.compile(r"^  tasks:((?:\n  - [a-z][\w]*-[\w-]+)+)$", re.ASCII | re.MULTILINE)
_TOTAL_SAMPLES = re.compile(r"^run:\n(?:  .*\n)*?  total_samples: (\d{1,18})$", re.ASCII | re.MULTILINE)


@dataclass(frozen=True)
class List:
    """List the runs in a directory: state, steps, returns, throughput, start time, recipe, environment and seed.

    An experiment of several seeds is one entry, with the steps of all runs and interquartile means of their returns. A
    sweep is one entry, with the steps of its trials and the best value under `eval`.
    """

    dir: tyro.conf.Positional[Path] = Path("runs")
    """Directory that contains the run directories, or the directory of an experiment or a sweep."""
    tree: bool = False
    """List every fork below its parent, with the changed settings."""


def run(arguments: Sequence[str]) -> int:
    command = parse_args(List, arguments, "lockstep ls")

    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from lockstep.io.jsonl import CONFIG, EXPERIMENT, SWEEP
    from lockstep.io.rich_console import PrintableConsole

    console = PrintableConsole()
    paths = sorted({path.parent for name in (CONFIG, EXPERIMENT, SWEEP) for path in command.dir.glob(f"*/{name}")})
    if not paths:
        console.print(f"There are no runs in {command.dir}. Start one: lockstep train snake-ppo --smoke")
        return 0
    rows = _tree_rows(paths) if command.tree else [row for path in paths for row in _entry(path)]
    if len(paths) > MAX_TABLE_ROWS:
        print_line("\n".join(_aligned([*HEADINGS, *rows])))
        return 0
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for number, headings in enumerate(zip(*HEADINGS, strict=True)):
        # Fold long cells instead of truncating them, so that run names can be copied.
        justify: Literal["left", "right"] = "left" if number < TEXT_COLUMNS else "right"
        table.add_column("\n".join(headings), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    return 0


def _tree_rows(paths: Sequence[Path]) -> list[tuple[str, ...]]:
    """Return the lines of all runs, indented by parent. A fork has another line about its parent and changes."""
    from lockstep.cli.run_tree import arrange

    rows: list[tuple[str, ...]] = []
    for run in arrange(paths):
        fork = [(f"  {printable(run.fork, newlines=False)}",)] if run.fork else []
        rows += [(f"{INDENT * run.depth}{name}", *rest) for name, *rest in [*_entry(run.path), *fork]]
    return rows


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as plain columns. A rich table takes about 1 ms per row."""
    columns = len(HEADINGS[0])
    padded = [(*row, *[""] * (columns - len(row))) for row in rows]
    widths = [max(map(len, column)) for column in zip(*padded, strict=True)]
    alignments = ["<" if number < TEXT_COLUMNS else ">" for number in range(columns)]
    template = "  ".join(f"{{:{alignment}{width}}}" for alignment, width in zip(alignments, widths, strict=True))
    return [template.format(*row).rstrip() for row in padded]


def _entry(path: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the two lines of a run, an experiment or a sweep, in the order of `HEADINGS`."""
    from lockstep.experiment.record import is_experiment
    from lockstep.sweeps.record import is_sweep

    if is_sweep(path):
        return _sweep_rows(path)
    return _experiment_rows(path) if is_experiment(path) else _run_rows(path)


def _run_rows(path: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the two lines of a run, in the order of `HEADINGS`."""
    from lockstep.checkpoint.format_version import UnknownFormat
    from lockstep.config import ConfigError
    from lockstep.io.jsonl import METRICS, newest_values, read_status

    name = printable(path.name, newlines=False)
    try:
        config = _read_config(path)
    except UnknownFormat as error:
        return (name,), (f"  format {error.version} of another Lockstep version",)
    except ConfigError:
        return (name,), ("  config.yaml cannot be read",)
    values = newest_values(path / METRICS, LISTED_METRICS)
    recipe = Path(config.recipe).stem if isinstance(config.recipe, str) else config.recipe
    return (
        name,
        _truncated(read_status(path).get("state", "-")),
        f"{_short(values.get('samples', 0))}/{_short(config.total_samples)}",
        _number(values.get("rollout/ep_return_mean"), ".2f"),
        _started(path),
    ), (
        f"  {_truncated(recipe)}, {_truncated(config.environment)}",
        "",
        _number(values.get("time/global_fps"), ",.0f"),
        _number(values.get("eval/return_mean"), ".2f"),
        _number(config.seed, ".0f"),
    )


def _experiment_rows(path: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the two lines of an experiment, in the order of `HEADINGS`."""
    from lockstep.config import ConfigError
    from lockstep.experiment.record import describe_seeds, overall_state, read_experiment, run_directory
    from lockstep.io.jsonl import EXPERIMENT, METRICS, newest_values, read_status

    name = printable(path.name, newlines=False)
    try:
        record = read_experiment(path)
        runs = [run_directory(path, seed) for seed in record.seeds]
    except ConfigError:
        return (name,), (f"  {EXPERIMENT} cannot be read",)
    values = [newest_values(run / METRICS, LISTED_METRICS) for run in runs]
    states = [str(read_status(run).get("state", "-")) for run in runs]
    speeds = [each.get("time/global_fps") for each, state in zip(values, states, strict=True) if state == "running"]
    task = record.settings.get("task")
    environment = _join(task.get("id"), task.get("tasks")) if isinstance(task, dict) else "-"
    return (
        name,
        overall_state(states),
        f"{_short(sum(_numbers(each.get('samples') for each in values)))}/{_short(record.total_samples * len(runs))}",
        _interquartile_mean(each.get("rollout/ep_return_mean") for each in values),
        _local_time(path / EXPERIMENT),
    ), (
        f"  {_truncated(Path(record.recipe).stem)}, {_truncated(environment)}",
        f"{states.count('finished')}/{len(runs)} done",
        _number(sum(_numbers(speeds)) or None, ",.0f"),
        _interquartile_mean(each.get("eval/return_mean") for each in values),
        describe_seeds(record.seeds),
    )


def _sweep_rows(path: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the two lines of a sweep, in the order of `HEADINGS`."""
    from lockstep.config import ConfigError
    from lockstep.io.jsonl import METRICS, SWEEP, newest_values, read_status
    from lockstep.sweeps.progress import best_trial, trial_states
    from lockstep.sweeps.record import read_sweep, read_trials, trial_directory

    name = printable(path.name, newlines=False)
    try:
        record, trials = read_sweep(path), read_trials(path)
        runs = [trial_directory(path, number, trial) for number, trial in enumerate(trials)]
    except ConfigError:
        return (name,), (f"  {SWEEP} cannot be read",)
    decided = sum(state.is_decided for state in trial_states(record, trials))
    states = [read_status(run).get("state") for run in runs]
    running = "running" if "running" in states else "incomplete"
    samples = sum(_numbers(newest_values(run / METRICS, LISTED_METRICS).get("samples") for run in runs))
    best = best_trial(record, trials)
    task = record.settings.get("task")
    environment = _join(task.get("id"), task.get("tasks")) if isinstance(task, dict) else "-"
    return (
        name,
        "finished" if decided == record.trials else running,
        _short(samples),
        "-",
        _local_time(path / SWEEP),
    ), (
        f"  {_truncated(Path(record.recipe).stem)}, {_truncated(environment)}",
        f"{decided}/{record.trials} done",
        "-",
        "-" if best is None else _number(trials[best].values[-1], ".2f"),
        "-",
    )


def _numbers(values: Iterable[object]) -> list[float]:
    """Return the finite numbers among values of an untrusted log."""
    floats = (float(value) for value in values if isinstance(value, int | float) and abs(value) < 1e100)
    return [value for value in floats if math.isfinite(value)]


def _interquartile_mean(values: Iterable[object]) -> str:
    import numpy as np

    from lockstep.experiment.statistics import interquartile_mean

    numbers = _numbers(values)
    return f"{float(interquartile_mean(np.array(numbers))):.2f}" if numbers else "-"


class _Config(NamedTuple):
    """Settings that are listed. A config from an untrusted source may contain other types."""

    recipe: object
    environment: str
    total_samples: object
    seed: object


def _read_config(path: Path) -> _Config:
    """Return the listed settings of a run. Raise ConfigError if they cannot be read.

    Use regular expressions if the file has the usual layout, because parsing yaml takes 7 ms per run.
    """
    from lockstep.checkpoint.format_version import FORMAT, config_without_version
    from lockstep.config import read_yaml
    from lockstep.io.jsonl import CONFIG
    from lockstep.io.safe_read import YAML_BYTES, UnreadableFileError, read_text

    try:
        text = read_text(path / CONFIG, YAML_BYTES)
    except (OSError, UnreadableFileError):
        text = ""
    version, recipe = _FORMAT.search(text), _RECIPE.search(text)
    total_samples, seed, environment = _TOTAL_SAMPLES.search(text), _SEED.search(text), _find_environment(text)
    if version and int(version[1]) == FORMAT and recipe and total_samples and seed and environment:
        return _Config(recipe[1], environment, int(total_samples[1]), int(seed[1]))
    config = config_without_version(read_yaml(path / CONFIG), path / CONFIG)
    run, task = (value if isinstance(value, dict) else {} for value in (config.get("run"), config.get("task")))
    environment = _join(task.get("id"), task.get("tasks"))
    return _Config(config.get("recipe"), environment, run.get("total_samples"), run.get("seed"))


def _find_environment(text: str) -> str | None:
    """Return the environment in the text of a config. None: the text must be parsed."""
    task = _TASK.search(text)
    if task is None:
        return None
    settings = task[1] or ""
    if not _ENV_KEY.search(settings):
        return _join(None, None)
    env_id, tasks = _ENV_ID.search(settings), _ENV_TASKS.search(settings)
    if env_id is None and tasks is None:
        return None
    return _join(env_id and env_id[1], tasks and tasks[1].replace("  - ", "").split())


def _join(env_id: object, tasks: object) -> str:
    from lockstep.run_name import environment_names

    return ", ".join(environment_names(env_id, tasks)) or "-"


def _started(path: Path) -> str:
    """Return the local time of the first start of a run."""
    from lockstep.checkpoint.naming import started_at
    from lockstep.io.jsonl import CHECKPOINTS, CONFIG

    return _local_time(path / CONFIG, started_at(path / CHECKPOINTS))


def _local_time(file: Path, seconds: float | None = None) -> str:
    """Format a time; None: the time of the last change of a file."""
    with suppress(OSError, ValueError, OverflowError):  # a file system may store impossible times
        return time.strftime("%m-%d %H:%M", time.localtime(seconds or file.stat().st_mtime))
    return "-"


def _short(value: object) -> str:
    """Format a count in few characters: 4096, 57.3k, 10M."""
    for unit, size in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if isinstance(value, int | float) and 10_000 <= value < 10**18 and value >= size:
            return f"{value / size:.1f}".removesuffix(".0") + unit
    return _number(value, ".0f")


def _number(value: object, format_spec: str) -> str:
    """Format a number. Return "-" for other types and for integers that overflow a float."""
    try:
        return format(float(value), format_spec) if isinstance(value, int | float) else "-"
    except OverflowError:
        return "-"


def _truncated(value: object) -> str:
    """Return the first characters of an untrusted value, on one line."""
    return printable(value[:60], newlines=False) if isinstance(value, str) else "?"
