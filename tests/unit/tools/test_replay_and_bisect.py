"""`lockstep replay` repeats an update of a run, and `lockstep bisect` names where two runs differ."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.flipped_recipe import ITERATION, LANE, write_recipe
from helpers.tiny_recipes import hash_of, tiny
from lockstep.cli import main
from lockstep.cli.worker_spec import run_spec
from lockstep.config import apply_overrides
from lockstep.io.jsonl import DIGESTS, read_jsonl
from lockstep.launch import launcher
from lockstep.registry import find_recipe
from lockstep.tools.bisect.search import first_update
from lockstep.tools.replay.digests import first_difference
from lockstep.training_loop import train

ITERATIONS = 6
FLIP = 5


@pytest.fixture
def lockstep(monkeypatch, capfd):
    """Run a command whose trainings take place in this process; return its exit code and what it printed."""

    def train_here(arguments, processes, environment=None):
        code = run_spec(Path(arguments[-1]))
        return f"exit code {code}" if code not in (0, 75) else ""

    monkeypatch.setattr(launcher, "launch_captured", train_here)
    monkeypatch.setenv("COLUMNS", "1000")

    def command(*words):
        capfd.readouterr()
        code = main([*map(str, words)])
        return code, " ".join("".join(capfd.readouterr()).split())

    return command


def walk(directory, name, **settings):
    """Train the recipe in a file of its own."""
    files = {key: settings.pop(key) for key in ("flip", "keep", "bit") if key in settings}
    file = write_recipe(directory / f"{name}.py", ITERATIONS, **files)
    recipe = find_recipe(str(file))()
    return train(apply_overrides(recipe, {"run": {"runs_dir": str(directory / "runs"), "name": name, **settings}})).path


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs that differ by one bit, with a checkpoint every two iterations."""
    directory = tmp_path_factory.mktemp("bisect")
    return walk(directory, "before", keep=2 * ITERATION), walk(directory, "after", keep=2 * ITERATION, flip=FLIP)


# -------------------------------------------------------------------------------------------------------------- replay


def test_replay_dumps_the_update_of_the_run(runs, lockstep, tmp_path):
    code, told = lockstep("replay", runs[0], "--update", 8, "--dump", tmp_path / "dump")
    assert code == 0, told
    assert "Replaying from 256 samples" in told  # the checkpoint before iteration 4
    assert "The replay has the digests of the run (2 of 2)" in told
    assert "Update 8, in iteration 4: loss (iteration 4, epoch 1, minibatch 2): loss " in told
    (step,) = (tmp_path / "dump").iterdir()
    lanes = load_file(step / "lanes-0000-0007.safetensors")
    assert {name.split(".")[1] for name in lanes} == {"batch", "gradient", "loss"}
    assert lanes["lane-0003.batch.obs"].shape == (8, 2)
    states = load_file(step / "states-0000-0007.safetensors")
    assert states["lane-0000.task.place"].shape == (2, 2)
    agent = load_file(step / "shared.safetensors")
    assert int(agent["algorithm.optimizer.updates"]) == 7


def test_gradients_of_the_lanes_make_the_step_of_the_run(runs, lockstep, tmp_path):
    """The sum of the gradients moves Adam's average from update 7 to update 8."""
    for update in (8, 9):
        assert lockstep("replay", runs[0], "-u", update, "--dump", tmp_path / str(update))[0] == 0
    before, after = (load_file(next((tmp_path / name).iterdir()) / "shared.safetensors") for name in ("8", "9"))
    lanes = load_file(next((tmp_path / "8").iterdir()) / "lanes-0000-0007.safetensors")
    slots = [name for name in before if name.endswith(".exp_avg")]
    total = {}
    for name, tensor in lanes.items():
        _, found, parameter = name.partition(".gradient.")
        if found:
            total[parameter] = total.get(parameter, 0) + tensor.double()
    norm = torch.stack([(x / 64).square().sum() for x in total.values()]).sum().sqrt()
    clip = max(float(norm) / 0.5, 1.0)
    assert len(slots) == len(total)
    for slot in slots:
        parameter = slot.removeprefix("algorithm.optimizer.").removesuffix(".exp_avg")
        expected = 0.9 * before[slot].double() + 0.1 * total[parameter] / 64 / clip
        assert torch.allclose(after[slot].double(), expected, atol=1e-7), parameter


