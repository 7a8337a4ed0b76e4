"""How vector environments are seeded and restored. Their interface does not say it, so a short trial finds out.

Shapes: E environments per lane.
"""

import warnings
from collections.abc import Sequence
from contextlib import closing
from typing import Any, Literal, NamedTuple

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from lockstep.config import ConfigError
from lockstep.pytree import leaves
from lockstep.rng import RandomStream
from lockstep.space_layout import ACTION_MASK
from lockstep.tasks.gym.obs_encoding import encoded_space
from lockstep.tasks.gym.spaces import allocate, env_actions, policy_space, sample_action
from lockstep.tasks.gym.vector_maker import VectorMaker
from lockstep.tasks.gym.vector_masks import legal_actions
from lockstep.tasks.gym.vector_obs import encode_batch

SeedForm = Literal["list", "array"]
SEED_FORMS: tuple[SeedForm, ...] = ("list", "array")
RESEED_STEPS = 5_000
"""Steps between seeds where seeding is slow: ALE loads the game again, which takes as long as 350 steps."""
TRIAL_STEPS = 12
"""Steps of half a trial."""
TRIAL_SEEDS = (11, 12)
ACTIONS = RandomStream(0, "vector_plan")
CHOICES = RandomStream(0, "vector_plan_legal")


_NO_SUCH_OPTIONS = (
    *(TypeError, ValueError, AssertionError, KeyError, IndexError, NotImplementedError),
    gymnasium.error.Error,
)
"""What resets raise that do not know seeds in a form, or partial resets."""


class VectorPlan(NamedTuple):
    """How the environments of a lane are made, seeded and reset."""

    instance_envs: int
    """Environments per vector instance: those of a lane, or 1."""
    reseed_steps: int
    """Steps since its last seed after which an environment is seeded again, when its episode ends. 0: every episode has
    its own seed."""
    shared_seed: bool = False
    """Whether all environments of an instance are seeded together, because they cannot be reset one by one."""
    seed_form: SeedForm | None = None
    """Seeds of a partial reset: a list for all environments, or an array for those that are reset. None: there are no
    partial resets."""
    seeds_constructor: bool = False
    """Whether the seed is an argument of the entry point, because `reset(seed=...)` ignores it."""


def make_plan(maker: VectorMaker, envs_per_lane: int, max_replay_steps: int) -> VectorPlan:
    """Choose the largest instances that can be restored exactly.

    Args:
        max_replay_steps: Number of actions that are kept for each environment.
    """
    several, rarely = envs_per_lane > 1, min(RESEED_STEPS, max_replay_steps // 2)
    if maker.is_atari:  # known, and a trial would take a second
        return VectorPlan(envs_per_lane, rarely, seed_form="array" if several else None)
    same_step = maker.autoreset_mode is AutoresetMode.SAME_STEP
    with closing(_Trial(maker)) as trial:
        # With autoreset in the next step, an environment may be reset a second time after a partial reset.
        partial = several and maker.autoreset_mode is not AutoresetMode.NEXT_STEP
        form = next((form for form in SEED_FORMS if partial and trial.resets_rows(form)), None)
        if form is not None:
            return VectorPlan(envs_per_lane, 0, seed_form=form)
        reseeds = trial.is_reproducible()
    if not reseeds and not maker.takes("seed"):
        raise ConfigError(
            f"reset(seed=...) of {maker.id} does not lead to the same episode twice, so its episodes cannot be "
            "restored after a restart.",
            "Let reset use its seed, or give the vector entry point a parameter `seed`.",
        )
    # Environments that cannot be reset one by one share an instance only if they reset themselves at once.
    if several and same_step:
        return VectorPlan(envs_per_lane, max_replay_steps, shared_seed=True, seeds_constructor=not reseeds)
    return VectorPlan(1, 0 if reseeds else rarely, seeds_constructor=not reseeds)


def reset_rows(env: Any, mask: np.ndarray, seeds: Sequence[int], form: SeedForm) -> Any:
    """Reset the environments of a mask, each with its seed. Return the observations of all of them."""
    if form == "array":
        seed: Any = np.array(seeds)
    else:
        remaining = iter(seeds)
        seed = [next(remaining) if reset else None for reset in mask]
    return env.reset(seed=seed, options={"reset_mask": mask})[0]


class _Trial:
    """An instance of two environments that is reset and played in several ways."""

    def __init__(self, maker: VectorMaker) -> None:
        self._maker, self._env = maker, maker(2)
        self._arrays = allocate(encoded_space(maker.observation_space), 2)

    def is_reproducible(self) -> bool:
        """Whether `reset(seed=...)` leads to the same observations twice."""
        traces = []
        for _ in range(2):
            with warnings.catch_warnings(action="ignore"):  # EnvPool warns that it ignores the seed
                obs, _ = self._env.reset(seed=TRIAL_SEEDS[0])
            traces.append(self._play(obs, [(time, time) for time in range(TRIAL_STEPS)], None))
        return traces[0] == traces[1]

    def resets_rows(self, form: SeedForm) -> bool:
        """Whether one environment can be reset with its own seed while the other one continues its episode."""
        both, first, half = np.array([True, True]), np.array([True, False]), TRIAL_STEPS
        try:
            obs = reset_rows(self._env, both, TRIAL_SEEDS, form)
            expected = self._play(obs, [(time, time) for time in range(2 * half)], form)
            obs = reset_rows(self._env, both, TRIAL_SEEDS, form)
            self._play(obs, [(time, time) for time in range(half)], form)
            obs = reset_rows(self._env, first, TRIAL_SEEDS[:1], form)
            actual = self._play(obs, [(time, half + time) for time in range(half)], form)
        except _NO_SUCH_OPTIONS:
            return False
        return actual == [(expected[time][0], expected[half + time][1]) for time in range(half + 1)]

    def _play(self, obs: Any, times: Sequence[tuple[int, int]], form: SeedForm | None) -> list[tuple[bytes, ...]]:
        """Return the observations of both environments, whose actions are those of the given times."""
        space, disabled = self._maker.action_space, self._maker.autoreset_mode is AutoresetMode.DISABLED
        trace = [self._encode(obs)]
        for pair in times:
            drawn = [sample_action(policy_space(space), ACTIONS, time, 2).numpy() for time in pair]
            actions = env_actions(space, np.stack([drawn[row][row] for row in range(2)]))
            if self._maker.has_mask:
                masks = obs[ACTION_MASK]
                scores = np.stack([CHOICES.generator(time).random(masks.shape[1]) for time in pair])
                actions = legal_actions(space, masks, scores)
            obs, _, terminated, truncated, _ = self._env.step(actions)
            ended = np.asarray(terminated) | np.asarray(truncated)
            if disabled and ended.any():
                if form is None:
                    break
                obs = reset_rows(self._env, ended, np.array(TRIAL_SEEDS)[ended].tolist(), form)
            trace.append(self._encode(obs))
        return trace

    def _encode(self, obs: Any) -> tuple[bytes, ...]:
        encode_batch(self._maker.observation_space, obs, self._arrays, range(2))
        arrays: list[Any] = [*leaves(self._arrays)]
        return tuple(b"".join(array[row].tobytes() for array in arrays) for row in range(2))

    def close(self) -> None:
        self._env.close()
