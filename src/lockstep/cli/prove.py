"""`lockstep prove RECIPE`: prove on this machine that any number of processes, killed or not, trains the same agent."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from lockstep.cli.options import RecipeOptions, parse_command, parse_recipe, resolve
from lockstep.cli.repeat import count_processes
from lockstep.cli.worker_spec import write_spec
from lockstep.config import ConfigError, apply_overrides
from lockstep.io.temporary_directory import temporary_directory

if TYPE_CHECKING:
    from lockstep.io.rich_console import PrintableConsole

DEBUG_ENVIRONMENT = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
"""Make torch compare every collective across processes, so that mismatched collectives are reported."""


@dataclass(frozen=True, kw_only=True)
class Prove(RecipeOptions):
    """Train a recipe with exact reduction on several numbers of processes and compare the checkpoints bit by bit.

    Uses the recipe's smoke setting unless --no-smoke is given. Accepts settings of the recipe, as `train` does.
    """

    procs: Annotated[tuple[int, ...], tyro.conf.arg(aliases=["-n"])] = (1, 2)
    """Numbers of processes to compare."""
    kill: bool = False
    """Also kill one process during an iteration and one during a save, and resume on other numbers of processes."""
    iterations: int | None = None
    """Iterations to train. None: run.total_samples of the recipe."""
    smoke: bool = True
    """Use the recipe's smoke setting. --no-smoke: its full settings."""
    seed: int = 0
    """Seed that selects which process is killed, and when."""
    output_dir: Path | None = None
    """Directory to keep the runs in. None: they are deleted."""
    json: Path | None = None
    """File for a JSON record of settings, versions, hashes and verdict, for `lockstep report`."""


@dataclass(frozen=True)
class RunRecord:
    """Result of one run, a row of the result table."""

    processes: str
    event: str
    hash: str
    seconds: float
    path: Path
    problem: str = ""
    machine: dict[str, str] = field(default_factory=dict)
    """CPU capability, device and library versions, as the run's checkpoint records them."""


@dataclass
class Verification:
    """Run one recipe several times and collect the results."""

    recipe: str
    flags: list[str]
    directory: Path
    seed: int
    console: "PrintableConsole"
    rows: list[RunRecord] = field(default_factory=list)
    resolved: Any = None
    """The recipe with all flags applied."""

    def train_uninterrupted(self, processes: int) -> None:
        """Train without faults."""
        path, start = self.directory / f"procs-{processes}", time.perf_counter()
        with self.console.status(f"training on {count_processes(processes)}"):
            problem = self._train(path, processes)
        self._finish(str(processes), "", path, start, problem)

    def train_killed(self, processes: int, resumed_on: int, phase: str) -> None:
        """Kill a process of a run with SIGKILL in a phase, then resume on another number of processes."""
        from lockstep.distributed.fault_injection import SWITCH, VARIABLE
        from lockstep.rng import RandomStream

        victim = RandomStream(self.seed, f"prove.victim.{phase}").draw_seed(0) % processes
        count = self._kill_count(processes, phase)
        path, start = self.directory / f"killed-{phase}", time.perf_counter()
        moment = {"reduce": "in mid-iteration", "save": "during a save"}[phase]
        event = f"process {victim} killed {moment}"
        with self.console.status(f"training on {count_processes(processes)}, {event}"):
            cause = self._train(path, processes, {SWITCH: "1", VARIABLE: f"{victim}:{phase}:{count}"})
        problem = "" if cause and "SIGKILL" in cause else f"the process was not killed: {cause or 'the run finished'}"
        if not problem:
            with self.console.status(f"resuming on {count_processes(resumed_on)}"):
                problem = self._launch(["resume", str(path)], resumed_on)
        self._finish(f"{processes} → {resumed_on}", event, path, start, problem)

    def _train(self, path: Path, processes: int, environment: dict[str, str] | None = None) -> str:
        recipe = apply_overrides(self.resolved, {"run.runs_dir": str(path.parent), "run.name": path.name})
        if environment and recipe.run.save_every is None:  # save often enough to be killed during a save
            every = recipe.algo.samples_per_iteration(recipe.task)
            recipe = apply_overrides(recipe, {"run.save_every": every})
        with temporary_directory("train") as directory:
            return self._launch(write_spec(directory / "spec.json", recipe), processes, environment)

    def _launch(self, arguments: list[str], processes: int, environment: dict[str, str] | None = None) -> str:
        from lockstep.launch.launcher import launch_captured

        return launch_captured(arguments, processes, DEBUG_ENVIRONMENT | (environment or {}))

    def _kill_count(self, processes: int, phase: str) -> int:
        """Return which save or reduction to kill at: the second save, or a reduction of the middle iteration."""
        from lockstep.io.jsonl import DIGESTS, read_jsonl
        from lockstep.rng import RandomStream

        if phase == "save":
            return 2
        lines = read_jsonl(self.directory / f"procs-{processes}" / DIGESTS)
        if len(lines) < 3:
            raise ConfigError("the run has fewer than 3 iterations, too few for --kill.", "Use --iterations 4 or more.")
        middle = len(lines) // 2
        first, last = (lines[i]["passed"][phase] for i in (middle - 1, middle))
        return first + 1 + RandomStream(self.seed, "prove.moment").draw_seed(0) % max(1, last - first)

    def _finish(self, processes: str, event: str, path: Path, start: float, problem: str) -> None:
        from lockstep.checkpoint.format import hash_checkpoint, read_manifest
        from lockstep.checkpoint.lineage import find
        from lockstep.io.jsonl import CHECKPOINTS

        digest, machine = "", {}
        if not problem:
            name, _ = find(path / CHECKPOINTS)
            digest = hash_checkpoint(path / CHECKPOINTS / str(name))
            machine = read_manifest(path / CHECKPOINTS / str(name))["machine"]
        self.rows.append(RunRecord(processes, event, digest, time.perf_counter() - start, path, problem, machine))


