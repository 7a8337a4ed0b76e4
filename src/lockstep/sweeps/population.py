"""Population-based training: at each rung, the worst trials continue from copies of the best with changed settings.

Jaderberg et al. (2017), arXiv:1711.09846. All trials train together, and all wait at a rung until each has a value. A
decision depends only on these values, the settings and the seed, so neither timing nor kills change it. A copy is a
fork: a run of its own with the whole checkpoint of its parent.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config import ConfigError, Recipe, apply_overrides
from lockstep.forking import create_fork
from lockstep.inference import load_recipe
from lockstep.rng import RandomStream
from lockstep.sweeps.pruning import rungs
from lockstep.sweeps.record import Copy, SweepRecord, TrialRecord, trial_directory
from lockstep.sweeps.space import Choices, Range, Space

COPIED = 4
"""One trial of this number, at least one, is replaced by a copy at each rung; the copies are of as many of the best."""
FACTORS = (0.8, 1.2)
"""Changes of a number in a copy."""
RESAMPLED = 0.25
"""Probability that a setting of a copy is chosen from the whole space instead."""
MIN_TRIALS = 2


def require_changeable(space: Space, recipe: Recipe) -> None:
    """Raise ConfigError for settings that a fork cannot change."""
    for name in space:
        group, _, path = name.partition(".")
        changeable = getattr(getattr(recipe, group, None), "changeable_on_resume", ())
        if path.partition(".")[0] not in changeable:
            raise ConfigError(
                f"{name} cannot change while a run trains, as population-based training needs.",
                f"Search other settings. Those of {group} that can change: {', '.join(changeable) or 'none'}.",
            )


def rung_to_decide(record: SweepRecord, trials: Sequence[TrialRecord]) -> int | None:
    """Return the number of the rung that all trials have reached and after which they continue. None: not yet."""
    reached = {len(trial.values) + (trial.failure is not None) for trial in trials}
    if len(trials) < record.trials or len(reached) > 1:
        return None
    rung = reached.pop() - 1
    return rung if 0 <= rung < len(rungs(record)) - 1 else None


def decide(record: SweepRecord, space: Space, trials: Sequence[TrialRecord], rung: int) -> list[Copy]:
    """Return the copies after a rung, in the order of the trials that they replace.

    Failed trials are among the worst. A copy is only made of a better trial.
    """
    scores = [
        -math.inf if trial.failure is not None or (value := trial.values[rung]) is None else record.sign * value
        for trial in trials
    ]
    order = sorted(range(len(trials)), key=lambda number: (-scores[number], number))
    count = max(1, len(trials) // COPIED)
    best = order[:count]
    failed = [number for number in order[count:] if trials[number].failure is not None]
    copies = []
    for number in sorted({*order[max(count, len(order) - count) :], *failed}):
        draw = RandomStream(record.seed, "sweep.population", number).generator(rung)
        parent = best[int(draw.integers(len(best)))]
        if scores[parent] > scores[number]:
            settings = {name: explore(space[name], trials[parent].settings[name], draw) for name in space}
            copies.append(Copy(number, parent, rungs(record)[rung], settings))
    return copies


def explore(domain: Range | Choices, setting: Any, draw: np.random.Generator) -> Any:
    """Return a changed setting: a number times one of `FACTORS`, or any value of its domain."""
    resampled, place, factor = draw.random() < RESAMPLED, draw.random(), FACTORS[int(draw.integers(2))]
    if isinstance(domain, Choices):
        return domain.values[int(place * len(domain.values))] if resampled else setting
    if resampled and domain.log:
        number = domain.low * (domain.high / domain.low) ** place
    elif resampled:
        number = domain.low + place * (domain.high - domain.low)
    else:
        number = setting * factor
        if domain.is_integer and round(number) == setting:  # a small integer changes by one
            number = setting + (1 if factor > 1 else -1)
    if domain.step is not None or domain.is_integer:
        step = domain.step or 1
        number = domain.low + step * round((number - domain.low) / step)
        highest = domain.low + step * math.floor((domain.high - domain.low) / step)
        return type(domain.low)(min(max(number, domain.low), highest))
    return float(min(max(number, domain.low), domain.high))


def make_copy(sweep: Path, trials: Sequence[TrialRecord], copy: Copy) -> None:
    """Create the run of a copy, unless it exists. The parent has not trained on: its newest checkpoint is copied."""
    path = trial_directory(sweep, copy.number, trials[copy.number]).absolute()
    if path.exists():
        return
    parent = trial_directory(sweep, copy.parent, trials[copy.parent]).absolute()
    before = load_recipe(parent)
    location = {"run.runs_dir": str(path.parent), "run.name": path.name}
    create_fork(parent, None, before, apply_overrides(apply_overrides(before, copy.settings), location))
