"""A real Python 3.7 with numpy, the version of the competition platform, for tests that run submissions."""

import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

VARIABLE = "LOCKSTEP_PYTHON37"
"""Environment variable with the path of a Python 3.7."""


def python37() -> str:
    """Return the path of a Python 3.7 with numpy. Skip the test, with the reason, if there is none."""
    found, reason = _find()
    if not found:
        pytest.skip(reason)
    return found


@cache
def _find() -> tuple[str, str]:
    candidates = [os.environ[VARIABLE]] if VARIABLE in os.environ else []
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates += [str(path) for path in sorted(pyenv.glob("versions/3.7.*/bin/python"))]
    for candidate in candidates:
        if _run(candidate, "-c", "import sys; assert sys.version_info[:2] == (3, 7)"):
            if _run(candidate, "-c", "import numpy"):
                return candidate, ""
            return _with_numpy(candidate)
    return "", f"no Python 3.7: set {VARIABLE} to one, or install it with pyenv"


def _with_numpy(python: str) -> tuple[str, str]:
    """Return the interpreter of a virtual environment with numpy, made once and kept in the temporary directory."""
    directory = Path(tempfile.gettempdir()) / f"lockstep-python37-{os.getuid()}"
    interpreter = str(directory / "bin" / "python")
    if not _run(interpreter, "-c", "import numpy"):
        installed = _run(python, "-m", "venv", "--clear", str(directory)) and _run(
            interpreter, "-m", "pip", "install", "--quiet", "numpy"
        )
        if not installed:
            return "", f"numpy cannot be installed for {python}: no connection to PyPI?"
    return interpreter, ""


def _run(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=300, check=False).returncode == 0
    except OSError:
        return False
