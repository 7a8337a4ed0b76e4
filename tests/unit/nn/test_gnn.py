"""Graph networks: padding has no effect, batch rows are independent, messages follow edges."""

import sys
import tempfile
from pathlib import Path

import pytest
import torch

from helpers.multiprocess import together
from lockstep.config import ConfigError, RunConfig
from lockstep.distributed import DistributedOptimizer, Runtime
from lockstep.nn import gnn
from lockstep.nn.gnn import NO_EDGE, GraphConfig, GraphNet
from lockstep.protocols import Loss
from lockstep.pytree import tree_map
from lockstep.rng import RandomStream, seeded_init

BALLS, PLAYERS = 5, 3
STREAM = RandomStream(0, "test.graph")


def graphs(counts):
    """Return one graph per number of balls."""
    n = len(counts)
    return {
        "nodes": {
            "ball": {"x": STREAM.normal(0, n, BALLS, 4), "count": torch.tensor(counts)},
            "player": {"x": STREAM.normal(1, n, PLAYERS, 2), "id": STREAM.integers(2, 6, n, PLAYERS)},
            "now": {"x": STREAM.normal(3, n, 1, 3)},
        },
        "edges": {
            "ball>player": STREAM.integers(4, PLAYERS, n, BALLS),
            "now>player": torch.zeros(n, 1, dtype=torch.uint8),
        },
    }


def network(inputs, **settings):
    with seeded_init(RandomStream(0, "test.graph.init")):
        return GraphNet(inputs, {"player": 6}, GraphConfig(hidden_size=8, **settings))


@pytest.mark.parametrize("rounds", [0, 1, 2, 3])
def test_padding_content_does_not_affect_output(rounds):
    inputs = graphs([2, 0, 5])
    net = network(inputs, num_layers=rounds)
    spoiled = tree_map(torch.clone, inputs)
    for row, count in enumerate([2, 0, 5]):
        spoiled["nodes"]["ball"]["x"][row, count:] = torch.nan
        spoiled["edges"]["ball>player"][row, count:] = 1
    assert torch.equal(net(spoiled), net(inputs))
    assert net(inputs).isfinite().all()


def test_prediction_is_independent_of_batch_neighbors():
    inputs = graphs([2, 0, 5, 3])
    net = network(inputs)
    whole = net(inputs)
    for row in range(4):
        alone = net(tree_map(lambda x, r=row: x[r : r + 1], inputs))
        torch.testing.assert_close(alone, whole[row : row + 1], rtol=1e-5, atol=1e-6)


def test_ball_features_reach_output_after_two_layers():
    inputs = graphs([5, 5])
    inputs["edges"]["ball>player"].zero_()  # all edges point to the player that `now` points to
    changed = tree_map(torch.clone, inputs)
    changed["nodes"]["ball"]["x"] += 1.0
    for rounds, affected in ((1, False), (2, True)):
        net = network(inputs, num_layers=rounds)
        assert bool((net(changed) != net(inputs)).any()) == affected


def test_edges_to_no_edge_carry_no_message():
    inputs = graphs([5, 5])
    inputs["edges"]["ball>player"].fill_(NO_EDGE)
    changed = tree_map(torch.clone, inputs)
    changed["nodes"]["ball"]["x"] += 1.0
    net = network(inputs)
    assert torch.equal(net(changed), net(inputs))


def test_edges_to_slot_255_and_above_carry_messages():
    n, slots = 2, 300
    inputs = {
        "nodes": {"player": {"x": STREAM.normal(5, n, slots, 2)}, "now": {"x": STREAM.normal(6, n, 1, 3)}},
        "edges": {"now>player": torch.tensor([[255], [299]])},
    }
    net = network(inputs, name_embeddings=False)
    changed = tree_map(torch.clone, inputs)
    changed["nodes"]["player"]["x"][0, 255] += 1.0
    changed["nodes"]["player"]["x"][1, 299] += 1.0
    assert (net(changed) != net(inputs)).all()


def test_graph_net_output_shape_is_that_of_data_set():
    inputs = graphs([2, 5])
    with seeded_init(RandomStream(0, "test.graph.init")):
        net = GraphNet(inputs, {"player": 6}, GraphConfig(hidden_size=8), (3, 2))
    assert net(inputs).shape == (2, 3, 2)


def test_name_embeddings_false_ignores_player_ids():
    inputs = graphs([5, 5])
    other = tree_map(torch.clone, inputs)
    other["nodes"]["player"]["id"] = (other["nodes"]["player"]["id"] + 1) % 6
    assert not torch.equal(network(inputs)(other), network(inputs)(inputs))
    assert torch.equal(network(inputs, name_embeddings=False)(other), network(inputs, name_embeddings=False)(inputs))


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_optimizer_step_with_empty_node_type_is_finite(reduction):
    inputs = graphs([0] * 8)  # no balls
    net = network(inputs)
    runtime = Runtime.single_process(RunConfig(reduction=reduction))
    optimizer = DistributedOptimizer(runtime, torch.optim.AdamW(net.named_parameters(), fused=True))
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    optimizer.step(lambda part: Loss(net(part).square().sum(), len(part["nodes"]["now"]["x"])), inputs, 1e-2)
    assert all(parameter.isfinite().all() for parameter in net.parameters())
    assert not torch.equal(before["head.0.weight"], net.head[0].weight)


def files_after_a_prediction(directory):
    tempfile.tempdir = directory
    inputs = graphs([2, 0, 5])
    network(inputs, num_layers=2)(inputs)
    generated = [
        module for module in list(sys.modules.values()) if str(vars(module).get("__file__")).startswith(directory)
    ]
    return len(generated), [path.name for path in Path(directory).iterdir()]


def test_generated_code_of_layers_is_deleted(tmp_path):
    assert together(files_after_a_prediction, 1, str(tmp_path)) == [[1, []]]


def test_missing_torch_geometric_error_names_extra(monkeypatch):
    monkeypatch.setattr(gnn, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"lockstep-rl\[gnn\]"):
        GraphConfig().validate()
    GraphConfig(num_layers=0).validate()  # a network without graph layers does not need it
