"""Untrusted models: `lockstep import` refuses invalid files with a message, within its resource limits.

SECURITY.md states the limits and the measured usage of these files. To measure again:

    PYTHONPATH=tests:tests/fault python -m test_untrusted_imports
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
from untrusted_models import MODELS

from helpers.multiprocess import together
from lockstep.cli import main
from lockstep.config import ConfigError
from lockstep.tools.export.resource_limits import MEMORY, bounded

SLOW = ("3 GiB in 3 MB.zip", "a billion environments.safetensors")
"""Files that take seconds to write or to reject."""


def imported(names, directory):
    """Import files in this process; return exit code, stderr, CPU seconds, memory and file size of each."""
    found = {}
    os.chdir(directory)
    for name in names:
        path = Path(directory) / name
        path.write_bytes(MODELS[name]())
        recipe = [] if path.suffix == ".safetensors" else ["--recipe", "gym-ppo"]
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak resident size
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
    assert list(directory.iterdir()) == []  # no code ran, and no run was created


def test_hostile_models_are_refused_within_the_memory_bound(tmp_path):
    check([name for name in MODELS if name not in SLOW], tmp_path)


@pytest.mark.slow
def test_large_hostile_models_are_refused_within_the_memory_bound(tmp_path):
    check(SLOW, tmp_path)


def bounds(path):
    """In a separate process: the errors of `bounded` for unlimited work, and the limits after it."""
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
        with contextlib.suppress(Exception):  # like a reader that treats every error as an invalid file
            sum(range(1000))


def test_bounded_ends_work_over_the_limit_with_a_message(tmp_path):
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
