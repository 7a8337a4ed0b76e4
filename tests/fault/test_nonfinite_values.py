"""Non-finite values on one process: NaN and infinity in environment outputs, losses and gradients.

Each value is injected on one lane. All processes act alike, wherever the lane is hosted. They stop with one message
that names the source and dump the inputs, or they skip the update and stay consistent.
"""

import json
import math
import os
import re
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from run_helpers import SAMPLES, errors, trial_that_finishes_each_save
from safetensors.torch import load_file

from helpers.multiprocess import outcomes, together
from helpers.tiny_recipes import hash_of
from lockstep import nan_dump
from lockstep.algorithms.ppo import PPO
from lockstep.checkpoint import format as form
from lockstep.checkpoint.lineage import find
from lockstep.distributed import NonFiniteError
from lockstep.lanes import partition_lanes
from lockstep.protocols import Loss
from lockstep.tasks.gym.env import GymEnvs

pytestmark = pytest.mark.distributed

LANE, EPISODE, STEP = 5, 1, 3
"""Where the value is injected: the only environment of this lane, at this step of its second episode."""
WHOLE_LANE = "SPOIL_WHOLE_LANE"
"""If set, all samples of the lane are non-finite, not one, so that the first update has some after shuffling."""


# -- injected values ---------------------------------------------------------------------------------------------------


def observation():
    def spoil(self, row):
        # The normalizer clips the network's input, but its running statistics would become non-finite.
        self._host["obs"][row, 1] = math.inf

    _spoil_step(spoil)


def reward():
    def spoil(self, row):
        self._host["reward"][row] = math.nan

    _spoil_step(spoil)


def reward_where_a_file_is_in_the_way():
    """Inject a reward, with a file in place of the dump directory so that the dump fails."""
    nan_dump.NONFINITE_DUMP = "config.yaml"
    reward()


def _spoil_step(spoil):
    step = GymEnvs.step

    def planted(self, action):
        result = step(self, action)
        if LANE in self.lanes.local:
            row = self.lanes.local.index(LANE)
            if (self._episode[row], self._steps[row]) == (EPISODE, STEP):
                spoil(self, row)
        return result

    GymEnvs.step = planted


def loss():
    _spoil_batch(lambda batch, rows: batch["advantage"][rows].fill_(math.nan))


def gradient():
    plain = PPO.loss
    _spoil_batch(lambda batch, rows: batch["mark"][rows].fill_(True))

    def planted(self, batch):
        result = plain(self, batch)
        value = self.net.value(self.normalizer(batch["obs"]))
        # The value is zero, the gradient is non-finite.
        more = torch.where(batch["mark"], value - value.detach(), 1.0).sqrt().sum()
        return Loss(result.loss_sum + more, result.num_samples, result.metric_sums)

    PPO.loss = planted


def _spoil_batch(spoil):
    update, make = PPO.update, PPO._prepare_batch

    def remember(self, clock):
        self.now = clock.iteration
        return update(self, clock)

    def planted(self, metrics):
        batch = make(self, metrics)
        batch["mark"] = torch.zeros_like(batch["advantage"], dtype=torch.bool)
        local = self.runtime.lanes.local
        if self.now == 1 and LANE in local:
            samples = len(batch["mark"]) // len(local)
            first = local.index(LANE) * samples
            spoil(batch, slice(first, first + (samples if WHOLE_LANE in os.environ else 1)))
        return batch

    PPO.update, PPO._prepare_batch = remember, planted


# -- runs with injected values -----------------------------------------------------------------------------------------


def planted(directory, name, cause, extra, resume=False):
    """On each process: inject a non-finite value, then train."""
    globals()[cause]()
    settings = {"task.id": "CartPole-v1", "run.eval_every": None, "run.keep_last": 100}
    trial_that_finishes_each_save(directory, name, settings | extra, resume)


def run_planted(directory, processes, cause, resume=False, kill=None, environment=None, **run):
    environment = (environment or {}) | ({"LOCKSTEP_INJECT_FAULT": kill} if kill else {})
    extra = {f"run.{name}": value for name, value in run.items()}
    return outcomes(planted, processes, str(directory), "run", cause, extra, resume, environment=environment)


def host_of_the_lane(processes):
    return next(process for process, lanes in enumerate(partition_lanes(8, processes)) if LANE in lanes)


def kept(path):
    """Return the dump: shared state, tensors of the process that hosts the lane, the lane's row, the lane count."""
    (directory,) = (path / "nonfinite_dump").iterdir()
    files = [file for file in directory.glob("lanes-*") if LANE in form._lanes_in(file.name)]
    lanes = form._lanes_in(files[0].name)
    return form.read_shared(directory), load_file(files[0]), lanes.index(LANE), len(lanes)


WORDS = {
    "observation": r"environment 0 of the lane, step (\d+) of the rollout: observation\[1\] is inf",
    "reward": r"environment 0 of the lane, step (\d+) of the rollout: reward is nan",
    "loss": "loss, policy_loss of its loss",
    "gradient": r"its loss is finite, its gradient is not in critic_encoder\.layers\.0\.weight",
}
BEGUN = {"algorithm.optimizer.updates", "algorithm.return_moments"}
"""Shared state that an iteration changes before its first update is applied."""
each_cause = pytest.mark.parametrize("cause", WORDS)


