"""Vector environments as a task: seeds, episode ends, restoring, and when they are used."""

import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from helpers.gym_toys import House, Vault
from helpers.vector_toys import Drift
from lockstep.config import ConfigError
from lockstep.lanes import Lanes
from lockstep.pytree import named_leaves
from lockstep.rng import RandomStream
from lockstep.tasks.env_checker import check_env
from lockstep.tasks.gym.env import GymConfig
from lockstep.tasks.gym.spaces import sample_action
from lockstep.tasks.gym.sync_envs import SyncEnvs
from lockstep.tasks.gym.vector_envs import VectorEnvs
from lockstep.tasks.gym.vector_plan import VectorPlan

CPU = torch.device("cpu")
DRIFT = "helpers.vector_toys:Drift"


def build(id=DRIFT, lanes=range(8), count=8, num_envs=16, **settings):
    settings = {"num_envs": num_envs, **settings}
    return GymConfig(id=id, **settings).build(Lanes(count, lanes, 0), CPU)


# Autoreset modes and seeding


@pytest.mark.parametrize(
    ("mode", "seeding", "plan"),
    [
        ("SameStep", "rows", VectorPlan(2, 0, seed_form="list")),
        ("SameStep", "together", VectorPlan(2, 20, shared_seed=True)),
        ("SameStep", "constructor", VectorPlan(2, 20, shared_seed=True, seeds_constructor=True)),
        ("Disabled", "rows", VectorPlan(2, 0, seed_form="list")),
        ("Disabled", "together", VectorPlan(1, 0)),
        ("NextStep", "rows", VectorPlan(1, 0)),
        ("NextStep", "constructor", VectorPlan(1, 10, seeds_constructor=True)),
    ],
)
def test_vector_env_of_each_kind_fulfills_contract(mode, seeding, plan):
    config = GymConfig(id=DRIFT, env_kwargs={"mode": mode, "seeding": seeding}, max_replay_steps=20)
    envs = config.build(Lanes(4, range(4), 0), CPU)
    assert envs._envs._plan == plan._replace(instance_envs=min(plan.instance_envs, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a restore that starts episodes again warns
        assert check_env(config, steps=40) == []


@pytest.mark.parametrize("mode", ["SameStep", "Disabled", "NextStep"])
def test_episode_that_ends_returns_final_obs_and_starts_next(mode):
    envs = build(env_kwargs={"mode": mode})
    lengths, seen = np.zeros(16), 0
    for _ in range(30):
        step = envs.step(torch.ones(16, dtype=torch.int64))
        ended = (step.terminated | step.truncated).numpy()
        lengths += 1
        assert (step.final_obs[ended][:, 1].numpy() == lengths[ended]).all()
        assert (step.final_obs[ended][:, 0] == step.reward[ended]).all()
        assert torch.equal(step.final_obs[ended][:, 0].abs() > 1, step.terminated[ended])
        lengths[ended] = 0
        assert (step.obs[:, 1].numpy() == lengths).all()
        seen += ended.sum()
    assert seen > 48


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_vector_env_equals_its_single_envs(mode):
    """Dict observations, MultiDiscrete actions, and `final_obs` as an array of objects."""
    id = f"LockstepHouses{mode.name}-v0"
    gymnasium.register(id, vector_entry_point=lambda num_envs: SyncVectorEnv([House] * num_envs, autoreset_mode=mode))
    single, vector = build("LockstepHouse-v0"), build(id)
    assert vector._envs._plan == VectorPlan(2, 0, seed_form="list")
    for time in range(40):
        action = sample_action(single.action_space, RandomStream(1, "actions"), time, 16)
        expected, actual = single.step(action), vector.step(action)
        ended = expected.terminated
        assert torch.equal(actual.terminated, ended)
        for name, leaf in named_leaves({"obs": expected.obs, "final_obs": expected.final_obs}).items():
            rows = ended if name.startswith("final") else slice(None)
            assert torch.equal(named_leaves({"obs": actual.obs, "final_obs": actual.final_obs})[name][rows], leaf[rows])
        if time == 25:
            for lane in range(8):
                vector.load_lane_state(lane, single.lane_state(lane))
    assert vector._restarted == 0


def register_vaults(id, mode, **kwargs):
    gymnasium.register(
        id,
        vector_entry_point=lambda num_envs: SyncVectorEnv([lambda: Vault(**kwargs)] * num_envs, autoreset_mode=mode),
    )


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED, AutoresetMode.NEXT_STEP])
@pytest.mark.parametrize("where", ["info", "obs"])
@pytest.mark.parametrize("parts", [1, 2])
def test_action_masks_of_vector_env_equal_those_of_single_envs(mode, where, parts):
    """The environment raises an error if an action is illegal, also in the trial of its seeds and in a replay."""
    id, kwargs = f"LockstepVaults{mode.name}{where}{parts}-v0", {"where": where, "parts": parts}
    register_vaults(id, mode, **kwargs)
    single, vector = build("LockstepVault-v0", env_kwargs=kwargs), build(id, vectorization_mode="vector_entry_point")
    assert isinstance(vector._envs, VectorEnvs)
    assert vector.observation_space == single.observation_space
    for time in range(10):
        mask = single.observations()["action_mask"]
        assert torch.equal(vector.observations()["action_mask"], mask)
        legal = mask.view(16, parts, 6).argmax(2)
        action = legal[:, 0] if parts == 1 else legal
        expected, actual = single.step(action), vector.step(action)
        assert torch.equal(actual.terminated, expected.terminated)
        assert torch.equal(actual.reward, expected.reward)
        if time == 7:
            for lane in range(8):
                vector.load_lane_state(lane, single.lane_state(lane))
    assert vector._restarted == 0


