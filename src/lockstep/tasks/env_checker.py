"""The contract of a task, checked: what whoever writes a task runs before training on it.

`for fault in check_env(MyConfig()): print(fault)` plays a few hundred steps with random actions, on all lanes and on
some of them. A law is a function that yields a sentence for every way in which the task breaks it.

Shapes: B local environments; N = 16 environments in all, two on each of 8 lanes.
"""

import dataclasses
import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Dict
from torch import Tensor

from lockstep.clock import TrainState
from lockstep.config import ConfigError
from lockstep.lanes import Lanes
from lockstep.protocols import StateDict, Step, TaskConfig, VecEnv
from lockstep.pytree import Tree, named_leaves
from lockstep.rng import RandomStream
from lockstep.tasks.spaces import sample_action, tensor_dtype

LANES, SHARE = 8, 2
N = LANES * SHARE
ALL, SOME, OTHERS = range(LANES), range(3, 6), range(2, 7)
ACTIONS = RandomStream(0, "check")
MEMBERS = (
    *("num_envs", "observation_space", "action_space", "reset", "observations", "step", "on_iteration_start"),
    *("render_text", "render", "close"),
    *("shared_state", "load_shared_state", "lane_state", "load_lane_state"),
)


def check_env(config: TaskConfig, steps: int = 200, chance: bool = True) -> list[str]:
    """Every way in which a task breaks its contract, a sentence each; none if it keeps it.

    Let `steps` be longer than an episode. A task in which nothing is left to chance says `chance=False`.
    """
    config = dataclasses.replace(config, num_envs=N)  # type: ignore[type-var]
    before = _global_random()
    # One after the other: tensors of the wrong form cannot be compared.
    faults = [*_has_all_members(config)] or [*_keeps_its_forms(config, steps)]
    if not faults:
        faults += _keeps_last_observations(config, steps)
        faults += _plays_the_same_again(config, steps)
        faults += _plays_the_same_on_any_lanes(config, steps)
        faults += _goes_on_when_restored(config, steps)
        faults += _leaves_something_to_chance(config, steps) if chance else []
        faults += _can_be_watched(config)
    for name, state in _global_random().items():
        if state != before[name]:
            faults += [f"The task draws from the global state of {name}, which others share. Draw from a RandomStream."]
    return faults


class EnvGroup:
    """The environments of some lanes, given actions that depend on their global index and the time alone."""

    def __init__(self, config: TaskConfig, lanes: range, seed: int = 0) -> None:
        self.envs: VecEnv = config.build(Lanes(LANES, lanes, seed), torch.device("cpu"))
        self.rows = slice(lanes.start * SHARE, lanes.stop * SHARE)
        """Where these environments stand among all."""

    def start(self) -> Tree:
        obs = self.envs.reset()
        self.envs.on_iteration_start(TrainState(total_samples=1))
        return obs

    def step(self, time: int) -> Step:
        return self.envs.step(sample_action(self.envs.action_space, ACTIONS, time, N)[self.rows])

    def close(self) -> None:
        self.envs.close()


# The laws


def _has_all_members(config: TaskConfig) -> Iterator[str]:
    envs = EnvGroup(config, SOME).envs
    missing = [name for name in MEMBERS if not hasattr(envs, name)]
    if missing:
        yield f"The task has no {', '.join(missing)}. Add what protocols.VecEnv asks for."
        return
    if envs.num_envs != len(SOME) * SHARE:
        yield (
            f"num_envs is {envs.num_envs} where {len(SOME)} of {LANES} lanes host {len(SOME) * SHARE} of {N} "
            "environments. Count those of the local lanes: len(lanes) * lanes.per_lane(config.num_envs, 'num_envs')."
        )
    envs.close()


def _keeps_its_forms(config: TaskConfig, steps: int) -> Iterator[str]:
    with closing(EnvGroup(config, ALL)) as group:
        space = group.envs.observation_space
        faults = [*_misfits(group.start(), space, "obs", "of reset()")]
        for time in range(steps):
            if faults:  # those of one step tell enough
                break
            step = group.step(time)
            faults = [*_misshapen(step, f"at step {time}")] or [*_unfit(step, space, f"at step {time}")]
            if not faults and _unequal(named_leaves(step.obs, "obs"), named_leaves(group.envs.observations(), "obs")):
                faults = [
                    f"observations() after step {time} is not the obs of that step. Return the current observation."
                ]
        yield from faults


def _keeps_last_observations(config: TaskConfig, steps: int) -> Iterator[str]:
    ended = echoed = changed = 0
    with closing(EnvGroup(config, ALL)) as group:
        first = _row_bytes(group.start(), 0)
        for time in range(steps):
            step = group.step(time)
            changed += _row_bytes(step.obs, 0) != first
            for row in _where(step.terminated | step.truncated):
                ended += 1
                echoed += _row_bytes(step.final_obs, row) == _row_bytes(step.obs, row)
    if not ended:
        yield f"No episode ended in {steps} steps, so no end could be checked. Call check_env with more steps."
    elif echoed == ended and changed:
        yield (
            f"final_obs equals obs in all {ended} episodes that ended: it shows how the next episode begins. Copy the "
            "last observation to final_obs, which has memory of its own, before you start the next episode."
        )


