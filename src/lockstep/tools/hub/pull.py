"""Download a published run. Names and sizes are checked first, every file is compared with its hash, and nothing runs.

Files are downloaded to a hidden directory next to the final one, which is renamed at the end. The same command resumes
a download that was interrupted.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint import format as form
from lockstep.checkpoint.errors import CorruptCheckpointError
from lockstep.checkpoint.lineage import lineage, list_checkpoints
from lockstep.config import ConfigError
from lockstep.io.durable import fsync_dir, make_directories
from lockstep.io.jsonl import CHECKPOINTS, CONFIG
from lockstep.registry import RECIPES
from lockstep.run_dir import read_config
from lockstep.run_reservation import require_unused
from lockstep.tools.export.import_weights import refuse_code
from lockstep.tools.hub.client import hub_errors, list_files
from lockstep.tools.hub.files import RemoteFile, choose_downloads

if TYPE_CHECKING:
    from huggingface_hub import HfApi

CHUNK = 2**20
_PARTIAL = ".partial"

Advance = Callable[[int], None]
"""Called with the number of bytes that were received or were already there."""


def find_published(api: "HfApi", repo: str, revision: str | None, max_bytes: int) -> tuple[str, list[RemoteFile]]:
    """Return the commit of a published run and the files to download.

    Raises:
        ConfigError: There is no such repository, or it is not a published run.
    """
    with hub_errors(f"reading {repo}"):
        commit, files = list_files(api, repo, revision)
    return commit, choose_downloads(files, repo, max_bytes)


def download(
    api: "HfApi", repo: str, commit: str, files: list[RemoteFile], target: Path, advance: Advance
) -> list[str]:
    """Download a published run to a new directory. Return messages for the user.

    Raises:
        ConfigError: The directory exists, a file differs from what the Hub lists, or the run is invalid.
    """
    require_unused(target)
    make_directories(target.parent)
    unfinished = target.with_name(f".{target.name}.{commit[:12]}{_PARTIAL}")
    size = sum(file.size for file in files)
    if (free := shutil.disk_usage(target.parent).free) < size:
        raise ConfigError(f"{repo} has {size:,} bytes, and {target.parent} has {free:,} free.", "Free some space.")
    if unfinished.is_symlink():
        raise ConfigError(f"{unfinished} is a link.", "Remove it.")
    for file in files:
        path = unfinished / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with hub_errors(f"the download of {file.name} from {repo}"):
            _download(api, repo, commit, file, path, advance)
    try:
        notes = check_downloaded(unfinished)
    except (ConfigError, CorruptCheckpointError, OSError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{repo} is not a valid run: {error}", "Nothing was kept.") from None
    fsync_dir(unfinished)
    if target.exists():
        os.rmdir(target)  # empty, as was checked above
    os.rename(unfinished, target)
    fsync_dir(target.parent)
    return notes


def _download(api: "HfApi", repo: str, commit: str, file: RemoteFile, path: Path, advance: Advance) -> None:
    """Download one file, beginning where an interrupted download ended. Reads at most the listed number of bytes."""
    if path.is_file() and not path.is_symlink() and path.stat().st_size == file.size and matches(path, file):
        advance(file.size)
        return
    partial = path.with_name(f".{path.name}{_PARTIAL}")
    if partial.is_symlink():
        partial.unlink()
    start = partial.stat().st_size if partial.is_file() else 0
    if start >= file.size:
        start = 0
    with (
        _response(api, repo, commit, file.name, start) as (response, resumed),
        partial.open("r+b" if resumed else "wb") as out,
    ):
        received = start if resumed else 0
        out.seek(received)
        advance(received)
        for chunk in response.iter_bytes():
            received += len(chunk)
            if received > file.size:
                raise ConfigError(f"{file.name} of {repo} is larger than {file.size:,} bytes, its listed size.")
            out.write(chunk)
            advance(len(chunk))
        out.truncate()
        out.flush()
        os.fsync(out.fileno())
    if received < file.size:
        raise ConfigError(f"{file.name} of {repo} ended after {received:,} of {file.size:,} bytes.", "Try again.")
    if not matches(partial, file):
        partial.unlink()
        raise ConfigError(f"{file.name} of {repo} differs from the hash that the Hub lists.", "Try again.")
    os.replace(partial, path)


@contextmanager
def _response(api: "HfApi", repo: str, commit: str, name: str, start: int) -> Iterator[tuple[Any, bool]]:
    """Yield the response for the rest of a file, and whether it begins at `start`."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    url = hf_hub_url(repo, name, revision=commit, endpoint=api.endpoint)
    headers = build_hf_headers(token=api.token) | ({"Range": f"bytes={start}-"} if start else {})
    headers["Accept-Encoding"] = "identity"
    with get_session().stream("GET", url, headers=headers, follow_redirects=True) as response:
        if response.status_code >= 400:
            response.read()
        hf_raise_for_status(response)
        yield response, bool(start) and response.status_code == 206


def matches(path: Path, file: RemoteFile) -> bool:
    """Return whether a file has the hash that the Hub lists: SHA-256 of large files, git's SHA-1 of small ones."""
    digest = hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as content:
        while chunk := content.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest() == (file.sha256 or file.git_hash)


def check_downloaded(run: Path) -> list[str]:
    """Check a downloaded run before it gets its name: settings that name code, and every checkpoint.

    Raises:
        ConfigError: The settings are invalid, or would run code that is not part of Lockstep.
        CorruptCheckpointError: A checkpoint is damaged.
    """
    recipe, settings = read_config(run)
    if recipe not in RECIPES:
        raise ConfigError(
            f"the run has the recipe {recipe[:100]!r}, which is not part of Lockstep, and a download may not run code.",
            "Copy the run and the file of its recipe by other means if you trust them.",
        )
    refuse_code(settings, [], run / CONFIG)
    _refuse_files(settings)
    names = list_checkpoints(run / CHECKPOINTS)
    if not lineage(run / CHECKPOINTS):
        raise ConfigError("no checkpoint belongs to the run: claim files (attempt-*.json) are missing.")
    for name in names:
        form.verify(run / CHECKPOINTS / str(name))
    return [f"{len(names)} checkpoint{'s' * (len(names) > 1)}, newest at {names[0].samples:,} samples, all intact"]


def _refuse_files(settings: Any) -> None:
    """Refuse settings with the path of a Python file, such as a submission that a run trains against."""
    waiting = [settings]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str) and value.endswith(".py"):
            raise ConfigError(
                f"the settings of the run name {value[:100]!r}, and a download may not run code.",
                "Copy the run and that file by other means if you trust them.",
            )
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        waiting += parts