def test_vector_env_with_masks_fulfills_contract():
    register_vaults("LockstepVaultRow-v0", AutoresetMode.SAME_STEP)
    assert check_env(GymConfig(id="LockstepVaultRow-v0"), steps=40) == []


def test_use_action_mask_false_needs_single_envs():
    register_vaults("LockstepVaultHall-v0", AutoresetMode.SAME_STEP)
    with pytest.raises(ConfigError, match=r"--task\.use-action-mask needs single environments"):
        build("LockstepVaultHall-v0", use_action_mask=False)


def test_shared_seed_truncates_episodes_and_is_drawn_again():
    envs = build(env_kwargs={"seeding": "together"}, max_replay_steps=3)
    for time in range(1, 8):
        step = envs.step(torch.ones(16, dtype=torch.int64))
        assert bool((step.terminated | step.truncated).all()) == (time % 3 == 0)
        assert envs._episode.tolist() == [time // 3] * 16
    assert envs.lane_state(2)["steps"].tolist() == [1, 1]


def test_info_of_final_step_is_logged():
    envs = build(info_keys=("walked", "other"))
    for _ in range(9):
        step = envs.step(torch.ones(16, dtype=torch.int64))
        ended = step.terminated | step.truncated
        assert torch.equal(step.episode_info["walked"][ended], step.final_obs[ended][:, 1])
    assert step.episode_info["other"].isnan().all()


def test_restore_that_does_not_match_starts_all_rows_of_a_shared_seed_again():
    envs = build(env_kwargs={"seeding": "together"}, lanes=range(1))
    for _ in range(5):
        envs.step(torch.ones(2, dtype=torch.int64))
    state = envs.lane_state(0)
    state["obs"][1, 0] += 1
    envs.load_lane_state(0, state)
    with pytest.warns(UserWarning, match="2 of the 2 environments of this process could not be restored"):
        envs.observations()
    assert envs.lane_state(0)["episode"].tolist() == [1, 1]


# Choice between vector and single environments


def test_auto_uses_vector_env_if_its_rows_can_be_stepped_together():
    def single(**kwargs):
        raise AssertionError("a single environment was made")

    for mode in AutoresetMode:
        gymnasium.register(f"LockstepAuto{mode.name}-v0", single, vector_entry_point=Drift, kwargs={"mode": mode.value})
    assert isinstance(build("LockstepAutoSAME_STEP-v0")._envs, VectorEnvs)
    assert isinstance(build("LockstepAutoDISABLED-v0")._envs, VectorEnvs)
    for settings in ({"id": "LockstepAutoNEXT_STEP-v0"}, {"id": "LockstepAutoDISABLED-v0", "env_kwargs": {"other": 1}}):
        with pytest.raises(AssertionError, match="a single environment was made"):
            build(**settings)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"id": "CartPole-v1"}, SyncEnvs),  # its vector environment resets in the next step
        ({"id": "CartPole-v1", "vectorization_mode": "vector_entry_point"}, VectorEnvs),
        ({"id": "CartPole-v1", "mask_velocity": True}, SyncEnvs),
        ({"id": "helpers.vector_toys:LockstepDrift-v0"}, VectorEnvs),
    ],
)
def test_vectorization_mode_selects_environments(settings, kind):
    envs = build(**settings)
    assert isinstance(envs._envs, kind)
    assert len(envs.step(torch.ones(16, dtype=torch.int64)).reward) == 16


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_workers": 1}, "--task.num-workers needs single environments"),
        ({"id": "CartPole-v1", "vectorization_mode": "vector_entry_point", "mask_velocity": True}, "--task.mask-veloc"),
        ({"id": "Pendulum-v1", "vectorization_mode": "vector_entry_point"}, "Pendulum-v1 has no vector entry point"),
        ({"id": "helpers.vector_toys:Undeclared"}, "does not say how its environments are reset"),
        ({"env_kwargs": {"gravity": 1}}, "unexpected keyword argument 'gravity'"),
        ({"id": "helpers.vector_toys:make_drift"}, "neither a registered environment nor a class"),
        ({"id": "subprocess:Popen"}, "neither a registered environment nor a class"),
    ],
)
def test_unusable_vector_settings_raise(settings, message):
    with pytest.raises(ConfigError, match=message):
        build(**settings)


