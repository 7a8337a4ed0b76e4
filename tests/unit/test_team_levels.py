"""The scripted team's level: by the clock, by what was won, and never by what one process alone has seen."""

import pytest
import torch

from lockstep.clock import TrainState
from lockstep.tasks.team_snakes.kernel import SCRIPTED
from lockstep.tasks.team_snakes.opponents import BLIND, CAUTIOUS, EVADER, GREEDY, RANDOM
from lockstep.tasks.team_snakes.rules import TEAM
from team_games import build, random_actions


def test_the_level_follows_the_clock_alone_and_is_shared_state():
    env = build(4, level_schedule="curriculum", opponent_level=GREEDY)
    assert env.shared_state()["level"] == GREEDY  # as in an evaluation, which nobody tells the time
    levels = []
    for samples in (0, 10, 30, 60, 85, 100):
        env.on_iteration_start(TrainState(total_samples=100, samples=samples))
        levels.append(int(env.shared_state()["level"]))
    assert levels == [0, 1, 2, 3, 4, 4]
    fresh = build(4, level_schedule="curriculum", opponent_level=GREEDY)
    fresh.load_shared_state({name: x.clone() for name, x in env.shared_state().items()})
    assert fresh.shared_state()["level"] == 4


@pytest.mark.parametrize("rise", ["fixed", "linear", "exponential", "curriculum", "gate"])
def test_the_others_evade_from_a_given_sample_on(rise):
    env = build(4, level_schedule=rise, evade_after_samples=60)
    for samples in (0, 59, 60, 100):
        env.on_iteration_start(TrainState(total_samples=100, samples=samples))
        assert (env.shared_state()["level"] == EVADER) == (samples >= 60)


def told(**results):
    """A clock whose last pooled metrics are these."""
    return TrainState(
        total_samples=100, samples=10, metrics={f"rollout/ep_{name}_mean": x for name, x in results.items()}
    )


def test_the_gate_opens_when_enough_games_of_this_level_were_won():
    env = build(4, level_schedule="gate", promotion_win_rate=0.6, opponent_level=GREEDY)
    level = env.shared_state()["level"]
    assert level == GREEDY  # as in an evaluation
    env.on_iteration_start(TrainState(total_samples=100))
    assert level == RANDOM
    for won, played, after in (
        (0.59, 0, 0),  # not enough
        (0.60, 0, 1),
        (0.90, 0, 1),  # won before it opened
        (0.90, 0.5, 1),  # some of them
        (0.90, 1, 2),
    ):
        env.on_iteration_start(told(won=won, drawn=0.0, level=played))
        assert level == after
    env.on_iteration_start(TrainState(total_samples=100, samples=10))  # no game has ended yet
    assert level == 2
    for _ in range(9):
        env.on_iteration_start(told(won=1.0, level=float(level)))
    assert level == CAUTIOUS


def test_games_against_past_selves_do_not_open_the_gate():
    env = build(4, level_schedule="gate", promotion_win_rate=0.6, control_both_teams=True)
    level = env.shared_state()["level"]
    env.on_iteration_start(TrainState(total_samples=100))
    env.on_iteration_start(told(won=0.7, level=0.0, scripted=0.5, beaten=0.25))  # half of those against the script
    assert level == RANDOM
    env.on_iteration_start(told(won=0.3, level=0.0, scripted=0.0, beaten=0.0))  # there were none
    assert level == RANDOM
    env.on_iteration_start(told(won=0.4, level=0.0, scripted=0.5, beaten=0.35))
    assert level == BLIND


def test_what_is_told_of_a_game_says_whether_the_script_played_and_was_beaten():
    env = build(64, control_both_teams=True, opponent_level=RANDOM, max_episode_steps=60)
    for _ in range(60):
        theirs = torch.full((64, TEAM), SCRIPTED)
        theirs[::2] = env.observations()["legal"][::2, TEAM:].argmax(-1)
        step = env.step(torch.cat([env.scripted_actions(CAUTIOUS), theirs], dim=1))
    assert step.episode_info["scripted"].tolist() == [0.0, 1.0] * 32
    assert torch.equal(step.episode_info["beaten"], step.episode_info["won"] * step.episode_info["scripted"])
    assert step.episode_info["beaten"].sum() > 20


def test_the_level_changes_how_the_others_play_and_is_told_at_the_end():
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
def test_a_saved_level_that_is_none_is_refused(level):
    with pytest.raises(ValueError, match="the saved level is none of 0 to 5"):
        build(4).load_shared_state({"level": torch.tensor(level)})
