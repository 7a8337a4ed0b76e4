"""Hash chain of the checkpoints of a run, so that `lockstep verify` can check and repeat every part of it.

Each manifest has an entry: what was written, by which code, on which machine, with which settings, and the hash of the
entry of its parent. `chain.jsonl` in the run directory keeps the entries of deleted checkpoints, and the settings.
Entries are found by following the parents from the newest checkpoint. Lines that are not reached this way, such as
those of a save that failed, do not matter. Hashes do not authenticate an author: only a repeated segment shows that the
entries are true.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from lockstep.checkpoint import format as form
from lockstep.checkpoint.naming import CheckpointName
from lockstep.checkpoint.provenance import describe_provenance
from lockstep.config import Recipe, as_dict
from lockstep.io.jsonl import CHAIN, CHECKPOINTS, append_jsonl, iter_jsonl
from lockstep.io.safe_read import shallow

CHAIN_BYTES = 256 * 2**20
"""Bytes of a chain.jsonl that are read."""
MAX_DEPTH = 4
_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)
_NOT_HASHED = ("name", "runs_dir", "allow_other_machine")
"""Settings of `run` that are those of a directory or of one start."""


@dataclass(frozen=True)
class Entry:
    """Entry of one checkpoint in the chain."""

    checkpoint: str
    """Name under which the checkpoint was published."""
    parent: str
    """Hash of the entry of the previous checkpoint. Empty: the run started from its settings."""
    previous: str
    """Name of that checkpoint in the same directory; empty if there is none."""
    processes: int
    """Number of processes that wrote the checkpoint."""
    config: str
    """`hash_settings` of the settings."""
    started_with: str
    """What else the training since the previous checkpoint depends on; empty if nothing."""
    complete: bool
    """Whether no evaluation was pending. Only a complete checkpoint ends a segment."""
    files: dict[str, str]
    """SHA-256 of each file that was written, not linked from the previous checkpoint."""
    machine: dict[str, str]
    """The machine, as in the manifest."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """Code, packages and CPU."""

    @property
    def hash(self) -> str:
        return _sha256(asdict(self))

    @property
    def samples(self) -> int:
        name = CheckpointName.parse(self.checkpoint)
        return name.samples if name else 0


def recorded_settings(recipe: Recipe, lanes: int) -> dict[str, Any]:
    """Return the settings of a run as plain values, without those of its directory or of one start."""
    settings = as_dict(recipe)
    return plain_settings(recipe.name, settings | {"run": settings["run"] | {"lanes": lanes}})


def plain_settings(recipe: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as in a config.yaml in the form that is recorded and hashed."""
    run = {key: value for key, value in settings.get("run", {}).items() if key not in _NOT_HASHED}
    plain: dict[str, Any] = json.loads(json.dumps({"recipe": recipe, **settings, "run": run}))
    return plain


def hash_settings(settings: Mapping[str, Any]) -> str:
    """SHA-256 of plain settings."""
    return _sha256(settings)


def entry_hash(manifest: Mapping[str, Any]) -> str:
    """Return the hash of the entry of a checkpoint. Checkpoints of older versions have none: that of the manifest."""
    entry = entry_of(manifest)
    return entry.hash if entry is not None else _sha256({"files": manifest["files"], "machine": manifest["machine"]})


def entry_of(manifest: Mapping[str, Any]) -> Entry | None:
    """Return the entry of a checkpoint from its manifest. None: it has no valid entry."""
    chain = manifest.get("chain")
    if not isinstance(chain, dict) or not isinstance(names := chain.get("written"), list):
        return None
    files = {name: digest for name, digest in manifest["files"].items() if name in set(map(str, names))}
    values = {key: value for key, value in chain.items() if key != "written"}
    return parse_entry(values | {"files": files, "machine": manifest["machine"]})


def in_manifest(entry: Entry) -> dict[str, Any]:
    """Return what a manifest records of an entry, in addition to its own files and machine."""
    values = asdict(entry)
    return {key: values[key] for key in values if key not in ("files", "machine")} | {"written": sorted(entry.files)}


