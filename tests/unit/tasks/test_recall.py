"""Recall: the cue is shown once, the answer is rewarded when asked for, and cues are equally likely."""

import pytest
import torch

from lockstep.config import ConfigError
from lockstep.lanes import Lanes
from lockstep.tasks.env_checker import check_env
from lockstep.tasks.recall.env import RecallConfig


def build(**settings):
    return RecallConfig(**{"num_envs": 16, **settings}).build(Lanes(8, range(8), 0), torch.device("cpu"))


def test_check_env_finds_no_faults():
    assert check_env(RecallConfig(delay=3)) == []


def test_cue_is_shown_once_and_correct_answer_is_rewarded_after_delay():
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
def test_config_invalid_settings_raise(settings):
    with pytest.raises(ConfigError):
        RecallConfig(**settings)


def test_load_lane_state_with_invalid_age_raises():
    env = build(delay=3)
    state = env.lane_state(2)
    state["age"][0] = 4
    with pytest.raises(ValueError, match="not in a valid state"):
        env.load_lane_state(2, state)
