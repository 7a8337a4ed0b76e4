"""Team snakes: games of three against three on a torus, our team against a scripted team or any other policy.

An environment is one game, and the agents of a team are an extra axis: actions are [B, A] and observations [B, A, ...].
The snakes of a game share its reset, end and random draws, so they cannot be separate environments of a batch.
`reward` [B] is the margin: the reward of our team minus that of the other, so a return is the final margin.
`agent_reward` [B, A] is the training reward of each snake: its own reward, shaped as the settings say. An observation
has two parts: `seen`, the view of a snake, and `legal`, its action mask. The rules turn a reverse into a random move.
An algorithm that masks it stores the action that is executed. Our side alternates from game to game.

With `control_both_teams` the algorithm acts for all six snakes, ours first, so that it can play against its own
snapshots. With the action SCRIPTED, the script moves a snake of the other team.

Shapes: E games per lane, B local games, A agents of an environment (3, or 6 with both teams), F features, P planes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from gymnasium.spaces import Box, Dict, MultiDiscrete
from torch import Tensor

from lockstep.base import VecEnv
from lockstep.clock import TrainState
from lockstep.config import ConfigError
from lockstep.protocols import StateDict, Step
from lockstep.pytree import Tree, load_into
from lockstep.tasks.kernels import Buffers
from lockstep.tasks.team_snakes.features import FEATURES, PLANES
from lockstep.tasks.team_snakes.kernel import (
    RESULTS,
    SCRIPTED,
    RewardTerms,
    TeamResults,
    choose_all,
    observe_all,
    side_of,
    start_all,
    step_all,
)
from lockstep.tasks.team_snakes.opponents import (
    CAUTIOUS,
    EVADER,
    GREEDY,
    LEVELS,
    RANDOM,
    LevelSchedule,
    level_at,
    name_of,
)
from lockstep.tasks.team_snakes.rendering import as_frame, as_text, score, winner
from lockstep.tasks.team_snakes.rules import CELLS, FIELDS, GAME, HEIGHT, TEAM, WIDTH, is_valid_state
from lockstep.tasks.team_snakes.submission_games import SubmissionGames


@dataclass(frozen=True, kw_only=True)
class TeamSnakesConfig(VecEnv.Config):
    """Settings of team snakes. Every number is for the whole run, not for one process."""

    num_envs: int = 64
    """Number of games in the whole run, stepped in parallel."""
    max_episode_steps: int = 200
    """Steps after which a game is truncated."""
    observation: Literal["features", "egocentric", "grid"] = "features"
    """View of a snake. features: a vector. egocentric: a vector and actions relative to its heading. grid: a grid."""
    grid_shape: tuple[int, int] = (HEIGHT, WIDTH)
    """Rows and columns of the grid. Odd numbers put the head exactly in the middle."""
    control_both_teams: bool = False
    """Whether the algorithm acts for both teams: six agents, ours first."""
    opponent_level: int = GREEDY
    """Level of the scripted team, 0 (random) to 4 or 5 (evader). Evaluations always use it."""
    level_schedule: LevelSchedule = "fixed"
    """How the level rises from 0 to 4: linear, exponential (later), curriculum, gate (by win rate), or fixed."""
    promotion_win_rate: float = 0.6
    """Win rate against the scripted team, at the current level, at which the gate raises the level."""
    evade_after_samples: int | None = None
    """Samples after which the scripted team is the evader. None: never."""
    toroidal_distance: bool = False
    """Whether the scripted team measures distances around the torus, which makes it stronger."""
    approach_reward: float = 0.0
    """Shaping: reward for each step towards the nearest bean; a step away from it costs as much."""
    death_penalty: float = 0.0
    """Shaping: reward for a death in addition to the lost length; 0 or less."""
    team_reward_fraction: float = 0.0
    """Fraction of a snake's reward, 0 to 1, that is the mean reward of its team."""
    opponent_reward_weight: float = 0.0
    """Weight with which the mean reward of the other team is subtracted from a snake's reward."""
    submissions: tuple[str, ...] = ()
    """Files of other teams in the platform's form. They play in some training games, each in its own process."""
    submission_fraction: float = 0.25
    """Fraction of the environments that play against `submissions`."""
    submission_timeout: float = 10.0
    """Seconds that a submission may take per decision."""
    changeable_on_resume: ClassVar[tuple[str, ...]] = ("submission_timeout",)

    def __post_init__(self) -> None:
        rows, columns = self.grid_shape
        if not (1 <= rows <= HEIGHT and 1 <= columns <= WIDTH):
            raise ConfigError(f"grid_shape is {self.grid_shape}.", f"Use at most {HEIGHT} rows and {WIDTH} columns.")
        if self.max_episode_steps < 1 or not 0 <= self.opponent_level < len(LEVELS):
            raise ConfigError(
                f"max_episode_steps is {self.max_episode_steps} and opponent_level is {self.opponent_level}.",
                f"Use 1 step or more, and a level from 0 to {len(LEVELS) - 1}.",
            )
        if not 0 < self.promotion_win_rate <= 1:
            raise ConfigError(
                f"promotion_win_rate is {self.promotion_win_rate}.",
                "Use a fraction of the games, more than 0 and at most 1.",
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
                "Use 0 or more, a death_penalty of 0 or less, and a team_reward_fraction from 0 to 1.",
            )
        if self.submissions and not self.control_both_teams:
            raise ConfigError(
                "submissions play as the other team, but control_both_teams is false.", "Use --task.control-both-teams."
            )
        if not 0 <= self.submission_fraction <= 1 or self.submission_timeout <= 0:
            raise ConfigError(
                f"submission_fraction is {self.submission_fraction} and submission_timeout {self.submission_timeout}.",
                "Use a fraction from 0 to 1, and more than 0 seconds.",
            )

    @property
    def episode_steps(self) -> int:
        return self.max_episode_steps

    @property
    def code_files(self) -> tuple[Path, ...]:
        """Python files of the user that this task executes."""
        return tuple(Path(file) for file in self.submissions)

    def with_absolute_paths(self) -> "TeamSnakesConfig":
        """Resolve the files of submissions against the working directory. Raise ConfigError if one does not exist."""
        for file in self.code_files:
            if not file.is_file():
                raise ConfigError(f"there is no file {file}.", "Give the paths of submissions in --task.submissions.")
        return replace(self, submissions=tuple(str(file.resolve()) for file in self.code_files))