def test_replay_starts_at_the_settings_without_a_checkpoint_before(runs, lockstep):
    code, told = lockstep("replay", runs[0], "--update", 1)
    assert code == 0, told
    assert "Replaying from 0 samples" in told
    assert (runs[0] / "replays" / "update-1").is_dir()
    shutil.rmtree(runs[0] / "replays")


def test_replay_does_not_change_the_run(runs, lockstep, tmp_path):
    files = {path: path.read_bytes() for path in runs[0].rglob("*") if path.is_file()}
    assert lockstep("replay", runs[0], "--update", 3, "--dump", tmp_path / "dump")[0] == 0
    assert {path: path.read_bytes() for path in runs[0].rglob("*") if path.is_file()} == files


def test_replay_of_an_update_that_was_not_made_is_refused(runs, lockstep, tmp_path):
    code, told = lockstep("replay", runs[0], "--update", 13, "--dump", tmp_path / "dump")
    assert code == 2
    assert "has made 12 updates" in told
    assert "up to 12" in told
    assert not (tmp_path / "dump").exists()


def test_replay_does_not_overwrite_a_dump(runs, lockstep, tmp_path):
    (tmp_path / "mine").write_text("x")
    code, told = lockstep("replay", runs[0], "--update", 3, "--dump", tmp_path)
    assert code == 2
    assert "is not empty" in told


