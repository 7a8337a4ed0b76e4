"""Graph data sets: batches equal those of PyTorch Geometric, for ragged graphs, edge features and several types."""

import numpy as np
import pytest
import torch
from torch import nn
from torch_geometric.data import Batch, Data, HeteroData

from lockstep.base import Dataset
from lockstep.config import ConfigError
from lockstep.data import graph_dataset
from lockstep.data.graph_dataset import GraphDataset
from lockstep.rng import RandomStream
from lockstep.tasks.env_checker import check_env

STREAM = RandomStream(0, "test.graphs")


def plain(number, nodes, **attributes):
    edges = 3 * nodes
    return Data(
        x=STREAM.normal(number, nodes, 4),
        edge_index=STREAM.integers(number + 100, nodes, 2, edges),
        edge_attr=STREAM.normal(number + 200, edges, 2),
        y=STREAM.normal(number + 300, 1, 2),
        **attributes,
    )


def hetero(number, users, items):
    data = HeteroData()
    data["user"].x, data["item"].x = STREAM.normal(number, users, 3), STREAM.normal(number + 1, items, 5)
    data["item"].price = STREAM.normal(number + 2, items)
    count = 4 if users and items else 0
    pairs = [STREAM.integers(number + 3, max(1, size), count) for size in (users, items)]
    data["user", "buys", "item"].edge_index = torch.stack(pairs)
    data["user", "buys", "item"].edge_attr = STREAM.normal(number + 4, count, 2)
    data["item", "of", "user"].edge_index = torch.stack(pairs[::-1])
    data.y = torch.tensor([number % 3])
    return data


def data_set(graphs, **attributes):
    class Graphs(GraphDataset):
        def setup(self):
            self.splits = dict.fromkeys(("train", "validation", "test"), graphs)
            for name, value in attributes.items():
                setattr(self, name, value)

    return Graphs(Graphs.Config())


SIZES = [3, 700, 1, 256, 40]
PLAIN = [plain(number, nodes, scale=torch.tensor([[float(number)]])) for number, nodes in enumerate(SIZES)]
HETERO = [
    hetero(10 * number, users, items) for number, (users, items) in enumerate([(3, 5), (300, 2), (4, 0), (1, 400)])
]


def test_batch_of_ragged_graphs_equals_that_of_pyg():
    data, rows = data_set(PLAIN), np.array([1, 4, 2, 0, 3])
    examples = data.read("train", rows)
    assert examples["inputs"]["nodes"]["node"]["x"].shape == (5, 700, 4)
    found, expected = data.network_input(examples["inputs"]), Batch.from_data_list([PLAIN[row] for row in rows])
    for key in ("x", "edge_index", "edge_attr", "batch", "ptr", "scale"):
        assert torch.equal(found[key], expected[key]), key
    assert found.num_graphs == 5
    assert found.num_nodes == sum(SIZES)
    assert torch.equal(examples["target"], torch.cat([PLAIN[row].y for row in rows]))
    assert data.output_shape == (2,)


def test_batch_of_hetero_graphs_equals_that_of_pyg():
    data, rows = data_set(HETERO, target_type="multiclass", num_classes=3), np.array([1, 2, 0, 3])
    examples = data.read("train", rows)
    found, expected = data.network_input(examples["inputs"]), Batch.from_data_list([HETERO[row] for row in rows])
    for name in ("user", "item"):
        for key in ("x", "batch", "ptr"):
            assert torch.equal(found[name][key], expected[name][key]), (name, key)
    assert torch.equal(found["item"].price, expected["item"].price)
    for kind in expected.edge_types:
        assert torch.equal(found[kind].edge_index, expected[kind].edge_index)
    assert torch.equal(found["user", "buys", "item"].edge_attr, expected["user", "buys", "item"].edge_attr)
    assert examples["target"].tolist() == [1, 2, 0, 0]


@pytest.mark.parametrize(
    ("graphs", "attributes"), [(PLAIN, {}), (HETERO, {"target_type": "multiclass", "num_classes": 3})]
)
def test_check_of_graph_data_set_finds_no_fault(graphs, attributes):
    assert check_env(type(data_set(graphs, **attributes)).Config()) == []


def test_padding_does_not_reach_the_network():
    data = data_set(PLAIN)
    inputs = data.read("train", np.array([0, 1]))["inputs"]
    inputs["nodes"]["node"]["x"][0, 3:] = torch.nan
    inputs["edges"]["edge"]["edge_index"][0, 9:] = 10**6
    graphs = data.network_input(inputs)
    assert graphs.x.isfinite().all()
    assert graphs.edge_index.max() < 703


def test_graph_in_plain_data_set_names_graph_dataset():
    class Wrong(Dataset):
        def setup(self):
            self.splits = {"train": PLAIN}

    with pytest.raises(ConfigError, match=r"a graph \(Data\).*\n.*lockstep.GraphDataset"):
        Wrong(Wrong.Config()).read("train", np.array([0]))


@pytest.mark.parametrize(
    ("graphs", "message"),
    [
        ([Data(x=torch.ones(2, 1), edge_index=torch.zeros(2, 0).long())], "a Data has no target"),
        ([plain(0, 3), Data(x=torch.ones(2, 4), edge_index=torch.zeros(2, 0).long(), y=1.0)], "no edge_attr of edge"),
        ([(torch.ones(3), 1.0)], "is a tuple, not a graph"),
        ([Data(x=torch.ones(n, 1), edge_index=torch.zeros(2, 0).long(), y=torch.ones(n)) for n in (2, 3)], "shapes"),
    ],
)
def test_invalid_graphs_are_explained(graphs, message):
    with pytest.raises(ConfigError, match=message):
        data_set(graphs).read("train", np.arange(len(graphs)))


def test_missing_torch_geometric_error_names_extra(monkeypatch):
    monkeypatch.setattr(graph_dataset, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"lockstep-rl\[gnn\]"):
        data_set(PLAIN)


def test_loss_gradient_equals_that_of_pyg_batch():
    data, net = data_set(PLAIN), nn.Linear(4, 2)
    rows = np.array([3, 1])
    examples = data.read("train", rows)
    grads = []
    for graphs in (data.network_input(examples["inputs"]), Batch.from_data_list([PLAIN[row] for row in rows])):
        net.zero_grad()
        pooled = torch.zeros(2, 2).index_add(0, graphs.batch, net(graphs.x))
        data.loss(pooled, examples["target"], torch.ones(2)).loss_sum.backward()
        grads.append(net.weight.grad.clone())
    assert torch.equal(*grads)
