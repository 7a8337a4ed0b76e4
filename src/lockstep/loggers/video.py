"""Records a video of each new best policy in a separate process, while training continues."""

import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from lockstep.checkpoint.lineage import best_checkpoint
from lockstep.clock import TrainState
from lockstep.io.jsonl import CHECKPOINTS, VIDEO
from lockstep.launch.process_lifetime import ENV_PARENT_PID

MAX_MB, MAX_STEPS = 2.0, 600
"""Limits of a video: it is also written to the TensorBoard file, and its process shares a core with training."""
MAX_TIME_FRACTION = 0.1
"""Maximum fraction of time spent recording. At the start of a run, nearly every evaluation is the best so far."""
POLL_INTERVAL, FINAL_TIMEOUT = 0.2, 20.0
"""Seconds between polls, and how long the end of a run waits for the last video."""


class VideoRecorder:
    """Records the newest best policy, one video at a time. A failure is reported and does not end the run."""

    def __init__(self, run: Path, enabled: bool, report: Callable[[str], None], tensorboard: Callable[[], Any]) -> None:
        self.run, self._enabled, self._report, self._tensorboard = run, enabled, report, tensorboard
        self._partial = run / ".best.partial.gif"
        self._pending: int | None = None
        """Samples of the newest best policy that has not been recorded yet."""
        self._recording = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._started = self._next_start = self._last_poll = 0.0

    def evaluation(self, clock: TrainState) -> None:
        """Request a video of the new best policy once it is saved. It replaces a pending request."""
        if self._enabled and clock.evals_since_best == 0:
            self._pending = clock.samples

    def poll(self) -> None:
        """Publish a finished video, and start the next one when its checkpoint is published. Does not block."""
        if (self._process is None and self._pending is None) or time.monotonic() < self._last_poll + POLL_INTERVAL:
            return
        self._last_poll = now = time.monotonic()
        if self._process is not None and self._process.poll() is not None:
            self._next_start = self._started + (now - self._started) / MAX_TIME_FRACTION
            self._publish(self._process.returncode)
        if self._process is None and self._pending is not None and now >= self._next_start and self._published():
            self._start(self._pending)

    def finish(self, stop_requested: Callable[[], bool]) -> None:
        """At the end of a run, wait for the last video: at most FINAL_TIMEOUT seconds, or until a stop is requested."""
        if self._pending is not None and self._published():
            self._stop()  # the policy being recorded is no longer the best
        end = time.monotonic() + FINAL_TIMEOUT
        self._last_poll = self._next_start = 0.0
        self.poll()
        if self._process is not None:
            self._report(f"Recording the best policy to {self.run / VIDEO}, for {FINAL_TIMEOUT:.0f} s at most.")
        while self._process is not None and time.monotonic() < end and not stop_requested():
            time.sleep(0.1)
            self.poll()
        if self._process is not None:
            self._report(f"The video was not ready in time. To record it, run: lockstep play {self.run} --gif {VIDEO}")

    def close(self) -> None:
        """Stop recording and remove the partial file."""
        self._pending = None
        self._stop()
        with suppress(OSError):
            self._partial.unlink(missing_ok=True)

    def _published(self) -> bool:
        with suppress(OSError):
            best = best_checkpoint(self.run / CHECKPOINTS)
            return best is not None and best.samples == self._pending
        return False

    def _start(self, samples: int) -> None:
        self._pending, self._recording, self._started = None, samples, time.monotonic()
        # LOCKSTEP_ variables are meant for this process only. PYTHONPATH makes the same modules importable.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
        environment |= {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", ENV_PARENT_PID: str(os.getpid())}
        try:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115  the child process writes to it after this call
            self._process = subprocess.Popen(
                command(self.run, samples, self._partial),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C goes to the run only, which stops the recording itself
            )
            os.setpriority(os.PRIO_PROCESS, self._process.pid, 19)
        except ProcessLookupError:
            pass  # the process has already ended; the next poll handles that
        except OSError as error:
            self._disable(str(error))

    def _publish(self, code: int) -> None:
        """Publish a finished video, or report why there is none."""
        assert self._errors is not None
        self._errors.seek(0)
        output = self._errors.read().decode(errors="replace").strip()
        self._stop()
        if code == 0:
            try:
                self._partial.replace(self.run / VIDEO)
                _log_to_tensorboard(self._tensorboard(), self._recording, (self.run / VIDEO).read_bytes())
            except OSError as error:
                self._disable(str(error))
        elif self._pending is None:  # otherwise a better policy may have replaced its checkpoint
            status = f"its process was ended by signal {-code}" if code < 0 else f"its process ended with code {code}"
            _, prefix, message = output.rpartition("lockstep: ")  # skip what libraries wrote before our message
            self._disable(" ".join(message.splitlines()) if prefix else (output.splitlines() or [status])[-1])

    def _disable(self, reason: str) -> None:
        self._stop()
        self._enabled, self._pending = False, None
        self._report(
            f"No video of the best policy: {reason.rstrip('.')}. Training continues without videos (run.record_video)."
        )

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._errors is not None:
            self._errors.close()
        self._process = self._errors = None


def command(run: Path, samples: int, file: Path) -> list[str]:
    """Command line that records the policy of a checkpoint. It shows the validation part of the data, if there is one,
    so that a video made during training does not reveal the test part.
    """
    play = ["play", str(run), "--checkpoint", str(samples), "--gif", str(file), "--split", "validation"]
    return [sys.executable, "-P", "-m", "lockstep", *play, "--max-mb", str(MAX_MB), "--max-steps", str(MAX_STEPS)]


def _log_to_tensorboard(writer: Any, samples: int, gif: bytes) -> None:
    """Write an animated GIF to TensorBoard's images without re-encoding it."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    if writer is not None:
        width, height = struct.unpack_from("<HH", gif, 6)
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=gif)
        writer.file_writer.add_summary(Summary(value=[Summary.Value(tag="best", image=image)]), samples)