class TeamSnakes(VecEnv):
    """The games of the local lanes. Actions are up, down, left, right, as a snake sees them."""

    Config = TeamSnakesConfig

    def setup(self) -> None:
        config, count = self.config, self.num_envs
        self.rivals = TEAM if config.control_both_teams else 0
        self.agents = agents = TEAM + self.rivals
        grid, self.egocentric = config.observation == "grid", config.observation == "egocentric"
        shape = (agents, PLANES, *config.grid_shape) if grid else (agents, FEATURES)
        space = Box(0, 1, shape, np.uint8) if grid else Box(-1, 1, shape, np.float32)
        # A list of pairs, because Dict would sort a mapping.
        self.observation_space = Dict([("seen", space), ("legal", Box(0, 1, (agents, 4), np.uint8))])
        self.action_space = MultiDiscrete([4] * TEAM + [SCRIPTED + 1] * (agents - TEAM))

        obs_buffer = (torch.uint8 if grid else torch.float32, (count, *shape))
        mask_buffer = (torch.uint8, (count, agents, 4))
        self._buffers = Buffers(
            self.device,
            seen=obs_buffer,
            legal=mask_buffer,
            reward=(torch.float32, (count,)),
            agent_reward=(torch.float32, (count, agents)),
            terminated=(torch.bool, (count,)),
            truncated=(torch.bool, (count,)),
            final_seen=obs_buffer,
            final_legal=mask_buffer,
            outcome=(torch.float32, (len(RESULTS), count)),
        )
        self._results = TeamResults(**self._buffers.arrays)
        settings = {name: getattr(config, name) for name in RewardTerms._fields if name != "egocentric"}
        self._terms = RewardTerms(egocentric=self.egocentric, **settings)
        self._result_names = RESULTS if config.control_both_teams else RESULTS[: RESULTS.index("scripted")]
        self._marks = np.zeros((2, CELLS + 1), np.int64)
        self._level = torch.tensor(config.opponent_level)
        self.games = np.zeros(count, GAME).view(np.recarray)
        # Keyed by the global index of the game: the hosting process and the other games of the batch do not matter.
        self.games.place = list(self.env_indices)
        self.games.key = [stream.draw_seed(0) for stream in self.env_streams("team-snakes")]
        for name in FIELDS:
            self.register_state(name, self.games[name])
        self._submissions = SubmissionGames(self) if config.submissions else None
        if self._submissions is not None:
            self.register_state("moves", self._submissions.moves)

    def reset(self) -> Tree:
        start_all(self.games)
        if self._submissions is not None:
            self._submissions.restart()
            self._submissions.moves[:] = 0
        return self._update_obs()

    def observations(self) -> Tree:
        return self._obs("")

    def step(self, action: Tensor) -> Step:
        actions = action.to("cpu", torch.int64).contiguous().numpy()
        fits = actions.shape == (self.num_envs, self.agents)
        if fits and self._submissions is not None:
            actions = self._submissions.fill(actions)
        num_truncated = self.step_numpy(actions) if fits else -1
        if num_truncated < 0:
            raise ValueError(
                f"the actions have shape {actions.shape} and run from {actions.min()} to {actions.max()}.\n"
                f"Give each of the {self.agents} snakes of the {self.num_envs} games 0 (up), 1 (down), 2 (left) or 3 "
                "(right); with 4 the script moves a snake of the other team."
            )
        out = self._buffers.copy_to_device()
        episode_info = dict(zip(self._result_names, out["outcome"][: len(self._result_names)], strict=True))
        if self._submissions is not None:
            against = self._submissions.end_games(self._results.terminated | self._results.truncated)
            won = np.where(against, self._results.outcome[RESULTS.index("won")], np.nan)  # NaN: not counted
            episode_info["submission_won"] = torch.from_numpy(won.astype(np.float32)).to(self.device)
        out = {name: out[name] for name in ("reward", "terminated", "truncated", "agent_reward")}
        obs, final_obs = self._obs(""), self._obs("final_")
        return Step(obs, **out, final_obs=final_obs, episode_info=episode_info, any_truncated=num_truncated > 0)

    def step_numpy(self, actions: np.ndarray) -> int:
        """Step the games and compute their observations alone, without tensors."""
        return int(step_all(self.games, actions, int(self._level), self._terms, self._results, self._marks))

    def scripted_actions(self, level: int, wrapped: bool = False) -> Tensor:
        """Return the actions that a scripted team would take in place of ours, [B, 3]."""
        actions = np.zeros((self.num_envs, TEAM), np.int64)
        choose_all(self.games, level, wrapped, self.egocentric, self._marks, actions)
        return torch.from_numpy(actions)

    def on_iteration_start(self, clock: TrainState) -> None:
        """Update the level of the scripted team, also in running games, from training progress or the win rate."""
        config = self.config
        if self._submissions is not None:
            self._submissions.enable()
        level = level_at(config.level_schedule, config.opponent_level, clock.progress)
        if config.evade_after_samples is not None and clock.samples >= config.evade_after_samples:
            level = EVADER
        self._level.fill_(self._level_by_gate(clock) if level is None else level)

    def _level_by_gate(self, clock: TrainState) -> int:
        """Return the level by the gate: raise it when enough games were won, all of them at the current level."""
        level = RANDOM if clock.samples == 0 else int(self._level)
        metrics = {name: clock.metrics.get(f"rollout/ep_{name}_mean") for name in self._result_names}
        beaten, scripted = metrics.get("beaten", metrics["won"]), metrics.get("scripted", 1.0)
        if not scripted or beaten is None or metrics["level"] != level:
            return level
        return min(level + 1, CAUTIOUS) if beaten / scripted >= self.config.promotion_win_rate else level

    def shared_state(self) -> StateDict:
        return {"level": self._level}

    def load_shared_state(self, state: StateDict) -> None:
        if "level" in state and not 0 <= int(state["level"].flatten()[0]) <= EVADER:
            raise ValueError(f"Team snakes: the saved level is not one of 0 to {EVADER}. Use another checkpoint.")
        load_into(self.shared_state(), state, "Team snakes")

    def load_lane_state(self, lane: int, state: StateDict) -> None:
        super().load_lane_state(lane, state)
        if self._submissions is not None:
            self._submissions.restart()
        self._update_obs()

    def close(self) -> None:
        if self._submissions is not None:
            self._submissions.restart()

    def is_valid_state(self, state: StateDict) -> bool:
        games = np.zeros(self.envs_per_lane, GAME).view(np.recarray)
        for name in FIELDS:
            games[name] = state[name].numpy()
        if self._submissions is not None and not self._submissions.is_valid_state(state["moves"].numpy()):
            return False
        return bool(is_valid_state(games, self.config.max_episode_steps))

    def _obs(self, prefix: str) -> Tree:
        return {name: self._buffers.tensors[f"{prefix}{name}"] for name in ("seen", "legal")}

    def _update_obs(self) -> Tree:
        observe_all(self.games, self.egocentric, self._results, self._marks)
        self._buffers.copy_to_device()
        return self.observations()

    def render_text(self, env: int) -> str:
        return as_text(self.games[env], int(side_of(self.games[env])))

    def render(self, env: int) -> np.ndarray:
        return as_frame(self.games[env], int(side_of(self.games[env])))

    def render_title(self, env: int) -> str:
        return f"trained team (green, ABC) against {name_of(int(self._level))} (orange, XYZ)"

    def render_score(self, env: int) -> str:
        return score(self.games[env], int(side_of(self.games[env])))

    def render_result(self, info: Mapping[str, float]) -> str:
        return winner(info)
