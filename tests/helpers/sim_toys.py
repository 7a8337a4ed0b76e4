"""Batched simulators in the forms that are in use, made from the point masses. No method reads a value on the host."""

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode

from lockstep.tasks.simulators.point_mass import PointMass

LENGTH = 6


class Groups:
    """A mapping that is no dict, like a TensorDict."""

    def __init__(self, parts):
        self._parts = parts

    def items(self):
        return self._parts.items()


class OldForm:
    """rsl_rl before version 3: the critic's observations are in the extras. No last observations, no state."""

    num_actions = 2

    def __init__(self, num_envs, device, seed):
        self.num_envs, self.device, self.max_episode_length = num_envs, device, torch.tensor([LENGTH])
        self.core = PointMass(num_envs, torch.device(device), seed, LENGTH)

    def get_observations(self):
        obs = self.core.get_observations()
        return obs["policy"], {"observations": {"critic": obs["critic"]}}

    def step(self, actions):
        obs, reward, dones, extras = self.core.step(actions)
        observations = {"observations": {"critic": obs["critic"]}}
        return obs["policy"], reward, dones.long(), {"time_outs": extras["time_outs"].float()} | observations


class Mjlab(OldForm):
    """Groups in a mapping, last observations by row, a seed method, and a state without its step counter."""

    def seed(self, seed):
        self.core = PointMass(self.num_envs, torch.device(self.device), seed, LENGTH)

    def reset(self):
        return self.get_observations(), {}

    def get_observations(self):
        obs = self.core.get_observations()
        return Groups({"actor": obs["policy"].double(), "critic": obs["critic"], "unused": obs["critic"]})

    def step(self, actions):
        _, reward, dones, extras = self.core.step(actions)
        rows = dones.nonzero().squeeze(1)  # on the CPU
        last = extras["final_obs"]
        ends = {"actor": last["policy"][rows].double(), "critic": last["critic"][rows], "unused": last["critic"][rows]}
        log = {"Episode/reward": 2.5, "success": extras["log"]["success"].mean()}
        extras = {"time_outs": extras["time_outs"], "terminal": {"env_ids": rows, "observations": ends}, "log": log}
        return self.get_observations(), reward, dones, extras if len(rows) else {"log": {}}

    @property
    def episode_length_buf(self):
        return self.core._state["steps"]

    @episode_length_buf.setter
    def episode_length_buf(self, steps):
        self.core._state["steps"] = steps

    def get_state(self):
        return {name: part for name, part in self.core.get_state().items() if name != "steps"}

    def set_state(self, state):
        self.core.set_state(state | {"steps": self.core._state["steps"]})


class ManiSkill:
    """The form of ManiSkill: Gymnasium's methods with tensors. The state is that of the environment inside."""

    single_action_space = Box(-0.5, 0.5, (2,), np.float32)
    auto_reset = True

    def __init__(self, num_envs, device):
        self.num_envs, self.device, self.unwrapped = num_envs, torch.device(device), Inner()

    def reset(self, *, seed=None, options=None):
        self.unwrapped.core = PointMass(self.num_envs, self.device, seed, LENGTH)
        return self.unwrapped.core.get_observations(), {}

    def step(self, actions):
        obs, reward, dones, extras = self.unwrapped.core.step(actions)
        self.taken = actions
        info = {"final_observation": extras["final_obs"], "final_info": {"episode": extras["log"]}}
        return obs, reward.double(), dones & ~extras["time_outs"], extras["time_outs"], info


class Inner:
    """The environment inside."""

    def get_state_dict(self):
        return {"bodies": self.core.get_state()}

    def set_state_dict(self, state):
        self.core.set_state(state["bodies"])


def make_old(num_envs, device, seed):
    return OldForm(num_envs, device, seed)


def make_mjlab(num_envs, device, seed):
    return Mjlab(num_envs, device, seed)


def make_gym(num_envs, device):
    return ManiSkill(num_envs, device)


def make_short(num_envs, **rest):
    return PointMass(num_envs, torch.device(rest["device"]), rest["seed"], LENGTH)


def make_wrong(num_envs, device, seed, fault):
    """Return a simulator with a fault."""
    if fault == "nothing":
        return object()
    if fault == "single":
        env = gymnasium.Env()
        env.num_envs, env.action_space = num_envs, Discrete(2)
        return env
    env = ManiSkill(num_envs + (fault == "count"), device)
    if fault == "later":
        env.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    elif fault == "actions":
        env.single_action_space = gymnasium.spaces.MultiBinary(3)
    elif fault == "array":
        env.reset = lambda seed: (np.zeros((num_envs, 2)), {})
    return env
