"""Connection to the Hugging Face Hub: the client, the names of repositories, and errors as messages.

The token is that of `hf auth login` or HF_TOKEN, and HF_ENDPOINT selects another server. huggingface_hub reads all of
them. Lockstep neither reads nor prints a token.
"""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from lockstep.config import ConfigError
from lockstep.tools.hub.files import MAX_FILES, RemoteFile

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9][A-Za-z0-9_.-]{0,95}", re.ASCII)


def connect() -> "HfApi":
    """Return a client. Raises ConfigError without the extra `hub`."""
    if find_spec("huggingface_hub") is None:
        raise ConfigError("the Hub needs huggingface_hub, which is not installed.", 'pip install "lockstep-rl[hub]"')
    from huggingface_hub import HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)


def check_repo_name(name: str) -> None:
    """Raise ConfigError unless a name is USER/NAME."""
    if not _NAME.fullmatch(name) or ".." in name or "--" in name:
        raise ConfigError(f"{name!r:.200} is not the name of a repository.", "Use USER/NAME, such as ada/snake-base.")


def list_files(api: "HfApi", repo: str, revision: str | None) -> tuple[str, dict[str, RemoteFile]]:
    """Return the commit of a repository and its files by name."""
    from huggingface_hub.hf_api import RepoFile

    commit = str(api.model_info(repo, revision=revision).sha)
    files: dict[str, RemoteFile] = {}
    for entry in api.list_repo_tree(repo, recursive=True, revision=commit):
        if isinstance(entry, RepoFile):
            sha256 = entry.lfs.sha256 if entry.lfs is not None else ""
            files[entry.path] = RemoteFile(entry.path, entry.size, sha256, entry.blob_id)
        if len(files) > MAX_FILES:
            break
    return commit, files


@contextmanager
def hub_errors(action: str, hint: str = "") -> Iterator[None]:
    """Turn errors of the Hub, the network and the disk into ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # the HTTP library that huggingface_hub uses, and its errors, depend on its version
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403, 404):
            fix = "Check the name. For a private repository or a push: hf auth login, with a token that may do this."
        else:
            fix = hint or "Check the network and try again: finished files are not transferred twice."
        problem = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise ConfigError(f"{action} failed: {problem}", fix) from None
