"""Graph networks: heterogeneous message passing over small graphs, padded to one shape.

An example is a tree of `nodes` and `edges`. `nodes` has for each type its features `x` [N, S, F], and optionally name
ids `id` [N, S] and `count` [N]: only the first `count` slots are real nodes, the others are padding. `edges` has for a
relation `ball>batter` (or `now>batter:striker` if there are several) the slot of the batter that each ball points to,
[N, S], of any integer type; a negative number such as NO_EDGE means no edge. `edges` may be omitted. Messages are sent
in both directions. The prediction is read out from the type `now`, which has one slot.

Padding is removed first: only real nodes are computed, independently of the other examples in the batch.

Shapes: N examples, S slots of a type, F features, V real nodes of a type in the batch, E edges, H hidden units.
"""

import math
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lockstep.base import Dataset
from lockstep.config import ConfigError
from lockstep.nn.networks import NetworkConfig

NO_EDGE = -1
"""Slot number of a node without an edge."""
_BACK = ", back"
"""Suffix of a relation in the opposite direction."""


@dataclass(frozen=True, kw_only=True)
class GraphConfig(NetworkConfig):
    """Shape of the graph network."""

    hidden_size: int = 48
    """Units of every layer."""
    num_layers: int = 2
    """Rounds of message passing. 0: a plain MLP on the features of `now` only."""
    name_embeddings: bool = True
    """Whether nodes have an embedding per name (players, teams, venues) that occurs in the training data."""
    aggregation: Literal["mean", "sum", "max"] = "mean"
    """How the messages to a node are aggregated."""
    head_layers: int = 2
    """Hidden layers between the node `now` and the prediction."""

    def validate(self) -> None:
        """Check the settings before any process starts."""
        if self.num_layers < 0 or self.hidden_size < 1 or self.head_layers < 0:
            raise ConfigError(
                f"a network with num_layers {self.num_layers}, hidden_size {self.hidden_size} and head_layers "
                f"{self.head_layers} is not valid.",
                "Use num_layers >= 0, hidden_size >= 1 and head_layers >= 0.",
            )
        if self.num_layers and find_spec("torch_geometric") is None:
            raise ConfigError(
                "graph networks need torch-geometric, which is not installed.", 'pip install "lockstep-rl[gnn]"'
            )

    def build(self, data: Dataset) -> nn.Module:
        """Build the graph network of a data set."""
        return GraphNet(data.example_inputs(), data.vocabularies, self, data.output_shape)


class GraphNet(nn.Module):
    """Graph network with one prediction per example."""

    def __init__(
        self, example: Any, vocabularies: Mapping[str, int], config: GraphConfig, output_shape: tuple[int, ...] = ()
    ) -> None:
        """Build the network. `example` is a batch of inputs; `vocabularies` has the number of names of each type."""
        super().__init__()
        self.output_shape = output_shape
        self.plan = _plan(example.get("edges", {}), config.num_layers)
        used = {relation.removesuffix(_BACK) for edge_types in self.plan for _, relation, _ in edge_types}
        self.relations = [relation for relation in example.get("edges", {}) if relation in used]
        types = {"now", *(name for relation in self.relations for name in _source_and_target(relation))}
        self.types = [name for name in example["nodes"] if name in types]
        features = {name: example["nodes"][name]["x"].shape[-1] for name in self.types}
        self.encode = nn.ModuleDict({name: _encoder(features[name], config.hidden_size) for name in self.types})
        named = [name for name in self.types if config.name_embeddings and "id" in example["nodes"][name]]
        self.names = nn.ModuleDict({name: nn.Embedding(vocabularies[name], config.hidden_size) for name in named})
        for table in self.names.parameters():
            nn.init.normal_(table, std=0.1)
        self.rounds = nn.ModuleList(_Round(relations, config) for relations in self.plan)
        layers: list[nn.Module] = []
        for _ in range(config.head_layers):
            layers += [nn.Linear(config.hidden_size, config.hidden_size), nn.ReLU()]
        self.head = nn.Sequential(*layers, nn.Linear(config.hidden_size, math.prod(output_shape)))

    def forward(self, inputs: Any, index: Any = None) -> Tensor:
        """Return predictions [N]. `index` is the result of `locate` for the inputs, if the caller has it."""
        index = self.locate(inputs) if index is None else index
        hidden = {name: self._encode(name, inputs["nodes"][name], index["nodes"][name]) for name in self.types}
        edges: dict[EdgeType, Tensor] = {}
        for relation, edge_index in index["edges"].items():
            source, target = _source_and_target(relation)
            edges |= {(source, relation, target): edge_index, (target, relation + _BACK, source): edge_index.flip(0)}
        for step in self.rounds:
            hidden = step(hidden, edges)
        return self.head(hidden["now"]).reshape(-1, *self.output_shape)  # [N, ...]

    def locate(self, inputs: Any) -> dict[str, dict[str, Tensor]]:
        """Return the indices of real nodes of each type in the padded batch, [V], and the edges by relation, [2, E].

        Their number depends on the data, so this synchronizes on a GPU. Call it while inputs are on the host.
        """
        present = {name: _present(inputs["nodes"][name]) for name in self.types}  # [N, S] each
        number = {name: mask.flatten().cumsum(0).view_as(mask) - 1 for name, mask in present.items()}  # among the V
        edges = {}
        for relation in self.relations:
            source, target = _source_and_target(relation)
            slot, slots = inputs["edges"][relation].long(), present[target].shape[1]
            clamped = slot.clamp(min=0, max=slots - 1)
            valid = present[source] & (slot >= 0) & (slot < slots) & present[target].gather(1, clamped)
            edges[relation] = torch.stack([number[source][valid], number[target].gather(1, clamped)[valid]])
        return {"nodes": {name: mask.flatten().nonzero().squeeze(1) for name, mask in present.items()}, "edges": edges}

    def _encode(self, name: str, nodes: dict[str, Tensor], rows: Tensor) -> Tensor:
        hidden = self.encode[name](nodes["x"].flatten(0, 1).index_select(0, rows).float())  # [V, H]
        if name in self.names:
            hidden = hidden + self.names[name](nodes["id"].flatten().index_select(0, rows).long())
        return hidden.relu()


