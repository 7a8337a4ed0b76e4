"""Worker process, `python -m lockstep.tasks.gym.worker`: steps some environments of a `WorkerPool`."""

import faulthandler
import json
import mmap
import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import Any

import gymnasium

from lockstep.config import ConfigError
from lockstep.launch.process_lifetime import die_with_parent
from lockstep.tasks.gym.sync_envs import SharedArrays, SyncEnvs
from lockstep.tasks.gym.worker_protocol import Message, Request, Response, lay_out, pack, receive, send, unpack


def main() -> int:
    """Make environments and serve requests until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches workers, but a stopping run still needs them
    faulthandler.enable()
    channel, memory = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    request = receive(channel)
    if request is None:
        return 0
    try:
        rows = _make(json.loads(request.body), memory, request.number)
        send(channel, Message(Response.DONE))
        while (request := receive(channel)) is not None:
            send(channel, _handle(request, rows))
        rows.close()
        return 0
    except ConfigError as error:
        message = Message(Response.REFUSED, body=str(error).encode())
    except Exception:
        message = Message(Response.FAILED, body=traceback.format_exc().encode())
    with suppress(OSError):  # the parent may be gone
        send(channel, message)
    return 1


def _make(settings: dict[str, Any], memory: int, first: int) -> SyncEnvs:
    if settings["die_with_parent"]:
        die_with_parent()
    rows = slice(first, None, settings["workers"])
    table = SharedArrays(**lay_out(settings["layout"], mmap.mmap(memory, 0), rows))
    os.close(memory)
    id = settings["id"]
    try:
        return SyncEnvs(id, settings["options"], table)
    except gymnasium.error.UnregisteredEnv as error:
        raise ConfigError(
            f"{id} is registered in the training process, but not in its workers, which are separate Python processes.",
            "Write the id with the module that registers it, as in my_module:Name-v0, or use --task.num-workers 0.",
        ) from error


def _handle(request: Message, rows: SyncEnvs) -> Message:
    match request.kind:
        case Request.STEP:
            rows.step()
        case Request.BEGIN:
            rows.begin({row: int(seed) for row, seed in unpack(request.body).items()})
        case Request.REPLAY:
            return Message(Response.DONE, body=json.dumps([*rows.replay(unpack(request.body))]).encode())
        case Request.TEXT:
            return Message(Response.DONE, body=rows.render_text(request.number).encode())
        case Request.FRAME:
            try:
                return Message(Response.DONE, body=pack({0: rows.render(request.number)}))
            except ConfigError as error:  # rendering failed; the worker continues
                return Message(Response.REFUSED, body=str(error).encode())
    return Message(Response.DONE)


if __name__ == "__main__":
    sys.exit(main())
