"""Runs in a bucket as arguments of commands: each URL is replaced by the path of a local copy."""

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from lockstep.bucket.urls import is_url

if TYPE_CHECKING:
    from lockstep.bucket_copy import Content

CONTENT: "dict[str, Content]" = {
    **dict.fromkeys(("ls", "resume"), "logs"),
    **dict.fromkeys(("train", "eval", "play", "export", "report", "episodes"), "weights"),
    **dict.fromkeys(("fork", "verify", "verify-files", "replay", "bisect", "push"), "all"),
}
"""What each command reads of a run."""
_ARGUMENT = re.compile(r"(?P<option>--[\w-]+=)?(?P<url>[a-z][a-z0-9+.-]*://.+?)(?P<at>@\d+(ep)?)?", re.ASCII)


@contextmanager
def with_local_copies(command: str, arguments: Sequence[str]) -> Iterator[list[str]]:
    """Yield the arguments of a command with paths instead of URLs of runs."""
    found = {argument: _ARGUMENT.fullmatch(argument) for argument in arguments}
    matches = {argument: match for argument, match in found.items() if match and is_url(match["url"])}
    if command not in CONTENT or not matches:
        yield list(arguments)
        return
    from lockstep.bucket.urls import check_url
    from lockstep.bucket_copy import local_copy
    from lockstep.config import ConfigError
    from lockstep.io.rich_console import PrintableConsole

    console, paths, urls = PrintableConsole(stderr=True), dict[str, str](), dict[str, str]()
    with ExitStack() as on_exit:
        for argument, match in matches.items():
            url = check_url(match["url"])
            with console.status(f"reading {url}"):
                path = str(on_exit.enter_context(local_copy(url, CONTENT[command])))
            paths[argument], urls[path] = f"{match['option'] or ''}{path}{match['at'] or ''}", url
        try:
            yield [paths.get(argument, argument) for argument in arguments]
        except ConfigError as error:
            message = str(error)
            for path, url in urls.items():
                message = message.replace(path, url)
            raise ConfigError(message) from None
