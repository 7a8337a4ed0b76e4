"""A block for a bug report: what was found, without names, addresses or secrets of the person who reports."""

import os
import re
from collections.abc import Sequence

from lockstep.tools.doctor.finding import CheckResult
from lockstep.tools.doctor.redaction import SECRET_NAME, without_names

SHOWN = re.compile(
    r"(NCCL|GLOO|OMP|MKL|NUMBA|TORCH|PYTORCH|TORCHELASTIC|CUDA|MUJOCO)_[A-Z0-9_]+|LOCAL_RANK|RANK|WORLD_SIZE|WANDB_MODE"
)
"""The only variables whose values are shown; and of them none whose name sounds like a secret."""


def write_bug_report(lines: Sequence[CheckResult], processes: int) -> str:
    """Markdown, ready to paste."""
    shown = [f"{name}={value}" for name, value in shown_variables().items()]
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


def shown_variables() -> dict[str, str]:
    """Environment variables of the libraries that training uses, without those whose names sound secret."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if SHOWN.fullmatch(name) and not SECRET_NAME.search(name)
    }
