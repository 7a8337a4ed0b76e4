"""Charts of a sweep: its trials as lines through parallel axes, and how important each setting is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from lockstep.config import ConfigError
from lockstep.sweeps.optuna_study import setting_importances
from lockstep.sweeps.progress import trial_states
from lockstep.sweeps.record import SweepRecord, TrialRecord, read_sweep, read_trials
from lockstep.sweeps.space import Choices, Range, Space, choice_key, space_from_record
from lockstep.tools.report.html import Table, render
from lockstep.tools.report.series import format_number

WIDTH, HEIGHT, TOP, BOTTOM, SIDE = 920, 300, 34, 24, 70
"""Size and margins of the chart, in SVG units."""
SHOWN_TRIALS = 200
"""Trials that are drawn, the best ones last."""
LABEL_CHARS = 22
"""Characters of a setting above its axis: the end of its name."""


@dataclass(frozen=True)
class SweepSection:
    """Section of a page about one sweep."""

    label: str
    counts: str
    svg: Markup
    explanation: str
    importances: Table | None


def read_section(path: Path, label: str) -> SweepSection:
    """Read the section about a sweep.

    Raises:
        ConfigError: A file of the sweep is invalid.
    """
    record, trials = read_sweep(path), read_trials(path)
    space = space_from_record(record.space)
    for number, trial in enumerate(trials):
        if trial.settings.keys() != space.keys():
            raise ConfigError(
                f"trial {number} of {path} does not have the settings of the space.", "Restore its files."
            )
    states = [state.state for state in trial_states(record, trials)]
    counts = [f"{states.count(state)} {state}" for state in ("finished", "pruned", "failed") if state in states]
    importances = setting_importances(record, space, trials)
    rows = [(name, f"{share:.0%}") for name, share in sorted(importances.items(), key=lambda item: -item[1])]
    return SweepSection(
        label=label,
        counts=f"{len(trials)} of {record.trials} trials: {', '.join(counts) or 'none decided'}",
        svg=_parallel_coordinates(record, space, trials),
        explanation=(
            f"A line is a trial{' with its last settings' if record.prune == 'pbt' else ''}. The last axis is its "
            "newest value, also of pruned trials; the best quarter is colored."
        ),
        importances=Table(("setting", "importance for the value at the first rung"), rows, "figures") if rows else None,
    )


def _parallel_coordinates(record: SweepRecord, space: Space, trials: Sequence[TrialRecord]) -> Markup:
    """Draw every trial with a value as a line through one axis for each setting, and one for the value."""
    lines = [(value, number, trial) for number, trial in enumerate(trials) if (value := _newest(trial)) is not None]
    lines = sorted(lines, key=lambda line: (record.sign * line[0], -line[1]))[-SHOWN_TRIALS:]
    if not lines:
        return Markup("")
    values = [value for value, _, _ in lines]
    names = list(space)
    positions = [SIDE + (WIDTH - 2 * SIDE) * place / len(names) for place in range(len(names) + 1)]
    axes = [(_end(name), x, *_limits(space[name])) for name, x in zip(names, positions, strict=False)]
    axes.append((_end(record.metric or "value"), positions[-1], format_number(min(values)), format_number(max(values))))
    drawn = []
    for place, (value, number, trial) in enumerate(lines):
        heights = [_height(space[name], trial.settings[name]) for name in names]
        heights.append((value - min(values)) / ((max(values) - min(values)) or 1.0))
        path = [(x, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y) for x, y in zip(positions, heights, strict=True)]
        settings = "\n".join(f"{name}: {trial.settings[name]}" for name in names)
        is_best = place >= math.floor(0.75 * len(lines))
        drawn.append((is_best, path, f"trial {number}: {format_number(value)}\n{settings}"))
    return render("sweep.svg.j2", width=WIDTH, height=HEIGHT, top=TOP, floor=HEIGHT - BOTTOM, axes=axes, lines=drawn)


def _newest(trial: TrialRecord) -> float | None:
    known = [value for value in trial.values if value is not None]
    return known[-1] if known and trial.failure is None else None


def _limits(domain: Any) -> tuple[str, str]:
    """Return the labels of the lower and the upper end of an axis."""
    if isinstance(domain, Choices):
        return str(choice_key(domain.values[0])), str(choice_key(domain.values[-1]))
    return format_number(domain.low), format_number(domain.high)


def _height(domain: Range | Choices, setting: Any) -> float:
    """Return the height of a setting on its axis, from 0 to 1. A setting outside, in an edited file, is at an end."""
    if isinstance(domain, Choices):
        place = domain.values.index(setting) if setting in domain.values else 0
        return place / max(1, len(domain.values) - 1)
    if not isinstance(setting, int | float):
        return 0.0
    low, high, number = float(domain.low), float(domain.high), min(max(float(setting), domain.low), domain.high)
    if domain.log:
        low, high, number = math.log(low), math.log(high), math.log(number)
    return (number - low) / (high - low)


def _end(name: str) -> str:
    return name if len(name) <= LABEL_CHARS else f"…{name[-LABEL_CHARS:]}"
