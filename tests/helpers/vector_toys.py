"""Toy vector environments: one game, with each autoreset mode and each way of seeding."""

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space


class Drift(VectorEnv):
    """A random walk that ends at a distance, or after 9 steps.

    seeding: "rows" resets rows by a mask, each with its own generator; "together" has one generator for all rows and
    resets all of them; "constructor" ignores the seed of a reset.
    """

    single_observation_space = Box(-9, 9, (2,), np.float32)
    single_action_space = Discrete(3)

    def __init__(self, num_envs, mode="SameStep", seeding="rows", final_obs=True, distance=1.0, seed=None):
        self.num_envs, self._seeding, self._final_obs, self._distance = num_envs, seeding, final_obs, distance
        self.metadata = {"autoreset_mode": AutoresetMode(mode)}
        self.mode = AutoresetMode(mode)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._state = np.zeros((num_envs, 2), np.float32)  # position, steps
        self._pending = np.zeros(num_envs, bool)
        self._seed_rows(range(num_envs), range(num_envs) if seed is None else range(seed, seed + num_envs))

    def reset(self, *, seed=None, options=None):
        rows = np.arange(self.num_envs)
        if self._seeding == "rows":
            mask = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
            rows = np.flatnonzero(mask)
            if isinstance(seed, int):
                seed = [seed + row for row in range(self.num_envs)]
        if seed is not None and self._seeding != "constructor":
            self._seed_rows(rows, [seed] * self.num_envs if isinstance(seed, int) else np.array(seed)[rows])
        self._restart(rows)
        return self._state.copy(), {}

    def step(self, actions):
        assert not (self.mode is AutoresetMode.DISABLED and self._pending.any())
        ignored = self._pending if self.mode is AutoresetMode.NEXT_STEP else np.zeros(self.num_envs, bool)
        noise = np.array([generator.normal() for generator in self._generators])
        self._state[:, 0] += np.where(ignored, 0, (actions - 1) * 0.1 + 0.4 * noise)
        self._state[:, 1] += 1
        self._restart(np.flatnonzero(ignored))
        terminated = np.abs(self._state[:, 0]) > self._distance
        truncated = (self._state[:, 1] >= 9) & ~terminated
        reward, ended, info = self._state[:, 0].copy(), terminated | truncated, {}
        self._pending = ended.copy()
        if self.mode is AutoresetMode.SAME_STEP and ended.any():
            walked = {"walked": self._state[:, 1].copy(), "_walked": ended}
            info = {"final_obs": self._state.copy(), "final_info": walked} if self._final_obs else {}
            self._restart(np.flatnonzero(ended))
        return self._state.copy(), reward, terminated, truncated, info

    def _seed_rows(self, rows, seeds):
        if self._seeding == "rows":
            self._generators = getattr(self, "_generators", [None] * self.num_envs)
            for row, seed in zip(rows, seeds, strict=True):
                self._generators[row] = np.random.default_rng(int(seed))
        else:
            self._generators = [np.random.default_rng(int(seeds[0]))] * self.num_envs

    def _restart(self, rows):
        for row in rows:
            self._state[row] = self._generators[row].uniform(-0.5, 0.5), 0
        self._pending[rows] = False


class Undeclared(Drift):
    """Does not say how it resets."""

    def __init__(self, num_envs):
        super().__init__(num_envs)
        self.metadata = {}


def make_drift(num_envs, **kwargs):
    """An entry point that is a function."""
    return Drift(num_envs, **kwargs)


gymnasium.register("LockstepDrift-v0", vector_entry_point=make_drift)
