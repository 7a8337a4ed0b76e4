"""Gymnasium environments in a Python file of the user, outside the module search path."""

import sys
from types import ModuleType

import pytest
import torch
import yaml
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from helpers.multiprocess import command
from helpers.run_fixtures import CONFIG
from helpers.vector_toys import Drift
from lockstep.config import ConfigError
from lockstep.inference import load_recipe
from lockstep.lanes import Lanes
from lockstep.tasks.gym.env import GymConfig
from lockstep.tasks.gym.env_file import load_env_file, with_absolute_path
from lockstep.tasks.gym.sync_envs import make

SOURCE = """
import gymnasium, reach_sizes

class Reach(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (reach_sizes.SIZE,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observation_space.low, {}

    def step(self, action):
        self.steps += 1
        return self.observation_space.high, float(action), False, self.steps == 10, {}

gymnasium.register("Reach-v0", entry_point="reach_env:Reach")
"""


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """The working directory, with a file that registers an environment and imports a module next to it."""
    (tmp_path / "reach_env.py").write_text(SOURCE)
    (tmp_path / "reach_sizes.py").write_text("SIZE = 2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield tmp_path
    for name in ("reach_env", "reach_sizes"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("id", ["reach_env:Reach-v0", "reach_env.py:Reach-v0", "./reach_env.py:Reach-v0"])
def test_id_of_file_in_working_directory_becomes_absolute(directory, id):
    absolute = with_absolute_path(id)
    assert absolute == f"{directory}/reach_env.py:Reach-v0"
    assert with_absolute_path(absolute) == absolute


@pytest.mark.parametrize("id", ["CartPole-v1", "ALE/Pong-v5", "json:Name-v0", "xml.dom:Name-v0", "not_there:Name-v0"])
def test_id_of_installed_module_is_unchanged(directory, id):
    (directory / "json.py").touch()  # it must not replace the installed module
    assert with_absolute_path(id) == id


def test_file_is_executed_once_and_imports_modules_next_to_it(directory):
    envs = [make(f"{directory}/reach_env.py:Reach-v0", {}) for _ in range(2)]
    assert type(envs[0].unwrapped) is type(envs[1].unwrapped) is sys.modules["reach_env"].Reach
    assert envs[0].observation_space.shape == (2,)


@pytest.mark.parametrize("id", ["reach_env:Reach", "reach_env.py:Reach"])
def test_class_in_file_needs_no_registration(directory, id):
    envs = GymConfig(id=id, num_envs=2, env_kwargs={"max_episode_steps": 7}).with_absolute_paths()
    assert envs.id == f"{directory}/reach_env.py:Reach"
    built = envs.build(Lanes(1, range(1), 0), torch.device("cpu"))
    assert built.max_episode_steps == 7
    assert type(built._envs.envs[0].unwrapped) is sys.modules["reach_env"].Reach


def test_class_from_python_is_stored_by_its_file_or_module(directory):
    load_env_file(directory / "reach_env.py")
    assert GymConfig(id=sys.modules["reach_env"].Reach).id == f"{directory}/reach_env.py:Reach"
    assert GymConfig(id=Drift).id == "helpers.vector_toys:Drift"
    assert GymConfig(id=CartPoleEnv).id == "gymnasium.envs.classic_control.cartpole:CartPoleEnv"


def test_class_that_other_processes_cannot_import_raises(monkeypatch):
    class Local(CartPoleEnv):
        pass

    with pytest.raises(ConfigError, match="inside a function"):
        GymConfig(id=Local)
    Local.__qualname__, Local.__module__ = "Local", "__main__"
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    with pytest.raises(ConfigError, match="interactive session"):
        GymConfig(id=Local)


def test_class_of_running_script_is_not_loaded_again(directory, monkeypatch):
    script = directory / "script.py"
    script.write_text("0 / 0")
    main = ModuleType("__main__")
    main.__file__, main.Reach = str(script), type("Reach", (CartPoleEnv,), {"__module__": "__main__"})
    monkeypatch.setitem(sys.modules, "__main__", main)
    id = GymConfig(id=main.Reach).id
    assert id == f"{script}:Reach"
    assert type(make(id, {}).unwrapped) is main.Reach


def test_file_that_fails_is_executed_again(directory):
    (directory / "reach_sizes.py").write_text("0 / 0")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            load_env_file(directory / "reach_env.py")


@pytest.mark.parametrize(("name", "words"), [("json.py", "same name as another module, json"), ("gone.py", "no file")])
def test_unusable_file_raises(directory, name, words):
    (directory / "json.py").write_text("0 / 0")
    with pytest.raises(ConfigError, match=words):
        make(f"{directory / name}:Reach-v0", {})


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("id", "flags"),
    [
        pytest.param("reach_env:Reach-v0", [], marks=pytest.mark.slow),
        pytest.param("reach_env:Reach", ["task.num_workers=2"], marks=pytest.mark.slow),
        ("reach_env.py:Reach-v0", ["--procs", "2", "task.num_workers=1"]),
    ],
)
def test_env_in_working_directory_trains_and_plays_elsewhere(directory, tmp_path_factory, id, flags):
    words = ["--smoke", "--task.id", id, "run.name=own", "run.total_samples=512", *flags]
    lockstep = [sys.executable, "-P", "-m", "lockstep"]
    trained = command([*lockstep, "train", "gym-ppo", *words], directory=directory)
    assert trained.code == 0, trained.output
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    played = command([*lockstep, "play", directory / "runs" / "own"], directory=elsewhere)
    assert played.code == 0, played.output
    assert "reach_env.py:Reach" in played.output


@pytest.mark.parametrize(
    ("place", "words"), [("{run}/evil.py", "the environment of .* is a file inside it"), ("evil.py", "not an absolute")]
)
def test_run_directory_executes_no_environment_inside_it(directory, place, words):
    run = directory / "run"
    run.mkdir()
    for folder in (directory, run):
        (folder / "evil.py").write_text(f"open({str(directory / 'executed')!r}, 'w')")
    config = CONFIG | {"algo": {}, "task": {"id": f"{place.format(run=run)}:Evil-v0"}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError, match=words):
        load_recipe(run)
    assert not (directory / "executed").exists()
