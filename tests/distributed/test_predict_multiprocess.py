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


def measured(kind, reduction):
    """Return the metrics of an untrained network over 1,501 validation examples, and some of its predictions."""
    with Runtime.start(RunConfig(lanes=8, reduction=reduction, device="cpu")) as runtime:
        config, algo = ToyConfig(kind, 3003), SupervisedConfig(net=GraphConfig(num_layers=0, hidden_size=16))
        data = config.build(runtime.lanes, runtime.device)
        policy = algo.build(data, runtime).policy()
        return evaluate(policy, config, runtime, 1), predict(policy, data, runtime, "validation")[::100].tolist()


def measured_cricket(reduction, words):
    """Return the metrics of the graph network on synthetic matches."""
    recipe = apply_overrides(
        find_recipe("cricket-gnn")(), find_recipe("cricket-gnn").smoke_overrides | {"task.target": words}
    )
    with Runtime.start(RunConfig(lanes=8, reduction=reduction, device="cpu")) as runtime:
        policy = recipe.algo.build(recipe.task.build(runtime.lanes, runtime.device), runtime).policy()
        return evaluate(policy, recipe.task, runtime, 1)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["regression", "binary", "multiclass", "several"])
def test_metrics_are_equal_on_any_number_of_processes_in_both_modes(kind):
    [alone] = together(measured, 1, kind, "fast")
    assert alone[0]["examples"] == 1501
    for processes in (2, 3, 4):
        assert together(measured, processes, kind, "fast") == [alone] * processes
    for processes in (1, 3):
        assert together(measured, processes, kind, "exact") == [alone] * processes


@pytest.mark.distributed
@pytest.mark.parametrize("predict", ["score", "win"])
def test_graph_network_metrics_are_equal_on_any_number_of_processes(predict):
    [alone] = together(measured_cricket, 1, "fast", predict)
    for processes, reduction in ((2, "fast"), (3, "exact"), (4, "fast")):
        assert together(measured_cricket, processes, reduction, predict) == [alone] * processes
