"""Parallel environments stepped in a loop, with the methods of `SyncEnvs`. A row of the table is an agent of a game.

The rows of a game follow one another in the order of its `possible_agents`. A row whose agent is absent is inactive
until the agent comes or the game restarts. A game restarts when no agent is left.

Shapes: B rows, A agents of a game; game g has the rows g A to (g + 1) A - 1.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lockstep.action_encoding import split_actions
from lockstep.config import ConfigError
from lockstep.space_layout import CRITIC
from lockstep.tasks.gym.sync_envs import copy_row, to_number
from lockstep.tasks.pettingzoo.agent_spaces import OBSERVATION, AgentSpaces
from lockstep.tasks.pettingzoo.critic_state import CriticState

TEAM_RETURN = "team_return"
"""Metric: sum of the returns of all agents of a game, reported once per game."""


class AgentArrays(NamedTuple):
    """Arrays, or trees of arrays by name, with a row for each agent: `SharedArrays` and whether agents act."""

    action: Any
    """[B, ...] The next action, in the common action space."""
    seed: Any
    """[B] int64: seed of the next game, in the row of its first agent."""
    obs: Any
    """[B, ...] The current observation in the common space; zeros where the agent is absent."""
    reward: Any
    """[B] float32; 0 where the agent is absent."""
    terminated: Any
    """[B] bool; True where the agent is absent, so that nothing connects a step with the agent's next one."""
    truncated: Any
    """[B] bool."""
    final_obs: Any
    """[B, ...] The last observation of agents that ended in the last step."""
    active: Any
    """[B] bool: whether the agent took part in the last step."""
    total: Any
    """[B] float64: return of the agent since it came, for rendering."""
    info: Any
    """[B] float32 by name of a metric, for agents that ended in the last step; NaN: not reported."""


def metric_names(agents: Sequence[str], keys: Sequence[str]) -> list[str]:
    """Return the names of all metrics. `keys` are those of infos."""
    return [TEAM_RETURN, *return_names(agents).values(), *keys]


def return_names(agents: Sequence[str]) -> dict[str, str]:
    """Return the metric with the return of each agent: one per kind of agent, such as knight_0 and knight_1.

    Empty if all are of one kind, whose return is that of the episode.
    """
    kinds = {agent: stem if (stem := agent.rstrip("0123456789").rstrip("_")) else agent for agent in agents}
    return {agent: f"{kind}_return" for agent, kind in kinds.items()} if len({*kinds.values()}) > 1 else {}