def _plays_the_same_again(config: TaskConfig, steps: int) -> Iterator[str]:
    with closing(EnvGroup(config, ALL)) as once, closing(EnvGroup(config, ALL)) as again:
        once.start()
        again.start()
        difference = _first_difference(once, again, range(steps))
        if difference:
            yield (
                f"Two builds with the same seed and the same actions differ: {difference}. "
                "Draw everything from RandomStreams of lanes.seed, and share nothing between builds."
            )


def _plays_the_same_on_any_lanes(config: TaskConfig, steps: int) -> Iterator[str]:
    with closing(EnvGroup(config, ALL)) as whole, closing(EnvGroup(config, SOME)) as some:
        whole.start()
        some.start()
        difference = _first_difference(whole, some, range(steps))
        if difference:
            yield (
                f"Alone, {_named(SOME)} play otherwise than among all {LANES}: {difference}. Seed an environment "
                "by its global index, lane * share + place, and let no environment look at another."
            )


def _goes_on_when_restored(config: TaskConfig, steps: int) -> Iterator[str]:
    pause = steps * 3 // 7  # not a round part of the steps, where all episodes of a round length would just have begun
    story = f"Saved on all lanes after {pause} steps and loaded on {_named(OTHERS)}"
    with closing(EnvGroup(config, ALL)) as whole, closing(EnvGroup(config, OTHERS)) as restored:
        whole.start()
        restored.start()
        for time in range(pause):
            whole.step(time)
            restored.step(time + 1)  # other actions, so that whatever loading forgets is wrong
        strange = [name for name, part in whole.envs.lane_state(0).items() if not isinstance(part, Tensor)]
        if strange:
            yield f"lane_state holds {', '.join(strange)}, not as a tensor. Save named tensors and nothing else."
            return

        restored.envs.load_shared_state(_copied(whole.envs.shared_state()))
        for lane in OTHERS:
            saved = _copied(whole.envs.lane_state(lane))
            restored.envs.load_lane_state(lane, _copied(saved))
            lost = _unequal(saved, restored.envs.lane_state(lane))
            if lost:
                yield f"{story}, lane {lane} has another {', '.join(lost)} than was saved. Load all that is saved."
                return
        difference = _first_difference(whole, restored, range(pause, steps))
        if difference:
            yield (
                f"{story}, the episodes go on otherwise: {difference}. Save with lane_state, and load, whatever the "
                "next steps depend on: positions, counters, the number of the episode, the observation."
            )


def _leaves_something_to_chance(config: TaskConfig, steps: int) -> Iterator[str]:
    games, others = _games(config, steps, seed=0), _games(config, steps, seed=1)
    if games == others:
        yield "Seeds 0 and 1 play the same. Draw from RandomStreams of lanes.seed, or say check_env(..., chance=False)."
    if len(set(games)) <= N // 2:  # a few may be alike by chance
        twin = next(row for row in range(N) if games[row] in games[:row])
        yield (
            f"Given the same actions, {N} environments play only {len(set(games))} distinct games: number {twin} plays "
            f"as number {games.index(games[twin])} does. Give each a RandomStream of its own, by its global index."
        )


def _can_be_watched(config: TaskConfig) -> Iterator[str]:
    with closing(EnvGroup(config, SOME)) as group:
        group.start()
        text: Any = group.envs.render_text(0)
        if not isinstance(text, str):
            yield f"render_text(0) is {type(text).__name__}. Return a str."
        try:
            frame = group.envs.render(0)
        except ConfigError:
            return  # a task may say that it has no pictures
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
            yield f"render(0) is {frame.dtype} {frame.shape}. Return uint8 [height, width, 3], or raise ConfigError."


# What they look at


def _misshapen(step: Step, when: str) -> Iterator[str]:
    """What has another dtype or shape than `Step` says, spaces aside."""
    for name, dtype in (("reward", torch.float32), ("terminated", torch.bool), ("truncated", torch.bool)):
        tensor = getattr(step, name)
        if tensor.dtype != dtype or tensor.shape != (N,):
            yield f"{name} {when} is {_form(tensor)}. Make it {dtype} [{N}], one for each environment."
    for name, tensor in step.episode_info.items():
        if tensor.shape != (N,):
            yield f"episode_info.{name} {when} is {_form(tensor)}. Make it [{N}], one for each environment."
    agents = step.agent_reward
    if agents is not None and (agents.dtype != torch.float32 or agents.ndim != 2 or len(agents) != N):
        yield f"agent_reward {when} is {_form(agents)}. Make it torch.float32 [{N}, agents], or leave it out."


