"""check_env accepts valid tasks and reports the fault of each of many broken ones."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from lockstep.config import ConfigError
from lockstep.protocols import Step
from lockstep.pytree import load_into
from lockstep.rng import RandomStream
from lockstep.tasks.env_checker import check_env
from lockstep.tasks.gym.env import GymConfig


class Walk:
    """A valid task: a noisy walk that terminates beyond 2 and truncates after 9 steps."""

    noise_seed = property(lambda self: self.lanes.seed)

    def __init__(self, config, lanes, device):
        self.lanes, self.share = lanes, lanes.per_lane(config.num_envs, "num_envs")
        self.num_envs = len(lanes) * self.share
        self.observation_space = Box(-4, 9, (2,), np.float32)
        self.action_space = Discrete(3)
        self.position, self.age = torch.zeros(self.num_envs), torch.zeros(self.num_envs)
        self.draws = torch.zeros(self.num_envs, dtype=torch.int64)

    def index(self, row):
        return self.lanes.local.start * self.share + row

    def noise(self, row):
        self.draws[row] += 1
        return RandomStream(self.noise_seed, "walk", self.index(row)).uniform(int(self.draws[row])).item() - 0.5

    def begin(self, row):
        self.position[row], self.age[row] = self.noise(row), 0

    def reset(self):
        self.draws[:] = 0
        for row in range(self.num_envs):
            self.begin(row)
        return self.observations()

    def observations(self):
        return torch.stack([self.position, self.age], dim=1)

    def step(self, action):
        self.position += action - 1 + torch.tensor([self.noise(row) for row in range(self.num_envs)])
        self.age += 1
        terminated, truncated = self.position.abs() > 2, self.age >= 9
        final, age = self.observations(), self.age.clone()
        for row in (terminated | truncated).nonzero().flatten().tolist():
            self.begin(row)
        return Step(self.observations(), self.position.clone(), terminated, truncated, final, {"age": age})

    def on_iteration_start(self, clock): ...

    def render_text(self, env):
        return f"at {self.position[env]:.2f}"

    def render(self, env):
        raise ConfigError("A walk cannot be rendered.")

    def close(self): ...

    def shared_state(self):
        return {}

    def load_shared_state(self, state): ...

    def lane_state(self, lane):
        first = self.lanes.local.index(lane) * self.share
        rows = slice(first, first + self.share)
        return {"position": self.position[rows], "age": self.age[rows], "draws": self.draws[rows]}

    def load_lane_state(self, lane, state):
        load_into(self.lane_state(lane), state, "walk")


class WithoutObserve(Walk):
    observations = property(lambda self: self.missing)

    def reset(self):
        return torch.zeros(self.num_envs, 2)


class CountsAllEnvironments(Walk):
    def __init__(self, config, lanes, device):
        super().__init__(config, lanes, device)
        self.num_envs = config.num_envs


class RewardsInDoubles(Walk):
    def step(self, action):
        return super().step(action)._replace(reward=self.position.double())


class RewardsWithNan(Walk):
    def step(self, action):
        step = super().step(action)
        step.reward[5] = torch.nan
        return step


class RewardsAgentsInOneRow(Walk):
    def step(self, action):
        return super().step(action)._replace(agent_reward=torch.zeros(self.num_envs))


class RewardsAnAgentWithInf(Walk):
    def step(self, action):
        agents = torch.zeros(self.num_envs, 3)
        agents[4, 2] = torch.inf
        return super().step(action)._replace(agent_reward=agents)


class RewardsAgentsByPlaceInTheBatch(Walk):
    def step(self, action):
        return super().step(action)._replace(agent_reward=torch.arange(2.0 * self.num_envs).view(-1, 2))


class CountsOncePerLane(Walk):
    def step(self, action):
        return super().step(action)._replace(episode_info={"age": torch.zeros(8)})


class PromisesPictures(Walk):
    def __init__(self, config, lanes, device):
        super().__init__(config, lanes, device)
        self.observation_space = Box(0, 255, (2,), np.uint8)


class LeavesItsSpace(Walk):
    def __init__(self, config, lanes, device):
        super().__init__(config, lanes, device)
        limits = np.array([4, 3], np.float32)  # the age is 4 at step 3, whatever the position
        self.observation_space = Box(-limits, limits, dtype=np.float32)


class ObservesSomethingElse(Walk):
    def step(self, action):
        step = super().step(action)
        step.obs[:, 0] += 0.001
        return step


class ForgetsTheLastObservation(Walk):
    def step(self, action):
        step = super().step(action)
        return step._replace(final_obs=step.obs)


class NeverEnds(Walk):
    def step(self, action):
        step = super().step(action)
        never = torch.zeros(self.num_envs, dtype=torch.bool)
        return step._replace(terminated=never, truncated=never)


class SeedsByPlaceInTheBatch(Walk):
    def index(self, row):
        return row


class LooksAtTheOthers(Walk):
    def step(self, action):
        step = super().step(action)
        return step._replace(reward=step.reward - step.reward.mean())


class SeedsByPlaceInTheLane(Walk):
    def index(self, row):
        return row % self.share


class IgnoresTheSeed(Walk):
    noise_seed = 7


class DrawsFromNumpy(Walk):
    def noise(self, row):
        return np.random.random() - 0.5  # the fault


class ResetsToTheNextEpisode(Walk):
    def reset(self):
        for row in range(self.num_envs):
            self.begin(row)
        return self.observations()


class SavesNoAge(Walk):
    def lane_state(self, lane):
        state = super().lane_state(lane)
        del state["age"]
        return state


class LoadsNoAge(Walk):
    def load_lane_state(self, lane, state):
        load_into(self.lane_state(lane), state | {"age": self.lane_state(lane)["age"]}, "walk")


class SavesNumbers(Walk):
    def lane_state(self, lane):
        return super().lane_state(lane) | {"lane": lane}


class SpeaksInBytes(Walk):
    def render_text(self, env):
        return b"here"


class DrawsInFloats(Walk):
    def render(self, env):
        return np.zeros((4, 4, 3))


@dataclass(frozen=True, kw_only=True)
class WalkConfig:
    num_envs: int = 64
    kind: type = Walk

    def build(self, lanes, device):
        return self.kind(self, lanes, device)


def test_check_env_valid_task_has_no_faults():
    assert check_env(WalkConfig(), steps=60) == []


@pytest.mark.parametrize("id", ["CartPole-v1", "Pendulum-v1"])
def test_check_env_gymnasium_env_has_no_faults(id):
    assert check_env(GymConfig(id=id)) == []


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (ResetsToTheNextEpisode, "A second reset() starts with another obs"),
        (WithoutObserve, "The task has no observations. Inherit lockstep.VecEnv, which has defaults for most."),
        (CountsAllEnvironments, "num_envs is 16, but 3 of 8 lanes host 6 of 16 environments."),
        (RewardsInDoubles, "reward at step 0 is a Tensor of torch.float64 [16]. Make it torch.float32 [16]"),
        (RewardsWithNan, "reward at step 0 is nan in environment 5. Keep it finite"),
        (RewardsAgentsInOneRow, "agent_reward at step 0 is a Tensor of torch.float32 [16]. Make it torch.float32 [16,"),
        (RewardsAnAgentWithInf, "agent_reward at step 0 is inf in environment 4. Keep it finite"),
        (
            RewardsAgentsByPlaceInTheBatch,
            "Run alone, lanes 3 to 5 differ from the same lanes among all 8: agent_reward of environment 6 at step 0",
        ),
        (CountsOncePerLane, "episode_info.age at step 0 is a Tensor of torch.float32 [8]. Make it [16]"),
        (
            PromisesPictures,
            "obs of reset() is a Tensor of torch.float32 [16, 2], which is not a batch of 16 from its space",
        ),
        (LeavesItsSpace, "obs at step 3 lies outside its space"),
        (ObservesSomethingElse, "observations() after step 0 is not the obs of that step."),
        (
            ForgetsTheLastObservation,
            "it is the first observation of the next episode. Copy the last observation to final_obs",
        ),
        (NeverEnds, "No episode ended in 60 steps"),
        (
            SeedsByPlaceInTheBatch,
            "Run alone, lanes 3 to 5 differ from the same lanes among all 8: obs of environment 6 before step 0",
        ),
        (
            LooksAtTheOthers,
            "Run alone, lanes 3 to 5 differ from the same lanes among all 8: reward of environment 6 at step 0",
        ),
        (SeedsByPlaceInTheLane, "16 environments play only 2 distinct games: environment 2 repeats environment 0."),
        (IgnoresTheSeed, "Seeds 0 and 1 give the same episodes."),
        (DrawsFromNumpy, "Two builds with the same seed and the same actions differ: obs of environment 0"),
        (DrawsFromNumpy, "The task draws from the global state of numpy.random"),
        (
            SavesNoAge,
            "Saved on all lanes after 25 steps and loaded on lanes 2 to 6, the episodes continue differently: obs of",
        ),
        (LoadsNoAge, "lane 2 has a different age than was saved. Load all that is saved."),
        (SavesNumbers, "lane_state has values that are not tensors: lane."),
        (SpeaksInBytes, "render_text(0) is bytes. Return a str."),
        (DrawsInFloats, "render(0) is float64 (4, 4, 3). Return uint8 [height, width, 3]"),
    ],
)
def test_check_env_broken_task_reports_fault_and_fix(kind, sentence):
    faults = check_env(WalkConfig(kind=kind), steps=60)
    assert any(sentence in fault for fault in faults), faults


@pytest.mark.parametrize("kind", [RewardsInDoubles, ForgetsTheLastObservation, SavesNoAge, IgnoresTheSeed])
def test_check_env_single_fault_is_reported_once(kind):
    assert len(check_env(WalkConfig(kind=kind), steps=60)) == 1


def test_check_env_deterministic_task_passes_only_with_chance_false():
    config = GymConfig(id="CliffWalking-v1", env_kwargs={"max_episode_steps": 40})
    assert check_env(config, steps=60, chance=False) == []
    assert len(check_env(config, steps=60)) == 2
