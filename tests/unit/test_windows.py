"""Refusal on Windows, in a process without what Windows does not have."""

import subprocess
import sys

import pytest

AS_ON_WINDOWS = """
import signal, sys
sys.platform = "win32"
del signal.SIGUSR1, signal.pthread_sigmask
sys.modules["fcntl"] = None  # importing it fails
"""


@pytest.mark.parametrize(
    "work",
    [
        "from lockstep.cli import main; sys.exit(main(['doctor']))",
        "from lockstep.cli import main; sys.exit(main(['train', 'snake-ppo', '--smoke']))",
        "import lockstep; lockstep.train",
    ],
)
def test_windows_is_refused_and_wsl_is_named(work):
    result = subprocess.run([sys.executable, "-c", AS_ON_WINDOWS + work], capture_output=True, text=True, timeout=120)
    assert result.returncode != 0
    assert "Lockstep does not run on Windows" in result.stderr
    assert "wsl --install" in result.stderr
    assert "AttributeError" not in result.stderr