def _unfit(step: Step, space: Space[Any], when: str) -> Iterator[str]:
    """What is not finite or not in its space."""
    for name in ("reward", "agent_reward"):
        rewards = getattr(step, name)
        bad = [] if rewards is None else (~rewards.isfinite()).nonzero().tolist()
        if bad:
            yield (
                f"{name} {when} is {rewards[tuple(bad[0])].item()} in environment {bad[0][0]}. "
                "Keep it finite: look for a division by zero or a logarithm."
            )
    yield from _misfits(step.obs, space, "obs", when)
    yield from _misfits(step.final_obs, space, "final_obs", when, _where(step.terminated | step.truncated))


def _misfits(tree: Tree, space: Space[Any], name: str, when: str, rows: Sequence[int] = range(N)) -> Iterator[str]:
    """Where a tree of [N, ...] is not of its space; `rows` are those whose values mean something."""
    if isinstance(space, Dict) and isinstance(tree, dict) and tree.keys() == space.keys():
        for part in tree:
            yield from _misfits(tree[part], space[part], f"{name}.{part}", when, rows)
    elif isinstance(space, Dict) or isinstance(tree, dict):
        parts = f"has the parts {', '.join(tree)}" if isinstance(tree, dict) else "is one tensor"
        yield f"{name} {when} {parts}, but its space is {space}. Give both the same parts."
    elif tree.dtype != tensor_dtype(space) or tree.shape != (N, *(space.shape or ())):
        yield f"{name} {when} is {_form(tree)}, but {N} times its space {space} is not. Change one of them."
    else:
        outside = [row for row in rows if not space.contains(tree[row].numpy())]
        if outside:
            values = tree[outside[0]]
            yield (
                f"{name} {when} lies outside its space {space} in environment {outside[0]}, with values from "
                f"{values.min().item():g} to {values.max().item():g}. Widen the space or mend the observation."
            )


def _first_difference(whole: EnvGroup, part: EnvGroup, times: range) -> str:
    """Play two groups side by side and say where the second first differs from the first; nothing if nowhere."""
    for (when, seen), (_, partly) in zip(_moments(whole, times), _moments(part, times), strict=True):
        for name, tensor in seen.items():
            same = tensor[part.rows].eq(partly[name]) | (tensor[part.rows].isnan() & partly[name].isnan())
            rows = _where((~same).reshape(len(partly[name]), -1).any(dim=1))
            if rows:
                return f"{name} of environment {part.rows.start + rows[0]} {when}"
    return ""


def _moments(group: EnvGroup, times: range) -> Iterator[tuple[str, StateDict]]:
    """When, and what is to be seen then: the current observation, and whatever means something in each step."""
    yield f"before step {times.start}", named_leaves(group.envs.observations(), "obs")
    for time in times:
        step = group.step(time)
        going_on = ~(step.terminated | step.truncated)
        ends = {
            name: tensor.masked_fill(going_on.view(-1, *[1] * (tensor.ndim - 1)), 0)
            for name, tensor in (
                named_leaves(step.final_obs, "final_obs") | named_leaves({**step.episode_info}, "episode_info")
            ).items()
        }
        outcome = {"reward": step.reward, "terminated": step.terminated, "truncated": step.truncated}
        if step.agent_reward is not None:
            outcome["agent_reward"] = step.agent_reward
        yield f"at step {time}", named_leaves(step.obs, "obs") | outcome | ends


def _games(config: TaskConfig, steps: int, seed: int) -> list[bytes]:
    """A digest of what each environment shows when all take the same actions: only chance can tell them apart."""
    digests = [hashlib.blake2b() for _ in range(N)]
    with closing(EnvGroup(config, ALL, seed)) as group:
        obs = group.start()
        for time in range(steps):
            for row, digest in enumerate(digests):
                digest.update(_row_bytes(obs, row))
            action = sample_action(group.envs.action_space, ACTIONS, time, 1)
            obs = group.envs.step(torch.cat([action] * N)).obs
    return [digest.digest() for digest in digests]


def _global_random() -> dict[str, Any]:
    legacy: Any = np.random.get_state()
    return {
        "random": random.getstate(),
        "numpy.random": (legacy[1].tobytes(), legacy[2]),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }


def _unequal(one: StateDict, other: StateDict) -> list[str]:
    """The names under which two states do not hold the same bits."""
    return sorted(name for name in one.keys() | other.keys() if _bits(one.get(name)) != _bits(other.get(name)))


def _bits(tensor: Tensor | None) -> Any:
    return tensor if tensor is None else (tensor.dtype, tensor.shape, tensor.numpy().tobytes())


def _row_bytes(tree: Tree, row: int) -> bytes:
    return b"".join(leaf[row].numpy().tobytes() for leaf in named_leaves(tree).values())


def _copied(state: StateDict) -> StateDict:
    return {name: tensor.clone() for name, tensor in state.items()}


def _where(mask: Tensor) -> list[int]:
    return mask.nonzero().flatten().tolist()


def _form(tensor: Any) -> str:
    return f"a {type(tensor).__name__} of {tensor.dtype} {list(tensor.shape)}"


def _named(lanes: range) -> str:
    return f"lanes {lanes.start} to {lanes.stop - 1}"
