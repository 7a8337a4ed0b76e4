"""A block for a bug report: what was found, without names, addresses or secrets of the person who reports."""

import getpass
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path

from lockstep.doctor.line import Line

SHOWN = re.compile(
    r"(NCCL|GLOO|OMP|MKL|NUMBA|TORCH|PYTORCH|TORCHELASTIC|CUDA|MUJOCO)_[A-Z0-9_]+|LOCAL_RANK|RANK|WORLD_SIZE|WANDB_MODE"
)
"""The only variables whose values are shown; and of them none whose name sounds like a secret."""
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH")
_ADDRESS = re.compile(r"\b\d{1,3}(\.\d{1,3}){3}\b")


def bundle(lines: Sequence[Line], processes: int) -> str:
    """Markdown, ready to paste."""
    shown = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if SHOWN.fullmatch(name) and not _SECRET.search(name)
    ]
    text = "\n".join(
        [
            "```",
            f"lockstep doctor --procs {processes}",
            *(f"{line.level:8} {line.about:10} {line.says}" for line in lines),
            "",
            *(shown or ["no variables set"]),
            "```",
            "",
        ]
    )
    return without_names(text)


def without_names(text: str) -> str:
    """The text with the home directory, the user's and the host's name, and addresses other than loopback taken out."""
    for name, stand_in in ((str(Path.home()), "~"), (socket.gethostname(), "HOST"), (_user(), "USER")):
        if len(name) > 1:
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", stand_in, text)
    return _ADDRESS.sub(lambda found: found[0] if found[0].startswith("127.") else "ADDRESS", text)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""