class Games:
    """Games that are stepped one after another, each with consecutive rows of the table."""

    shared_seed = True
    """The agents of a game are seeded together."""

    def __init__(
        self,
        id: str,
        make: Callable[[], Any],
        spaces: AgentSpaces,
        table: AgentArrays,
        critic: CriticState | None = None,
    ) -> None:
        self._id, self._spaces, self.table, self._critic = id, spaces, table, critic
        self._agents, count = len(spaces.agents), len(table.seed)
        self.envs = [make() for _ in range(count // self._agents)]
        self.reseeded = np.zeros(count, bool)
        """Rows of games that restarted in the last step."""
        self._present = np.zeros(count, bool)  # agents that will take part in the next step
        self._team_returns = np.zeros(len(self.envs))
        self._return_names = return_names(spaces.agents)
        self._keys = [key for key in table.info if key not in (TEAM_RETURN, *self._return_names.values())]

    def begin(self, seeds: Mapping[int, int]) -> None:
        """Restart the games of some rows, each with the seed of its first row."""
        for game in range(len(self.envs)):
            if game * self._agents in seeds:
                self._start(game, seeds[game * self._agents])

    def step(self) -> None:
        """Take the actions in the table. A game without agents restarts at once."""
        self.reseeded[:] = False
        actions = split_actions(self._spaces.actions, self.table.action)
        for game in range(len(self.envs)):
            rows = self._rows(game)
            if not self._step(game, actions[rows]):
                self.reseeded[rows] = True
                self._start(game, int(self.table.seed[rows.start]))

    def replay(self, episodes: Mapping[int, np.ndarray]) -> set[int]:
        """Replay actions in games that were just started. Return the rows whose game did not end early."""
        replayed: set[int] = set()
        for game in range(len(self.envs)):
            rows = range(len(self.table.seed))[self._rows(game)]
            if episodes.keys() >= {*rows}:
                taken = [split_actions(self._spaces.actions, episodes[row]) for row in rows]
                if len({len(actions) for actions in taken}) == 1 and all(
                    self._step(game, actions) for actions in zip(*taken, strict=True)
                ):
                    replayed |= {*rows}
        return replayed

    def render_text(self, row: int) -> str:
        return str(self.envs[row // self._agents].render())

    def render(self, row: int) -> np.ndarray:
        """Render the game of a row as an image, uint8 [height, width, 3]."""
        return np.asarray(self.envs[row // self._agents].render(), np.uint8)

    def close(self) -> None:
        for env in self.envs:
            env.close()
        self.envs.clear()

    # One game

    def _rows(self, game: int) -> slice:
        return slice(game * self._agents, (game + 1) * self._agents)

    def _start(self, game: int, seed: int) -> None:
        """Reset a game. Agents that it does not list are absent."""
        table, rows = self.table, self._rows(game)
        observations, infos = self.envs[game].reset(seed=seed)
        for agent, name in enumerate(self.envs[game].possible_agents):
            row = rows.start + agent
            self._present[row] = name in observations
            if self._present[row]:
                self._spaces.write_obs(agent, observations[name], infos.get(name, {}), table.obs, row)
            else:
                self._spaces.clear_obs(table.obs, row)
        self._write_critic(game, table.obs, table.obs, self._present[rows])
        table.total[rows] = 0.0
        self._team_returns[game] = 0.0
        if not self._present[rows].any():
            raise ConfigError(f"{self._id} starts without agents.", "Return an observation of an agent in reset().")

    def _step(self, game: int, actions: Sequence[Any]) -> bool:
        """Step a game, and write the results of its agents to the table. Return whether an agent is left."""
        env, table, rows = self.envs[game], self.table, self._rows(game)
        index = {name: agent for agent, name in enumerate(env.possible_agents)}
        # Also to agents that ended and that the game still lists, since it may read an action for each.
        taken = {name: self._spaces.env_action(index[name], actions[index[name]]) for name in env.agents}
        observations, rewards, terminations, truncations, infos = env.step(taken)
        for values in table.info.values():
            values[rows] = np.nan
        table.active[rows] = self._present[rows]
        for name, agent in index.items():
            row = rows.start + agent
            terminated, truncated = bool(terminations.get(name, False)), bool(truncations.get(name, False))
            listed = name in env.agents and name in observations and not (terminated or truncated)
            if not table.active[row]:
                table.reward[row], table.terminated[row], table.truncated[row] = 0.0, True, False
                if listed:  # the agent comes
                    table.total[row] = 0.0
                    self._spaces.write_obs(agent, observations[name], infos.get(name, {}), table.obs, row)
            else:
                table.reward[row] = rewards.get(name, 0.0)
                table.total[row] += table.reward[row]
                self._team_returns[game] += table.reward[row]
                # An agent that is no longer listed has ended, even if the game does not say so.
                table.terminated[row], table.truncated[row] = terminated or not (listed or truncated), truncated
                if listed:
                    self._spaces.write_obs(agent, observations[name], infos.get(name, {}), table.obs, row)
                else:
                    self._end(agent, row, observations.get(name), infos.get(name, {}))
            self._present[row] = listed
        self._write_critic(game, table.final_obs, table.obs, self._present[rows] | table.active[rows])
        if self._present[rows].any():
            self._write_critic(game, table.obs, table.obs, self._present[rows])
            return True
        last = rows.start + int(np.argmax(table.active[rows]))  # one agent reports for the game
        table.info[TEAM_RETURN][last] = self._team_returns[game]
        return False

    def _write_critic(self, game: int, target: Any, current: Any, present: np.ndarray) -> None:
        """Write the critic part of a game's rows to current or last observations."""
        if self._critic is not None:
            rows = self._rows(game)
            seen = np.zeros((self._agents, 0))
            if self._critic.joins_observations:
                # Agents that ended in this step are not in `current`, but in the last observations.
                ended = present & ~self._present[rows]
                seen = np.where(ended[:, np.newaxis], target[OBSERVATION][rows], current[OBSERVATION][rows])
            self._critic.write(self.envs[game], seen, present, target[CRITIC][rows])

    def _end(self, agent: int, row: int, obs: Any, info: Mapping[str, Any]) -> None:
        """Store the last observation and the metrics of an agent that ended, and clear its row."""
        table, spaces = self.table, self._spaces
        if obs is None:  # the game does not return it: take the one before
            copy_row(table.obs, table.final_obs, row)
        else:
            spaces.write_obs(agent, obs, info, table.final_obs, row, ended=True)
        spaces.clear_obs(table.obs, row)
        if self._return_names:
            table.info[self._return_names[spaces.agents[agent]]][row] = table.total[row]
        for key in self._keys:
            table.info[key][row] = to_number(info.get(key))
