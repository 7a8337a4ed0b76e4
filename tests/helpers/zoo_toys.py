"""Small parallel environments of PettingZoo's form."""

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete
from pettingzoo import ParallelEnv


class ComingAndGoing(ParallelEnv):
    """Three agents. Each comes and goes at random times of its own, and is paid for the action 1 while it is there.

    A game has 9 steps. An agent that leaves terminates, and may come again two steps later. Agents that are there at
    the end are truncated.
    """

    metadata = {"name": "coming_and_going", "render_modes": ["rgb_array"]}  # noqa: RUF012
    possible_agents = ["ant_0", "ant_1", "bee_0"]  # noqa: RUF012

    def __init__(self, length=9, render_mode=None):
        self.length, self.render_mode = length, render_mode

    def observation_space(self, agent):
        return Box(-1, 10, (2,), np.float32)

    def action_space(self, agent):
        return Discrete(2)

    def reset(self, seed=None, options=None):
        self.generator, self.time = np.random.default_rng(seed), 0
        self.agents = ["ant_0", "bee_0"]  # ant_1 comes later
        self.gone = {"ant_1": 0}
        return {agent: self.observe(agent) for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions):
        assert actions.keys() == {*self.agents}
        self.time += 1
        acted, over = list(self.agents), self.time == self.length
        rewards = {agent: float(actions[agent]) for agent in acted}
        terminations = {agent: bool(self.generator.random() < 0.2) and not over for agent in acted}
        truncations = dict.fromkeys(acted, over)
        self.gone |= {agent: self.time for agent in acted if terminations[agent]}
        stay = [agent for agent in acted if not terminations[agent]]
        came = [agent for agent, when in self.gone.items() if stay and not over and self.time - when >= 2]
        self.gone = {agent: when for agent, when in self.gone.items() if agent not in came}
        self.agents = [] if over else [agent for agent in self.possible_agents if agent in (*stay, *came)]
        observations = {agent: self.observe(agent) for agent in dict.fromkeys([*acted, *came])}
        infos = {agent: {"is_success": over} for agent in observations}
        return observations, rewards, terminations, truncations, infos

    def observe(self, agent):
        return np.array([self.time, self.generator.random()], np.float32)

    def render(self):
        return np.full((8, 8, 3), self.time, np.uint8)

    def close(self):
        pass


class Ragged(ComingAndGoing):
    """Agents with observations and actions of different sizes, and an action mask in their infos."""

    def observation_space(self, agent):
        return Box(-1, 10, (2 + self.possible_agents.index(agent),), np.float32)

    def action_space(self, agent):
        return Discrete(2 + self.possible_agents.index(agent), start=5)

    def step(self, actions):
        assert all(self.action_space(agent).contains(action) for agent, action in actions.items())
        observations, rewards, *ends, infos = super().step(actions)
        return observations, {agent: reward - 5 for agent, reward in rewards.items()}, *ends, infos

    def observe(self, agent):
        return np.resize(super().observe(agent), self.observation_space(agent).shape)


class Masked(ComingAndGoing):
    """Only the action 1 is legal, by the mask in the observation."""

    def observation_space(self, agent):
        return Dict({"observation": Box(-1, 10, (2,), np.float32), "action_mask": Box(0, 1, (2,), np.int8)})

    def step(self, actions):
        assert set(actions.values()) <= {1}
        return super().step(actions)

    def observe(self, agent):
        return {"observation": super().observe(agent), "action_mask": np.array([0, 1], np.int8)}


class Unequal(ComingAndGoing):
    """An image for one agent and vectors for the others."""

    def observation_space(self, agent):
        return Box(0, 255, (8, 8, 3), np.uint8) if agent == "bee_0" else super().observation_space(agent)


class Signals(ParallelEnv):
    """Two agents that each see a bit of their own, and are paid together for naming the bit of the other.

    In step 1 each may tell the other its bit by its action. In step 2 both are paid the fraction of right answers. The
    best return is 1, and without signals 0.5.
    """

    metadata = {"name": "signals"}  # noqa: RUF012
    possible_agents = ["agent_0", "agent_1"]  # noqa: RUF012

    def observation_space(self, agent):
        return Box(-1, 1, (4,), np.float32)  # time, own bit, what both said

    def action_space(self, agent):
        return Discrete(2)

    def reset(self, seed=None, options=None):
        self.bits = np.random.default_rng(seed).integers(2, size=2)
        self.agents, self.said = list(self.possible_agents), None
        return self._observe(), {agent: {} for agent in self.agents}

    def step(self, actions):
        over, wanted = self.said is not None, dict(zip(self.possible_agents, self.bits[::-1].tolist(), strict=True))
        reward = float(np.mean([actions[agent] == wanted[agent] for agent in self.agents])) if over else 0.0
        self.said = [actions[agent] for agent in self.possible_agents]
        outcome = [dict.fromkeys(self.agents, value) for value in (reward, over, False)]
        observations, infos = self._observe(), {agent: {} for agent in self.agents}
        self.agents = [] if over else self.agents
        return observations, *outcome, infos

    def state(self):
        return np.concatenate([2.0 * self.bits - 1, *self._observe().values()]).astype(np.float32)

    def _observe(self):
        said = [0, 0] if self.said is None else [2 * word - 1 for word in self.said]
        rows = [[self.said is not None, 2 * bit - 1, *said] for bit in self.bits]
        return dict(zip(self.possible_agents, np.array(rows, np.float32), strict=True))

    def close(self):
        pass
