"""Graphs of PyTorch Geometric as they are, with 5 to 400 nodes. `lockstep train examples/pyg_graphs.py`"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GINEConv, global_mean_pool

from lockstep import GraphDataset, NetworkConfig, Recipe, RunConfig, SupervisedConfig


class Circuits(GraphDataset):
    """Random graphs. A node receives relu(feature + weight) over each edge; the target is the mean over nodes."""

    def setup(self) -> None:
        draws = np.random.default_rng(0)
        counts = {"train": 600, "validation": 100, "test": 100}
        self.splits = {split: [_graph(draws) for _ in range(count)] for split, count in counts.items()}
        targets = self.targets("train")
        self.target_mean_std = float(targets.mean()), float(targets.std())


def _graph(draws: np.random.Generator) -> Data:
    nodes = int(draws.integers(5, 401))
    edges = torch.from_numpy(draws.integers(0, nodes, (2, 2 * nodes)))
    x = torch.from_numpy(draws.standard_normal((nodes, 3)).astype(np.float32))
    weight = torch.from_numpy(draws.uniform(0, 1, (2 * nodes, 1)).astype(np.float32))
    received = torch.zeros(nodes).index_add(0, edges[1], (x[edges[0], 0] + weight[:, 0]).relu())
    return Data(x=x, edge_index=edges, edge_attr=weight, y=received.mean().view(1))


@dataclass(frozen=True, kw_only=True)
class GINConfig(NetworkConfig):
    """Shape of a graph isomorphism network with edge features."""

    hidden_size: int = 32
    """Units of every layer."""

    def build(self, data: GraphDataset) -> nn.Module:
        return GIN(self.hidden_size)


class GIN(nn.Module):
    """Two layers of message passing, and the mean over the nodes of each graph."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.embed = nn.Linear(3, size)
        layers = [nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, size)) for _ in range(2)]
        self.convs = nn.ModuleList(GINEConv(layer, edge_dim=1) for layer in layers)
        self.head = nn.Linear(size, 1)

    def forward(self, graphs: Batch) -> Tensor:
        hidden = self.embed(graphs.x)
        for conv in self.convs:
            hidden = conv(hidden, graphs.edge_index, graphs.edge_attr).relu()
        return self.head(global_mean_pool(hidden, graphs.batch, graphs.num_graphs)).squeeze(-1)


@dataclass(frozen=True, kw_only=True)
class CircuitsGIN(Recipe):
    """A graph isomorphism network on random graphs."""

    task: Circuits.Config = Circuits.Config()
    algo: SupervisedConfig = SupervisedConfig(batch_size=32, learning_rate=1e-2, epochs=30, net=GINConfig())
    run: RunConfig = RunConfig(log_every=2_400, eval_every=3_000)
    smoke_overrides: ClassVar = {"run": {"total_samples": 320, "eval_every": 160, "save_every": 64}}
