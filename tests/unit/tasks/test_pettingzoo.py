"""PettingZoo games: rows of agents that come and go, common spaces, action masks, the critic part, refusals."""

from contextlib import closing

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete

from helpers.zoo_toys import ComingAndGoing
from lockstep.config import ConfigError
from lockstep.lanes import Lanes
from lockstep.tasks.env_checker import check_env
from lockstep.tasks.pettingzoo.env import PettingZooConfig

CPU = torch.device("cpu")
ONE_LANE = Lanes(1, range(1), 0)


def toy(name, **settings):
    return PettingZooConfig(id=f"helpers.zoo_toys:{name}", **{"num_envs": 3} | settings)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ComingAndGoing", {"info_keys": ("is_success",)}),
        ("Ragged", {"centralized_critic": True}),
        ("Masked", {"agent_id": False}),
        ("Signals", {"centralized_critic": True}),
    ],
)
def test_check_env_accepts_games(name, settings):
    assert check_env(toy(name, **settings), steps=40) == []


def play(config, steps, action=1):
    """Yield the steps of one game in which all agents take one action."""
    with closing(config.build(ONE_LANE, CPU)) as games:
        for _ in range(steps):
            before = games.observations()
            yield before, games.step(torch.full((games.num_envs,), action))


def test_rows_follow_their_agents():
    """Play the same game without Lockstep, and compare."""
    with closing(toy("ComingAndGoing").build(ONE_LANE, CPU)) as games:
        game, seeds = ComingAndGoing(), games._streams[0]
        episode, total, came = 0, 0.0, 0
        observations, _ = game.reset(seed=seeds.draw_seed(0, bits=31))
        for _ in range(60):
            present = list(game.agents)
            shown = {
                agent: games.observations()[row, :2].numpy().copy() for row, agent in enumerate(game.possible_agents)
            }
            step = games.step(torch.ones(3, dtype=torch.int64))
            assert step.active.tolist() == [agent in present for agent in game.possible_agents]
            assert all(np.array_equal(shown[agent], observations[agent]) for agent in present)
            assert all(not shown[agent].any() for agent in {*game.possible_agents} - {*present})
            observations, rewards, terminations, truncations, _ = game.step(dict.fromkeys(present, 1))
            total += sum(rewards.values())
            for row, agent in enumerate(game.possible_agents):
                absent = agent not in present
                assert step.reward[row] == rewards.get(agent, 0.0)
                assert step.terminated[row] == (absent or terminations[agent])
                assert step.truncated[row] == truncations.get(agent, False)
                if not absent and agent not in game.agents:
                    assert np.array_equal(step.final_obs[row, :2].numpy(), observations[agent])
                came += absent and agent in game.agents
            team = step.episode_info["team_return"]
            if game.agents:
                assert team.isnan().all()
            else:  # one agent reports the sum of the whole game
                assert team[~team.isnan()].tolist() == [total]
                episode, total = episode + 1, 0.0
                observations, _ = game.reset(seed=seeds.draw_seed(episode, bits=31))
        assert episode > 3
        assert came > episode  # agents also came back within a game


def test_returns_are_reported_by_kind_of_agent():
    for _, step in play(toy("ComingAndGoing"), 9):
        ended = step.active & (step.terminated | step.truncated)
        info = step.episode_info
        assert info["ant_return"].isnan().tolist() == [not bool(ended[0]), not bool(ended[1]), True]
        assert info["bee_return"].isnan().tolist() == [True, True, not bool(ended[2])]


def test_observations_and_actions_of_different_sizes_are_padded():
    with closing(toy("Ragged").build(ONE_LANE, CPU)) as games:
        assert games.action_space == Discrete(4)
        assert isinstance(games.observation_space, Dict)
        assert games.observation_space["observation"].shape == (4 + 3,)
        obs = games.observations()
        assert obs["action_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]  # ant_1 is absent
        assert obs["observation"][0, 2:].tolist() == [0, 0, 1, 0, 0]
        games.step(torch.tensor([1, 0, 3]))  # the toy asserts that actions are in its spaces


def test_masks_of_observations_are_followed_and_can_be_ignored():
    obs, _ = next(play(toy("Masked"), 1))
    assert obs["action_mask"][0].tolist() == [0, 1]
    assert isinstance(toy("Masked", use_action_mask=False).build(ONE_LANE, CPU).observation_space, Box)


def test_critic_part_joins_observations_of_present_agents():
    for obs, step in play(toy("ComingAndGoing", centralized_critic=True), 20):
        seen, critic = obs["observation"][:, :2], obs["critic"]
        flags = (seen != 0).any(1, keepdim=True).float()
        assert critic[0, :9].tolist() == torch.cat([seen, flags], dim=1).flatten().tolist()
        assert critic[:, 9:].tolist() == torch.eye(3).tolist()
        for row in step.truncated.nonzero().flatten().tolist():  # an agent at a cut sees the others' last observations
            last = step.final_obs["critic"][row, :9].view(3, 3)
            assert last[:, 2].tolist() == step.active.float().tolist()
            assert torch.equal(last[step.active][:, :2], step.final_obs["observation"][step.active][:, :2])


def test_render_shows_the_game_of_a_row():
    with closing(toy("ComingAndGoing", num_envs=6).build(ONE_LANE, CPU)) as games:
        games.step(torch.zeros(6, dtype=torch.int64))
        assert games.render(5).tolist() == np.full((8, 8, 3), 1).tolist()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (toy("Unequal"), "one policy cannot see the observations of all agents"),
        (toy("ComingAndGoing", num_envs=4), "games of 3 agents cannot share evenly.*Use --task.num-envs 3 or 6"),
        (toy("Nothing"), "has no Nothing"),
        (PettingZooConfig(id="os:system"), "neither a parallel_env function nor a class"),
        (PettingZooConfig(id="no_such_package.game_v0"), "needs a package that is not installed"),
        (toy("ComingAndGoing", env_kwargs={"size": 3}), "cannot be made.*Fix --task.env-kwargs"),
    ],
)
def test_game_that_does_not_fit_is_rejected_with_a_fix(config, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        config.build(ONE_LANE, CPU)


def test_default_number_of_agents_is_increased_to_whole_games():
    assert toy("ComingAndGoing", num_envs=48).for_lanes(7).num_envs == 63
    assert toy("ComingAndGoing", num_envs=12).for_lanes(7).num_envs == 12  # set by the user
    assert PettingZooConfig(id=ComingAndGoing).id == "helpers.zoo_toys:ComingAndGoing"
