"""Distributed evaluation: every process plays its share of the episodes, or predicts its share of the examples.

Shapes: L local lanes, E environments per lane, B = L x E; N examples.
"""

import math
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.base import Dataset
from lockstep.config import DEFAULT_EVAL_EPISODES, RunConfig
from lockstep.distributed import Runtime
from lockstep.lanes import Lanes
from lockstep.protocols import Policy, Split, TaskConfig
from lockstep.pytree import tree_map, tree_where
from lockstep.rng import stable_hash
from lockstep.transfer import has_float64

CHUNK = 256
"""Examples per forward pass. Fixed, because the rounding of outputs may depend on the batch size."""
CHECK_EVERY = 16
"""Steps between checks on CUDA whether all episodes have ended. Each check synchronizes with the device."""


def evaluate(
    policy: Policy,
    task: TaskConfig | Dataset.Config | Dataset,
    runtime: Runtime,
    episodes: int,
    split: Split = "validation",
    max_steps: int | None = None,
) -> dict[str, float] | None:
    """Evaluate a policy on episodes, or on a split of a dataset. The result is the same on every process.

    Args:
        split: Part of the data: that of a dataset, or that on which episodes are played, if the task has parts.
        max_steps: Environment steps to spend. Each lane plays one episode, and another one as long as it is expected
            to fit. None: play all episodes.

    Returns None on all processes if one of them received a stop request during the evaluation.
    """
    if isinstance(task, TaskConfig):
        return _evaluate_episodes(policy, select_split(task, split), runtime, episodes, max_steps)
    with nullcontext(task) if isinstance(task, Dataset) else closing(task.build(runtime.lanes, runtime.device)) as data:
        predictions = predict(policy, data, runtime, split)
        return None if predictions is None else measure(data, split, predictions)


def select_split(task: TaskConfig, split: Split) -> TaskConfig:
    """Return the settings of a task on a part of its data. A config that is not of `VecEnv` has no parts."""
    config: TaskConfig = task.with_split(split) if hasattr(task, "with_split") else task
    return config


def evaluation_interval(task: Any, run: RunConfig, runtime: Runtime, share: float) -> int | None:
    """Return the samples between evaluations: `run.eval_every`, or more if evaluations would take too much of the run.

    Environments step together, so one episode per lane costs as many steps as the longest of them on every lane.
    `share` is that of `Algorithm.eval_share`.
    """
    longest: int | None = getattr(task, "max_episode_steps", None)
    if not run.eval_every or run.eval_episodes is not None or longest is None:
        return run.eval_every
    steps = runtime.lanes.num_lanes * longest
    interval = max(run.eval_every, math.ceil(steps / share))
    if interval > run.eval_every:
        runtime.pending_messages.append(
            f"Evaluating every {interval:,} samples instead of run.eval_every={run.eval_every}: one evaluation takes "
            f"up to {steps:,} steps. Set run.eval_episodes, such as 32, to evaluate as often as set."
        )
    return interval


def evaluate_during_training(
    policy: Policy, task: TaskConfig | Dataset, runtime: Runtime, run: RunConfig, share: float, last: bool
) -> dict[str, float] | None:
    """Evaluate with the settings of a run. The limit depends on settings and episodes only, never on measured time."""
    if run.eval_episodes is not None:
        return evaluate(policy, task, runtime, run.eval_episodes)
    max_steps = share / 2 * run.total_samples if last else share * (run.eval_every or 0)
    return evaluate(policy, task, runtime, DEFAULT_EVAL_EPISODES, max_steps=int(max_steps))


def measure(data: Dataset, split: Split, predictions: np.ndarray) -> dict[str, float]:
    """Compute metrics of the predictions of a whole split, and the number of examples."""
    with data.lock:
        return data.compute_metrics(split, predictions) | {"examples": float(len(predictions))}


