"""`lockstep push RUN USER/NAME`: publish a run on the Hugging Face Hub."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from lockstep.cli.parser import parse_args


@dataclass(frozen=True)
class Push:
    """Publish a run on the Hugging Face Hub: safetensors, settings, metrics, hash chain, card and report.

    Everything is uploaded in one commit. The same command continues an interrupted push, and replaces an earlier one.
    Log in with `hf auth login`, or set HF_TOKEN. Needs the extra `hub`.
    """

    run: tyro.conf.Positional[Path]
    """Run directory."""
    repo: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="USER/NAME")]
    """Repository. It is created if it does not exist."""
    private: bool = False
    """Create a private repository. An existing one keeps its visibility."""
    all_checkpoints: bool = False
    """Publish all kept checkpoints, so that more segments can be verified. Otherwise the newest and the best."""
    proof: Path | None = None
    """File written by `lockstep prove --json FILE`. None: no proof is published."""


def run(arguments: Sequence[str]) -> int:
    command = parse_args(Push, arguments, "lockstep push")

    from lockstep.io.rich_console import PrintableConsole
    from lockstep.io.temporary_directory import temporary_directory
    from lockstep.tools.hub.client import check_repo_name, connect
    from lockstep.tools.hub.push import stage, upload

    check_repo_name(command.repo)
    api = connect()
    console = PrintableConsole(soft_wrap=True)
    with temporary_directory("push") as temporary:
        directory = temporary / "run"
        directory.mkdir()
        with console.status(f"checking and copying {command.run}"):
            stage(command.run, directory, command.repo, command.all_checkpoints, command.proof)
        console.print(f"Uploading to {command.repo}...")  # huggingface_hub shows the progress
        pushed = upload(api, directory, command.repo, command.private)
    console.print(f"{pushed.url}: {pushed.files} files, {pushed.size / 1e6:,.1f} MB, commit {pushed.commit[:12]}")
    console.print(f"  download  lockstep pull {command.repo}")
    return 0
