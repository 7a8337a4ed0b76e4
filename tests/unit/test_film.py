"""The film of the best policy: made beside the run, shown in TensorBoard, and never in the way."""

import os
import sys
import time

import psutil
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from claims import claim
from lockstep.checkpoint.naming import CheckpointName
from lockstep.clock import TrainState
from lockstep.launch.process_lifetime import ENV_PARENT_PID
from lockstep.loggers import video as films
from lockstep.loggers.video import VideoRecorder
from lockstep.train import train
from tiny import ITERATION, hash_of, tiny

SECONDS = 60.0
"""How long a test waits for what should take a moment."""
FAKE = "import sys; open(sys.argv[1], 'wb').write(b'GIF89a' + (int(sys.argv[2])).to_bytes(2, 'little') * 2)"
"""Stands for a film: its size tells of which policy it is."""


class Watched:
    """A film in a directory with checkpoints, made by a script in place of the real thing."""

    def __init__(self, path, monkeypatch, script):
        self.path, self.checkpoints, self.notes, self.shown = path, path / "checkpoints", [], []
        self.checkpoints.mkdir()
        claim(self.checkpoints, None)
        monkeypatch.setattr(films, "LOOK", 0.0)
        monkeypatch.setattr(films, "SHARE", 1.0)
        monkeypatch.setattr(films, "command", self.command)
        monkeypatch.setattr(films, "_put_on_board", lambda _, samples, gif: self.shown.append((samples, gif[6])))
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
    """Those that film; other tests have started other processes."""
    alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if ENV_PARENT_PID in child.environ()]


def test_a_new_best_of_a_run_leaves_a_film_there_and_in_tensorboard(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(films, "LAST", SECONDS)  # the machine may be busy
    settings = {"total_samples": 2 * ITERATION, "eval_every": 2 * ITERATION, "eval_episodes": 8, "reduction": "exact"}
    result = train(tiny(tmp_path, record_video=True, **settings))
    assert "Filming the best policy" in capsys.readouterr().out
    with Image.open(result.path / "best.gif") as film:
        assert film.format == "GIF"
        frames = film.n_frames
    board = EventAccumulator(str(result.path / "tensorboard"), size_guidance={"images": 0}).Reload()
    (image,) = board.Images("best")
    assert (image.step, image.width, image.height) == (2 * ITERATION, 120, 120)
    assert image.encoded_image_string == (result.path / "best.gif").read_bytes()
    assert image.encoded_image_string.startswith(b"GIF89a")
    assert frames > 1
    assert not (result.path / ".best.partial.gif").exists()
    without = train(tiny(tmp_path, "without", **settings))
    assert hash_of(result.path) == hash_of(without.path)
    assert not (without.path / "best.gif").exists()


def test_a_film_begins_when_its_checkpoint_is_there(watched):
    run = watched()
    run.evaluate(8, published=False)
    for _ in range(3):
        run.film.poll()
    assert run.begun == []
    run.evaluate(8)
    run.look_until(lambda: run.shown)
    assert run.shown == [(8, 8)]
    assert (run.path / "best.gif").read_bytes()[6] == 8


def test_only_a_new_best_is_filmed(watched):
    run = watched()
    run.evaluate(8, best=False)
    run.film.poll()
    assert run.begun == []


def test_one_film_at_a_time_and_the_newest_best_is_next(watched, tmp_path):
    run = watched(f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n{FAKE}")
    for samples in (8, 16, 24):
        run.evaluate(samples)
        run.film.poll()
    assert run.begun == [8]
    assert len(children()) == 1
    (tmp_path / "go").touch()
    run.look_until(lambda: len(run.shown) == 2)
    assert run.shown == [(8, 8), (24, 24)]


def test_films_take_a_small_part_of_the_time_and_the_last_is_made_all_the_same(watched, monkeypatch):
    run = watched()
    monkeypatch.setattr(films, "SHARE", 1e-6)
    run.evaluate(8)
    run.look_until(lambda: run.shown)
    run.evaluate(16)
    for _ in range(3):
        run.film.poll()
    assert run.begun == [8]
    run.film.finish(lambda: False)
    assert run.shown == [(8, 8), (16, 16)]


def test_a_film_works_beside_the_run_for_the_lowest_pay(watched):
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
        ("", "best.partial.gif"),  # it says that all is well, and there is nothing
    ],
)
def test_what_cannot_be_filmed_is_said_once(watched, script, why):
    run = watched(script)
    run.evaluate(8)
    run.look_until(lambda: run.notes)
    run.evaluate(16)
    run.film.poll()
    run.film.finish(lambda: False)
    assert run.begun == [8]
    (note,) = run.notes
    assert why in note
    assert "Training goes on" in note


def test_a_film_that_lost_its_checkpoint_to_a_better_one_is_not_mourned(watched):
    run = watched("import sys; sys.exit(1) if sys.argv[2] == '8' else 0\n" + FAKE)
    run.evaluate(8)
    run.film.poll()
    run.evaluate(16)
    run.look_until(lambda: run.shown)
    assert run.shown == [(16, 16)]
    assert run.notes == []


def test_the_end_of_a_run_waits_for_the_film_of_its_last_best(watched):
    run = watched(f"import sys, time; time.sleep(600 if sys.argv[2] == '8' else 0)\n{FAKE}")
    run.evaluate(8)
    run.film.poll()
    run.evaluate(16)
    run.film.finish(lambda: False)
    assert run.shown == [(16, 16)]
    assert len(run.notes) == 1


@pytest.mark.parametrize("hurried", [False, True])
def test_the_end_of_a_run_waits_no_longer_than_it_says(watched, monkeypatch, hurried):
    monkeypatch.setattr(films, "LAST", SECONDS if hurried else 0.2)
    run = watched("import time; time.sleep(600)")
    run.evaluate(8)
    began = time.monotonic()
    run.film.finish(lambda: hurried)
    assert time.monotonic() - began < SECONDS
    assert "was not ready in time" in run.notes[-1]
    run.film.close()
    assert not children()


def test_a_run_without_a_film_starts_no_process(watched):
    run = watched()
    run.film = VideoRecorder(run.path, False, run.notes.append, lambda: None)
    run.evaluate(8)
    run.film.poll()
    run.film.finish(lambda: False)
    assert (run.begun, run.notes, os.listdir(run.path)) == ([], [], ["checkpoints"])
