"""The live screen in a real terminal: a run in tmux, narrow and wide, on one and two processes."""

import shlex
import shutil
import subprocess
import sys
import time

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
]


def tmux(*words):
    return subprocess.run(["tmux", "-L", "lockstep-test", *words], capture_output=True, text=True, timeout=30).stdout


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("columns", [80, 120])
def test_live_screen_redraws_in_place_and_truncates_nothing(tmp_path, columns, processes):
    name = "a-run-with-a-name-that-is-as-long-as-people-make-them"
    train = [sys.executable, "-m", "lockstep", "train", "snake-ppo", "--smoke", "--procs", str(processes)]
    train += ["--run.total-samples", "40960", "--run.runs-dir", str(tmp_path), "--run.name", name]
    line = f"unset COLUMNS LINES; {shlex.join(train)}; echo ended with $?; sleep 600"
    tmux("new-session", "-d", "-s", "screen", "-x", str(columns), "-y", "60", "-e", "OMP_NUM_THREADS=1", line)
    try:
        seen, deadline = "", time.monotonic() + 120
        while "ended with" not in seen and time.monotonic() < deadline:
            time.sleep(0.5)
            seen = tmux("capture-pane", "-p", "-S", "-200", "-t", "screen")
            assert seen.count("╭─ snake-ppo") <= 1, seen  # the panel is redrawn in place
    finally:
        tmux("kill-server")
    assert "ended with 0" in seen
    lines = seen.splitlines()
    (top,) = (row for row, text in enumerate(lines) if text.startswith("╭"))
    (bottom,) = (row for row, text in enumerate(lines) if text.startswith("╰"))
    panel = lines[top + 1 : bottom]
    assert all(len(text) == columns and text[0] == text[-1] == "│" for text in panel), seen
    assert "…" not in seen
    inside = "".join(text.strip("│ ") for text in panel)
    for part in (name, "steps/s", "so far", "env ", "other ", "cores"):
        assert part in inside, seen
    assert ("in sync at update" in inside) == (processes == 2)
    assert f"lockstep play {tmp_path / name}" in "".join(lines[bottom + 1 :]), seen
