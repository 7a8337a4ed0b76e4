"""Fault injection: replica checks and `lockstep prove` detect each fault and name the right tensor or cause.

Some of these faults train different agents on different processes. The replica check of every run detects them. The
others train one agent that differs from that of a single process or of an uninterrupted run. `lockstep prove` detects
them: it compares hashes and names the first iteration and tensor that differ.
"""

from pathlib import Path

import pytest
import torch
from run_helpers import SAMPLES, errors, run, trial

from helpers.multiprocess import Outcome, outcomes
from helpers.tiny_recipes import hash_of
from lockstep.algorithms.ppo import PPO
from lockstep.cli.prove import DEBUG_ENVIRONMENT, first_difference
from lockstep.distributed.gradient_buffer import GradientBuffer
from lockstep.lanes import Lanes
from lockstep.metrics import Metrics
from lockstep.nn.normalization import ObservationNormalizer
from lockstep.rng import LaneStreams, RandomStream
from lockstep.tasks.gym.env import GymEnvs

pytestmark = pytest.mark.distributed


# -- the faults --------------------------------------------------------------------------------------------------------


def gradient_not_reduced():
    GradientBuffer._sum_integers = _with(
        GradientBuffer._sum_integers, lambda self: setattr(self, "runtime", _Alone(self.runtime))
    )


def gradient_reduced_twice():
    once = GradientBuffer._sum_integers

    def twice(self, lanes):
        once(self, lanes)
        self.runtime.all_reduce_sum(self.flat)

    GradientBuffer._sum_integers = twice


def advantages_normalised_per_process():
    pooled = PPO._prepare_batch

    def local(self, metrics):
        runtime, self.runtime = self.runtime, _Alone(self.runtime)
        try:
            return pooled(self, metrics)
        finally:
            self.runtime = runtime

    PPO._prepare_batch = local


def normaliser_not_merged():
    table = ObservationNormalizer.batch_stats

    def remember(self, obs, active=None):
        self.mine = table(self, obs, active)
        return self.mine

    def merge(self, _):
        scale = 8 / len(self.mine)
        [part.update(self.mine.sum(0) * scale) for part in self.moments.values()]
        self.freeze()

    ObservationNormalizer.batch_stats, ObservationNormalizer.update = remember, merge


def same_stream_on_two_lanes():
    Lanes.streams = lambda self, purpose: LaneStreams(
        tuple(RandomStream(self.seed, purpose, index) for index in range(len(self)))
    )


def minibatches_depend_on_the_processes():
    shuffle = LaneStreams.permutation
    LaneStreams.permutation = lambda self, counter, *rest, **options: shuffle(
        self, counter + len(self._keys), *rest, **options
    )


def kl_stop_on_a_local_value():
    lanes_here = []
    start = PPO.update

    def update(self, clock):
        lanes_here[:] = self.runtime.lanes.local
        return start(self, clock)

    PPO.update = update
    Metrics.latest = lambda self, name: 1.0 if 0 in lanes_here else 0.0


def optimizer_not_restored():
    def load(self, state):
        for name, tensor in self.model_state_dict().items():
            tensor.detach().copy_(state[name])
        self.normalizer.freeze()

    PPO.load_shared_state = load


def environment_not_restored():
    GymEnvs.load_lane_state = lambda self, lane, state: None


class _Alone:
    """A runtime whose reductions ignore the other processes."""

    def __init__(self, runtime):
        self._runtime = runtime

    def __getattr__(self, name):
        return getattr(self._runtime, name)

    def all_reduce_sum(self, tensor):
        return tensor

    def all_reduce_max(self, tensor):
        return tensor

    def exact_sum(self, table):
        return table.sum(0) * (self._runtime.lanes.num_lanes / len(self._runtime.lanes))


def _with(function, before):
    def planted(self, *arguments):
        if not isinstance(self.runtime, _Alone):
            before(self)
        return function(self, *arguments)

    return planted


# -- runs with and without faults --------------------------------------------------------------------------------------


def planted(directory: str, name: str, fault: str, extra: dict, resume: bool) -> None:
    """On each process: inject a fault, then train."""
    torch.distributed.set_debug_level_from_env()  # torch was imported before the environment was set
    globals()[fault]()
    trial(directory, name, {"run.eval_every": None} | extra, resume)


def run_planted(directory: Path, name: str, processes: int, fault: str, extra=None, resume=False) -> list[Outcome]:
    return outcomes(planted, processes, str(directory), name, fault, extra or {}, resume, environment=DEBUG_ENVIRONMENT)


@pytest.mark.parametrize(
    ("fault", "tensor"), [("gradient_not_reduced", "net."), ("normaliser_not_merged", "obs_moments")]
)
def test_replica_check_stops_processes_with_different_agents(tmp_path, fault, tensor):
    report = errors(run_planted(tmp_path, "two", 2, fault))
    assert "ReplicaMismatchError: the replicas of the agent differ between processes" in report
    assert f"process 1: {tensor}" in report
    assert not errors(run_planted(tmp_path, "one", 1, fault))  # no effect on a single process


@pytest.mark.parametrize(
    ("fault", "extra", "tensor"),
    [
        ("gradient_reduced_twice", {"algo.max_grad_norm": 1e9}, "algorithm.net."),
        ("advantages_normalised_per_process", {"algo.normalize_rewards": False}, "algorithm.net."),
        ("same_stream_on_two_lanes", {}, "lane-0004."),
        ("minibatches_depend_on_the_processes", {}, "algorithm.net."),
    ],
)
def test_first_difference_names_the_tensor_that_depends_on_process_count(tmp_path, fault, extra, tensor):
    for name, processes in (("one", 1), ("two", 2)):
        assert not errors(run_planted(tmp_path, name, processes, fault, extra))  # no error on any process
    assert hash_of(tmp_path / "one") != hash_of(tmp_path / "two")
    difference = first_difference(tmp_path / "one", tmp_path / "two")
    assert "first at iteration 1:" in difference
    assert tensor in difference


def test_local_kl_stop_is_reported_as_mismatched_collectives(tmp_path):
    ended = run_planted(tmp_path, "two", 2, "kl_stop_on_a_local_value", {"algo.target_kl": 0.5})
    assert "mismatch between collectives" in errors(ended)


@pytest.mark.parametrize(
    ("fault", "tensor"),
    [("optimizer_not_restored", "algorithm.optimizer."), ("environment_not_restored", ".task.")],
)
def test_first_difference_names_the_state_that_was_not_restored(tmp_path, fault, tensor):
    assert not errors(run(tmp_path, "whole", 1))
    assert "SIGKILL" in errors(run(tmp_path, "killed", 1, kill="0:learn:3"))
    assert not errors(run_planted(tmp_path, "killed", 1, fault, {"run.eval_every": 2 * SAMPLES}, resume=True))
    assert hash_of(tmp_path / "whole") != hash_of(tmp_path / "killed")
    difference = first_difference(tmp_path / "whole", tmp_path / "killed")
    assert "first at iteration 2:" in difference  # the iteration it resumed from
    assert tensor in difference
    assert "net." not in difference
