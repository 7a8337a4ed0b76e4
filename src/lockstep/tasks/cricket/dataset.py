"""Cricket, ball by ball: graphs of the innings so far, and their outcomes.

The graph before a delivery has the earlier deliveries, the players who have batted and bowled so far, partnerships,
phases, both sides and the venue. The node `now` has the state of the innings. Nothing depends on later deliveries.

Shapes: N examples, P = 144 deliveries per graph at most; D deliveries of all innings.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from lockstep.base import Dataset
from lockstep.config import ConfigError
from lockstep.nn.gnn import NO_EDGE
from lockstep.ops.prediction_metrics import binary_metrics, regression_metrics
from lockstep.protocols import Renderable, Split, StateDict
from lockstep.pytree import Tree, load_into, tree_map
from lockstep.rng import RandomStream
from lockstep.tasks.cricket.cricsheet import BALL, BATTERS, MatchArchive, open_archive
from lockstep.tasks.cricket.playback import replay
from lockstep.tasks.cricket.plots import plot_all
from lockstep.tasks.cricket.synthetic import write_matches

P = 144
"""Maximum number of deliveries in a graph; of a longer innings, the last ones."""
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
PHASES = ("powerplay", "middle", "death")
"""Overs 1-6, 7-15 and 16-20."""


@dataclass(frozen=True, kw_only=True)
class CricketConfig(Dataset.Config):
    """Cricket data and the prediction target."""

    data: str = ""
    """Cricsheet zip or directory of JSON files (t20s_male_json.zip from cricsheet.org). Empty: synthetic matches."""
    target: Literal["score", "win"] = "score"
    """score: runs from a delivery to the next mark, five overs ahead. win: whether the chase succeeds."""
    split: Literal["random", "time"] = "random"
    """How matches are split. random: 80/10/10. time: the last fifth is the test set, the tenth before it validation."""
    train_stride: int = 1
    """Train on every n-th delivery of an innings. Validation and test always use all deliveries."""
    min_name_count: int = 3
    """Training innings in which a name must occur to get its own embedding."""
    num_synthetic_matches: int = 64
    """Number of synthetic matches if there is no data."""
    cache_dir: str = ""
    """Directory of the parsed data, which is written once. Empty: the user's cache directory."""


