"""Where a replay can start: a kept checkpoint or the settings, with the same settings up to its end."""

from dataclasses import replace

from lockstep.config import ConfigError
from lockstep.tools.verify.history import DELETED, RunHistory, Segment


def starts(history: RunHistory, samples: int) -> list[Segment]:
    """Return replays that contain the training after `samples` samples, the shortest one first.

    Each begins like a segment of the run that can be repeated, and ends with the newest checkpoint that was trained
    with the same settings.
    """
    found: list[Segment] = []
    for index, segment in enumerate(history.segments):
        if segment.obstacle or segment.first > samples:
            continue
        last = segment
        for following in history.segments[index + 1 :]:
            if following.settings != segment.settings or following.obstacle not in ("", DELETED):
                break
            last = following
        if last.end.samples > samples:
            found.append(replace(segment, end=last.end))
    return found[::-1]


def no_start(history: RunHistory, samples: int) -> ConfigError:
    """Return the error for a run without a start before `samples` samples."""
    if history.segments and history.segments[-1].end.samples <= samples:
        return ConfigError(
            f"{history.run} has no checkpoint after {samples:,} samples, and a replay needs one at its end.",
            f"Resume the run, so that it saves one: lockstep resume {history.run}",
        )
    reasons = "; ".join(sorted({segment.obstacle for segment in history.segments if segment.obstacle}))
    return ConfigError(
        f"no kept checkpoint of {history.run} is a start for a replay at {samples:,} samples: {reasons or 'none'}.",
        "Keep checkpoints of future runs with --run.keep-every.",
    )
