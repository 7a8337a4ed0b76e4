"""Flags of other tools that count in another unit: episodes, epochs, transitions per update.

They are converted with the settings of the recipe, and a line with both numbers is printed.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import fields
from typing import Any

from lockstep.config import ConfigError, RecipeT, apply_overrides, to_int

EVASION_EPISODE = 40_000
"""Episode from which opponents evade if the guide's `--enable_opponent_evasion` is given alone."""

Settings = dict[str, Any]
Conversion = Callable[[Any, str, str], tuple[Settings, str]]
"""Settings and note of a flag, from the recipe, the flag's name and its value."""


def _episodes(setting: str) -> Conversion:
    def convert(recipe: Any, name: str, value: str) -> tuple[Settings, str]:
        steps = getattr(recipe.task, "episode_steps", None)
        if steps is None:
            key = setting.replace("_", "-")
            raise ConfigError(
                f"--{name} counts episodes, but episodes of this recipe have no fixed length.",
                f"Use --{key} with a number of samples.",
            )
        count = _whole_number(name, value, "episodes")
        samples = count * steps
        return {setting: samples}, (
            f"--{name} {value} is read as {samples:,} global samples ({setting}): {count:,} episodes of {steps} steps."
        )

    return convert


def _evasion(recipe: Any, name: str, value: str) -> tuple[Settings, str]:
    if value.lower() in ("false", "0"):
        return {"task.evade_after_samples": None}, f"--{name} {value}: opponents never evade."
    settings, note = _episodes("task.evade_after_samples")(recipe, name, str(EVASION_EPISODE))
    return settings, note.replace(f"--{name} {EVASION_EPISODE}", f"--{name} (from episode {EVASION_EPISODE:,})")


def _update_interval(recipe: Any, name: str, value: str) -> tuple[Settings, str]:
    interval, envs = _whole_number(name, value, "transitions"), _setting(recipe, name, "task.num_envs")
    bptt_steps = _setting(recipe, name, "algo.bptt_steps")  # of PPO: replay has no rollout that fills a batch
    steps = max(1, math.ceil(interval / envs))
    settings: Settings = {"algo.rollout_steps": steps}
    if recipe.algo.batch_size > steps * envs:
        settings["algo.batch_size"] = steps * envs
    if bptt_steps and steps % bptt_steps:
        settings["algo.bptt_steps"] = math.gcd(steps, bptt_steps)
    changes = ", ".join(f"{key} {number}" for key, number in settings.items())
    return settings, (
        f"--{name} {value} transitions per update are {steps} steps of {envs} environments"
        f" ({steps * envs:,} transitions): {changes}."
    )


def _minibatches(recipe: Any, name: str, value: str) -> tuple[Settings, str]:
    count = _whole_number(name, value, "minibatches")
    samples = _setting(recipe, name, "task.num_envs") * _setting(recipe, name, "algo.rollout_steps")
    if samples % count:
        raise ConfigError(
            f"--{name} is {value}, which does not divide the {samples:,} samples of an iteration.",
            "Use a divisor, or --algo.batch-size.",
        )
    size = samples // count
    return {"algo.batch_size": size}, f"--{name} {value} is read as algo.batch_size {size}: {samples:,} / {count}."


def _anneal(recipe: Any, name: str, value: str) -> tuple[Settings, str]:
    schedule = "constant" if value.lower() in ("false", "0") else "linear"
    return {"algo.schedule": schedule}, f"--{name} is read as algo.schedule {schedule}."


def _epsilon_decay(recipe: Any, name: str, value: str) -> tuple[Settings, str]:
    """Epsilon times a factor per episode: an exponential schedule that ends at epsilon_end after as many episodes."""
    try:
        factor = float(value)
    except ValueError:
        factor = 0.0
    if not 0.0 < factor < 1.0:
        raise ConfigError(f"--{name} is {value!r}, which is not a factor between 0 and 1.", "Use one such as 0.9995.")
    start, steps = _setting(recipe, name, "algo.epsilon"), _setting(recipe, name, "task.episode_steps")
    end = recipe.algo.epsilon_end or 0.01  # an exponential schedule does not reach 0
    if start <= end:
        raise ConfigError(
            f"--{name} lowers epsilon, but epsilon is {start:g} and epsilon_end is {end:g}.",
            "Use a larger --algo.epsilon.",
        )
    episodes = math.log(end / start) / math.log(factor)
    fraction = episodes * steps / recipe.run.total_samples
    settings = {
        "algo.epsilon_schedule": "exponential",
        "algo.epsilon_end": end,
        "algo.epsilon_decay_fraction": fraction,
    }
    return settings, (
        f"--{name} {value} per episode is read as algo.epsilon_schedule exponential: from {start:g} to {end:g} "
        f"in {episodes:,.0f} episodes of {steps} steps, {fraction:.3g} of the run (algo.epsilon_decay_fraction)."
    )