class Cricket(Dataset):
    """Deliveries as examples. All processes map the same arrays."""

    Config = CricketConfig
    config: CricketConfig

    def setup(self) -> None:
        config = self.config
        if config.train_stride < 1:
            raise ConfigError(
                f"train_stride is {config.train_stride}.", "Use 1 for every delivery, 4 for every fourth."
            )
        self.archive = open_archive(_source(config), _cache(config))
        self.target_type = "regression" if config.target == "score" else "binary"
        self.matches = split_matches(self.archive, config)
        self.examples = {split: self._examples(split) for split in SPLITS}
        innings = self.archive.innings
        trained = np.isin(innings[:, 2], self.matches["train"])
        named = {"player": self.archive.players, "venue": innings[:, 4:5], "team": innings[:, 5:7]}
        self._names = {kind: _number_ids(ids, trained, config.min_name_count) for kind, ids in named.items()}
        players, venues, teams = (int(table.max()) + 1 for table in self._names.values())
        self.vocabularies = {"batter": players, "bowler": players, "venue": venues, "team": teams}
        known = self.archive.features[self.examples["train"]].astype(np.float64)
        self._mean, self._std = known.mean(0), np.maximum(known.std(0), 1e-6)
        if self.target_type == "regression":
            targets = self.targets("train").astype(np.float64)
            self.target_mean_std = float(targets.mean()), float(targets.std()) or 1.0

    def _examples(self, split: Split) -> np.ndarray:
        """Return the deliveries of a split that are examples, in order of date."""
        archive, config = self.archive, self.config
        first, _, match, which = archive.innings[archive.innings_of, :4].T  # [D] each
        index = np.arange(len(match)) - first
        selected = np.isin(match, self.matches[split])
        # Scores are predicted from the second delivery on, as in earlier work; chases from the first.
        selected &= index >= 1 if config.target == "score" else which == 1
        if split == "train":
            selected &= (index + match) % config.train_stride == 0
        deliveries = np.flatnonzero(selected)
        if not len(deliveries):
            raise ConfigError(
                f"no delivery is left for the {split} split.", "Use more matches, or lower --task.train-stride."
            )
        return deliveries

    def targets(self, split: Split) -> np.ndarray:
        """Return the targets of a split, [N] float32."""
        return self.outcomes(self.examples[split])

    def outcomes(self, deliveries: np.ndarray) -> np.ndarray:
        """Return the targets of some deliveries, [N] float32."""
        if self.config.target == "score":
            return np.asarray(self.archive.ahead[deliveries])
        match = self.archive.innings[self.archive.innings_of[deliveries], 2]
        return self.archive.matches[match, 1].astype(np.float32)

    def count(self, split: Split) -> int:
        return len(self.examples[split])

    def read(self, split: Split, rows: np.ndarray) -> dict[str, Tree]:
        deliveries = self.examples[split][rows]
        inputs: dict[str, Tree] = tree_map(torch.from_numpy, self._graphs(deliveries))
        return {"inputs": inputs, "target": torch.from_numpy(np.ascontiguousarray(self.outcomes(deliveries)))}

    def _graphs(self, deliveries: np.ndarray) -> dict[str, Any]:
        """Return the graphs before some deliveries [N], in the form of `nn.gnn`."""
        archive, count = self.archive, len(deliveries)
        innings_index = archive.innings_of[deliveries]
        innings, players = archive.innings[innings_index], archive.players[innings_index]
        start = np.maximum(innings[:, 0], deliveries - P)
        num_past = (deliveries - start)[:, None]  # [N, 1] deliveries before this one
        slots = np.arange(P)[None, :]
        # Beyond `num_past`, the last known delivery is repeated: later deliveries are never read.
        past = archive.balls[np.clip(start[:, None] + slots, 0, np.maximum(deliveries - 1, 0)[:, None])]  # [N, P, BALL]
        now = dict(zip(BALL, archive.balls[deliveries].T, strict=True))  # batter and bowler are known beforehand
        ball = {name: past[:, :, column] for column, name in enumerate(BALL)}
        phase, phase_now = _phase(ball["over"]), _phase(now["over"])
        x = [ball["bat"] / 6, ball["bat"] == 4, ball["bat"] == 6, ball["extras"] / 2, ball["illegal"], ball["wicket"]]
        age = num_past - slots
        x += [(ball["bat"] + ball["extras"]) == 0, ball["over"] / 20, age / 60, np.exp(-age / 12)]
        before = np.where(slots > 0, slots - 1, NO_EDGE).astype(np.int16)
        features = (archive.features[deliveries] - self._mean) / self._std
        names, ones = self._names, np.ones((count, 1))
        nodes = {
            "ball": {"x": np.stack(x, axis=-1).astype(np.float32), "count": num_past[:, 0]},
            "batter": _player_nodes(players[:, :BATTERS], now["batters"], names, now["batter"], now["partner"]),
            "bowler": _player_nodes(players[:, BATTERS:], now["bowlers"], names, now["bowler"]),
            "stand": {"x": _slot_features(BATTERS, now["stand"]), "count": now["stand"].astype(np.int64) + 1},
            "phase": {"x": _slot_features(len(PHASES), phase_now), "count": phase_now.astype(np.int64) + 1},
            "team": {"x": np.tile(np.eye(2, dtype=np.float32), (count, 1, 1)), "id": names["team"][innings[:, 5:7]]},
            "venue": {"x": ones[:, :, None].astype(np.float32), "id": names["venue"][innings[:, 4:5]]},
            "now": {"x": features[:, None, :].astype(np.float32)},
        }
        edges = {
            "ball>batter": ball["batter"],
            "ball>batter:partner": ball["partner"],
            "ball>bowler": ball["bowler"],
            "ball>stand": ball["stand"],
            "ball>phase": phase,
            "ball>ball": np.broadcast_to(before, (count, P)),
            "now>batter:striker": now["batter"][:, None],
            "now>batter:partner": now["partner"][:, None],
            "now>bowler": now["bowler"][:, None],
            "now>stand": now["stand"][:, None],
            "now>phase": phase_now[:, None],
            "now>team:batting": np.zeros((count, 1), np.uint8),
            "now>team:bowling": np.ones((count, 1), np.uint8),
            "now>venue": np.zeros((count, 1), np.uint8),
        }
        return {"nodes": nodes, "edges": {name: np.array(slot) for name, slot in edges.items()}}

    def compute_metrics(self, split: Split, predictions: np.ndarray) -> dict[str, float]:
        """Compute all metrics over the split, and over each phase of the innings."""
        targets = self.targets(split)
        metrics = regression_metrics if self.target_type == "regression" else binary_metrics
        result = metrics(predictions, targets)
        result["score"] = -result["mae" if self.target_type == "regression" else "log_loss"]
        phases = _phase(self.archive.balls[self.examples[split], BALL.index("over")])
        for number, phase in enumerate(PHASES):
            if (phases == number).any():
                part = metrics(predictions[phases == number], targets[phases == number])
                result |= {f"{name}/{phase}": value for name, value in part.items()}
        return {name: value for name, value in result.items() if np.isfinite(value)}

    def plot(self, split: Split, predictions: np.ndarray, directory: Path) -> list[Path]:
        classify = self.target_type == "binary"
        return plot_all(self.archive, self.examples[split], self.targets(split), predictions, classify, directory)

    def playback(self, split: Split, number: int, predict: Callable[[np.ndarray], np.ndarray]) -> Iterator[Renderable]:
        classify = self.target_type == "binary"
        return replay(self.archive, self.matches[split], self.examples[split], number, predict, classify)

    # -- state: only the checksum of the data --------------------------------------------------------------------------

    def shared_state(self) -> StateDict:
        return {"digest": torch.frombuffer(bytearray(bytes.fromhex(self.archive.digest)), dtype=torch.uint8)}

    def load_shared_state(self, state: StateDict) -> None:
        current, saved = self.shared_state(), {"digest": torch.empty(32, dtype=torch.uint8)}
        load_into(saved, state, "the data")
        if not torch.equal(current["digest"], saved["digest"]):
            raise ConfigError(
                f"the cricket data {self.config.data or '(synthetic)'} is not the data that this run was started with.",
                "Give the same archive with --task.data, or start a new run.",
            )


