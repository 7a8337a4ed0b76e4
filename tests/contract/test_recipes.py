"""The contract of recipes: state round-trips, a resume changes nothing, and two processes train the same agent as one.

Every recipe in `lockstep.registry.RECIPES` is tested here automatically.
"""

import re
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces

from helpers.agents import RecipeAgent
from helpers.multiprocess import together
from lockstep.checkpoint import format as form
from lockstep.checkpoint.lineage import find
from lockstep.cli import main
from lockstep.cli.options import parse_recipe, parse_train, resolve
from lockstep.clock import TrainState
from lockstep.distributed import DistributedOptimizer
from lockstep.inference import LoadedPolicy, build_algorithm, load_recipe
from lockstep.lanes import Lanes
from lockstep.protocols import TaskConfig
from lockstep.pytree import named_leaves
from lockstep.recipes.env_presets import ENV_PRESETS
from lockstep.registry import RECIPES, find_recipe
from lockstep.tasks.env_checker import check_env
from lockstep.tools.play.playback import play_episodes
from lockstep.training_loop import train

ITERATIONS = 4
PLAYED = [name for name in RECIPES if isinstance(find_recipe(name)().task, TaskConfig)]
READ = [name for name in RECIPES if name not in PLAYED]
each_recipe = pytest.mark.parametrize("name", RECIPES)
each_combination = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("gym-tdmpc2", "zoo-ppo"))) for name in RECIPES]
)
"""For longer tests: gym-tdmpc2 has the algorithm of dmc-tdmpc2 and the task of gym-ppo; zoo-ppo has its own tests."""
each_played = pytest.mark.parametrize("name", PLAYED)
each_task = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in ("gym-ppo-lstm", "gym-sac", "gym-tdmpc2")))
        for name in PLAYED
    ],
)
"""For longer tests of tasks: gym-ppo and gym-ddpg have the task of the other Gymnasium recipes."""
each_read = pytest.mark.parametrize("name", READ)


NUMBERS_ONLY = ENV_PRESETS.keys() - {"continuous"}
"""Presets whose code paths are those of another variation. tests/unit/recipes validates their values."""


def variations(names):
    """Parametrize over the command-line words of each recipe, alone and with its presets."""
    presets = {name: [preset for preset in find_recipe(name).presets if preset not in NUMBERS_ONLY] for name in names}
    words = [(name, *more) for name in names for more in [(), *(("--preset", preset) for preset in presets[name])]]
    return pytest.mark.parametrize("words", [pytest.param(each, id=" ".join(each)) for each in words])


each_variation, each_played_variation = variations(RECIPES), variations(PLAYED)


class Killed(Exception):
    """Simulates a kill: no code after it runs."""


def parse(*words):
    """Return the recipe of a command line with smoke settings."""
    start, rest, _ = parse_train([*words, "--smoke"])
    return resolve(parse_recipe(start, rest, "lockstep train"), 1)


def short(name, iterations=ITERATIONS):
    """Return words for a few iterations in exact mode that save after each and evaluate after every other."""
    step = parse(name).algo.samples_per_iteration(parse(name).task)
    settings = {"total_samples": iterations * step, "save_every": step, "log_every": step, "eval_every": 2 * step}
    settings |= {"eval_episodes": 8, "reduction": "exact", "device": "cpu"}
    return [name, *(f"run.{key}={value}" for key, value in settings.items())]


def place(path):
    return [f"run.runs_dir={path.parent}", f"run.name={path.name}"]


def hash_of(path):
    directory = path / "checkpoints"
    return form.hash_checkpoint(directory / str(find(directory)[0]))


