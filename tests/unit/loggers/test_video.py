"""Video of the best policy: recorded in a background process, added to TensorBoard, never blocking the run."""

import os
import sys
import time

import psutil
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from helpers.claims import claim
from helpers.tiny_recipes import ITERATION, hash_of, tiny
from lockstep.checkpoint.naming import CheckpointName
from lockstep.clock import TrainState
from lockstep.launch.process_lifetime import ENV_PARENT_PID
from lockstep.loggers import video as films
from lockstep.loggers.video import VideoRecorder
from lockstep.training_loop import train

SECONDS = 60.0
"""Timeout of waits that normally take a moment."""
FAKE = "import sys; open(sys.argv[1], 'wb').write(b'GIF89a' + (int(sys.argv[2])).to_bytes(2, 'little') * 2)"
"""A fake video whose size encodes the samples of its policy."""


class Watched:
    """A video recorder in a directory with checkpoints that runs a script instead of the real recording."""

    def __init__(self, path, monkeypatch, script):
        self.path, self.checkpoints, self.notes, self.shown = path, path / "checkpoints", [], []
        self.checkpoints.mkdir()
        claim(self.checkpoints, None)
        monkeypatch.setattr(films, "POLL_INTERVAL", 0.0)
        monkeypatch.setattr(films, "MAX_TIME_FRACTION", 1.0)
        monkeypatch.setattr(films, "command", self.command)
        monkeypatch.setattr(films, "_log_to_tensorboard", lambda _, samples, gif: self.shown.append((samples, gif[6])))
        self.script, self.begun = script, []
        self.film = VideoRecorder(path, True, self.notes.append, lambda: None)

    def command(self, run, samples, file):
        self.begun.append(samples)
        return [sys.executable, "-c", self.script, str(file), str(samples)]

    def evaluate(self, samples, best=True, published=True):
        self.film.evaluation(TrainState(total_samples=100, samples=samples, evals_since_best=0 if best else 1))
        if published:
            (self.checkpoints / str(CheckpointName(samples, 1))).mkdir()
            (self.checkpoints / "best").write_text(str(CheckpointName(samples, 1)))

    def look_until(self, condition):
        end = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < end
            self.film.poll()
            time.sleep(0.01)


@pytest.fixture
def watched(tmp_path, monkeypatch):
    made = []

    def make(script=FAKE):
        made.append(Watched(tmp_path, monkeypatch, script))
        return made[-1]

    yield make
    made[-1].film.close()


def children():
    """Return running recording processes; other tests may have started other processes."""
    alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if ENV_PARENT_PID in child.environ()]


