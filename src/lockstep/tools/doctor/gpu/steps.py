"""The steps of the kit, in order, with their time limits in seconds."""

from dataclasses import dataclass

from lockstep.registry import RECIPES

STEP = "--gpu-step"
"""First argument of the process of a step. It is internal, not a flag for users."""
QUICK_RECIPES = ("gym-ppo", "gym-ddpg")
MODES = {"off": 90.0, "graphs": 90.0, "on": 180.0}
"""Values of run.compile that are timed, with time limits. `on` is last because it compiles for a long time."""


@dataclass(frozen=True)
class KitStep:
    """One subprocess of the kit."""

    name: str
    args: tuple[str, ...]
    """Arguments of the Python interpreter."""
    limit: float
    """Seconds after which the process is killed."""


def step(name: str, function: str, *arguments: str, limit: float) -> KitStep:
    """Make a step that runs a function, given as MODULE:NAME in this package, in its own process."""
    return KitStep(name, ("-P", "-m", "lockstep", "doctor", STEP, function, *arguments), limit)


MACHINE = step("machine", "machine:machine", limit=90.0)


def steps_for(gpus: int, quick: bool) -> list[KitStep]:
    """Return every step after `machine`. Each step itself checks whether it applies to this number of GPUs."""
    recipes = QUICK_RECIPES if quick else tuple(RECIPES)
    start_factor = 1.0 + gpus / 8  # more processes take longer to start
    return [
        *(step(f"recipe {name}", "recipes:recipe", name, limit=100.0) for name in recipes),
        step("replicas", "proofs:replicas", limit=90.0 * start_factor),
        step("precision", "precision:precision", limit=90.0),
        step("exact", "proofs:exact", limit=90.0),
        step("prove over NCCL", "proofs:prove_nccl", limit=150.0 * start_factor),
        step("prove over gloo", "proofs:prove_gloo", limit=120.0),
        step("hang drill", "drills:hang", limit=120.0),
        step("kill drill", "drills:kill", limit=120.0),
        step("bandwidth", "scaling:bandwidth", limit=90.0 * start_factor),
        step("scaling", "scaling:scaling", limit=120.0 * start_factor),
        step("shares", "scaling:shares", limit=120.0),
        *(step(f"bench compile={mode}", "benchmarks:mode", mode, limit=limit) for mode, limit in MODES.items()),
    ]
