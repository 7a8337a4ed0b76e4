"""Benchmarks on several processes: one joint report, and all-reduce times of the network."""

import json

import pytest

from helpers.multiprocess import together
from helpers.tiny_recipes import ITERATION, tiny
from lockstep.cli import main
from lockstep.distributed import Runtime
from lockstep.tools.bench.measure import measure

pytestmark = pytest.mark.distributed


def measured(directory):
    recipe = tiny(directory)
    with Runtime.start(recipe.run) as runtime:
        return measure(recipe, runtime, seconds=0.0, rounds=2 if runtime.is_main else 5)


def run_command(*words):
    return main(list(words))


def test_measure_uses_the_largest_number_of_rounds_of_all_processes(tmp_path):
    one, other = together(measured, 2, str(tmp_path))
    assert one["rounds"] == other["rounds"] == 5
    assert one["processes"] == other["processes"] == 2
    assert one["samples_per_iteration"] == other["samples_per_iteration"] == ITERATION
    assert one["split"]["reduction"] > 0


def test_bench_writes_one_report_for_all_processes(tmp_path):
    words = ["bench", "snake-ppo", "--smoke", "--seconds", "0", "run.lanes=8", "--out", str(tmp_path)]
    assert together(run_command, 2, *words) == [0, 0]
    assert json.loads((tmp_path / "bench.json").read_text())["processes"] == 2


def test_plan_time_network_writes_all_reduce_times_by_bytes(tmp_path):
    path = tmp_path / "times.json"
    assert together(run_command, 2, "plan", "snake-ppo", "--smoke", "--time-network", str(path)) == [0, 0]
    timed = json.loads(path.read_text())
    assert timed["processes"] == 2
    assert list(timed["seconds"]) == ["64", "65536", "1048576", "4194304"]
    assert all(seconds > 0 for seconds in timed["seconds"].values())