def run(arguments: Sequence[str]) -> int:
    command, rest = parse_command(Prove, arguments, "prove")
    if command.json is not None and (command.json.is_dir() or not command.json.parent.is_dir()):
        raise ConfigError(f"{command.json} cannot be written.", "Choose a file in an existing directory.")
    recipe = resolve(parse_recipe(command, rest, f"lockstep prove {command.recipe}"), max(command.procs))
    samples = recipe.run.total_samples
    if command.iterations is not None:
        samples = command.iterations * recipe.algo.samples_per_iteration(recipe.task)
    flags = [*rest, *command.flags(), f"run.total_samples={samples}", f"run.lanes={recipe.run.lanes}"]
    settings = {"run.reduction": "exact", "run.log_tensor_digests": "true", "run.record_video": "false"}

    from lockstep.io.rich_console import PrintableConsole
    from lockstep.launch.device import gpu_sharing

    console = PrintableConsole()
    if sharing := gpu_sharing(recipe.run.device, max(command.procs)):
        console.print(sharing)
        settings["run.share_gpu"] = "true"
    flags += [f"{name}={value}" for name, value in settings.items()]
    resolved = resolve(apply_overrides(recipe, {"run.total_samples": samples, **settings}), max(command.procs))
    with temporary_directory("prove") as temporary:
        directory = command.output_dir or temporary
        directory.mkdir(parents=True, exist_ok=True)
        proof = Verification(command.recipe, flags, directory, command.seed, console, resolved=resolved)
        for processes in command.procs:
            proof.train_uninterrupted(processes)
        if command.kill:
            for index, phase in enumerate(("reduce", "save")):
                started_on = sorted(command.procs)[-1 - index % len(command.procs)]
                others = (*command.procs[index:], *command.procs, started_on + 1)
                resumed_on = next(number for number in others if number != started_on)
                proof.train_killed(started_on, min(resumed_on, recipe.run.lanes or resumed_on), phase)
        code = _verdict(proof.rows, console, command.recipe)
        if command.json is not None:
            command.json.write_text(json.dumps(record(proof), indent=1) + "\n", encoding="utf-8")
        return code


def record(proof: Verification) -> dict[str, Any]:
    """Return a JSON record: settings, versions, hashes and verdict, enough to repeat the proof."""
    import platform

    from lockstep.checkpoint.machine import describe_machine

    columns = ("processes", "event", "hash", "seconds", "problem")
    return {
        "recipe": Path(proof.recipe).stem,
        "settings": proof.flags,
        "seed": proof.seed,
        **next((row.machine for row in proof.rows if row.machine), describe_machine()),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": [{name: getattr(row, name) for name in columns} for row in proof.rows],
        "verdict": "one agent" if _one_agent(proof.rows) else "not one agent",
    }


def _one_agent(rows: list[RunRecord]) -> bool:
    """Return whether all runs succeeded with the same hash."""
    return all(row.hash and row.hash == rows[0].hash for row in rows)


def _verdict(rows: list[RunRecord], console: "PrintableConsole", recipe: str) -> int:
    """Print the table and the verdict. Return 0 only if all rows have the same hash."""
    from rich.table import Table
    from rich.text import Text

    table = Table("processes", "event", "SHA-256 of the run", title=f"{recipe}: one agent?", title_justify="left")
    table.add_column("time", justify="right")
    expected = next((row.hash for row in rows if row.hash), "")
    for row in rows:
        same = bool(row.hash) and row.hash == expected
        cell = Text(row.hash[:32] if row.hash else "failed", style="green" if same else "red")
        table.add_row(row.processes, row.event or "-", cell, f"{row.seconds:.0f} s")
    console.print(table)
    for row in rows:
        if row.problem:
            console.print(f"{row.processes} processes: {row.problem}")
    if _one_agent(rows):
        console.print(f"[green]One agent.[/green] {len(rows)} runs, one hash: {expected}", soft_wrap=True, markup=True)
        return 0
    for row in rows[1:]:
        if row.hash and rows[0].hash and row.hash != rows[0].hash:
            console.print(first_difference(rows[0].path, row.path))
    console.print("[red]Not one agent.[/red]", markup=True)
    return 1


def first_difference(one: Path, other: Path) -> str:
    """Describe the first iteration and tensors in which two runs differ."""
    from lockstep.io.jsonl import DIGESTS, read_jsonl

    other_digests = {line["iteration"]: line["digests"] for line in read_jsonl(other / DIGESTS)}
    for line in read_jsonl(one / DIGESTS):
        digests = other_digests.get(line["iteration"], {})
        names = [name for name, digest in line["digests"].items() if digests.get(name) != digest]
        if names:
            # List lanes first: rollouts precede updates, so a difference there is the earlier one.
            lanes = [name for name in names if name.startswith("lane-")]
            listed = lanes[:3] + [name for name in names if name not in lanes][:3]
            text = ", ".join(listed) + (f" and {len(names) - len(listed)} more" if len(names) > len(listed) else "")
            return f"{other.name} differs from {one.name} first at iteration {line['iteration']}: {text}"
    return f"{other.name} differs from {one.name} only in its clock or evaluations; all tensors are equal"