def _encoder(features: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, hidden))


EdgeType = tuple[str, str, str]
"""Source type, relation, target type."""


class _Round(nn.Module):
    """One round of message passing. Types that receive no messages do not change."""

    def __init__(self, edge_types: list[EdgeType], config: GraphConfig) -> None:
        from torch_geometric.nn import SAGEConv

        super().__init__()
        self.edge_types, size = edge_types, (config.hidden_size, config.hidden_size)
        target_types = sorted({target for _, _, target in edge_types})
        # The root weight is applied once per node (`keep`), not once per incoming relation.
        options = {"aggr": config.aggregation, "root_weight": False, "bias": False}
        self.messages = nn.ModuleDict({relation: SAGEConv(size, size[1], **options) for _, relation, _ in edge_types})
        for layer in self.messages.values():
            _delete_generated_code(layer)
        self.keep = nn.ModuleDict({name: nn.Linear(config.hidden_size, config.hidden_size) for name in target_types})
        self.norm = nn.ModuleDict({name: nn.LayerNorm(config.hidden_size) for name in target_types})

    def forward(self, hidden: dict[str, Tensor], edges: dict[EdgeType, Tensor]) -> dict[str, Tensor]:
        received = {name: keep(hidden[name]) for name, keep in self.keep.items()}
        for edge_type in self.edge_types:
            source, relation, target = edge_type
            message = self.messages[relation]((hidden[source], hidden[target]), edges[edge_type])
            received[target] = received[target] + message
        return hidden | {name: hidden[name] + self.norm[name](received[name]).relu() for name in received}


def _delete_generated_code(layer: nn.Module) -> None:
    """Delete the temporary file with the code of a PyG layer. PyG has imported it, and would never delete it."""
    module = sys.modules[type(layer).propagate.__module__]  # type: ignore[attr-defined]
    code, compiled = Path(str(module.__file__)), Path(str(module.__cached__))
    if code.parent != Path(tempfile.gettempdir()):
        return  # this version of PyG generates none
    for file in (code, compiled):
        file.unlink(missing_ok=True)
    with suppress(OSError):  # other processes have files there
        compiled.parent.rmdir()


def _plan(relations: Any, rounds: int) -> list[list[EdgeType]]:
    """List the edge types of each round: only those whose messages can still reach `now`."""
    edge_types: list[EdgeType] = []
    for relation in relations:
        source, target = _source_and_target(relation)
        edge_types += [(source, relation, target), (target, relation + _BACK, source)]
    plan: list[list[EdgeType]] = []
    needed = {"now"}
    for _ in range(rounds):
        plan.append([edge_type for edge_type in edge_types if edge_type[2] in needed])
        needed = needed | {edge_type[0] for edge_type in plan[-1]}
    return plan[::-1]


def _source_and_target(relation: str) -> tuple[str, str]:
    source, _, target = relation.partition(":")[0].partition(">")
    return source, target


def _present(nodes: dict[str, Tensor]) -> Tensor:
    """Return which slots [N, S] of one type are real nodes, not padding."""
    count, slots = nodes["x"].shape[:2]
    if "count" in nodes:
        return torch.arange(slots, device=nodes["x"].device) < nodes["count"].unsqueeze(1)
    return torch.ones(count, slots, dtype=torch.bool, device=nodes["x"].device)
