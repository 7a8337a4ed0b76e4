"""Text block for a bug report: the check results, without the user's names, addresses or secrets."""

import os
import re
from collections.abc import Sequence

from lockstep.tools.doctor.finding import CheckResult
from lockstep.tools.doctor.redaction import SECRET_NAME, without_names

SHOWN_VARIABLES = re.compile(
    r"(NCCL|GLOO|OMP|MKL|NUMBA|TORCH|PYTORCH|TORCHELASTIC|CUDA|MUJOCO)_[A-Z0-9_]+|LOCAL_RANK|RANK|WORLD_SIZE|WANDB_MODE"
)
"""Environment variables whose values may be shown. Those whose names match `SECRET_NAME` are not."""


def write_bug_report(results: Sequence[CheckResult], processes: int) -> str:
    """Return the check results and environment variables as a Markdown block."""
    lines = [f"{result.level:8} {result.subject:10} {result.message}" for result in results]
    variables = [f"{name}={value}" for name, value in shown_variables().items()] or ["no variables set"]
    text = ["```", f"lockstep doctor --procs {processes}", *lines, "", *variables, "```", ""]
    return without_names("\n".join(text))


def shown_variables() -> dict[str, str]:
    """Return environment variables of the libraries used in training, except those whose names suggest a secret."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if SHOWN_VARIABLES.fullmatch(name) and not SECRET_NAME.search(name)
    }
