"""Power cuts on ext4: a disk image taken before every file operation has all checkpoints that were reported as saved.

The run writes to ext4 on a loop device. `commit=300` disables timed journal commits, so that the device has only what
was synced. The image is the file behind the device. It does not contain the page cache of the file system, which a
power cut loses. Every distinct image is mounted, which replays its journal, and checked.

The tests need root and loop devices. LOCKSTEP_SKIP_MOUNT=1 skips them.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from run_helpers import SAMPLES, errors, trial, trial_that_finishes_each_save

from helpers.multiprocess import outcomes
from helpers.tiny_recipes import hash_of
from lockstep.checkpoint import manager
from lockstep.checkpoint.lineage import find, list_checkpoints
from lockstep.io.jsonl import read_jsonl

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SETTINGS = {"run.eval_every": None, "run.keep_last": 2, "run.log_every": SAMPLES}
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link"}
RUNS = Path("deep") / "runs"
"""Path of the runs directory on the disk; the run creates it."""


@contextmanager
def mounted(image, place):
    place.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-o", "loop,commit=300", image, place], capture_output=True, text=True, check=False)
    assert not done.returncode, f"cannot mount an image ({done.stderr.strip()}): set LOCKSTEP_SKIP_MOUNT=1 to skip"
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


class Camera:
    """Copies the disk image before each file operation, with the newest checkpoint reported as saved."""

    def __init__(self, image, mount, album):
        self.image, self.mount, self.album = Path(image), str(mount), Path(album)
        self.saved, self.shots, self.busy, self.last = "", 0, False, ""

    def shoot(self):
        if self.busy:
            return
        self.busy = True
        try:
            content = self.image.read_bytes()
            digest = f"{hashlib.sha256(content).hexdigest()}-{self.saved}"
            self.shots += 1
            if digest != self.last:
                self.last = digest
                path = self.album / f"{self.shots:05d}.image"
                subprocess.run(["cp", "--sparse=always", self.image, path], check=True)
                path.with_suffix(".json").write_text(json.dumps({"saved": self.saved}))
        finally:
            self.busy = False

    def audit(self, event, arguments):
        named = event in EVENTS and isinstance(arguments[0], str | os.PathLike)
        if named and not self.busy and os.fspath(arguments[0]).startswith(self.mount):
            self.shoot()


def photographed(image, mount, album):
    """Train on the disk with an image before every operation; return the number of operations."""
    camera = Camera(image, mount, album)
    fsync, publish = os.fsync, manager.publish

    def watched_fsync(descriptor):
        camera.shoot()
        fsync(descriptor)

    def watched_publish(fence, partial, name):
        publish(fence, partial, name)
        camera.saved = str(name)

    os.fsync, manager.publish = watched_fsync, watched_publish
    sys.addaudithook(camera.audit)
    trial_that_finishes_each_save(str(Path(mount) / RUNS), "run", SETTINGS, False)
    camera.shoot()
    return camera.shots


@pytest.fixture
def disk(tmp_path):
    if os.environ.get("LOCKSTEP_SKIP_MOUNT") == "1":
        pytest.skip("LOCKSTEP_SKIP_MOUNT=1")
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(16 * 2**20)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-J", "size=4", "-E", "lazy_itable_init=0", image], check=True)
    return image


def test_power_cut_at_any_operation_keeps_saved_checkpoints_and_logs(disk, tmp_path):
    assert not errors(outcomes(trial, 1, str(tmp_path), "whole", SETTINGS, False))
    wanted, album, seen = hash_of(tmp_path / "whole"), tmp_path / "album", {}
    album.mkdir()
    with mounted(disk, tmp_path / "disk") as mount:
        (ended,) = outcomes(photographed, 1, str(disk), str(mount), str(album))
        assert not ended.error
    images = sorted(album.glob("*.image"))
    assert len(images) > 20
    for number, image in enumerate(images):
        saved = json.loads(image.with_suffix(".json").read_text())["saved"]
        with mounted(image, tmp_path / "after") as after:
            run = after / RUNS / "run"
            if not saved and not (run / "checkpoints").is_dir():
                continue
            name, notes = find(run / "checkpoints")
            assert not notes, f"image {number}: {notes}"
            assert (str(name) if name else "") >= saved, f"image {number}: {saved} was reported as saved"
            if name is None:
                continue
            lines = [line["samples"] for line in read_jsonl(run / "metrics.jsonl")]
            assert lines[: name.samples // SAMPLES] == list(range(SAMPLES, name.samples + 1, SAMPLES)), (
                f"image {number}"
            )
            digests = {line["samples"] for line in read_jsonl(run / "digests.jsonl")}
            assert set(range(0, name.samples + 1, SAMPLES)) <= digests, f"image {number}"
            state = (str(name), tuple(map(str, list_checkpoints(run / "checkpoints"))))
            if state not in seen:  # resume once from each set of checkpoints
                seen[state] = number
                shutil.copytree(after / RUNS, tmp_path / f"resumed-{number}")
    for number in seen.values():
        place = tmp_path / f"resumed-{number}"
        assert not errors(outcomes(trial, 1, str(place), "run", SETTINGS, True)), f"image {number}"
        assert hash_of(place / "run") == wanted, f"image {number}"
    assert len(seen) >= 4
    sys.stdout.write(f"{ended.value} operations, {len(images)} distinct images, {len(seen)} resumed\n")
