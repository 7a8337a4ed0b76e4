"""Opponent pool: snapshot schedule, checkpointing and the fraction of self-play games."""

import pytest
import torch

from lockstep.algorithms.ddpg.agent import DDPGConfig
from lockstep.algorithms.ddpg.opponent_sampling import PrioritizedSampling
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
    algorithm = build(centralized_critic=True, actor_gradient="sampled")
    iterate(algorithm, TrainState(total_samples=10_000), 2)
    assert algorithm.updates > 0
    assert algorithm.critics[0].head[-1].out_features == TEAM


def test_policy_leaves_other_team_to_script():
    algorithm = build()
    action, _ = algorithm.policy().act(algorithm.task.observations(), {})
    assert action.shape == (32, 2 * TEAM)
    assert (action[:, TEAM:] == SCRIPTED).all()
    algorithm.task.step(action)


# ------------------------------------------------------------------------------------------------------------- sampling


def results(*pairs):
    """Return sampling over snapshots with these (points, games), and 1,000 environments that play against them."""
    sampling = PrioritizedSampling(len(pairs), 2.0, torch.arange(1000), games=1000)
    sampling.results.copy_(torch.tensor(pairs))
    return sampling


def test_pfsp_draws_by_the_power_of_the_rate_of_games_not_won():
    sampling = results((8.0, 8.0), (4.0, 8.0), (0.0, 8.0))
    assert sampling.win_rates().tolist() == pytest.approx([0.9, 0.5, 0.1])
    ended, info = torch.ones(1000, dtype=torch.bool), {"won": torch.zeros(1000)}
    sampling.end_step(ended, info, (torch.arange(1000) + 0.5) / 1000)
    shares = sampling.opponents.bincount(minlength=3) / 1000
    weights = torch.tensor([0.1, 0.5, 0.9]).square()
    assert shares.tolist() == pytest.approx((weights / weights.sum()).tolist(), abs=0.002)


def test_pfsp_keeps_opponents_of_running_games_and_counts_ended_ones():
    sampling = PrioritizedSampling(2, 2.0, torch.arange(4), games=3)
    sampling.opponents.copy_(torch.tensor([0, 1, 1, 0]))
    info = {"won": torch.tensor([1.0, 0.0, 1.0, 1.0]), "drawn": torch.tensor([0.0, 1.0, 0.0, 0.0])}
    sampling.end_step(torch.tensor([True, True, False, True]), info, torch.tensor([0.9, 0.1, 0.1, 0.1]))
    assert sampling.opponents.tolist() == [1, 0, 1, 0]  # of equal weights; the last two are not drawn
    assert not sampling.results.any()  # only with the end of the iteration
    sampling.end_iteration(lambda tensor: tensor.mul_(2))  # as if another process had the same results
    assert sampling.results.tolist() == [[2.0, 2.0], [1.0, 2.0]]
    sampling.end_iteration(lambda tensor: tensor)
    assert sampling.results.tolist() == [[2.0, 2.0], [1.0, 2.0]]
    sampling.replace_snapshot(1)
    assert sampling.results.tolist() == [[1.0, 1.0], [0.0, 0.0]]


def test_pfsp_task_without_won_raises():
    with pytest.raises(ConfigError, match="reports no won"):
        results((0.0, 0.0)).end_step(torch.ones(1000, dtype=torch.bool), {}, torch.zeros(1000))


def test_pfsp_pool_acts_with_the_drawn_snapshots():
    algorithm, clock = build(opponent_sampling="pfsp"), TrainState(total_samples=10_000)
    iterate(algorithm, clock, 6)
    assert not equal(algorithm.past.copies[0], algorithm.past.copies[1])
    algorithm.past.copies[1].head.bias.data[3] = 1000.0  # snapshot 1 always turns right, so that it acts differently
    obs = tree_map(torch.clone, algorithm.task.observations())
    rotation = algorithm.past.act(obs)  # the first environment of a lane plays against snapshot 0, the second against 1
    assert torch.equal(algorithm.past.act(obs, torch.arange(32) % 4), rotation)
    other = algorithm.past.act(obs, torch.full((32,), 1)).view(8, 4, TEAM)
    assert torch.equal(other[:, 1:], rotation.view(8, 4, TEAM)[:, 1:])
    assert (other[:, 2:] == SCRIPTED).all()
    assert not torch.equal(other[:, 0], rotation.view(8, 4, TEAM)[:, 0])


def test_pfsp_training_draws_opponents_and_is_checkpointed():
    algorithm, clock = build(opponent_sampling="pfsp"), TrainState(total_samples=10_000)
    first = algorithm.sampling.opponents.clone()
    iterate(algorithm, clock, 12)
    assert algorithm.sampling.results[:, 1].sum() > 0
    in_pool = (torch.arange(32) % 4) < 2
    assert not torch.equal(algorithm.sampling.opponents[in_pool], first[in_pool])
    assert torch.equal(algorithm.sampling.opponents[~in_pool], first[~in_pool])
    fresh = build(opponent_sampling="pfsp")
    fresh.load_shared_state({name: x.detach().clone() for name, x in algorithm.shared_state().items()})
    for lane in range(8):
        rows = {name: x.clone() for name, x in algorithm._lane_rows(lane).items()}
        for name, x in fresh._lane_rows(lane).items():
            x.copy_(rows[name])
    assert torch.equal(fresh.sampling.results, algorithm.sampling.results)
    assert torch.equal(fresh.sampling.opponents, algorithm.sampling.opponents)


def test_uniform_sampling_saves_nothing_more():
    algorithm = build()
    assert algorithm.sampling is None
    assert "opponent_results" not in algorithm.shared_state()
    assert "opponents" not in algorithm.lane_state(0)


@pytest.mark.parametrize(
    ("algo", "both", "words"),
    [
        ({"opponent_pool_size": 2}, False, "acts for the other team itself"),
        ({"opponent_pool_size": -1}, True, "opponent_pool_size is -1"),
        ({"opponent_sampling": "pfsp"}, True, "opponent_sampling is pfsp, with opponent_pool_size 0"),
        ({"opponent_sampling": "pfsp", "opponent_pool_size": 2, "pfsp_power": -1.0}, True, "pfsp_power -1.0"),
        ({"opponent_pool_size": 2, "snapshot_every": 0}, True, "snapshot_every 0"),
        ({"opponent_pool_size": 2, "self_play_fraction": 1.5}, True, "self_play_fraction 1.5"),
    ],
)
def test_invalid_opponent_settings_are_rejected(algo, both, words):
    with pytest.raises(ConfigError, match=words):
        DDPGConfig(**algo).validate(TeamSnakesConfig(control_both_teams=both), RunConfig(lanes=8))
