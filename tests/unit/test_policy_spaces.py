"""Policies with action masks, mixed actions and a critic part: trained, loaded, exported."""

import numpy as np
import pytest
import torch

import lockstep
from helpers.gym_toys import Workshop
from lockstep.cli import main
from lockstep.config import ConfigError, apply_overrides
from lockstep.pytree import named_leaves
from lockstep.registry import find_recipe
from lockstep.training_loop import train

SHORT = {"run.total_samples": 64, "run.eval_every": None, "run.save_every": 64, "run.device": "cpu"}
PPO = {"algo.rollout_steps": 8, "algo.batch_size": 64, "algo.epochs": 2}
LSTM = PPO | {"algo.bptt_steps": 4, "algo.recurrent.hidden_size": 16}
DDPG = {"algo.batch_size": 16, "algo.rollout_steps": 4, "algo.learning_starts": 32, "algo.buffer_size": 64}
VAULT, WORKSHOP = {"task.id": "helpers.gym_toys:LockstepVault-v0"}, {"task.id": "helpers.gym_toys:LockstepWorkshop-v0"}
HINT = {"task.id": "helpers.gym_toys:LockstepHint-v0"}
RUNS = {
    "masked": ("gym-ppo-lstm", LSTM | VAULT),
    "mixed": ("gym-ppo", PPO | WORKSHOP),
    "hinted": ("gym-ppo-lstm", LSTM | HINT | {"algo.normalize_obs": True}),
    "ddpg": ("gym-ddpg", DDPG | VAULT | {"algo.encoder.hidden_sizes": 16}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A short run of each kind. The environment of `masked` and `ddpg` raises if an action is illegal."""
    place = tmp_path_factory.mktemp("runs")
    for name, (recipe, settings) in RUNS.items():
        where = {"run.runs_dir": str(place), "run.name": name}
        train(apply_overrides(find_recipe(recipe)(), SHORT | settings | where))
    return place


def drawn(count, seed=0):
    """Random observations of Vault and masks with two or more legal choices."""
    draw = torch.Generator().manual_seed(seed)
    mask = (torch.rand(count, 6, generator=draw) < 0.2).to(torch.uint8)
    mask.scatter_(1, torch.stack([torch.randperm(6, generator=draw)[:2] for _ in range(count)]), 1)
    return torch.rand(count, 7, generator=draw), mask


@pytest.mark.parametrize("name", ["masked", "ddpg"])
def test_loaded_policy_acts_within_mask(runs, name):
    policy = lockstep.load(runs / name)
    obs, mask = drawn(500)
    for deterministic in (True, False):
        policy.reset()
        actions = policy.act({"observation": obs, "action_mask": mask}, deterministic)
        assert mask.gather(1, torch.from_numpy(actions).unsqueeze(1)).all()
    policy.reset()
    single = policy.act(obs[0].numpy(), action_mask=np.eye(6, dtype=np.int8)[4])
    assert (single, single.shape) == (4, ())
    policy.reset()
    with pytest.raises(ConfigError, match=r"trained with action masks(.|\n)*act\(obs, action_mask=mask\)"):
        policy.act(obs)


def test_loaded_policy_returns_mixed_actions_in_form_of_space(runs):
    policy = lockstep.load(runs / "mixed")
    batch = policy.act(np.eye(3, dtype=np.float32))
    assert {name: np.shape(part) for name, part in batch.items() if name != "rest"} == {"push": (3, 2), "tool": (3,)}
    single = policy.act(np.eye(3, dtype=np.float32)[1])
    assert single["push"].tolist() == pytest.approx(batch["push"][1].tolist(), abs=1e-6)
    assert single["rest"][1].tolist() == batch["rest"][1][1].tolist()
    assert policy.action_space.contains(single)
    assert list(policy.action_space) == list(Workshop.action_space)
    with pytest.raises(ConfigError, match="trained without action masks"):
        policy.act(np.eye(3, dtype=np.float32), action_mask=np.ones(3))


@pytest.mark.parametrize("name", ["masked", pytest.param("mixed", marks=pytest.mark.slow)])
def test_export_onnx_equals_policy_with_mask_as_input(runs, tmp_path, name):
    import onnxruntime

    file = tmp_path / "policy.onnx"
    assert main(["export", str(runs / name), "--to", "onnx", "--out", str(file)]) == 0
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    policy = lockstep.load(runs / name).policy
    obs, mask = drawn(40, seed=1)
    given = {"observation": obs, "action_mask": mask} if name == "masked" else torch.eye(3)
    memory = policy.initial_state(len(obs))
    inputs = named_leaves(given, "obs") | (named_leaves(memory, "memory") if memory else {})
    assert [part.name for part in session.get_inputs()] == list(inputs)
    found = session.run(None, {key: x.numpy() for key, x in inputs.items()})
    action, outputs, _ = policy.forward(given, memory)
    np.testing.assert_allclose(found[1], outputs.numpy(), atol=1e-5, rtol=0)
    np.testing.assert_allclose(found[0], action.numpy(), atol=1e-5, rtol=0)
    if name == "masked":
        assert mask.gather(1, torch.from_numpy(found[0]).unsqueeze(1)).all()
        assert len(set(found[0].tolist())) > 1


@pytest.mark.parametrize("to", ["onnx", pytest.param("pt2", marks=pytest.mark.slow)])
def test_policy_with_critic_part_is_used_and_exported_without_it(runs, tmp_path, to):
    file, policy = tmp_path / f"policy.{to}", lockstep.load(runs / "hinted")
    assert list(policy.observation_space) == ["noise"]
    noise = np.arange(6, dtype=np.float32).reshape(3, 2)
    actions = policy.act({"noise": noise})
    policy.reset()
    assert (policy.act({"noise": noise, "critic": np.zeros((3, 3), np.float32)}) == actions).all()
    assert list(policy._memory) == ["policy"]
    assert main(["export", str(runs / "hinted"), "--to", to, "--out", str(file)]) == 0
    if to == "onnx":
        import onnxruntime

        inputs = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"]).get_inputs()
        assert [part.name for part in inputs] == ["obs.noise", "memory.policy.hidden", "memory.policy.cell"]
    assert list(policy.policy.normalizer.frozen) == ["noise", "critic"]


@pytest.mark.parametrize(
    ("name", "problem"), [("masked", "recurrent"), ("mixed", "actions are"), ("hinted", "critic only")]
)
def test_export_sb3_of_what_sb3_does_not_support_is_rejected(runs, tmp_path, capsys, name, problem):
    assert main(["export", str(runs / name), "--to", "sb3", "--out", str(tmp_path / "x.zip")]) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert "--to onnx" in error


@pytest.mark.parametrize(
    ("recipe", "settings", "problem"),
    [
        ("gym-ddpg", WORKSHOP, "Use Discrete or a bounded one-dimensional Box"),
        ("gym-tdmpc2", WORKSHOP, "not supported by TD-MPC2"),
        ("gym-tdmpc2", VAULT, "not supported by TD-MPC2"),
        ("gym-ddpg", VAULT | {"task.env_kwargs": {"parts": 2}}, "Use Discrete or a bounded"),
        ("gym-ddpg", HINT, "DDPG does not support the part critic"),
    ],
)
def test_algorithm_rejects_spaces_that_it_does_not_support(tmp_path, recipe, settings, problem):
    found = find_recipe(recipe)
    settings = found.smoke_overrides | settings | {"run.runs_dir": str(tmp_path), "run.device": "cpu"}
    with pytest.raises(ConfigError, match=problem):
        train(apply_overrides(found(), settings))