def test_new_best_policy_writes_gif_and_tensorboard_image(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(films, "FINAL_TIMEOUT", SECONDS)  # the machine may be busy
    settings = {"total_samples": 2 * ITERATION, "eval_every": 2 * ITERATION, "eval_episodes": 8, "reduction": "exact"}
    result = train(tiny(tmp_path, record_video=True, **settings))
    assert "Recording the best policy" in capsys.readouterr().out
    with Image.open(result.path / "best.gif") as film:
        assert film.format == "GIF"
        frames, (width, height) = film.n_frames, film.size
    assert height > width  # a square board and a caption below it
    board = EventAccumulator(str(result.path / "tensorboard"), size_guidance={"images": 0}).Reload()
    (image,) = board.Images("best")
    assert (image.step, image.width, image.height) == (2 * ITERATION, width, height)
    assert image.encoded_image_string == (result.path / "best.gif").read_bytes()
    assert image.encoded_image_string.startswith(b"GIF89a")
    assert frames > 1
    assert not (result.path / ".best.partial.gif").exists()
    without = train(tiny(tmp_path, "without", **settings))
    assert hash_of(result.path) == hash_of(without.path)
    assert not (without.path / "best.gif").exists()


def test_recording_starts_when_checkpoint_is_published(watched):
    run = watched()
    run.evaluate(8, published=False)
    for _ in range(3):
        run.film.poll()
    assert run.begun == []
    run.evaluate(8)
    run.look_until(lambda: run.shown)
    assert run.shown == [(8, 8)]
    assert (run.path / "best.gif").read_bytes()[6] == 8


def test_only_new_best_policy_is_recorded(watched):
    run = watched()
    run.evaluate(8, best=False)
    run.film.poll()
    assert run.begun == []


def test_one_recording_at_a_time_and_newest_best_is_next(watched, tmp_path):
    run = watched(f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n{FAKE}")
    for samples in (8, 16, 24):
        run.evaluate(samples)
        run.film.poll()
    assert run.begun == [8]
    assert len(children()) == 1
    (tmp_path / "go").touch()
    run.look_until(lambda: len(run.shown) == 2)
    assert run.shown == [(8, 8), (24, 24)]


def test_recording_time_is_limited_but_last_best_is_recorded(watched, monkeypatch):
    run = watched()
    monkeypatch.setattr(films, "MAX_TIME_FRACTION", 1e-6)
    run.evaluate(8)
    run.look_until(lambda: run.shown)
    run.evaluate(16)
    for _ in range(3):
        run.film.poll()
    assert run.begun == [8]
    run.film.finish(lambda: False)
    assert run.shown == [(8, 8), (16, 16)]


def test_recording_process_has_low_priority_and_no_gpu(watched):
    run = watched("import time; time.sleep(600)")
    run.evaluate(8)
    run.film.poll()
    (child,) = children()
    assert child.nice() == 19
    assert child.environ()["CUDA_VISIBLE_DEVICES"] == ""
    assert child.environ()["OMP_NUM_THREADS"] == "1"
    run.film.close()
    assert not children()


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (
            "import sys; sys.exit('noise\\nlockstep: this cannot be drawn.\\nWatch it as text.')",
            "this cannot be drawn. Watch it as text.",
        ),
        ("raise OSError('no such screen')", "OSError: no such screen"),
        ("import os; os.kill(os.getpid(), 11)", "ended by signal 11"),
        ("", "best.partial.gif"),  # exits with 0 but writes no file
    ],
)
def test_failed_recording_is_reported_once(watched, script, why):
    run = watched(script)
    run.evaluate(8)
    run.look_until(lambda: run.notes)
    run.evaluate(16)
    run.film.poll()
    run.film.finish(lambda: False)
    assert run.begun == [8]
    (note,) = run.notes
    assert why in note
    assert "Training continues" in note


def test_recording_of_deleted_checkpoint_fails_silently(watched):
    run = watched("import sys; sys.exit(1) if sys.argv[2] == '8' else 0\n" + FAKE)
    run.evaluate(8)
    run.film.poll()
    run.evaluate(16)
    run.look_until(lambda: run.shown)
    assert run.shown == [(16, 16)]
    assert run.notes == []


def test_finish_waits_for_video_of_last_best(watched):
    run = watched(f"import sys, time; time.sleep(600 if sys.argv[2] == '8' else 0)\n{FAKE}")
    run.evaluate(8)
    run.film.poll()
    run.evaluate(16)
    run.film.finish(lambda: False)
    assert run.shown == [(16, 16)]
    assert len(run.notes) == 1


@pytest.mark.parametrize("hurried", [False, True])
def test_finish_waits_at_most_the_given_time(watched, monkeypatch, hurried):
    monkeypatch.setattr(films, "FINAL_TIMEOUT", SECONDS if hurried else 0.2)
    run = watched("import time; time.sleep(600)")
    run.evaluate(8)
    began = time.monotonic()
    run.film.finish(lambda: hurried)
    assert time.monotonic() - began < SECONDS
    assert "was not ready in time" in run.notes[-1]
    run.film.close()
    assert not children()


def test_disabled_recorder_starts_no_process(watched):
    run = watched()
    run.film = VideoRecorder(run.path, False, run.notes.append, lambda: None)
    run.evaluate(8)
    run.film.poll()
    run.film.finish(lambda: False)
    assert (run.begun, run.notes, os.listdir(run.path)) == ([], [], ["checkpoints"])
