"""Recall: the cue is shown once, the answer is judged when it is due, and each cue is as likely as the others."""

import pytest
import torch

from lockstep.config import ConfigError
from lockstep.lanes import Lanes
from lockstep.tasks.env_checker import check_env
from lockstep.tasks.recall.env import RecallConfig


def build(**settings):
    return RecallConfig(**{"num_envs": 16, **settings}).build(Lanes(8, range(8), 0), torch.device("cpu"))


def test_it_keeps_the_contract_of_tasks():
    assert check_env(RecallConfig(delay=3)) == []


def test_the_cue_is_shown_once_and_the_right_answer_pays_when_it_is_asked_for():
    env = build(delay=3, num_cues=4)
    cue = env.reset()[:, :4].argmax(1)
    assert env.observations().sum(1).eq(1).all()
    for _ in range(2):
        step = env.step(cue)
        assert not step.obs.any()
        assert not step.reward.any()
    asked = env.step(cue)
    assert asked.obs[:, 4].eq(1).all()
    assert asked.obs[:, :4].eq(0).all()
    assert not asked.terminated.any()
    answer = torch.where(torch.arange(16) < 8, cue, (cue + 1) % 4)
    step = env.step(answer)
    assert step.terminated.all()
    assert step.reward.tolist() == [1.0] * 8 + [0.0] * 8
    assert step.obs[:, :4].sum(1).eq(1).all()  # the next cue
    assert not torch.equal(step.obs[:, :4].argmax(1), cue)


def test_cues_are_equally_likely():
    env, counts = build(delay=1, num_cues=4, num_envs=64), torch.zeros(4)
    for _ in range(200):
        obs = env.step(torch.zeros(64, dtype=torch.int64)).obs
        counts += obs[:, :4].sum(0)
    assert counts.sum() == 6400
    assert counts.sub(1600).abs().max() < 200  # 3.5 standard deviations is 121


@pytest.mark.parametrize("settings", [{"delay": 0}, {"num_cues": 1}])
def test_settings_without_a_game_are_refused(settings):
    with pytest.raises(ConfigError):
        RecallConfig(**settings)


def test_a_step_that_no_episode_has_is_refused():
    env = build(delay=3)
    state = env.lane_state(2)
    state["age"][0] = 4
    with pytest.raises(ValueError, match="none of an episode of 4"):
        env.load_lane_state(2, state)
