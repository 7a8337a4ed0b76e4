"""Prepare the repetition of a segment in a temporary directory, choose segments, and add up what was verified."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.checkpoint.copying import copy_checkpoint
from lockstep.checkpoint.fencing import GenerationFence
from lockstep.checkpoint.lineage import find
from lockstep.checkpoint.naming import CheckpointName
from lockstep.config import Recipe, apply_overrides
from lockstep.inference import build_recipe
from lockstep.io.jsonl import CHECKPOINTS, CONFIG
from lockstep.rng import RandomStream
from lockstep.tools.verify.comparison import differing_files, differing_tensors
from lockstep.tools.verify.history import Segment

NAME = "repeated"
"""Name of the run that repeats a segment."""
OUTPUT_ONLY: dict[str, Any] = {
    "run.save_every": 2**62,
    "run.keep_every": None,
    "run.replay_parity": False,
    "run.max_hours": None,
    "run.record_video": False,
    "run.wandb": False,
    "run.log_tensor_digests": False,
}
"""Settings that change only what is written. A repetition writes its last checkpoint."""
SHOWN = 3
"""Differing tensors that are named."""


def choose_segments(segments: Sequence[Segment], count: int, seed: int) -> list[Segment]:
    """Choose different segments at random, in the order of the run."""
    order = RandomStream(seed, "verify.segments").generator(0).permutation(len(segments))
    return [segments[index] for index in sorted(order[:count])]


def segment_recipe(run: Path, segment: Segment) -> Recipe:
    """Build the recipe with the settings of a segment. Raises ConfigError if this Lockstep cannot."""
    settings = dict(segment.settings or {})
    return build_recipe(run / CONFIG, str(settings.pop("recipe", "")), settings)


def prepare(segment: Segment, recipe: Recipe, directory: Path, allow_other_machine: bool) -> Recipe:
    """Create the run that repeats a segment, with a copy of its first checkpoint. Return its recipe."""
    if segment.path is not None:
        checkpoints = directory / NAME / CHECKPOINTS
        checkpoints.parent.mkdir()
        fence = GenerationFence(checkpoints, main=True)
        fence.begin(None)
        fence.confirm(None, [])
        copy = checkpoints / str(CheckpointName(segment.first, fence.generation))
        copy.mkdir()
        copy_checkpoint(segment.path, copy)
    location = {"run.runs_dir": str(directory), "run.name": NAME, "run.allow_other_machine": allow_other_machine}
    return apply_overrides(recipe, OUTPUT_ONLY | location)


def compare(segment: Segment, directory: Path, original: Path) -> str:
    """Compare the end of a repeated segment with its entry. Return what differs; empty if nothing does."""
    checkpoints = directory / NAME / CHECKPOINTS
    name, _ = find(checkpoints)
    if name is None or name.samples != segment.end.samples:
        ended = f"at {name.samples:,} samples" if name else "without a checkpoint"
        return f"the repetition ended {ended}"
    files = differing_files(segment.end, checkpoints / str(name))
    if not files:
        return ""
    kept = original / CHECKPOINTS / segment.end.checkpoint
    tensors = differing_tensors(kept, checkpoints / str(name)) if kept.is_dir() else []
    listed = ", ".join(tensors[:SHOWN]) + (f" and {len(tensors) - SHOWN} more" if len(tensors) > SHOWN else "")
    return f"{', '.join(files)} differ" + (f": {listed}" if listed else "")


def share(segments: Sequence[Segment], total: int) -> str:
    """Describe how much of a run some segments are, such as `7.5 % of its 40,960 samples`."""
    samples = sum(segment.samples for segment in segments)
    return f"{100 * samples / max(1, total):.3g} % of its {total:,} samples"
