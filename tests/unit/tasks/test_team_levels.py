"""Level of the scripted team: by clock or pooled win rate, never by process-local results."""

import pytest
import torch

from helpers.team_games import build, random_actions
from lockstep.clock import TrainState
from lockstep.tasks.team_snakes.kernel import SCRIPTED
from lockstep.tasks.team_snakes.opponents import BLIND, CAUTIOUS, EVADER, GREEDY, RANDOM
from lockstep.tasks.team_snakes.rules import TEAM


def test_level_schedule_depends_on_clock_only_and_is_shared_state():
    env = build(4, level_schedule="curriculum", opponent_level=GREEDY)
    assert env.shared_state()["level"] == GREEDY  # as in an evaluation, which has no clock
    levels = []
    for samples in (0, 10, 30, 60, 85, 100):
        env.on_iteration_start(TrainState(total_samples=100, samples=samples))
        levels.append(int(env.shared_state()["level"]))
    assert levels == [0, 1, 2, 3, 4, 4]
    fresh = build(4, level_schedule="curriculum", opponent_level=GREEDY)
    fresh.load_shared_state({name: x.clone() for name, x in env.shared_state().items()})
    assert fresh.shared_state()["level"] == 4


@pytest.mark.parametrize("rise", ["fixed", "linear", "exponential", "curriculum", "gate"])
def test_evade_after_samples_switches_to_evader(rise):
    env = build(4, level_schedule=rise, evade_after_samples=60)
    for samples in (0, 59, 60, 100):
        env.on_iteration_start(TrainState(total_samples=100, samples=samples))
        assert (env.shared_state()["level"] == EVADER) == (samples >= 60)


def clock_with(**results):
    """Train state with these results as its last pooled metrics."""
    return TrainState(
        total_samples=100, samples=10, metrics={f"rollout/ep_{name}_mean": x for name, x in results.items()}
    )


def test_gate_schedule_promotes_on_win_rate_of_current_level():
    env = build(4, level_schedule="gate", promotion_win_rate=0.6, opponent_level=GREEDY)
    level = env.shared_state()["level"]
    assert level == GREEDY  # as in an evaluation
    env.on_iteration_start(TrainState(total_samples=100))
    assert level == RANDOM
    for won, played, after in (
        (0.59, 0, 0),  # below the threshold
        (0.60, 0, 1),
        (0.90, 0, 1),  # results of the previous level
        (0.90, 0.5, 1),  # partly results of the previous level
        (0.90, 1, 2),
    ):
        env.on_iteration_start(clock_with(won=won, drawn=0.0, level=played))
        assert level == after
    env.on_iteration_start(TrainState(total_samples=100, samples=10))  # no game has ended yet
    assert level == 2
    for _ in range(9):
        env.on_iteration_start(clock_with(won=1.0, level=float(level)))
    assert level == CAUTIOUS


def test_gate_schedule_ignores_games_against_opponent_pool():
    env = build(4, level_schedule="gate", promotion_win_rate=0.6, control_both_teams=True)
    level = env.shared_state()["level"]
    env.on_iteration_start(TrainState(total_samples=100))
    env.on_iteration_start(clock_with(won=0.7, level=0.0, scripted=0.5, beaten=0.25))  # half of them were won
    assert level == RANDOM
    env.on_iteration_start(clock_with(won=0.3, level=0.0, scripted=0.0, beaten=0.0))  # no games against the script
    assert level == RANDOM
    env.on_iteration_start(clock_with(won=0.4, level=0.0, scripted=0.5, beaten=0.35))
    assert level == BLIND


def test_episode_info_reports_scripted_and_beaten_games():
    env = build(64, control_both_teams=True, opponent_level=RANDOM, max_episode_steps=60)
    for _ in range(60):
        theirs = torch.full((64, TEAM), SCRIPTED)
        theirs[::2] = env.observations()["legal"][::2, TEAM:].argmax(-1)
        step = env.step(torch.cat([env.scripted_actions(CAUTIOUS), theirs], dim=1))
    assert step.episode_info["scripted"].tolist() == [0.0, 1.0] * 32
    assert torch.equal(step.episode_info["beaten"], step.episode_info["won"] * step.episode_info["scripted"])
    assert step.episode_info["beaten"].sum() > 20


def test_level_changes_opponent_play_and_is_in_episode_info():
    scores = []
    for samples in (0, 100):
        env = build(100, level_schedule="linear")
        env.on_iteration_start(TrainState(total_samples=100, samples=samples))
        for actions in random_actions(200, 100):
            step = env.step(actions)
        assert set(step.episode_info["level"].tolist()) == {0.0 if samples == 0 else 4.0}
        scores.append(float(step.episode_info["conceded"].mean()))
    assert scores[0] < 2
    assert scores[1] > 20


@pytest.mark.parametrize("level", [-1, 6])
def test_load_shared_state_invalid_level_raises(level):
    with pytest.raises(ValueError, match="the saved level is not one of 0 to 5"):
        build(4).load_shared_state({"level": torch.tensor(level)})