def test_same_step_without_final_obs_raises():
    envs = build(env_kwargs={"final_obs": False, "distance": 0.0})
    with pytest.raises(ConfigError, match=r"(?s)does not return their last observation.*info\['final_obs'\]"):
        envs.step(torch.ones(16, dtype=torch.int64))


def test_reset_that_ignores_its_seed_raises():
    class Unseeded(Drift):
        def __init__(self, num_envs):
            super().__init__(num_envs, seeding="constructor")

    gymnasium.register("LockstepUnseeded-v0", vector_entry_point=Unseeded)
    with pytest.raises(ConfigError, match="does not lead to the same episode twice"):
        build("LockstepUnseeded-v0")


# Atari


def test_atari_uses_vector_env_with_standard_preprocessing():
    pytest.importorskip("ale_py")
    config = GymConfig(id="ALE/Pong-v5", num_envs=4)
    envs = config.build(Lanes(2, range(1), 0), CPU)
    assert envs._envs._plan == VectorPlan(2, 5_000, seed_form="array")
    obs = envs.step(torch.zeros(2, dtype=torch.int64)).obs
    assert obs.shape == (2, 4, 84, 84)
    assert torch.equal(torch.from_numpy(envs.render(1))[::3, ::3, 0], obs[1, -1])
    envs.close()
    assert config.with_split("validation").env_kwargs == {"reward_clipping": False, "episodic_life": False}
    assert config.with_split("train") == config
    for single in (GymConfig(id=config.id, env_kwargs={"obs_type": "ram"}), GymConfig(id="CartPole-v1")):
        assert single.with_split("test") == single


def test_atari_lane_restored_alone_continues_as_among_others():
    pytest.importorskip("ale_py")
    config = GymConfig(id="ALE/Breakout-v5", num_envs=4, env_kwargs={"episodic_life": True}, max_replay_steps=90)
    whole, part = (config.build(Lanes(2, lanes, 0), CPU) for lanes in (range(2), range(1, 2)))
    actions = torch.from_numpy(np.random.default_rng(0).integers(4, size=(90, 4)))
    for time in range(80):
        whole.step(actions[time])
        if time < 5:
            part.step(actions[time + 1, 2:])  # another course
    assert len({*whole._steps[2:].tolist()}) == 2  # seeded at different times
    assert whole._episode[2:].any()
    part.load_lane_state(1, whole.lane_state(1))
    assert part._restarted == 0
    for time in range(80, 90):
        expected, actual = whole.step(actions[time]), part.step(actions[time, 2:])
        assert torch.equal(actual.obs, expected.obs[2:])
        assert torch.equal(actual.reward, expected.reward[2:])
    whole.close(), part.close()
