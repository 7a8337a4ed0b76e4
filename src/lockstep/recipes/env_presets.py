"""Presets by environment: the patterns of ids for which a preset of that name is chosen automatically."""

from fnmatch import fnmatchcase

from lockstep.config import Recipe

AUTO = "auto"
"""Value of `--preset` that chooses the preset by environment."""

ENV_PRESETS: dict[str, tuple[str, ...]] = {
    "mujoco": (
        *("Ant-v*", "HalfCheetah-v*", "Hopper-v*", "Humanoid-v*", "HumanoidStandup-v*", "InvertedDoublePendulum-v*"),
        *("InvertedPendulum-v*", "Pusher-v*", "Reacher-v*", "Swimmer-v*", "Walker2d-v*"),
    ),
    "atari": ("ALE/*", "*NoFrameskip-v*"),
    "minatar": ("MinAtar/*",),
    "minigrid": ("MiniGrid-*", "BabyAI-*"),
    "acrobot": ("Acrobot-v*",),
    "mountain-car": ("MountainCar-v*",),
    "continuous": ("Pendulum-v*",),
    "lunar-lander": ("LunarLander-v*", "LunarLanderContinuous-v*"),
    "bipedal-walker": ("BipedalWalker-v*", "BipedalWalkerHardcore-v*"),
}
"""Patterns of environment ids by preset. A recipe uses a row if it has a preset of that name; the first match counts.
The default task of a recipe must match none, because its settings are the recipe's defaults."""


def find_env_preset(recipe: Recipe) -> str | None:
    """Return the preset that a recipe has for its environment, or None.

    The part of an id that names a package is ignored. An environment in a file of the user has no preset: it may have
    the name of a known environment without being one.
    """
    id = getattr(recipe.task, "id", None)
    if not isinstance(id, str) or getattr(recipe.task, "code_file", None) is not None:
        return None
    name = id.rpartition(":")[2]
    for preset, patterns in ENV_PRESETS.items():
        if preset in recipe.presets and any(fnmatchcase(name, pattern) for pattern in patterns):
            return preset
    return None


def describe_choice(preset: str, recipe: Recipe) -> str:
    """Return the note that is printed if a preset was chosen by environment."""
    return (
        f"{recipe.task.id}: preset {preset}. Flags take precedence over it; --preset none uses the recipe's defaults."
    )
