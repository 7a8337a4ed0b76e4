"""Data sets of PyTorch Geometric: graphs of any size, padded to tensors for lanes and loaders, and without padding in
the network.

A batch of inputs is a tree. `nodes` has for each node type the number of nodes of each graph, `count` [N], and each
attribute, such as `x` [N, V, F]. `edges` has the same for each edge type, with `edge_index` [N, E, 2] inside its graph.
`graph` has attributes of whole graphs, [N, ...]. A `Data` has one node type `node` and one edge type `edge`.

Shapes: N graphs, V nodes and E edges of the largest graph in the batch, F features.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.base import Dataset
from lockstep.config import ConfigError
from lockstep.pytree import Tree

NODE, EDGE = "node", "edge"
"""Names of the node type and the edge type of a graph with one of each."""
SEPARATOR = ">"
"""Between the parts of the name of an edge type: `user>buys>item`."""
MAX_SEARCHED = 100
"""Training graphs that are searched for one with several nodes."""


class _Layout(NamedTuple):
    """Names of the tensors of every graph of a data set."""

    is_hetero: bool
    nodes: dict[str, list[str]]
    edges: dict[str, list[str]]
    graph: list[str]


class GraphDataset(Dataset):
    """Base class of data sets of PyTorch Geometric graphs, `Data` or `HeteroData`, with one target `y` per graph.

    `setup` sets `splits` to lists or data sets of graphs. The network gets a `Batch` with `batch`, `ptr` and
    `num_graphs`, as from the data loader of PyTorch Geometric. Graphs may have any number of nodes and edges.
    """

    ragged = True

    def __init__(self, config: Any) -> None:
        if find_spec("torch_geometric") is None:
            raise ConfigError(
                "graph data sets need torch-geometric, which is not installed.", 'pip install "lockstep-rl[gnn]"'
            )
        super().__init__(config)

    def collate(self, examples: Sequence[Any]) -> tuple[Tree, Tree]:
        """Pad graphs to trees of tensors, as the module describes, and stack their targets `y`."""
        layout = self._layout
        inputs: dict[str, Any] = {"nodes": {}, "edges": {}}
        for kind, names in (("nodes", layout.nodes), ("edges", layout.edges)):
            for name, attributes in names.items():
                stores = [_store(graph, name, layout.is_hetero) for graph in examples]
                if kind == "nodes":
                    counts = [int(store.num_nodes) for store in stores]
                else:
                    counts = [store["edge_index"].shape[1] for store in stores]
                # Attributes of edges [E, ...]; the edge index [2, E] becomes [E, 2].
                values = {key: [_attribute(store, key, name) for store in stores] for key in attributes}
                padded = {key: _pad(parts, counts, f"{key} of {name}") for key, parts in values.items()}
                inputs[kind][name] = {"count": torch.tensor(counts), **padded}
        if layout.graph:
            inputs["graph"] = {
                key: torch.stack([_float32(graph[key]).squeeze(0) for graph in examples]) for key in layout.graph
            }
        return inputs, _stack_targets(examples)

    def network_input(self, inputs: Tree) -> Any:
        """Return the graphs of a batch as one `Batch` of PyTorch Geometric, without padding."""
        from torch_geometric.data import Batch, Data, HeteroData

        layout, tree = self._layout, inputs
        assert isinstance(tree, dict)
        batch = Batch(_base_cls=HeteroData if layout.is_hetero else Data)
        nodes: Any = tree["nodes"]
        edges: Any = tree["edges"]
        offsets: dict[str, Tensor] = {}  # number of the first node of each graph, [N]
        for name, parts in nodes.items():
            store = batch[name] if layout.is_hetero else batch
            count = parts["count"]
            total = count.cumsum(0)
            offsets[name] = total - count
            store.ptr = torch.cat([total.new_zeros(1), total])
            store.batch, values = _unpad(parts)
            for key, value in values.items():
                store[key] = value
            if not values:
                store.num_nodes = store.batch.shape[0]
        for name, parts in edges.items():
            source, relation, target = name.split(SEPARATOR) if layout.is_hetero else (NODE, EDGE, NODE)
            store = batch[source, relation, target] if layout.is_hetero else batch
            graph, values = _unpad(parts)
            first = torch.stack([offsets[source][graph], offsets[target][graph]], dim=1)  # [edges, 2]
            store.edge_index = (values.pop("edge_index") + first).t()
            for key, value in values.items():
                store[key] = value
        graph_attributes: Any = tree.get("graph", {})
        for key, value in graph_attributes.items():
            batch[key] = value
        batch._num_graphs = next(iter(nodes.values()))["count"].shape[0]
        return batch

    @cached_property
    def _layout(self) -> _Layout:
        """Names of the tensors, from a training graph with several nodes: with one, attributes are ambiguous."""
        data = self._split("train")
        graphs = [data[index] for index in range(min(len(data), MAX_SEARCHED))]
        graph = next((graph for graph in graphs if (getattr(graph, "num_nodes", 0) or 0) > 1), graphs[0])
        if hasattr(graph, "node_types"):
            nodes = {name: _tensors(graph[name], "batch", "ptr") for name in graph.node_types}
            edges = {SEPARATOR.join(kind): _tensors(graph[kind]) for kind in graph.edge_types}
            rest = _tensors(graph._global_store, "y")
            layout = _Layout(True, nodes, edges, rest)
        elif hasattr(graph, "edge_index"):
            node_attributes = [key for key in graph.node_attrs() if key not in ("y", "batch", "ptr")]
            edge_attributes = [key for key in graph.edge_attrs() if key != "y"]
            known = {*node_attributes, *edge_attributes, "y", "batch", "ptr"}
            rest = [key for key in _tensors(graph) if key not in known]
            layout = _Layout(False, {NODE: node_attributes}, {EDGE: edge_attributes}, rest)
        else:
            raise ConfigError(
                f"an example of {type(self).__name__} is a {type(graph).__name__}, not a graph of PyTorch Geometric.",
                "Put Data or HeteroData into `splits`, or inherit lockstep.Dataset for other examples.",
            )
        names = [*layout.nodes, *layout.edges, *layout.graph, *(key for keys in layout.nodes.values() for key in keys)]
        if with_dots := [name for name in names if "." in name]:
            raise ConfigError(f"the name {with_dots[0]!r} in a graph contains a dot.", "Rename it.")
        return layout


def _tensors(store: Any, *excluded: str) -> list[str]:
    return [key for key, value in store.items() if isinstance(value, Tensor) and key not in excluded]


def _store(graph: Any, name: str, is_hetero: bool) -> Any:
    if not is_hetero:
        return graph
    return graph[tuple(name.split(SEPARATOR)) if SEPARATOR in name else name]


def _attribute(store: Any, key: str, name: str) -> Tensor:
    """Return an attribute of nodes or edges with one row for each of them."""
    if key not in store or not isinstance(store[key], Tensor):
        raise ConfigError(
            f"a graph has no {key} of {name}, but the training graphs have one.",
            "Give all graphs the same attributes; a type without nodes has tensors of length 0.",
        )
    value: Tensor = store[key]
    return value.t() if key == "edge_index" else _float32(value)


def _float32(value: Tensor) -> Tensor:
    return value.float() if value.dtype == torch.float64 else value


def _pad(parts: Sequence[Tensor], counts: Sequence[int], what: str) -> Tensor:
    """Pad tensors [V_i, ...] with zeros to one tensor [N, V, ...]."""
    if any(len(part) != count for part, count in zip(parts, counts, strict=True)):
        raise ConfigError(f"{what} does not have one row for each node or edge of its graph.", "Check your graphs.")
    size = max(1, *counts)
    padded = parts[0].new_zeros(len(parts), size, *parts[0].shape[1:])
    for row, part in enumerate(parts):
        padded[row, : len(part)] = part
    return padded


def _unpad(parts: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Remove padding. Return the graph of each node or edge, and the attributes without the axis of graphs."""
    count = parts["count"]
    attributes = {key: value for key, value in parts.items() if key != "count"}
    if not attributes:
        return torch.repeat_interleave(count), {}
    size = next(iter(attributes.values())).shape[1]
    present = torch.arange(size, device=count.device) < count.unsqueeze(1)  # [N, V]
    rows = present.flatten().nonzero().squeeze(1)
    graph = rows // size
    return graph, {key: value.flatten(0, 1).index_select(0, rows) for key, value in attributes.items()}


def _stack_targets(graphs: Sequence[Any]) -> Tensor:
    targets = list(_targets(graphs))
    if len({target.shape for target in targets}) > 1:
        raise ConfigError(
            f"targets y of graphs have shapes such as {list(targets[0].shape)} and {list(targets[-1].shape)}.",
            "Give each graph one target of the same shape. For a target per node, implement collate() and loss().",
        )
    return _float32(torch.stack(targets))


def _targets(graphs: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the target of each graph, without the axis of length 1 that PyTorch Geometric gives it."""
    for graph in graphs:
        if not isinstance(target := getattr(graph, "y", None), Tensor):
            target = torch.as_tensor(target if target is not None else _no_target(graph))
        yield target.squeeze(0) if target.dim() and target.shape[0] == 1 else target


def _no_target(graph: Any) -> float:
    raise ConfigError(f"a {type(graph).__name__} has no target `y`.", "Set y of every graph to its target.")