def parse_entry(values: Mapping[str, Any]) -> Entry | None:
    """Return an entry from plain values that may be untrusted. None: they are not valid."""
    if values.keys() != {each.name for each in fields(Entry)} or not shallow(dict(values), MAX_DEPTH):
        return None
    valid = (
        isinstance(values["checkpoint"], str)
        and CheckpointName.parse(values["checkpoint"]) is not None
        and (values["previous"] == "" or CheckpointName.parse(str(values["previous"])) is not None)
        and (values["parent"] == "" or _is_hash(values["parent"]))
        and _is_hash(values["config"])
        and type(values["processes"]) is int
        and 1 <= values["processes"] < 2**31
        and isinstance(values["started_with"], str)
        and isinstance(values["complete"], bool)
        and isinstance(values["provenance"], dict)
        and _are_texts(values["machine"])
        and _are_texts(values["files"])
        and all(map(_is_hash, values["files"].values()))
    )
    return Entry(**values) if valid else None


class ChainWriter:
    """Writes the entries of one start of a run. Only the main process uses it."""

    def __init__(self, run: Path, settings: Mapping[str, Any]) -> None:
        self.run, self.settings = run, settings
        self.started_with = ""
        """`Entry.started_with` of the next published checkpoint."""
        self._published: dict[CheckpointName, str] = {}
        """Hash of the entry of the newest checkpoint that this start has published."""
        self._settings_written = False

    def new_entry(
        self,
        name: CheckpointName,
        previous: CheckpointName | None,
        files: Mapping[str, str],
        machine: Mapping[str, str],
        processes: int,
        complete: bool,
    ) -> Entry:
        """Return the entry of a checkpoint that is about to be published after `previous`."""
        parent = ""
        if previous is not None:
            directory = self.run / CHECKPOINTS / str(previous)
            parent = self._published.get(previous) or entry_hash(form.read_manifest(directory))
        return Entry(
            checkpoint=str(name),
            parent=parent,
            previous=str(previous) if previous else "",
            processes=processes,
            config=hash_settings(self.settings),
            started_with=self.started_with,
            complete=complete,
            files=dict(files),
            machine=dict(machine),
            provenance=describe_provenance(str(self.settings.get("recipe", ""))),
        )

    def append(self, entry: Entry) -> None:
        """Append an entry to the log of the run, and the settings before the first one. Not synced."""
        if not self._settings_written:
            append_jsonl(self.run / CHAIN, {"samples": entry.samples, "settings": self.settings})
            self._settings_written = True
        append_jsonl(self.run / CHAIN, {"samples": entry.samples, "entry": asdict(entry)})

    def published(self, entry: Entry) -> None:
        """Record that a checkpoint was published."""
        name = CheckpointName.parse(entry.checkpoint)
        assert name is not None
        self._published, self.started_with = {name: entry.hash}, ""


def read_log(run: Path) -> tuple[dict[str, Entry], dict[str, dict[str, Any]]]:
    """Return the entries and the settings in the chain log of a run, both by hash. Invalid lines are skipped."""
    entries: dict[str, Entry] = {}
    settings: dict[str, dict[str, Any]] = {}
    for line in iter_jsonl(run / CHAIN, CHAIN_BYTES):
        if isinstance(line.get("settings"), dict) and shallow(line["settings"]):
            settings[hash_settings(line["settings"])] = line["settings"]
        elif isinstance(line.get("entry"), dict) and (entry := parse_entry(line["entry"])) is not None:
            entries[entry.hash] = entry
    return entries, settings


def follow(head: Entry, entries: Mapping[str, Entry]) -> list[Entry]:
    """Return the entries from the oldest known one to `head`."""
    line = [head]
    while line[-1].parent in entries and len(line) <= len(entries):
        line.append(entries[line[-1].parent])
    return line[::-1]


def _sha256(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and _HASH.fullmatch(value) is not None


def _are_texts(values: Any) -> bool:
    texts: Iterable[Any] = (*values, *values.values()) if isinstance(values, dict) else (None,)
    return all(isinstance(text, str) for text in texts)
