"""Every recipe exports to every format, and Stable-Baselines3 loads the exports made for it."""

import json
import subprocess
import venv
from pathlib import Path

import numpy as np
import pytest
import torch

import lockstep
from lockstep.cli import main
from lockstep.config import apply_overrides
from lockstep.registry import RECIPES, find_recipe
from lockstep.tools.export.exportable_policy import draw_observations
from lockstep.training_loop import train

pytestmark = pytest.mark.slow

SOURCE = Path(__file__).parents[2] / "src"
FORMATS = ("safetensors", "onnx", "pt2")


def trained(recipe, place, **settings):
    kind = find_recipe(recipe)
    where = {"run.runs_dir": str(place), "run.name": recipe, "run.device": "cpu", "run.eval_every": None}
    return train(apply_overrides(apply_overrides(kind(), kind.smoke_overrides), settings | where)).path


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_recipe_exports_to_every_format(capsys, tmp_path, recipe):
    run = trained(recipe, tmp_path)
    for to in FORMATS:
        assert main(["export", str(run), "--to", to]) == 0, capsys.readouterr().err
        assert "compared with the policy on" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------------------ SB3

LOAD = """
import json, sys
import numpy as np
from stable_baselines3 import PPO
model = PPO.load(sys.argv[1])
print(json.dumps(model.predict(np.load(sys.argv[2]), deterministic=True)[0].tolist()))
"""
SAVE = """
import sys
import numpy as np
import torch
from stable_baselines3 import PPO
model = PPO("MlpPolicy", "CartPole-v1", n_steps=64, seed=1, device="cpu",
            policy_kwargs={"net_arch": [24, 16], "activation_fn": torch.nn.ReLU})
model.learn(128)
model.save(sys.argv[1])
np.save(sys.argv[2], model.predict(np.load(sys.argv[3]), deterministic=True)[0])
"""


@pytest.fixture(scope="module")
def sb3(tmp_path_factory):
    """Python of an environment with Stable-Baselines3 and the imports of Lockstep's encoders, without Lockstep."""
    place = tmp_path_factory.mktemp("sb3")
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    wanted = ["stable-baselines3", f"torch=={torch.__version__.partition('+')[0]}", "numba", "pyyaml"]
    subprocess.run([python, "-m", "pip", "install", "-q", *wanted], check=True)
    return python


def ask(python, code, *words, path=""):
    ended = subprocess.run(
        [python, "-c", code, *map(str, words)], capture_output=True, text=True, env={"PYTHONPATH": path}
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize(
    ("recipe", "settings", "path"),
    [
        ("gym-ppo", {}, ""),  # a plain MLP is SB3's own class, so Lockstep is not needed
        ("gym-ppo", {"task.id": "Pendulum-v1", "algo.normalize_obs": True}, str(SOURCE)),
        ("snake-ppo", {}, str(SOURCE)),
    ],
)
def test_sb3_loads_an_export_and_predicts_the_same(capsys, tmp_path, sb3, recipe, settings, path):
    run = trained(recipe, tmp_path, **settings)
    assert main(["export", str(run), "--to", "sb3", "--out", str(tmp_path / "policy.zip")]) == 0
    policy = lockstep.load(run)
    obs = draw_observations(policy.recipe, 10, seed=5).numpy()
    np.save(tmp_path / "obs.npy", obs)
    found = json.loads(ask(sb3, LOAD, tmp_path / "policy.zip", tmp_path / "obs.npy", path=path))
    np.testing.assert_allclose(found, policy.act(obs), atol=1e-6)


def test_import_of_an_sb3_model_predicts_the_same(capsys, tmp_path, sb3):
    obs = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)
    np.save(tmp_path / "obs.npy", obs)
    ask(sb3, SAVE, tmp_path / "theirs.zip", tmp_path / "theirs.npy", tmp_path / "obs.npy")
    words = [
        "import",
        str(tmp_path / "theirs.zip"),
        "--recipe",
        "gym-ppo",
        f"run.runs_dir={tmp_path}",
        "run.name=brought",
    ]
    assert main(words) == 0, capsys.readouterr().err
    np.testing.assert_array_equal(lockstep.load(tmp_path / "brought").act(obs), np.load(tmp_path / "theirs.npy"))
