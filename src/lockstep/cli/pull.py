"""`lockstep pull`: download a published run from the Hugging Face Hub, or a run from a bucket."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from lockstep.bucket.urls import is_url
from lockstep.cli.parser import parse_args
from lockstep.io.printable import print_line


@dataclass(frozen=True)
class Pull:
    """Download a run that `lockstep push` has published, or a run in a bucket.

    It can be evaluated, played, forked, resumed and verified. Only the files of a run are downloaded, and nothing in
    them is executed: safetensors, JSON and YAML with known names and limited sizes. The same command resumes an
    interrupted download from the Hub. Needs the extra `hub` or `cloud`.
    """

    repo: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="USER/NAME|URL")]
    """Repository of the run on the Hub, or URL of the run, such as s3://bucket/runs/NAME."""
    out: Path | None = None
    """Run directory to create. None: runs/NAME."""
    revision: str | None = None
    """Commit or branch on the Hub. None: the newest commit."""
    max_gb: float = 20.0
    """Maximum size of a run on the Hub in gigabytes. Larger ones are refused."""


def run(arguments: Sequence[str]) -> int:
    command = parse_args(Pull, arguments, "lockstep pull")
    if is_url(command.repo):
        return _pull_from_bucket(command.repo, command.out)

    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from lockstep.config import ConfigError
    from lockstep.io.rich_console import PrintableConsole
    from lockstep.run_reservation import require_unused
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
    _print_commands(target)
    return 0


def _pull_from_bucket(url: str, out: Path | None) -> int:
    """Copy a run from a bucket to a run directory, which is complete as soon as it exists."""
    from lockstep.bucket.urls import split_run_url
    from lockstep.bucket.working_directory import URL_FILE
    from lockstep.bucket_copy import copy_run
    from lockstep.io.rich_console import PrintableConsole
    from lockstep.io.temporary_directory import temporary_directory
    from lockstep.run_reservation import require_unused

    target = out or Path("runs") / split_run_url(url)[1]
    require_unused(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with temporary_directory("pull", target.parent) as temporary:
        run = temporary / "run"
        run.mkdir()
        with PrintableConsole(stderr=True).status(f"downloading {url}"):
            copy_run(url, run, "all")
        (run / URL_FILE).unlink()
        run.rename(target)
    print_line(f"{target}: a copy of {url}")
    _print_commands(target)
    return 0


def _print_commands(run: Path) -> None:
    for action in ("play", "eval", "verify", "resume"):
        print_line(f"  {action:8} lockstep {action} {run}")
