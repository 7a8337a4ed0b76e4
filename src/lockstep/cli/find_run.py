"""Find a run that a command line names in the words of other tools: the newest, a number, or an episode."""

from pathlib import Path

from lockstep.checkpoint.naming import started_at
from lockstep.config import ConfigError, Recipe
from lockstep.io.jsonl import CHECKPOINTS, CONFIG, STATUS
from lockstep.run_dir import read_config


def runs_of(recipe: Recipe) -> list[Path]:
    """Return the runs of a recipe in its `run.runs_dir`, in the order in which they were started."""
    found = []
    for path in Path(recipe.run.runs_dir).glob(f"*/{CONFIG}"):
        try:
            name, _ = read_config(path.parent)
        except ConfigError:  # of another version, or damaged
            continue
        if name == recipe.name:
            found.append(path.parent)
    return sorted(found, key=lambda run: (started_at(run / CHECKPOINTS) or _mtime(run / CONFIG), run.name))


def newest_run(recipe: Recipe) -> Path:
    """Return the run of a recipe that was active last."""
    runs = runs_of(recipe)
    if not runs:
        raise ConfigError(
            f"there is no run of {recipe.name} in {recipe.run.runs_dir} to resume.",
            "Name it: --resume RUN. Or train a new one, without --resume.",
        )
    return max(runs, key=lambda run: _mtime(run / STATUS, run / CONFIG))


def resolve_init_from(recipe: Recipe, source: str) -> tuple[str, str]:
    """Return the run `RUN` or `RUN@SAMPLES` of `--init-from`, and a note if it was named in another way.

    Other tools name a run by its number, and a checkpoint by its episode (`RUN@50ep`).
    """
    text, _, at = source.partition("@")
    run, note = Path(text), ""
    if text.isdecimal() and not run.exists():
        runs, number = runs_of(recipe), int(text)
        named = Path(recipe.run.runs_dir) / f"run{number}"
        if not named.exists() and not 1 <= number <= len(runs):
            raise ConfigError(
                f"there is no run {number} of {recipe.name} in {recipe.run.runs_dir}, which has {len(runs)}.",
                "Name its directory: --init-from RUN. List them: lockstep ls",
            )
        run = named if named.exists() else runs[number - 1]
        note = f"Run {number} of {recipe.name} is {run}."
    if not at.endswith("ep"):
        return f"{run}@{at}" if at else str(run), note
    return _at_episode(run, at.removesuffix("ep"), note)


def _at_episode(run: Path, episode: str, note: str) -> tuple[str, str]:
    from lockstep.checkpoint.lineage import lineage
    from lockstep.inference import load_recipe

    steps = getattr(load_recipe(run).task, "episode_steps", None)
    if steps is None or not episode.isdecimal():
        raise ConfigError(
            f"episode {episode!r} of {run} has no fixed number of samples.", f"Use --init-from {run}@SAMPLES."
        )
    samples = int(episode) * steps
    saved = [name.samples for name in lineage(run / CHECKPOINTS)]
    if not saved:
        raise ConfigError(f"{run} has no checkpoint to start from.", "Give another run.")
    nearest = min(saved, key=lambda count: (abs(count - samples), count))
    line = f"Episode {int(episode):,} is sample {samples:,}; the nearest checkpoint of {run} is at {nearest:,}."
    return f"{run}@{nearest}", f"{note} {line}".strip()


def _mtime(*paths: Path) -> float:
    return next((path.stat().st_mtime for path in paths if path.exists()), 0.0)
