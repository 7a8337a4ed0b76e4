"""Checks of environments: play a few hundred steps with random actions, on all lanes and on some of them.

A check is a function that yields a message for every violation that it finds.

Shapes: B local environments; N environments in all, two on each of 8 lanes, or two games of several agents.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Dict
from torch import Tensor

from lockstep.base import VecEnv
from lockstep.clock import TrainState
from lockstep.config import ConfigError
from lockstep.lanes import Lanes
from lockstep.protocols import StateDict, Step, TaskConfig
from lockstep.pytree import Tree, named_leaves
from lockstep.rng import RandomStream
from lockstep.space_layout import action_columns, network_space, split_mask
from lockstep.tasks.gym.spaces import make_legal, sample_action, tensor_dtype

LANES = 8
ALL_LANES, SOME_LANES, OTHER_LANES = range(LANES), range(3, 6), range(2, 7)
ACTIONS, CHOICES = RandomStream(0, "check"), RandomStream(0, "check.choices")
MEMBERS = (
    *("num_envs", "observation_space", "action_space", "reset", "observations", "step", "on_iteration_start"),
    *("close", "shared_state", "load_shared_state", "lane_state", "load_lane_state"),
)


def check_environments(config: Any, steps: int, chance: bool) -> list[str]:
    """Return a message for every violation of the contract of environments. `num_envs` is replaced."""
    config = replace(config, num_envs=2 * LANES * getattr(config, "rows_per_game", 1))
    # Stop at the first failing group: tensors of the wrong shape cannot be compared.
    faults = [*_check_members(config)] or [*_check_tensors(config, steps)]
    if not faults:
        faults += _check_final_obs(config, steps)
        faults += _check_determinism(config, steps)
        faults += _check_lane_independence(config, steps)
        faults += _check_restore(config, steps)
        faults += _check_randomness(config, steps) if chance else []
        faults += _check_rendering(config)
    return faults


class EnvGroup:
    """The environments of some lanes. Their actions depend on their global index and the time alone."""

    def __init__(self, config: TaskConfig, lanes: range, seed: int = 0) -> None:
        self.envs: VecEnv = config.build(Lanes(LANES, lanes, seed), torch.device("cpu"))
        self.count = config.num_envs
        """N: number of environments in all."""
        share = config.num_envs // LANES
        self.rows = slice(lanes.start * share, lanes.stop * share)
        """Global indices of these environments."""

    def start(self) -> Tree:
        obs = self.envs.reset()
        self.envs.on_iteration_start(TrainState(total_samples=1))
        return obs

    def step(self, time: int) -> Step:
        actions = sample_action(self.envs.action_space, ACTIONS, time, self.count)[self.rows]
        return self.envs.step(self.legal(actions, time))

    def legal(self, actions: Tensor, time: int, same: bool = False) -> Tensor:
        """Replace discrete actions by legal ones if observations have an action mask; `same` where masks are equal."""
        space, (_, mask) = self.envs.action_space, split_mask(self.envs.observations())
        if mask is None:
            return actions
        scores = torch.from_numpy(CHOICES.generator(time).random((self.count, sum(action_columns(space)))))
        return make_legal(space, actions, mask, scores[:1].expand_as(mask) if same else scores[self.rows])

    def close(self) -> None:
        self.envs.close()


# Checks


def _check_members(config: TaskConfig) -> Iterator[str]:
    envs = EnvGroup(config, SOME_LANES).envs
    missing = [name for name in MEMBERS if not hasattr(envs, name)]
    if missing:
        yield f"The task has no {', '.join(missing)}. Inherit lockstep.VecEnv, which has defaults for most."
        return
    expected = len(SOME_LANES) * config.num_envs // LANES
    if envs.num_envs != expected:
        yield (
            f"num_envs is {envs.num_envs}, but {len(SOME_LANES)} of {LANES} lanes host {expected} of {config.num_envs} "
            "environments. Count those of the local lanes: len(lanes) * lanes.per_lane(config.num_envs, 'num_envs')."
        )
    envs.close()


def _check_tensors(config: TaskConfig, steps: int) -> Iterator[str]:
    with closing(EnvGroup(config, ALL_LANES)) as group:
        space = group.envs.observation_space
        obs = group.start()
        faults = [*_space_faults(obs, space, "obs", "of reset()", range(group.count))]
        faults = faults or [*_mask_faults(obs, group.envs, "of reset()")]
        for time in range(steps):
            if faults:  # report one step only
                break
            step = group.step(time)
            faults = [*_shape_faults(step, f"at step {time}", group.count)]
            faults = faults or [*_value_faults(step, space, f"at step {time}")]
            faults = faults or [*_mask_faults(step.obs, group.envs, f"at step {time}")]
            if not faults and _differing(named_leaves(step.obs, "obs"), named_leaves(group.envs.observations(), "obs")):
                faults = [
                    f"observations() after step {time} is not the obs of that step. Return the current observation."
                ]
        yield from faults


def _check_final_obs(config: TaskConfig, steps: int) -> Iterator[str]:
    ended = copied = changed = 0
    with closing(EnvGroup(config, ALL_LANES)) as group:
        first = _row_bytes(group.start(), 0)
        for time in range(steps):
            step = group.step(time)
            changed += _row_bytes(step.obs, 0) != first
            for row in _true_rows(step.terminated | step.truncated):
                ended += 1
                copied += _row_bytes(step.final_obs, row) == _row_bytes(step.obs, row)
    if not ended:
        yield f"No episode ended in {steps} steps, so final_obs could not be checked. Call check_env with more steps."
    elif copied == ended and changed:
        yield (
            f"final_obs equals obs in all {ended} episodes that ended: it is the first observation of the next episode."
            " Copy the last observation to final_obs, a separate buffer, before you start the next episode."
        )


def _check_determinism(config: TaskConfig, steps: int) -> Iterator[str]:
    difference = _compare_lanes(config, ALL_LANES, ALL_LANES, steps)
    if difference:
        yield (
            f"Two builds with the same seed and the same actions differ: {difference}. "
            "Draw everything from RandomStreams of lanes.seed, and share nothing between builds."
        )
    with closing(EnvGroup(config, ALL_LANES)) as played, closing(EnvGroup(config, ALL_LANES)) as fresh:
        played.start()
        for time in range(steps // 2):
            played.step(time)
        changed = _differing(named_leaves(played.start(), "obs"), named_leaves(fresh.start(), "obs"))
        if changed:
            yield f"A second reset() starts with another {', '.join(changed)}. Start the first episode again."


def _check_lane_independence(config: TaskConfig, steps: int) -> Iterator[str]:
    difference = _compare_lanes(config, ALL_LANES, SOME_LANES, steps)
    if difference:
        yield (
            f"Run alone, {_lane_range(SOME_LANES)} differ from the same lanes among all {LANES}: {difference}. "
            "Seed an environment by its global index, lane * share + place, and keep environments independent."
        )


def _compare_lanes(config: TaskConfig, lanes: range, other_lanes: range, steps: int) -> str:
    """Return the first difference between two groups of environments that take the same actions."""
    with closing(EnvGroup(config, lanes)) as group, closing(EnvGroup(config, other_lanes)) as other_group:
        group.start()
        other_group.start()
        return _first_difference(group, other_group, range(steps))


def _check_restore(config: TaskConfig, steps: int) -> Iterator[str]:
    save_step = steps * 3 // 7  # not a round fraction, where episodes of a round length would all have just begun
    case = f"Saved on all lanes after {save_step} steps and loaded on {_lane_range(OTHER_LANES)}"
    with closing(EnvGroup(config, ALL_LANES)) as reference, closing(EnvGroup(config, OTHER_LANES)) as restored:
        reference.start()
        restored.start()
        for time in range(save_step):
            reference.step(time)
            restored.step(time + 1)  # other actions, so that state that is not loaded shows up as a difference
        non_tensors = [name for name, part in reference.envs.lane_state(0).items() if not isinstance(part, Tensor)]
        if non_tensors:
            yield f"lane_state has values that are not tensors: {', '.join(non_tensors)}. Save named tensors only."
            return

        restored.envs.load_shared_state(_clone(reference.envs.shared_state()))
        for lane in OTHER_LANES:
            saved = _clone(reference.envs.lane_state(lane))
            restored.envs.load_lane_state(lane, _clone(saved))
            lost = _differing(saved, restored.envs.lane_state(lane))
            if lost:
                yield f"{case}, lane {lane} has a different {', '.join(lost)} than was saved. Load all that is saved."
                return
        difference = _first_difference(reference, restored, range(save_step, steps))
        if difference:
            yield (
                f"{case}, the episodes continue differently: {difference}. Save in lane_state, and load, everything "
                "that the next steps depend on: positions, counters, the number of the episode, the observation."
            )


def _check_randomness(config: TaskConfig, steps: int) -> Iterator[str]:
    games, others = _observation_digests(config, steps, seed=0), _observation_digests(config, steps, seed=1)
    if games == others:
        yield "Seeds 0 and 1 give the same episodes. Draw from RandomStreams of lanes.seed, or pass chance=False."
    if len(set(games)) <= len(games) // 2:  # a few may be equal by chance
        twin = next(row for row in range(len(games)) if games[row] in games[:row])
        yield (
            f"Given the same actions, {len(games)} environments play only {len(set(games))} distinct games: "
            f"environment {twin} repeats environment {games.index(games[twin])}. Give each its own RandomStream, by "
            "its global index."
        )


def _check_rendering(config: TaskConfig) -> Iterator[str]:
    """Check rendering, which is optional: a task may raise ConfigError or lack the method."""
    with closing(EnvGroup(config, SOME_LANES)) as group:
        group.start()
        with suppress(ConfigError):
            text: Any = group.envs.render_text(0) if hasattr(group.envs, "render_text") else ""
            if not isinstance(text, str):
                yield f"render_text(0) is {type(text).__name__}. Return a str."
        with suppress(ConfigError):
            frame = group.envs.render(0) if hasattr(group.envs, "render") else np.zeros((1, 1, 3), np.uint8)
            if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
                yield f"render(0) is {frame.dtype} {frame.shape}. Return uint8 [height, width, 3]."


# Helpers


def _shape_faults(step: Step, when: str, count: int) -> Iterator[str]:
    """Yield the tensors whose dtype or shape is not the one that `Step` documents, observations aside."""
    dtypes = {"reward": torch.float32, "terminated": torch.bool, "truncated": torch.bool}
    for name, dtype in (dtypes if step.active is None else dtypes | {"active": torch.bool}).items():
        tensor = getattr(step, name)
        if tensor.dtype != dtype or tensor.shape != (count,):
            yield f"{name} {when} is {_spec(tensor)}. Make it {dtype} [{count}], one for each environment."
    for name, tensor in step.episode_info.items():
        if tensor.shape != (count,):
            yield f"episode_info.{name} {when} is {_spec(tensor)}. Make it [{count}], one for each environment."
    agents = step.agent_reward
    if agents is not None and (agents.dtype != torch.float32 or agents.ndim != 2 or len(agents) != count):
        yield f"agent_reward {when} is {_spec(agents)}. Make it torch.float32 [{count}, agents], or omit it."


def _value_faults(step: Step, space: Space[Any], when: str) -> Iterator[str]:
    """Yield the values that are not finite or not in their space."""
    for name in ("reward", "agent_reward"):
        rewards = getattr(step, name)
        bad = [] if rewards is None else (~rewards.isfinite()).nonzero().tolist()
        if bad:
            yield (
                f"{name} {when} is {rewards[tuple(bad[0])].item()} in environment {bad[0][0]}. "
                "Keep it finite: look for a division by zero or a logarithm."
            )
    count, ended = len(step.reward), step.terminated | step.truncated
    ended = ended if step.active is None else ended & step.active
    yield from _space_faults(step.obs, space, "obs", when, range(count))
    yield from _space_faults(step.final_obs, space, "final_obs", when, range(count), _true_rows(ended))
    if step.active is not None and _true_rows(~step.active & (~step.terminated | (step.reward != 0))):
        yield f"active {when} is False in a row without `terminated` or with a reward. Set both."


def _space_faults(
    tree: Tree, space: Space[Any], name: str, when: str, all_rows: range, rows: Sequence[int] | None = None
) -> Iterator[str]:
    """Yield where a tree of [N, ...] does not match its space; `rows` are those whose values are defined."""
    if isinstance(space, Dict) and isinstance(tree, dict) and tree.keys() == space.keys():
        for part in tree:
            yield from _space_faults(tree[part], space[part], f"{name}.{part}", when, all_rows, rows)
    elif isinstance(space, Dict) or isinstance(tree, dict):
        parts = f"has the keys {', '.join(tree)}" if isinstance(tree, dict) else "is one tensor"
        yield f"{name} {when} {parts}, but its space is {space}. Give both the same keys."
    elif tree.dtype != tensor_dtype(space) or tree.shape != (len(all_rows), *(space.shape or ())):
        batch = f"a batch of {len(all_rows)} from its space {space}"
        yield f"{name} {when} is {_spec(tree)}, which is not {batch}. Change one of them."
    else:
        invalid = [row for row in (all_rows if rows is None else rows) if not space.contains(tree[row].numpy())]
        if invalid:
            values = tree[invalid[0]]
            yield (
                f"{name} {when} lies outside its space {space} in environment {invalid[0]}, with values from "
                f"{values.min().item():g} to {values.max().item():g}. Widen the space or fix the observation."
            )


def _mask_faults(obs: Tree, envs: VecEnv, when: str) -> Iterator[str]:
    """Yield where an action mask has the wrong form or allows no choice."""
    columns = [count for count in action_columns(envs.action_space) if count]
    try:
        network_space(envs.observation_space, sum(columns))
    except ConfigError as error:
        yield str(error)
        return
    _, mask = split_mask(obs)
    parts = [] if mask is None else mask.split(columns, dim=1)
    rows = sorted({row for part in parts for row in _true_rows(~(part != 0).any(1))})
    if rows:
        yield (
            f"obs.action_mask {when} allows no choice of an action in environment {rows[0]}. "
            "End the episode in such a state, or allow an action."
        )


def _first_difference(reference: EnvGroup, group: EnvGroup, times: range) -> str:
    """Step two groups together; describe where the second first differs from the first, or return an empty string."""
    for (when, expected), (_, actual) in zip(_trace(reference, times), _trace(group, times), strict=True):
        for name, tensor in expected.items():
            same = tensor[group.rows].eq(actual[name]) | (tensor[group.rows].isnan() & actual[name].isnan())
            rows = _true_rows((~same).reshape(len(actual[name]), -1).any(dim=1))
            if rows:
                return f"{name} of environment {group.rows.start + rows[0]} {when}"
    return ""


def _trace(group: EnvGroup, times: range) -> Iterator[tuple[str, StateDict]]:
    """Yield a time and its tensors: the current observation, then everything that is defined at each step."""
    yield f"before step {times.start}", named_leaves(group.envs.observations(), "obs")
    for time in times:
        step = group.step(time)
        running = ~(step.terminated | step.truncated)
        running = running if step.active is None else running | ~step.active
        ends = {
            name: tensor.masked_fill(running.view(-1, *[1] * (tensor.ndim - 1)), 0)
            for name, tensor in (
                named_leaves(step.final_obs, "final_obs") | named_leaves({**step.episode_info}, "episode_info")
            ).items()
        }
        names = ("reward", "terminated", "truncated", "agent_reward", "active")
        outcome = {name: tensor for name in names if (tensor := getattr(step, name)) is not None}
        yield f"at step {time}", named_leaves(step.obs, "obs") | outcome | ends


def _observation_digests(config: TaskConfig, steps: int, seed: int) -> list[bytes]:
    """Hash the observations of each environment when all take the same actions: only randomness makes them differ."""
    digests = [hashlib.blake2b() for _ in range(config.num_envs)]
    with closing(EnvGroup(config, ALL_LANES, seed)) as group:
        obs = group.start()
        for time in range(steps):
            for row, digest in enumerate(digests):
                digest.update(_row_bytes(obs, row))
            action = sample_action(group.envs.action_space, ACTIONS, time, 1)
            obs = group.envs.step(group.legal(torch.cat([action] * len(digests)), time, same=True)).obs
    return [digest.digest() for digest in digests]


def _differing(one: StateDict, other: StateDict) -> list[str]:
    """Return the names under which two states do not hold the same bits."""
    return sorted(name for name in one.keys() | other.keys() if _bits(one.get(name)) != _bits(other.get(name)))


def _bits(tensor: Tensor | None) -> Any:
    return tensor if tensor is None else (tensor.dtype, tensor.shape, tensor.numpy().tobytes())


def _row_bytes(tree: Tree, row: int) -> bytes:
    return b"".join(leaf[row].numpy().tobytes() for leaf in named_leaves(tree).values())


def _clone(state: StateDict) -> StateDict:
    return {name: tensor.clone() for name, tensor in state.items()}


def _true_rows(mask: Tensor) -> list[int]:
    return mask.nonzero().flatten().tolist()


def _spec(tensor: Any) -> str:
    return f"a {type(tensor).__name__} of {tensor.dtype} {list(tensor.shape)}"


def _lane_range(lanes: range) -> str:
    return f"lanes {lanes.start} to {lanes.stop - 1}"
