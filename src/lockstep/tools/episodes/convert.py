"""Write data sets of episodes from replay buffers of runs, and from chunks of the authors' TD-MPC2."""

import shutil
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from lockstep.checkpoint import format as form
from lockstep.checkpoint.lineage import find
from lockstep.config import ConfigError
from lockstep.data.episodes import INDEX, EpisodeWriter
from lockstep.io.jsonl import CHECKPOINTS
from lockstep.io.safe_read import UnreadableFileError
from lockstep.run_dir import read_config, read_task_spec
from lockstep.tools.episodes.torch_archive import read_archive

REPLAY = "algorithm.replay."


def write_episodes(sources: Sequence[Path], out: Path, tasks: Sequence[str]) -> EpisodeWriter:
    """Write the episodes of runs, or of the authors' chunks of `tasks`, as one data set.

    Raises:
        ConfigError: A source has no episodes, sources are of both kinds, or the directory exists.
    """
    if out.exists():
        raise ConfigError(f"{out} exists.", "Give a new directory.")
    chunks = [source.suffix in (".pt", ".pth") for source in sources]
    if any(chunks) != all(chunks):
        raise ConfigError("the sources are runs and .pt files.", "Convert them to two data sets; a run can use both.")
    if all(chunks) and not tasks:
        raise ConfigError(
            "files of the authors' TD-MPC2 have numbers instead of names of tasks.",
            "Name the tasks in their order: --tasks mt30, or --tasks walker-run cheetah-run.",
        )
    names = list(tasks) if all(chunks) else _names_of_runs(sources)
    writer = EpisodeWriter(out, names)
    try:
        for source in sources:
            try:
                writer.add(read_chunk(source) if all(chunks) else read_replay(source, names))
            except (OSError, UnreadableFileError, ValueError, TypeError, KeyError, IndexError, BadZipFile) as error:
                raise ConfigError(
                    f"{source} has no readable episodes: {error}.", "Give runs with replay buffers, or .pt files."
                ) from None
        writer.close()
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)  # part of a data set would look like a whole one
        raise
    return writer


# -- the authors' layout -----------------------------------------------------------------------------------------------


def read_chunk(path: Path) -> dict[str, np.ndarray]:
    """Read a TensorDict of `obs` [N, T + 1, D], `action` [N, T + 1, K], `reward` and `task` [N, T + 1].

    Action and reward of a row led to its observation, so those of the first row have no meaning.
    """
    found = read_archive(path, ("obs", "action", "reward", "task"))
    reward = found["reward"].reshape(found["obs"].shape[:2])[:, 1:]
    terminated = found["terminated"].reshape(len(reward), -1)[:, 1:] if "terminated" in found else np.zeros((1, 1))
    return {
        "obs": found["obs"],
        "action": found["action"][:, 1:].astype(np.float32),
        "reward": reward.astype(np.float32),
        "task": found["task"].reshape(len(reward), -1)[:, 0].astype(np.int32),
        "length": np.full(len(reward), reward.shape[1], np.int32),
        "terminated": np.broadcast_to(terminated.astype(bool).any(1), (len(reward),)).copy(),
    }


# -- runs --------------------------------------------------------------------------------------------------------------


def read_replay(run: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Read the replay buffer of a run's newest checkpoint as episodes. Those at its ends may be incomplete."""
    pieces: list[dict[str, Any]] = []
    own = _tasks_of(run)
    for steps in _read_lanes(run):
        for env in range(steps["reward"].shape[1]):
            pieces += _split({name: array[:, env] for name, array in steps.items()})
    longest = max(len(piece["reward"]) for piece in pieces)
    first = pieces[0]
    chunk = {
        "obs": np.zeros((len(pieces), longest + 1, *first["obs"].shape[1:]), first["obs"].dtype),
        "action": np.zeros((len(pieces), longest, first["action"].shape[1]), np.float32),
        "reward": np.zeros((len(pieces), longest), np.float32),
        "task": np.array([names.index(own[piece["task"]]) for piece in pieces], np.int32),
        "length": np.array([len(piece["reward"]) for piece in pieces], np.int32),
        "terminated": np.array([piece["terminated"] for piece in pieces]),
    }
    for row, piece in enumerate(pieces):
        for name in ("obs", "action", "reward"):
            chunk[name][row, : len(piece[name])] = piece[name]
    return chunk


def _read_lanes(run: Path) -> Iterator[dict[str, np.ndarray]]:
    """Yield the transitions of each lane, [rows, envs, ...] each."""
    directory = run / CHECKPOINTS
    name, _ = find(directory, None, form.verify)
    if name is None:
        raise ConfigError(f"{run} has no checkpoint.", "Give a run of TD-MPC2 or DDPG that has saved.")
    path = directory / str(name)
    with form.user_facing_errors(path):
        values, files = form.read_values(path), form.read_manifest(path)["files"]
        for lane in range(int(values["lanes"])):
            state = form.read_lane(path, lane, files, values.get("rows"))
            replay = {key.removeprefix(REPLAY): x for key, x in state.items() if key.startswith(REPLAY)}
            if "reward" not in replay or not len(replay["reward"]):
                raise ValueError("it has no replay buffer")
            if "obs.obs" in replay:
                replay |= {"obs": replay["obs.obs"], "next_obs": replay["next_obs.obs"], "task": replay["obs.task"]}
            if "obs" not in replay or replay["reward"].dim() != 2:
                raise ValueError("its observations are a Dict, or it trains a team")
            wanted = ("obs", "next_obs", "action", "reward", "terminated", "truncated", "task")
            yield {key: replay[key].numpy() for key in wanted if key in replay}


def _split(steps: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Split the steps of one environment [rows, ...] at the ends of episodes."""
    ends = np.flatnonzero(steps["terminated"] | steps["truncated"]) + 1
    bounds = sorted({0, *ends.tolist(), len(steps["reward"])})
    pieces = []
    for start, stop in pairwise(bounds):
        pieces.append(
            {
                "obs": np.concatenate([steps["obs"][start:stop], steps["next_obs"][stop - 1 : stop]]),
                "action": steps["action"][start:stop],
                "reward": steps["reward"][start:stop],
                "terminated": bool(steps["terminated"][stop - 1]),
                "task": int(steps["task"][start]) if "task" in steps else 0,
            }
        )
    return pieces


def _names_of_runs(runs: Sequence[Path]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in _tasks_of(run)))


def _tasks_of(run: Path) -> list[str]:
    """Return the names of a run's tasks; the name of its recipe if they are not known."""
    if (run / INDEX).exists():
        raise ConfigError(f"{run} is a data set already.", "Give run directories.")
    recipe, _ = read_config(run)
    parts: Any = (read_task_spec(run) or {}).get("parts") or [[recipe]]
    return [str(part[0]) for part in parts]