def split_matches(archive: MatchArchive, config: CricketConfig) -> dict[Split, np.ndarray]:
    """Assign matches to splits. A match without a usable result is in no split."""
    matches = np.arange(len(archive.matches))  # by date and id
    if config.target == "win":
        matches = matches[archive.matches[:, 1] >= 0]
    if config.split == "random":
        matches = matches[RandomStream(0, "cricket.split").permutation(0, len(matches)).numpy()]
        shares = (0.8, 0.9)
    else:
        shares = (0.72, 0.8)
    first, second = (round(len(matches) * share) for share in shares)
    parts = (matches[:first], matches[first:second], matches[second:])
    return {split: np.sort(part) for split, part in zip(SPLITS, parts, strict=True)}


def _source(config: CricketConfig) -> Path:
    """Return the path of the data, or of synthetic matches, which are written once and equal on every machine."""
    if config.data:
        return Path(config.data).expanduser()
    if config.num_synthetic_matches < 20:
        raise ConfigError(
            f"num_synthetic_matches is {config.num_synthetic_matches}, too few to split.", "Use 20 or more."
        )
    cache = _cache(config)
    path = cache / f"cricket-synthetic-{config.num_synthetic_matches}.zip"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as directory:
            write_matches(Path(directory) / path.name, config.num_synthetic_matches)
            (Path(directory) / path.name).replace(path)  # atomic: another process may be about to read it
    return path


def _cache(config: CricketConfig) -> Path:
    return Path(config.cache_dir or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "lockstep").expanduser()


def _number_ids(ids: np.ndarray, trained: np.ndarray, min_count: int) -> np.ndarray:
    """Return a table that numbers the ids [I, ...] with enough training innings; all others are 0."""
    counts = np.zeros(ids.max() + 1, np.int64)
    for row in ids[trained]:
        counts[np.unique(row)] += 1
    kept = counts >= min_count
    kept[0] = False  # an empty slot
    return np.where(kept, np.cumsum(kept), 0).astype(np.int32)


def _phase(over: np.ndarray) -> np.ndarray:
    return (over >= 6).astype(np.uint8) + (over >= 15).astype(np.uint8)


def _player_nodes(
    players: np.ndarray, appeared: np.ndarray, names: dict[str, np.ndarray], *current: np.ndarray
) -> dict[str, Any]:
    """Return the nodes of the players so far, in order of appearance, with marks for those on the field."""
    slots = np.arange(players.shape[1])[None, :]
    marks = [slots == slot[:, None] for slot in current]
    x = np.stack([*marks, np.broadcast_to(slots / 10, players.shape)], axis=-1).astype(np.float32)
    count = appeared.astype(np.int64)
    # Later players are not known yet: their slots are empty.
    return {"x": x, "count": count, "id": names["player"][np.where(slots < count[:, None], players, 0)]}


def _slot_features(slots: int, current: np.ndarray) -> np.ndarray:
    """Return node features [N, slots, 2]: whether the innings is at this slot, and the slot's number."""
    slot = np.broadcast_to(np.arange(slots)[None, :], (len(current), slots))
    return np.stack([slot == current[:, None], slot / 10], axis=-1).astype(np.float32)
