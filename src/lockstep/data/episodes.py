"""Data sets of episodes for offline training: a directory of NumPy arrays, read by memory map and without pickle.

`episodes.json` lists the tasks and the chunks. A chunk has the arrays `obs` [N, T + 1, ...], `action` [N, T, K] between
-1 and 1, `reward` [N, T], and for each episode its `task`, `length` and whether it was `terminated`, [N]. Steps beyond
the length of an episode are padding.

Shapes: N episodes, T steps of the longest, K action features, L local lanes, M samples per lane, H steps of a sequence.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.config import ConfigError
from lockstep.io.safe_read import UnreadableFileError, read_json
from lockstep.lanes import Lanes
from lockstep.transfer import Uploader

INDEX = "episodes.json"
VERSION = 1
"""Version of the format."""
ARRAYS = ("obs", "action", "reward", "task", "length", "terminated")
FIX = "Give a directory that `lockstep episodes` wrote."


def absolute_paths(names: Sequence[str]) -> tuple[str, ...]:
    """Resolve directories against the working directory, so that a run can be resumed elsewhere."""
    return tuple(os.path.abspath(name) for name in names)


def read_index(directory: str | Path) -> dict[str, Any]:
    """Return the tasks and chunks of a data set. Raises ConfigError if it has none or another format."""
    path = Path(directory) / INDEX
    try:
        index = read_json(path)
        valid = index["version"] == VERSION and all(isinstance(name, str) for name in index["tasks"])
        valid = valid and bool(index["chunks"]) and all(str(name).isdecimal() for name in index["chunks"])
    except FileNotFoundError:
        raise ConfigError(f"there is no data set of episodes at {directory}.", FIX) from None
    except (UnreadableFileError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not valid: {error}.", FIX) from None
    if not valid:
        raise ConfigError(f"{path} has another format than version {VERSION}.", FIX)
    return dict(index)


class EpisodeWriter:
    """Writes a new data set. The directory is complete when `close` has written its index."""

    def __init__(self, directory: Path, tasks: Sequence[str]) -> None:
        directory.mkdir(parents=True)
        self.directory, self.tasks, self.chunks = directory, list(tasks), list[str]()
        self.episodes, self.steps, self._digest = 0, 0, hashlib.blake2b(digest_size=16)

    def add(self, chunk: dict[str, np.ndarray]) -> None:
        """Write one chunk. Raises ValueError if shapes do not fit, or values are not finite."""
        _check(chunk, len(self.tasks))
        name = f"{len(self.chunks):05d}"
        for array in ARRAYS:
            np.save(self.directory / f"{name}.{array}.npy", chunk[array], allow_pickle=False)
            for start in range(0, len(chunk[array]), 256):  # not all at once: a chunk may be larger than memory
                self._digest.update(np.ascontiguousarray(chunk[array][start : start + 256]).tobytes())
        self.chunks.append(name)
        self.episodes, self.steps = self.episodes + len(chunk["length"]), self.steps + int(chunk["length"].sum())

    def close(self) -> None:
        index = {"version": VERSION, "tasks": self.tasks, "chunks": self.chunks, "digest": self._digest.hexdigest()}
        counts = {"episodes": self.episodes, "steps": self.steps}
        (self.directory / INDEX).write_text(json.dumps(index | counts, indent=1) + "\n")


def _check(chunk: dict[str, np.ndarray], tasks: int) -> None:
    """Raise ValueError if the arrays of a chunk do not describe the same episodes."""
    count, steps = chunk["reward"].shape
    shapes = (chunk["obs"].shape[:2], chunk["action"].shape[:2], *(chunk[name].shape for name in ARRAYS[3:]))
    if shapes != ((count, steps + 1), (count, steps), (count,), (count,), (count,)) or chunk["action"].ndim != 3:
        raise ValueError(f"its arrays have shapes that do not fit: {', '.join(map(str, shapes))}")
    lengths, task = chunk["length"], chunk["task"]
    if not count or lengths.min() < 1 or lengths.max() > steps or task.min() < 0 or task.max() >= tasks:
        raise ValueError(f"it has no episodes, or lengths beyond {steps}, or tasks beyond {tasks}")
    for name in ("obs", "action", "reward"):
        if np.issubdtype(chunk[name].dtype, np.floating) and not np.isfinite(chunk[name]).all():
            raise ValueError(f"{name} has non-finite values")


class EpisodeData:
    """Sequences of episodes for all local lanes. Every lane draws from all episodes with its own random stream."""

    def __init__(
        self,
        directories: Sequence[str],
        tasks: Sequence[str],
        obs_shape: tuple[int, ...],
        actions: int,
        steps: int,
        lanes: Lanes,
        purpose: str,
        device: torch.device,
    ) -> None:
        """Open data sets for sequences of `steps` steps. Episodes of other tasks than `tasks`, if named, are skipped.

        Vectors with fewer features than `obs_shape` and `actions` are padded with zeros.
        """
        self._tasks, self._obs_shape, self._actions, self._steps = tuple(tasks), obs_shape, actions, steps
        self._streams, self._upload = lanes.streams(purpose), Uploader(device)
        self._chunks: list[dict[str, np.ndarray]] = []
        digest = hashlib.blake2b(digest_size=8)
        for directory in directories:
            index = read_index(directory)
            digest.update(str(index.get("digest")).encode())
            self._chunks += [self._open(Path(directory), name, index["tasks"]) for name in index["chunks"]]
        self.digest = int.from_bytes(digest.digest(), "little") >> 1
        """Number that identifies the data, for an int64."""
        starts = [np.where(chunk["task"] < 0, 0, np.maximum(chunk["length"] - steps + 1, 0)) for chunk in self._chunks]
        self._first = np.concatenate([[0], np.cumsum(np.concatenate(starts))])
        """Number of the first sequence of each episode, and of all sequences at the end."""
        self._bounds = np.cumsum([0, *map(len, starts)])
        if not 1 <= self._first[-1] <= 2**32:
            found = sorted({name for directory in directories for name in read_index(directory)["tasks"]})
            raise ConfigError(
                f"{', '.join(directories)} has {int(self._first[-1]):,} sequences of {steps} steps for the tasks "
                f"{', '.join(tasks)}. Its tasks are {', '.join(found[:30])}.",
                "Give data of these tasks, with at least one episode of that length.",
            )

    def _open(self, directory: Path, name: str, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Open the arrays of a chunk, with the run's task numbers; -1 for tasks that the run does not have."""
        chunk: dict[str, np.ndarray] = {}
        try:
            for array in ARRAYS:
                mode: Any = "r" if array in ARRAYS[:3] else None  # small arrays are read at once
                chunk[array] = np.load(directory / f"{name}.{array}.npy", mmap_mode=mode, allow_pickle=False)
            obs, action = chunk["obs"].shape[2:], chunk["action"].shape[2]
            numbers = {known: number for number, known in enumerate(self._tasks)}
            mapping = np.array([numbers.get(task, -1) for task in names]) if self._tasks else np.zeros(len(names), int)
            chunk["task"] = mapping[chunk["task"].astype(np.int64)]
        except (OSError, ValueError, IndexError) as error:
            raise ConfigError(f"chunk {name} of {directory} cannot be read: {error}.", FIX) from None
        fits = obs == self._obs_shape or (len(obs) == len(self._obs_shape) == 1 and obs[0] <= self._obs_shape[0])
        if not fits or action > self._actions:
            raise ConfigError(
                f"chunk {name} of {directory} has observations {obs} and {action} action features, but the tasks of "
                f"this run have {self._obs_shape} and {self._actions}.",
                "Give data of the run's tasks, or train on the tasks of the data.",
            )
        return chunk

    def slices(self, counter: int, count: int) -> dict[str, Any]:
        """Sample `count` sequences for each lane, [L x M, H, ...] each, with the names of `Replay.slices`."""
        drawn = self._streams.integers(counter, int(self._first[-1]), count).flatten().numpy()  # [L x M]
        episodes = np.searchsorted(self._first, drawn, side="right") - 1
        starts = drawn - self._first[episodes]
        total, steps = len(drawn), self._steps
        images = self._chunks[0]["obs"].dtype == np.uint8
        obs = np.zeros((total, steps + 1, *self._obs_shape), np.uint8 if images else np.float32)
        action = np.zeros((total, steps, self._actions), np.float32)
        reward, terminated = np.zeros((total, steps), np.float32), np.zeros((total, steps), bool)
        task = np.zeros(total, np.int64)
        for number, chunk in enumerate(self._chunks):
            rows = np.flatnonzero((episodes >= self._bounds[number]) & (episodes < self._bounds[number + 1]))
            if not len(rows):
                continue
            episode, start = episodes[rows] - self._bounds[number], starts[rows]
            at = start[:, None] + np.arange(steps + 1)
            features: Any = (rows, slice(None), *(slice(size) for size in chunk["obs"].shape[2:]))
            obs[features] = chunk["obs"][episode[:, None], at]
            action[rows, :, : chunk["action"].shape[2]] = chunk["action"][episode[:, None], at[:, :-1]]
            reward[rows] = chunk["reward"][episode[:, None], at[:, :-1]]
            terminated[rows, -1] = chunk["terminated"][episode] & (start + steps == chunk["length"][episode])
            task[rows] = chunk["task"][episode]
        batch: dict[str, Any] = {"obs": torch.from_numpy(obs), "action": torch.from_numpy(action)}
        if len(self._tasks) > 1:
            batch["obs"] = {"obs": batch["obs"], "task": torch.from_numpy(task).unsqueeze(1).expand(-1, steps + 1)}
        batch |= {"reward": torch.from_numpy(reward), "terminated": torch.from_numpy(terminated)}
        return dict(self._upload(batch | {"whole": torch.ones(total, dtype=torch.bool)}))
