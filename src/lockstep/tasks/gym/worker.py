"""A worker: the process, `python -m lockstep.tasks.gym.worker`, that steps some environments of a `Pool`."""

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
    """Make environments and do what is asked, until nobody is left to ask."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches us too, but a run that stops takes its last steps
    faulthandler.enable()
    channel, memory = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    order = receive(channel)
    if order is None:
        return 0
    try:
        rows = _make(json.loads(order.body), memory, order.number)
        send(channel, Message(Response.DONE))
        while (order := receive(channel)) is not None:
            send(channel, _obey(order, rows))
        rows.close()
    except ConfigError as error:
        return _leave(channel, Message(Response.REFUSED, body=str(error).encode()))
    except Exception:
        return _leave(channel, Message(Response.FAILED, body=traceback.format_exc().encode()))
    return 0


def _make(settings: dict[str, Any], memory: int, first: int) -> SyncEnvs:
    if settings["die_with_parent"]:
        die_with_parent()
    arrays = lay_out(settings["layout"], mmap.mmap(memory, 0))
    os.close(memory)
    id = settings["id"]
    try:
        return SyncEnvs(id, settings["options"], SharedArrays(**_every(arrays, first, settings["workers"])))
    except gymnasium.error.UnregisteredEnv as error:
        raise ConfigError(
            f"{id} is registered in the process that trains, but not in its workers, which are a Python of their own.",
            "Write the id with the module that registers it, as in my_module:Name-v0, or use --task.num-workers 0.",
        ) from error


def _every(tree: Any, first: int, stride: int) -> Any:
    """Every stride-th row of the arrays of a tree; the same memory."""
    if isinstance(tree, dict):
        return {name: _every(part, first, stride) for name, part in tree.items()}
    return tree[first::stride]


def _obey(order: Message, rows: SyncEnvs) -> Message:
    match order.kind:
        case Request.STEP:
            rows.step()
        case Request.BEGIN:
            rows.begin(dict(unpack(order.body).tolist()))
        case Request.REPLAY:
            return Message(Response.DONE, len(rows.replay({order.number: unpack(order.body)})))
        case Request.TEXT:
            return Message(Response.DONE, body=rows.render_text(order.number).encode())
        case Request.FRAME:
            try:
                return Message(Response.DONE, body=pack(rows.render(order.number)))
            except ConfigError as error:  # no picture, and no harm done
                return Message(Response.REFUSED, body=str(error).encode())
    return Message(Response.DONE)


def _leave(channel: socket.socket, words: Message) -> int:
    with suppress(OSError):  # nobody may be left to hear it
        send(channel, words)
    return 1


if __name__ == "__main__":
    sys.exit(main())