def predict(policy: Policy, data: Dataset, runtime: Runtime, split: Split) -> np.ndarray | None:
    """Predict a whole split, in order, on every process. Return None after a stop request.

    Uses fixed-size chunks per lane and one thread, so that results do not depend on which process hosts a lane.
    """
    count, lanes = data.count(split), runtime.lanes
    parts: dict[int, Tensor] = {}  # predictions of a chunk by its first row
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for lane in lanes.local:
            for start in range(lane * CHUNK, count, lanes.num_lanes * CHUNK):
                if runtime.status.stop_requested:
                    break
                runtime.watchdog.note_progress()
                rows = np.arange(start, min(start + CHUNK, count))
                with data.lock:
                    host_inputs = data.read(split, rows)["inputs"]
                inputs = tree_map(lambda x: x.to(runtime.device), host_inputs)
                with runtime.autocast():
                    output, _ = policy.act(inputs, {})
                # Move to the CPU first: the device may not support float64.
                parts[start] = output.cpu().double()
    finally:
        torch.set_num_threads(threads)
    if runtime.all_reduce_any(interrupted=runtime.status.stop_requested)["interrupted"]:
        return None
    # A process without a chunk learns the shape of a prediction from the others.
    local_shape = next((list(part.shape[1:]) for part in parts.values()), None)
    shape: list[int] = next((found for found in runtime.all_gather_json(local_shape) if found is not None), [])
    predictions = torch.zeros(count, *shape, dtype=torch.float64)  # [N, ...]
    for start, part in parts.items():
        predictions[start : start + CHUNK] = part
    return runtime.all_reduce_sum(predictions).numpy()  # exact: each entry is nonzero on one process only


def _evaluate_episodes(
    policy: Policy, task: TaskConfig, runtime: Runtime, episodes: int, max_steps: int | None
) -> dict[str, float] | None:
    """Play episodes on separate environments with separate random streams.

    Environment i plays episodes i, i + n, i + 2n, ... to the end, so that short episodes are not overrepresented.
    """
    lanes = replace(runtime.lanes, seed=stable_hash(runtime.lanes.seed, "evaluation") & (2**63 - 1))
    episodes = max(episodes, getattr(task, "num_tasks", 1))  # at least one episode of each task
    # With limited steps, one environment per lane: each of them plays at least one episode.
    needed = min(episodes, max(task.num_envs if max_steps is None else 0, lanes.num_lanes))
    unit = lanes.num_lanes * getattr(task, "rows_per_game", 1)  # whole games on every lane
    envs = math.ceil(needed / unit) * unit
    with closing(replace(task, num_envs=envs).build(lanes, runtime.device)) as env:  # type: ignore[type-var]
        local_results = _play(policy, env, lanes, runtime, envs, episodes, max_steps)
    if runtime.all_reduce_any(interrupted=local_results is None)["interrupted"]:
        return None
    all_results = sorted(tuple(row) for rows in runtime.all_gather_json(local_results) for row in rows)
    if max_steps is not None:
        all_results = _whole_rounds(all_results, envs, episodes)
    names = sorted({name for _, result in all_results for name in result})
    by_name = {name: [result[name] for _, result in all_results if name in result] for name in names}
    summary = {f"{name}_mean": sum(values) / len(values) for name, values in by_name.items()}
    variance = sum((value - summary["return_mean"]) ** 2 for value in by_name["return"]) / len(all_results)
    return summary | {"return_std": math.sqrt(variance), "episodes": float(len(all_results))}


def _whole_rounds(results: list[tuple[int, Any]], envs: int, episodes: int) -> list[tuple[int, Any]]:
    """Drop episodes after the last round that every environment played: short episodes would be overrepresented."""
    played = {number for number, _ in results}
    whole = 0
    while whole < episodes and played.issuperset(range(whole, min(whole + envs, episodes))):
        whole = min(whole + envs, episodes)
    return [result for result in results if result[0] < whole]


