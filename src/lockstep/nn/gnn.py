"""Graph networks: heterogeneous message passing over examples that are small graphs, padded to one shape.

An example is a tree of `nodes` and `edges`. `nodes` has for each type its features `x` [N, S, F], where the type has
names `id` [N, S], and where examples differ in how many there are `count` [N]: the first so many slots are real.
`edges` has for a relation `ball>batter` (or `now>batter:striker`, where there are several) the slot of the batter that
each ball points to, [N, S]; NOBODY points nowhere. Where nothing is related it may be left out. Messages go both ways.
The type `now` has one slot: it is read out.

Padding is left behind at once: what is computed are the real nodes, one after another, whoever else is in the batch.

Shapes: N examples, S slots of a type, F features, V real nodes of a type in the batch, E edges, H hidden units.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lockstep.config import ConfigError

PADDING_ID = 255
"""The slot of a node that points to none."""


@dataclass(frozen=True, kw_only=True)
class GraphConfig:
    """Shape of the network."""

    hidden_size: int = 48
    """Units of every layer."""
    num_layers: int = 2
    """Rounds of messages; none makes it a plain network on the features of `now` alone."""
    name_embeddings: bool = True
    """Whether nodes are known by name (players, teams, venues), as far as the training data names them."""
    aggregation: Literal["mean", "sum", "max"] = "mean"
    """How the messages that reach a node are put together."""
    head_layers: int = 2
    """Hidden layers between what `now` has heard and the prediction."""

    def validate(self) -> None:
        if self.num_layers < 0 or self.hidden_size < 1 or self.head_layers < 0:
            raise ConfigError(
                f"a network with num_layers {self.num_layers}, hidden_size {self.hidden_size} and head_layers "
                f"{self.head_layers} cannot be.",
                "Use at least 0 rounds, 1 hidden unit and 0 layers of a head.",
            )
        if self.num_layers and find_spec("torch_geometric") is None:
            raise ConfigError(
                "graph networks need torch-geometric, which is not installed.", 'pip install "lockstep-rl[gnn]"'
            )


class GraphNet(nn.Module):
    """From graphs to one number each."""

    def __init__(self, example: Any, vocabularies: Mapping[str, int], config: GraphConfig) -> None:
        """`example` shows the form of the inputs; `vocabularies` says how many names each type has."""
        super().__init__()
        self.plan = _plan(example.get("edges", {}), config.num_layers)
        types = {"now", *(name for relations in self.plan for way in relations for name in (way[0], way[2]))}
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
        self.head = nn.Sequential(*layers, nn.Linear(config.hidden_size, 1))

    def forward(self, inputs: Any, index: Any = None) -> Tensor:
        """Predictions [N]. `index` is what `locate` returned for the inputs, where the caller has it already."""
        index = self.locate(inputs) if index is None else index
        hidden = {name: self._encode(name, inputs["nodes"][name], index["nodes"][name]) for name in self.types}
        edges: dict[EdgeType, Tensor] = {}
        for relation, ends in index["edges"].items():
            source, target = _ends(relation)
            edges |= {(source, relation, target): ends, (target, f"{relation}, back", source): ends.flip(0)}
        for step in self.rounds:
            hidden = step(hidden, edges)
        return self.head(hidden["now"]).squeeze(-1)  # [N]

    def locate(self, inputs: Any) -> dict[str, dict[str, Tensor]]:
        """Where the real nodes of each type are in the padded batch, [V], and the edges of relations, [2, E].

        How many there are depends on the data: on a GPU this waits for it, so call it while inputs are on the host.
        """
        places = {name: _places(inputs["nodes"][name]) for name in self.types}
        wanted = {way for relations in self.plan for way in relations}
        nodes = {name: place.present.flatten().nonzero().squeeze(1) for name, place in places.items()}
        return {"nodes": nodes, "edges": _edges(inputs.get("edges", {}), places, wanted)}

    def _encode(self, name: str, nodes: dict[str, Tensor], rows: Tensor) -> Tensor:
        hidden = self.encode[name](nodes["x"].flatten(0, 1).index_select(0, rows).float())  # [V, H]
        if name in self.names:
            hidden = hidden + self.names[name](nodes["id"].flatten().index_select(0, rows).long())
        return hidden.relu()


def _encoder(features: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, hidden))


EdgeType = tuple[str, str, str]
"""From a type, by a relation, to a type."""


class _Round(nn.Module):
    """One round of messages; types that nobody writes to stay as they are."""

    def __init__(self, ways: list[EdgeType], config: GraphConfig) -> None:
        from torch_geometric.nn import SAGEConv

        super().__init__()
        self.ways, size, reached = ways, (config.hidden_size, config.hidden_size), sorted({way[2] for way in ways})
        # What a node keeps of itself is computed once (`keep`), not once for each relation that reaches it.
        like = {"aggr": config.aggregation, "root_weight": False, "bias": False}
        self.messages = nn.ModuleDict({relation: SAGEConv(size, size[1], **like) for _, relation, _ in ways})
        self.keep = nn.ModuleDict({name: nn.Linear(config.hidden_size, config.hidden_size) for name in reached})
        self.norm = nn.ModuleDict({name: nn.LayerNorm(config.hidden_size) for name in reached})

    def forward(self, hidden: dict[str, Tensor], edges: dict[EdgeType, Tensor]) -> dict[str, Tensor]:
        heard = {name: keep(hidden[name]) for name, keep in self.keep.items()}
        for way in self.ways:
            source, relation, target = way
            message = self.messages[relation]((hidden[source], hidden[target]), edges[way])
            heard[target] = heard[target] + message
        return hidden | {name: hidden[name] + self.norm[name](heard[name]).relu() for name in heard}


def _plan(relations: Any, rounds: int) -> list[list[EdgeType]]:
    """The ways that messages take in each round: only those that can still reach `now`."""
    ways: list[EdgeType] = []
    for relation in relations:
        source, target = _ends(relation)
        ways += [(source, relation, target), (target, f"{relation}, back", source)]
    plan: list[list[EdgeType]] = []
    needed = {"now"}
    for _ in range(rounds):
        plan.append([way for way in ways if way[2] in needed])
        needed = needed | {way[0] for way in plan[-1]}
    return plan[::-1]


def _ends(relation: str) -> tuple[str, str]:
    source, _, target = relation.partition(":")[0].partition(">")
    return source, target


@dataclass(frozen=True)
class _Places:
    """Where the real nodes of one type are: in the padded batch, and among themselves."""

    present: Tensor
    """[N, S] bool."""
    number: Tensor
    """[N, S] the number of each real node among the V of its type."""


def _places(nodes: dict[str, Tensor]) -> _Places:
    count, slots = nodes["x"].shape[:2]
    present = torch.ones(count, slots, dtype=torch.bool, device=nodes["x"].device)
    if "count" in nodes:
        present = torch.arange(slots, device=present.device) < nodes["count"].unsqueeze(1)
    return _Places(present, present.flatten().cumsum(0).view_as(present) - 1)


def _edges(relations: dict[str, Tensor], places: dict[str, _Places], wanted: set[EdgeType]) -> dict[str, Tensor]:
    """The edges [2, E] of every relation that is wanted, by numbers of real nodes."""
    edges: dict[str, Tensor] = {}
    for relation, pointer in relations.items():
        source, target = _ends(relation)
        there, back = (source, relation, target), (target, f"{relation}, back", source)
        if there not in wanted and back not in wanted:
            continue
        slots = places[target].present.shape[1]
        slot = pointer.long()
        inside = slot.clamp(max=slots - 1)
        linked = places[source].present & (slot < slots) & places[target].present.gather(1, inside)
        edges[relation] = torch.stack([places[source].number[linked], places[target].number.gather(1, inside)[linked]])
    return edges
