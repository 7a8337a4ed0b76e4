"""`lockstep pull USER/NAME`: download a published run from the Hugging Face Hub."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from lockstep.cli.parser import parse_args


@dataclass(frozen=True)
class Pull:
    """Download a run that `lockstep push` has published. It can be evaluated, played, forked, resumed and verified.

    Only the files of a run are downloaded, and nothing in them is executed: safetensors, JSON and YAML with known names
    and limited sizes. The same command resumes an interrupted download. Needs the extra `hub`.
    """

    repo: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="USER/NAME")]
    """Repository of the run."""
    out: Path | None = None
    """Run directory to create. None: runs/NAME."""
    revision: str | None = None
    """Commit or branch. None: the newest commit."""
    max_gb: float = 20.0
    """Maximum size of the run in gigabytes. Larger ones are refused."""


def run(arguments: Sequence[str]) -> int:
    command = parse_args(Pull, arguments, "lockstep pull")

    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from lockstep.config import ConfigError
    from lockstep.io.rich_console import PrintableConsole
    from lockstep.run_dir import require_unused
    from lockstep.tools.hub.client import check_repo_name, connect
    from lockstep.tools.hub.pull import download, find_published

    check_repo_name(command.repo)
    if not 0 < command.max_gb < 1e6:
        raise ConfigError(f"--max-gb is {command.max_gb}.", "Use a number of gigabytes, such as 20.")
    target = command.out or Path("runs") / command.repo.partition("/")[2]
    require_unused(target)
    api = connect()
    console = PrintableConsole(soft_wrap=True)
    with console.status(f"reading {command.repo}"):
        commit, files = find_published(api, command.repo, command.revision, int(command.max_gb * 1e9))
    columns = TextColumn("downloading"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("downloading", total=sum(file.size for file in files))
        notes = download(api, command.repo, commit, files, target, lambda size: progress.advance(task, size))
    console.print(f"{target}: {len(files)} files of {command.repo}, commit {commit[:12]}", markup=False)
    for note in notes:
        console.print(f"  {note}", markup=False)
    for action in ("play", "eval", "verify", "resume"):
        console.print(f"  {action:8} lockstep {action} {target}", markup=False)
    return 0
