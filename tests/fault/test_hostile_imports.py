"""Models from strangers: whatever is wrong with them, `lockstep import` refuses them in a sentence, within its bounds.

SECURITY.md states the bounds and what these files took. To measure it again:

    PYTHONPATH=tests:tests/fault python -m test_hostile_imports
"""

import contextlib
import io
import os
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from hostile_models import MODELS

from lockstep.cli import main
from lockstep.config import ConfigError
from lockstep.tools.export.resource_limits import MEMORY, bounded
from processes import together

SLOW = ("3 GiB in 3 MB.zip", "a billion environments.safetensors")
"""Files that take seconds to write or to refuse."""


def imported(names, directory):
    """Import files in this process: for each the exit code, what was said, seconds and bytes it took, and its size."""
    found = {}
    os.chdir(directory)
    for name in names:
        path = Path(directory) / name
        path.write_bytes(MODELS[name]())
        recipe = [] if path.suffix == ".safetensors" else ["--recipe", "gym-ppo"]
        Path("/proc/self/clear_refs").write_text("5")  # forget the largest resident size so far
        held, since, said = status("VmRSS"), time.process_time(), io.StringIO()
        with contextlib.redirect_stderr(said):
            code = main(["import", str(path), "run.runs_dir=runs", *recipe])
        found[name] = [code, said.getvalue(), time.process_time() - since, status("VmHWM") - held, path.stat().st_size]
        path.unlink()
    return found


def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def check(names, directory):
    (found,) = together(imported, 1, names, str(directory))
    assert {name: said for name, (code, said, *_) in found.items() if code != 2 or len(said) > 2000} == {}
    over = {name: used for name, (_, _, _, used, size) in found.items() if used > MEMORY + 3 * size}
    assert over == {}
    assert list(directory.iterdir()) == []  # no code ran, and no run was made


def test_hostile_models_are_refused_within_the_memory_bound(tmp_path):
    check([name for name in MODELS if name not in SLOW], tmp_path)


@pytest.mark.slow
def test_large_hostile_models_are_refused_within_the_memory_bound(tmp_path):
    check(SLOW, tmp_path)


def bounds(path):
    """What `bounded` does with work that goes on, in a process of its own; and that the limits are gone afterwards."""
    said = []
    for work in (lambda: bytearray(2**29), lambda: torch.empty(2**29, dtype=torch.uint8), endless):
        try:
            with bounded(Path(path), memory=2**28, seconds=0.2):
                work()
        except ConfigError as error:
            said.append(str(error))
    bytearray(2**29)
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY
    return [said, limit, signal.getitimer(signal.ITIMER_PROF)[0]]


def endless():
    while True:
        with contextlib.suppress(Exception):  # as a reader that takes every error for a fault of the file
            sum(range(1000))


def test_an_import_that_takes_too_much_is_ended_in_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    ((said, unlimited, timer),) = together(bounds, 1, str(tmp_path / "file"))
    assert ["needs more than 0.2 GiB of memory" in sentence for sentence in said] == [True, True, False]
    assert "took more than 0 s of processor time" in said[2]
    assert unlimited
    assert timer == 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        for each in sys.argv[1:] or MODELS:
            code, sentence, seconds, memory, size = imported([each], scratch)[each]
            line = f"{each:45} {size / 1e6:8.2f} MB  exit {code}  {seconds:6.2f} s  {memory / 2**20:7.1f} MiB"
            sys.stdout.write(f"{line}  {sentence.splitlines()[0][:150] if sentence else ''}\n")
            sys.stdout.flush()
