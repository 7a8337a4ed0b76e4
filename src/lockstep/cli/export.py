"""`lockstep export RUN --to FORMAT`: take a model away; it is tried before it counts as written."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

SUFFIXES = {"safetensors": ".safetensors", "onnx": ".onnx", "sb3": ".zip", "pt2": ".pt2"}


@dataclass(frozen=True)
class Export:
    """Write a run's best policy as a file for other programs, after comparing it with the policy.

    safetensors: the weights by name. onnx: a graph for any runtime, with memory in and out. pt2: the same for torch
    alone. sb3: a zip that Stable-Baselines3's PPO loads. jidi: a directory to hand in at the team snakes competition.
    """

    run: tyro.conf.Positional[Path]
    """The run directory."""
    to: Literal["safetensors", "onnx", "sb3", "pt2", "jidi"] = "safetensors"
    """What to write."""
    out: Path | None = None
    """Where; beside the run's checkpoints under the run's name unless told, and for jidi in ./submission."""
    checkpoint: int | None = None
    """Use the checkpoint at this many samples instead of the best."""


def run(arguments: Sequence[str]) -> int:
    command = tyro.cli(Export, args=list(arguments), prog="lockstep export")

    if command.to == "jidi":
        return _hand_in(command)

    import os
    import warnings

    from lockstep.config import ConfigError
    from lockstep.inference import load_algorithm, load_recipe
    from lockstep.io.rich_console import PrintableConsole
    from lockstep.tools.export.formats import COUNT

    console = PrintableConsole(soft_wrap=True)
    recipe = load_recipe(command.run)
    path = command.out or command.run / f"{command.run.resolve().name}{SUFFIXES[command.to]}"
    if not path.parent.is_dir():
        raise ConfigError(f"there is no directory {path.parent}.", f"mkdir -p {path.parent}")
    beside = path.with_name(f".{path.name}.partial{SUFFIXES[command.to]}")
    write = _writer(command.to)
    try:
        with console.status(f"writing {path}, and trying it"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # libraries talk about themselves
            algorithm = load_algorithm(command.run, recipe, command.checkpoint)
            apart = write(beside, algorithm, recipe)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    equal = "the same to the last bit" if apart == 0.0 else f"apart by at most {apart:.1g}"
    console.print(f"{path}: {path.stat().st_size / 2**10:,.0f} KiB")
    console.print(f"  tried on {COUNT} random observations beside the policy: {equal}")
    return 0


def _hand_in(command: Export) -> int:
    from lockstep.apps.jidi.submission import write_submission
    from lockstep.inference import load
    from lockstep.io.rich_console import PrintableConsole

    out = command.out or Path("submission")
    write_submission(load(command.run, command.checkpoint), out)
    PrintableConsole(soft_wrap=True).print(f"{out}: hand in this directory; it needs numpy alone.")
    return 0


def _writer(to: str) -> Callable[..., Any]:
    """What writes a format; each of them returns how far the file's outputs are from the policy's."""
    if to == "sb3":
        from lockstep.tools.export.sb3 import write_sb3

        return write_sb3
    from lockstep.tools.export import formats

    return {"safetensors": formats.write_safetensors, "onnx": formats.write_onnx, "pt2": formats.write_pt2}[to]
