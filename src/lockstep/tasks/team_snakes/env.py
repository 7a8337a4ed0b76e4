"""Team snakes: games of three against three on a torus, our team against a scripted one or against whom you like.

An environment is one game, and a team is one more axis: actions are [B, A] and observations [B, A, ...], because the
three snakes of a game share its reset, its end and its luck, and a batch of single snakes would tear them apart.
`reward` [B] is the margin, what our team earned less what the other did, so a return is by how much a game was won;
`agent_reward` [B, A] is what each snake learns from: what it earned itself, shaped as the settings say. An observation
is `seen`, what a snake sees, and `legal`, which of its actions are obeyed: the rules turn a reverse into a random
move, so that an algorithm that masks it stores what was executed. Which side is ours alternates from game to game.

With `control_both_teams` the algorithm acts for all six, ours first, so that it can play against its own snapshots.
The action SCRIPTED leaves a snake of the other team to the script.

Shapes: E games a lane, B local games, A agents of an environment (3, or 6 with both teams), F features, P planes.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from gymnasium.spaces import Box, Dict, MultiDiscrete, Space
from torch import Tensor

from lockstep.clock import TrainState
from lockstep.config import ConfigError
from lockstep.lanes import Lanes
from lockstep.protocols import StateDict, Step
from lockstep.pytree import Tree, load_into
from lockstep.rng import RandomStream
from lockstep.tasks.kernels import Buffers
from lockstep.tasks.team_snakes.features import FEATURES, PLANES
from lockstep.tasks.team_snakes.kernel import (
    RESULTS,
    SCRIPTED,
    RewardTerms,
    TeamResults,
    advise_all,
    look_all,
    side_of,
    start_all,
    step_all,
)
from lockstep.tasks.team_snakes.opponents import CAUTIOUS, EVADER, GREEDY, LEVELS, RANDOM, LevelSchedule, level_at
from lockstep.tasks.team_snakes.rendering import as_frame, as_text
from lockstep.tasks.team_snakes.rules import CELLS, FIELDS, GAME, HEIGHT, TEAM, WIDTH, is_valid_state


@dataclass(frozen=True, kw_only=True)
class TeamSnakesConfig:
    """Settings of team snakes. Every number is for the whole run, not for one process."""

    num_envs: int = 64
    """Games played side by side."""
    max_episode_steps: int = 200
    """Steps after which a game is cut off."""
    observation: Literal["features", "egocentric", "grid"] = "features"
    """What a snake sees: a vector of features; the same turned so that its heading is up, and so actions; a grid."""
    grid_shape: tuple[int, int] = (HEIGHT, WIDTH)
    """Rows and columns of the grid; odd numbers put the head in the very middle."""
    control_both_teams: bool = False
    """Whether the algorithm acts for both teams: six agents, ours first."""
    opponent_level: int = GREEDY
    """Level of the scripted team, 0 (random) to 4 or 5 (evader). Evaluations always use it."""
    level_schedule: LevelSchedule = "fixed"
    """How the level goes from 0 to 4: linear, exponential (later), by a curriculum, by a gate of wins, or fixed."""
    promotion_win_rate: float = 0.6
    """Part of the games against the scripted team that must be won at a level before the gate opens to the next."""
    evade_after_samples: int | None = None
    """Samples after which the scripted team evades; none never does."""
    toroidal_distance: bool = False
    """Whether the scripted team measures distances round the torus, which makes it stronger."""
    approach_reward: float = 0.0
    """Shaping: what a snake gets for each step nearer to the nearest bean, and loses for each step away."""
    death_penalty: float = 0.0
    """Shaping: what a death gets on top of the length it loses, so 0 or less."""
    team_reward_fraction: float = 0.0
    """Part of a snake's reward, 0 to 1, that is the mean of its team's."""
    opponent_reward_weight: float = 0.0
    """Weight with which the mean reward of the other team is taken from a snake's."""

    def __post_init__(self) -> None:
        rows, columns = self.grid_shape
        if not (1 <= rows <= HEIGHT and 1 <= columns <= WIDTH):
            raise ConfigError(f"grid_shape is {self.grid_shape}.", f"Use at most {HEIGHT} rows and {WIDTH} columns.")
        if self.max_episode_steps < 1 or not 0 <= self.opponent_level < len(LEVELS):
            raise ConfigError(
                f"max_episode_steps is {self.max_episode_steps} and opponent_level is {self.opponent_level}.",
                f"Use 1 or more, and 0 to {len(LEVELS) - 1}.",
            )
        if not 0 < self.promotion_win_rate <= 1:
            raise ConfigError(
                f"promotion_win_rate is {self.promotion_win_rate}.",
                "Use a part of the games, more than 0 and at most 1.",
            )
        if self.evade_after_samples is not None and self.evade_after_samples < 0:
            raise ConfigError(
                f"evade_after_samples is {self.evade_after_samples}.", "Use a number of samples, or none."
            )
        if (
            self.approach_reward < 0
            or self.death_penalty > 0
            or not 0 <= self.team_reward_fraction <= 1
            or self.opponent_reward_weight < 0
        ):
            raise ConfigError(
                f"approach_reward is {self.approach_reward}, death_penalty {self.death_penalty}, "
                f"team_reward_fraction {self.team_reward_fraction}, opponent_reward_weight "
                f"{self.opponent_reward_weight}.",
                "An approach gets 0 or more and a death 0 or less; share 0 to 1; weigh the others with 0 or more.",
            )

    def build(self, lanes: Lanes, device: torch.device) -> "TeamSnakes":
        return TeamSnakes(self, lanes, device)


