"""A sweep of Weights & Biases with the same search space. Each of its runs is started by a command of Lockstep."""

from collections.abc import Sequence
from typing import Any

import yaml

from lockstep.sweeps.record import SweepRecord
from lockstep.sweeps.space import Choices, Range, Space

METHODS = {"tpe": "bayes", "random": "random"}
DEFAULT_METRIC = "eval/return_mean"


def wandb_sweep(record: SweepRecord, space: Space, arguments: Sequence[str]) -> str:
    """Return the file for `wandb sweep`.

    Args:
        record: The planned sweep.
        space: Its search space.
        arguments: Words after `lockstep train` that the runs have in common: recipe, processes and settings.
    """
    early = {"type": "hyperband", "min_iter": 1, "eta": record.eta}
    config: dict[str, Any] = {
        "name": record.recipe.rpartition("/")[2].removesuffix(".py"),
        "method": METHODS[record.sampler],
        "metric": {"name": record.metric or DEFAULT_METRIC, "goal": record.direction},
        "run_cap": record.trials,
        "parameters": {name: _parameter(domain) for name, domain in space.items()},
    }
    config |= {"early_terminate": early} if record.prune == "asha" else {}
    # Lockstep starts the processes of a run itself: the command is a launcher, and torchrun is not needed.
    config["command"] = ["lockstep", "train", *arguments, "run.wandb=true", "${args_no_hyphens}"]
    return str(yaml.safe_dump(config, sort_keys=False, width=1000))


def _parameter(domain: Range | Choices) -> dict[str, Any]:
    if isinstance(domain, Choices):
        return {"values": [_word(value) for value in domain.values]}
    limits = {"min": domain.low, "max": domain.high}
    if domain.log:
        return {"distribution": "q_log_uniform_values" if domain.is_integer else "log_uniform_values"} | limits
    if domain.step:
        return {"distribution": "q_uniform", "q": domain.step} | limits
    return {"distribution": "int_uniform" if domain.is_integer else "uniform"} | limits


def _word(value: Any) -> Any:
    """Return a choice as W&B can put it on a command line: a list is written as 64,64."""
    return ",".join(map(str, value)) if isinstance(value, list) else value
