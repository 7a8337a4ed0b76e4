"""Opponent pool: snapshot schedule, checkpointing and the fraction of self-play games."""

import pytest
import torch

from lockstep.algorithms.ddpg.agent import DDPGConfig
from lockstep.clock import TrainState
from lockstep.config import ConfigError, RunConfig, apply_overrides
from lockstep.distributed import Runtime
from lockstep.pytree import tree_map
from lockstep.registry import find_recipe
from lockstep.tasks.team_snakes.env import TeamSnakesConfig
from lockstep.tasks.team_snakes.kernel import SCRIPTED
from lockstep.tasks.team_snakes.rules import TEAM


def build(hosting=None, **algo):
    """Build an agent with 8 lanes of four games each, half of them against snapshots."""
    recipe = apply_overrides(find_recipe("team-ddpg")(), find_recipe("team-ddpg").smoke_overrides)
    settings = {"opponent_pool_size": 3, "self_play_fraction": 0.5, "snapshot_every": 512} | algo
    recipe = apply_overrides(
        recipe, {"task.control_both_teams": True, "task.num_envs": 32, "run.lanes": 8, "run.reduction": "exact"}
    )
    recipe = apply_overrides(recipe, {f"algo.{name}": value for name, value in settings.items()})
    runtime = Runtime.single_process(recipe.run, hosting=hosting)
    return recipe.algo.build(recipe.task.build(runtime.lanes, runtime.device), runtime)


def iterate(algorithm, clock, count=1):
    for _ in range(count):
        algorithm.task.on_iteration_start(clock)
        algorithm.collect(clock)
        algorithm.update(clock)
        clock.advance(algorithm.samples)


def equal(one, other):
    return all(torch.equal(x, y) for x, y in zip(one.parameters(), other.parameters(), strict=True))


def test_opponent_pool_plays_given_fraction_of_games_per_lane():
    algorithm = build()
    actions = algorithm.past.act(algorithm.task.observations())
    assert actions.shape == (32, TEAM)
    by_lane = actions.view(8, 4, TEAM)
    assert (by_lane[:, :2] < SCRIPTED).all()
    assert (by_lane[:, 2:] == SCRIPTED).all()


def test_snapshot_acts_like_actor_with_teams_swapped():
    algorithm = build()
    obs = tree_map(torch.clone, algorithm.task.observations())
    theirs = algorithm.past.act(obs)  # copies of the initial actor
    swapped = tree_map(lambda x: x.roll(TEAM, dims=1), obs)
    ours, _ = algorithm.policy().act(swapped, {})
    faced = (torch.arange(32) % 4) < 2
    assert torch.equal(theirs[faced], ours[faced, :TEAM])


def test_opponent_actions_are_independent_per_lane():
    whole = build()
    obs, expected = whole.task.observations(), whole.past.act(whole.task.observations())
    for lane in range(8):
        rows = slice(4 * lane, 4 * lane + 4)
        part = tree_map(lambda x, rows=rows: x[rows], obs)
        assert torch.equal(whole.past.act(part), expected[rows])


def test_snapshots_replace_oldest_at_given_interval():
    algorithm, clock = build(), TrainState(total_samples=10_000)
    assert algorithm.samples == 256
    kept = []
    for _ in range(8):
        before = [dict(past.state_dict()) for past in algorithm.past.copies]
        before = [{name: x.clone() for name, x in state.items()} for state in before]
        iterate(algorithm, clock)
        changed = [
            number
            for number, (past, state) in enumerate(zip(algorithm.past.copies, before, strict=True))
            if any(not torch.equal(x, state[name]) for name, x in past.state_dict().items())
        ]
        kept.append(changed)
        for number in changed:
            assert equal(algorithm.past.copies[number], algorithm.actor)
    # Every 512 samples, which are two iterations. Slot 1 is replaced first because slot 0 holds the first snapshot.
    assert kept == [[], [1], [], [2], [], [0], [], [1]]


def test_opponent_pool_is_checkpointed_but_not_exported():
    algorithm, clock = build(), TrainState(total_samples=10_000)
    iterate(algorithm, clock, 4)
    saved = {name: x.detach().clone() for name, x in algorithm.shared_state().items()}
    fresh = build()
    assert not equal(fresh.past.copies, algorithm.past.copies)
    fresh.load_shared_state(saved)
    assert equal(fresh.past.copies, algorithm.past.copies)
    assert not any(name.startswith("past.") for name in algorithm.model_state_dict())
    assert not any(x.requires_grad for x in algorithm.past.copies.parameters())


def test_replay_contains_only_own_team():
    algorithm, clock = build(), TrainState(total_samples=10_000)
    iterate(algorithm, clock)
    replay = algorithm.replay.buffers
    assert replay["obs"]["seen"].shape[3] == replay["next_obs"]["legal"].shape[3] == TEAM
    assert replay["action"].shape[3] == replay["reward"].shape[3] == TEAM
    assert replay["action"][:, : algorithm.config.rollout_steps].max() < SCRIPTED


def test_centralized_critic_covers_own_team_only():
    algorithm = build(centralized_critic=True)
    iterate(algorithm, TrainState(total_samples=10_000), 2)
    assert algorithm.updates > 0
    assert algorithm.critics[0].head[-1].out_features == TEAM


def test_policy_leaves_other_team_to_script():
    algorithm = build()
    action, _ = algorithm.policy().act(algorithm.task.observations(), {})
    assert action.shape == (32, 2 * TEAM)
    assert (action[:, TEAM:] == SCRIPTED).all()
    algorithm.task.step(action)


@pytest.mark.parametrize(
    ("algo", "both", "words"),
    [
        ({"opponent_pool_size": 2}, False, "acts for the other team itself"),
        ({"opponent_pool_size": -1}, True, "opponent_pool_size is -1"),
        ({"opponent_pool_size": 2, "snapshot_every": 0}, True, "snapshot_every 0"),
        ({"opponent_pool_size": 2, "self_play_fraction": 1.5}, True, "self_play_fraction 1.5"),
    ],
)
def test_invalid_opponent_settings_are_rejected(algo, both, words):
    with pytest.raises(ConfigError, match=words):
        DDPGConfig(**algo).validate(TeamSnakesConfig(control_both_teams=both), RunConfig(lanes=8))
