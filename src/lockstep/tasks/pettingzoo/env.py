"""PettingZoo parallel environments. An environment of the batch is one agent of a game, and all agents share a policy.

Agents may come and go. A row whose agent is absent is inactive: `Step.active` says so, and PPO does not learn from it.
The games of a lane are its own. They are saved and restored like Gymnasium environments (`gym/replayed_envs.py`).

Shapes: B rows, A agents of a game.
"""

import math
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from lockstep.base import VecEnv
from lockstep.config import ConfigError
from lockstep.tasks.gym.env_class import class_id
from lockstep.tasks.gym.env_file import env_file, with_absolute_path
from lockstep.tasks.gym.replayed_envs import ReplayedEnvs
from lockstep.tasks.gym.spaces import policy_space
from lockstep.tasks.pettingzoo.agent_spaces import AgentSpaces, has_masks
from lockstep.tasks.pettingzoo.critic_state import CriticState
from lockstep.tasks.pettingzoo.find_game import (
    count_agents,
    full_id,
    make_game,
    make_renderable_game,
    possible_agents,
)
from lockstep.tasks.pettingzoo.games import AgentArrays, Games, metric_names

DEFAULT_ENVS = 48


@dataclass(frozen=True, kw_only=True)
class PettingZooConfig(VecEnv.Config):
    """Settings of a PettingZoo task. Every number is for the whole run, not for one process."""

    id: str = "mpe2.simple_spread_v3"
    """Module of a parallel environment, such as `pettingzoo.butterfly.pistonball_v6`. `package.module:Name` and
    `my_game.py:Name` name a class or a `parallel_env` function. From Python, it may be the class itself."""
    num_envs: int = DEFAULT_ENVS
    """Number of agents in the whole run: games times agents per game. Absent agents count. A default that the agents of
    a game do not fit is increased."""
    env_kwargs: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Keyword arguments for the environment."""
    agent_id: bool = True
    """Whether to append a one-hot vector of the agent's index to observations, if a game has several agents."""
    centralized_critic: bool = False
    """Whether the value function also sees the state of the game, if it has `state()`, or the observations of all its
    agents. The policy does not see them."""
    use_action_mask: bool = True
    """Whether to choose only actions that the action mask of an agent allows: the part `action_mask` of its dict
    observation, or of its info."""
    info_keys: tuple[str, ...] = ()
    """Keys of the last `info` of an agent whose numbers and booleans are averaged over episodes and logged, as
    `rollout/ep_KEY_mean` and `eval/KEY_mean`."""
    max_replay_steps: int = 20_000
    """Longest game, in steps, whose actions are kept to restore it. A longer one is restarted on resume."""
    changeable_on_resume: ClassVar[tuple[str, ...]] = ("info_keys",)

    def __post_init__(self) -> None:
        if isinstance(self.id, type):
            object.__setattr__(self, "id", class_id(self.id))

    @property
    def code_file(self) -> Path | None:
        """Python file of the user that this task executes."""
        return env_file(full_id(self.id))

    def with_absolute_paths(self) -> "PettingZooConfig":
        """Resolve a file that the user named, against the working directory."""
        resolved = with_absolute_path(full_id(self.id))
        return self if resolved == full_id(self.id) else replace(self, id=resolved)

    @property
    def rows_per_game(self) -> int:
        """Number of agents of a game. Each lane hosts whole games."""
        return count_agents(self.id, tuple(self.env_kwargs.items()))

    def for_lanes(self, lanes: int) -> "PettingZooConfig":
        """Return these settings with enough agents for whole games in every lane, if their number was not set."""
        unit = lanes * self.rows_per_game
        if self.num_envs != DEFAULT_ENVS or self.num_envs % unit == 0:
            return self
        return replace(self, num_envs=math.ceil(self.num_envs / unit) * unit)


class PettingZooGames(ReplayedEnvs):
    """The agents of the local lanes, game after game."""

    Config = PettingZooConfig
    config: PettingZooConfig

    def setup(self) -> None:
        config = self.config
        game, options, modes = make_renderable_game(config.id, config.env_kwargs)
        agents = len(possible_agents(config.id, game))
        if self.envs_per_lane % agents:
            unit = self.lanes.num_lanes * agents
            below = config.num_envs // unit * unit
            raise ConfigError(
                f"num_envs is {config.num_envs}, which {self.lanes.num_lanes} lanes with games of {agents} agents "
                "cannot share evenly.",
                f"Use --task.num-envs {f'{below} or ' if below else ''}{below + unit}.",
            )
        _, infos = game.reset(seed=0)
        masks = config.use_action_mask and has_masks(game, infos)
        spaces = AgentSpaces(config.id, game, config.agent_id, masks)
        critic = CriticState(config.id, game, spaces) if config.centralized_critic else None
        if critic is not None:
            spaces.add_critic(critic.space)
        limit = getattr(game.unwrapped, "max_cycles", None)
        self.max_episode_steps = limit if isinstance(limit, int) else None
        game.close()
        self.observation_space, self.action_space = spaces.observations, policy_space(spaces.actions)
        self.prepare_replay(spaces.actions, "pettingzoo")
        metrics = metric_names(spaces.agents, config.info_keys)
        table = self.allocate_table(AgentArrays, metrics, active=np.ones(self.num_envs, bool))
        self.connect(Games(config.id, partial(make_game, config.id, options), spaces, table, critic), modes)
