"""Publish a run: copy what is published to a temporary directory, then upload it in one commit.

The copy is consistent although the run may be training. Paths, host names and process ids of this machine are removed.
Large files that the Hub already has are not uploaded again, so a push that was interrupted continues where it was.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lockstep.checkpoint.copying import copy_checkpoint
from lockstep.checkpoint.errors import CorruptCheckpointError
from lockstep.checkpoint.lineage import best_checkpoint, lineage, list_checkpoints, read_claim
from lockstep.checkpoint.naming import CheckpointName, generation_file, generations
from lockstep.config import ConfigError, read_yaml
from lockstep.fork_record import read_fork, run_id
from lockstep.io.jsonl import CHAIN, CHANGES, CHECKPOINTS, CONFIG, FORK, METRICS, STATUS, TASK, VIDEO, read_status
from lockstep.io.safe_read import UnreadableFileError, read_bytes
from lockstep.tools.hub.card import write_card
from lockstep.tools.hub.client import hub_errors, list_files
from lockstep.tools.hub.files import CARD, PROOF, REPORT, is_published_name
from lockstep.tools.report.page import write_page
from lockstep.tools.report.run_data import read_record, read_runs
from lockstep.tools.verify.history import RunHistory, read_history
from lockstep.tools.verify.repetition import share

if TYPE_CHECKING:
    from huggingface_hub import HfApi

LOG_BYTES, GIF_BYTES = 2**28, 2**24
"""Size limits of logs and of the video. A larger video is not published."""


@dataclass(frozen=True)
class Pushed:
    """Result of a push."""

    url: str
    commit: str
    files: int
    size: int


def stage(run: Path, directory: Path, repo: str, all_checkpoints: bool, proof: Path | None) -> None:
    """Write the files to publish to an empty directory.

    Raises:
        ConfigError: The run cannot be read, has no checkpoint, or its chain is broken.
    """
    names = lineage(run / CHECKPOINTS) if (run / CHECKPOINTS).is_dir() else []
    if not names:
        raise ConfigError(f"{run} has no checkpoint to publish.", "Wait for its first save.")
    history = _history(run)
    try:
        best = best_checkpoint(run / CHECKPOINTS)
        chosen = names if all_checkpoints else [name for name in names if name in (names[0], best)]
        checkpoints = directory / CHECKPOINTS
        checkpoints.mkdir()
        for name in chosen:
            (checkpoints / str(name)).mkdir()
            copy_checkpoint(run / CHECKPOINTS / str(name), checkpoints / str(name))
        (checkpoints / "latest").write_text(str(names[0]))
        if best in chosen:
            (checkpoints / "best").write_text(str(best))
        _write_claims(run, checkpoints)
        for log in (METRICS, CHANGES, CHAIN, TASK):
            if (run / log).is_file():
                (directory / log).write_bytes(read_bytes(run / log, LOG_BYTES))
        _write_settings(run, directory)
        record = read_record(proof, "a file written by `lockstep prove --json FILE`") if proof else None
        if record is not None:
            _write_json(directory / PROOF, record)
        _write_card(run, directory, repo, history, record)
    except CorruptCheckpointError as damage:
        raise ConfigError(f"{damage}.", "Check the run: lockstep verify-files " + str(run)) from None
    except UnreadableFileError as error:
        raise ConfigError(f"{error}.", "Restore the file from a copy.") from None


def _history(run: Path) -> RunHistory | None:
    """Return the history of a run. None: an older version trained it, without a chain."""
    if not (run / CHAIN).is_file():
        return None
    history = read_history(run)
    if history.problems:
        raise ConfigError(f"the chain of {run} is broken: {history.problems[0]}.", f"See: lockstep verify {run}")
    return history


def _write_claims(run: Path, checkpoints: Path) -> None:
    """Write the claims of all generations, with the id of the run instead of host and process."""
    identity = run_id(run)
    published = {name.generation for name in list_checkpoints(run / CHECKPOINTS)}
    for generation in generations(path.name for path in (run / CHECKPOINTS).iterdir()):
        claim = read_claim(run / CHECKPOINTS, generation)
        if "parent" in claim or generation in published:
            kept = {key: claim[key] for key in ("parent", "processes", "began") if key in claim}
            _write_json(generation_file(checkpoints, generation), kept | {"run_id": identity})


def _write_settings(run: Path, directory: Path) -> None:
    """Write config, status and the record of a fork, without paths of this machine."""
    config = read_yaml(run / CONFIG)
    if isinstance(settings := config.get("run"), dict):
        config["run"] = settings | {"runs_dir": "runs"}
    (directory / CONFIG).write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    status = read_status(run)
    _write_json(directory / STATUS, {"state": "preempted", "processes": 1, **status, "job": ""})
    if (fork := read_fork(run)) is not None:
        record = json.loads(fork.to_json())
        _write_json(directory / FORK, record | {"parent": f"/{Path(fork.parent).name}"})


def _write_card(run: Path, directory: Path, repo: str, history: RunHistory | None, proof: Any) -> None:
    (data,) = read_runs([run])
    entry, segments = "", ""
    if history is not None and history.entries:
        entry = history.entries[-1].hash
        segments = f"All {len(history.segments)} segments cover {share(history.segments, history.samples)}."
    (directory / CARD).write_text(write_card(data, repo, entry, segments, proof), encoding="utf-8")
    (directory / REPORT).write_bytes(write_page([data], proof=proof).encode("utf-8", "replace"))
    video = run / VIDEO
    if video.is_file() and not video.is_symlink() and video.stat().st_size <= GIF_BYTES:
        shutil.copyfile(video, directory / VIDEO)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def upload(api: "HfApi", directory: Path, repo: str, private: bool) -> Pushed:
    """Upload a staged run in one commit, which replaces what an earlier push has written.

    Raises:
        ConfigError: The repository holds other files, or the upload failed. The repository is then unchanged.
    """
    from huggingface_hub import CommitOperation, CommitOperationAdd, CommitOperationDelete

    paths = {path.relative_to(directory).as_posix(): path for path in sorted(directory.rglob("*")) if path.is_file()}
    with hub_errors(f"the push to {repo}"):
        url = api.create_repo(repo, private=private, exist_ok=True)
        commit, remote = list_files(api, repo, None)
        if foreign := sorted(name for name in remote if not is_published_name(name)):
            raise ConfigError(
                f"{repo} contains {foreign[0][:100]!r}, which is not part of a published run.",
                "Choose a new name for the repository.",
            )
        stale = [name for name in remote if name not in paths and name != ".gitattributes"]
        operations: list[CommitOperation] = [
            *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(path)) for name, path in paths.items()),
            *(CommitOperationDelete(path_in_repo=name) for name in stale),
        ]
        message = f"Lockstep run at {max(_samples(paths)):,} samples"
        result = api.create_commit(repo, operations, commit_message=message, parent_commit=commit)
    return Pushed(str(url), result.oid, len(paths), sum(path.stat().st_size for path in paths.values()))


def _samples(names: Any) -> list[int]:
    found = (CheckpointName.parse(name.split("/")[1]) for name in names if name.startswith(f"{CHECKPOINTS}/"))
    return [name.samples for name in found if name is not None]
