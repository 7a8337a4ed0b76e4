"""Score a policy: every process plays its share of the episodes, each with a seed of its own.

Shapes: L local lanes, E environments a lane, B = L x E.
"""

import math
from dataclasses import replace
from typing import Any

import torch

from lockstep.lanes import Lanes
from lockstep.protocols import Policy, TaskConfig
from lockstep.runtime import Runtime
from lockstep.streams import digest
from lockstep.trees import tree_map, tree_where


def evaluate(policy: Policy, task: TaskConfig, runtime: Runtime, episodes: int) -> dict[str, float] | None:
    """Play episodes on environments and streams of their own; the same numbers on every process.

    None on all of them when a request to stop reached one of them meanwhile.

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
    results = {name: [result[name] for _, result in everybody] for name in names}
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
                extras = {name: float(values[index]) for name, values in step.episode.items()}
                result = {"return": float(totals[index]), "length": float(lengths[index])} | extras
                played.append((next_episode[index], result))
                next_episode[index] += envs
            totals[index], lengths[index] = 0.0, 0
    return played
