"""Automatic names of runs: recipe, environment and time."""

import re
import time
from pathlib import Path

from lockstep.config import Recipe

ENVIRONMENT_CHARS = 40
"""Maximum length of the environment in an automatic name. Longer ones are truncated."""
RECIPE_CHARS = 120
"""Maximum length of the recipe in an automatic name, so that the whole name stays below `config.NAME_BYTES`."""


def automatic_name(recipe: Recipe) -> str:
    """Return the name of a new run, such as gym-ppo-Hopper-v5-20261117-223958. Tasks without environments have none."""
    environment = re.sub(r"[^A-Za-z0-9._-]+", "-", _environment(getattr(recipe, "task", None)))
    parts = (Path(recipe.name).stem[:RECIPE_CHARS], environment[:ENVIRONMENT_CHARS].strip("-"))
    return "-".join([*filter(None, parts), time.strftime("%Y%m%d-%H%M%S")])


def environment_names(env_id: object, tasks: object) -> list[str]:
    """Return the environments that `task.id` of Gymnasium or `task.tasks` of the Control Suite name.

    The values may come from an untrusted config. A file or package before the id is removed.
    """
    if isinstance(env_id, str) and env_id:
        return [env_id.rpartition(":")[2]]
    return [str(task) for task in tasks] if isinstance(tasks, list | tuple) else []


def _environment(task: object) -> str:
    names = environment_names(getattr(task, "id", None), getattr(task, "tasks", None))
    return f"{len(names)}-tasks" if len(names) > 1 else "".join(names)