class Agent(RecipeAgent):
    """With the state that a checkpoint saves."""

    def shared(self):
        return form.add_prefix(algorithm=self.algorithm.shared_state(), task=self.task.shared_state())

    def lane(self, lane):
        return form.add_prefix(algorithm=self.algorithm.lane_state(lane), task=self.task.lane_state(lane))

    def load(self, shared, lanes):
        """Restore shared and lane states."""
        self.algorithm.load_shared_state(form.strip_prefix(shared, "algorithm"))
        self.task.load_shared_state(form.strip_prefix(shared, "task"))
        for number, state in lanes.items():
            self.algorithm.load_lane_state(number, form.strip_prefix(state, "algorithm"))
            self.task.load_lane_state(number, form.strip_prefix(state, "task"))

    def digests(self):
        """Return digests of all tensors that would be saved."""
        everything = self.shared()
        for number in self.runtime.lanes.local:
            everything |= {f"lane {number} {name}": tensor for name, tensor in self.lane(number).items()}
        return {name: form.digest_tensor(name, tensor) for name, tensor in everything.items()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The undisturbed single-process run of each recipe, trained on first use, and the steps of its environments."""
    made = {}

    def run(name):
        if name not in made:
            words = [*short(name), *place(tmp_path_factory.mktemp("undisturbed") / "run")]
            with pytest.MonkeyPatch.context() as patch:
                made[name] = counted_run(parse(*words), patch)
        return made[name]

    return run


@dataclass(frozen=True)
class CountedRun:
    clock: TrainState
    path: Path
    steps: list[int]
    """Steps of the environments that were built, in the order of building: training first, then evaluations."""


def counted_run(recipe, monkeypatch):
    """Train, and count the steps of all environments."""
    build, steps = type(recipe.task).build, []

    def build_counted(self, lanes, device):
        env = build(self, lanes, device)
        if not hasattr(env, "step"):
            return env  # a data set
        mine, step = len(steps), env.step
        steps.append(0)

        def counted(action):
            steps[mine] += env.num_envs
            return step(action)

        env.step = counted
        return env

    monkeypatch.setattr(type(recipe.task), "build", build_counted)
    result = train(recipe)
    return CountedRun(result.clock, result.path, steps)


# ---------------------------------------------------------------------------------------------------------------- state


@each_variation
def test_recipe_restored_state_is_equal_and_continues_equally(words):
    saved, fresh = Agent(parse(*words)), Agent(parse(*words))
    saved.iterate(2)
    fresh.iterate(1)  # so that state that is not loaded differs
    assert fresh.digests() != saved.digests()
    fresh.load(saved.shared(), {number: saved.lane(number) for number in saved.runtime.lanes.local})
    assert fresh.digests() == saved.digests()
    fresh.clock = replace(saved.clock)
    for agent in (saved, fresh):
        agent.iterate(2)
    assert fresh.digests() == saved.digests()


@each_recipe
def test_recipe_lane_state_does_not_depend_on_the_hosting_process(name):
    whole, part = Agent(parse(name)), Agent(parse(name), hosting=range(3, 5))
    assert whole.runtime.lanes.num_lanes == part.runtime.lanes.num_lanes == 8
    for number in part.runtime.lanes.local:
        assert {key: form.digest_tensor(key, tensor) for key, tensor in whole.lane(number).items()} == {
            key: form.digest_tensor(key, tensor) for key, tensor in part.lane(number).items()
        }
    assert whole.shared().keys() == part.shared().keys()


@each_recipe
def test_recipe_model_state_dict_is_part_of_shared_state_and_trains(name):
    agent = Agent(parse(name))
    weights, shared = agent.algorithm.model_state_dict(), agent.algorithm.shared_state()
    assert weights
    assert all(shared[key] is tensor or shared[key].data_ptr() == tensor.data_ptr() for key, tensor in weights.items())
    before = {key: tensor.detach().clone() for key, tensor in weights.items()}
    agent.iterate()
    assert any(not torch.equal(before[key], tensor) for key, tensor in agent.algorithm.model_state_dict().items())


# --------------------------------------------------------------------------------------------------------------- resume


@each_combination
@pytest.mark.parametrize("iteration", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_recipe_resume_after_kill_matches_undisturbed_run(name, iteration, undisturbed, tmp_path, monkeypatch):
    recipe = parse(*short(name), *place(tmp_path / "run"))
    build = type(recipe.algo).build

    def build_mortal(self, task, runtime):
        algorithm = build(self, task, runtime)
        update = algorithm.update

        def dying(clock):
            if clock.iteration == iteration:
                raise Killed
            return update(clock)

        algorithm.update = dying
        return algorithm

    with monkeypatch.context() as patch:
        patch.setattr(type(recipe.algo), "build", build_mortal)
        with pytest.raises(Killed):
            train(recipe)
    for thread in threading.enumerate():
        if "_write" in thread.name:  # wait for a save in progress
            thread.join()
    assert find(tmp_path / "run" / "checkpoints")[0].samples < recipe.run.total_samples
    result = train(load_recipe(tmp_path / "run"), resume=True)
    assert result.clock == undisturbed(name).clock
    assert hash_of(result.path) == hash_of(undisturbed(name).path)


# ---------------------------------------------------------------------------------------------------- several processes


def trained(words):
    """Train as one process of a group."""
    train(parse(*words))


@each_combination
@pytest.mark.distributed
def test_recipe_on_two_processes_matches_one_process(name, undisturbed, tmp_path):
    path = tmp_path / "two"
    together(trained, 2, [*short(name), *place(path)])
    files = {file.name for file in next((path / "checkpoints").glob("0*")).iterdir()}
    assert {"lanes-0000-0003.safetensors", "lanes-0004-0007.safetensors"} <= files  # there were two
    assert hash_of(path) == hash_of(undisturbed(name).path)


@each_recipe
def test_recipe_seed_determines_the_run(name):
    one, same, other = (Agent(parse(name, f"run.seed={seed}")) for seed in (0, 0, 1))
    for agent in (one, same, other):
        agent.iterate()
    mine, others = one.digests(), other.digests()
    assert same.digests() == mine
    assert any(name.startswith("algorithm.") and others[name] != digest for name, digest in mine.items())


# --------------------------------------------------------------------------------------------------------------- counts


@each_played
def test_recipe_samples_equal_the_environment_steps(name, undisturbed):
    recipe, run = parse(*short(name)), undisturbed(name)
    assert run.steps[0] == run.clock.samples == ITERATIONS * recipe.algo.samples_per_iteration(recipe.task)
    assert len(run.steps) > 1  # evaluations use separate environments and are not counted
    assert run.clock.iteration == ITERATIONS


@each_read
def test_recipe_samples_equal_the_examples_read(name, tmp_path, monkeypatch):
    recipe = parse(*short(name), *place(tmp_path / "run"))
    taken, step = [], DistributedOptimizer.step

    def counted(self, loss, batch, *rest):
        taken.append(int(batch["weight"].sum()))  # padding is not counted
        return step(self, loss, batch, *rest)

    monkeypatch.setattr(DistributedOptimizer, "step", counted)
    clock = train(recipe).clock
    assert sum(taken) == clock.samples >= ITERATIONS * recipe.algo.samples_per_iteration(recipe.task)


@each_variation
def test_recipe_iteration_takes_samples_per_iteration(words):
    recipe = parse(*words)
    agent = Agent(recipe)
    agent.iterate()
    assert agent.clock.samples == agent.algorithm.samples == recipe.algo.samples_per_iteration(recipe.task)
    # Samples are global: they do not depend on the lanes hosted here.
    assert Agent(recipe, hosting=range(3, 5)).algorithm.samples == agent.algorithm.samples


@each_recipe
def test_recipe_updates_increase_with_every_iteration(name):
    agent = Agent(parse(name))
    counts = [agent.algorithm.updates]
    for _ in range(2):
        agent.iterate()
        counts.append(agent.algorithm.updates)
    assert 0 == counts[0] < counts[1] < counts[2]


# --------------------------------------------------------------------------------------------------------------- shapes


def batched_space(space, action):
    """Return whether every row of a batch of actions is in a space."""
    rows = action.numpy()
    if isinstance(space, spaces.Box):  # a policy may exceed the bounds; the task clips
        return rows.shape[1:] == space.shape
    return all(space.contains(row) for row in rows.astype(space.dtype))


@each_played_variation
def test_policy_act_returns_valid_actions_and_same_shape_recurrent_state(words):
    agent = Agent(parse(*words))
    policy, obs = agent.algorithm.policy(), agent.task.reset()
    memory = policy.initial_state(agent.task.num_envs)
    action, after = policy.act(obs, memory)
    assert len(action) == agent.task.num_envs
    assert batched_space(agent.task.action_space, action)
    before, now = named_leaves(memory), named_leaves(after)
    assert {key: (x.shape, x.dtype) for key, x in before.items()} == {key: (x.shape, x.dtype) for key, x in now.items()}
    assert torch.equal(policy.act(obs, memory)[0], action)  # deterministic, without exploration
    agent.task.step(action)


@each_recipe
def test_recipe_metrics_have_a_row_for_each_local_lane(name):
    agent = Agent(parse(name), hosting=range(3, 5))
    agent.task.on_iteration_start(agent.clock)
    metrics = agent.algorithm.collect(agent.clock)
    metrics += agent.algorithm.update(agent.clock)
    assert metrics.per_lane.keys() | metrics.global_sums.keys()
    assert {table.shape for table in metrics.per_lane.values()} <= {(2, 2)}
    assert {pair.shape for pair in metrics.global_sums.values()} <= {(2,)}


# ----------------------------------------------------------------------------------------------------------------- task


@each_task
def test_recipe_task_passes_check_env(name):
    # Short episodes in environments of a millisecond a step
    steps = {"dmc-tdmpc2": 60, "sim-ppo": 60, "zoo-ppo": 30}.get(name, 200)
    assert check_env(parse(name).task, steps) == []


@each_played
def test_task_build_rejects_lanes_that_do_not_divide_num_envs(name):
    task = parse(name).task
    with pytest.raises(ValueError, match="cannot share evenly"):
        task.build(Lanes(task.num_envs - 1, range(1), 0), torch.device("cpu"))


# ---------------------------------------------------------------------------------------------------------------- smoke


@each_recipe
def test_recipe_smoke_run_finishes_and_evaluates(name, tmp_path, capsys):
    assert main(["train", name, "--smoke", *place(tmp_path / "run"), "run.device=cpu"]) == 0
    told = capsys.readouterr().out
    budget = parse(name).run.total_samples
    assert f"of {budget:,} steps" in told
    assert f"evaluation: {'return' if name in PLAYED else 'mae'}" in told
    done = find(tmp_path / "run" / "checkpoints")[0].samples
    assert done == budget or (name in READ and budget <= done < budget + parse(name).algo.batch_size)
    farewell = rf"^Done at {done:,} steps in \d+ s( \(evaluations \d+%\))?, best evaluation \S+: {tmp_path / 'run'}$"
    assert re.search(farewell, told, re.MULTILINE)
    assert f"lockstep report {tmp_path / 'run'}\n" in told
    path = tmp_path / "run"
    assert {file.name for file in path.iterdir()} >= {"config.yaml", "metrics.jsonl", "tensorboard", "checkpoints"}
    assert main(["eval", str(path), "--episodes", "8"]) == 0
    assert ("return mean" if name in PLAYED else "mae") in capsys.readouterr().out


@each_recipe
def test_recipe_records_video_by_default_but_not_in_smoke_runs(name):
    assert not parse(name).run.record_video
    assert find_recipe(name)().run.record_video


@each_recipe
def test_recipe_playback_renders_text_and_images_of_one_size(name):
    recipe = parse(name)
    scenes = play_episodes(LoadedPolicy(build_algorithm(recipe).policy(), recipe, torch.device("cpu")), 1, 1, 8)
    seen = [(scene.render_text(), scene.render().copy()) for scene in scenes]
    assert len(seen) > 1
    assert {(frame.dtype, frame.shape) for _, frame in seen} == {(np.dtype(np.uint8), seen[0][1].shape)}
    assert all(text.strip() and frame.std() > 0 for text, frame in seen)
    assert len({text for text, _ in seen}) == len(seen)  # every step has its own text
    assert any((frame != seen[0][1]).any() for _, frame in seen)  # the image changes