def _play(
    policy: Policy, env: Any, lanes: Lanes, runtime: Runtime, envs: int, episodes: int, max_steps: int | None
) -> list[Any] | None:
    """Play the local share of the episodes.

    Returns:
        (episode number, results by name) for each episode; None if interrupted before the last one ended.
    """
    first = lanes.local.start * (envs // lanes.num_lanes)
    numbers = torch.arange(first, first + env.num_envs)  # first episode of each environment
    scoreboard = Scoreboard(numbers, envs, episodes, runtime.device, None if max_steps is None else max_steps // envs)
    initial_memory = tree_map(torch.clone, policy.initial_state(env.num_envs))
    obs, memory = env.observations(), initial_memory  # the environments were just built, which resets them

    def act(inputs: dict[str, Any]) -> Any:
        with runtime.autocast():
            action, next_memory = policy.act(inputs["obs"], inputs["memory"])
        return {"action": action, "memory": next_memory}

    while not scoreboard.done():
        if runtime.status.stop_requested:
            return None
        runtime.watchdog.note_progress()
        outputs: Any = runtime.map_lanes(act, {"obs": obs, "memory": memory})
        step = env.step(outputs["action"])
        obs, ended = step.obs, step.terminated | step.truncated
        memory = tree_where(ended, initial_memory, outputs["memory"])
        scoreboard.count(step.reward, ended, step.episode_info, step.active)
    return scoreboard.results()


class Scoreboard:
    """Results of the local episodes, kept on the device if that is CUDA and on the CPU otherwise.

    MPS has no float64, so its results are kept on the CPU. On CUDA only two methods wait for the device: `done`, in one
    of CHECK_EVERY steps, and `results`. Steps after the last episode are not counted.

    Shapes: B local environments, R rounds (the most episodes of an environment), K = 2 + extras.
    """

    def __init__(
        self, numbers: Tensor, envs: int, episodes: int, device: torch.device, max_steps: int | None = None
    ) -> None:
        """Environment i plays episodes `numbers[i]`, `numbers[i] + envs`, ... below `episodes`.

        With `max_steps`, it starts another episode only if one of its average length would end within that many steps.
        """
        self.max_steps = max_steps
        self.device = device if device.type == "cuda" and has_float64(device) else torch.device("cpu")
        self.numbers, self.envs = numbers, envs
        quota = (episodes - numbers + envs - 1).clamp(min=0) // envs
        self.rounds = int(quota.max())
        self.steps = 0
        self.quota = quota.to(self.device)  # [B] episodes to play
        self.played = torch.zeros_like(self.quota)  # [B]
        self.lengths = torch.zeros_like(self.quota)  # [B]
        self.totals = torch.zeros(len(numbers), dtype=torch.float64, device=self.device)  # [B]
        self.names: list[str] = []
        self.table = torch.empty(0)  # [B, R + 1, K]; the last row receives uncounted episodes

    def done(self) -> bool:
        """Return whether all episodes have ended. On CUDA, this may be up to CHECK_EVERY - 1 steps late."""
        if self.device.type == "cuda" and self.steps % CHECK_EVERY:
            return False
        return bool((self.played >= self.quota).all())

    def count(self, reward: Tensor, ended: Tensor, extras: dict[str, Tensor], active: Tensor | None = None) -> None:
        """Add a step: rewards [B], episode ends [B], and extras [B] by name, which are read where an episode ended.

        Rows that are not active always end, but their episodes are not counted.
        """
        self.steps += 1
        self.totals += reward.to(self.device)
        self.lengths += 1
        ended = ended.to(self.device)
        if self.device.type == "cpu" and not ended.any():
            return
        if not self.names:
            self.names = ["return", "length", *extras]
            shape = (len(self.numbers), self.rounds + 1, len(self.names))
            self.table = torch.zeros(shape, dtype=torch.float64, device=self.device)
        # Move to the device before widening: the source device may not support float64.
        columns = [self.totals, self.lengths, *(values.to(self.device) for values in extras.values())]
        row = torch.stack([column.double() for column in columns], dim=1).unsqueeze(1)  # [B, 1, K]
        counted = ended & (self.played < self.quota)
        if active is not None:
            counted &= active.to(self.device)
        row_index = torch.where(counted, self.played, self.rounds)  # [B]
        self.table.scatter_(1, row_index.view(-1, 1, 1).expand_as(row), row)
        self.played += counted
        if self.max_steps is not None:
            # All steps so far belong to the episodes played. Steps of one environment only: independent of processes.
            fits = self.steps * (self.played + 1) <= self.max_steps * self.played
            self.quota = torch.where(counted & ~fits, self.played, self.quota)
        self.totals.masked_fill_(ended, 0.0)
        self.lengths.masked_fill_(ended, 0)

    def results(self) -> list[Any]:
        """Return (episode number, results by name) of counted episodes, without extras that are NaN."""
        results: list[Any] = []
        if not self.names:  # no episode ended
            return results
        for number, played, rows in zip(self.numbers.tolist(), self.played.tolist(), self.table.tolist(), strict=True):
            for index, row in enumerate(rows[:played]):
                extras = {
                    name: value for name, value in zip(self.names[2:], row[2:], strict=True) if not math.isnan(value)
                }
                results.append((number + index * self.envs, {"return": row[0], "length": row[1]} | extras))
        return results
