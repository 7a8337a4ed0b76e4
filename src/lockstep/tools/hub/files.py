"""The files of a published run: which names are allowed, and how large they may be.

A repository on the Hub may come from an attacker. Its names are compared with these patterns before anything is
downloaded, so that no name leads out of the run directory and no pickle or source file is stored.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.config import ConfigError
from lockstep.io.jsonl import CHAIN, CHANGES, CHECKPOINTS, CONFIG, FORK, METRICS, STATUS, TASK, VIDEO
from lockstep.io.safe_read import JSON_BYTES, YAML_BYTES

PROOF, CARD, REPORT = "proof.json", "README.md", "report.html"
NOT_DOWNLOADED = (CARD, REPORT, VIDEO, ".gitattributes")
"""Files of a published run for people."""
MAX_FILES = 10_000
LOG_BYTES = 2**28
_SIZES = {
    CONFIG: YAML_BYTES,
    CHANGES: LOG_BYTES,
    CHAIN: LOG_BYTES,
    METRICS: LOG_BYTES,
    FORK: JSON_BYTES,
    TASK: JSON_BYTES,
    STATUS: JSON_BYTES,
    PROOF: JSON_BYTES,
}
"""Files of the run directory that are downloaded, and their maximum size in bytes."""
_CHECKPOINT = r"\d{12,18}-g\d{4,9}"
_SMALL = re.compile(
    rf"{CHECKPOINTS}/(best|latest|attempt-\d{{4,9}}\.json|{_CHECKPOINT}/(manifest|train_state)\.json)", re.ASCII
)
_TENSORS = re.compile(
    rf"{CHECKPOINTS}/{_CHECKPOINT}/(shared\.safetensors|lanes-\d{{4,9}}-\d{{4,9}}\.safetensors"
    r"|replay-\d{4,9}-\d{4,9}-\d{12,18}-\d{12,18}\.(safetensors|parity))",
    re.ASCII,
)


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository, as the Hub lists it."""

    name: str
    size: int
    sha256: str
    """SHA-256 of a large file; empty for a small one, which has a git hash."""
    git_hash: str
    """SHA-1 of a small file as git computes it."""


def is_published_name(name: str) -> bool:
    """Return whether `push` writes files with this name."""
    return name in NOT_DOWNLOADED or name in _SIZES or any(p.fullmatch(name) for p in (_SMALL, _TENSORS))


def choose_downloads(files: Mapping[str, RemoteFile], source: str, max_bytes: int) -> list[RemoteFile]:
    """Return the files to download, smallest first.

    Raises:
        ConfigError: A name, a size or the number of files is not that of a published run.
    """
    if len(files) > MAX_FILES:
        raise ConfigError(f"{source} has more than {MAX_FILES:,} files.", "It is not a published run.")
    if unknown := sorted(name for name in files if not is_published_name(name)):
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        listed = ", ".join(repr(name)[:100] for name in unknown[:3])
        raise ConfigError(
            f"{source} contains {listed}{more}, which `lockstep push` does not write. Nothing was downloaded.",
            "A published run has safetensors, JSON, YAML and a card. Do not use files from this repository.",
        )
    if CONFIG not in files or not any(_TENSORS.fullmatch(name) for name in files):
        raise ConfigError(f"{source} is not a published run: it lacks {CONFIG} or a checkpoint.", "Check its name.")
    chosen = [file for name, file in files.items() if name not in NOT_DOWNLOADED]
    for file in chosen:
        limit = max_bytes if _TENSORS.fullmatch(file.name) else _SIZES.get(file.name, JSON_BYTES)
        if not 0 <= file.size <= limit:
            raise ConfigError(
                f"{file.name} of {source} has {file.size:,} bytes, more than the limit of {limit:,}.",
                "If you trust its author, raise the limit of tensors with --max-gb.",
            )
    if (total := sum(file.size for file in chosen)) > max_bytes:
        raise ConfigError(
            f"{source} has {total:,} bytes, more than the limit of {max_bytes:,}.", "Raise the limit with --max-gb."
        )
    return sorted(chosen, key=lambda file: (file.size, file.name))
