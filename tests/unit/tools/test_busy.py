"""Warning before a measurement on a busy machine."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from lockstep.tools.bench import busy


@pytest.mark.parametrize(("load", "lines"), [(busy.BUSY_FRACTION - 0.01, 0), (busy.BUSY_FRACTION + 0.01, 1)])
def test_warn_if_busy_prints_one_line_above_threshold(monkeypatch, capsys, load, lines):
    monkeypatch.setattr(busy, "load_of_others", lambda: load)
    busy.warn_if_busy()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == lines
    assert all(f"{load:.0%} of the CPU" in line and len(line) <= 80 for line in printed.err.splitlines())


def test_load_of_others_counts_only_cores_of_this_process(monkeypatch):
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval, percpu: [100.0, 20.0, 60.0, 100.0])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2}, raising=False)
    monkeypatch.setattr(busy, "_own_seconds", lambda: 5.0)
    assert busy.load_of_others() == pytest.approx(0.4)


def test_load_of_others_excludes_this_process_and_its_children(monkeypatch):
    clock, own = iter([10.0, 12.0]), iter([5.0, 6.0])  # half a core in two seconds
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval, percpu: [50.0, 50.0])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(busy.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(busy, "_own_seconds", lambda: next(own))
    assert busy.load_of_others() == pytest.approx(0.25)


def test_own_seconds_count_children():
    before = busy._own_seconds()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            process = psutil.Process(child.pid)
            while sum(process.cpu_times()[:2]) < 0.5:
                time.sleep(0.01)
            assert busy._own_seconds() - before >= 0.5
        finally:
            child.kill()
