"""Predictions on several processes are bitwise equal to those on one."""

import pytest

from helpers.multiprocess import together
from helpers.toy_datasets import ToyConfig
from lockstep.algorithms.supervised import SupervisedConfig
from lockstep.config import RunConfig, apply_overrides
from lockstep.distributed import Runtime
from lockstep.evaluation import evaluate, predict
from lockstep.nn.gnn import GraphConfig
from lockstep.registry import find_recipe

KINDS = ("regression", "binary", "multiclass", "several")


def measured(reduction):
    """Return metrics of untrained networks over 1,501 validation examples, and some predictions, by kind of targets."""
    with Runtime.start(RunConfig(lanes=8, reduction=reduction, device="cpu")) as runtime:
        return {kind: measured_kind(kind, runtime) for kind in KINDS}


def measured_kind(kind, runtime):
    config, algo = ToyConfig(kind, 3003), SupervisedConfig(net=GraphConfig(num_layers=0, hidden_size=16))
    data = config.build(runtime.lanes, runtime.device)
    policy = algo.build(data, runtime).policy()
    return evaluate(policy, config, runtime, 1), predict(policy, data, runtime, "validation")[::100].tolist()


def measured_cricket(reduction):
    """Return metrics of the graph network on synthetic matches, by target."""
    with Runtime.start(RunConfig(lanes=8, reduction=reduction, device="cpu")) as runtime:
        return {target: measured_target(target, runtime) for target in ("score", "win")}


def measured_target(target, runtime):
    kind = find_recipe("cricket-gnn")
    recipe = apply_overrides(kind(), kind.smoke_overrides | {"task.target": target})
    policy = recipe.algo.build(recipe.task.build(runtime.lanes, runtime.device), runtime).policy()
    return evaluate(policy, recipe.task, runtime, 1)


@pytest.mark.distributed
def test_metrics_are_equal_on_any_number_of_processes_in_both_modes():
    [alone] = together(measured, 1, "fast")
    assert [alone[kind][0]["examples"] for kind in KINDS] == [1501] * len(KINDS)
    for processes in (2, 3, 4):
        assert together(measured, processes, "fast") == [alone] * processes
    for processes in (1, 3):
        assert together(measured, processes, "exact") == [alone] * processes


@pytest.mark.distributed
def test_graph_network_metrics_are_equal_on_any_number_of_processes():
    [alone] = together(measured_cricket, 1, "fast")
    for processes, reduction in ((2, "fast"), (3, "exact"), (4, "fast")):
        assert together(measured_cricket, processes, reduction) == [alone] * processes
