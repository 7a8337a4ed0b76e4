"""The expected time of a run: training at the measured speed, and the evaluations still to come."""

import json
import time

from lockstep.clock import TrainState
from lockstep.config import RunConfig
from lockstep.distributed import Runtime
from lockstep.loggers.evaluation_cost import EvaluationCost
from lockstep.loggers.run_logger import RunLogger
from lockstep.registry import find_recipe
from lockstep.tools.report.metrics_log import read_log


def test_remaining_seconds_count_evaluations_to_come():
    cost = EvaluationCost(RunConfig(eval_every=100, eval_episodes=8))
    clock = TrainState(total_samples=450)
    assert cost.remaining_seconds(clock) == 0.0  # nothing measured yet
    clock.samples, clock.last_iteration_samples, clock.evaluations = 150, 10, 1
    cost.measured(2.0, clock)
    assert cost.remaining_seconds(clock) == 4 * 2.0  # at 200, 300, 400 and at the end
    clock.samples = 200  # this entry precedes the evaluation at 200
    assert cost.remaining_seconds(clock) == 4 * 2.0


def test_remaining_seconds_expect_more_episodes_in_the_last_evaluation():
    cost = EvaluationCost(RunConfig(eval_every=100))
    clock = TrainState(total_samples=600, samples=450, last_iteration_samples=10, evaluations=1)
    clock.evaluation = {"episodes": 8.0}
    cost.measured(2.0, clock)
    # A share of 600 samples, halved, is three times the share of 100; 32 episodes would be four times as many.
    assert abs(cost.remaining_seconds(clock) - (2.0 + 3 * 2.0)) < 1e-9


def test_evaluation_is_a_phase_and_not_part_of_the_speed(tmp_path, capsys):
    log = RunLogger(tmp_path, find_recipe("gym-ppo")(), Runtime.single_process(RunConfig(lanes=8)))
    log.begin(TrainState(total_samples=1000), [])
    with log.runtime.phase("learn"):
        time.sleep(0.02)
    with log.runtime.phase("evaluate"):
        time.sleep(0.2)
    log.write(TrainState(total_samples=1000, samples=100, evaluations=1), {})
    log.close()
    (line,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert line["time/evaluate"] > 0.5 > line["time/other"]
    training = line["time/seconds"] * (1 - line["time/evaluate"])
    assert abs(line["time/global_fps"] * training - 100) < 1e-6
    assert f"evaluate {line['time/evaluate']:.0%}" in capsys.readouterr().out
    report = read_log(tmp_path / "metrics.jsonl")
    assert abs(report.seconds - line["time/seconds"]) < 1e-9
    assert abs(report.speed - line["time/global_fps"]) < 1e-6
    assert abs(report.shares["evaluate"] - line["time/evaluate"]) < 1e-9
