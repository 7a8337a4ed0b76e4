"""A film of each new best policy, made beside the run by a process of its own that training never waits for."""

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
from lockstep.io.jsonl import CHECKPOINTS, FILM
from lockstep.launch.process_lifetime import ENV_PARENT_PID

MEGABYTES, STEPS = 2.0, 600
"""What a film may have: it also goes into TensorBoard's file, and plays on one core that is not its own."""
SHARE = 0.1
"""Part of the time in which there is somebody filming, at most: at first, nearly every evaluation is the best."""
LOOK, LAST = 0.2, 20.0
"""Seconds between two looks, and how long the end of a run waits for the last film."""


class VideoRecorder:
    """Films the newest best policy, one at a time. Nothing that goes wrong here is more than a note."""

    def __init__(self, run: Path, on: bool, tell: Callable[[str], None], board: Callable[[], Any]) -> None:
        self.run, self._on, self._tell, self._board = run, on, tell, board
        self._partial = run / ".best.partial.gif"
        self._wanted: int | None = None
        """Samples of the newest best that has not been filmed yet."""
        self._filming = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._begun = self._rests_until = self._looked = 0.0

    def evaluation(self, clock: TrainState) -> None:
        """Film the policy that is now the best, as soon as it is saved; one that still waits goes without."""
        if self._on and clock.evals_since_best == 0:
            self._wanted = clock.samples

    def poll(self) -> None:
        """See whether a film is ready, and begin the next when its checkpoint is there; takes no time."""
        if (self._process is None and self._wanted is None) or time.monotonic() < self._looked + LOOK:
            return
        self._looked = now = time.monotonic()
        if self._process is not None and self._process.poll() is not None:
            self._rests_until = self._begun + (now - self._begun) / SHARE
            self._publish(self._process.returncode)
        if self._process is None and self._wanted is not None and now >= self._rests_until and self._published():
            self._begin(self._wanted)

    def finish(self, hurried: Callable[[], bool]) -> None:
        """At the end of a run, wait a little for the last film, unless somebody is in a hurry."""
        if self._wanted is not None and self._published():
            self._stop()  # of a policy that is no longer the best
        end = time.monotonic() + LAST
        self._looked = self._rests_until = 0.0
        self.poll()
        if self._process is not None:
            self._tell(f"Filming the best policy into {self.run / FILM}, for {LAST:.0f} s at most.")
        while self._process is not None and time.monotonic() < end and not hurried():
            time.sleep(0.1)
            self.poll()
        if self._process is not None:
            self._tell(f"The film was not ready in time: lockstep play {self.run} --gif {FILM} makes it.")

    def close(self) -> None:
        """Leave nothing behind."""
        self._wanted = None
        self._stop()
        with suppress(OSError):
            self._partial.unlink(missing_ok=True)

    def _published(self) -> bool:
        with suppress(OSError):
            best = best_checkpoint(self.run / CHECKPOINTS)
            return best is not None and best.samples == self._wanted
        return False

    def _begin(self, samples: int) -> None:
        self._wanted, self._filming, self._begun = None, samples, time.monotonic()
        # What our launcher and proofs say is meant for this process; what can be imported here can be there.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
        environment |= {"PYTHONPATH": os.pathsep.join(place or os.getcwd() for place in sys.path)}
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", ENV_PARENT_PID: str(os.getpid())}
        try:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115  a process writes there for longer than this call
            self._process = subprocess.Popen(
                command(self.run, samples, self._partial),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C is for the run, which ends its film itself
            )
            os.setpriority(os.PRIO_PROCESS, self._process.pid, 19)
        except ProcessLookupError:
            pass  # it has ended already, as the next look finds
        except OSError as error:
            self._give_up(str(error))

    def _publish(self, code: int) -> None:
        """Show a film that has ended, or say why there is none."""
        assert self._errors is not None
        self._errors.seek(0)
        words = self._errors.read().decode(errors="replace").strip()
        self._stop()
        if code == 0:
            try:
                self._partial.replace(self.run / FILM)
                _put_on_board(self._board(), self._filming, (self.run / FILM).read_bytes())
            except OSError as error:
                self._give_up(str(error))
        elif self._wanted is None:  # else its checkpoint may have been deleted for that of a better one
            ended = f"its process was ended by signal {-code}" if code < 0 else f"its process ended with code {code}"
            _, ours, said = words.rpartition("lockstep: ")  # whatever libraries wrote before it is noise
            self._give_up(" ".join(said.splitlines()) if ours else (words.splitlines() or [ended])[-1])

    def _give_up(self, why: str) -> None:
        self._stop()
        self._on, self._wanted = False, None
        self._tell(
            f"There is no film of the best policy: {why.rstrip('.')}. Training goes on without (run.record_video)."
        )

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._errors is not None:
            self._errors.close()
        self._process = self._errors = None


def command(run: Path, samples: int, file: Path) -> list[str]:
    """What films the policy of a checkpoint."""
    words = ["play", str(run), "--checkpoint", str(samples), "--gif", str(file)]
    return [sys.executable, "-P", "-m", "lockstep", *words, "--max-mb", str(MEGABYTES), "--max-steps", str(STEPS)]


def _put_on_board(board: Any, samples: int, gif: bytes) -> None:
    """Put an animated picture among TensorBoard's images, as it is."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    if board is not None:
        width, height = struct.unpack_from("<HH", gif, 6)
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=gif)
        board.file_writer.add_summary(Summary(value=[Summary.Value(tag="best", image=image)]), samples)
