"""Score a policy: every process plays its share of the episodes, or predicts its share of the examples.

Shapes: L local lanes, E environments a lane, B = L x E; N examples.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.lanes import Lanes
from lockstep.protocols import Dataset, DatasetConfig, Policy, Split, TaskConfig
from lockstep.runtime import Runtime
from lockstep.streams import digest
from lockstep.trees import tree_map, tree_where

CHUNK = 256
"""Examples that are predicted together. Fixed, because what a network says may depend on how many it is asked about."""


def evaluate(
    policy: Policy, task: TaskConfig | DatasetConfig, runtime: Runtime, episodes: int, split: Split = "validation"
) -> dict[str, float] | None:
    """What a policy is worth, the same numbers on every process: by episodes, or on a split of a data set.

    None on all of them when a request to stop reached one of them meanwhile.
    """
    if isinstance(task, TaskConfig):
        return _evaluate_episodes(policy, task, runtime, episodes)
    data = task.build(runtime.lanes, runtime.device)
    try:
        predictions = predict(policy, data, runtime, split)
        return None if predictions is None else measure(data, split, predictions)
    finally:
        data.close()


def measure(data: Dataset, split: Split, predictions: np.ndarray) -> dict[str, float]:
    """What the predictions for a whole split amount to, and how many there are."""
    return data.measure(split, predictions) | {"examples": float(len(predictions))}


def predict(policy: Policy, data: Dataset, runtime: Runtime, split: Split) -> np.ndarray | None:
    """The predictions for a whole split, in its order, on every process; None if asked to stop meanwhile.

    Lane by lane in chunks of one size and on one thread, in both modes: who hosts a lane does not change a bit.
    """
    count, lanes = data.count(split), runtime.lanes
    everybody = torch.zeros(count, dtype=torch.float64)  # [N]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for lane in lanes.local:
            for start in range(lane * CHUNK, count, lanes.count * CHUNK):
                if runtime.interrupted:
                    break
                rows = np.arange(start, min(start + CHUNK, count))
                everybody[start : start + CHUNK] = _predict(policy, data.read(split, rows)["inputs"], runtime)
    finally:
        torch.set_num_threads(threads)
    if runtime.agree(cut=runtime.interrupted)["cut"]:
        return None
    return runtime.sum(everybody).numpy()  # each number is somebody's own, and adding zero is exact


def _predict(policy: Policy, inputs: Any, runtime: Runtime) -> Tensor:
    inputs = tree_map(lambda x: x.to(runtime.device), inputs)
    with runtime.autocast():
        return policy.act(inputs, {})[0].double().cpu()


def _evaluate_episodes(policy: Policy, task: TaskConfig, runtime: Runtime, episodes: int) -> dict[str, float] | None:
    """Play episodes on environments and streams of their own.

    Environment i plays episodes i, i + n, i + 2n, ... to their ends, so short episodes count no more than long ones.
    """
    lanes = Lanes(runtime.lanes.count, runtime.lanes.local, digest(runtime.lanes.seed, "evaluation") & (2**63 - 1))
    wanted = min(episodes, max(task.num_envs, lanes.count))
    envs = math.ceil(wanted / lanes.count) * lanes.count
    env = replace(task, num_envs=envs).build(lanes, runtime.device)  # type: ignore[type-var]
    try:
        played = _play(policy, env, lanes, runtime, envs, episodes)
    finally:
        env.close()
    if runtime.agree(cut=played is None)["cut"]:
        return None
    everybody = sorted(tuple(row) for rows in runtime.gather(played) for row in rows)
    names = sorted({name for _, result in everybody for name in result})
    results = {name: [result[name] for _, result in everybody if name in result] for name in names}
    summary = {f"{name}_mean": sum(values) / len(values) for name, values in results.items()}
    spread = sum((value - summary["return_mean"]) ** 2 for value in results["return"]) / len(everybody)
    return summary | {"return_std": math.sqrt(spread), "episodes": float(len(everybody))}


def _play(policy: Policy, env: Any, lanes: Lanes, runtime: Runtime, envs: int, episodes: int) -> list[Any] | None:
    """Play the local share; a list of (episode number, what it came to), None when asked to stop before its end."""
    per_lane = envs // lanes.count
    first = lanes.local.start * per_lane
    next_episode = [first + index for index in range(env.num_envs)]
    totals, lengths = torch.zeros(env.num_envs, dtype=torch.float64), torch.zeros(env.num_envs, dtype=torch.int64)
    fresh = tree_map(torch.clone, policy.initial_memory(env.num_envs))
    obs, memory, played = env.reset(), fresh, []

    def act(part: dict[str, Any]) -> Any:
        with runtime.autocast():
            action, after = policy.act(part["obs"], part["memory"])
        return {"action": action, "memory": after}

    while any(episode < episodes for episode in next_episode):
        if runtime.interrupted:
            return None
        acted: Any = runtime.map_lanes(act, {"obs": obs, "memory": memory})
        step = env.step(acted["action"])
        obs, ended = step.obs, step.terminated | step.truncated
        totals += step.reward.cpu()
        lengths += 1
        memory = tree_where(ended, fresh, acted["memory"])
        for index in ended.nonzero().flatten().tolist():
            if next_episode[index] < episodes:
                counted = {name: float(values[index]) for name, values in step.episode.items()}
                extras = {name: value for name, value in counted.items() if not math.isnan(value)}
                result = {"return": float(totals[index]), "length": float(lengths[index])} | extras
                played.append((next_episode[index], result))
                next_episode[index] += envs
            totals[index], lengths[index] = 0.0, 0
    return played