@pytest.mark.parametrize(
    "processes", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
@each_cause
def test_nonfinite_value_stops_all_processes_and_dumps_inputs(tmp_path, cause, processes):
    ended = run_planted(tmp_path, processes, cause, environment={WHOLE_LANE: "1"}, reduction="fast")
    sentence = ended[0].error
    assert {outcome.error for outcome in ended} == {sentence}
    assert sentence.startswith("NonFiniteError: ")
    assert "iteration 2, " in sentence
    assert "update 5" in sentence
    place = re.findall(r"\n  process (\d), lane (\d)[,:] (.*)", sentence)
    assert [(int(process), int(lane)) for process, lane, _ in place] == [(host_of_the_lane(processes), LANE)]
    words = re.match(WORDS[cause], place[0][2])
    assert words, place[0][2]

    agent, numbers, row, lanes = kept(tmp_path / "run")
    assert f"dumped to {tmp_path / 'run' / 'nonfinite_dump' / str(SAMPLES)}." in sentence
    report = (tmp_path / "run" / "nonfinite_dump" / str(SAMPLES) / "report.txt").read_text()
    assert sentence.partition("The inputs are dumped")[0].removeprefix("NonFiniteError: ") in report
    before = form.read_shared(tmp_path / "run" / "checkpoints" / str(find(tmp_path / "run" / "checkpoints")[0]))
    assert agent.keys() == before.keys()
    changed = {name for name in agent if not torch.equal(agent[name], before[name])}
    assert changed == (BEGUN if cause in ("loss", "gradient") else set())
    if cause == "observation":
        assert numbers["rollout.obs"][int(words[1]), row, 1] == math.inf
    elif cause == "reward":
        assert numbers["rollout.reward"][int(words[1]), row].isnan()
    else:
        spoiled = numbers["batch.advantage"].isnan() if cause == "loss" else numbers["batch.mark"]
        assert spoiled.view(lanes, -1).all(1).tolist() == [lane == row for lane in range(lanes)]


@each_cause
def test_nonfinite_skip_gives_one_hash_on_any_number_of_processes(tmp_path, cause):
    found = set()
    for processes in (1, 2, 4):
        directory = tmp_path / str(processes)
        ended = run_planted(directory, processes, cause, on_nonfinite="skip")
        assert not errors(ended)
        notes = re.findall(r"Skipped: .*\n +process (\d), lane (\d)[,:]", ended[0].output)
        assert notes[0] == (str(host_of_the_lane(processes)), str(LANE))
        assert not any("Skipped" in outcome.output for outcome in ended[1:])
        found.add(hash_of(directory / "run"))
    assert len(found) == 1
    rows = [json.loads(line) for line in (tmp_path / "1" / "run" / "metrics.jsonl").read_text().splitlines()]
    # Two iterations with four updates each: all four of the second are skipped, or two, one per epoch.
    assert [row["train/skipped"] for row in rows] == [0.5 if cause in ("observation", "reward") else 0.25, 0.0]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    last = tmp_path / "1" / "run" / "checkpoints"
    assert all(tensor.isfinite().all() for tensor in form.read_shared(last / str(find(last)[0])).values())


def test_nonfinite_skip_then_kill_and_resume_matches_undisturbed_run(tmp_path):
    assert not errors(run_planted(tmp_path / "whole", 1, "observation", on_nonfinite="skip"))
    killed = tmp_path / "killed"
    assert "SIGKILL" in errors(run_planted(killed, 2, "observation", kill="1:learn:3", on_nonfinite="skip"))
    assert not errors(run_planted(killed, 3, "observation", resume=True, on_nonfinite="skip"))
    assert hash_of(killed / "run") == hash_of(tmp_path / "whole" / "run")


def test_nonfinite_error_is_reported_if_the_dump_fails(tmp_path):
    ended = run_planted(tmp_path, 2, "reward_where_a_file_is_in_the_way")
    assert len({outcome.error for outcome in ended}) == 1
    assert "reward is nan" in ended[0].error
    assert "The inputs could not be dumped" in ended[0].error


def dump_files_at_exit(directory):
    """Return the dump files that each process finds on exit while one process writes slowly."""
    write = form.write_tensors

    def slowly(path, tensors):
        time.sleep(1.0 if path.parent.parent.name == "nonfinite_dump" and LANE in form._lanes_in(path.name) else 0.0)
        return write(path, tensors)

    with patch.object(form, "write_tensors", slowly), pytest.raises(NonFiniteError):
        planted(directory, "run", "reward", {})
    return sorted(file.name for file in (Path(directory) / "run" / "nonfinite_dump" / str(SAMPLES)).iterdir())


def test_exit_waits_until_all_dumps_are_written(tmp_path):
    lanes = [form.lane_file(share) for share in partition_lanes(8, 2)]
    assert together(dump_files_at_exit, 2, str(tmp_path)) == [[*lanes, "report.txt", "shared.safetensors"]] * 2