def test_replay_of_changed_code_is_reported(runs, lockstep, tmp_path):
    copy = Path(shutil.copytree(runs[1].parent.parent, tmp_path / "copy"))
    run = copy / "runs" / "after"
    lines = read_jsonl(run / DIGESTS)
    lines[5]["agent"] = "0" * 16
    (run / DIGESTS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, told = lockstep("replay", run, "--update", 10, "--dump", tmp_path / "dump")
    assert code == 0
    assert "the replay differs from the run at 640 samples" in told


def test_updates_of_several_optimizers_are_dumped_in_order(lockstep, tmp_path):
    recipe = apply_overrides(
        find_recipe("gym-ddpg")(),
        {
            "task.num_envs": 8,
            "algo": {"rollout_steps": 4, "batch_size": 16, "learning_starts": 64, "buffer_size": 512},
            "algo.encoder.hidden_sizes": [8],
            "algo.updates_per_sample": 0.125,
            "run": {"total_samples": 256, "eval_every": None, "device": "cpu", "reduction": "exact"},
            "run.runs_dir": str(tmp_path),
            "run.name": "ddpg",
            "run.digest_every": 1,
        },
    )
    run = train(recipe).path
    code, told = lockstep("replay", run, "--update", 5, "--dump", tmp_path / "dump")
    assert code == 0, told
    assert sorted(path.name for path in (tmp_path / "dump").iterdir()) == ["1-critic_loss", "2-actor_loss"]


def test_debugger_opens_in_the_update(runs, tmp_path):
    words = [sys.executable, "-m", "lockstep", "replay", str(runs[0]), "--update", "8", "--debug"]
    answers = "p int(self.updates)\np where\nup\np type(self).__name__\nc\n"
    result = subprocess.run(
        [*words, "--dump", str(tmp_path / "dump")],
        input=answers,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "(Pdb) 7" in result.stdout
    assert "'PPO'" in result.stdout
    assert "Update 8, in iteration 4" in result.stdout


# -------------------------------------------------------------------------------------------------------------- bisect


def test_bisect_names_iteration_update_and_tensor(runs, lockstep, tmp_path):
    code, told = lockstep("bisect", *runs, "--dump", tmp_path / "dump")
    assert code == 1, told
    assert f"The digests of agent differ first after iteration {FLIP} ({FLIP * ITERATION} samples)" in told
    assert f"Training both again from {4 * ITERATION} samples" in told
    assert f"Iteration {FLIP} is the first after which tensors differ" in told
    assert f"Update {2 * FLIP - 1}, in iteration {FLIP}, is the first that gets different inputs" in told
    first = told.partition("tensors differ lane-")[2]
    assert first.startswith(f"{LANE:04d}.batch.return by up to"), told  # the lane with the changed reward
    assert {path.name for path in (tmp_path / "dump").iterdir()} == {"a", "b"}


def test_equal_runs_are_equal(runs, lockstep):
    code, told = lockstep("bisect", runs[0], runs[0])
    assert code == 0
    assert f"All {ITERATIONS + 1} digests up to {ITERATIONS * ITERATION} samples are the same" in told


def test_changed_learning_rate_computes_something_else_from_equal_inputs(lockstep, tmp_path):
    settings = {"reduction": "exact", "digest_every": 128}
    one = train(tiny(tmp_path, "one", **settings)).path
    other = train(apply_overrides(tiny(tmp_path, "other", **settings), {"algo.learning_rate": 1e-4})).path
    code, told = lockstep("bisect", one, other)
    assert code == 1
    assert "Setting: algo.learning_rate" in told
    assert "Update 1, in iteration 1, is the first that computes something else from equal inputs" in told


def test_difference_that_cannot_be_repeated_is_said(runs, lockstep, tmp_path):
    copy = Path(shutil.copytree(runs[0], tmp_path / "copy"))
    lines = read_jsonl(copy / DIGESTS)
    for line in lines[4:]:
        line["agent"] = "0" * 16
    (copy / DIGESTS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, told = lockstep("bisect", runs[0], copy)
    assert code == 1
    assert "is not repeated here: it differs from its own digests after iteration 4" in told
    assert "Trained again here, both are equal" in told


def test_difference_in_metrics_only_is_said(runs, lockstep, tmp_path):
    rounded = walk(tmp_path, "rounded", flip=FLIP, bit=0)  # lost in the advantages, but not in the return
    assert hash_of(rounded) == hash_of(runs[0])
    code, told = lockstep("bisect", runs[0], rounded)
    assert code == 1
    assert f"The digests of metrics differ first after iteration {FLIP}" in told
    assert "Only metrics differ" in told


def test_runs_without_common_samples_are_refused(runs, lockstep, tmp_path):
    other = train(tiny(tmp_path, digest_every=None)).path
    for one in (runs[0], other):
        code, told = lockstep("bisect", one, other)
        assert code == 2
        assert "no digests at the same numbers of samples after the start" in told


def step(update, iteration, agent, batch="x"):
    return {"update": update, "iteration": iteration, "agent": agent, "batch": {"a": batch}}


def test_first_update_is_that_which_changed_the_agent():
    one = [step(1, 1, "p"), step(2, 1, "q"), step(3, 2, "r")]
    for changed, agents, expected in (
        ([one[0], step(2, 1, "Q"), one[2]], set(), (1, False)),
        ([one[0], step(2, 1, "q", "y"), one[2]], set(), (2, True)),
        ([*one[:2], step(3, 2, "R")], {1}, (2, False)),
        ([*one[:2], step(3, 2, "R")], set(), (3, True)),  # for example a normalizer, updated while collecting
        (one, {2}, (3, False)),
    ):
        found = first_update(one, changed, agents)
        assert (found["update"], found["inputs_differ"]) == expected
    assert first_update(one, one, set()) is None


def test_first_difference_of_digests():
    one = {0: {"iteration": 0, "agent": "a", "metrics": "m"}, 10: {"iteration": 1, "agent": "b", "metrics": "n"}}
    assert first_difference(one, one) == (2, None)
    other = one | {10: {"iteration": 1, "agent": "b", "metrics": "k"}}
    compared, found = first_difference(one, other)
    assert (compared, found.samples, found.equal_until, found.agent) == (2, 10, 0, False)
    assert first_difference(one, {5: one[0]}) == (0, None)
