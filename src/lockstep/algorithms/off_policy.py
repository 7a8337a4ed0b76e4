"""Arithmetic and checks that algorithms with a replay buffer of transitions share."""

from typing import Any

from lockstep.config import ConfigError, RunConfig, resolve_lanes
from lockstep.lanes import Lanes
from lockstep.ops.functional import Scaling, Schedule, lr_scale, schedule


def updates_until(samples: int, learning_starts: int, updates_per_sample: float) -> int:
    """Return the updates due after `samples` samples. They depend on the clock only, so a resume adds none."""
    return int(max(0, samples - learning_starts) * updates_per_sample)


def check_replay_settings(config: Any, task: Any, run: RunConfig) -> None:
    """Raise ConfigError for invalid sizes of batches, rollouts and the replay buffer."""
    Lanes(resolve_lanes(run, 1).lanes or 0, range(0), run.seed).per_lane(config.batch_size, "batch_size")
    if min(config.rollout_steps, config.n_step, config.grad_accum_steps) < 1:
        raise ConfigError(
            f"rollout_steps is {config.rollout_steps}, n_step {config.n_step}, grad_accum_steps "
            f"{config.grad_accum_steps}.",
            "Use 1 or more for each of them.",
        )
    if not task.num_envs <= config.learning_starts <= config.buffer_size:
        raise ConfigError(
            f"learning_starts is {config.learning_starts}, but must be at least num_envs ({task.num_envs}) and at "
            f"most buffer_size ({config.buffer_size}).",
            "Set --algo.learning-starts to a value in this range.",
        )
    if config.updates_per_sample <= 0 or not 0 < config.tau <= 1:
        raise ConfigError(
            f"updates_per_sample is {config.updates_per_sample} and tau {config.tau}.",
            "Use more than 0 for both, and at most 1 for tau.",
        )


def scaled_rate(
    rule: Scaling, rate: float, batch: int, reference: int | None, progress: float, kind: Schedule = "constant"
) -> float | None:
    """Return a learning rate, scaled with the batch size and with a schedule. None: it is constant and not scaled.

    A scaled learning rate has a linear warm-up over 5 % of the run.
    """
    factor = lr_scale(rule, batch, reference)
    if factor == 1.0 and kind == "constant":
        return None
    return schedule(kind, rate * factor, progress, warmup=0.0 if factor == 1.0 else 0.05)
