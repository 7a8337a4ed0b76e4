"""Can this environment repeat a segment with the same bits? Reasons against it, and differences that may not matter."""

from lockstep.checkpoint.machine import describe_machine, differences
from lockstep.checkpoint.provenance import describe_provenance, provenance_differences
from lockstep.config import Recipe
from lockstep.launch.device import device_type
from lockstep.tools.verify.history import Segment


def check_environment(segment: Segment, recipe: Recipe, processes: int) -> tuple[list[str], list[str]]:
    """Compare this machine with the one that trained a segment.

    Returns:
        Reasons why the bits cannot be expected to be the same, and other differences, with which they may be the same.
    """
    kind = device_type(recipe.run.device)
    reasons = differences(segment.end.machine, describe_machine(kind))
    if recipe.run.reduction == "fast":
        if kind != "cpu":
            reasons.append(f"fast reduction on {kind} is not bit-identical from run to run; exact reduction is")
        if segment.end.processes != processes:
            reasons.append(
                "fast reduction rounds differently on another number of processes: trained on "
                f"{segment.end.processes}, and repeated on {processes}"
            )
    found = provenance_differences(segment.end.provenance, describe_provenance(recipe.name))
    return reasons, found