class TeamSnakes:
    """The games of the local lanes. Actions are up, down, left, right, as a snake sees them."""

    def __init__(self, config: TeamSnakesConfig, lanes: Lanes, device: torch.device) -> None:
        self._config, self._lanes = config, lanes
        self._share = lanes.per_lane(config.num_envs, "num_envs")
        self.num_envs = count = len(lanes) * self._share
        self.rivals = TEAM if config.control_both_teams else 0
        self.agents = agents = TEAM + self.rivals
        grid, self._turned = config.observation == "grid", config.observation == "egocentric"
        shape = (agents, PLANES, *config.grid_shape) if grid else (agents, FEATURES)
        seen = Box(0, 1, shape, np.uint8) if grid else Box(-1, 1, shape, np.float32)
        # A list of pairs, because Dict would sort a mapping.
        self.observation_space: Space[Any] = Dict([("seen", seen), ("legal", Box(0, 1, (agents, 4), np.uint8))])
        self.action_space: Space[Any] = MultiDiscrete([4] * TEAM + [SCRIPTED + 1] * (agents - TEAM))

        stored = (torch.uint8 if grid else torch.float32, (count, *shape))
        legal = (torch.uint8, (count, agents, 4))
        self._buffers = Buffers(
            device,
            seen=stored,
            legal=legal,
            reward=(torch.float32, (count,)),
            agent_reward=(torch.float32, (count, agents)),
            terminated=(torch.bool, (count,)),
            truncated=(torch.bool, (count,)),
            final_seen=stored,
            final_legal=legal,
            outcome=(torch.float32, (len(RESULTS), count)),
        )
        self._results = TeamResults(**self._buffers.arrays)
        shaping = (
            config.approach_reward,
            config.death_penalty,
            config.team_reward_fraction,
            config.opponent_reward_weight,
        )
        self._terms = RewardTerms(config.max_episode_steps, self._turned, config.toroidal_distance, *shaping)
        self._told = RESULTS if config.control_both_teams else RESULTS[: RESULTS.index("scripted")]
        self._marks = np.zeros((2, CELLS + 1), np.int64)
        self._level = torch.tensor(config.opponent_level)
        self._games = np.zeros(count, GAME).view(np.recarray)
        # Keyed by the game's place in the whole run: it does not matter who hosts it, or beside which others.
        self._games.place = [lane * self._share + env for lane in lanes.local for env in range(self._share)]
        self._games.key = [RandomStream(lanes.seed, "team-snakes", place).draw_seed(0) for place in self._games.place]
        self.reset()

    def reset(self) -> Tree:
        start_all(self._games)
        return self._shown()

    def observations(self) -> Tree:
        return self._obs("")

    def step(self, action: Tensor) -> Step:
        actions = action.to("cpu", torch.int64).contiguous().numpy()
        cut = self.step_numpy(actions) if actions.shape == (self.num_envs, self.agents) else -1
        if cut < 0:
            raise ValueError(
                f"the actions have shape {actions.shape} and run from {actions.min()} to {actions.max()}.\n"
                f"Give each of the {self.agents} snakes of the {self.num_envs} games 0 (up), 1 (down), 2 (left) or 3 "
                "(right); 4 leaves one of the other team to the script."
            )
        out = self._buffers.copy_to_device()
        episode = dict(zip(self._told, out["outcome"][: len(self._told)], strict=True))
        ended = out["terminated"], out["truncated"]
        return Step(self._obs(""), out["reward"], *ended, self._obs("final_"), episode, cut > 0, out["agent_reward"])

    def step_numpy(self, actions: np.ndarray) -> int:
        """The games and what is seen of them alone, with nothing around them."""
        return int(step_all(self._games, actions, int(self._level), self._terms, self._results, self._marks))

    def scripted_actions(self, level: int, wrapped: bool = False) -> Tensor:
        """What a scripted team would do in our place, [B, 3]."""
        advice = np.zeros((self.num_envs, TEAM), np.int64)
        advise_all(self._games, level, wrapped, self._turned, self._marks, advice)
        return torch.from_numpy(advice)

    def on_iteration_start(self, clock: TrainState) -> None:
        """The scripted team's level follows the clock or what was agreed on, in the games under way too."""
        config = self._config
        level = level_at(config.level_schedule, config.opponent_level, clock.progress)
        if config.evade_after_samples is not None and clock.samples >= config.evade_after_samples:
            level = EVADER
        self._level.fill_(self._gated(clock) if level is None else level)

    def _gated(self, clock: TrainState) -> int:
        """The level by the gate: one more when enough games were won, all of which were played at this one."""
        level = RANDOM if clock.samples == 0 else int(self._level)
        told = {name: clock.metrics.get(f"rollout/ep_{name}_mean") for name in self._told}
        beaten, scripted = told.get("beaten", told["won"]), told.get("scripted", 1.0)
        if not scripted or beaten is None or told["level"] != level:
            return level
        return min(level + 1, CAUTIOUS) if beaten / scripted >= self._config.promotion_win_rate else level

    def close(self) -> None:
        """There is nothing to close."""

    def shared_state(self) -> StateDict:
        return {"level": self._level}

    def load_shared_state(self, state: StateDict) -> None:
        if "level" in state and not 0 <= int(state["level"].flatten()[0]) <= EVADER:
            raise ValueError(f"Team snakes: the saved level is none of 0 to {EVADER}.")
        load_into(self.shared_state(), state, "Team snakes")

    def lane_state(self, lane: int) -> StateDict:
        return {name: tensor.clone() for name, tensor in self._live(lane).items()}

    def load_lane_state(self, lane: int, state: StateDict) -> None:
        live, owner = self._live(lane), f"Team snakes, lane {lane}"
        before = {name: tensor.clone() for name, tensor in live.items()}
        load_into(live, state, owner)
        if not is_valid_state(self._games[self._lanes.lane_slice(lane, self._share)], self._config.max_episode_steps):
            load_into(live, before, owner)
            raise ValueError(f"{owner}: the saved games hold what no game can come to.")
        self._shown()

    def _obs(self, moment: str) -> Tree:
        return {name: self._buffers.tensors[f"{moment}{name}"] for name in ("seen", "legal")}

    def _shown(self) -> Tree:
        look_all(self._games, self._turned, self._results, self._marks)
        self._buffers.copy_to_device()
        return self.observations()

    def _live(self, lane: int) -> StateDict:
        """[E, ...] each: one lane's games, in the memory the kernel works on."""
        return {name: torch.from_numpy(self._games[name][self._lanes.lane_slice(lane, self._share)]) for name in FIELDS}

    def render_text(self, env: int) -> str:
        return as_text(self._games[env], int(side_of(self._games[env])))

    def render(self, env: int) -> np.ndarray:
        return as_frame(self._games[env], int(side_of(self._games[env])))