def _epochs(recipe: Any, name: str, value: str) -> tuple[Settings, str]:
    """Epochs of PPO are passes over a rollout; epochs of supervised learning are passes over the data set."""
    if any(field.name == "epochs" for field in fields(recipe.algo)):
        return {"algo.epochs": value}, ""
    raise ConfigError(
        f"--{name} counts passes over a data set, but {recipe.name} has none.", "Use --run.total-samples."
    )


EPOCHS = {"epochs": "total_samples", "eval_every_epochs": "eval_every"}
"""Settings of supervised learning that count passes over the training examples, and those of the run in samples."""


def convert_epochs(recipe: RecipeT, default: Any = None) -> tuple[RecipeT, list[str]]:
    """Convert epochs of supervised learning to samples. Return the recipe and a note for each conversion.

    Args:
        recipe: The recipe with all settings.
        default: The recipe before settings were given. A setting in samples that differs from it takes precedence over
            epochs that do not. None: epochs take precedence.
    """
    from lockstep.protocols import TaskConfig

    algo, notes, examples = recipe.algo, [], 0
    if isinstance(recipe.task, TaskConfig) or not all(hasattr(algo, name) for name in EPOCHS):
        return recipe, []  # epochs of PPO
    for name, in_samples in EPOCHS.items():
        passes = getattr(algo, name)
        if passes is None:
            continue
        is_default = default is not None and passes == getattr(default.algo, name)
        if is_default and getattr(recipe.run, in_samples) != getattr(default.run, in_samples):
            recipe = apply_overrides(recipe, {f"algo.{name}": None})
            continue
        if passes < 1:
            return recipe, []  # rejected when the recipe is validated
        if not examples:
            examples = _count_examples(recipe)
        recipe = apply_overrides(recipe, {f"algo.{name}": None, f"run.{in_samples}": passes * examples})
        notes.append(
            f"algo.{name} {passes} is read as {passes * examples:,} samples (run.{in_samples}): "
            f"{passes} x {examples:,} examples."
        )
    return recipe, notes


def _count_examples(recipe: Any) -> int:
    """Build the data set of a recipe and return the number of its training examples."""
    import torch

    from lockstep.lanes import Lanes

    with closing(recipe.task.build(Lanes(1, range(1), recipe.run.seed), torch.device("cpu"))) as data:
        return int(data.count("train"))


def _value_coef(recipe: Any, name: str, value: str) -> tuple[Settings, str]:
    return {"algo.value_coef": value}, (
        f"--{name} {value} is read as algo.value_coef {value}, the weight of half the squared error, as in CleanRL. "
        "Stable-Baselines3 has the whole squared error: give twice its value."
    )


UNIT_FLAGS: Mapping[str, Conversion] = {
    # Numbers of the run first: others are converted with them.
    "episodes": _episodes("run.total_samples"),
    "max-episodes": _episodes("run.total_samples"),
    "epochs": _epochs,
    "update-interval": _update_interval,
    "num-minibatches": _minibatches,
    "save-interval": _episodes("run.save_every"),
    "checkpoint-interval": _episodes("run.save_every"),
    "enable-opponent-evasion": _evasion,
    "opponent-evasion-start-episode": _episodes("task.evade_after_samples"),
    "epsilon-speed": _epsilon_decay,
    "anneal-lr": _anneal,
    "vf-coef": _value_coef,
}
"""Flags with a unit, in the order of conversion."""


def convert_units(recipe: RecipeT, given: Mapping[str, str]) -> tuple[RecipeT, list[str]]:
    """Apply flags with a unit to a recipe. Return it and a note for each conversion."""
    notes = []
    for name in (name for name in UNIT_FLAGS if name in given):
        if name == "enable-opponent-evasion" and "opponent-evasion-start-episode" in given:
            continue
        settings, note = UNIT_FLAGS[name](recipe, name, given[name])
        recipe = apply_overrides(recipe, settings)
        notes += [note] if note else []
    return recipe, notes


def _setting(recipe: Any, name: str, key: str) -> Any:
    """Return a setting that a flag is converted with."""
    group, _, field = key.partition(".")
    if not hasattr(getattr(recipe, group), field):
        raise ConfigError(
            f"--{name} cannot be converted: {recipe.name} has no {key}.", f"See lockstep train {recipe.name} --help."
        )
    return getattr(getattr(recipe, group), field)


def _whole_number(name: str, value: str, unit: str) -> int:
    try:
        number = to_int(value)
    except ValueError:
        number = 0
    if number < 1:
        raise ConfigError(f"--{name} is {value!r}, which is not a whole number.", f"Use a number of {unit}.")
    return number
