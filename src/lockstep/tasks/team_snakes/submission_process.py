"""Submissions of other authors as players: each plays in a process of its own (`submission_server.py`).

A submission is a Python file in the form of the competition platform, with the function
`my_controller(observation, action_space, is_act_continuous)`. It is never imported here. It may be slow, print, fail or
never answer: every response has a time limit, and errors name the file, the game and the step.
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from lockstep.config import ConfigError

START_SECONDS = 60.0
"""Time limit for the start of a game: it executes the file, which may import large packages."""
SERVER = Path(__file__).with_name("submission_server.py")
DROPPED_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP")
"""Environment variables that would make our modules importable, or that belong to another Python."""


class SubmissionError(ConfigError):
    """A submission failed, gave no valid action or took too long."""


class SubmissionProcess:
    """Process that plays the games of one submission, one after the other."""

    def __init__(self, file: Path, timeout: float, python: str = sys.executable) -> None:
        """`timeout`: seconds per decision. `python`: the interpreter, version 3.7 or newer."""
        if not file.is_file():
            raise ConfigError(f"there is no file {file}.", "Give the path of a submission: a Python file.")
        self.file, self.timeout, self.game, self.step = file.resolve(), timeout, "", 0
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the process
        environment = {name: value for name, value in os.environ.items() if name not in DROPPED_VARIABLES}
        # One thread and a fixed hash seed: equal decisions in every process and after every restart.
        environment |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        # The signal is sent when the thread that started a process ends, so only the main thread requests it.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        self._process = subprocess.Popen(
            [python, str(SERVER), str(self.file), str(parent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=self.file.parent,
            env=environment,
            start_new_session=True,
            bufsize=0,
        )
        self._deadline, self._limit, self._playing = 0.0, 0.0, False
        self._close = weakref.finalize(self, _end_process, self._process, self._errors)

    def start_game(self, seed: int, game: str) -> None:
        """Execute the file again, with this seed for its random numbers. `game` is its name for messages."""
        if self._playing:
            self._request({"end": True}, self.timeout)
            self._response()
        self.game, self.step, self._playing = game, 0, True
        self._request({"seed": seed}, START_SECONDS)
        self._response()

    def ask(self, observation: dict[Any, Any], step: int) -> None:
        """Send the observation of one snake."""
        self.step = step
        self._request({"observation": observation}, self.timeout)

    def direction(self) -> int:
        """Return the direction, 0 to 3, for the observation that was sent."""
        action = self._response().get("action")
        choices = action[0] if isinstance(action, list) and action else []
        if len(choices) == 4 and 1 in choices:
            return int(choices.index(1))  # as the platform reads it
        raise SubmissionError(
            f"{self._place} answered {str(action)[:100]}.", "Return a list with one list of three 0 and one 1."
        )

    def close(self) -> None:
        self._close()

    @property
    def _place(self) -> str:
        return f"{self.file}, {self.game}, step {self.step},"

    def _request(self, request: dict[str, Any], limit: float) -> None:
        self._deadline, self._limit = time.monotonic() + limit, limit
        try:
            _pipe(self._process.stdin).write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            self._fail()

    def _response(self) -> dict[str, Any]:
        """Return the response to the last request. Raise SubmissionError if the process ends or is late."""
        pipe, data = _pipe(self._process.stdout).fileno(), b""
        while not data.endswith(b"\n"):
            seconds = self._deadline - time.monotonic()
            if seconds <= 0 or not select.select([pipe], [], [], seconds)[0]:
                self.close()
                raise SubmissionError(
                    f"{self._place} gave no response within {self._limit:g} s.",
                    "Make it faster, or allow more time: --submission-timeout of eval, --task.submission-timeout.",
                )
            part = os.read(pipe, 1 << 16)
            if not part:
                self._fail()
            data += part
        response: dict[str, Any] = json.loads(data)
        return response

    def _fail(self) -> None:
        """Raise the error of a process that has ended."""
        code = self._process.wait()
        output = os.pread(self._errors.fileno(), 1 << 20, 0).decode(errors="replace")
        self.close()
        killed_by = -code if code < 0 else code - 128 if code > 128 else 0
        cause = f"was killed by {signal.Signals(killed_by).name}" if killed_by else f"ended with exit code {code}"
        last = "\n".join(output.rstrip().splitlines()[-20:])
        raise SubmissionError(
            f"{self._place} {cause}." + (f" Its last output:\n{last}" if last else ""), "Fix the submission."
        )


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _end_process(process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
    """Kill the process and the games that it plays."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout, errors):
        _pipe(pipe).close()
