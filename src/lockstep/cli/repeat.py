"""Train a part of a run again in a temporary directory, for the commands verify, replay and bisect."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config import ConfigError, apply_overrides

if TYPE_CHECKING:
    from lockstep.io.rich_console import PrintableConsole
    from lockstep.tools.verify.history import Segment


@dataclass
class Repeater:
    """Trains segments of one run again, and prints why they may come out differently here."""

    run: Path
    procs: int | None
    """None: one process, or with fast reduction as many as have trained the segment."""
    allow_other_machine: bool
    console: "PrintableConsole"
    warned: set[str] = field(default_factory=set)
    """Printed differences between this machine and the one that trained the run."""

    def processes(self, segment: "Segment") -> int:
        fast = (segment.settings or {}).get("run", {}).get("reduction") == "fast"
        return self.procs or (segment.end.processes if fast else 1)

    def train(
        self,
        segment: "Segment",
        directory: Path,
        overrides: Mapping[str, Any] | None = None,
        debug: bool = False,
        **options: Any,
    ) -> Path:
        """Train a segment again and return the run directory of the repetition, a part of `directory`.

        Args:
            segment: The segment, from a kept checkpoint or from the settings.
            directory: An empty directory.
            overrides: Settings that do not change what is computed.
            debug: Train in this process, so that the debugger has its terminal.
            options: Options of `train()`, such as `stop_at`. Default: the end of the segment.

        Raises:
            ConfigError: This machine cannot give the same bits, or the training failed.
            CorruptCheckpointError: The checkpoint at the start is damaged.
        """
        from lockstep.cli.options import resolve
        from lockstep.cli.worker_spec import write_spec
        from lockstep.launch.launcher import launch_captured
        from lockstep.tools.verify.environment import check_environment
        from lockstep.tools.verify.repetition import NAME, prepare, segment_recipe
        from lockstep.training_loop import train

        procs = self.processes(segment)
        recipe = resolve(segment_recipe(self.run, segment), procs)
        reasons, differences = check_environment(segment, recipe, procs)
        if reasons and not self.allow_other_machine:
            raise ConfigError(
                f"{segment} cannot be trained again here with the same bits: {'; '.join(reasons)}.",
                "Use such a machine, versions and --procs, or try with --allow-other-machine.",
            )
        for difference in [*reasons, *differences]:
            if difference not in self.warned:
                self.warned.add(difference)
                self.console.print(f"  may still be equal: {difference}", markup=False)
        prepared = prepare(segment, recipe, directory, self.allow_other_machine)
        prepared = apply_overrides(prepared, dict(overrides or {}))
        options = {"resume": segment.path is not None, "stop_at": segment.end.samples, **options}
        if debug:
            train(prepared, **options)
            return directory / NAME
        with self.console.status(f"training {segment} again on {count_processes(procs)}"):
            failure = launch_captured(write_spec(directory / "spec.json", prepared, **options), procs)
        if failure:
            raise ConfigError(f"{segment} could not be trained again: {failure}", "Fix that, then try again.")
        return directory / NAME


def count_processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"
