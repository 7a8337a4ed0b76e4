"""`lockstep export RUN --to FORMAT`: export a policy and verify the written file."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from lockstep.cli.parser import parse_args

if TYPE_CHECKING:
    from lockstep.base import Algorithm
    from lockstep.config import Recipe

SUFFIXES = {"safetensors": ".safetensors", "onnx": ".onnx", "sb3": ".zip", "pt2": ".pt2"}
VERIFIED_GAMES = 4
"""Games in which a submission is compared with the policy."""


@dataclass(frozen=True)
class Export:
    """Export a run's best policy for other programs. The outputs of the file are compared with those of the policy.

    safetensors: weights by name. onnx: a graph for any runtime, with recurrent state as input and output. pt2: such a
    graph for torch. sb3: a zip for PPO of Stable-Baselines3. jidi: a submission to the team snakes competition, one
    file for Python 3.7 and numpy, compared with the policy in whole games.
    """

    run: tyro.conf.Positional[Path]
    """Run directory."""
    to: Literal["safetensors", "onnx", "sb3", "pt2", "jidi"] = "safetensors"
    """Output format."""
    out: Path | None = None
    """Output path. None: a file named after the run, in the run directory; for jidi ./submission.py."""
    checkpoint: int | None = None
    """Global samples of the checkpoint to use. None: the best, or the newest if none was evaluated."""


def run(arguments: Sequence[str]) -> int:
    command = parse_args(Export, arguments, "lockstep export")

    from lockstep.io.rich_console import PrintableConsole

    console = PrintableConsole(soft_wrap=True)
    if command.to == "jidi":
        from lockstep.apps.jidi.submission import write_submission
        from lockstep.inference import load

        path = command.out or Path("submission.py")
        path = path if path.suffix == ".py" else path / "submission.py"
        with console.status(f"writing {path} and playing {VERIFIED_GAMES} games to verify it"):
            compared = write_submission(load(command.run, command.checkpoint), path, VERIFIED_GAMES)
        console.print(f"{path}: {path.stat().st_size / 2**10:,.0f} KiB. It needs Python 3.7 or newer, and numpy.")
        console.print(f"  {compared:,} actions in {VERIFIED_GAMES} games: all equal to those of the policy")
        return 0

    import os
    import warnings
    from functools import partial

    from lockstep.config import ConfigError
    from lockstep.inference import load_algorithm, load_recipe
    from lockstep.tools.export import formats, sb3
    from lockstep.tools.verify.exports import choose_checkpoint

    name, origin = choose_checkpoint(command.run, command.checkpoint)
    writers: dict[str, Callable[[Path, Algorithm, Recipe], float]] = {
        "safetensors": partial(formats.write_safetensors, origin=origin),
        "onnx": formats.write_onnx,
        "pt2": formats.write_pt2,
        "sb3": sb3.write_sb3,
    }
    recipe = load_recipe(command.run)
    path = command.out or command.run / f"{command.run.resolve().name}{SUFFIXES[command.to]}"
    if not path.parent.is_dir():
        raise ConfigError(f"there is no directory {path.parent}.", f"mkdir -p {path.parent}")
    unfinished = path.with_name(f".{path.name}.partial{SUFFIXES[command.to]}")
    try:
        with console.status(f"writing and verifying {path}"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of export libraries do not concern the user
            algorithm = load_algorithm(command.run, recipe, name.samples if name else None)
            difference = writers[command.to](unfinished, algorithm, recipe)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    result = "bit-identical" if difference == 0.0 else f"maximum difference {difference:.1g}"
    console.print(f"{path}: {path.stat().st_size / 2**10:,.0f} KiB")
    console.print(f"  compared with the policy on {formats.BATCH_SIZE} random observations: {result}")
    return 0
