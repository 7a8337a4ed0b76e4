"""`lockstep check RECIPE`: check the contract of a task or a data set before training on it."""

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.cli.options import RecipeOptions, parse_command, parse_recipe, resolve
from lockstep.cli.torch_import import import_torch_with_status
from lockstep.config import Recipe


@dataclass(frozen=True, kw_only=True)
class Check(RecipeOptions):
    """Check the task or the data set of a recipe: shapes, dtypes, values, determinism, loss, metrics and saved state.

    Prints a message with a fix for every violation; the exit code is then 1. Accepts settings of the recipe, as `train`
    does.
    """

    steps: int = 200
    """Environment steps to play; must be longer than an episode. Ignored for data sets."""
    deterministic: bool = False
    """The environments draw no random numbers, so that all of them may play the same episode."""


def run(arguments: Sequence[str]) -> int:
    command, rest = parse_command(Check, arguments, "check")
    import_torch_with_status()

    from lockstep.io.rich_console import PrintableConsole
    from lockstep.tasks.env_checker import check_env

    recipe = resolve(parse_recipe(command, rest, "lockstep check"), 1)
    console = PrintableConsole(soft_wrap=True)
    with console.status("checking"):
        faults = check_env(recipe.task, command.steps, chance=not command.deterministic)
        faults += [] if faults else _check_algorithm(recipe)
    for fault in faults:
        console.print(fault)
    if not faults:
        console.print(f"{recipe.name}: no violation found.")
    return 1 if faults else 0


def _check_algorithm(recipe: Recipe) -> list[str]:
    """Build the networks for the task and return the error if that fails."""
    from lockstep.config import ConfigError
    from lockstep.inference import build_algorithm

    try:
        build_algorithm(recipe)
    except ConfigError as error:
        return [str(error)]
    return []
