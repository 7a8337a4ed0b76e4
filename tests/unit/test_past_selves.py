"""Past selves: kept by the clock, saved with the agent, and played against in part of the games only."""

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
    """An agent of 8 lanes with four games each, half of them against past selves."""
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


def test_some_games_of_each_lane_are_against_past_selves_and_the_others_against_the_script():
    algorithm = build()
    actions = algorithm.past.act(algorithm.task.observations())
    assert actions.shape == (32, TEAM)
    by_lane = actions.view(8, 4, TEAM)
    assert (by_lane[:, :2] < SCRIPTED).all()
    assert (by_lane[:, 2:] == SCRIPTED).all()


def test_a_past_self_does_what_the_actor_would_do_in_its_place():
    algorithm = build()
    obs = tree_map(torch.clone, algorithm.task.observations())
    theirs = algorithm.past.act(obs)  # copies of the actor as it started
    swapped = tree_map(lambda x: x.roll(TEAM, dims=1), obs)
    ours, _ = algorithm.policy().act(swapped, {})
    faced = (torch.arange(32) % 4) < 2
    assert torch.equal(theirs[faced], ours[faced, :TEAM])


def test_it_is_the_same_lane_by_lane():
    whole = build()
    obs, expected = whole.task.observations(), whole.past.act(whole.task.observations())
    for lane in range(8):
        rows = slice(4 * lane, 4 * lane + 4)
        part = tree_map(lambda x, rows=rows: x[rows], obs)
        assert torch.equal(whole.past.act(part), expected[rows])


def test_the_oldest_gives_way_when_the_clock_says_so_and_only_then():
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
    # Every 512 samples, which are two iterations: the second place first, because the first holds the first self.
    assert kept == [[], [1], [], [2], [], [0], [], [1]]


def test_past_selves_are_saved_with_the_agent_but_are_not_what_a_new_run_starts_from():
    algorithm, clock = build(), TrainState(total_samples=10_000)
    iterate(algorithm, clock, 4)
    saved = {name: x.detach().clone() for name, x in algorithm.shared_state().items()}
    fresh = build()
    assert not equal(fresh.past.copies, algorithm.past.copies)
    fresh.load_shared_state(saved)
    assert equal(fresh.past.copies, algorithm.past.copies)
    assert not any(name.startswith("past.") for name in algorithm.model_state_dict())
    assert not any(x.requires_grad for x in algorithm.past.copies.parameters())


def test_only_our_own_transitions_are_remembered():
    algorithm, clock = build(), TrainState(total_samples=10_000)
    iterate(algorithm, clock)
    replay = algorithm.replay.buffers
    assert replay["obs"]["seen"].shape[3] == replay["next_obs"]["legal"].shape[3] == TEAM
    assert replay["action"].shape[3] == replay["reward"].shape[3] == TEAM
    assert replay["action"][:, : algorithm.config.rollout_steps].max() < SCRIPTED


def test_a_central_critic_judges_our_team_alone():
    algorithm = build(centralized_critic=True)
    iterate(algorithm, TrainState(total_samples=10_000), 2)
    assert algorithm.updates > 0
    assert algorithm.critics[0].head[-1].out_features == TEAM


def test_a_policy_leaves_the_other_team_to_the_script():
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
def test_impossible_settings_are_refused_in_words(algo, both, words):
    with pytest.raises(ConfigError, match=words):
        DDPGConfig(**algo).validate(TeamSnakesConfig(control_both_teams=both), RunConfig(lanes=8))
